// The pool of OS threads that run a grid's blocks.
#pragma once

#include <cstdint>
#include <string>

#include "hip_types.h"
#include "module.h"

class Order;

struct GridLaunch {
  const Function* function;
  const unsigned char* arguments;  // packed
  const uint32_t* grid;            // three extents, in blocks
  uint64_t number;                 // of the launch
  uint32_t block_count() const { return grid[0] * grid[1] * grid[2]; }
};

struct Failure {
  hipError_t error = hipSuccess;
  std::string message;
};

// Runs every block; the calling thread takes part. Blocks are independent, so how they are spread never
// changes a result.
Failure run_grid(const GridLaunch& launch);

// Runs every block in the calling thread, as `order` says.
Failure run_alone(const GridLaunch& launch, Order& order);
