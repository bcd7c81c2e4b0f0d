#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "meeting.h"
#include "order.h"
#include "wave.h"

namespace {
// A slot: [header, only in slot 0][guard][stack]. Stacks begin at different offsets within the colour span,
// else all of them would compete for the same cache sets.
constexpr uint64_t kSlot = uint64_t{1} << SIMT_CPU_SLOT_SHIFT;
constexpr uint64_t kHeader = 0x8000, kStackBegin = 0xC000, kColours = 0x4000;
static_assert(kSlot - kStackBegin - kColours == 64 * 1024, "a stack has 64 KiB");
static_assert(sizeof(Region) <= kHeader);
constexpr uint64_t kSharedMapping = 2 * kSharedNbytes;  // arrays, their fences, alignment
constexpr uint32_t kFence = 64;                         // after each shared array
constexpr unsigned char kFenceByte = 0xA5;

inline uint64_t stack_pointer() {
  uint64_t sp;
#if defined(__x86_64__)
  __asm__("mov %%rsp, %0" : "=r"(sp));
#else
  __asm__("mov %0, sp" : "=r"(sp));
#endif
  return sp;
}

inline Region& self_region() {
  return *reinterpret_cast<Region*>(stack_pointer() & ~(SIMT_CPU_REGION_NBYTES - 1));
}
inline uint32_t self_thread() {
  return static_cast<uint32_t>(stack_pointer() >> SIMT_CPU_SLOT_SHIFT) & (SIMT_CPU_THREADS - 1);
}

uint64_t slot_base(const Region& region, uint32_t thread) {
  return reinterpret_cast<uint64_t>(&region) + thread * kSlot;
}

// Leaves the block from inside a fiber; nothing of it runs again.
[[noreturn]] void abandon(Region& region, hipError_t error, const char* format, ...)
    __attribute__((format(printf, 3, 4)));
void abandon(Region& region, hipError_t error, const char* format, ...) {
  int prefix = name_block(region, region.message, sizeof region.message);
  prefix += std::snprintf(region.message + prefix, sizeof region.message - static_cast<size_t>(prefix), ": ");
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(region.message + prefix, sizeof region.message - static_cast<size_t>(prefix), format, arguments);
  va_end(arguments);
  region.failed = 1;
  region.failure = error;
  assay_fiber_resume(region.main_stack);
}

const char* describe(uint32_t meeting) {
  switch (meeting & 0xFF) {
    case kExit: return "has returned from the kernel";
    case kBlockBarrier: return "waits at a block barrier";
    case kWaveBarrier: return "waits at a wave barrier";
    case kWaveSum: return "waits in wave_sum";
    case kWaveMax: return "waits in wave_max";
    case kShuffle: return "waits in a shuffle";
    case kButterfly: return "waits in a butterfly";
  }
  return "waits elsewhere";
}

}  // namespace

__attribute__((cold, noinline)) void diverged(Region& region, const char* group, uint32_t thread, uint32_t meeting,
                                              uint32_t first, uint32_t expected) {
  char columns[64] = "";
  if ((meeting & 0xFF) == kWaveSum && (expected & 0xFF) == kWaveSum)
    std::snprintf(columns, sizeof columns, " (over %u and %u columns)", meeting >> 8, expected >> 8);
  abandon(region, hipErrorLaunchFailure,
          "thread %u %s, but thread %u of the same %s %s%s; every one must reach the same operation", thread,
          describe(meeting), first, group, describe(expected), columns);
}

void complete_wave(Region& region, uint32_t first, uint32_t meeting) {
  const uint32_t lanes = region.wave_size;
  switch (meeting & 0xFF) {
    case kWaveSum:
      sum_wave(reinterpret_cast<float* const*>(region.exchange + first), lanes, meeting >> 8);
      break;
    case kWaveMax: {
      const uint32_t best = max_wave(region.value + first, lanes);
      for (uint32_t lane = 0; lane < lanes; ++lane) region.result[first + lane] = best;
      break;
    }
    case kShuffle:
      for (uint32_t lane = 0; lane < lanes; ++lane)
        region.result[first + lane] = region.value[first + region.source[first + lane]];
      break;
    case kButterfly:
      butterfly_wave(reinterpret_cast<float* const*>(region.exchange + first), lanes, meeting >> 8 & 0xFF,
                     meeting >> 16 & 0xFF, meeting >> 24);
      break;
    default: break;
  }
}

