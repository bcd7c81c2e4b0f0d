#include "checking.h"

#include "error.h"
#include "hip_types.h"
#include "queue.h"

Checking checking;

uint64_t next_launch_number() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

// Chooses what is checked from now on. hipErrorNotReady and no change while work is queued.
ASSAY_API hipError_t assay_cpu_checking(int sanitize, int shuffle, uint64_t seed) {
  if (!queue_is_empty()) return hipErrorNotReady;
  checking.sanitize = sanitize != 0;
  checking.shuffle = shuffle != 0;
  checking.seed = seed;
  return hipSuccess;
}

// Makes the device usable again after a sticky error. What memory holds then proves nothing.
ASSAY_API hipError_t assay_cpu_recover() {
  drop_queue();
  forget_sticky();
  return hipSuccess;
}
