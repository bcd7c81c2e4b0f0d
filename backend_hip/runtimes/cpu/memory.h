// Device and pinned memory: every allocation ends at a guard page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "hip_types.h"

enum class Place { host, device, pinned };  // host: memory the runtime does not know

struct Range {
  Place place = Place::host;
  uintptr_t begin = 0, end = 0;  // of the allocation that holds the pointer; both 0 for host memory
};

// The allocation that holds `pointer`. With `allow_end` one past the end counts (an empty slice).
Range find_range(const void* pointer, bool allow_end = false);

// "4 bytes past the end of the device allocation 0x.. of 64 bytes", or "" when nothing is near.
std::string describe_address(uintptr_t address);

size_t memory_total();

// Checks sizes and places against the direction; hipSuccess when the copy may run.
hipError_t check_copy(const void* dst, const void* src, size_t nbytes, hipMemcpyKind kind);
hipError_t check_fill(const void* dst, size_t nbytes);
