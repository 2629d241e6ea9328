// Helper threads for copies, checksums and files, kept between calls and shared by all callers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace tiered_kv {

// The threads a call may use: `requested`, or min(8, usable cores) for 0. Throws ArgumentError.
int thread_count(int64_t requested);

// Who helps: each kind of work has threads of its own. Those who wait for a read must not wait for
// writes, for which nobody does, nor those who wait for a copy for blocks that were received.
enum class Crew { kMemory, kReads, kWrites, kFills };

// Runs work(i) for each i in [0, count) on the calling thread and up to threads - 1 helpers, and
// returns when all are done. `work` must not throw. Helpers do not survive a fork; the child
// starts its own. Where no helper can be started the caller does all of the work.
void parallel_for(size_t count, int threads, const std::function<void(size_t)>& work,
                  Crew crew = Crew::kMemory);

// Has up to `threads` helpers run work(i) for each i in [0, count), and returns at once. Whoever is
// done last calls `finished`, on its own thread. Neither may throw. Where no helper can be started
// the caller does all of it before this returns.
void start_for(size_t count, int threads, std::function<void(size_t)> work,
               std::function<void()> finished, Crew crew);

}  // namespace tiered_kv
