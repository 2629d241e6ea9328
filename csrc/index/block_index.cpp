#include "index/block_index.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "block_layout.h"

namespace tiered_kv {
namespace {

constexpr size_t kLookAhead = 16;  // lookups under way at once
// Where to cut a chain: chains to look at, and blocks of them altogether, as others wait.
constexpr size_t kMostTails = 16;
constexpr size_t kMostSteps = 512;

size_t most_blocks(const Geometry& geometry) {
  // A slab of one slot is the arena of one class: then the table never has to grow.
  return geometry.slots_per_slab == 1 ? size_t(std::max<int64_t>(0, geometry.num_slabs)) : 0;
}

}  // namespace

// Blocks that may leave, coldest first; each may be evicted when it is given.
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
      if (entry.pins == 0 && entry.is_leaf() && index_.may_evict(entry)) return id;
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
  if (id_ != kNone) --index_.entries_[id_].pins;
}

BlockIndex::BlockIndex(const Geometry& geometry, std::string eviction, IndexHooks hooks)
    : pool_(geometry),
      eviction_(std::move(eviction)),
      hooks_(std::move(hooks)),
      table_(most_blocks(geometry)) {
  make_policy(eviction_, entries_, 1);  // an unknown name is an error now, not with the first class
}

uint32_t BlockIndex::add_class(int64_t slot_bytes, const std::string& owner) {
  const uint32_t number = pool_.add_class(slot_bytes);
  policies_.push_back(
      make_policy(eviction_, entries_, pool_.geometry().capacity_bytes / slot_bytes));
  owners_.push_back(owner);
  return number;
}

void BlockIndex::set_quota(const std::string& owner, int64_t quota_bytes) {
  quota_slabs_[owner] = std::max<int64_t>(1, quota_bytes / pool_.geometry().slab_bytes);
}

void BlockIndex::check_name(const BlockName& name) {
  for (const std::string_view key : {name.key, name.before.value_or(std::string_view())})
    if (key.size() > kMaxKeyBytes)
      throw ArgumentError(
          "key", std::to_string(key.size()) + " bytes, more than " + std::to_string(kMaxKeyBytes));
}

// ---- questions ---------------------------------------------------------------------------------

Lookup BlockIndex::state_of(uint32_t id) const {
  if (id == kNone) return Lookup::kMiss;
  return entries_[id].is_readable() ? Lookup::kHit : Lookup::kPending;
}

Lookup BlockIndex::lookup(std::string_view key) const { return state_of(id_of(key)); }

void BlockIndex::lookup(const std::vector<std::string_view>& keys,
                        std::vector<Lookup>& found) const {
  found.resize(keys.size());
  uint64_t hashes[kLookAhead];
  for (size_t begin = 0; begin < keys.size(); begin += kLookAhead) {
    const size_t count = std::min(kLookAhead, keys.size() - begin);
    for (size_t i = 0; i < count; ++i) {
      hashes[i] = hash_(keys[begin + i]);
      table_.prefetch(hashes[i]);
    }
    for (size_t i = 0; i < count; ++i) {
      const std::string_view key = keys[begin + i];
      const uint32_t id =
          table_.find(hashes[i], [&](uint32_t other) { return entries_[other].key.view() == key; });
      found[begin + i] = state_of(id);
    }
  }
}

int64_t BlockIndex::slot_of(std::string_view key) const {
  const uint32_t id = id_of(key);
  return id == kNone ? kNoSlot : entries_[id].slot;
}

BlockName BlockIndex::block_in(int64_t slot) const {
  const Entry& entry = entries_[id_in(slot)];
  BlockName name{entry.key.view(), std::nullopt};
  if (entry.before != kNone) name.before = entries_[entry.before].key.view();
  if (entry.awaited) name.before = entry.awaited->view();
  return name;
}

void BlockIndex::for_each(const std::function<void(const Entry&)>& look) const {
  entries_.for_each([&](uint32_t id) { look(entries_[id]); });
}

