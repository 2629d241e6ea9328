#include <algorithm>

#include "block_copy_cuda.h"

namespace tiered_kv {
// nvcc names an anonymous namespace after the folder of the build: no two wheels would be alike.
inline namespace block_copy_cuda {

constexpr int kThreads = 512;
constexpr int kWarp = 32;
constexpr int kWarpsPerCta = kThreads / kWarp;
constexpr int kCtasPerSm = 2;
constexpr uint32_t kMaxCtas = 65535;
// Loads in flight per thread. The speed of reading mapped host memory depends on the number of
// outstanding requests.
constexpr int kUnroll = 8;
// Long runs are divided so that even a few large blocks occupy the whole device.
constexpr int64_t kPieceBytes = 16 << 10;
// The pairs are kernel parameters, which may have 32 KiB since CUDA 12.1 and 4 KiB before.
constexpr int kSmallBatch = 256;
constexpr int kLargeBatch = CUDART_VERSION >= 12010 ? 2048 : kSmallBatch;

template <int kCapacity>
struct Pairs {
  uint64_t slot_offsets[kCapacity];
  uint32_t block_ids[kCapacity];
  uint32_t count;
};
static_assert(sizeof(Pairs<kLargeBatch>) + 64 < (kLargeBatch > kSmallBatch ? 32764 : 4096));

// Constant offsets from an advancing pointer are encoded in the instructions; indices would need
// registers.
template <typename Vector>
__device__ void copy_piece(Vector* __restrict__ dst, const Vector* __restrict__ src, int count,
                           int lane) {
  dst += lane;
  src += lane;
  int left = count - lane;
#pragma unroll 1
  for (; left > (kUnroll - 1) * kWarp; left -= kUnroll * kWarp) {
    Vector held[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) held[u] = src[u * kWarp];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) dst[u * kWarp] = held[u];
    dst += kUnroll * kWarp;
    src += kUnroll * kWarp;
  }
  // The remainder is also read completely before it is written, because a short run consists of the
  // remainder only.
  Vector held[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (left > u * kWarp) held[u] = src[u * kWarp];
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (left > u * kWarp) dst[u * kWarp] = held[u];
  }
}

// Each warp copies one (block, piece) after another; adjacent warps copy adjacent pieces.
template <typename Vector, bool kGather, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    copy_kernel(const __grid_constant__ Pairs<kCapacity> pairs, const Piece* __restrict__ pieces,
                uint32_t num_pieces, char* slots) {
  const int lane = int(threadIdx.x) % kWarp;
  const uint32_t items = pairs.count * num_pieces;  // the host keeps items + step below 2^32
  const uint32_t step = gridDim.x * kWarpsPerCta;
  for (uint32_t item = blockIdx.x * kWarpsPerCta + threadIdx.x / kWarp; item < items;
       item += step) {
    const uint32_t pair = item / num_pieces;
    const Piece piece = pieces[item - pair * num_pieces];
    char* in_block =
        reinterpret_cast<char*>(piece.address + uint64_t(pairs.block_ids[pair]) * piece.stride);
    char* in_slot = slots + pairs.slot_offsets[pair] + piece.slot_offset;
    copy_piece(reinterpret_cast<Vector*>(kGather ? in_slot : in_block),
               reinterpret_cast<const Vector*>(kGather ? in_block : in_slot),
               int(piece.bytes / sizeof(Vector)), lane);
  }
}

template <typename Vector, int kCapacity>
void launch(const Pairs<kCapacity>& pairs, const Piece* pieces, uint32_t num_pieces, char* slots,
            Direction direction, int64_t ctas, cudaStream_t stream) {
  auto* kernel = direction == Direction::kGather ? &copy_kernel<Vector, true, kCapacity>
                                                 : &copy_kernel<Vector, false, kCapacity>;
  const int64_t items = int64_t(pairs.count) * num_pieces;
  const int64_t useful = (items + kWarpsPerCta - 1) / kWarpsPerCta;
  void* arguments[] = {const_cast<Pairs<kCapacity>*>(&pairs), &pieces, &num_pieces, &slots};
  check(cudaLaunchKernel(reinterpret_cast<const void*>(kernel),
                         dim3(unsigned(std::min(ctas, useful))), dim3(kThreads), arguments, 0,
                         stream),
        "cudaLaunchKernel");
}

template <int kCapacity>
void launch_pairs(const Batch& batch, size_t begin, size_t count, const Piece* pieces,
                  uint32_t num_pieces, uint64_t slots, int alignment, Direction direction,
                  int64_t ctas, cudaStream_t stream) {
  Pairs<kCapacity> pairs;
  for (size_t i = 0; i < count; ++i) {
    pairs.block_ids[i] = uint32_t(batch.block_ids[begin + i]);
    pairs.slot_offsets[i] = uint64_t(batch.slot_offsets[begin + i]);
  }
  pairs.count = uint32_t(count);
  char* const memory = reinterpret_cast<char*>(slots);
  if (alignment == 16) {
    launch<uint4>(pairs, pieces, num_pieces, memory, direction, ctas, stream);
  } else if (alignment == 8) {
    launch<uint2>(pairs, pieces, num_pieces, memory, direction, ctas, stream);
  } else if (alignment == 4) {
    launch<uint32_t>(pairs, pieces, num_pieces, memory, direction, ctas, stream);
  } else {
    launch<uint8_t>(pairs, pieces, num_pieces, memory, direction, ctas, stream);
  }
}

int widest(uint64_t bits) {
  for (int width : {16, 8, 4}) {
    if (bits % uint64_t(width) == 0) return width;
  }
  return 1;
}

int common_alignment(const BlockLayout& layout) {
  uint64_t bits = 0;
  for (const Run& run : layout.runs()) {
    bits |= run.address | uint64_t(run.bytes) | uint64_t(run.slot_offset);
    if (layout.num_blocks() > 1) bits |= uint64_t(run.stride);
  }
  return widest(bits);
}

std::vector<Piece> cut(const BlockLayout& layout) {
  if (layout.num_blocks() > int64_t{UINT32_MAX})
    throw ArgumentError("num_blocks", std::to_string(layout.num_blocks()) + " is above 2**32 - 1");
  std::vector<Piece> pieces;
  for (const Run& run : layout.runs()) {
    for (int64_t at = 0; at < run.bytes; at += kPieceBytes) {
      pieces.push_back({run.address + uint64_t(at), uint64_t(run.stride),
                        uint64_t(run.slot_offset + at),
                        uint32_t(std::min(kPieceBytes, run.bytes - at)), 0});
    }
  }
  if (pieces.size() > (UINT32_MAX - kMaxCtas * kWarpsPerCta) / kLargeBatch)
    throw ArgumentError("run_bytes", "a block of " + std::to_string(layout.block_bytes()) +
                                         " bytes in " + std::to_string(layout.runs().size()) +
                                         " runs is too large");
  return pieces;
}

}  // namespace block_copy_cuda

