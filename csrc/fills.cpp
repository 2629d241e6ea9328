#include "fills.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <set>
#include <system_error>
#include <utility>

#include "thread_pool.h"
#include "xxh3.h"

namespace tiered_kv {

// Shared with the helper threads: one may still be in `finish` when the owner is destroyed.
struct Fills::State {
  State() : descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (descriptor < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() { ::close(descriptor); }

  // Reserves memory so that `finish` never allocates: a helper thread cannot report a failure.
  void make_room(size_t more) { done.reserve(done.size() + under_way.size() + more); }

  void finish(Filled&& filled) {
    const std::lock_guard<std::mutex> lock(mutex);
    under_way.erase(filled.ticket);
    done.push_back(std::move(filled));
    if (done.size() == 1) eventfd_write(descriptor, 1);
    ended.notify_all();
  }

  const int descriptor;
  std::mutex mutex;
  std::condition_variable ended;
  std::set<uint64_t> under_way;
  uint64_t last = 0;
  std::vector<Filled> done;
};

Fills::Fills() : state_(std::make_shared<State>()) {}

Fills::~Fills() { wait(); }

int Fills::descriptor() const { return state_->descriptor; }

void Fills::start(uint64_t ticket, const std::vector<Fill>& fills, int threads) {
  struct Batch {
    std::vector<Fill> fills;
    Filled filled = {};
  };
  const auto batch =
      std::make_shared<Batch>(Batch{fills, Filled{ticket, std::vector<uint64_t>(fills.size())}});
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->make_room(1);
    state_->under_way.insert(ticket);
    state_->last = ticket;
  }
  start_for(
      fills.size(), threads,
      [batch](size_t i) {
        const Fill& fill = batch->fills[i];
        batch->filled.checksums[i] = copy_xxh3_64(fill.into, fill.from, fill.size);
      },
      [batch, state = state_] { state->finish(std::move(batch->filled)); }, Crew::kFills);
}

std::vector<Filled> Fills::collect() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  eventfd_t count = 0;
  eventfd_read(state_->descriptor, &count);
  std::vector<Filled> collected;
  collected.swap(state_->done);
  state_->make_room(0);
  return collected;
}

void Fills::wait() const {
  std::unique_lock<std::mutex> lock(state_->mutex);
  const uint64_t last = state_->last;
  state_->ended.wait(
      lock, [&] { return state_->under_way.empty() || *state_->under_way.begin() > last; });
}

}  // namespace tiered_kv
