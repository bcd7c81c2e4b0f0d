// Host memory that queued work will read or write: nobody else may change it before that.
#pragma once

#include <cstdint>
#include <vector>

#include "stream.h"

struct HostRange {
  const unsigned char* begin;
  size_t nbytes;
  bool is_source;  // a copy reads it; else a copy will write it
  uint64_t hash;   // of its bytes when queued, or after the device last wrote there
};

// The pinned memory of a copy, as it is now. What kernels do with pinned memory is not watched.
std::vector<HostRange> watch_host(const Operation& operation);

bool has_changed(const HostRange& range);
void accept_change(HostRange& range);

// Whether the operation writes into the range.
bool writes_into(const Operation& operation, const HostRange& range);