// ---- use ---------------------------------------------------------------------------------------

void BlockIndex::touch(std::string_view key) {
  const uint32_t id = id_of(key);
  if (id == kNone || !entries_[id].is_readable()) return;
  entries_[id].used = ++clock_;
  policy_of(entries_[id]).touch(id);
}

std::vector<int64_t> BlockIndex::pin(const std::vector<std::string_view>& keys) {
  std::vector<int64_t> slots;
  slots.reserve(keys.size());
  for (const std::string_view key : keys) {
    const uint32_t id = id_of(key);
    if (id == kNone) throw InvariantError("a block is pinned that is not here");
    slots.push_back(entries_[id].slot);
  }
  pin_slots(slots);
  return slots;
}

void BlockIndex::pin_slots(const std::vector<int64_t>& slots) {
  for (const int64_t slot : slots)
    if (!entries_[id_in(slot)].is_readable())
      throw InvariantError("a block is pinned before it is committed");
  for (const int64_t slot : slots) ++entries_[id_in(slot)].pins;
}

void BlockIndex::unpin(const std::vector<int64_t>& slots) {
  for (const int64_t slot : slots) {
    const uint32_t id = id_in(slot);
    Entry& entry = entries_[id];
    if (entry.pins == 0)
      throw InvariantError("slot " + std::to_string(slot) + " is unpinned more often than pinned");
    if (--entry.pins == 0 && entry.state == State::kDetached) free(id);
  }
}

// ---- write -------------------------------------------------------------------------------------

int64_t BlockIndex::reserve(const BlockName& name, uint32_t size_class, int64_t more) {
  check_name(name);
  if (id_of(name.key) != kNone)
    throw InvariantError("a key that is already here cannot be reserved");
  const bool may_grow = quota_slabs_.empty() || !at_quota(owners_.at(size_class));
  int64_t slot = pool_.allocate(size_class, may_grow);
  if (slot == kNoSlot) {
    {
      const Kept kept(*this, name.before);
      const auto most = int64_t(entries_.size());
      slot = make_free(size_class, 1 + std::clamp<int64_t>(more, 0, most));
    }
    if (slot == kNoSlot && cut_chain(size_class, name.before)) slot = pool_.allocate(size_class);
    if (slot == kNoSlot) return kNoSlot;
  }
  const uint32_t id = entries_.add(name.key, slot);
  pool_.set_id(slot, id);
  enter(id, name.before);
  return slot;
}

bool BlockIndex::commit(int64_t slot) {
  const uint32_t id = id_in(slot);
  if (entries_[id].state == State::kDetached) {
    free(id);
    return false;
  }
  if (entries_[id].state != State::kReserved)
    throw InvariantError("slot " + std::to_string(slot) + " is committed twice");
  become_readable(id);
  return true;
}

void BlockIndex::become_readable(uint32_t id) {
  Entry& entry = entries_[id];
  entry.state = State::kCommitted;
  entry.used = ++clock_;
  ++readable_;
  policy_of(entry).admit(id);
}

void BlockIndex::abort(int64_t slot) {
  const uint32_t id = id_in(slot);
  if (entries_[id].state != State::kReserved && entries_[id].state != State::kDetached)
    throw InvariantError("slot " + std::to_string(slot) + " is aborted after its commit");
  if (entries_[id].state == State::kReserved) detach(id, false);
  free(id);
}

// ---- removal -----------------------------------------------------------------------------------

bool BlockIndex::remove(std::string_view key, int64_t in_slot) {
  const uint32_t id = id_of(key);
  if (id == kNone || (in_slot != kNoSlot && entries_[id].slot != in_slot)) return false;
  remove_entry(id);
  return true;
}

void BlockIndex::clear() {
  std::vector<uint32_t> all;
  entries_.for_each([&](uint32_t id) {
    if (entries_[id].is_visible()) all.push_back(id);
  });
  for (const uint32_t id : all) remove_entry(id);
}

