// Which work may wait, by HIP's rules for each entry point.
#include "launch.h"
#include "memory.h"
#include "queue.h"

namespace {
bool in_host_memory(const void* pointer) { return find_range(pointer).place == Place::host; }
bool on_device(const void* pointer) { return find_range(pointer).place == Place::device; }

// The host may reuse a source that is not pinned as soon as the call returns.
void stage_source(CopyOperation& copy) {
  const auto* bytes = static_cast<const unsigned char*>(copy.src);
  copy.staged = std::make_shared<std::vector<unsigned char>>(bytes, bytes + copy.nbytes);
  copy.src = copy.staged->data();
}

// Whether the call returns only when the operation is done.
bool host_waits(const Operation& operation, Manner manner) {
  if (manner == Manner::replayed) return false;
  if (const auto* copy = std::get_if<CopyOperation>(&operation)) {
    if (manner == Manner::blocking) return !(on_device(copy->dst) && on_device(copy->src));
    return in_host_memory(copy->dst);
  }
  // A fill of device memory returns at once even where its name does not say so.
  if (const auto* fill = std::get_if<FillOperation>(&operation))
    return manner == Manner::blocking && !on_device(fill->dst);
  return false;
}
}  // namespace

hipError_t defer(const std::shared_ptr<Stream>& stream, Operation operation, Manner manner) {
  if (const auto* launch = std::get_if<LaunchOperation>(&operation); launch != nullptr && manner != Manner::replayed)
    if (const hipError_t error = refuse_bad_launch(*launch); error != hipSuccess) return error;
  const bool waits = host_waits(operation, manner);
  if (auto* copy = std::get_if<CopyOperation>(&operation))
    if (!waits && manner != Manner::replayed && copy->nbytes > 0 && in_host_memory(copy->src)) stage_source(*copy);
  const uint64_t id = enqueue(stream, std::move(operation), !waits);
  return waits ? complete(id) : hipSuccess;
}
