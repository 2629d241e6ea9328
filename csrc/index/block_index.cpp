#include "index/block_index.h"

#include <time.h>

#include <algorithm>
#include <utility>

#include "block_layout.h"

namespace tiered_kv {
namespace {

constexpr double kNanosecondsPerSecond = 1e9;
constexpr int kMaxSearchedSuccessors = 16;
constexpr size_t kLookAhead = 16;  // lookups whose cache lines are prefetched together

size_t initial_capacity(const Geometry& geometry) {
  // With one slot per slab there is a single class, and the number of slabs is the exact maximum,
  // so the table never has to grow.
  return geometry.slots_per_slab == 1 ? size_t(std::max<int64_t>(0, geometry.num_slabs)) : 0;
}

}  // namespace

BlockIndex::BlockIndex(const Geometry& geometry, std::string eviction, IndexHooks hooks)
    : pool_(geometry),
      table_(initial_capacity(geometry)),
      eviction_(std::move(eviction)),
      hooks_(std::move(hooks)) {
  make_policy(eviction_, entries_, 1);  // rejects an unknown name now, not at the first class
}

uint32_t BlockIndex::add_class(int64_t slot_bytes, const std::string& owner) {
  const uint32_t number = pool_.add_class(slot_bytes);
  policies_.push_back(policy_for(slot_bytes));
  parked_.emplace_back();
  owners_.push_back(owner);
  return number;
}

uint32_t BlockIndex::reuse_class(int64_t slot_bytes, const std::string& owner) {
  const uint32_t number = pool_.reuse_class(slot_bytes);
  if (number == kNone) return kNone;
  policies_[number] = policy_for(slot_bytes);
  owners_[number] = owner;
  return number;
}

std::unique_ptr<EvictionPolicy> BlockIndex::policy_for(int64_t slot_bytes) {
  return make_policy(eviction_, entries_, pool_.geometry().capacity_bytes / slot_bytes);
}

void BlockIndex::set_quota(const std::string& owner, int64_t quota_bytes) {
  quota_slabs_[owner] = std::max<int64_t>(1, quota_bytes / pool_.geometry().slab_bytes);
}

void BlockIndex::check_name(const BlockName& name) {
  for (const std::string_view key : {name.key, name.before.value_or(std::string_view())})
    if (key.size() > kMaxKeyBytes)
      throw ArgumentError(
          "key", std::to_string(key.size()) + " bytes; at most " + std::to_string(kMaxKeyBytes));
}

// ---- queries -----------------------------------------------------------------------------------

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
          table_.find(hashes[i], [&](uint32_t other) { return entries_.key(other) == key; });
      found[begin + i] = state_of(id);
    }
  }
}

int64_t BlockIndex::slot_of(std::string_view key) const {
  const uint32_t id = id_of(key);
  return id == kNone ? kNoSlot : entries_[id].slot;
}

BlockName BlockIndex::block_in(int64_t slot) const {
  const uint32_t id = id_in(slot);
  const Entry& entry = entries_[id];
  BlockName name{entries_.key(id), std::nullopt};
  if (entry.before != kNone) name.before = entries_.key(entry.before);
  if (entry.is_awaiting) name.before = awaited_keys_.at(id);
  return name;
}

void BlockIndex::for_each(
    const std::function<void(const Entry&, std::string_view key)>& look) const {
  entries_.for_each([&](uint32_t id) { look(entries_[id], entries_.key(id)); });
}

// ---- use ---------------------------------------------------------------------------------------

void BlockIndex::touch(std::string_view key) {
  const uint32_t id = id_of(key);
  if (id == kNone || !entries_[id].is_readable()) return;
  entries_[id].used = tick();
  policy_of(entries_[id]).touch(id);
}

void BlockIndex::mark_dead(const std::vector<std::string_view>& keys) {
  for (size_t i = keys.size(); i-- > 0;) {
    const uint32_t id = id_of(keys[i]);
    if (id == kNone || is_continued(id)) continue;
    entries_[id].used = ++deaths_;
    if (entries_[id].is_readable()) policy_of(entries_[id]).expire(id);
  }
}

