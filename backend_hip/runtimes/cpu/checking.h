// What the runtime checks beyond what it always does. Set between calls, with nothing queued or running.
#pragma once

#include <atomic>
#include <cstdint>

struct Checking {
  std::atomic<bool> sanitize{false};  // stream work waits until it must run (queue.h)
  std::atomic<bool> shuffle{false};   // launches run in several orders that must agree (repeat.h)
  std::atomic<uint64_t> seed{0};      // of every order that is chosen
};

extern Checking checking;

// The number of a launch: counted since the library was loaded, the same in every message about it.
uint64_t next_launch_number();