void BlockIndex::remove_entry(uint32_t id) {
  const bool is_being_written = entries_[id].state == State::kReserved;
  detach(id, false);
  if (!is_being_written && entries_[id].pins == 0) free(id);
}

// ---- chains ------------------------------------------------------------------------------------

void BlockIndex::enter(uint32_t id, std::optional<std::string_view> before) {
  if (before) {
    const uint32_t parent = id_of(*before);
    if (parent != kNone)
      link(id, parent);
    else
      await(id, *before);
  }
  const std::string_view key = entries_[id].key.view();
  table_.insert(hash_(key), id);
  // Blocks that arrived before the block they follow are adopted when it comes.
  for (uint32_t orphan = first_awaiting(key); orphan != kNone; orphan = first_awaiting(key)) {
    stop_awaiting(orphan);
    if (!is_before(orphan, id)) link(orphan, id);  // blocks in a circle could never leave
  }
}

// Whether `id` is `other`, or comes before it in its chain.
bool BlockIndex::is_before(uint32_t id, uint32_t other) const {
  while (other != kNone && other != id) other = entries_[other].before;
  return other != kNone;
}

// Puts it at the head of a list of siblings.
void BlockIndex::chain_to(uint32_t& first, uint32_t id) {
  Entry& entry = entries_[id];
  entry.prev = kNone;
  entry.next = first;
  if (first != kNone) entries_[first].prev = id;
  first = id;
}

void BlockIndex::link(uint32_t id, uint32_t before) {
  entries_[id].before = before;
  Entry& above = entries_[before];
  const bool was_leaf = above.is_leaf();
  chain_to(above.first_behind, id);
  if (was_leaf && above.is_readable()) policy_of(above).shield(before);
}

void BlockIndex::await(uint32_t id, std::string_view before) {
  entries_[id].awaited = std::make_unique<KeyBytes>(before);
  uint32_t first = first_awaiting(before);
  if (first != kNone) awaited_.erase(hash_(before), first);
  chain_to(first, id);
  awaited_.insert(hash_(before), id);
}

uint32_t BlockIndex::first_awaiting(std::string_view key) const {
  if (awaited_.size() == 0) return kNone;
  return awaited_.find(hash_(key),
                       [&](uint32_t id) { return entries_[id].awaited->view() == key; });
}

void BlockIndex::stop_awaiting(uint32_t id) {
  Entry& entry = entries_[id];
  if (entry.prev == kNone) {
    const uint64_t hash = hash_(entry.awaited->view());
    awaited_.erase(hash, id);
    if (entry.next != kNone) awaited_.insert(hash, entry.next);
  } else {
    entries_[entry.prev].next = entry.next;
  }
  if (entry.next != kNone) entries_[entry.next].prev = entry.prev;
  entry.next = entry.prev = kNone;
  entry.awaited.reset();
}

void BlockIndex::unlink(uint32_t id) {
  Entry& entry = entries_[id];
  if (entry.awaited) stop_awaiting(id);
  if (entry.before == kNone) return;
  const uint32_t before = std::exchange(entry.before, kNone);
  Entry& above = entries_[before];
  (entry.prev == kNone ? above.first_behind : entries_[entry.prev].next) = entry.next;
  if (entry.next != kNone) entries_[entry.next].prev = entry.prev;
  entry.next = entry.prev = kNone;
  if (above.is_leaf() && above.is_readable()) policy_of(above).unshield(before);
}

// Takes the block out of every lookup and link; the slot itself stays in use.
void BlockIndex::detach(uint32_t id, bool evicted) {
  Entry& entry = entries_[id];
  unlink(id);
  for (uint32_t follower = std::exchange(entry.first_behind, kNone); follower != kNone;) {
    Entry& behind = entries_[follower];
    const uint32_t next = std::exchange(behind.next, kNone);
    behind.before = behind.prev = kNone;
    await(follower, entry.key.view());
    follower = next;
  }
  if (entry.is_readable()) {
    policy_of(entry).forget(id, evicted);
    --readable_;
  }
  table_.erase(hash_(entry.key.view()), id);
  entry.state = State::kDetached;
}

