// The index of a tier: maps keys to slots, counts pins, and selects blocks to evict.
//
// The states of a slot are free -> reserved -> committed -> free, or reserved -> free on abort.
// Only committed blocks are visible to lookups. A pinned slot is being read by a copy and cannot be
// reused. A block that is removed while it is pinned or being written becomes *detached*: lookups
// no longer find it, and its slot becomes free when its last user releases it.
//
// Each block of a chain is linked to its predecessor. A block is never evicted before its
// successors, so the rest of a partly evicted prefix is always its useful part, the head. The only
// exception: if nothing else can be evicted, a block with successors may be, provided that a lower
// tier holds it.
//
// Size classes may belong to owners with a quota. An owner at its quota can evict only its own
// blocks, never those of others.
//
// The index moves no bytes and does not depend on Python. It is not thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "index/entries.h"
#include "index/eviction.h"
#include "index/ghosts.h"
#include "index/slot_pool.h"

namespace tiered_kv {

enum class Lookup : uint8_t { kMiss, kPending, kHit };

// Callbacks, which run while the index is changing: they may pin and unpin, but nothing else. Each
// may be empty: then every eviction is allowed, and no lower tier holds a block.
struct IndexHooks {
  std::function<void(std::string_view key, int64_t nbytes)> on_evict;
  std::shared_ptr<Ghosts> ghosts;  // remembers the blocks that left, until `clear`
  // Called before a block is evicted; it can veto the eviction and may pin the block.
  std::function<bool(std::string_view key)> may_evict;
  // Whether a lower tier holds a block, so that its successors are useful without it.
  std::function<bool(std::string_view key)> is_below;
  // The time in nanoseconds; empty: that of the system since its start.
  std::function<uint64_t()> now;
};

struct BlockName {
  std::string_view key;
  std::optional<std::string_view> before;  // key of its predecessor in the chain
};

class BlockIndex {
 public:
  BlockIndex(const Geometry& geometry, std::string eviction, IndexHooks hooks);
  BlockIndex(const BlockIndex&) = delete;
  BlockIndex& operator=(const BlockIndex&) = delete;
  virtual ~BlockIndex() = default;

  // Adds a class for this owner's blocks of this size; returns its number.
  uint32_t add_class(int64_t slot_bytes, const std::string& owner);
  // Reassigns a class that owns no slab, with a new policy, and returns its number; kNone if there
  // is no such class.
  uint32_t reuse_class(int64_t slot_bytes, const std::string& owner);
  // Limits the bytes of this owner's classes, in whole slabs and at least one slab.
  virtual void set_quota(const std::string& owner, int64_t quota_bytes);
  // Removes the quota of an owner without classes.
  void forget_quota(const std::string& owner) { quota_slabs_.erase(owner); }
  size_t quotas() const { return quota_slabs_.size(); }
  // Allows slots only in the first `usable_bytes` of the arena, which all workers have pinned.
  void limit(int64_t usable_bytes) { pool_.limit(usable_bytes); }

  // ---- queries: no side effects
  int64_t used_bytes() const { return pool_.used_bytes(); }
  size_t readable() const { return readable_; }
  size_t held() const { return table_.size(); }
  Lookup lookup(std::string_view key) const;
  // Looks up many keys, which is faster than one by one because it prefetches.
  void lookup(const std::vector<std::string_view>& keys, std::vector<Lookup>& found) const;
  // Returns the slot of a block that is readable or being written; kNoSlot otherwise.
  int64_t slot_of(std::string_view key) const;
  BlockName block_in(int64_t slot) const;
  void for_each(const std::function<void(const Entry&, std::string_view key)>& look) const;

  // ---- use
  // Marks a readable block as used.
  void touch(std::string_view key);
  // Makes blocks the first to be evicted, because no request is expected to ask for them. They are
  // in chain order, and leave tail first. A later use makes them ordinary blocks again. Blocks that
  // other sequences continue stay as they are; missing blocks are skipped.
  void mark_dead(const std::vector<std::string_view>& keys);
  // The next request for a sequence is expected in so many seconds. Marks it as dead if blocks are
  // evicted earlier than that after their last use: it would take the room of others until it is
  // evicted as well.
  void expect_again(const std::vector<std::string_view>& keys, double seconds);
  // A lower tier has received the blocks in these slots. The ghosts tell when they are evicted.
  void mark_sent(const std::vector<int64_t>& slots);
  // Pins readable blocks until `unpin` and returns their slots. Pins all of them, or throws.
  std::vector<int64_t> pin(const std::vector<std::string_view>& keys);
  void pin_slots(const std::vector<int64_t>& slots);
  void unpin(const std::vector<int64_t>& slots);

