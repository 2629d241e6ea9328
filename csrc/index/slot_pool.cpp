#include "index/slot_pool.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "block_layout.h"
#include "index/entries.h"

namespace tiered_kv {
namespace {

using Least = std::greater<>;  // makes the standard heaps min-heaps

}  // namespace

SlotPool::SlotPool(const Geometry& geometry)
    : geometry_(geometry), usable_slabs_(geometry.num_slabs) {
  if (geometry.slab_bytes <= 0 || geometry.slots_per_slab <= 0 || geometry.num_slabs < 0 ||
      geometry.num_slabs > geometry.capacity_bytes / geometry.slab_bytes)
    throw ArgumentError("geometry", std::to_string(geometry.num_slabs) + " slabs of " +
                                        std::to_string(geometry.slab_bytes) +
                                        " bytes do not fit into " +
                                        std::to_string(geometry.capacity_bytes) + " bytes");
  slabs_.resize(size_t(geometry.num_slabs));
}

SlotPool::~SlotPool() {
  for (const Slab& slab : slabs_)
    if (slab.size_class != kNone && classes_[slab.size_class].slots_in_slab > 1) delete[] slab.many;
}

int64_t SlotPool::slots_for(int64_t slot_bytes) const {
  if (slot_bytes <= 0 || slot_bytes > geometry_.slab_bytes)
    throw ArgumentError("slot_bytes", std::to_string(slot_bytes) + " does not fit into a slab of " +
                                          std::to_string(geometry_.slab_bytes) + " bytes");
  const int64_t slots = geometry_.slab_bytes / slot_bytes;
  if (slots > geometry_.slots_per_slab)
    throw ArgumentError("slot_bytes", std::to_string(slots) + " slots per slab; at most " +
                                          std::to_string(geometry_.slots_per_slab));
  return slots;
}

uint32_t SlotPool::add_class(int64_t slot_bytes) {
  classes_.push_back({slot_bytes, slots_for(slot_bytes)});
  vacant_.push_back(uint32_t(classes_.size() - 1));
  return vacant_.back();
}

uint32_t SlotPool::reuse_class(int64_t slot_bytes) {
  const int64_t slots = slots_for(slot_bytes);
  for (; !vacant_.empty(); vacant_.pop_back()) {
    Class& last = classes_[vacant_.back()];
    if (last.slabs == 0) {
      last.slot_bytes = slot_bytes;
      last.slots_in_slab = slots;
      return vacant_.back();
    }
    last.is_listed = false;
  }
  return kNone;
}

const SlotPool::Class& SlotPool::of(uint32_t size_class) const {
  if (size_class >= classes_.size())
    throw ArgumentError("size_class", std::to_string(size_class) + " is not one of the " +
                                          std::to_string(classes_.size()) + " classes");
  return classes_[size_class];
}

int64_t SlotPool::used_bytes() const {
  int64_t sum = 0;
  for (const Class& one : classes_) sum += one.used * one.slot_bytes;
  return sum;
}

void SlotPool::limit(int64_t usable_bytes) {
  usable_slabs_ =
      std::min(std::max<int64_t>(0, usable_bytes) / geometry_.slab_bytes, geometry_.num_slabs);
}

int64_t SlotPool::allocate(uint32_t size_class, bool may_grow) {
  const Class& own = of(size_class);
  if (!own.partial.empty()) return take_slot(*own.partial.begin());
  const int64_t fresh = may_grow ? take_slab() : kNoSlot;
  if (fresh == kNoSlot) return kNoSlot;
  open_slab(fresh, size_class);
  return take_slot(fresh);
}

// Allocates the lowest free slot of a slab that has one.
int64_t SlotPool::take_slot(int64_t slab) {
  Slab& opened = slabs_[size_t(slab)];
  Class& own = classes_[opened.size_class];
  int64_t position = 0;
  if (own.slots_in_slab > 1) {
    uint32_t* const free = opened.many + own.slots_in_slab;
    const int64_t count = own.slots_in_slab - opened.used;
    std::pop_heap(free, free + count, Least());
    position = free[count - 1];
    if (count == 1) own.partial.erase(slab);
  }
  id_at(opened, position) = kUnnamed;
  ++opened.used;
  ++own.used;
  return slab * geometry_.slots_per_slab + position;
}

int64_t SlotPool::free_slots(uint32_t size_class, bool may_grow) const {
  const Class& own = of(size_class);
  int64_t free = own.slabs * own.slots_in_slab - own.used;
  if (may_grow) {
    const auto returned = std::count_if(returned_.begin(), returned_.end(),
                                        [this](int64_t slab) { return slab < usable_slabs_; });
    free += (returned + std::max<int64_t>(0, usable_slabs_ - next_fresh_)) * own.slots_in_slab;
  }
  return free;
}

void SlotPool::adopt(const std::vector<int64_t>& slots, const std::vector<int64_t>& size_classes) {
  if (next_fresh_ != 0) throw InvariantError("only a new pool can adopt slots");
  if (slots.size() != size_classes.size())
    throw ArgumentError("size_classes", std::to_string(size_classes.size()) + " for " +
                                            std::to_string(slots.size()) + " slots");
  // Check everything before changing anything.
  std::vector<int64_t> class_of_slab(slabs_.size(), -1);
  for (size_t i = 0; i < slots.size(); ++i) {
    const int64_t slab = slots[i] < 0 ? -1 : slab_of(slots[i]);
    const int64_t position = slots[i] % geometry_.slots_per_slab;
    if (size_classes[i] < 0 || size_t(size_classes[i]) >= classes_.size() || slab < 0 ||
        slab >= geometry_.num_slabs || position >= slots_in_slab(uint32_t(size_classes[i])))
      throw InvariantError("slot " + std::to_string(slots[i]) +
                           " does not exist in its slab and class");
    int64_t& owner = class_of_slab[size_t(slab)];
    if (owner >= 0 && owner != size_classes[i])
      throw InvariantError("a slab is claimed by two size classes");
    owner = size_classes[i];
  }
  std::vector<int64_t> sorted(slots);
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end())
    throw InvariantError("slot " + std::to_string(*twice) + " is claimed twice");
  for (size_t slab = 0; slab < class_of_slab.size(); ++slab) {
    if (class_of_slab[slab] < 0) continue;
    open_slab(int64_t(slab), uint32_t(class_of_slab[slab]));
    next_fresh_ = int64_t(slab) + 1;
  }
  for (const int64_t slot : slots) {
    Slab& slab = slabs_[size_t(slab_of(slot))];
    id_at(slab, slot % geometry_.slots_per_slab) = kUnnamed;
    ++slab.used;
    ++classes_[slab.size_class].used;
  }
  for (int64_t slab = 0; slab < next_fresh_; ++slab) {
    const Slab& opened = slabs_[size_t(slab)];
    if (opened.size_class == kNone) {
      returned_.push_back(slab);  // ascending order is a valid heap
      continue;
    }
    Class& own = classes_[opened.size_class];
    if (own.slots_in_slab == 1) continue;
    uint32_t* const free = opened.many + own.slots_in_slab;
    size_t count = 0;
    for (int64_t i = 0; i < own.slots_in_slab; ++i)
      if (id_at(opened, i) == kNone) free[count++] = uint32_t(i);
    if (opened.used == own.slots_in_slab) own.partial.erase(slab);
  }
}