void BlockIndex::free(uint32_t id) { drop(id); }

void BlockIndex::drop(uint32_t id) {
  const int64_t slot = entries_[id].slot;
  entries_.drop(id);
  pool_.release(slot);
}

uint32_t BlockIndex::id_of(std::string_view key) const {
  return table_.find(hash_(key), [&](uint32_t other) { return entries_[other].key.view() == key; });
}

uint32_t BlockIndex::id_in(int64_t slot) const {
  const uint32_t id = pool_.id_in(slot);
  if (id == kNone || id == kUnnamed)
    throw InvariantError("slot " + std::to_string(slot) + " is not in use");
  return id;
}

// ---- what leaves -------------------------------------------------------------------------------

bool BlockIndex::may_evict(const Entry& entry) const {
  return !hooks_.may_evict || hooks_.may_evict(entry.key.view());
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
  const uint32_t own = coldest(size_class);
  std::vector<uint32_t> others;
  for (uint32_t other = 0; other < policies_.size(); ++other) {
    if (other == size_class || (only_own && owners_[other] != owner)) continue;
    const uint32_t victim = coldest(other);
    if (victim != kNone) others.push_back(victim);
  }
  std::sort(others.begin(), others.end(),
            [this](uint32_t a, uint32_t b) { return entries_[a].used < entries_[b].used; });
  // Memory moves between classes when the other class holds the colder block.
  for (const uint32_t victim : others) {
    if (own != kNone && entries_[own].used <= entries_[victim].used) break;
    if (evict_slab_of(victim)) return pool_.slots_in_slab(size_class);
  }
  if (own == kNone) return 0;
  evict(own);
  return 1;
}

uint32_t BlockIndex::coldest(uint32_t size_class) { return Leaving(*this, size_class).next(); }

void BlockIndex::evict(uint32_t id) {
  const int64_t nbytes = pool_.slot_bytes(pool_.class_of(entries_[id].slot));
  const std::string key(hooks_.on_evict ? entries_[id].key.view() : std::string_view());
  detach(id, true);
  free(id);
  ++evicted_blocks_;
  evicted_bytes_ += nbytes;
  if (hooks_.on_evict) hooks_.on_evict(key, nbytes);
}

bool BlockIndex::evict_slab_of(uint32_t victim) {
  std::vector<uint32_t> doomed;
  std::unordered_set<uint32_t> seen;
  std::vector<std::pair<uint32_t, bool>> pending;  // and whether its followers were seen to
  for (const int64_t slot : pool_.slots_of_slab(pool_.slab_of(entries_[victim].slot)))
    pending.emplace_back(id_in(slot), false);
  while (!pending.empty()) {
    const auto [id, is_expanded] = pending.back();
    pending.pop_back();
    const Entry& entry = entries_[id];
    if (is_expanded) {
      doomed.push_back(id);
      continue;
    }
    if (seen.count(id) != 0 || entry.state == State::kQuarantined) continue;
    if (entry.pins != 0 || !entry.is_readable()) return false;
    seen.insert(id);
    pending.emplace_back(id, true);
    for (uint32_t behind = entry.first_behind; behind != kNone; behind = entries_[behind].next)
      pending.emplace_back(behind, false);
  }
  for (const uint32_t id : doomed)
    if (!may_evict(entries_[id])) return false;
  for (const uint32_t id : doomed) evict(id);
  return true;
}

// The end of a chain leaves first. Where the ends of all chains are in use, nothing can: a chain
// that is longer than its tier could not even be read through it. Over a slower tier that has the
// block a chain may be cut anywhere, and what was before the cut has an end again.
bool BlockIndex::cut_chain(uint32_t size_class, std::optional<std::string_view> before) {
  if (!hooks_.is_below) return false;
  std::vector<uint32_t> tails;
  const uint32_t parent = before ? id_of(*before) : kNone;
  if (parent != kNone) tails.push_back(parent);
  EvictionPolicy& policy = *policies_.at(size_class);
  for (size_t count = 0; count < kMostTails; ++count) {
    const uint32_t leaf = policy.next();
    if (leaf == kNone) break;
    tails.push_back(leaf);
  }
  policy.end_walk();
  const uint32_t id = block_to_cut_at(tails, size_class);
  if (id == kNone) return false;
  evict(id);
  return true;
}

