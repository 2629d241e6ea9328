// Copies between blocks in device memory and slots in device or mapped host memory.
#pragma once

#include <cstdint>
#include <vector>

#include "block_layout.h"
#include "cuda_handles.h"

namespace tiered_kv {

// A run, or a part of a long one, as the kernel reads it.
struct alignas(16) Piece {
  uint64_t address;
  uint64_t stride;
  uint64_t slot_offset;
  uint32_t bytes;
  uint32_t unused;
};

// Bytes [begin, end) of a slot.
struct SlotPart {
  int64_t begin = 0;
  int64_t end = INT64_MAX;
};

class CudaBlockLayout {
 public:
  // Uploads the table of pieces to the device.
  CudaBlockLayout(int device, BlockLayout layout);

  const BlockLayout& layout() const { return layout_; }
  // The widest of 16, 8, 4 and 1 bytes that divides every address, stride, length and offset.
  int alignment() const { return alignment_; }

  // Launches the copy on a stream and returns at once. `batch` has passed check_batch for `slots`;
  // it travels inside the launch, so nothing has to outlive this call but the two memories.
  // `ctas` of 0 takes the whole device. Only pieces that begin in `part` of a slot are copied.
  void copy(const Batch& batch, Direction direction, uint64_t slots, uint64_t stream_handle,
            int64_t ctas, SlotPart part = {}) const;

 private:
  const int device_;
  const BlockLayout layout_;
  const std::vector<Piece> pieces_;
  const int alignment_;
  const DeviceBuffer table_;
  int64_t whole_device_ = 0;
};

// Copies ranges of nbytes_each by DMA in stream order. host_piece_bytes: the host side was
// registered in pieces of so many bytes, counted from its address; 0 for one piece.
void copy_ranges(int device, uint64_t src, const std::vector<int64_t>& src_offsets, uint64_t dst,
                 const std::vector<int64_t>& dst_offsets, int64_t nbytes_each, cudaMemcpyKind kind,
                 uint64_t stream_handle, int64_t host_piece_bytes);

}  // namespace tiered_kv
