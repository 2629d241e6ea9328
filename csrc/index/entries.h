// The record of a slot in use, and the table that stores these records and their keys.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "index/keys.h"

namespace tiered_kv {

// An invariant of the index is violated, or a caller misused the index.
class InvariantError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

enum class State : uint8_t {
  kReserved,
  kCommitted,
  kDetached,
  kQuarantined,  // DurableIndex only: the slot is unused, but the disk still refers to it
  kRetired,      // DurableIndex only: the slot cannot be written
};

// The first logical time of a use. Earlier times are those of dead blocks, which no request is
// expected to ask for, so that they count as colder than all others.
constexpr uint64_t kFirstUse = uint64_t{1} << 62;

// Kept to 48 bytes, because an index can have ten million blocks.
struct Entry {
  int64_t slot = -1;
  uint64_t used = 0;  // logical time of the last use, or of the block's death; 0: none

  uint32_t before = kNone;        // predecessor in the chain, if it is present
  uint32_t first_behind = kNone;  // first successor
  uint32_t next = kNone;          // next among the blocks with, or awaiting, the same predecessor
  uint32_t prev = kNone;

  // Links of the eviction policy; while parked, links of the list of parked entries.
  uint32_t queue_next = kNone;  // LRU: index in the heap
  uint32_t queue_prev = kNone;
  uint32_t pins = 0;
  State state = State::kReserved;
  uint8_t key_size = 0;
  uint8_t uses = 0;
  bool is_queued : 1;
  bool is_in_main : 1;
  bool is_set_aside : 1;  // offered in a walk and not evicted
  bool is_parked : 1;     // a walk found it pinned; removed from the policy until it is unpinned
  bool is_awaiting : 1;   // its predecessor is missing
  bool is_sent : 1;       // a lower tier has received it

  Entry()
      : is_queued(false),
        is_in_main(false),
        is_set_aside(false),
        is_parked(false),
        is_awaiting(false),
        is_sent(false) {}

  bool is_dead() const { return used != 0 && used < kFirstUse; }
  bool is_leaf() const { return first_behind == kNone; }
  bool is_readable() const { return state == State::kCommitted; }
  bool is_visible() const { return state == State::kCommitted || state == State::kReserved; }
};

static_assert(sizeof(Entry) == 48);

// Entries by id, and their keys. Entries never move; the id of a dropped entry is reused. Keys are
// stored side by side, padded to the longest key of their chunk: usually all keys of an index have
// the same length, and a separate allocation per key would cost more than the key.
class EntryTable {
 public:
  Entry& operator[](uint32_t id) { return chunks_[id / kChunk].entries[id % kChunk]; }
  const Entry& operator[](uint32_t id) const { return chunks_[id / kChunk].entries[id % kChunk]; }

  // The view is valid until the next `add`.
  std::string_view key(uint32_t id) const {
    const Chunk& chunk = chunks_[id / kChunk];
    const size_t at = id % kChunk;
    return {chunk.keys.get() + at * chunk.width, chunk.entries[at].key_size};
  }

  // The key must have at most kMaxKeyBytes.
  uint32_t add(std::string_view key, int64_t slot) {
    if (free_.empty()) add_chunk(key.size());
    const uint32_t id = free_.back();
    Chunk& chunk = chunks_[id / kChunk];
    if (key.size() > chunk.width) widen(chunk, key.size());
    free_.pop_back();
    Entry& entry = (*this)[id];
    if (!key.empty())
      std::memcpy(chunk.keys.get() + id % kChunk * chunk.width, key.data(), key.size());
    entry.key_size = uint8_t(key.size());
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

  struct Chunk {
    std::unique_ptr<Entry[]> entries;
    std::unique_ptr<char[]> keys;
    size_t width = 0;
  };

  void add_chunk(size_t width) {
    const auto first = uint32_t(chunks_.size() * kChunk);
    free_.reserve(free_.size() + kChunk);
    chunks_.push_back({std::make_unique<Entry[]>(kChunk), nullptr, 0});
    for (uint32_t i = kChunk; i-- > 0;) free_.push_back(first + i);
    widen(chunks_.back(), width);
  }

  static void widen(Chunk& chunk, size_t width) {
    auto wider = std::make_unique<char[]>(kChunk * width);
    for (size_t at = 0; at < kChunk; ++at)
      if (chunk.entries[at].key_size != 0)
        std::memcpy(wider.get() + at * width, chunk.keys.get() + at * chunk.width,
                    chunk.entries[at].key_size);
    chunk.keys = std::move(wider);
    chunk.width = width;
  }

  std::vector<Chunk> chunks_;
  std::vector<uint32_t> free_;
};

}  // namespace tiered_kv