// The nearest block before one of the tails that nobody uses and a slower tier has; of this size
// class, as another's would make no room. Blocks on the way that it has not are offered to it, so
// that it has them another time.
uint32_t BlockIndex::block_to_cut_at(const std::vector<uint32_t>& tails,
                                     uint32_t size_class) const {
  size_t steps = kMostSteps;
  for (const uint32_t tail : tails) {
    for (uint32_t id = tail; id != kNone && steps != 0; --steps) {
      const Entry& entry = entries_[id];
      const bool is_idle = entry.pins == 0 && entry.is_readable();
      if (is_idle && pool_.class_of(entry.slot) == size_class) {
        if (hooks_.is_below(entry.key.view())) return id;
        if (may_evict(entry)) return kNone;  // the slower tier takes no more: it would be lost
      }
      id = entry.before;
    }
  }
  return kNone;
}

// ---- rules -------------------------------------------------------------------------------------

void BlockIndex::check() const {
  pool_.check(entries_.size());
  size_t visible = 0;
  size_t readable = 0;
  std::vector<size_t> leaves(policies_.size());
  entries_.for_each([&](uint32_t id) {
    check_entry(id);
    const Entry& entry = entries_[id];
    visible += entry.is_visible() ? 1U : 0U;
    readable += entry.is_readable() ? 1U : 0U;
    if (entry.is_readable() && entry.is_leaf()) ++leaves[pool_.class_of(entry.slot)];
  });
  if (visible != table_.size() || readable != readable_)
    throw InvariantError("what can be found is not what is here");
  for (size_t number = 0; number < policies_.size(); ++number) {
    const size_t offered = policies_[number]->check();
    if (offered != leaves[number])
      throw InvariantError("the policy of class " + std::to_string(number) + " offers " +
                           std::to_string(offered) + " leaves, there are " +
                           std::to_string(leaves[number]));
  }
}

void BlockIndex::check_entry(uint32_t id) const {
  const Entry& entry = entries_[id];
  const std::string slot = "slot " + std::to_string(entry.slot);
  if (pool_.id_in(entry.slot) != id) throw InvariantError(slot + " holds another block");
  if ((id_of(entry.key.view()) == id) != entry.is_visible())
    throw InvariantError(slot + " is visible, or not, against its state");
  if (entry.pins != 0 && entry.state == State::kReserved)
    throw InvariantError(slot + " is pinned while it is written");
  if (entry.is_set_aside) throw InvariantError(slot + " was set aside and not put back");
  if (entry.before != kNone && entry.awaited)
    throw InvariantError(slot + " awaits a block it follows");
  if (!entry.is_visible() && (entry.before != kNone || entry.awaited || !entry.is_leaf()))
    throw InvariantError(slot + " is gone and still in a chain");
  uint32_t sibling = kNone;
  if (entry.before != kNone) sibling = entries_[entry.before].first_behind;
  if (entry.awaited) {
    if (id_of(entry.awaited->view()) != kNone)
      throw InvariantError(slot + " awaits a block that is here");
    sibling = first_awaiting(entry.awaited->view());
  }
  if (entry.before != kNone || entry.awaited) {
    while (sibling != kNone && sibling != id) sibling = entries_[sibling].next;
    if (sibling != id) throw InvariantError(slot + " is not known to the block it follows");
  }
  for (uint32_t behind = entry.first_behind; behind != kNone; behind = entries_[behind].next)
    if (entries_[behind].before != id)
      throw InvariantError(slot + " has a follower that follows another");
}

}  // namespace tiered_kv
