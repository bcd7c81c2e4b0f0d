// --shuffle: each launch runs in an order and in its reverse, from the same memory, and must leave the same.
#pragma once

#include "workers.h"

// Where waves of a block have wave operations between which others may run, the launch runs a third time,
// with waves interleaved. For any two accesses of different threads that nothing orders, one of the first two
// runs has them one way and the other the other way; the third sees what needs three accesses.
// The reverse starts with other bytes in shared memory, because NaN in both would hide what differs.
// What the kernel may write is compared: the allocations that its pointers to non-const point into.
Failure run_repeatedly(const GridLaunch& launch, uint64_t seed);
