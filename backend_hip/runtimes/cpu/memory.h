// Device and pinned memory: every allocation ends at a guard page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "places.h"

// The same with `allow_end`: one past the end counts (an empty slice).
Range find_range(const void* pointer, bool allow_end);

// "4 bytes past the end of the device allocation 0x.. of 64 bytes", or "" when nothing is near.
std::string describe_address(uintptr_t address);

size_t memory_total();
