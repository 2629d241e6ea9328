// Blocks of a file, read and written at their places by several threads, and hashed on the way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace tiered_kv {

struct FileBlock {
  uint8_t* data = nullptr;
  size_t nbytes = 0;
  int64_t offset = 0;
  std::optional<uint64_t> expected = std::nullopt;  // checksum of a block to be written
  uint64_t checksum = 0;                            // XXH3 of what was read or is to be written
  int64_t moved = 0;                                // bytes; an errno, negative, if it failed
};

// One pread each, which may be short. A block of which all was read gets its checksum.
void read_blocks(int fd, std::vector<FileBlock>& blocks, int threads);

// One pwrite each, unless the block has another checksum than expected: of it nothing is moved.
// After a failure no other block is begun; those say ECANCELED.
void write_blocks(int fd, std::vector<FileBlock>& blocks, int threads);

}  // namespace tiered_kv
