// Slots of an arena: which are free, and which size class owns which slab.
//
// Classes take slabs from a common pool when they need one and give a slab back as soon as its last
// slot is free, so the capacity is shared exactly and never exceeded. Slots are handed out lowest
// first: the part of the arena that is pinned first is used first.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <vector>

#include "index/keys.h"

namespace tiered_kv {

constexpr int64_t kNoSlot = -1;
constexpr uint32_t kUnnamed = kNone - 1;  // what lies in a slot in use before anybody says so

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
  // A class of slots of so many bytes; its number.
  uint32_t add_class(int64_t slot_bytes);
  // The same with the number of a class that has no slab; kNone if there is none.
  uint32_t reuse_class(int64_t slot_bytes);
  int64_t slot_bytes(uint32_t size_class) const { return of(size_class).slot_bytes; }
  int64_t slots_in_slab(uint32_t size_class) const { return of(size_class).slots_in_slab; }
  int64_t slabs_of(uint32_t size_class) const { return of(size_class).slabs; }
  int64_t used_bytes() const;

  // Only slabs wholly within the first so many bytes are handed out from now on.
  void limit(int64_t usable_bytes);

  // A free slot of the class, or kNoSlot when neither it nor a free slab is left. A class that may
  // not grow takes no further slab.
  int64_t allocate(uint32_t size_class, bool may_grow = true);
  // How many slots of the class can still be handed out.
  int64_t free_slots(uint32_t size_class, bool may_grow = true) const;
  // Takes exactly these slots out of a fresh pool; a slab has slots of one class.
  void adopt(const std::vector<int64_t>& slots, const std::vector<int64_t>& size_classes);
  void release(int64_t slot);

  // What lies in a slot in use; kNone for any other number.
  uint32_t id_in(int64_t slot) const;
  void set_id(int64_t slot, uint32_t id);
  uint32_t class_of(int64_t slot) const { return slabs_[size_t(slab_of(slot))].size_class; }
  int64_t slab_of(int64_t slot) const { return slot / geometry_.slots_per_slab; }
  std::vector<int64_t> slots_of_slab(int64_t slab) const;

  // Throws InvariantError unless exactly `used` slots are in use and all sums agree.
  void check(size_t used) const;

 private:
  struct Slab {
    uint32_t size_class = kNone;
    uint32_t used = 0;
    union {
      uint32_t only;   // what lies in its slot
      uint32_t* many;  // what lies in its slots, by position; behind that a heap of the free ones
    };
    Slab() : many(nullptr) {}
  };
  struct Class {
    int64_t slot_bytes;
    int64_t slots_in_slab;
    int64_t slabs = 0;
    int64_t used = 0;
    bool is_listed = true;           // in vacant_, as is every class without a slab
    std::set<int64_t> partial = {};  // its slabs with a free slot
  };

  const Class& of(uint32_t size_class) const;
  uint32_t& id_at(Slab& slab, int64_t position);
  uint32_t id_at(const Slab& slab, int64_t position) const;
  int64_t slots_for(int64_t slot_bytes) const;  // in a slab; throws ArgumentError
  int64_t take_slab();
  void open_slab(int64_t slab, uint32_t size_class);
  void close_slab(int64_t slab);
  int64_t take_slot(int64_t slab);
  void check_free(int64_t slab) const;

  Geometry geometry_;
  std::vector<Slab> slabs_;
  std::vector<Class> classes_;
  std::vector<uint32_t> vacant_;   // classes without a slab, and some that got one since
  std::vector<int64_t> returned_;  // a heap of slabs
  int64_t usable_slabs_;
  int64_t next_fresh_ = 0;
};

}  // namespace tiered_kv
