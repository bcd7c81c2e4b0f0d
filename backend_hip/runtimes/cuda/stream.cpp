// Streams and events. The modes, states and flags that pass through have the same numbers in both interfaces.
#include "driver.h"

namespace {
constexpr unsigned kEventFlags = 7;  // blocking wait, no timing, interprocess: HIP's others are about its caches
}

ASSAY_API hipError_t hipStreamCreateWithFlags(hipStream_t* out, unsigned flags) {
  ASSAY_ENTER();
  if (out == nullptr || flags > kStreamNonBlocking) return finish(hipErrorInvalidValue);
  return ASSAY_CALL(cuStreamCreate, out, flags);
}

ASSAY_API hipError_t hipStreamCreate(hipStream_t* out) { return hipStreamCreateWithFlags(out, 0); }

ASSAY_API hipError_t hipStreamDestroy(hipStream_t stream) {
  ASSAY_ENTER();
  return stream == nullptr ? finish(hipErrorInvalidHandle) : ASSAY_CALL(cuStreamDestroy, stream);
}

ASSAY_API hipError_t hipStreamSynchronize(hipStream_t stream) {
  ASSAY_ENTER();
  return ASSAY_CALL(cuStreamSynchronize, stream);
}

ASSAY_API hipError_t hipStreamQuery(hipStream_t stream) {
  ASSAY_ENTER();
  return ASSAY_CALL(cuStreamQuery, stream);
}

ASSAY_API hipError_t hipDeviceSynchronize() {
  ASSAY_ENTER();
  return ASSAY_CALL(cuCtxSynchronize);
}

ASSAY_API hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned flags) {
  ASSAY_ENTER();
  if (flags != 0) return finish(hipErrorInvalidValue);
  if (event == nullptr) return finish(hipErrorInvalidHandle);
  return ASSAY_CALL(cuStreamWaitEvent, stream, event, 0);
}

ASSAY_API hipError_t hipEventCreateWithFlags(hipEvent_t* out, unsigned flags) {
  ASSAY_ENTER();
  return out == nullptr ? finish(hipErrorInvalidValue) : ASSAY_CALL(cuEventCreate, out, flags & kEventFlags);
}

ASSAY_API hipError_t hipEventCreate(hipEvent_t* out) { return hipEventCreateWithFlags(out, 0); }

ASSAY_API hipError_t hipEventDestroy(hipEvent_t event) {
  ASSAY_ENTER();
  return event == nullptr ? finish(hipErrorInvalidHandle) : ASSAY_CALL(cuEventDestroy, event);
}

ASSAY_API hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream) {
  ASSAY_ENTER();
  return event == nullptr ? finish(hipErrorInvalidHandle) : ASSAY_CALL(cuEventRecord, event, stream);
}

ASSAY_API hipError_t hipEventSynchronize(hipEvent_t event) {
  ASSAY_ENTER();
  return event == nullptr ? finish(hipErrorInvalidHandle) : ASSAY_CALL(cuEventSynchronize, event);
}

ASSAY_API hipError_t hipEventQuery(hipEvent_t event) {
  ASSAY_ENTER();
  return event == nullptr ? finish(hipErrorInvalidHandle) : ASSAY_CALL(cuEventQuery, event);
}

ASSAY_API hipError_t hipEventElapsedTime(float* out_ms, hipEvent_t start, hipEvent_t stop) {
  ASSAY_ENTER();
  if (out_ms == nullptr) return finish(hipErrorInvalidValue);
  if (start == nullptr || stop == nullptr) return finish(hipErrorInvalidHandle);
  return ASSAY_CALL(cuEventElapsedTime, out_ms, start, stop);
}
