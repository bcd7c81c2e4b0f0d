// Stream capture and graphs. Capture modes and states have the same numbers in both interfaces.
#include "driver.h"

ASSAY_API hipError_t hipStreamBeginCapture(hipStream_t stream, hipStreamCaptureMode mode) {
  ASSAY_ENTER();
  if (mode < hipStreamCaptureModeGlobal || mode > hipStreamCaptureModeRelaxed) return finish(hipErrorInvalidValue);
  return ASSAY_CALL(cuStreamBeginCapture, stream, mode);
}

ASSAY_API hipError_t hipStreamEndCapture(hipStream_t stream, hipGraph_t* out) {
  ASSAY_ENTER();
  if (out == nullptr) return finish(hipErrorInvalidValue);
  *out = nullptr;
  return ASSAY_CALL(cuStreamEndCapture, stream, out);
}

ASSAY_API hipError_t hipStreamIsCapturing(hipStream_t stream, hipStreamCaptureStatus* status) {
  ASSAY_ENTER();
  return status == nullptr ? finish(hipErrorInvalidValue) : ASSAY_CALL(cuStreamIsCapturing, stream, status);
}

ASSAY_API hipError_t hipGraphInstantiateWithFlags(hipGraphExec_t* out, hipGraph_t graph, unsigned long long flags) {
  ASSAY_ENTER();
  if (out == nullptr || flags != 0) return finish(hipErrorInvalidValue);
  if (graph == nullptr) return finish(hipErrorInvalidHandle);
  return ASSAY_CALL(cuGraphInstantiateWithFlags, out, graph, 0);
}

ASSAY_API hipError_t hipGraphInstantiate(hipGraphExec_t* out, hipGraph_t graph, void** error_node, char* log,
                                         size_t log_nbytes) {
  if (error_node != nullptr) *error_node = nullptr;
  if (log != nullptr && log_nbytes > 0) log[0] = '\0';
  return hipGraphInstantiateWithFlags(out, graph, 0);
}

ASSAY_API hipError_t hipGraphLaunch(hipGraphExec_t executable, hipStream_t stream) {
  ASSAY_ENTER();
  return executable == nullptr ? finish(hipErrorInvalidHandle) : ASSAY_CALL(cuGraphLaunch, executable, stream);
}

ASSAY_API hipError_t hipGraphDestroy(hipGraph_t graph) {
  ASSAY_ENTER();
  return graph == nullptr ? finish(hipErrorInvalidHandle) : ASSAY_CALL(cuGraphDestroy, graph);
}

ASSAY_API hipError_t hipGraphExecDestroy(hipGraphExec_t executable) {
  ASSAY_ENTER();
  return executable == nullptr ? finish(hipErrorInvalidHandle) : ASSAY_CALL(cuGraphExecDestroy, executable);
}