void SlotPool::release(int64_t slot) {
  if (id_in(slot) == kNone)
    throw InvariantError("cannot release slot " + std::to_string(slot) + ": it is not in use");
  const int64_t number = slab_of(slot);
  Slab& slab = slabs_[size_t(number)];
  Class& own = classes_[slab.size_class];
  --own.used;
  if (--slab.used == 0) {
    close_slab(number);
    return;
  }
  const int64_t position = slot % geometry_.slots_per_slab;
  id_at(slab, position) = kNone;
  uint32_t* const free = slab.many + own.slots_in_slab;
  const int64_t count = own.slots_in_slab - slab.used;
  free[count - 1] = uint32_t(position);
  std::push_heap(free, free + count, Least());
  if (count == 1) own.partial.insert(number);
}

uint32_t SlotPool::id_in(int64_t slot) const {
  if (slot < 0 || slab_of(slot) >= geometry_.num_slabs) return kNone;
  const Slab& slab = slabs_[size_t(slab_of(slot))];
  const int64_t position = slot % geometry_.slots_per_slab;
  if (slab.size_class == kNone || position >= slots_in_slab(slab.size_class)) return kNone;
  return id_at(slab, position);
}

void SlotPool::set_id(int64_t slot, uint32_t id) {
  id_at(slabs_[size_t(slab_of(slot))], slot % geometry_.slots_per_slab) = id;
}

std::vector<int64_t> SlotPool::slots_of_slab(int64_t slab) const {
  std::vector<int64_t> used;
  const Slab& opened = slabs_[size_t(slab)];
  for (int64_t i = 0; i < slots_in_slab(opened.size_class); ++i)
    if (id_at(opened, i) != kNone) used.push_back(slab * geometry_.slots_per_slab + i);
  return used;
}

