// Where a pointer points to, and which copies and fills that allows: the same rules on every stand-in runtime.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hip_types.h"

enum class Place { host, device, pinned };  // host: memory the runtime does not know

struct Range {
  Place place = Place::host;
  uintptr_t begin = 0, end = 0;  // of the allocation that holds the pointer; both 0 for host memory
};

// The allocation that holds `pointer`. Each runtime has its own.
Range find_range(const void* pointer);

// Checks sizes and places against the direction; hipSuccess when the copy may run.
hipError_t check_copy(const void* dst, const void* src, size_t nbytes, hipMemcpyKind kind);
hipError_t check_fill(const void* dst, size_t nbytes);
