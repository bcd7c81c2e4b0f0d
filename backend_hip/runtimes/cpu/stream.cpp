#include "stream.h"

#include <chrono>
#include <cstring>

#include "capture.h"
#include "checking.h"
#include "error.h"
#include "handles.h"
#include "launch.h"
#include "memory.h"
#include "queue.h"

namespace {
// Never destroyed: Python may release streams after this library's static destructors would have run.
Handles<Stream>& streams() {
  static auto* handles = new Handles<Stream>;
  return *handles;
}
Handles<Event>& events() {
  static auto* handles = new Handles<Event>;
  return *handles;
}
const std::shared_ptr<Stream>& null_stream() {
  static auto* stream = new std::shared_ptr<Stream>(std::make_shared<Stream>());
  return *stream;
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

hipError_t run(const CopyOperation& copy) {
  // Checked again: between capture and replay the memory may have been freed.
  if (const hipError_t error = check_copy(copy.dst, copy.src, copy.nbytes, copy.kind); error != hipSuccess)
    return error;
  std::memmove(copy.dst, copy.src, copy.nbytes);
  return hipSuccess;
}

hipError_t run(const FillOperation& fill) {
  if (const hipError_t error = check_fill(fill.dst, fill.count * fill.value_nbytes); error != hipSuccess)
    return error;
  if (fill.value_nbytes == 1) {
    std::memset(fill.dst, static_cast<int>(fill.value), fill.count);
  } else {
    auto* at = static_cast<unsigned char*>(fill.dst);
    for (size_t i = 0; i < fill.count; ++i) std::memcpy(at + 4 * i, &fill.value, 4);
  }
  return hipSuccess;
}

hipError_t run(const LaunchOperation& launch) { return run_launch(launch); }

hipError_t run(const RecordOperation& record) {
  record.event->recorded_ns = now_ns();
  return hipSuccess;
}

hipError_t run(const WaitOperation&) { return hipSuccess; }

hipError_t copy(void* dst, const void* src, size_t nbytes, hipMemcpyKind kind, const std::shared_ptr<Stream>& stream,
                Manner manner) {
  if (const hipError_t error = check_copy(dst, src, nbytes, kind); error != hipSuccess) return error;
  return submit(stream, CopyOperation{dst, src, nbytes, kind}, manner);
}

hipError_t fill(void* dst, uint32_t value, uint32_t value_nbytes, size_t count, const std::shared_ptr<Stream>& stream,
                Manner manner) {
  if (count > SIZE_MAX / value_nbytes) return hipErrorInvalidValue;
  if (const hipError_t error = check_fill(dst, count * value_nbytes); error != hipSuccess) return error;
  return submit(stream, FillOperation{dst, value, value_nbytes, count}, manner);
}
}  // namespace

std::shared_ptr<Stream> find_stream(hipStream_t handle) {
  return handle == nullptr ? null_stream() : streams().get(handle);
}

bool is_null_stream(const Stream& stream) { return &stream == null_stream().get(); }

hipError_t execute(const Operation& operation) {
  return std::visit([](const auto& each) { return run(each); }, operation);
}

hipError_t submit(const std::shared_ptr<Stream>& stream, Operation operation, Manner manner) {
  if (is_null_stream(*stream)) {
    if (const hipError_t error = forbid_null_stream_in_capture(); error != hipSuccess) return error;
  } else {
    switch (record(*stream, operation)) {
      case Recorded::yes: return hipSuccess;
      case Recorded::refused: return hipErrorStreamCaptureInvalidated;
      case Recorded::no: break;
    }
  }
  if (auto* launch = std::get_if<LaunchOperation>(&operation)) launch->number = next_launch_number();
  return checking.sanitize ? defer(stream, std::move(operation), manner) : execute(operation);
}

// A query's answer: "not ready" is no failed call.
static hipError_t answer(hipError_t error) { return error == hipErrorNotReady ? error : finish(error); }

#define ASSAY_STREAM(name, handle)                  \
  const std::shared_ptr<Stream> name = find_stream(handle); \
  if (name == nullptr) return finish(hipErrorInvalidHandle)
#define ASSAY_EVENT(name, handle)                    \
  const std::shared_ptr<Event> name = events().get(handle); \
  if (name == nullptr) return finish(hipErrorInvalidHandle)
#define ASSAY_FORBID_SYNCHRONOUS()                                                          \
  if (const hipError_t error = forbid_synchronous_in_capture(); error != hipSuccess) return finish(error)

ASSAY_API hipError_t hipMemcpy(void* dst, const void* src, size_t nbytes, hipMemcpyKind kind) {
  ASSAY_CHECK_DEVICE();
  ASSAY_FORBID_SYNCHRONOUS();
  return finish(copy(dst, src, nbytes, kind, null_stream(), Manner::blocking));
}

ASSAY_API hipError_t hipMemcpyAsync(void* dst, const void* src, size_t nbytes, hipMemcpyKind kind,
                                    hipStream_t handle) {
  ASSAY_CHECK_DEVICE();
  ASSAY_STREAM(stream, handle);
  return finish(copy(dst, src, nbytes, kind, stream, Manner::asynchronous));
}

ASSAY_API hipError_t hipMemset(void* dst, int value, size_t nbytes) {
  ASSAY_CHECK_DEVICE();
  ASSAY_FORBID_SYNCHRONOUS();
  return finish(fill(dst, static_cast<unsigned char>(value), 1, nbytes, null_stream(), Manner::blocking));
}

ASSAY_API hipError_t hipMemsetAsync(void* dst, int value, size_t nbytes, hipStream_t handle) {
  ASSAY_CHECK_DEVICE();
  ASSAY_STREAM(stream, handle);
  return finish(fill(dst, static_cast<unsigned char>(value), 1, nbytes, stream, Manner::asynchronous));
}

ASSAY_API hipError_t hipMemsetD32(void* dst, int value, size_t count) {
  ASSAY_CHECK_DEVICE();
  ASSAY_FORBID_SYNCHRONOUS();
  return finish(fill(dst, static_cast<uint32_t>(value), 4, count, null_stream(), Manner::blocking));
}

ASSAY_API hipError_t hipMemsetD32Async(void* dst, int value, size_t count, hipStream_t handle) {
  ASSAY_CHECK_DEVICE();
  ASSAY_STREAM(stream, handle);
  return finish(fill(dst, static_cast<uint32_t>(value), 4, count, stream, Manner::asynchronous));
}

ASSAY_API hipError_t hipStreamCreateWithFlags(hipStream_t* out, unsigned flags) {
  ASSAY_CHECK_DEVICE();
  if (out == nullptr || flags > kStreamNonBlocking) return finish(hipErrorInvalidValue);
  auto stream = std::make_shared<Stream>();
  stream->flags = flags;
  *out = streams().add(std::move(stream));
  return finish(hipSuccess);
}

ASSAY_API hipError_t hipStreamCreate(hipStream_t* out) { return hipStreamCreateWithFlags(out, 0); }

ASSAY_API hipError_t hipStreamDestroy(hipStream_t handle) {
  if (handle == nullptr) return finish(hipErrorInvalidHandle);
  ASSAY_STREAM(stream, handle);
  if (const hipError_t error = forbid_on_capturing(*stream); error != hipSuccess) return finish(error);
  streams().remove(handle);
  return finish(hipSuccess);
}

ASSAY_API hipError_t hipStreamSynchronize(hipStream_t handle) {
  ASSAY_CHECK_DEVICE();
  ASSAY_STREAM(stream, handle);
  const hipError_t error =
      is_null_stream(*stream) ? forbid_null_stream_in_capture() : forbid_on_capturing(*stream);
  return finish(error != hipSuccess ? error : complete_stream(*stream));
}

ASSAY_API hipError_t hipStreamQuery(hipStream_t handle) {
  ASSAY_CHECK_DEVICE();
  ASSAY_STREAM(stream, handle);
  const hipError_t error =
      is_null_stream(*stream) ? forbid_null_stream_in_capture() : forbid_on_capturing(*stream);
  return answer(error != hipSuccess ? error : query_stream(*stream));
}

ASSAY_API hipError_t hipDeviceSynchronize() {
  ASSAY_CHECK_DEVICE();
  ASSAY_FORBID_IN_CAPTURE();
  return finish(complete_all());
}

ASSAY_API hipError_t hipStreamWaitEvent(hipStream_t handle, hipEvent_t event_handle, unsigned flags) {
  ASSAY_CHECK_DEVICE();
  if (flags != 0) return finish(hipErrorInvalidValue);
  ASSAY_STREAM(stream, handle);
  ASSAY_EVENT(event, event_handle);
  bool handled = false;
  const hipError_t error = capture_wait(stream, *event, handled);
  // Without a queue there is nothing to wait for: work ran at once.
  if (!handled && error == hipSuccess && is_queued(event->last_record))
    enqueue(stream, WaitOperation{}, false, {event->last_record});
  return finish(error);
}

ASSAY_API hipError_t hipEventCreateWithFlags(hipEvent_t* out, unsigned flags) {
  ASSAY_CHECK_DEVICE();
  if (out == nullptr) return finish(hipErrorInvalidValue);
  auto event = std::make_shared<Event>();
  event->flags = flags;
  *out = events().add(std::move(event));
  return finish(hipSuccess);
}

ASSAY_API hipError_t hipEventCreate(hipEvent_t* out) { return hipEventCreateWithFlags(out, 0); }

ASSAY_API hipError_t hipEventDestroy(hipEvent_t handle) {
  return finish(events().remove(handle) != nullptr ? hipSuccess : hipErrorInvalidHandle);
}

ASSAY_API hipError_t hipEventRecord(hipEvent_t handle, hipStream_t stream_handle) {
  ASSAY_CHECK_DEVICE();
  ASSAY_STREAM(stream, stream_handle);
  ASSAY_EVENT(event, handle);
  bool handled = false;
  const hipError_t error = capture_event(*stream, *event, handled);
  return finish(handled || error != hipSuccess ? error : submit(stream, RecordOperation{event}));
}

ASSAY_API hipError_t hipEventSynchronize(hipEvent_t handle) {
  ASSAY_CHECK_DEVICE();
  ASSAY_EVENT(event, handle);
  return finish(is_captured(*event) ? hipErrorCapturedEvent : complete(event->last_record));
}

ASSAY_API hipError_t hipEventQuery(hipEvent_t handle) {
  ASSAY_CHECK_DEVICE();
  ASSAY_EVENT(event, handle);
  return answer(is_captured(*event) ? hipErrorCapturedEvent : query(event->last_record));
}

ASSAY_API hipError_t hipEventElapsedTime(float* out_ms, hipEvent_t start_handle, hipEvent_t stop_handle) {
  ASSAY_CHECK_DEVICE();
  if (out_ms == nullptr) return finish(hipErrorInvalidValue);
  ASSAY_EVENT(start, start_handle);
  ASSAY_EVENT(stop, stop_handle);
  if (is_captured(*start) || is_captured(*stop)) return finish(hipErrorCapturedEvent);
  if (is_queued(start->last_record) || is_queued(stop->last_record)) return hipErrorNotReady;
  const bool timed = ((start->flags | stop->flags) & kEventDisableTiming) == 0;
  if (!timed || start->recorded_ns < 0 || stop->recorded_ns < 0) return finish(hipErrorInvalidHandle);
  *out_ms = static_cast<float>(static_cast<double>(stop->recorded_ns - start->recorded_ns) * 1e-6);
  return finish(hipSuccess);
}
