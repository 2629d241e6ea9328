// Ghosts: what a tier remembers of blocks that it has evicted, or that were dropped on their way.
//
// A ring of the last departures, a table from keys to places in the ring, and a Fenwick tree over
// the ring that sums the bytes of evicted blocks. A block that comes back leaves the ring. So the
// sum of what was evicted after a block, itself included, counts every block once: under LRU, it is
// how much larger the tier would have to be to still hold the block.
//
// Keys are recognised by a 64-bit hash. Not thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "index/keys.h"

namespace tiered_kv {

struct Ghost {
  double at;         // seconds of the monotonic clock
  int64_t distance;  // bytes evicted since and not back yet, the block included
  int reason;        // why it was dropped, as its caller numbers reasons, or that it was evicted
};

class Ghosts {
 public:
  // Reasons of blocks that were evicted: all negative ones.
  static constexpr int kEvicted = -1;
  static constexpr int kEvictedAfterSent = -2;  // a lower tier had received it

  explicit Ghosts(size_t max);

  size_t size() const { return places_.size(); }
  void evicted(std::string_view key, int64_t nbytes, bool was_sent) {
    add(key, nbytes, was_sent ? kEvictedAfterSent : kEvicted);
  }
  void dropped(std::string_view key, int reason) { add(key, 0, reason); }
  // The tier holds the block again.
  void returned(std::string_view key);
  std::optional<Ghost> find(std::string_view key) const;
  void clear();

 private:
  struct Departure {
    uint64_t hash = 0;
    double at = 0;
    int64_t nbytes = 0;
    int reason = 0;
    bool is_used = false;
  };

  uint32_t place_of(uint64_t hash) const;
  void add(std::string_view key, int64_t nbytes, int reason);
  void remove(size_t place);
  void change(size_t place, int64_t nbytes);
  int64_t sum_before(size_t place) const;

  KeyHash hash_;
  std::vector<Departure> ring_;
  std::vector<int64_t> sums_;
  IdTable places_;  // in the ring, by hash
  size_t next_ = 0;
  int64_t total_ = 0;
};

}  // namespace tiered_kv