CudaBlockLayout::CudaBlockLayout(int device, BlockLayout layout)
    : device_(device),
      layout_(std::move(layout)),
      pieces_(cut(layout_)),
      alignment_(common_alignment(layout_)),
      table_(device, int64_t(pieces_.size() * sizeof(Piece))) {
  const DeviceGuard guard(device);
  check(cudaMemcpy(reinterpret_cast<void*>(table_.address()), pieces_.data(),
                   pieces_.size() * sizeof(Piece), cudaMemcpyHostToDevice),
        "cudaMemcpy");
  int processors = 0;
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute");
  whole_device_ = int64_t{processors} * kCtasPerSm;
}

void CudaBlockLayout::copy(const Batch& batch, Direction direction, uint64_t slots,
                           uint64_t stream_handle, int64_t ctas, SlotPart part) const {
  if (ctas < 0 || ctas > kMaxCtas)
    throw ArgumentError("ctas", std::to_string(ctas) + " is not in [0, 65535]");
  if (ctas == 0) ctas = whole_device_;
  const int width = std::min(alignment_, widest(slots));
  // Pieces are sorted by their offset in the slot.
  const auto at = [this](int64_t offset) {
    return std::partition_point(pieces_.begin(), pieces_.end(), [offset](const Piece& piece) {
      return int64_t(piece.slot_offset) < offset;
    });
  };
  const auto first = at(part.begin), last = at(part.end);
  if (first >= last) return;
  const auto* pieces = reinterpret_cast<const Piece*>(table_.address()) + (first - pieces_.begin());
  const uint32_t num_pieces = uint32_t(last - first);
  const DeviceGuard guard(device_);
  size_t begin = 0;
  while (begin < batch.block_ids.size()) {
    const size_t left = batch.block_ids.size() - begin;
    if (left <= kSmallBatch) {
      launch_pairs<kSmallBatch>(batch, begin, left, pieces, num_pieces, slots, width, direction,
                                ctas, to_stream(stream_handle));
      return;
    }
    const size_t count = std::min<size_t>(left, kLargeBatch);
    launch_pairs<kLargeBatch>(batch, begin, count, pieces, num_pieces, slots, width, direction,
                              ctas, to_stream(stream_handle));
    begin += count;
  }
}

