// The words for queued operations in reports.
#pragma once

#include <string>

#include "inflight.h"
#include "stream.h"

// "kernel add (launch 12)", "a copy of 64 bytes to the device (operation 31)".
std::string describe(const Operation& operation, uint64_t id);

// Why it could not run, when a check before it said no.
std::string explain(const Operation& operation);

std::string describe_change(const HostRange& range);
