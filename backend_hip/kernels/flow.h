// What a command flow is told about its tokens: one device array of int32, copied from the host
// before the flow's kernels, so that a captured graph reads the position of each replay from memory.
#pragma once
#include "simt.h"

namespace flow {

constexpr int POSITION = 0;  // absolute position of the first token
constexpr int STAMP = 1;     // step number; travels with the argmax result
constexpr int COUNT = 2;     // tokens in this flow
constexpr int TOKENS = 4;    // ids start here

}  // namespace flow
