// Stream capture and graphs. A graph is the list of recorded operations in the order of recording, which
// respects every dependency that the captured streams expressed; a replay runs them in that order.
#include <algorithm>
#include <atomic>
#include <mutex>
#include <pthread.h>
#include <unordered_map>

#include "capture.h"
#include "error.h"
#include "fault.h"
#include "handles.h"

struct Capture {
  Stream* origin;
  hipStreamCaptureMode mode;
  pthread_t thread;
  bool invalid = false;
  std::vector<Operation> nodes;
  struct Branch {
    std::shared_ptr<Stream> stream;
    size_t last_work = 0;  // nodes in the graph after this stream's last own work
    size_t joined = 0;     // 1 + the nodes that others have waited for; 0: nobody has waited
  };
  std::unordered_map<Stream*, Branch> branches;
};

struct Graph {
  std::vector<Operation> nodes;
};

struct GraphExec {
  std::vector<Operation> nodes;
};

namespace {
std::mutex mutex;  // capture state of every stream and event
std::vector<std::shared_ptr<Capture>> active;
std::atomic<int> active_count{0};  // spares every other call the lock

Handles<Graph>& graphs() {
  static auto* handles = new Handles<Graph>;
  return *handles;
}
Handles<GraphExec>& executables() {
  static auto* handles = new Handles<GraphExec>;
  return *handles;
}

bool applies(const Capture& capture) {
  switch (capture.mode) {
    case hipStreamCaptureModeGlobal: return true;
    case hipStreamCaptureModeThreadLocal: return pthread_equal(capture.thread, pthread_self()) != 0;
    case hipStreamCaptureModeRelaxed: return false;
  }
  return true;
}

template <class Concerned>
hipError_t forbid(hipError_t error, Concerned concerned) {
  if (active_count.load(std::memory_order_acquire) == 0) return hipSuccess;
  const std::lock_guard lock(mutex);
  hipError_t result = hipSuccess;
  for (const auto& capture : active)
    if (concerned(*capture)) {
      capture->invalid = true;
      result = error;
    }
  return result;
}

void leave(Capture& capture) {  // `mutex` held
  for (auto& [stream, branch] : capture.branches) stream->capture.reset();
  active.erase(std::remove_if(active.begin(), active.end(), [&](const auto& each) { return each.get() == &capture; }),
               active.end());
  active_count.store(static_cast<int>(active.size()), std::memory_order_release);
}
}  // namespace

hipError_t forbid_in_capture() { return forbid(hipErrorStreamCaptureUnsupported, applies); }

hipError_t forbid_null_stream_in_capture() {
  // A stream created non-blocking does not synchronise with the null stream.
  return forbid(hipErrorStreamCaptureImplicit,
                [](const Capture& capture) { return (capture.origin->flags & kStreamNonBlocking) == 0; });
}

hipError_t forbid_synchronous_in_capture() {
  const hipError_t error = forbid_null_stream_in_capture();
  return error != hipSuccess ? error : forbid_in_capture();
}

Recorded record(Stream& stream, const Operation& operation) {
  if (active_count.load(std::memory_order_acquire) == 0) return Recorded::no;
  const std::lock_guard lock(mutex);
  if (stream.capture == nullptr) return Recorded::no;
  if (stream.capture->invalid) return Recorded::refused;
  stream.capture->nodes.push_back(operation);
  stream.capture->branches[&stream].last_work = stream.capture->nodes.size();
  return Recorded::yes;
}

hipError_t forbid_on_capturing(Stream& stream) {
  if (active_count.load(std::memory_order_acquire) == 0) return hipSuccess;
  const std::lock_guard lock(mutex);
  if (stream.capture == nullptr) return hipSuccess;
  stream.capture->invalid = true;
  return hipErrorStreamCaptureUnsupported;
}

hipError_t capture_event(Stream& stream, Event& event, bool& handled) {
  const std::lock_guard lock(mutex);
  handled = stream.capture != nullptr;
  if (handled && stream.capture->invalid) return hipErrorStreamCaptureInvalidated;
  event.capture = stream.capture;
  event.capture_stream = handled ? &stream : nullptr;
  event.capture_position = handled ? stream.capture->nodes.size() : 0;
  return hipSuccess;
}

hipError_t capture_wait(const std::shared_ptr<Stream>& stream, Event& event, bool& handled) {
  const std::lock_guard lock(mutex);
  const bool captured = event.capture != nullptr &&
                        std::find(active.begin(), active.end(), event.capture) != active.end();
  handled = captured || stream->capture != nullptr;
  if (!handled) return hipSuccess;
  if (!captured) {  // a captured stream may not depend on work that will not be in the graph
    if (event.recorded_ns < 0 && event.last_record == 0) return hipSuccess;
    stream->capture->invalid = true;
    return hipErrorStreamCaptureIsolation;
  }
  if (is_null_stream(*stream)) {
    event.capture->invalid = true;
    return hipErrorStreamCaptureImplicit;
  }
  if (stream->capture == nullptr) {
    stream->capture = event.capture;
    event.capture->branches[stream.get()] = {stream, event.capture->nodes.size(), 0};
  } else if (stream->capture != event.capture) {
    stream->capture->invalid = event.capture->invalid = true;
    return hipErrorStreamCaptureMerge;
  }
  // Whatever the event's stream had done is now ordered before this stream. Waiting in the origin joins it;
  // waiting in a branch makes it part of what that branch must still join.
  auto& branches = event.capture->branches;
  if (const auto source = branches.find(event.capture_stream); source != branches.end())
    source->second.joined = std::max(source->second.joined, event.capture_position + 1);
  if (stream.get() != event.capture->origin) branches[stream.get()].last_work = event.capture->nodes.size();
  return hipSuccess;
}

