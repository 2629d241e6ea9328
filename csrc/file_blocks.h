// Reads and writes blocks of a file with several threads, and computes their checksums.
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
  uint64_t checksum = 0;                            // XXH3 of the bytes read or to be written
  int64_t moved = 0;                                // bytes moved, or a negative errno
};

// Calls pread once per block; a read may be short. Computes checksums of completely read blocks.
void read_blocks(int fd, std::vector<FileBlock>& blocks, int threads);

// Calls pwrite once per block, but not for blocks whose checksum differs from the expected one.
// After a failure no further block is started; these get ECANCELED.
void write_blocks(int fd, std::vector<FileBlock>& blocks, int threads);

}  // namespace tiered_kv
