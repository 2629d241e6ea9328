#include "file_blocks.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "thread_pool.h"
#include "xxh3.h"

namespace tiered_kv {
namespace {

// Returns the bytes moved by `call` or a negative errno; repeats the call if a signal interrupts
// it.
template <typename Call>
int64_t moved_by(const Call& call) {
  ssize_t moved = 0;
  do {
    moved = call();
  } while (moved < 0 && errno == EINTR);
  return moved < 0 ? -int64_t(errno) : int64_t(moved);
}

}  // namespace

void read_blocks(int fd, std::vector<FileBlock>& blocks, int threads) {
  const auto read = [&](size_t i) {
    FileBlock& block = blocks[i];
    block.moved =
        moved_by([&] { return pread(fd, block.data, block.nbytes, off_t(block.offset)); });
    if (block.moved == int64_t(block.nbytes)) block.checksum = xxh3_64(block.data, block.nbytes);
  };
  parallel_for(blocks.size(), threads, read, Crew::kReads);
}

void write_blocks(int fd, std::vector<FileBlock>& blocks, int threads) {
  std::atomic<bool> failed{false};
  const auto write = [&](size_t i) {
    FileBlock& block = blocks[i];
    block.checksum = xxh3_64(block.data, block.nbytes);
    if (block.expected.value_or(block.checksum) != block.checksum) return;
    if (failed.load()) {
      block.moved = -ECANCELED;
      return;
    }
    block.moved =
        moved_by([&] { return pwrite(fd, block.data, block.nbytes, off_t(block.offset)); });
    if (block.moved != int64_t(block.nbytes)) failed.store(true);
  };
  parallel_for(blocks.size(), threads, write, Crew::kWrites);
}

}  // namespace tiered_kv