bool is_captured(Event& event) {
  const std::lock_guard lock(mutex);
  return event.capture != nullptr;
}

ASSAY_API hipError_t hipStreamBeginCapture(hipStream_t handle, hipStreamCaptureMode mode) {
  ASSAY_CHECK_DEVICE();
  if (mode < hipStreamCaptureModeGlobal || mode > hipStreamCaptureModeRelaxed) return finish(hipErrorInvalidValue);
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (stream == nullptr) return finish(hipErrorInvalidHandle);
  if (is_null_stream(*stream)) return finish(hipErrorStreamCaptureUnsupported);
  const std::lock_guard lock(mutex);
  if (stream->capture != nullptr) return finish(hipErrorIllegalState);
  auto capture = std::make_shared<Capture>(Capture{stream.get(), mode, pthread_self(), false, {}, {}});
  capture->branches[stream.get()] = {stream, 0, 0};
  stream->capture = capture;
  active.push_back(std::move(capture));
  active_count.store(static_cast<int>(active.size()), std::memory_order_release);
  return finish(hipSuccess);
}

ASSAY_API hipError_t hipStreamEndCapture(hipStream_t handle, hipGraph_t* out) {
  ASSAY_CHECK_DEVICE();
  if (out == nullptr) return finish(hipErrorInvalidValue);
  *out = nullptr;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (stream == nullptr) return finish(hipErrorInvalidHandle);
  const std::lock_guard lock(mutex);
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture == nullptr) return finish(hipErrorIllegalState);
  if (capture->origin != stream.get()) return finish(hipErrorStreamCaptureUnmatched);
  if (capture->mode != hipStreamCaptureModeRelaxed && pthread_equal(capture->thread, pthread_self()) == 0)
    return finish(hipErrorStreamCaptureWrongThread);
  leave(*capture);
  if (capture->invalid) return finish(hipErrorStreamCaptureInvalidated);
  for (const auto& [other, branch] : capture->branches)
    if (other != stream.get() && branch.joined <= branch.last_work)
      return finish(hipErrorStreamCaptureUnjoined);
  auto graph = std::make_shared<Graph>();
  graph->nodes = std::move(capture->nodes);
  *out = graphs().add(std::move(graph));
  return finish(hipSuccess);
}

ASSAY_API hipError_t hipStreamIsCapturing(hipStream_t handle, hipStreamCaptureStatus* status) {
  ASSAY_CHECK_DEVICE();
  if (status == nullptr) return finish(hipErrorInvalidValue);
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (stream == nullptr) return finish(hipErrorInvalidHandle);
  const std::lock_guard lock(mutex);
  *status = stream->capture == nullptr  ? hipStreamCaptureStatusNone
            : stream->capture->invalid ? hipStreamCaptureStatusInvalidated
                                       : hipStreamCaptureStatusActive;
  return finish(hipSuccess);
}

ASSAY_API hipError_t hipGraphInstantiateWithFlags(hipGraphExec_t* out, hipGraph_t handle, unsigned long long flags) {
  ASSAY_CHECK_DEVICE();
  if (out == nullptr || flags != 0) return finish(hipErrorInvalidValue);
  const std::shared_ptr<Graph> graph = graphs().get(handle);
  if (graph == nullptr) return finish(hipErrorInvalidHandle);
  auto executable = std::make_shared<GraphExec>();
  executable->nodes = graph->nodes;
  *out = executables().add(std::move(executable));
  return finish(hipSuccess);
}

ASSAY_API hipError_t hipGraphInstantiate(hipGraphExec_t* out, hipGraph_t graph, void** error_node, char* log,
                                         size_t log_nbytes) {
  if (error_node != nullptr) *error_node = nullptr;
  if (log != nullptr && log_nbytes > 0) log[0] = '\0';
  return hipGraphInstantiateWithFlags(out, graph, 0);
}

ASSAY_API hipError_t hipGraphLaunch(hipGraphExec_t handle, hipStream_t stream_handle) {
  ASSAY_CHECK_DEVICE();
  const std::shared_ptr<GraphExec> executable = executables().get(handle);
  const std::shared_ptr<Stream> stream = find_stream(stream_handle);
  if (executable == nullptr || stream == nullptr) return finish(hipErrorInvalidHandle);
  const FaultScope scope;  // one installation of the handlers for all nodes
  for (const Operation& node : executable->nodes)
    if (const hipError_t error = submit(stream, node, Manner::replayed); error != hipSuccess) return finish(error);
  return finish(hipSuccess);
}

ASSAY_API hipError_t hipGraphDestroy(hipGraph_t handle) {
  return finish(graphs().remove(handle) != nullptr ? hipSuccess : hipErrorInvalidHandle);
}

ASSAY_API hipError_t hipGraphExecDestroy(hipGraphExec_t handle) {
  return finish(executables().remove(handle) != nullptr ? hipSuccess : hipErrorInvalidHandle);
}
