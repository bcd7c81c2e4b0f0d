// What a kernel module for the CPU and the CPU runtime agree on. Both sides compile this header; a change
// raises SIMT_CPU_ABI, so that a code object from another version is refused instead of misread.
#ifndef ASSAY_SIMT_CPU_ABI_H
#define ASSAY_SIMT_CPU_ABI_H

#define SIMT_CPU_ABI 4u

// Each worker owns one region of address space, aligned to its size. It holds one slot per thread of a
// block; a slot is guard, then stack, growing down from the slot's end. A thread's index and its region
// therefore follow from the stack pointer alone: no thread-local storage, no argument.
#define SIMT_CPU_SLOT_SHIFT 17u  // 128 KiB a slot
#define SIMT_CPU_THREADS 256u    // slots in a region
#define SIMT_CPU_REGION_NBYTES (static_cast<uint64_t>(SIMT_CPU_THREADS) << SIMT_CPU_SLOT_SHIFT)

// First bytes of a region (in the part of slot 0 that lies below its guard).
struct simt_cpu_block {
  uint32_t block_x, block_y, block_z;
  uint32_t grid_x, grid_y, grid_z;
};

// What a parameter is. A pointer must be null or device memory.
#define SIMT_CPU_SCALAR 0u
#define SIMT_CPU_POINTER 1u        // the kernel may write there
#define SIMT_CPU_CONST_POINTER 2u  // to const: the kernel only reads there

struct simt_cpu_parameter {
  uint32_t offset;  // in the packed argument buffer, naturally aligned
  uint32_t nbytes;  // 4 or 8
  uint32_t kind;
};

struct simt_cpu_kernel {
  uint32_t abi;
  const char* name;
  void (*run)(const unsigned char* arguments);  // one thread of the current block
  const simt_cpu_parameter* parameters;
  uint32_t parameter_count;
  uint32_t argument_nbytes;  // end of the last argument
  uint32_t block;            // SIMT_BLOCK
  uint32_t wave;             // SIMT_WAVE
};

// Called by kernels. Every function that waits returns after all lanes (or threads) arrived.
struct simt_cpu_services {
  void (*sync)();
  void (*wave_sync)();
  void (*wave_sum)(float* values, int n);
  float (*wave_max)(float value);
  uint32_t (*shuffle)(uint32_t value, uint32_t source_lane);
  void* (*shared)(const void* site, uint64_t nbytes);
  void (*butterfly)(float* values, int n, uint32_t high, uint32_t low);  // steps high .. low of wave_sum's
  void (*misaligned)(const void* p, uint32_t alignment);  // reports it, and does not return
};

#define SIMT_CPU_KERNEL_PREFIX "assay_kernel_"
#define SIMT_CPU_INIT "assay_module_init"  // uint32_t (const simt_cpu_services*): returns SIMT_CPU_ABI
#endif
