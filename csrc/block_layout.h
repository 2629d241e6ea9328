// Where the bytes of a block lie, and the checks that every copy passes before a byte moves.
//
// A block is a set of byte runs: run r of block b lies at address + b * stride and goes to
// slot_offset within a slot. Strides are taken from the caller, never assumed, so one description
// serves layer-outermost, block-outermost and padded caches alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace tiered_kv {

// A bad argument. The message begins with the argument's name.
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
  // Throws ArgumentError unless every run of every block is disjoint from every other and the
  // slot ranges tile [0, block_bytes) exactly.
  BlockLayout(const std::vector<uint64_t>& addresses, const std::vector<int64_t>& block_strides,
              const std::vector<int64_t>& run_bytes, const std::vector<int64_t>& slot_offsets,
              int64_t num_blocks);

  int64_t num_blocks() const { return num_blocks_; }
  int64_t block_bytes() const { return block_bytes_; }
  // Ordered by slot_offset.
  const std::vector<Run>& runs() const { return runs_; }
  // Whether [begin, end) touches the span of any run.
  bool touches(Extent range) const;

 private:
  int64_t num_blocks_;
  int64_t block_bytes_ = 0;
  std::vector<Run> runs_;
  std::vector<Extent> spans_;  // merged and sorted
};

enum class Direction { kGather, kScatter };  // blocks -> slots, slots -> blocks

// Block/slot pairs that have passed check_batch. Owns its numbers: a Python thread may change the
// arrays it passed while the copy runs without the GIL.
struct Batch {
  std::vector<int64_t> block_ids;
  std::vector<int64_t> slot_offsets;
};

constexpr int64_t kSlotAlignment = 64;

// Throws ArgumentError. `slots` names the argument that describes the slot memory.
void check_batch(const BlockLayout& layout, const Batch& batch, Direction direction,
                 const std::string& slots, int64_t address, int64_t nbytes);

// Checks that address and nbytes describe a range of memory; `name` is what to call it.
Extent checked_range(const std::string& name, int64_t address, int64_t nbytes);

// Throws unless the ranges [offset, offset + nbytes) are mutually disjoint.
void check_disjoint(const std::string& name, const std::vector<int64_t>& offsets, int64_t nbytes);

}  // namespace tiered_kv
