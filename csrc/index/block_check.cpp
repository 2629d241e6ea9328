// Checks the invariants of the index, for tests.
#include "index/block_index.h"

namespace tiered_kv {

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
    if (entry.is_readable() && entry.is_leaf() && !entry.is_parked)
      ++leaves[pool_.class_of(entry.slot)];
  });
  if (visible != table_.size() || readable != readable_)
    throw InvariantError("the table does not contain exactly the visible blocks");
  for (size_t number = 0; number < policies_.size(); ++number) {
    const size_t offered = policies_[number]->check();
    if (offered != leaves[number])
      throw InvariantError("the policy of class " + std::to_string(number) + " offers " +
                           std::to_string(offered) + " leaves, expected " +
                           std::to_string(leaves[number]));
  }
}

void BlockIndex::check_entry(uint32_t id) const {
  const Entry& entry = entries_[id];
  const std::string slot = "slot " + std::to_string(entry.slot);
  if (pool_.id_in(entry.slot) != id) throw InvariantError(slot + " holds another block");
  if ((id_of(entries_.key(id)) == id) != entry.is_visible())
    throw InvariantError(slot + " has a visibility that does not match its state");
  if (entry.pins != 0 && entry.state == State::kReserved)
    throw InvariantError(slot + " is pinned while it is being written");
  if (entry.is_parked && (entry.pins == 0 || entry.is_queued || !entry.is_readable()))
    throw InvariantError(slot + " is parked but not pinned, or still queued");
  if (entry.is_set_aside) throw InvariantError(slot + " was set aside and not put back");
  if (entry.before != kNone && entry.is_awaiting)
    throw InvariantError(slot + " has a predecessor and also awaits one");
  if (!entry.is_visible() && (entry.before != kNone || entry.is_awaiting || !entry.is_leaf()))
    throw InvariantError(slot + " is detached but still in a chain");
  uint32_t sibling = kNone;
  if (entry.before != kNone) sibling = entries_[entry.before].first_behind;
  if (entry.is_awaiting != (awaited_keys_.count(id) != 0))
    throw InvariantError(slot + " has an awaited key that does not match its state");
  if (entry.is_awaiting) {
    if (id_of(awaited_keys_.at(id)) != kNone)
      throw InvariantError(slot + " awaits a block that is present");
    sibling = first_awaiting(awaited_keys_.at(id));
  }
  if (entry.before != kNone || entry.is_awaiting) {
    while (sibling != kNone && sibling != id) sibling = entries_[sibling].next;
    if (sibling != id) throw InvariantError(slot + " is not among the successors of its parent");
  }
  for (uint32_t behind = entry.first_behind; behind != kNone; behind = entries_[behind].next)
    if (entries_[behind].before != id)
      throw InvariantError(slot + " has a successor with another predecessor");
}

}  // namespace tiered_kv
