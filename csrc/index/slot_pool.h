// Allocates the slots of an arena and assigns slabs to size classes.
//
// A class takes a slab from the common pool when it needs one, and returns a slab as soon as all of
// its slots are free. So the classes share the capacity and never exceed it. The lowest slot is
// allocated first, because the arena is pinned from the lowest address on.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <vector>

#include "index/keys.h"

namespace tiered_kv {

constexpr int64_t kNoSlot = -1;
constexpr uint32_t kUnnamed = kNone - 1;  // id of an allocated slot before `set_id`

// A slot id is slab * slots_per_slab + position in the slab.
struct Geometry {
  int64_t capacity_bytes;
  int64_t slab_bytes;
  int64_t num_slabs;
  int64_t slots_per_slab;
};

class SlotPool {
 public:
  // Throws ArgumentError.
  explicit SlotPool(const Geometry& geometry);
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;
  ~SlotPool();

  const Geometry& geometry() const { return geometry_; }
  size_t num_classes() const { return classes_.size(); }
  // Adds a class of slots of this size; returns its number.
  uint32_t add_class(int64_t slot_bytes);
  // Reassigns a class that owns no slab and returns its number; kNone if there is none.
  uint32_t reuse_class(int64_t slot_bytes);
  int64_t slot_bytes(uint32_t size_class) const { return of(size_class).slot_bytes; }
  int64_t slots_in_slab(uint32_t size_class) const { return of(size_class).slots_in_slab; }
  int64_t slabs_of(uint32_t size_class) const { return of(size_class).slabs; }
  int64_t used_bytes() const;

  // From now on allocates only slabs that lie completely within the first `usable_bytes`.
  void limit(int64_t usable_bytes);

  // Returns a free slot of the class; kNoSlot if the class and the free slabs have none. Without
  // `may_grow` the class takes no further slab.
  int64_t allocate(uint32_t size_class, bool may_grow = true);
  // Returns how many slots of the class can still be allocated.
  int64_t free_slots(uint32_t size_class, bool may_grow = true) const;
  // Marks these slots of a new pool as used; a slab must have slots of one class only.
  void adopt(const std::vector<int64_t>& slots, const std::vector<int64_t>& size_classes);
  void release(int64_t slot);

  // Returns the id of the entry in a slot in use; kNone for any other slot.
  uint32_t id_in(int64_t slot) const;
  void set_id(int64_t slot, uint32_t id);
  uint32_t class_of(int64_t slot) const { return slabs_[size_t(slab_of(slot))].size_class; }
  int64_t slab_of(int64_t slot) const { return slot / geometry_.slots_per_slab; }
  std::vector<int64_t> slots_of_slab(int64_t slab) const;

  // Throws InvariantError unless exactly `used` slots are in use and all counts are consistent.
  void check(size_t used) const;

 private:
  struct Slab {
    uint32_t size_class = kNone;
    uint32_t used = 0;
    union {
      uint32_t only;   // id in its single slot
      uint32_t* many;  // ids in its slots, by position, followed by a heap of the free positions
    };
    Slab() : many(nullptr) {}
  };
  struct Class {
    int64_t slot_bytes;
    int64_t slots_in_slab;
    int64_t slabs = 0;
    int64_t used = 0;
    bool is_listed = true;           // in vacant_, like every class without a slab
    std::set<int64_t> partial = {};  // slabs of the class with a free slot
  };

  const Class& of(uint32_t size_class) const;
  uint32_t& id_at(Slab& slab, int64_t position);
  uint32_t id_at(const Slab& slab, int64_t position) const;
  int64_t slots_for(int64_t slot_bytes) const;  // slots per slab; throws ArgumentError
  int64_t take_slab();
  void open_slab(int64_t slab, uint32_t size_class);
  void close_slab(int64_t slab);
  int64_t take_slot(int64_t slab);
  void check_free(int64_t slab) const;

  Geometry geometry_;
  std::vector<Slab> slabs_;
  std::vector<Class> classes_;
  std::vector<uint32_t> vacant_;   // all classes without a slab, and some that got one since
  std::vector<int64_t> returned_;  // heap of slabs that were used before and are free
  int64_t usable_slabs_;
  int64_t next_fresh_ = 0;
};

}  // namespace tiered_kv
