// Eviction policies: the order in which unpinned leaves are evicted.
//
// A policy orders entries; the index decides whether an entry may be evicted. A block can be
// evicted only if it is not pinned and the index holds no successor of it in its chain (tails
// before heads). The index tells the policy when an entry gains its first successor and when it
// loses its last one, when a walk met a pinned entry and when that entry is unpinned. So an
// eviction does not walk over long chains of heads, or over many pinned blocks, again and again.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "index/entries.h"

namespace tiered_kv {

class EvictionPolicy {
 public:
  EvictionPolicy() = default;
  EvictionPolicy(const EvictionPolicy&) = delete;
  EvictionPolicy& operator=(const EvictionPolicy&) = delete;
  virtual ~EvictionPolicy() = default;

  // The entry became readable. It may already have successors.
  virtual void admit(uint32_t id) = 0;
  // The entry was used; the index has updated its time of last use.
  virtual void touch(uint32_t id) = 0;
  // The entry is dead: it is evicted before all others that are not.
  virtual void expire(uint32_t id) = 0;
  // The entry is no longer readable: it was evicted, or removed for another reason.
  virtual void forget(uint32_t id, bool evicted) = 0;
  // The entry gained its first successor, or was found pinned: it cannot be evicted for now.
  virtual void shield(uint32_t id) = 0;
  // The entry lost its last successor or pin: it can be evicted again.
  virtual void unshield(uint32_t id) = 0;

  // Walks over the leaves in eviction order: returns each leaf once, then kNone. The caller may
  // forget or shield a returned leaf; end_walk puts the others back.
  virtual uint32_t next() = 0;
  virtual void end_walk() = 0;

  // Returns how many leaves a walk would return. Throws InvariantError if the order is invalid.
  virtual size_t check() const = 0;
};

const std::vector<std::string>& policy_names();

// Creates a policy for at most `capacity` entries. Throws ArgumentError for an unknown name.
std::unique_ptr<EvictionPolicy> make_policy(const std::string& name, EntryTable& entries,
                                            int64_t capacity);
std::unique_ptr<EvictionPolicy> make_lru(EntryTable& entries);
std::unique_ptr<EvictionPolicy> make_s3fifo(EntryTable& entries, int64_t capacity);

}  // namespace tiered_kv
