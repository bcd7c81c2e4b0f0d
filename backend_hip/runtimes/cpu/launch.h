// Kernel launches: argument checks, and blocks spread over OS threads.
#pragma once

#include "stream.h"

hipError_t run_launch(const LaunchOperation& launch);
