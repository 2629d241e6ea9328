// LRU over the leaves of the prefix trees.
//
// It uses a heap by time of last use, in which every leaf knows its index. A linked list does not
// work: a block that becomes a leaf again must be inserted in the middle, according to its last
// use.
#include <utility>

#include "index/eviction.h"

namespace tiered_kv {
namespace {

class Lru final : public EvictionPolicy {
 public:
  explicit Lru(EntryTable& entries) : entries_(entries) {}

  void admit(uint32_t id) override {
    if (entries_[id].is_leaf()) push(id);
  }

  void touch(uint32_t id) override {
    const Entry& entry = entries_[id];
    if (!entry.is_queued) return;
    heap_[entry.queue_next].used = entry.used;
    sink(entry.queue_next);
  }

  void expire(uint32_t id) override {
    const Entry& entry = entries_[id];
    if (!entry.is_queued) return;
    heap_[entry.queue_next].used = entry.used;
    sink(entry.queue_next);  // one that was dead already dies later than others now
    rise(entry.queue_next);
  }

  void forget(uint32_t id, bool /*evicted*/) override { remove(id); }

  void shield(uint32_t id) override { remove(id); }

  void unshield(uint32_t id) override {
    entries_[id].is_set_aside = false;
    push(id);
  }

  uint32_t next() override {
    if (heap_.empty()) return kNone;
    const uint32_t id = heap_.front().id;
    remove(id);
    entries_[id].is_set_aside = true;
    given_.push_back(id);
    return id;
  }

  void end_walk() override {
    for (const uint32_t id : given_) {
      Entry& entry = entries_[id];
      if (!entry.is_set_aside) continue;
      entry.is_set_aside = false;
      push(id);
    }
    given_.clear();
  }

  size_t check() const override {
    for (size_t at = 0; at < heap_.size(); ++at) {
      const Entry& entry = entries_[heap_[at].id];
      if (!entry.is_queued || entry.queue_next != at || entry.used != heap_[at].used ||
          !entry.is_leaf() || !entry.is_readable() ||
          (at > 0 && heap_[(at - 1) / 2].used > heap_[at].used))
        throw InvariantError("the LRU heap is inconsistent");
    }
    return heap_.size();
  }

 private:
  struct Leaf {
    uint64_t used;
    uint32_t id;
  };

  void push(uint32_t id) {
    heap_.push_back({entries_[id].used, id});
    entries_[id].is_queued = true;
    rise(uint32_t(heap_.size() - 1));
  }

  // Removes an entry from the heap if it is there; walks no longer return it.
  void remove(uint32_t id) {
    Entry& entry = entries_[id];
    entry.is_set_aside = false;
    if (!entry.is_queued) return;
    entry.is_queued = false;
    const uint32_t at = entry.queue_next;
    const Leaf last = heap_.back();
    heap_.pop_back();
    if (at == heap_.size()) return;
    heap_[at] = last;
    entries_[last.id].queue_next = at;
    sink(at);
    rise(entries_[last.id].queue_next);
  }

  void put(uint32_t at, const Leaf& leaf) {
    heap_[at] = leaf;
    entries_[leaf.id].queue_next = at;
  }

  void rise(uint32_t at) {
    const Leaf leaf = heap_[at];
    while (at > 0 && heap_[(at - 1) / 2].used > leaf.used) {
      put(at, heap_[(at - 1) / 2]);
      at = (at - 1) / 2;
    }
    put(at, leaf);
  }

  void sink(uint32_t at) {
    const Leaf leaf = heap_[at];
    for (;;) {
      size_t below = size_t{at} * 2 + 1;
      if (below >= heap_.size()) break;
      if (below + 1 < heap_.size() && heap_[below + 1].used < heap_[below].used) ++below;
      if (heap_[below].used >= leaf.used) break;
      put(at, heap_[below]);
      at = uint32_t(below);
    }
    put(at, leaf);
  }

  EntryTable& entries_;
  std::vector<Leaf> heap_;
  std::vector<uint32_t> given_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_lru(EntryTable& entries) {
  return std::make_unique<Lru>(entries);
}

}  // namespace tiered_kv
