// Stream capture: which work is recorded, which calls are forbidden meanwhile.
#pragma once

#include <memory>

#include "hip_types.h"
#include "stream.h"

// hipSuccess when no capture forbids the call. Otherwise the captures concerned are invalidated and the error
// is `unsupported`, or, for work in the null stream, hipErrorStreamCaptureImplicit.
hipError_t forbid_in_capture();
hipError_t forbid_null_stream_in_capture();
hipError_t forbid_synchronous_in_capture();  // a copy or fill that waits: both of the above

#define ASSAY_FORBID_IN_CAPTURE()                                              \
  do {                                                                         \
    if (const hipError_t error = forbid_in_capture(); error != hipSuccess) return finish(error); \
  } while (false)

enum class Recorded { no, yes, refused };
// `yes`: the operation is now a node. `refused`: the capture is already invalid.
Recorded record(Stream& stream, const Operation& operation);

// Fails (and invalidates) when the stream captures.
hipError_t forbid_on_capturing(Stream& stream);

// hipEventRecord and hipStreamWaitEvent while capturing; `handled` is false when no capture is concerned.
hipError_t capture_event(Stream& stream, Event& event, bool& handled);
hipError_t capture_wait(const std::shared_ptr<Stream>& stream, Event& event, bool& handled);
bool is_captured(Event& event);
