// Eviction policies: which unpinned leaf leaves next.
//
// A policy orders entries; it never decides whether one may leave. The index does: a block leaves
// only if it is not pinned and the index holds no block that follows it in its chain ("tails leave
// before heads"). The index tells the policy when an entry gains its first follower and when it
// loses its last one, when a walk met a pinned entry and when that entry is unpinned. So neither a
// long chain of heads nor a memory full of pinned blocks is walked again for every eviction.
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

  // The entry became readable. It may have followers already.
  virtual void admit(uint32_t id) = 0;
  // It was used; its time of last use is that of now.
  virtual void touch(uint32_t id) = 0;
  // It is no longer readable: evicted for room, or removed for another reason.
  virtual void forget(uint32_t id, bool evicted) = 0;
  // It gained its first follower, or was found pinned: it cannot leave for now.
  virtual void shield(uint32_t id) = 0;
  // The last follower, or pin, is gone: it may leave again.
  virtual void unshield(uint32_t id) = 0;

  // A walk over the leaves in the order they should leave: each is given once, kNone at the end.
  // What was given may be forgotten or shielded; the rest is put back by end_walk.
  virtual uint32_t next() = 0;
  virtual void end_walk() = 0;

  // How many leaves a walk would give. Throws InvariantError where the order is broken.
  virtual size_t check() const = 0;
};

const std::vector<std::string>& policy_names();

// For at most `capacity` entries. Throws ArgumentError for a name that is none.
std::unique_ptr<EvictionPolicy> make_policy(const std::string& name, EntryTable& entries,
                                            int64_t capacity);
std::unique_ptr<EvictionPolicy> make_lru(EntryTable& entries);
std::unique_ptr<EvictionPolicy> make_s3fifo(EntryTable& entries, int64_t capacity);

}  // namespace tiered_kv
