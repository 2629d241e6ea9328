// Copies blocks asynchronously on helper threads and computes their checksums.
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

// Thread-safe. Source and target memory must stay valid until the ticket has been collected, or
// `wait` has returned.
class Fills {
 public:
  Fills();  // throws std::system_error
  Fills(const Fills&) = delete;
  Fills& operator=(const Fills&) = delete;
  ~Fills();  // waits for running fills

  // An eventfd that is readable while there are tickets to collect.
  int descriptor() const;

  // Returns at once. The caller passes tickets in ascending order.
  void start(uint64_t ticket, const std::vector<Fill>& fills, int threads);

  // Returns the tickets that finished since the last call.
  std::vector<Filled> collect();

  // Waits until all fills started before the call have finished and can be collected.
  void wait() const;

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace tiered_kv
