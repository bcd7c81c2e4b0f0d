// Kernel launches: argument checks, and how the grid is run.
#pragma once

#include "stream.h"

hipError_t run_launch(const LaunchOperation& launch);

// hipSuccess when the kernel is loaded and its pointers point into live memory; else says what is wrong.
hipError_t check_launch(const LaunchOperation& launch);