void copy_ranges(int device, uint64_t src, const std::vector<int64_t>& src_offsets, uint64_t dst,
                 const std::vector<int64_t>& dst_offsets, int64_t nbytes_each, cudaMemcpyKind kind,
                 uint64_t stream_handle, int64_t host_piece_bytes) {
  // Ranges that are adjacent on both sides are merged, because DMA is faster with few large copies.
  // Copies are split between pieces of host memory that were registered separately, because CUDA
  // refuses copies that span two of them.
  std::vector<const void*> sources;
  std::vector<void*> targets;
  std::vector<size_t> sizes;
  const std::vector<int64_t>& host = kind == cudaMemcpyDeviceToHost ? dst_offsets : src_offsets;
  int64_t src_end = -1, dst_end = -1;
  for (size_t i = 0; i < src_offsets.size(); ++i) {
    for (int64_t done = 0; done < nbytes_each;) {
      int64_t length = nbytes_each - done;
      bool at_piece_start = false;
      if (host_piece_bytes > 0) {
        const int64_t within = (host[i] + done) % host_piece_bytes;
        at_piece_start = within == 0;
        length = std::min(length, host_piece_bytes - within);
      }
      const int64_t from = src_offsets[i] + done, to = dst_offsets[i] + done;
      if (from == src_end && to == dst_end && !at_piece_start) {
        sizes.back() += size_t(length);
      } else {
        sources.push_back(reinterpret_cast<const void*>(src + uint64_t(from)));
        targets.push_back(reinterpret_cast<void*>(dst + uint64_t(to)));
        sizes.push_back(size_t(length));
      }
      src_end = from + length;
      dst_end = to + length;
      done += length;
    }
  }
  if (sizes.empty()) return;
  const DeviceGuard guard(device);
  const cudaStream_t stream = to_stream(stream_handle);
#if CUDART_VERSION >= 13000
  // The batch call refuses the legacy default stream.
  if (sizes.size() > 1 && stream != nullptr && stream != cudaStreamLegacy) {
    cudaMemcpyAttributes attributes = {};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t first = 0;
    check(cudaMemcpyBatchAsync(targets.data(), sources.data(), sizes.data(), sizes.size(),
                               &attributes, &first, 1, stream),
          "cudaMemcpyBatchAsync");
    return;
  }
#endif
  for (size_t i = 0; i < sizes.size(); ++i) {
    check(cudaMemcpyAsync(targets[i], sources[i], sizes[i], kind, stream), "cudaMemcpyAsync");
  }
}

}  // namespace tiered_kv
