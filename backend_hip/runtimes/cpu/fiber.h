// The threads of a block as fibers of one OS thread, and where they meet.
//
// Lanes of a wave run in order, from one meeting to the next: a lane that arrives hands over to the next
// lane, the last one checks that all arrived at the same meeting, does its work for the whole wave and hands
// over to lane 0. Block barriers do the same with waves. There is no scheduler, no queue and no state to
// search: who runs next follows from the index. (A launch under --shuffle asks its Order instead.) Fibers
// live for the whole life of their worker: the end of a kernel is one more meeting, after which the same
// fibers run the next block.
#pragma once

#include <cstdint>
#include <string>

#include "hip_types.h"
#include "simt_cpu_abi.h"

class Order;

constexpr uint32_t kSharedNbytes = 65536;
constexpr uint32_t kMaxSharedSites = 64;

// A meeting: what a lane waits for. wave_sum and butterfly carry their column count above the kind, and
// butterfly its first and last step above that.
enum Meeting : uint32_t {
  kExit = 1,  // the thread returned from the kernel
  kBlockBarrier,
  kWaveBarrier,
  kWaveSum,
  kWaveMax,
  kShuffle,
  kButterfly,
};

struct SharedSite {
  const void* site;
  uint32_t offset, nbytes;
};

// What a worker keeps at the start of its region; kernels see only `block`.
struct Region {
  simt_cpu_block block;
  const simt_cpu_kernel* kernel;
  const unsigned char* arguments;
  Order* order;     // null: by index
  uint64_t launch;  // its number, for messages
  uint32_t threads, wave_size;
  uint32_t wave_meeting;   // set by the first lane of the running wave
  uint32_t block_meeting;  // set by the first wave
  uint32_t fibers_ready;   // slots that hold a live fiber
  uint32_t failed;         // the block was abandoned
  hipError_t failure;
  uint32_t site_count, shared_used;
  unsigned char* shared;
  void* main_stack;              // stack pointer of the worker outside fibers
  uint32_t committed;            // slots whose stacks are mapped
  volatile uint32_t running;     // inside a block: a fault now belongs to a kernel
  uint64_t fault_address;
  uint32_t fault_thread, fault_is_write;
  char message[512];
  SharedSite sites[kMaxSharedSites];
  void* stack[SIMT_CPU_THREADS];  // of suspended fibers
  void* exchange[SIMT_CPU_THREADS];         // wave_sum, butterfly: each lane's values
  uint32_t value[SIMT_CPU_THREADS], source[SIMT_CPU_THREADS], result[SIMT_CPU_THREADS];
};

// Maps a region (nullptr: out of memory) and unmaps it.
Region* create_region();
void destroy_region(Region* region);

// Runs one block. On failure the message is in the region and every fiber is forgotten, not unwound.
hipError_t run_block(Region& region, uint32_t x, uint32_t y, uint32_t z);

// Prepares the region for the blocks of one launch; `order` is null or outlives them.
hipError_t begin_launch(Region& region, const simt_cpu_kernel& kernel, const unsigned char* arguments,
                        const uint32_t grid[3], uint64_t launch, Order* order);

// "kernel argmax (launch 17), block (0, 0, 0)": how every report begins. Returns the length.
int name_block(const Region& region, char* text, size_t nbytes);

const simt_cpu_services& fiber_services();

// For the fault handler: which slot's guard the address lies in, or -1.
int guard_of(const Region& region, uint64_t address);

extern "C" {
void assay_fiber_switch(void** save, void* load);
[[noreturn]] void assay_fiber_resume(void* load);
}
