// Eviction: selects the coldest blocks, tails before heads, and moves slabs between size classes.
#include <algorithm>
#include <unordered_set>
#include <utility>

#include "index/block_index.h"

namespace tiered_kv {
namespace {

// Limits of the search for a block to cut a chain at (chains, and blocks of all chains together),
// because callers wait for it.
constexpr size_t kMaxTails = 16;
constexpr size_t kMaxSteps = 512;

}  // namespace

// Iterates over evictable blocks, coldest first. The caller may evict each of them.
class BlockIndex::Leaving {
 public:
  Leaving(BlockIndex& index, uint32_t size_class)
      : index_(index), policy_(*index.policies_.at(size_class)) {}
  Leaving(const Leaving&) = delete;
  Leaving& operator=(const Leaving&) = delete;
  ~Leaving() { policy_.end_walk(); }

  uint32_t next() {
    for (;;) {
      const uint32_t id = policy_.next();
      if (id == kNone) return kNone;
      const Entry& entry = index_.entries_[id];
      if (entry.pins == 0 && index_.may_evict(id)) return id;
      if (entry.pins != 0) index_.park(id);
    }
  }

 private:
  BlockIndex& index_;
  EvictionPolicy& policy_;
};

BlockIndex::Kept::Kept(BlockIndex& index, std::optional<std::string_view> key)
    : index_(index), id_(key ? index.id_of(*key) : kNone) {
  if (id_ != kNone) ++index_.entries_[id_].pins;
}

BlockIndex::Kept::~Kept() {
  if (id_ != kNone) index_.unpin_one(id_);
}

// Removes a pinned leaf from the order of its policy, so that later walks do not meet it again.
void BlockIndex::park(uint32_t id) {
  Entry& entry = entries_[id];
  policy_of(entry).shield(id);
  Parked& parked = parked_[pool_.class_of(entry.slot)];
  entry.is_parked = true;
  entry.queue_prev = parked.last;
  entry.queue_next = kNone;
  (parked.last == kNone ? parked.first : entries_[parked.last].queue_next) = id;
  parked.last = id;
}

void BlockIndex::unpark(uint32_t id) {
  Entry& entry = entries_[id];
  entry.is_parked = false;
  Parked& parked = parked_[pool_.class_of(entry.slot)];
  const uint32_t prev = entry.queue_prev;
  const uint32_t next = entry.queue_next;
  (prev == kNone ? parked.first : entries_[prev].queue_next) = next;
  (next == kNone ? parked.last : entries_[next].queue_prev) = prev;
}

void BlockIndex::unpin_one(uint32_t id) {
  Entry& entry = entries_[id];
  if (--entry.pins != 0 || !entry.is_parked) return;
  unpark(id);
  if (entry.is_leaf()) policy_of(entry).unshield(id);
}

bool BlockIndex::may_evict(uint32_t id) const {
  return !hooks_.may_evict || hooks_.may_evict(entries_.key(id));
}

// Whether the block is pinned or still being written.
bool BlockIndex::is_in_use(uint32_t id) const {
  if (id == kNone) return false;
  const Entry& entry = entries_[id];
  return entry.pins != 0 || !(entry.is_readable() || entry.state == State::kQuarantined);
}

int64_t BlockIndex::slabs_of(const std::string& owner) const {
  int64_t slabs = 0;
  for (uint32_t number = 0; number < owners_.size(); ++number)
    if (owners_[number] == owner) slabs += pool_.slabs_of(number);
  return slabs;
}

bool BlockIndex::at_quota(const std::string& owner) const {
  const auto quota = quota_slabs_.find(owner);
  return quota != quota_slabs_.end() && slabs_of(owner) >= quota->second;
}

int64_t BlockIndex::make_free(uint32_t size_class, int64_t wanted) {
  return evict_for(size_class, wanted) != 0 ? pool_.allocate(size_class) : kNoSlot;
}

int64_t BlockIndex::evict_for(uint32_t size_class, int64_t wanted) {
  if (policies_.size() == 1) {
    int64_t count = 0;
    Leaving victims(*this, size_class);
    for (; count < wanted; ++count) {
      const uint32_t id = victims.next();
      if (id == kNone) break;
      evict(id);
    }
    return count;
  }
  const std::string& owner = owners_.at(size_class);
  const bool only_own = at_quota(owner);
  uint32_t own = coldest(size_class);
  std::vector<uint32_t> others;
  for (uint32_t other = 0; other < policies_.size(); ++other) {
    if (other == size_class || (only_own && owners_[other] != owner)) continue;
    const uint32_t victim = coldest(other);
    if (victim != kNone) others.push_back(victim);
  }
  std::sort(others.begin(), others.end(),
            [this](uint32_t a, uint32_t b) { return entries_[a].used < entries_[b].used; });
  // A slab moves to this class if its present class holds the colder block.
  for (const uint32_t victim : others) {
    if (own != kNone && entries_[own].used <= entries_[victim].used) break;
    if (evict_slab_of(victim)) return pool_.slots_in_slab(size_class);
  }
  // `own` may be a successor of a block in such a slab. Then `may_evict` was called for it again
  // and may have pinned it.
  if (own != kNone && entries_[own].pins != 0) own = coldest(size_class);
  if (own == kNone) return 0;
  evict(own);
  return 1;
}

uint32_t BlockIndex::coldest(uint32_t size_class) { return Leaving(*this, size_class).next(); }

void BlockIndex::evict(uint32_t id) {
  const int64_t nbytes = pool_.slot_bytes(pool_.class_of(entries_[id].slot));
  const std::string key(hooks_.on_evict ? entries_.key(id) : std::string_view());
  if (hooks_.ghosts) hooks_.ghosts->evicted(entries_.key(id), nbytes, entries_[id].is_sent);
  if (!entries_[id].is_dead()) last_evicted_use_ = entries_[id].used;
  detach(id, true);
  free(id);
  ++evicted_blocks_;
  evicted_bytes_ += nbytes;
  if (hooks_.on_evict) hooks_.on_evict(key, nbytes);
}

bool BlockIndex::evict_slab_of(uint32_t victim) {
  const int64_t slab = pool_.slab_of(entries_[victim].slot);
  // Do not search the slab again for every new block while the same slot still blocks it.
  const auto blocker = blockers_.find(slab);
  if (blocker != blockers_.end()) {
    if (is_in_use(pool_.id_in(blocker->second))) return false;
    blockers_.erase(blocker);
  }
  std::vector<uint32_t> doomed;
  std::unordered_set<uint32_t> seen;
  std::vector<std::pair<uint32_t, bool>> pending;  // id, and whether its successors were visited
  for (const int64_t slot : pool_.slots_of_slab(slab)) pending.emplace_back(id_in(slot), false);
  while (!pending.empty()) {
    const auto [id, is_expanded] = pending.back();
    pending.pop_back();
    const Entry& entry = entries_[id];
    if (is_expanded) {
      doomed.push_back(id);
      continue;
    }
    if (seen.count(id) != 0 || entry.state == State::kQuarantined) continue;
    if (is_in_use(id)) {
      blockers_[slab] = entry.slot;
      return false;
    }
    seen.insert(id);
    pending.emplace_back(id, true);
    for (uint32_t behind = entry.first_behind; behind != kNone; behind = entries_[behind].next)
      pending.emplace_back(behind, false);
  }
  for (const uint32_t id : doomed)
    if (!may_evict(id)) return false;
  for (const uint32_t id : doomed) evict(id);
  return true;
}

// Normally only the tail of a chain can be evicted. If the tails of all chains are in use, nothing
// can: a chain longer than the tier could not even be read through it. If a lower tier holds a
// block in the middle, evicting that block cuts the chain, and the part before it has a free tail
// again.
bool BlockIndex::cut_chain(uint32_t size_class, std::optional<std::string_view> before) {
  if (!hooks_.is_below) return false;
  std::vector<uint32_t> tails;
  const uint32_t parent = before ? id_of(*before) : kNone;
  if (parent != kNone) tails.push_back(parent);
  EvictionPolicy& policy = *policies_.at(size_class);
  for (uint32_t leaf = policy.next(); leaf != kNone && tails.size() < kMaxTails;
       leaf = policy.next())
    tails.push_back(leaf);
  policy.end_walk();
  for (uint32_t leaf = parked_.at(size_class).first; leaf != kNone && tails.size() < kMaxTails;
       leaf = entries_[leaf].queue_next)
    tails.push_back(leaf);
  const uint32_t id = block_to_cut_at(tails, size_class);
  if (id == kNone) return false;
  evict(id);
  return true;
}

// Returns the nearest predecessor of a tail that is unused and held by a lower tier. It must be of
// this size class, because another class would not free a slot. Calling `may_evict` for blocks that
// the lower tier does not hold offers them to it, so that a later search succeeds.
uint32_t BlockIndex::block_to_cut_at(const std::vector<uint32_t>& tails,
                                     uint32_t size_class) const {
  size_t steps = kMaxSteps;
  for (const uint32_t tail : tails) {
    for (uint32_t id = tail; id != kNone && steps != 0; --steps) {
      const Entry& entry = entries_[id];
      const bool is_idle = entry.pins == 0 && entry.is_readable();
      if (is_idle && pool_.class_of(entry.slot) == size_class) {
        if (hooks_.is_below(entries_.key(id))) return id;
        if (may_evict(id)) return kNone;  // the lower tier takes no more; the block would be lost
      }
      id = entry.before;
    }
  }
  return kNone;
}

}  // namespace tiered_kv
