// The index of a tier that outlives its process: slots wait in quarantine before they are reused.
//
// The disk learns of a block's removal later than the index does. Were the slot written again
// before that, a crash in between would leave the old key pointing at the new block's bytes. So the
// slot of a block that left is *quarantined*: `reserve` never evicts, `make_room` does, ahead of
// need; the owner takes the quarantined slots, makes their removal durable, and then releases them.
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
  // `on_leave` is told the slot of every readable block that leaves, before it is taken.
  DurableIndex(const Geometry& geometry, std::string eviction, IndexHooks hooks,
               std::function<void(int64_t slot)> on_leave);

  // As of a BlockIndex; what was recovered beyond the quota leaves, a slab at a time.
  void set_quota(const std::string& owner, int64_t quota_bytes) override;

  // Slots of the class that `reserve` can still hand out.
  int64_t free_slots(uint32_t size_class) const;
  // Slots of the class, in use or not, in the slabs it has now.
  int64_t owned_slots(uint32_t size_class) const;
  // Slots of all readable blocks, in the order of their last use.
  std::vector<int64_t> coldest_first() const;

  // Evicts until so many slots of the class will come free; how many will. The block `before`
  // names stays. 0: everything is in use.
  int64_t make_room(uint32_t size_class, int64_t slots, std::optional<std::string_view> before);
  // Lets the coldest block of all classes leave; false when everything is in use.
  bool evict_coldest(std::optional<std::string_view> before);

  bool has_quarantined() const { return !quarantined_.empty(); }
  // Slots nobody uses any more, each given once; the caller owes their `release`.
  std::vector<int64_t> take_quarantined();
  // Takes back slots whose removal did not become durable.
  void quarantine_again(const std::vector<int64_t>& slots);
  // The removal of these slots' blocks is durable: they may be handed out again.
  void release(const std::vector<int64_t>& slots);
  // Aborts a reservation whose slot cannot be written; it is never handed out again.
  void retire(int64_t slot);

  // What the owner wants to know of a block when it is read, kept with it.
  struct Facts {
    uint32_t length;
    uint64_t checksum;
  };
  void set_facts(int64_t slot, const Facts& facts);
  Facts facts_in(int64_t slot) const;

  // Fills an empty index, coldest block first: all of it, or none and an error. With facts of each
  // block, or of none.
  void restore(const std::vector<BlockName>& names, const std::vector<int64_t>& slots,
               const std::vector<int64_t>& size_classes, const std::vector<Facts>& facts = {});

 protected:
  // A slot comes free when the disk says so; see `make_room`.
  int64_t make_free(uint32_t /*size_class*/, int64_t /*wanted*/) override { return kNoSlot; }
  void detach(uint32_t id, bool evicted) override;
  void free(uint32_t id) override;

 private:
  void keep_facts(uint32_t id, const Facts& facts);
  uint32_t quarantined_id(int64_t slot) const;

  std::function<void(int64_t slot)> on_leave_;
  std::vector<int64_t> quarantined_;
  std::deque<std::array<uint32_t, 3>> facts_;  // by id: length, and halves of the checksum
};

}  // namespace tiered_kv
