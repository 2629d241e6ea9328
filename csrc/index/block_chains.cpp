// Chains: each block is linked to its predecessor, or awaits a missing one.
#include <utility>

#include "index/block_index.h"

namespace tiered_kv {

void BlockIndex::enter(uint32_t id, std::optional<std::string_view> before) {
  if (before) {
    const uint32_t parent = id_of(*before);
    if (parent != kNone)
      link(id, parent);
    else
      await(id, *before);
  }
  const std::string_view key = entries_.key(id);
  table_.insert(hash_(key), id);
  // Link blocks that were added before this predecessor of theirs. Each is the first of its chain.
  // If `id` itself descends from one, linking it would create a cycle that could never be evicted.
  uint32_t orphan = first_awaiting(key);
  const uint32_t ancestor = orphan == kNone ? kNone : first_of_chain(id);
  for (; orphan != kNone; orphan = first_awaiting(key)) {
    stop_awaiting(orphan);
    if (orphan != ancestor) link(orphan, id);
  }
}

uint32_t BlockIndex::first_of_chain(uint32_t id) const {
  while (entries_[id].before != kNone) id = entries_[id].before;
  return id;
}

// Inserts an entry at the head of a list of siblings.
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
  awaited_keys_[id] = before;
  entries_[id].is_awaiting = true;
  uint32_t first = first_awaiting(before);
  if (first != kNone) awaited_.erase(hash_(before), first);
  chain_to(first, id);
  awaited_.insert(hash_(before), id);
}

uint32_t BlockIndex::first_awaiting(std::string_view key) const {
  if (awaited_.size() == 0) return kNone;
  return awaited_.find(hash_(key), [&](uint32_t id) { return awaited_keys_.at(id) == key; });
}

void BlockIndex::stop_awaiting(uint32_t id) {
  Entry& entry = entries_[id];
  if (entry.prev == kNone) {
    const uint64_t hash = hash_(awaited_keys_.at(id));
    awaited_.erase(hash, id);
    if (entry.next != kNone) awaited_.insert(hash, entry.next);
  } else {
    entries_[entry.prev].next = entry.next;
  }
  if (entry.next != kNone) entries_[entry.next].prev = entry.prev;
  entry.next = entry.prev = kNone;
  entry.is_awaiting = false;
  awaited_keys_.erase(id);
}

void BlockIndex::unlink(uint32_t id) {
  Entry& entry = entries_[id];
  if (entry.is_awaiting) stop_awaiting(id);
  if (entry.before == kNone) return;
  const uint32_t before = std::exchange(entry.before, kNone);
  Entry& above = entries_[before];
  (entry.prev == kNone ? above.first_behind : entries_[entry.prev].next) = entry.next;
  if (entry.next != kNone) entries_[entry.next].prev = entry.prev;
  entry.next = entry.prev = kNone;
  if (above.is_leaf() && above.is_readable() && !above.is_parked) policy_of(above).unshield(before);
}

// Removes the block from the table and from its chain; the slot itself stays in use.
void BlockIndex::detach(uint32_t id, bool evicted) {
  Entry& entry = entries_[id];
  unlink(id);
  for (uint32_t follower = std::exchange(entry.first_behind, kNone); follower != kNone;) {
    Entry& behind = entries_[follower];
    const uint32_t next = std::exchange(behind.next, kNone);
    behind.before = behind.prev = kNone;
    await(follower, entries_.key(id));
    follower = next;
  }
  if (entry.is_parked) unpark(id);
  if (entry.is_readable()) {
    policy_of(entry).forget(id, evicted);
    --readable_;
  }
  table_.erase(hash_(entries_.key(id)), id);
  entry.state = State::kDetached;
}

}  // namespace tiered_kv