// Whether a successor of this block is not dead. Many successors, as of a shared system prompt, are
// not searched: one of them is enough.
bool BlockIndex::is_continued(uint32_t id) const {
  int searched = 0;
  for (uint32_t next = entries_[id].first_behind; next != kNone; next = entries_[next].next)
    if (!entries_[next].is_dead() || ++searched > kMaxSearchedSuccessors) return true;
  return false;
}

void BlockIndex::expect_again(const std::vector<std::string_view>& keys, double seconds) {
  if (last_evicted_use_ == 0) return;
  const uint64_t at = std::max(clock_, now());
  if (double(at - last_evicted_use_) < seconds * kNanosecondsPerSecond) mark_dead(keys);
}

// Times since the first use. Reading the coarse clock costs a fraction of a lookup.
uint64_t BlockIndex::now() const {
  if (hooks_.now) return kFirstUse + hooks_.now();
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
  return kFirstUse + uint64_t(time.tv_sec) * uint64_t(kNanosecondsPerSecond) +
         uint64_t(time.tv_nsec);
}

uint64_t BlockIndex::tick() { return clock_ = std::max(clock_ + 1, now()); }

std::vector<int64_t> BlockIndex::pin(const std::vector<std::string_view>& keys) {
  std::vector<int64_t> slots;
  slots.reserve(keys.size());
  for (const std::string_view key : keys) {
    const uint32_t id = id_of(key);
    if (id == kNone) throw InvariantError("cannot pin a block that is missing");
    slots.push_back(entries_[id].slot);
  }
  pin_slots(slots);
  return slots;
}

void BlockIndex::pin_slots(const std::vector<int64_t>& slots) {
  for (const int64_t slot : slots)
    if (!entries_[id_in(slot)].is_readable())
      throw InvariantError("slot " + std::to_string(slot) + " cannot be pinned before its commit");
  for (const int64_t slot : slots) ++entries_[id_in(slot)].pins;
}

void BlockIndex::unpin(const std::vector<int64_t>& slots) {
  for (const int64_t slot : slots) {
    const uint32_t id = id_in(slot);
    const Entry& entry = entries_[id];
    if (entry.pins == 0)
      throw InvariantError("slot " + std::to_string(slot) + " is unpinned more often than pinned");
    unpin_one(id);
    if (entry.pins == 0 && entry.state == State::kDetached) free(id);
  }
}

// ---- write -------------------------------------------------------------------------------------

int64_t BlockIndex::reserve(const BlockName& name, uint32_t size_class, int64_t more) {
  check_name(name);
  if (id_of(name.key) != kNone)
    throw InvariantError("cannot reserve a slot for a key that is already present");
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
  if (entry.used == 0) entry.used = tick();  // otherwise it died while it was being written
  ++readable_;
  policy_of(entry).admit(id);
  if (hooks_.ghosts) hooks_.ghosts->returned(entries_.key(id));
}

void BlockIndex::mark_sent(const std::vector<int64_t>& slots) {
  for (const int64_t slot : slots) entries_[id_in(slot)].is_sent = true;
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
  if (hooks_.ghosts) hooks_.ghosts->clear();
}

void BlockIndex::remove_entry(uint32_t id) {
  const bool is_being_written = entries_[id].state == State::kReserved;
  detach(id, false);
  if (!is_being_written && entries_[id].pins == 0) free(id);
}

// ---- slots -------------------------------------------------------------------------------------

void BlockIndex::free(uint32_t id) { drop(id); }

void BlockIndex::drop(uint32_t id) {
  const int64_t slot = entries_[id].slot;
  entries_.drop(id);
  pool_.release(slot);
}

uint32_t BlockIndex::id_of(std::string_view key) const {
  return table_.find(hash_(key), [&](uint32_t other) { return entries_.key(other) == key; });
}

uint32_t BlockIndex::id_in(int64_t slot) const {
  const uint32_t id = pool_.id_in(slot);
  if (id == kNone || id == kUnnamed)
    throw InvariantError("slot " + std::to_string(slot) + " is not in use");
  return id;
}

}  // namespace tiered_kv
