#include "block_layout.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <queue>

namespace tiered_kv {
namespace {

using int128 = __int128;
using uint128 = unsigned __int128;

constexpr int64_t kMaxAddress = std::numeric_limits<int64_t>::max();

std::string number(int64_t value) { return std::to_string(value); }

std::string item(const char* name, size_t index) {
  return std::string(name) + "[" + std::to_string(index) + "]";
}

[[noreturn]] void overlap(size_t a, size_t b) {
  throw ArgumentError("addresses", "runs " + std::to_string(std::min(a, b)) + " and " +
                                       std::to_string(std::max(a, b)) + " overlap");
}

// A run with its index in the caller's arrays, which error messages name.
struct Placed {
  int64_t begin;
  int64_t end;  // of the last block
  int64_t stride;
  int64_t bytes;
  size_t index;
};

// Checks runs of one stride, sorted by begin. Two runs collide if and only if their spans overlap
// and their images modulo the stride overlap. So a sweep over the begins keeps the live runs in a
// ring of residues and compares each new run only with its two neighbours.
void check_same_stride(const std::vector<Placed>& runs) {
  struct Later {
    bool operator()(const Placed& a, const Placed& b) const { return a.end > b.end; }
  };
  std::priority_queue<Placed, std::vector<Placed>, Later> live;
  std::map<int64_t, const Placed*> ring;
  for (const Placed& run : runs) {
    const int64_t stride = run.stride;
    while (!live.empty() && live.top().end <= run.begin) {
      ring.erase(live.top().begin % stride);
      live.pop();
    }
    const int64_t residue = run.begin % stride;
    if (!ring.empty()) {
      auto next = ring.lower_bound(residue);
      const auto before = next == ring.begin() ? std::prev(ring.end()) : std::prev(next);
      if (next == ring.end()) next = ring.begin();
      // Distances around the ring. A single neighbour at the same residue collides: its distance is
      // 0 in both directions.
      const int64_t ahead = (next->first - residue + stride) % stride;
      const int64_t behind = (residue - before->first + stride) % stride;
      if (ahead < run.bytes) overlap(run.index, next->second->index);
      if (behind < before->second->bytes) overlap(run.index, before->second->index);
    }
    ring.emplace(residue, &run);
    live.push(run);
  }
}

// Sum of floor((a * i + b) / m) for i in [0, n), for a, b >= 0; wraps modulo 2^128.
uint128 floor_sum(uint128 n, uint128 m, uint128 a, uint128 b) {
  uint128 sum = 0;
  while (true) {
    sum += n * (n - 1) / 2 * (a / m) + n * (b / m);
    a %= m;
    b %= m;
    const uint128 top = a * n + b;
    if (top < m) return sum;
    n = top / m;
    b = top % m;
    std::swap(m, a);
  }
}

// Returns whether an image of p overlaps an image of q, for any strides. Image b of p overlaps
// image c of q if t = p(b) - q(0) + |p| - 1 lies within w = |p| + |q| - 2 above c times q's stride.
// So the problem is to count the terms of an arithmetic progression that have a small residue.
bool collide(const Placed& p, const Placed& q, int64_t num_blocks) {
  const int128 first = int128(p.begin) - q.begin + p.bytes - 1;
  const int128 width = int128(p.bytes) + q.bytes - 2;
  // If the widened images of q leave no gap, they form one contiguous range.
  const bool solid = width >= q.stride - 1;
  const int128 limit =
      solid ? int128(num_blocks - 1) * q.stride + width : int128(num_blocks) * q.stride - 1;
  const int128 low = first >= 0 ? 0 : (-first + p.stride - 1) / p.stride;
  int128 high = first > limit ? -1 : (limit - first) / p.stride;
  high = std::min<int128>(high, num_blocks - 1);
  if (low > high) return false;
  if (solid) return true;
  const uint128 count = high - low + 1;
  const uint128 start = first + low * p.stride;
  // floor((t + m) / m) - floor((t + m - w - 1) / m) is 1 where t mod m <= w, else 0.
  const uint128 m = q.stride;
  return floor_sum(count, m, p.stride, start + m) !=
         floor_sum(count, m, p.stride, start + m - uint128(width) - 1);
}

void check_runs_disjoint(std::vector<Placed> runs, int64_t num_blocks) {
  std::sort(runs.begin(), runs.end(),
            [](const Placed& a, const Placed& b) { return a.begin < b.begin; });
  if (num_blocks == 1) {  // the strides are irrelevant
    for (size_t i = 1; i < runs.size(); ++i) {
      if (runs[i].begin < runs[i - 1].end) overlap(runs[i].index, runs[i - 1].index);
    }
    return;
  }
  std::map<int64_t, std::vector<Placed>> by_stride;
  for (const Placed& run : runs) by_stride[run.stride].push_back(run);
  for (const auto& group : by_stride) check_same_stride(group.second);
  if (by_stride.size() == 1) return;
  std::vector<Placed> live;
  for (const Placed& run : runs) {
    live.erase(std::remove_if(live.begin(), live.end(),
                              [&](const Placed& other) { return other.end <= run.begin; }),
               live.end());
    for (const Placed& other : live) {
      if (other.stride != run.stride && collide(run, other, num_blocks))
        overlap(run.index, other.index);
    }
    live.push_back(run);
  }
}

}  // namespace

BlockLayout::BlockLayout(const std::vector<uint64_t>& addresses,
                         const std::vector<int64_t>& block_strides,
                         const std::vector<int64_t>& run_bytes,
                         const std::vector<int64_t>& slot_offsets, int64_t num_blocks)
    : num_blocks_(num_blocks) {
  const size_t count = addresses.size();
  if (count == 0) throw ArgumentError("addresses", "a block needs at least one run");
  const auto same_length = [&](const char* name, size_t length) {
    if (length != count)
      throw ArgumentError(
          name, std::to_string(length) + " entries for " + std::to_string(count) + " addresses");
  };
  same_length("block_strides", block_strides.size());
  same_length("run_bytes", run_bytes.size());
  same_length("slot_offsets", slot_offsets.size());
  if (num_blocks < 1) throw ArgumentError("num_blocks", number(num_blocks) + " is less than 1");

  std::vector<Placed> placed;
  placed.reserve(count);
  for (size_t r = 0; r < count; ++r) {
    if (run_bytes[r] <= 0)
      throw ArgumentError(item("run_bytes", r), number(run_bytes[r]) + " is not positive");
    if (block_strides[r] <= 0)
      throw ArgumentError(item("block_strides", r), number(block_strides[r]) + " is not positive");
    if (num_blocks > 1 && block_strides[r] < run_bytes[r])
      throw ArgumentError(
          item("block_strides", r),
          number(block_strides[r]) + " is less than the run's " + number(run_bytes[r]) + " bytes");
    if (addresses[r] == 0) throw ArgumentError(item("addresses", r), "null address");
    const int128 end =
        int128(addresses[r]) + int128(num_blocks - 1) * block_strides[r] + run_bytes[r];
    if (end > kMaxAddress)
      throw ArgumentError(item("addresses", r), "the last block lies beyond the address space");
    placed.push_back({int64_t(addresses[r]), int64_t(end), block_strides[r], run_bytes[r], r});
    runs_.push_back({addresses[r], block_strides[r], run_bytes[r], slot_offsets[r]});
  }

  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return slot_offsets[a] < slot_offsets[b]; });
  int128 expected = 0;
  for (const size_t r : order) {
    if (slot_offsets[r] != expected)
      throw ArgumentError(
          item("slot_offsets", r),
          number(slot_offsets[r]) +
              (slot_offsets[r] < expected ? " overlaps another run" : " leaves a gap") +
              "; expected " + number(int64_t(expected)));
    expected += run_bytes[r];
    if (expected > kMaxAddress) throw ArgumentError("run_bytes", "the sum is out of range");
  }
  block_bytes_ = int64_t(expected);
  std::sort(runs_.begin(), runs_.end(),
            [](const Run& a, const Run& b) { return a.slot_offset < b.slot_offset; });

  check_runs_disjoint(placed, num_blocks);

  std::sort(placed.begin(), placed.end(),
            [](const Placed& a, const Placed& b) { return a.begin < b.begin; });
  for (const Placed& run : placed) {
    if (!spans_.empty() && uint64_t(run.begin) <= spans_.back().end) {
      spans_.back().end = std::max(spans_.back().end, uint64_t(run.end));
    } else {
      spans_.push_back({uint64_t(run.begin), uint64_t(run.end)});
    }
  }
}

