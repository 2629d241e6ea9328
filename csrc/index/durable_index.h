// The index of a persistent tier: freed slots stay in quarantine before they are reused.
//
// The removal of a block becomes durable on disk later than in the index. If the slot were
// overwritten before that, a crash would leave the old key pointing at the new block's bytes. So
// the slot of a removed block is *quarantined*. `reserve` never evicts; `make_room` does, ahead of
// demand. The owner takes the quarantined slots, makes their removal durable, and releases them.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "index/block_index.h"

namespace tiered_kv {

class DurableIndex final : public BlockIndex {
 public:
  // `on_leave` is called with the slot of every readable block that is removed, before it is.
  DurableIndex(const Geometry& geometry, std::string eviction, IndexHooks hooks,
               std::function<void(int64_t slot)> on_leave);

  // Like BlockIndex::set_quota; also evicts recovered blocks beyond the quota, slab by slab.
  void set_quota(const std::string& owner, int64_t quota_bytes) override;

  // Returns how many slots of the class `reserve` can still allocate.
  int64_t free_slots(uint32_t size_class) const;
  // Returns how many slots, used or free, the class has in its slabs.
  int64_t owned_slots(uint32_t size_class) const;
  // Returns the slots of all readable blocks, least recently used first.
  std::vector<int64_t> coldest_first() const;

  // Evicts blocks until `slots` slots of the class become free; returns how many will. The block
  // `before` is not evicted. The result is 0 if all blocks are in use.
  int64_t make_room(uint32_t size_class, int64_t slots, std::optional<std::string_view> before);
  // Evicts the coldest block of all classes; false if all blocks are in use.
  bool evict_coldest(std::optional<std::string_view> before);

  bool has_quarantined() const { return !quarantined_.empty(); }
  // Returns unused slots in quarantine, each of them once; the caller must `release` them.
  std::vector<int64_t> take_quarantined();
  // Returns slots to quarantine because their removal did not become durable.
  void quarantine_again(const std::vector<int64_t>& slots);
  // Makes slots available again after the removal of their blocks became durable.
  void release(const std::vector<int64_t>& slots);
  // Aborts a reservation whose slot cannot be written; the slot is never used again.
  void retire(int64_t slot);

  // Metadata of a block that its owner needs to read it.
  struct Facts {
    uint32_t length;
    uint64_t checksum;
  };
  void set_facts(int64_t slot, const Facts& facts);
  Facts facts_in(int64_t slot) const;

  // Fills an empty index, coldest block first. Restores all blocks, or throws and restores none.
  // `facts` has an entry per block, or is empty.
  void restore(const std::vector<BlockName>& names, const std::vector<int64_t>& slots,
               const std::vector<int64_t>& size_classes, const std::vector<Facts>& facts = {});

 protected:
  // A slot becomes free only after its removal is durable; see `make_room`.
  int64_t make_free(uint32_t /*size_class*/, int64_t /*wanted*/) override { return kNoSlot; }
  void detach(uint32_t id, bool evicted) override;
  void free(uint32_t id) override;

 private:
  void keep_facts(uint32_t id, const Facts& facts);
  uint32_t quarantined_id(int64_t slot) const;

  std::function<void(int64_t slot)> on_leave_;
  std::vector<int64_t> quarantined_;
  std::deque<std::array<uint32_t, 3>> facts_;  // by id: length, low and high half of the checksum
};

}  // namespace tiered_kv
