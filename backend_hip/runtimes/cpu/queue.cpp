#include "queue.h"

#include <mutex>

#include "checking.h"
#include "depend.h"
#include "describe.h"
#include "error.h"

namespace {
std::mutex mutex;  // held while queued work runs: one item at a time, whoever asked
uint64_t last_id = 0, choices = 0;

Queue& queue() {
  static auto* items = new Queue;  // never destroyed: what is queued at the end of the process is dropped
  return *items;
}

hipError_t lost(hipError_t error, const std::string& text) {
  queue().clear();
  return set_sticky(error, text);
}

// The first watched range that somebody else than the device changed, of one item or all that `operation` writes.
const HostRange* find_change(const Item& item, const Operation* writer) {
  for (const HostRange& range : item.in_flight)
    if ((writer == nullptr || writes_into(*writer, range)) && has_changed(range)) return &range;
  return nullptr;
}

hipError_t run_item(uint64_t id) {
  const Item item = std::move(queue().at(id));
  queue().erase(id);
  if (const HostRange* range = find_change(item, nullptr); range != nullptr)
    return lost(hipErrorLaunchFailure, describe(item.operation, id) + ": " + describe_change(*range));
  std::vector<HostRange*> written;
  for (auto& [other_id, other] : queue()) {
    // Afterwards it could not be told who wrote.
    if (const HostRange* range = find_change(other, &item.operation); range != nullptr)
      return lost(hipErrorLaunchFailure, describe(other.operation, other_id) + ": " + describe_change(*range));
    for (HostRange& range : other.in_flight)
      if (writes_into(item.operation, range)) written.push_back(&range);
  }
  const hipError_t error = execute(item.operation);
  if (sticky_error() != hipSuccess) {
    queue().clear();
    return sticky_error();
  }
  if (error != hipSuccess)
    return lost(error == hipErrorInvalidDeviceFunction ? hipErrorLaunchFailure : hipErrorIllegalAddress,
                describe(item.operation, id) + ": " + explain(item.operation));
  for (HostRange* range : written) accept_change(*range);
  return hipSuccess;
}

hipError_t run_required(const std::vector<uint64_t>& wanted) {
  Random random(checking.seed, ++choices);
  for (const uint64_t id : legal_order(queue(), wanted, random))
    if (const hipError_t error = run_item(id); error != hipSuccess) return error;
  return hipSuccess;
}

hipError_t step(const std::vector<uint64_t>& wanted) {
  Random random(checking.seed, ++choices);
  const std::vector<uint64_t> order = legal_order(queue(), wanted, random);
  if (order.empty()) return hipSuccess;
  const hipError_t error = run_item(order.front());
  return error != hipSuccess ? error : hipErrorNotReady;
}
}  // namespace

uint64_t enqueue(const std::shared_ptr<Stream>& stream, Operation operation, bool watch,
                 const std::vector<uint64_t>& after) {
  const std::lock_guard lock(mutex);
  Item item{stream, std::move(operation), predecessors(*stream, queue()), {}};
  item.after.insert(item.after.end(), after.begin(), after.end());
  if (watch) item.in_flight = watch_host(item.operation);
  const uint64_t id = ++last_id;
  if (const auto* record = std::get_if<RecordOperation>(&item.operation)) record->event->last_record = id;
  stream->last_queued = id;
  queue().emplace(id, std::move(item));
  return id;
}

hipError_t complete(uint64_t id) {
  const std::lock_guard lock(mutex);
  return run_required({id});
}

hipError_t complete_stream(const Stream& stream) {
  const std::lock_guard lock(mutex);
  return run_required(work_of(stream, queue()));
}

hipError_t complete_all() {
  const std::lock_guard lock(mutex);
  std::vector<uint64_t> all;
  for (const auto& [id, item] : queue()) all.push_back(id);
  return run_required(all);
}

hipError_t query(uint64_t id) {
  const std::lock_guard lock(mutex);
  return step({id});
}

hipError_t query_stream(const Stream& stream) {
  const std::lock_guard lock(mutex);
  return step(work_of(stream, queue()));
}

bool is_queued(uint64_t id) {
  const std::lock_guard lock(mutex);
  return queue().count(id) != 0;
}

bool queue_is_empty() {
  const std::lock_guard lock(mutex);
  return queue().empty();
}

void drop_queue() {
  const std::lock_guard lock(mutex);
  queue().clear();
}
