// What a command flow is told about its tokens: one device array of int32, copied from the host
// before the flow's kernels, so that a captured graph reads the position of each replay from memory.
#pragma once
#include "simt.h"

namespace flow {

enum Field : int32_t {
    POSITION = 0,  // absolute position of the first token
    STAMP = 1,     // step number; travels with the argmax result
    TOKENS = 4,    // ids start here
};

}  // namespace flow
