// Helper threads for copies, checksums and file I/O, kept between calls and shared by all callers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace tiered_kv {

// Returns the threads of a call: `requested`, or min(8, usable cores) for 0. Throws ArgumentError.
int thread_count(int64_t requested);

// Each kind of work has its own threads, so that work a caller waits for (reads, copies) is never
// queued behind background work (writes, received blocks).
enum class Crew { kMemory, kReads, kWrites, kFills };

// Runs work(i) for each i in [0, count) on the calling thread and up to threads - 1 helpers, and
// returns when all are done. `work` must not throw. Helpers do not survive a fork; the child starts
// its own. If no helper can be started, the caller does all of the work.
void parallel_for(size_t count, int threads, const std::function<void(size_t)>& work,
                  Crew crew = Crew::kMemory);

// Runs work(i) for each i in [0, count) on up to `threads` helpers and returns at once. The thread
// that completes the last item calls `finished`. Neither function may throw. If no helper can be
// started, the caller does all of the work before this returns.
void start_for(size_t count, int threads, std::function<void(size_t)> work,
               std::function<void()> finished, Crew crew);

}  // namespace tiered_kv
