// What must come before what among queued items. The one place that knows HIP's rules of order.
#pragma once

#include "queue.h"
#include "random.h"

// The queued items that a new one of `stream` must come after: the stream's last one, and by the rule of the
// null stream those of every stream that is not non-blocking.
std::vector<uint64_t> predecessors(const Stream& stream, const Queue& queue);

// The items that a wait for `stream` waits for. For the null stream also those of the blocking streams.
std::vector<uint64_t> work_of(const Stream& stream, const Queue& queue);

// The queued ones of `wanted` and all that these need, in an order that respects every dependency; `random`
// chooses wherever there is a choice.
std::vector<uint64_t> legal_order(const Queue& queue, const std::vector<uint64_t>& wanted, Random& random);