bool BlockLayout::touches(Extent range) const {
  const auto after = std::partition_point(
      spans_.begin(), spans_.end(), [&](const Extent& span) { return span.end <= range.begin; });
  return after != spans_.end() && after->begin < range.end;
}

Extent checked_range(const std::string& name, int64_t address, int64_t nbytes) {
  if (nbytes < 0) throw ArgumentError(name, "negative length " + number(nbytes));
  if (address <= 0) throw ArgumentError(name, "address " + number(address) + " is not positive");
  if (nbytes > kMaxAddress - address) throw ArgumentError(name, "ends beyond the address space");
  return {uint64_t(address), uint64_t(address) + uint64_t(nbytes)};
}

void check_disjoint(const std::string& name, const std::vector<int64_t>& offsets, int64_t nbytes) {
  const auto check = [&](const std::vector<int64_t>& sorted) {
    for (size_t i = 1; i < sorted.size(); ++i) {
      if (sorted[i] - sorted[i - 1] < nbytes)
        throw ArgumentError(name, number(sorted[i - 1]) + " and " + number(sorted[i]) +
                                      " overlap: each takes " + number(nbytes) + " bytes");
    }
  };
  if (std::is_sorted(offsets.begin(), offsets.end())) return check(offsets);
  std::vector<int64_t> sorted = offsets;
  std::sort(sorted.begin(), sorted.end());
  check(sorted);
}

