// The memory layout of a block, and the checks that every copy passes before it moves a byte.
//
// A block is a set of byte runs: run r of block b lies at address + b * stride and is copied to
// slot_offset within a slot. The caller supplies the strides, so the same description fits
// layer-outermost, block-outermost and padded caches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace tiered_kv {

// An invalid argument. The message begins with the argument's name.
class ArgumentError : public std::invalid_argument {
 public:
  ArgumentError(const std::string& argument, const std::string& problem)
      : std::invalid_argument(argument + ": " + problem) {}
};

struct Run {
  uint64_t address;
  int64_t stride;
  int64_t bytes;
  int64_t slot_offset;
};

// Half-open range of addresses.
struct Extent {
  uint64_t begin;
  uint64_t end;
};

class BlockLayout {
 public:
  // Throws ArgumentError unless all runs of all blocks are disjoint and the slot ranges cover
  // [0, block_bytes) without gaps or overlaps.
  BlockLayout(const std::vector<uint64_t>& addresses, const std::vector<int64_t>& block_strides,
              const std::vector<int64_t>& run_bytes, const std::vector<int64_t>& slot_offsets,
              int64_t num_blocks);

  int64_t num_blocks() const { return num_blocks_; }
  int64_t block_bytes() const { return block_bytes_; }
  // Ordered by slot_offset.
  const std::vector<Run>& runs() const { return runs_; }
  // Whether [begin, end) overlaps the span of a run.
  bool touches(Extent range) const;

 private:
  int64_t num_blocks_;
  int64_t block_bytes_ = 0;
  std::vector<Run> runs_;
  std::vector<Extent> spans_;  // merged and sorted
};

enum class Direction { kGather, kScatter };  // blocks -> slots, slots -> blocks

// Block/slot pairs that have passed check_batch. It owns its data, because Python threads may
// change the arrays they passed while the copy runs without the GIL.
struct Batch {
  std::vector<int64_t> block_ids;
  std::vector<int64_t> slot_offsets;
};

constexpr int64_t kSlotAlignment = 64;

// Throws ArgumentError. `slots` names the argument that describes the slot memory.
void check_batch(const BlockLayout& layout, const Batch& batch, Direction direction,
                 const std::string& slots, int64_t address, int64_t nbytes);

// Checks that address and nbytes describe a range of memory; error messages begin with `name`.
Extent checked_range(const std::string& name, int64_t address, int64_t nbytes);

// Throws unless the ranges [offset, offset + nbytes) are mutually disjoint.
void check_disjoint(const std::string& name, const std::vector<int64_t>& offsets, int64_t nbytes);

}  // namespace tiered_kv