uint32_t& SlotPool::id_at(Slab& slab, int64_t position) {
  return slots_in_slab(slab.size_class) == 1 ? slab.only : slab.many[position];
}

uint32_t SlotPool::id_at(const Slab& slab, int64_t position) const {
  return slots_in_slab(slab.size_class) == 1 ? slab.only : slab.many[position];
}

int64_t SlotPool::take_slab() {
  if (!returned_.empty() && returned_.front() < usable_slabs_) {
    std::pop_heap(returned_.begin(), returned_.end(), Least());
    const int64_t slab = returned_.back();
    returned_.pop_back();
    return slab;
  }
  return next_fresh_ < usable_slabs_ ? next_fresh_++ : kNoSlot;
}

// Assigns the slab to the class, with all slots free.
void SlotPool::open_slab(int64_t slab, uint32_t size_class) {
  Slab& opened = slabs_[size_t(slab)];
  Class& own = classes_[size_class];
  if (own.slots_in_slab == 1) {
    opened.only = kNone;
  } else {
    opened.many = new uint32_t[size_t(own.slots_in_slab) * 2];
    uint32_t* const free = opened.many + own.slots_in_slab;
    std::fill(opened.many, free, kNone);
    std::iota(free, free + own.slots_in_slab, 0U);  // ascending order is a valid heap
    own.partial.insert(slab);
  }
  opened.size_class = size_class;
  ++own.slabs;
}

// Takes an empty slab back from its class.
void SlotPool::close_slab(int64_t slab) {
  Slab& closed = slabs_[size_t(slab)];
  Class& own = classes_[closed.size_class];
  if (own.slots_in_slab > 1) {
    delete[] closed.many;
    own.partial.erase(slab);
  }
  if (--own.slabs == 0 && !own.is_listed) {
    own.is_listed = true;
    vacant_.push_back(closed.size_class);
  }
  closed = Slab();
  returned_.push_back(slab);
  std::push_heap(returned_.begin(), returned_.end(), Least());
}

void SlotPool::check(size_t used) const {
  int64_t open = 0;
  size_t in_use = 0;
  for (size_t slab = 0; slab < slabs_.size(); ++slab) {
    if (slabs_[slab].size_class == kNone) continue;
    ++open;
    const size_t count = slots_of_slab(int64_t(slab)).size();
    if (count != slabs_[slab].used || count == 0)
      throw InvariantError("slab " + std::to_string(slab) + " counts " +
                           std::to_string(slabs_[slab].used) + " used slots, but " +
                           std::to_string(count) + " are in use");
    in_use += count;
    check_free(int64_t(slab));
  }
  if (in_use != used)
    throw InvariantError(std::to_string(in_use) + " slots are in use, the index has " +
                         std::to_string(used));
  const int64_t known = open + int64_t(returned_.size());
  if (known != next_fresh_ || known > geometry_.num_slabs)
    throw InvariantError(std::to_string(known) + " slabs are open or returned, but " +
                         std::to_string(next_fresh_) + " were opened");
  int64_t owned = 0;
  int64_t handed_out = 0;
  for (const Class& one : classes_) {
    owned += one.slabs;
    handed_out += one.used;
    if (int64_t(one.partial.size()) > one.slabs)
      throw InvariantError("a class lists free slots in slabs of other classes");
    if (one.slabs == 0 && !one.is_listed)
      throw InvariantError("a class without a slab is not listed for reuse");
  }
  if (owned != open || handed_out != int64_t(used) || used_bytes() > geometry_.capacity_bytes)
    throw InvariantError("classes own " + std::to_string(owned) + " of " + std::to_string(open) +
                         " slabs and " + std::to_string(handed_out) + " of " +
                         std::to_string(used) + " slots");
}

void SlotPool::check_free(int64_t slab) const {
  const Slab& opened = slabs_[size_t(slab)];
  const Class& own = of(opened.size_class);
  const bool has_free = own.slots_in_slab > opened.used;
  if ((own.partial.count(slab) != 0) != has_free)
    throw InvariantError("slab " + std::to_string(slab) +
                         " has free slots that do not match the list of its class");
  if (!has_free) return;
  const uint32_t* const free = opened.many + own.slots_in_slab;
  const std::set<uint32_t> positions(free, free + own.slots_in_slab - opened.used);
  if (int64_t(positions.size()) != own.slots_in_slab - opened.used ||
      !std::is_heap(free, free + positions.size(), Least()) ||
      std::any_of(positions.begin(), positions.end(),
                  [&](uint32_t position) { return id_at(opened, position) != kNone; }))
    throw InvariantError("slab " + std::to_string(slab) + " has an invalid heap of free slots");
}

}  // namespace tiered_kv