namespace {

void check_unique(const std::vector<int64_t>& ids, int64_t num_blocks) {
  const auto twice = [](int64_t id) {
    throw ArgumentError("block_ids", "block " + number(id) + " occurs twice");
  };
  constexpr int64_t kBitmapBlocks = int64_t{1} << 23;
  if (num_blocks <= kBitmapBlocks) {
    std::vector<bool> seen(static_cast<size_t>(num_blocks));
    for (const int64_t id : ids) {
      if (seen[size_t(id)]) twice(id);
      seen[size_t(id)] = true;
    }
    return;
  }
  std::vector<int64_t> sorted = ids;
  std::sort(sorted.begin(), sorted.end());
  const auto repeated = std::adjacent_find(sorted.begin(), sorted.end());
  if (repeated != sorted.end()) twice(*repeated);
}

}  // namespace

void check_batch(const BlockLayout& layout, const Batch& batch, Direction direction,
                 const std::string& slots, int64_t address, int64_t nbytes) {
  const Extent range = checked_range(slots, address, nbytes);
  const size_t count = batch.block_ids.size();
  if (batch.slot_offsets.size() != count)
    throw ArgumentError("slot_offsets", std::to_string(batch.slot_offsets.size()) +
                                            " entries for " + std::to_string(count) + " block_ids");
  for (size_t i = 0; i < count; ++i) {
    const int64_t id = batch.block_ids[i];
    if (id < 0 || id >= layout.num_blocks())
      throw ArgumentError(item("block_ids", i),
                          number(id) + " is not in [0, " + number(layout.num_blocks()) + ")");
    const int64_t offset = batch.slot_offsets[i];
    if (offset < 0 || offset % kSlotAlignment != 0)
      throw ArgumentError(item("slot_offsets", i),
                          number(offset) + " is not a multiple of " + number(kSlotAlignment));
    if (nbytes < layout.block_bytes() || offset > nbytes - layout.block_bytes())
      throw ArgumentError(item("slot_offsets", i), "a block of " + number(layout.block_bytes()) +
                                                       " bytes at " + number(offset) +
                                                       " ends beyond the " + number(nbytes) +
                                                       " bytes of " + slots);
  }
  if (direction == Direction::kGather) {
    check_disjoint("slot_offsets", batch.slot_offsets, layout.block_bytes());
  } else {
    check_unique(batch.block_ids, layout.num_blocks());
  }
  if (range.begin < range.end && layout.touches(range))
    throw ArgumentError(slots, "overlaps the memory of the layout");
}

}  // namespace tiered_kv
