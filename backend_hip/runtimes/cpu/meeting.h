// What happens where threads meet, whichever order brought them there.
#pragma once

#include <cstdint>

#include "fiber.h"

// Leaves the block from inside a fiber because `thread` stands at another meeting than `first`, a thread of
// the same group ("wave" or "block"). Nothing of the block runs again.
[[noreturn]] void diverged(Region& region, const char* group, uint32_t thread, uint32_t meeting, uint32_t first,
                           uint32_t expected);

// Does a complete wave's work; `first` is its lowest thread and all its lanes wait.
void complete_wave(Region& region, uint32_t first, uint32_t meeting);

// Suspends the calling thread `from` and lets another go on.
inline void hand_over(Region& region, uint32_t from, uint32_t to) {
  assay_fiber_switch(&region.stack[from], region.stack[to]);
}

// Suspends the last thread to arrive at the end of a block. It returns when the next block starts it.
inline void leave_block(Region& region, uint32_t thread) {
  assay_fiber_switch(&region.stack[thread], region.main_stack);
}
