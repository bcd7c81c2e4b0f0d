// The pool of OS threads that run a grid's blocks.
#pragma once

#include <cstdint>

#include "hip_types.h"
#include "module.h"

// Runs every block; the calling thread takes part. Blocks are independent, so how they are spread never
// changes a result. A failed block makes the error sticky.
hipError_t run_grid(const Function& function, const unsigned char* arguments, const uint32_t grid[3]);