namespace {
// Arrives at a meeting and returns when all have. The calling thread's stack is suspended meanwhile.
inline void meet(Region& region, uint32_t thread, uint32_t meeting) {
  if (region.order != nullptr) [[unlikely]] return region.order->meet(region, thread, meeting);
  const uint32_t wave_size = region.wave_size;
  const uint32_t lane = thread & (wave_size - 1);
  if (lane == 0) {
    region.wave_meeting = meeting;
    return hand_over(region, thread, thread + 1);
  }
  if (region.wave_meeting != meeting) [[unlikely]]
    diverged(region, "wave", thread, meeting, thread - lane, region.wave_meeting);
  if (lane != wave_size - 1) return hand_over(region, thread, thread + 1);

  const uint32_t first = thread - lane;
  if (meeting > kBlockBarrier) {
    complete_wave(region, first, meeting);
    return hand_over(region, thread, first);
  }
  if (first == 0) region.block_meeting = meeting;
  else if (region.block_meeting != meeting) [[unlikely]]
    diverged(region, "block", thread, meeting, 0, region.block_meeting);
  if (thread != region.threads - 1) return hand_over(region, thread, thread + 1);
  if (meeting == kBlockBarrier) return hand_over(region, thread, 0);
  leave_block(region, thread);
}

[[noreturn]] void fiber_main() {
  Region& region = self_region();
  const uint32_t thread = self_thread();
  for (;;) {
    region.kernel->run(region.arguments);
    meet(region, thread, kExit);
  }
}

// The frame that assay_fiber_switch pops when the fiber first runs.
void* initial_stack(const Region& region, uint32_t thread) {
  const uint64_t colour = (thread * 17 % 256) * 64;
  auto* top = reinterpret_cast<uint64_t*>(slot_base(region, thread) + kSlot - colour);
#if defined(__x86_64__)
  // At entry a function expects the stack 8 bytes off 16: as if a return address had been pushed.
  *--top = 0;
  *--top = reinterpret_cast<uint64_t>(&fiber_main);
  for (int i = 0; i < 6; ++i) *--top = 0;
#else
  top -= 20;
  std::memset(top, 0, 160);
  top[11] = reinterpret_cast<uint64_t>(&fiber_main);  // x30
#endif
  return top;
}

bool commit_stacks(Region& region, uint32_t threads) {
  for (; region.committed < threads; ++region.committed) {
    void* stack = reinterpret_cast<void*>(slot_base(region, region.committed) + kStackBegin);
    if (mprotect(stack, kSlot - kStackBegin, PROT_READ | PROT_WRITE) != 0) return false;
  }
  return true;
}

// ---- what kernels call
void service_sync() { meet(self_region(), self_thread(), kBlockBarrier); }
void service_wave_sync() { meet(self_region(), self_thread(), kWaveBarrier); }

void service_wave_sum(float* values, int n) {
  Region& region = self_region();
  const uint32_t thread = self_thread();
  if (n < 0) [[unlikely]]
    abandon(region, hipErrorLaunchFailure, "thread %u asks wave_sum for a number of columns outside its array", thread);
  region.exchange[thread] = values;
  meet(region, thread, kWaveSum | static_cast<uint32_t>(n) << 8);
}

void service_butterfly(float* values, int n, uint32_t high, uint32_t low) {
  Region& region = self_region();
  const uint32_t thread = self_thread();
  if (n < 0 || n > 255) [[unlikely]]
    abandon(region, hipErrorLaunchFailure, "thread %u asks butterfly for a number of columns outside its array", thread);
  region.exchange[thread] = values;
  meet(region, thread, kButterfly | static_cast<uint32_t>(n) << 8 | high << 16 | low << 24);
}

// Host processors access any address; the device of a kernel that passes here does not.
[[noreturn]] void service_misaligned(const void* p, uint32_t alignment) {
  abandon(self_region(), hipErrorIllegalAddress, "thread %u: access to %p, which is no multiple of %u bytes",
          self_thread(), p, alignment);
}

float service_wave_max(float value) {
  Region& region = self_region();
  const uint32_t thread = self_thread();
  std::memcpy(&region.value[thread], &value, 4);
  meet(region, thread, kWaveMax);
  float result;
  std::memcpy(&result, &region.result[thread], 4);
  return result;
}

uint32_t service_shuffle(uint32_t value, uint32_t source_lane) {
  Region& region = self_region();
  const uint32_t thread = self_thread();
  region.value[thread] = value;
  region.source[thread] = source_lane;
  meet(region, thread, kShuffle);
  return region.result[thread];
}

void* service_shared(const void* site, uint64_t nbytes) {
  Region& region = self_region();
  for (uint32_t i = 0; i < region.site_count; ++i)
    if (region.sites[i].site == site) return region.shared + region.sites[i].offset;
  uint64_t total = nbytes;
  for (uint32_t i = 0; i < region.site_count; ++i) total += region.sites[i].nbytes;
  if (total > kSharedNbytes || region.site_count == kMaxSharedSites)
    abandon(region, hipErrorLaunchOutOfResources,
            "shared memory is %llu bytes in %u arrays, expected at most %u bytes in %u arrays",
            static_cast<unsigned long long>(total), region.site_count + 1, kSharedNbytes, kMaxSharedSites);
  const uint32_t offset = region.shared_used;
  unsigned char* array = region.shared + offset;
  std::memset(array, region.order != nullptr ? region.order->poison : kSharedPoison, nbytes);
  std::memset(array + nbytes, kFenceByte, kFence);
  region.sites[region.site_count++] = {site, offset, static_cast<uint32_t>(nbytes)};
  region.shared_used = static_cast<uint32_t>((offset + nbytes + kFence + 63) & ~uint64_t{63});
  return array;
}

// An overrun that stays inside the buffer would otherwise land in the neighbouring array.
hipError_t check_fences(Region& region) {
  unsigned char intact[kFence];
  std::memset(intact, kFenceByte, kFence);
  for (uint32_t i = 0; i < region.site_count; ++i) {
    const SharedSite& site = region.sites[i];
    if (std::memcmp(region.shared + site.offset + site.nbytes, intact, kFence) == 0) continue;
    const int prefix = name_block(region, region.message, sizeof region.message);
    std::snprintf(region.message + prefix, sizeof region.message - static_cast<size_t>(prefix),
                  ": a write went past the end of the shared array number %u of %u bytes", i, site.nbytes);
    region.failed = 1;
    return region.failure = hipErrorIllegalAddress;
  }
  return hipSuccess;
}
}  // namespace

