#include "workers.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "error.h"
#include "fault.h"
#include "fiber.h"
#include "memory.h"
#include "order.h"

namespace {
constexpr unsigned kMaxWorkers = 16;
constexpr double kWorthWakingNs = 40e3;  // work left below which waking another thread costs more than it saves

struct Job {
  explicit Job(const GridLaunch& asked) : launch(asked), blocks(asked.block_count()) {}
  const GridLaunch& launch;
  const uint32_t blocks;
  std::atomic<uint32_t> next{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  Failure failure;  // guarded by `mutex`
};

double now_ns() {
  return static_cast<double>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                 std::chrono::steady_clock::now().time_since_epoch())
                                 .count());
}

// Kernels expect the default float environment (nearest even, subnormals kept); a library compiled with
// fast-math may have set flush-to-zero in the calling thread.
class FloatEnvironment {
 public:
#if defined(__x86_64__)
  FloatEnvironment() : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(0x1F80); }
  ~FloatEnvironment() { __builtin_ia32_ldmxcsr(saved_); }

 private:
  unsigned saved_;
#else
  FloatEnvironment() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
  }
  ~FloatEnvironment() { __asm__ volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

std::string describe_fault(const Region& region) {
  char text[500];
  const int guard = guard_of(region, region.fault_address);
  const char* access = region.fault_is_write != 0 ? "write to" : "access to";
  const int prefix = name_block(region, text, sizeof text);
  std::snprintf(text + prefix, sizeof text - static_cast<size_t>(prefix), ", thread %u: %s 0x%llx",
                region.fault_thread, guard >= 0 ? "stack overflow (64 KiB): access to" : access,
                static_cast<unsigned long long>(region.fault_address));
  std::string report = text;
  if (const std::string place = describe_address(region.fault_address); !place.empty()) report += ", " + place;
  return report;
}

void fail(Job& job, hipError_t error, std::string message) {
  const std::lock_guard lock(job.mutex);
  job.failed = true;
  if (job.failure.error != hipSuccess) return;  // one report a launch: the first
  job.failure = {error, std::move(message)};
}

// Runs one block; false when the launch has failed.
bool run_one(Job& job, Region& region, uint32_t index) {
  const uint32_t gx = job.launch.grid[0], gy = job.launch.grid[1];
  const hipError_t error = run_block(region, index % gx, index / gx % gy, index / gx / gy);
  if (error == hipSuccess) return true;
  fail(job, error, region.message[0] != '\0' ? region.message : describe_fault(region));
  return false;
}

void run_blocks(Job& job, Region& region) {
  while (!job.failed.load(std::memory_order_relaxed)) {
    const uint32_t index = job.next.fetch_add(1, std::memory_order_relaxed);
    if (index >= job.blocks || !run_one(job, region, index)) return;
  }
}

struct RegionOwner {
  Region* region = nullptr;
  ~RegionOwner() {
    if (region != nullptr) destroy_region(region);
  }
};

// Fibers never change their OS thread: each thread that runs blocks has its own region.
Region* own_region() {
  thread_local RegionOwner owner;
  if (owner.region == nullptr) owner.region = create_region();
  return owner.region;
}

// The calling thread's region, ready for the job's blocks; null when the job has failed.
Region* begin_job(Job& job, Order* order) {
  Region* region = own_region();
  if (region == nullptr) {
    fail(job, hipErrorOutOfMemory, "no address space for the fibers' stacks");
    return nullptr;
  }
  const GridLaunch& launch = job.launch;
  const hipError_t error =
      begin_launch(*region, *launch.function->kernel, launch.arguments, launch.grid, launch.number, order);
  if (error == hipSuccess) return region;
  fail(job, error, "no memory for the fibers' stacks");
  return nullptr;
}

void take_part(Job& job) {
  Region* region = begin_job(job, nullptr);
  if (region == nullptr) return;
  const FaultStack stack(*region);
  const FloatEnvironment environment;
  run_blocks(job, *region);
}

class Pool {
 public:
  explicit Pool(unsigned workers) : pid_(getpid()), workers_(workers) {}
  pid_t pid() const { return pid_; }
  unsigned workers() const { return workers_; }

  // Lets up to `count` threads join the job. Call finish() before the job goes.
  void start(Job& job, unsigned count) {
    const std::lock_guard lock(mutex_);
    job_ = &job;
    wanted_ = std::min(count, workers_);
    while (threads_ < wanted_) {
      std::thread([this] { serve(); }).detach();  // lives as long as the process
      ++threads_;
    }
    wake_.notify_all();
  }

  void finish() {
    std::unique_lock lock(mutex_);
    wanted_ = 0;
    job_ = nullptr;
    done_.wait(lock, [this] { return busy_ == 0; });
  }

  std::mutex launching;  // one launch at a time uses the pool

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return wanted_ > 0; });
      --wanted_;
      ++busy_;
      Job& job = *job_;
      lock.unlock();
      take_part(job);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  const pid_t pid_;
  const unsigned workers_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  unsigned wanted_ = 0, busy_ = 0, threads_ = 0;
};

