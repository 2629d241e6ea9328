#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

#include "block_layout.h"

namespace tiered_kv {
namespace {

constexpr int kMaxThreads = 256;
constexpr int kAutoThreads = 8;

class Job {
 public:
  Job(size_t count, std::function<void(size_t)> work, std::function<void()> finished)
      : count_(count), work_(std::move(work)), finished_(std::move(finished)) {}

  // Processes items until none is left. A late helper finds none and touches neither function.
  void help() {
    for (size_t i = next_.fetch_add(1); i < count_; i = next_.fetch_add(1)) {
      work_(i);
      if (done_.fetch_add(1) + 1 == count_) finished_();
    }
  }

 private:
  const size_t count_;
  const std::function<void(size_t)> work_;
  const std::function<void()> finished_;
  std::atomic<size_t> next_{0};
  std::atomic<size_t> done_{0};
};

// Shared by the waiting and the signalling thread: the latter may still be in `set` when the former
// continues.
class Gate {
 public:
  void set() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_set_ = true;
    opened_.notify_all();
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    opened_.wait(lock, [this] { return is_set_; });
  }

 private:
  bool is_set_ = false;
  std::mutex mutex_;
  std::condition_variable opened_;
};

class Pool {
 public:
  pid_t owner() const { return owner_; }

  // Queues the job for up to `helpers` helper threads; returns how many will work on it.
  int offer(const std::shared_ptr<Job>& job, int helpers) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      while (started_ < helpers && start_helper()) ++started_;
      helpers = std::min(helpers, started_);
      for (int i = 0; i < helpers; ++i) jobs_.push_back(job);
    }
    for (int i = 0; i < helpers; ++i) offered_.notify_one();
    return helpers;
  }

 private:
  bool start_helper() {
    // Helpers block all signals, which the interpreter's threads must handle.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = true;
    try {
      std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
      started = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return started;
  }

  [[noreturn]] void serve() {
    while (true) {
      std::unique_lock<std::mutex> lock(mutex_);
      offered_.wait(lock, [this] { return !jobs_.empty(); });
      const std::shared_ptr<Job> job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job->help();
    }
  }

  const pid_t owner_ = getpid();
  int started_ = 0;
  std::mutex mutex_;
  std::condition_variable offered_;
  std::deque<std::shared_ptr<Job>> jobs_;
};

// A pool is never destroyed, because helpers wait on it until the process ends. After a fork the
// child creates a new pool: the threads of the parent's pool do not exist in the child, and one of
// them may have held its mutex.
Pool& pool(Crew crew) {
  static std::atomic<Pool*> pools[4]{};
  std::atomic<Pool*>& current = pools[size_t(crew)];
  Pool* seen = current.load();
  while (seen == nullptr || seen->owner() != getpid()) {
    Pool* fresh = new Pool;
    if (current.compare_exchange_strong(seen, fresh)) return *fresh;
    delete fresh;
  }
  return *seen;
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, int(std::thread::hardware_concurrency()));
}

}  // namespace

int thread_count(int64_t requested) {
  if (requested < 0 || requested > kMaxThreads)
    throw ArgumentError("threads", std::to_string(requested) + " is not in [0, " +
                                       std::to_string(kMaxThreads) + "]");
  return requested != 0 ? int(requested) : std::min(kAutoThreads, usable_cores());
}

void parallel_for(size_t count, int threads, const std::function<void(size_t)>& work, Crew crew) {
  const int helpers = int(std::min<size_t>(size_t(std::max(threads, 1)), count)) - 1;
  if (helpers <= 0) {
    for (size_t i = 0; i < count; ++i) work(i);
    return;
  }
  const auto done = std::make_shared<Gate>();
  const auto job = std::make_shared<Job>(count, std::ref(work), [done] { done->set(); });
  pool(crew).offer(job, helpers);
  job->help();
  done->wait();
}

void start_for(size_t count, int threads, std::function<void(size_t)> work,
               std::function<void()> finished, Crew crew) {
  if (count == 0) return finished();
  const auto job = std::make_shared<Job>(count, std::move(work), std::move(finished));
  if (pool(crew).offer(job, int(std::min<size_t>(size_t(std::max(threads, 1)), count))) == 0)
    job->help();
}

}  // namespace tiered_kv
