// --sanitize: stream work waits here until something requires it, and then no more of it runs than that.
//
// A synchronisation point names items; they and what they must come after run, in an order that the seed
// chooses among the legal ones (depend.h). Whatever a program did not wait for has then not happened, which
// is the latest that HIP allows. What is still queued when the process ends is dropped.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "inflight.h"
#include "stream.h"

struct Item {
  std::shared_ptr<Stream> stream;
  Operation operation;
  std::vector<uint64_t> after;       // ids of items that must have run; ids not queued have
  std::vector<HostRange> in_flight;  // host memory that nobody but the device may change meanwhile
};

using Queue = std::map<uint64_t, Item>;  // by id: ascending in order of submission

// What HIP's rules make of an operation under --sanitize: queued, and run at once where the host waits for
// it. Copies that involve memory which is not pinned read their source now and return with the result there.
hipError_t defer(const std::shared_ptr<Stream>& stream, Operation operation, Manner manner);

// Queues an operation in its stream, after the items `after` too. Returns its id, never 0.
uint64_t enqueue(const std::shared_ptr<Stream>& stream, Operation operation, bool watch_host,
                 const std::vector<uint64_t>& after = {});

// Run until the item, all of the stream's work, or everything is done. An error is sticky, drops what is
// queued and names the operation.
hipError_t complete(uint64_t id);
hipError_t complete_stream(const Stream& stream);
hipError_t complete_all();

// For queries: hipSuccess when nothing is left to do. Else hipErrorNotReady, after a step of the work, so
// that a program that asks again and again comes to an end.
hipError_t query(uint64_t id);
hipError_t query_stream(const Stream& stream);

bool is_queued(uint64_t id);
bool queue_is_empty();
void drop_queue();
