// Which keys a row sees: those up to its own position, from the window's first on.
#pragma once
#include "flow.h"

namespace attention {

// Keys [first, end); `end` - 1 is the row's own position.
struct Seen {
    int first, end;
    SIMT_DEVICE bool operator()(int key) const { return key >= first && key < end; }
    SIMT_DEVICE bool any(int from, int count) const { return from < end && from + count > first; }
};

// window 0: none; else keys at distance >= window are masked.
SIMT_DEVICE Seen seen_from(int position, int window) {
    return {window > 0 && position >= window ? position - window + 1 : 0, position + 1};
}
SIMT_DEVICE Seen seen_by(const int32_t* step, int row, int window) {
    return seen_from(flow::position(step, row), window);
}

}  // namespace attention
