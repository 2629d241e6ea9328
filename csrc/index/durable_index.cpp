#include "index/durable_index.h"

#include <algorithm>
#include <utility>

#include "block_layout.h"

namespace tiered_kv {
namespace {

constexpr uint32_t kAhead = 16;  // rows whose table cells are prefetched ahead of their use

// Returns which rows lie on, or descend from, a cycle of parents; they could never be evicted.
std::vector<bool> rows_on_cycles(const std::vector<uint32_t>& parents) {
  const auto no_row = uint32_t(parents.size());
  std::vector<bool> is_seen(parents.size());
  std::vector<bool> on_cycle(parents.size());
  std::vector<uint32_t> path;
  for (uint32_t row = 0; row < no_row; ++row) {
    uint32_t at = row;
    for (; at != no_row && !is_seen[at]; at = parents[at]) {
      is_seen[at] = true;
      path.push_back(at);
    }
    // The path ended at a block without a parent row, at a row of an earlier path, or in a cycle.
    const bool is_cyclic =
        at != no_row && (on_cycle[at] || std::find(path.begin(), path.end(), at) != path.end());
    for (const uint32_t passed : path) on_cycle[passed] = is_cyclic;
    path.clear();
  }
  return on_cycle;
}

}  // namespace

DurableIndex::DurableIndex(const Geometry& geometry, std::string eviction, IndexHooks hooks,
                           std::function<void(int64_t slot)> on_leave)
    : BlockIndex(geometry, std::move(eviction), std::move(hooks)), on_leave_(std::move(on_leave)) {}

void DurableIndex::set_quota(const std::string& owner, int64_t quota_bytes) {
  const auto known = quota_slabs_.find(owner);
  const int64_t before = known == quota_slabs_.end() ? 0 : known->second;
  BlockIndex::set_quota(owner, quota_bytes);
  const int64_t quota = quota_slabs_[owner];
  if (quota == before) return;
  for (int64_t surplus = slabs_of(owner) - quota; surplus > 0; --surplus) {
    std::vector<uint32_t> victims;
    for (uint32_t number = 0; number < owners_.size(); ++number) {
      const uint32_t victim = owners_[number] == owner ? coldest(number) : kNone;
      if (victim != kNone) victims.push_back(victim);
    }
    std::sort(victims.begin(), victims.end(),
              [this](uint32_t a, uint32_t b) { return entries_[a].used < entries_[b].used; });
    if (!std::any_of(victims.begin(), victims.end(),
                     [this](uint32_t victim) { return evict_slab_of(victim); }))
      break;  // all in use: the owner cannot grow, and slabs shrink as blocks are evicted
  }
}

int64_t DurableIndex::free_slots(uint32_t size_class) const {
  return pool_.free_slots(size_class, !at_quota(owners_.at(size_class)));
}

int64_t DurableIndex::owned_slots(uint32_t size_class) const {
  return pool_.slabs_of(size_class) * pool_.slots_in_slab(size_class);
}

std::vector<int64_t> DurableIndex::coldest_first() const {
  std::vector<std::pair<uint64_t, int64_t>> readable;
  for_each([&](const Entry& entry, std::string_view) {
    if (entry.is_readable()) readable.emplace_back(entry.used, entry.slot);
  });
  std::sort(readable.begin(), readable.end());
  std::vector<int64_t> slots;
  slots.reserve(readable.size());
  for (const auto& [used, slot] : readable) slots.push_back(slot);
  return slots;
}

int64_t DurableIndex::make_room(uint32_t size_class, int64_t slots,
                                std::optional<std::string_view> before) {
  const Kept kept(*this, before);
  int64_t freed = 0;
  while (freed < slots) {
    const int64_t more = evict_for(size_class);
    if (more == 0) break;
    freed += more;
  }
  return freed;
}

bool DurableIndex::evict_coldest(std::optional<std::string_view> before) {
  const Kept kept(*this, before);
  uint32_t victim = kNone;
  for (uint32_t number = 0; number < policies_.size(); ++number) {
    const uint32_t other = coldest(number);
    if (other != kNone && (victim == kNone || entries_[other].used < entries_[victim].used))
      victim = other;
  }
  if (victim == kNone) return false;
  evict(victim);
  return true;
}

std::vector<int64_t> DurableIndex::take_quarantined() { return std::exchange(quarantined_, {}); }

uint32_t DurableIndex::quarantined_id(int64_t slot) const {
  const uint32_t id = pool_.id_in(slot);
  if (id == kNone || entries_[id].state != State::kQuarantined)
    throw InvariantError("slot " + std::to_string(slot) + " is not in quarantine");
  return id;
}

void DurableIndex::quarantine_again(const std::vector<int64_t>& slots) {
  for (const int64_t slot : slots) quarantined_id(slot);
  quarantined_.insert(quarantined_.end(), slots.begin(), slots.end());
}

void DurableIndex::release(const std::vector<int64_t>& slots) {
  for (const int64_t slot : slots) drop(quarantined_id(slot));
}

void DurableIndex::retire(int64_t slot) {
  const uint32_t id = id_in(slot);
  const State state = entries_[id].state;
  if (state != State::kReserved && state != State::kDetached)
    throw InvariantError("cannot retire slot " + std::to_string(slot) +
                         ": it is not being written");
  if (state == State::kReserved) detach(id, false);
  entries_[id].state = State::kRetired;
}

void DurableIndex::set_facts(int64_t slot, const Facts& facts) { keep_facts(id_in(slot), facts); }

void DurableIndex::keep_facts(uint32_t id, const Facts& facts) {
  if (facts_.size() <= id) facts_.resize(size_t{id} + 1);
  facts_[id] = {facts.length, uint32_t(facts.checksum), uint32_t(facts.checksum >> 32)};
}

DurableIndex::Facts DurableIndex::facts_in(int64_t slot) const {
  const uint32_t id = id_in(slot);
  if (facts_.size() <= id) return {0, 0};
  const auto& [length, low, high] = facts_[id];
  return {length, uint64_t{low} | uint64_t{high} << 32};
}

void DurableIndex::restore(const std::vector<BlockName>& names, const std::vector<int64_t>& slots,
                           const std::vector<int64_t>& size_classes,
                           const std::vector<Facts>& facts) {
  if (entries_.size() != 0) throw InvariantError("only an empty index can be restored");
  if (names.size() != slots.size())
    throw ArgumentError("slots", std::to_string(slots.size()) + " slots for " +
                                     std::to_string(names.size()) + " blocks");
  if (!facts.empty() && facts.size() != names.size())
    throw ArgumentError("facts", std::to_string(facts.size()) + " facts for " +
                                     std::to_string(names.size()) + " blocks");
  for (const BlockName& name : names) check_name(name);
  const auto no_row = uint32_t(names.size());
  IdTable rows(names.size());
  std::vector<uint64_t> hashes(names.size());
  const auto row_of = [&](uint64_t hash, std::string_view key) {
    return rows.find(hash, [&](uint32_t other) { return names[other].key == key; });
  };
  for (uint32_t row = 0; row < no_row; ++row) hashes[row] = hash_(names[row].key);
  for (uint32_t row = 0; row < no_row; ++row) {
    if (row + kAhead < no_row) rows.prefetch(hashes[row + kAhead]);
    if (row_of(hashes[row], names[row].key) != kNone)
      throw InvariantError("two slots are restored with the same key");
    rows.insert(hashes[row], row);
  }
  pool_.adopt(slots, size_classes);
  std::vector<uint32_t> parents(names.size(), no_row);
  uint64_t wanted[kAhead];
  for (uint32_t begin = 0; begin < no_row; begin += kAhead) {
    const uint32_t end = std::min(begin + kAhead, no_row);
    for (uint32_t row = begin; row < end; ++row) {
      wanted[row - begin] = hash_(names[row].before.value_or(std::string_view()));
      rows.prefetch(wanted[row - begin]);
    }
    for (uint32_t row = begin; row < end; ++row) {
      const std::optional<std::string_view>& before = names[row].before;
      if (!before) continue;
      const uint32_t parent = row_of(wanted[row - begin], *before);
      if (parent != kNone) parents[row] = parent;
    }
  }
  const std::vector<bool> is_cut = rows_on_cycles(parents);
  std::vector<uint32_t> ids(names.size());
  for (uint32_t row = 0; row < no_row; ++row) {
    ids[row] = entries_.add(names[row].key, slots[row]);
    pool_.set_id(slots[row], ids[row]);
    if (!facts.empty()) keep_facts(ids[row], facts[row]);
  }
  table_ = IdTable(names.size());
  for (uint32_t row = 0; row < no_row; ++row) {
    if (row + kAhead < no_row) table_.prefetch(hashes[row + kAhead]);
    table_.insert(hashes[row], ids[row]);
    if (is_cut[row]) continue;
    const std::optional<std::string_view>& before = names[row].before;
    if (parents[row] != no_row)
      link(ids[row], ids[parents[row]]);
    else if (before)
      await(ids[row], *before);
  }
  for (const uint32_t id : ids) become_readable(id);
}

void DurableIndex::detach(uint32_t id, bool evicted) {
  if (on_leave_ && entries_[id].is_readable()) on_leave_(entries_[id].slot);
  BlockIndex::detach(id, evicted);
}

void DurableIndex::free(uint32_t id) {
  entries_[id].state = State::kQuarantined;
  quarantined_.push_back(entries_[id].slot);
}

}  // namespace tiered_kv
