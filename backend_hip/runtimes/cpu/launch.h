// Kernel launches: argument checks, and how the grid is run.
#pragma once

#include "stream.h"
#include "workers.h"

hipError_t run_launch(const LaunchOperation& launch);

// What is wrong with a launch before it runs: its module was unloaded, a pointer points into no live memory.
Failure check_launch(const LaunchOperation& launch);

// The same, said on stderr.
hipError_t refuse_bad_launch(const LaunchOperation& launch);
