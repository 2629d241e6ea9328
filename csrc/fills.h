// Blocks copied into their places beside whoever asked for it, and their checksums.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace tiered_kv {

struct Fill {
  uint8_t* into;
  const uint8_t* from;
  size_t size;
};

struct Filled {
  uint64_t ticket = 0;
  std::vector<uint64_t> checksums;  // XXH3, in the order of the fills
};

// All calls may be made from any thread. Memory that is filled, and filled from, must stay until
// the ticket was collected, or `wait` has returned.
class Fills {
 public:
  Fills();  // throws std::system_error
  Fills(const Fills&) = delete;
  Fills& operator=(const Fills&) = delete;
  ~Fills();  // waits

  // Readable while there is something to collect.
  int descriptor() const;

  // Returns at once. Tickets are given out in ascending order.
  void start(uint64_t ticket, const std::vector<Fill>& fills, int threads);

  // What has ended since the last call.
  std::vector<Filled> collect();

  // Returns when all that was started before has ended: it can be collected.
  void wait() const;

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace tiered_kv