const simt_cpu_services& fiber_services() {
  static constexpr simt_cpu_services services{service_sync,     service_wave_sync, service_wave_sum,
                                              service_wave_max, service_shuffle,   service_shared,
                                              service_butterfly, service_misaligned};
  return services;
}

int name_block(const Region& region, char* text, size_t nbytes) {
  return std::snprintf(text, nbytes, "kernel %.200s (launch %llu), block (%u, %u, %u)", region.kernel->name,
                       static_cast<unsigned long long>(region.launch), region.block.block_x, region.block.block_y,
                       region.block.block_z);
}

int guard_of(const Region& region, uint64_t address) {
  const uint64_t offset = address - reinterpret_cast<uint64_t>(&region);
  if (offset >= SIMT_CPU_REGION_NBYTES) return -1;
  const uint64_t within = offset & (kSlot - 1);
  return within < kStackBegin ? static_cast<int>(offset >> SIMT_CPU_SLOT_SHIFT) : -1;
}

Region* create_region() {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (page > kStackBegin - kHeader) return nullptr;
  // Reserve twice the size, keep the aligned half.
  const uint64_t size = SIMT_CPU_REGION_NBYTES;
  void* map = mmap(nullptr, 2 * size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) return nullptr;
  const auto begin = reinterpret_cast<uint64_t>(map);
  const uint64_t aligned = (begin + size - 1) & ~(size - 1);
  if (aligned > begin) munmap(map, aligned - begin);
  if (begin + size > aligned) munmap(reinterpret_cast<void*>(aligned + size), begin + size - aligned);
  auto* header = reinterpret_cast<void*>(aligned);
  void* shared = mmap(nullptr, kSharedMapping + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mprotect(header, kHeader, PROT_READ | PROT_WRITE) != 0 || shared == MAP_FAILED ||
      mprotect(static_cast<unsigned char*>(shared) + page, kSharedMapping, PROT_READ | PROT_WRITE) != 0) {
    munmap(header, size);
    return nullptr;
  }
  auto* region = new (header) Region{};
  region->shared = static_cast<unsigned char*>(shared) + page;
  return region;
}

void destroy_region(Region* region) {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  munmap(region->shared - page, kSharedMapping + 2 * page);
  munmap(region, SIMT_CPU_REGION_NBYTES);
}

hipError_t begin_launch(Region& region, const simt_cpu_kernel& kernel, const unsigned char* arguments,
                        const uint32_t grid[3], uint64_t launch, Order* order) {
  if (!commit_stacks(region, kernel.block)) return hipErrorOutOfMemory;
  region.kernel = &kernel;
  region.arguments = arguments;
  region.launch = launch;
  region.order = order;
  region.threads = kernel.block;
  region.wave_size = kernel.wave;
  region.block.grid_x = grid[0];
  region.block.grid_y = grid[1];
  region.block.grid_z = grid[2];
  region.failed = 0;
  region.failure = hipSuccess;
  return hipSuccess;
}

hipError_t run_block(Region& region, uint32_t x, uint32_t y, uint32_t z) {
  region.block.block_x = x;
  region.block.block_y = y;
  region.block.block_z = z;
  region.site_count = region.shared_used = 0;
  for (; region.fibers_ready < region.threads; ++region.fibers_ready)
    region.stack[region.fibers_ready] = initial_stack(region, region.fibers_ready);
  const uint32_t first = region.order != nullptr ? region.order->begin_block() : 0;
  region.running = 1;
  assay_fiber_switch(&region.main_stack, region.stack[first]);
  region.running = 0;
  if (region.failed != 0) {
    region.fibers_ready = 0;
    return region.failure;
  }
  return check_fences(region);
}
