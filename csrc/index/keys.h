// A keyed hash of block keys, and a hash table from keys to ids.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace tiered_kv {

constexpr uint32_t kNone = UINT32_MAX;  // no id
constexpr size_t kMaxKeyBytes = 255;

// SipHash-1-3 with a random key per process, so that clients that choose block keys cannot cause
// collisions in a table.
class KeyHash {
 public:
  KeyHash();
  uint64_t operator()(std::string_view key) const;

 private:
  uint64_t first_;
  uint64_t second_;
};

// Ids by hash. Open addressing with linear probing; erasing leaves no tombstones.
class IdTable {
 public:
  explicit IdTable(size_t expected = 0);

  size_t size() const { return size_; }
  void prefetch(uint64_t hash) const { __builtin_prefetch(&cells_[home(uint32_t(hash))]); }

  // Returns the id with this hash for which is_it(id) is true; kNone if there is none.
  template <typename IsIt>
  uint32_t find(uint64_t hash, const IsIt& is_it) const {
    const size_t at = place(hash, is_it);
    return cells_[at].id;
  }

  void insert(uint64_t hash, uint32_t id);
  void erase(uint64_t hash, uint32_t id);

 private:
  struct Cell {
    uint32_t tag;  // half of the hash: determines the home cell and rejects most other keys
    uint32_t id;
  };

  size_t home(uint32_t tag) const { return tag & mask_; }

  // Returns the cell of the id, or the empty cell where the search ended.
  template <typename IsIt>
  size_t place(uint64_t hash, const IsIt& is_it) const {
    const auto tag = uint32_t(hash);
    size_t at = home(tag);
    while (cells_[at].id != kNone && !(cells_[at].tag == tag && is_it(cells_[at].id)))
      at = (at + 1) & mask_;
    return at;
  }
  void grow();

  std::vector<Cell> cells_;
  size_t mask_;
  size_t size_ = 0;
};

}  // namespace tiered_kv