  // ---- write: reserve -> commit | abort
  // Reserves a slot for a block, evicting if needed; kNoSlot if nothing can be evicted. The key
  // must be a miss. The predecessor is not evicted by this call. `more` is the number of further
  // blocks that the caller reserves next; one search finds victims for all of them.
  int64_t reserve(const BlockName& name, uint32_t size_class, int64_t more = 0);
  // Makes the block readable; false if it was removed while being written.
  bool commit(int64_t slot);
  // Releases a reserved slot. Successors of the block stay and await it.
  void abort(int64_t slot);

  // ---- removal
  // Removes a block, for example a damaged one; its slot becomes free when it is unused. With
  // `in_slot`, only if the block is still in that slot: a good copy may have replaced it meanwhile.
  bool remove(std::string_view key, int64_t in_slot = kNoSlot);
  // Removes every block. Running copies keep their slots until they report.
  void clear();

  // Returns the number and the bytes of blocks evicted since the last call.
  std::pair<int64_t, int64_t> take_evicted() {
    return {std::exchange(evicted_blocks_, 0), std::exchange(evicted_bytes_, 0)};
  }

  // Throws InvariantError if an invariant of the index is violated.
  virtual void check() const;

 protected:
  // Throws ArgumentError if a key is too long.
  static void check_name(const BlockName& name);

  // Protects a block from eviction during a scope.
  class Kept {
   public:
    Kept(BlockIndex& index, std::optional<std::string_view> key);
    Kept(const Kept&) = delete;
    Kept& operator=(const Kept&) = delete;
    ~Kept();

   private:
    BlockIndex& index_;
    uint32_t id_;
  };

  virtual int64_t make_free(uint32_t size_class, int64_t wanted);
  virtual void detach(uint32_t id, bool evicted);
  virtual void free(uint32_t id);

  uint32_t id_of(std::string_view key) const;
  uint32_t id_in(int64_t slot) const;  // throws InvariantError
  bool at_quota(const std::string& owner) const;
  int64_t slabs_of(const std::string& owner) const;
  // Evicts the coldest blocks, at most `wanted` and often fewer. Returns how many slots of the
  // class become free, 0 if nothing can be evicted.
  int64_t evict_for(uint32_t size_class, int64_t wanted = 1);
  uint32_t coldest(uint32_t size_class);
  void evict(uint32_t id);
  // Evicts all blocks of the victim's slab, successors first; false if one of them is in use.
  bool evict_slab_of(uint32_t victim);
  void drop(uint32_t id);
  void unpin_one(uint32_t id);
  // Adds the block to the table and links it to its predecessor and successors.
  void enter(uint32_t id, std::optional<std::string_view> before);
  void become_readable(uint32_t id);
  void link(uint32_t id, uint32_t before);
  void await(uint32_t id, std::string_view before);

  SlotPool pool_;
  EntryTable entries_;
  std::vector<std::unique_ptr<EvictionPolicy>> policies_;  // per class
  std::vector<std::string> owners_;                        // per class
  std::map<std::string, int64_t> quota_slabs_;
  KeyHash hash_;
  IdTable table_;  // blocks that are readable or being written, by key

 private:
  class Leaving;
  struct Parked {  // a list, roughly from coldest to hottest
    uint32_t first = kNone;
    uint32_t last = kNone;
  };

  EvictionPolicy& policy_of(const Entry& entry) { return *policies_[pool_.class_of(entry.slot)]; }
  Lookup state_of(uint32_t id) const;
  uint64_t now() const;
  uint64_t tick();
  bool may_evict(uint32_t id) const;
  bool is_in_use(uint32_t id) const;
  bool is_continued(uint32_t id) const;
  void park(uint32_t id);
  void unpark(uint32_t id);
  void unlink(uint32_t id);
  void stop_awaiting(uint32_t id);
  uint32_t first_awaiting(std::string_view key) const;
  void chain_to(uint32_t& first, uint32_t id);
  uint32_t first_of_chain(uint32_t id) const;
  void remove_entry(uint32_t id);
  std::unique_ptr<EvictionPolicy> policy_for(int64_t slot_bytes);
  bool cut_chain(uint32_t size_class, std::optional<std::string_view> before);
  uint32_t block_to_cut_at(const std::vector<uint32_t>& tails, uint32_t size_class) const;
  void check_entry(uint32_t id) const;

  std::string eviction_;
  IndexHooks hooks_;
  IdTable awaited_;             // first block that awaits a predecessor, by the predecessor's key
  std::vector<Parked> parked_;  // per class
  std::unordered_map<int64_t, int64_t> blockers_;  // slab -> slot in use that kept it from eviction
  std::unordered_map<uint32_t, std::string> awaited_keys_;  // id of the awaiting block -> key
  uint64_t clock_ = kFirstUse;  // of the last use: in nanoseconds, but later than that before
  uint64_t deaths_ = 0;
  uint64_t last_evicted_use_ = 0;  // of the block in use that was evicted last; 0: none yet
  size_t readable_ = 0;
  int64_t evicted_blocks_ = 0;
  int64_t evicted_bytes_ = 0;
};

}  // namespace tiered_kv
