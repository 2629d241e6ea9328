// S3-FIFO: a small queue filters out blocks that are used once; a main queue keeps the others.
//
// Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. New blocks enter the
// small queue (a tenth of the slots). A block that reaches its end is evicted unless it was used
// again; then it moves to the main queue, which gives used blocks another round. The ghosts are the
// keys of blocks evicted from the small queue: such a block enters the main queue when it returns.
//
// Only leaves are queued. A block that becomes a leaf again returns to the eviction end of its
// queue, so that a cold chain is evicted from its tail to its head without a search.
#include <algorithm>

#include "index/eviction.h"

namespace tiered_kv {
namespace {

constexpr int64_t kSmallShare = 10;  // target size of the small queue: 1/10 of the slots
constexpr uint8_t kMaxUses = 3;
constexpr size_t kMaxGhosts = size_t{1} << 31;

// The most recent `limit` ghosts, by hash. A hash collision only puts a block into the wrong queue.
class Ghosts {
 public:
  explicit Ghosts(size_t limit) : limit_(std::min(limit, kMaxGhosts)) {}

  void add(uint64_t hash) {
    if (ring_.size() < limit_) {
      ring_.push_back({hash, true});
    } else {
      if (ring_[at_].is_there) table_.erase(ring_[at_].hash, uint32_t(at_));
      ring_[at_] = {hash, true};
    }
    table_.insert(hash, uint32_t(at_));
    at_ = (at_ + 1) % limit_;
  }

  // Removes a ghost; returns whether it was present.
  bool take(uint64_t hash) {
    const uint32_t at = table_.find(hash, [&](uint32_t i) { return ring_[i].hash == hash; });
    if (at == kNone) return false;
    table_.erase(hash, at);
    ring_[at].is_there = false;
    return true;
  }

 private:
  struct Ghost {
    uint64_t hash : 63;
    uint64_t is_there : 1;
    Ghost(uint64_t value, bool there) : hash(value), is_there(there ? 1U : 0U) {}
  };

  size_t limit_;
  size_t at_ = 0;  // index of the next ghost
  std::vector<Ghost> ring_;
  IdTable table_;
};

class S3Fifo final : public EvictionPolicy {
 public:
  S3Fifo(EntryTable& entries, int64_t capacity)
      : entries_(entries),
        small_target_(size_t(std::max<int64_t>(1, capacity / kSmallShare))),
        ghosts_(size_t(std::max<int64_t>(1, capacity))) {}

  void admit(uint32_t id) override {
    Entry& entry = entries_[id];
    entry.uses = 0;
    entry.is_in_main = ghosts_.take(hash_of(id));
    if (entry.is_leaf()) append(id);
  }

  void touch(uint32_t id) override {
    Entry& entry = entries_[id];
    entry.uses = uint8_t(std::min<int>(entry.uses + 1, kMaxUses));
  }

  void expire(uint32_t id) override {
    Entry& entry = entries_[id];
    const bool is_queued = entry.is_queued;
    remove(id);
    entry.uses = 0;
    entry.is_in_main = false;
    if (is_queued) prepend(id);
  }

  void forget(uint32_t id, bool evicted) override {
    remove(id);
    if (evicted && !entries_[id].is_in_main) ghosts_.add(hash_of(id));
  }

  void shield(uint32_t id) override { remove(id); }

  void unshield(uint32_t id) override {
    remove(id);
    prepend(id);
  }

  uint32_t next() override {
    if (offered_ != kNone) {  // not evicted (pinned): set aside until end_walk
      const uint32_t refused = offered_;
      remove(refused);
      entries_[refused].is_set_aside = true;
      refused_.push_back(refused);
    }
    offered_ = leaving();
    return offered_;
  }

  void end_walk() override {
    offered_ = kNone;
    for (size_t i = refused_.size(); i-- > 0;)
      if (entries_[refused_[i]].is_set_aside) unshield(refused_[i]);
    refused_.clear();
  }

  size_t check() const override {
    for (const Queue* queue : {&small_, &main_}) {
      size_t count = 0;
      uint32_t before = kNone;
      for (uint32_t id = queue->first; id != kNone; id = entries_[id].queue_next) {
        const Entry& entry = entries_[id];
        if (!entry.is_queued || entry.queue_prev != before || !entry.is_leaf() ||
            !entry.is_readable() || entry.is_in_main != (queue == &main_) || ++count > queue->count)
          throw InvariantError("an S3-FIFO queue is inconsistent");
        before = id;
      }
      if (count != queue->count || before != queue->last)
        throw InvariantError("an S3-FIFO queue has a wrong length or end");
    }
    return small_.count + main_.count;
  }

 private:
  struct Queue {  // the eviction end is first
    uint32_t first = kNone;
    uint32_t last = kNone;
    size_t count = 0;
  };

  uint64_t hash_of(uint32_t id) const { return hash_(entries_.key(id)) >> 1; }
  Queue& queue_of(const Entry& entry) { return entry.is_in_main ? main_ : small_; }

  void append(uint32_t id) {
    Queue& queue = queue_of(entries_[id]);
    insert(queue, id, queue.last, kNone);
  }

  void prepend(uint32_t id) {
    Queue& queue = queue_of(entries_[id]);
    insert(queue, id, kNone, queue.first);
  }

  void insert(Queue& queue, uint32_t id, uint32_t before, uint32_t behind) {
    Entry& entry = entries_[id];
    entry.is_queued = true;
    entry.queue_prev = before;
    entry.queue_next = behind;
    (before == kNone ? queue.first : entries_[before].queue_next) = id;
    (behind == kNone ? queue.last : entries_[behind].queue_prev) = id;
    ++queue.count;
  }

  // Removes an entry from its queue if it is there; walks no longer return it.
  void remove(uint32_t id) {
    Entry& entry = entries_[id];
    entry.is_set_aside = false;
    if (offered_ == id) offered_ = kNone;
    if (!entry.is_queued) return;
    Queue& queue = queue_of(entry);
    entry.is_queued = false;
    (entry.queue_prev == kNone ? queue.first : entries_[entry.queue_prev].queue_next) =
        entry.queue_next;
    (entry.queue_next == kNone ? queue.last : entries_[entry.queue_next].queue_prev) =
        entry.queue_prev;
    --queue.count;
  }

  // Returns the entry to evict next; gives used entries on the way another round.
  uint32_t leaving() {
    while (small_.count != 0 || main_.count != 0) {
      const bool from_small =
          small_.count != 0 &&
          (small_.count > small_target_ || main_.count == 0 || entries_[small_.first].is_dead());
      const uint32_t id = from_small ? small_.first : main_.first;
      Entry& entry = entries_[id];
      if (entry.uses == 0) return id;
      remove(id);
      entry.uses = from_small ? 0 : uint8_t(entry.uses - 1);
      entry.is_in_main = true;
      append(id);
    }
    return kNone;
  }

  EntryTable& entries_;
  size_t small_target_;
  KeyHash hash_;
  Ghosts ghosts_;
  Queue small_;
  Queue main_;
  uint32_t offered_ = kNone;
  std::vector<uint32_t> refused_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_s3fifo(EntryTable& entries, int64_t capacity) {
  return std::make_unique<S3Fifo>(entries, capacity);
}

}  // namespace tiered_kv
