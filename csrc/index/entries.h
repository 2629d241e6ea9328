// What an index knows of a slot in use, and where those records live.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "index/keys.h"

namespace tiered_kv {

// A rule of the index does not hold, or a caller broke one.
class InvariantError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

enum class State : uint8_t {
  kReserved,
  kCommitted,
  kDetached,
  kQuarantined,  // of a DurableIndex: nobody uses the slot, the disk still knows it
  kRetired,      // of a DurableIndex: the slot cannot be written
};

struct Entry {
  KeyBytes key;
  std::unique_ptr<KeyBytes> awaited;  // the block it follows, while that is not here
  int64_t slot = -1;
  uint64_t used = 0;  // time of last use

  uint32_t before = kNone;        // the block it follows, when that is here
  uint32_t first_behind = kNone;  // a block that follows this one
  uint32_t next = kNone;          // among those that follow, or await, the same block
  uint32_t prev = kNone;

  // Of the eviction policy; while parked, of the list of those that are.
  uint32_t queue_next = kNone;  // LRU: the place in its heap
  uint32_t queue_prev = kNone;
  uint32_t pins = 0;
  State state = State::kReserved;
  uint8_t uses = 0;
  bool is_queued = false;
  bool is_in_main = false;
  bool is_set_aside = false;  // offered in a walk and not taken
  bool is_parked = false;     // found pinned by a walk: unknown to the policy until unpinned

  bool is_leaf() const { return first_behind == kNone; }
  bool is_readable() const { return state == State::kCommitted; }
  bool is_visible() const { return state == State::kCommitted || state == State::kReserved; }
};

// Entries by id. They never move, and an id is used again when its entry was dropped.
class EntryTable {
 public:
  Entry& operator[](uint32_t id) { return chunks_[id / kChunk][id % kChunk]; }
  const Entry& operator[](uint32_t id) const { return chunks_[id / kChunk][id % kChunk]; }

  uint32_t add(std::string_view key, int64_t slot) {
    KeyBytes copy(key);
    if (free_.empty()) add_chunk();
    const uint32_t id = free_.back();
    free_.pop_back();
    Entry& entry = (*this)[id];
    entry.key = std::move(copy);
    entry.slot = slot;
    return id;
  }

  void drop(uint32_t id) {
    (*this)[id] = Entry();
    free_.push_back(id);
  }

  size_t size() const { return chunks_.size() * kChunk - free_.size(); }

  template <typename Look>
  void for_each(const Look& look) const {
    for (uint32_t id = 0; id < chunks_.size() * kChunk; ++id)
      if ((*this)[id].slot >= 0) look(id);
  }

 private:
  static constexpr uint32_t kChunk = 1024;

  void add_chunk() {
    const auto first = uint32_t(chunks_.size() * kChunk);
    chunks_.push_back(std::make_unique<Entry[]>(kChunk));
    for (uint32_t i = kChunk; i-- > 0;) free_.push_back(first + i);
  }

  std::vector<std::unique_ptr<Entry[]>> chunks_;
  std::vector<uint32_t> free_;
};

}  // namespace tiered_kv
