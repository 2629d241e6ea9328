// Copies between blocks in device memory and slots in device or mapped host memory.
#pragma once

#include <cstdint>
#include <vector>

#include "block_layout.h"
#include "cuda_handles.h"

namespace tiered_kv {

// A run, or a part of a long run, in the format of the kernel.
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

  // Launches the copy on a stream and returns at once. `batch` must have passed check_batch for
  // `slots`; it is passed by value to the kernel, so only the source and target memory must outlive
  // this call. `ctas` of 0 uses the whole device. Only pieces that begin in `part` are copied.
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

// Copies ranges of nbytes_each bytes by DMA in stream order. If host_piece_bytes is not 0, the host
// memory was registered in pieces of this size, starting at its address.
void copy_ranges(int device, uint64_t src, const std::vector<int64_t>& src_offsets, uint64_t dst,
                 const std::vector<int64_t>& dst_offsets, int64_t nbytes_each, cudaMemcpyKind kind,
                 uint64_t stream_handle, int64_t host_piece_bytes);

}  // namespace tiered_kv