unsigned configured_workers() {
  unsigned count = std::max(1u, std::thread::hardware_concurrency());
  if (const char* text = std::getenv("ASSAY_CPU_THREADS")) {
    char* end = nullptr;
    const long asked = std::strtol(text, &end, 10);
    if (end == text || *end != '\0' || asked < 1 || asked > 1024)
      complain("ASSAY_CPU_THREADS is \"%s\", expected a number of threads from 1; using %u", text, count);
    else count = static_cast<unsigned>(asked);
  }
  return std::min(count, kMaxWorkers);
}

// After a fork the child has none of the threads: it gets a new pool, and the old one's memory is left alone
// (its mutexes may have been held at the fork).
Pool& pool() {
  static std::atomic<Pool*> current{nullptr};
  Pool* mine = current.load(std::memory_order_acquire);
  if (mine != nullptr && mine->pid() == getpid()) return *mine;
  auto* fresh = new Pool(configured_workers() - 1);
  if (current.compare_exchange_strong(mine, fresh)) return *fresh;
  delete fresh;
  return *current.load();
}

// Runs the job in the calling thread and, once the first block shows that it is worth it, in others.
void run_job(Job& job) {
  Region* region = begin_job(job, nullptr);
  if (region == nullptr) return;
  const FaultScope scope;
  const FaultStack stack(*region);
  const FloatEnvironment environment;
  if (job.blocks == 1) return void(run_one(job, *region, 0));

  const double begin = now_ns();
  job.next = 1;
  if (!run_one(job, *region, 0)) return;
  const double left = (now_ns() - begin) * (job.blocks - 1);
  Pool& helpers = pool();
  const auto count = static_cast<unsigned>(
      std::min({left / kWorthWakingNs, static_cast<double>(helpers.workers()), static_cast<double>(job.blocks - 1)}));
  std::unique_lock lock(helpers.launching, std::defer_lock);
  // Another Python thread's launch has the helpers: this one does without rather than wait.
  if (count == 0 || !lock.try_lock()) return run_blocks(job, *region);
  helpers.start(job, count);
  run_blocks(job, *region);
  helpers.finish();
}
}  // namespace

Failure run_grid(const GridLaunch& launch) {
  Job job(launch);
  run_job(job);
  return std::move(job.failure);
}

Failure run_alone(const GridLaunch& launch, Order& order) {
  Job job(launch);
  if (Region* region = begin_job(job, &order); region != nullptr) {
    const FaultScope scope;
    const FaultStack stack(*region);
    const FloatEnvironment environment;
    for (const uint32_t index : order.blocks())
      if (!run_one(job, *region, index)) break;
  }
  return std::move(job.failure);
}
