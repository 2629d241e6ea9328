#include "block_copy_cpu.h"

#include <algorithm>
#include <cstring>

#include "thread_pool.h"

namespace tiered_kv {
namespace {

// With fewer bytes, waking a helper thread costs more than it saves.
constexpr int64_t kSerialBytes = int64_t{1} << 20;
// Small enough to balance the threads, large enough to make the cost of taking a piece negligible.
constexpr int64_t kPieceBytes = int64_t{512} << 10;

// Copies bytes [begin, end) of a block, where offsets are those of the slot.
void copy_part(const BlockLayout& layout, int64_t block_id, uint8_t* slot, Direction direction,
               int64_t begin, int64_t end) {
  const std::vector<Run>& runs = layout.runs();
  auto run = std::prev(std::upper_bound(
      runs.begin(), runs.end(), begin,
      [](int64_t offset, const Run& candidate) { return offset < candidate.slot_offset; }));
  for (; begin < end; ++run) {
    const int64_t skipped = begin - run->slot_offset;
    const int64_t bytes = std::min(run->bytes - skipped, end - begin);
    uint8_t* in_block = reinterpret_cast<uint8_t*>(run->address) + block_id * run->stride + skipped;
    if (direction == Direction::kGather) {
      std::memcpy(slot + begin, in_block, size_t(bytes));
    } else {
      std::memcpy(in_block, slot + begin, size_t(bytes));
    }
    begin += bytes;
  }
}

}  // namespace

void copy_blocks(const BlockLayout& layout, const Batch& batch, Direction direction, uint8_t* slots,
                 int threads) {
  // The runs fill a slot without gaps, so the batch is a sequence of count * block_bytes bytes.
  // Dividing it into equal pieces balances both one huge run and thousands of tiny ones.
  const int64_t block_bytes = layout.block_bytes();
  const auto total = static_cast<unsigned __int128>(batch.block_ids.size()) * uint64_t(block_bytes);
  if (total <= kSerialBytes) threads = 1;
  const size_t pieces = size_t((total + kPieceBytes - 1) / kPieceBytes);
  parallel_for(pieces, threads, [&](size_t piece) {
    const auto start = static_cast<unsigned __int128>(piece) * kPieceBytes;
    int64_t left = int64_t(std::min<unsigned __int128>(total - start, kPieceBytes));
    size_t i = size_t(start / uint64_t(block_bytes));
    int64_t begin = int64_t(start % uint64_t(block_bytes));
    for (; left > 0; ++i) {
      const int64_t end = std::min(block_bytes, begin + left);
      copy_part(layout, batch.block_ids[i], slots + batch.slot_offsets[i], direction, begin, end);
      left -= end - begin;
      begin = 0;
    }
  });
}

}  // namespace tiered_kv
