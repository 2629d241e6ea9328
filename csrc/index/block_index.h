// The index of a tier: which key lies in which slot, who uses it, what may leave.
//
// A slot goes free -> reserved -> committed -> free, or reserved -> free on abort. Only committed
// blocks are visible to lookups. A pinned slot is being read by a copy and cannot be reused. A
// block that is removed while pinned (or while still being written) becomes *detached*: no lookup
// finds it any more, and its slot returns when the last user lets go.
//
// Blocks of a chain are linked to the block before them. A block with followers never leaves
// before them, so what remains of a prefix is always its useful end: the head. Only over a slower
// tier that has it, and where nothing else can leave, one does.
//
// Size classes may belong to owners with a quota. An owner at its quota makes room among its own
// blocks; others cannot be pushed out by it.
//
// Moves no bytes, knows nothing of Python, and is used from one thread at a time.
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
#include "index/slot_pool.h"

namespace tiered_kv {

enum class Lookup : uint8_t { kMiss, kPending, kHit };

// Asked and told while the index changes: they may pin and unpin, and nothing else. Empty ones
// allow everything, know nothing and are not told.
struct IndexHooks {
  std::function<void(std::string_view key, int64_t nbytes)> on_evict;
  // Asked of a block that is about to leave; it may pin it and refuse.
  std::function<bool(std::string_view key)> may_evict;
  // Whether a slower tier has a block, so that what follows is of use without it.
  std::function<bool(std::string_view key)> is_below;
};

struct BlockName {
  std::string_view key;
  std::optional<std::string_view> before;  // the block it follows
};

class BlockIndex {
 public:
  BlockIndex(const Geometry& geometry, std::string eviction, IndexHooks hooks);
  BlockIndex(const BlockIndex&) = delete;
  BlockIndex& operator=(const BlockIndex&) = delete;
  virtual ~BlockIndex() = default;

  // A class for this owner's blocks that take so many bytes; its number.
  uint32_t add_class(int64_t slot_bytes, const std::string& owner);
  // The same with the number of a class that has no slab; kNone if there is none. Nothing is left
  // of what that class was.
  uint32_t reuse_class(int64_t slot_bytes, const std::string& owner);
  // The most this owner's classes may hold, in whole slabs and at least one.
  virtual void set_quota(const std::string& owner, int64_t quota_bytes);
  // Of an owner without classes.
  void forget_quota(const std::string& owner) { quota_slabs_.erase(owner); }
  size_t quotas() const { return quota_slabs_.size(); }
  // How much of the arena every worker can use so far; what lies beyond is not handed out.
  void limit(int64_t usable_bytes) { pool_.limit(usable_bytes); }

  // ---- questions: no side effects
  int64_t used_bytes() const { return pool_.used_bytes(); }
  size_t readable() const { return readable_; }
  size_t held() const { return table_.size(); }
  Lookup lookup(std::string_view key) const;
  // As many lookups at once are faster than one by one.
  void lookup(const std::vector<std::string_view>& keys, std::vector<Lookup>& found) const;
  // Where a block is that is readable or being written; kNoSlot for another.
  int64_t slot_of(std::string_view key) const;
  BlockName block_in(int64_t slot) const;
  void for_each(const std::function<void(const Entry&, std::string_view key)>& look) const;

  // ---- use
  // Marks a readable block as used.
  void touch(std::string_view key);
  // Slots of readable blocks, kept in place until `unpin`: all of them, or none and an error.
  std::vector<int64_t> pin(const std::vector<std::string_view>& keys);
  void pin_slots(const std::vector<int64_t>& slots);
  void unpin(const std::vector<int64_t>& slots);

  // ---- write: reserve -> commit | abort
  // A slot to write `key` into, evicting if needed; kNoSlot when nothing can leave. The key must be
  // a miss. The block it follows is protected from this very eviction. So many `more` will be
  // reserved at once: looking for what may leave is done for all of them.
  int64_t reserve(const BlockName& name, uint32_t size_class, int64_t more = 0);
  // Makes the block readable; false when it was removed while being written.
  bool commit(int64_t slot);
  // Gives a reserved slot back. Its followers, if any, await it.
  void abort(int64_t slot);

  // ---- removal
  // Forgets a block at once (it turned out bad); its slot returns when nobody uses it. With
  // `in_slot`, only what lies there: it may have been replaced by a good one meanwhile.
  bool remove(std::string_view key, int64_t in_slot = kNoSlot);
  // Forgets every block. Copies under way keep their slots until they report.
  void clear();

  // Blocks that had to leave for others since the last call, and their bytes.
  std::pair<int64_t, int64_t> take_evicted() {
    return {std::exchange(evicted_blocks_, 0), std::exchange(evicted_bytes_, 0)};
  }

  // Throws InvariantError unless every rule of this file holds.
  virtual void check() const;

 protected:
  // Throws ArgumentError where a key is too long.
  static void check_name(const BlockName& name);

  // Protects a block from eviction for a while.
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
  // Evicts what is coldest, at most `wanted` blocks and often fewer; how many slots of the class
  // come free, 0 if nothing can leave.
  int64_t evict_for(uint32_t size_class, int64_t wanted = 1);
  uint32_t coldest(uint32_t size_class);
  void evict(uint32_t id);
  // Empties the victim's slab, followers first; false when something in it is in use.
  bool evict_slab_of(uint32_t victim);
  void drop(uint32_t id);
  void unpin_one(uint32_t id);
  // Makes the block known, and links it to those before and behind it.
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
  IdTable table_;  // blocks that are readable or being written, by their key

 private:
  class Leaving;
  struct Parked {  // a list, the coldest mostly first
    uint32_t first = kNone;
    uint32_t last = kNone;
  };

  EvictionPolicy& policy_of(const Entry& entry) { return *policies_[pool_.class_of(entry.slot)]; }
  Lookup state_of(uint32_t id) const;
  bool may_evict(uint32_t id) const;
  bool is_in_use(uint32_t id) const;
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
  IdTable awaited_;             // the first of those that await a block, by its key
  std::vector<Parked> parked_;  // per class
  std::unordered_map<int64_t, int64_t> blockers_;  // slots that kept slabs from leaving, by slab
  std::unordered_map<uint32_t, std::string> awaited_keys_;  // by who awaits
  uint64_t clock_ = 0;
  size_t readable_ = 0;
  int64_t evicted_blocks_ = 0;
  int64_t evicted_bytes_ = 0;
};

}  // namespace tiered_kv
