// The CUDA driver API as far as it is used. Own declarations, so that building needs no toolkit; functions are
// looked up in libcuda.so.1 at the first call, so that nothing is linked.
#pragma once

#include "error.h"

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = uintptr_t;  // unsigned long long in cuda.h: the same width on every 64-bit system
struct CUctx_st;
using CUcontext = CUctx_st*;

// HIP's handles are the driver's own, so the pointer types of hip_types.h stand for CUstream and the others.
// X(name in cuda.h, exported symbol, parameters)
#define ASSAY_DRIVER_FUNCTIONS(X)                                                                     \
  X(cuInit, "cuInit", (unsigned flags))                                                               \
  X(cuDriverGetVersion, "cuDriverGetVersion", (int* version))                                         \
  X(cuGetErrorName, "cuGetErrorName", (CUresult result, const char** name))                           \
  X(cuGetErrorString, "cuGetErrorString", (CUresult result, const char** text))                       \
  X(cuDeviceGet, "cuDeviceGet", (CUdevice* device, int ordinal))                                      \
  X(cuDeviceGetName, "cuDeviceGetName", (char* name, int length, CUdevice device))                    \
  X(cuDeviceTotalMem, "cuDeviceTotalMem_v2", (size_t* nbytes, CUdevice device))                       \
  X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int* value, int attribute, CUdevice device))       \
  X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CUcontext* context, CUdevice device))      \
  X(cuCtxSetCurrent, "cuCtxSetCurrent", (CUcontext context))                                          \
  X(cuCtxSynchronize, "cuCtxSynchronize", ())                                                         \
  X(cuMemGetInfo, "cuMemGetInfo_v2", (size_t* free_nbytes, size_t* total_nbytes))                     \
  X(cuMemAlloc, "cuMemAlloc_v2", (CUdeviceptr* pointer, size_t nbytes))                               \
  X(cuMemFree, "cuMemFree_v2", (CUdeviceptr pointer))                                                 \
  X(cuMemHostAlloc, "cuMemHostAlloc", (void** pointer, size_t nbytes, unsigned flags))                \
  X(cuMemFreeHost, "cuMemFreeHost", (void* pointer))                                                  \
  X(cuMemGetAddressRange, "cuMemGetAddressRange_v2", (CUdeviceptr* base, size_t* nbytes, CUdeviceptr pointer)) \
  X(cuPointerGetAttribute, "cuPointerGetAttribute", (void* value, int attribute, CUdeviceptr pointer)) \
  X(cuMemcpy, "cuMemcpy", (CUdeviceptr dst, CUdeviceptr src, size_t nbytes))                          \
  X(cuMemcpyAsync, "cuMemcpyAsync", (CUdeviceptr dst, CUdeviceptr src, size_t nbytes, hipStream_t stream)) \
  X(cuMemsetD8, "cuMemsetD8_v2", (CUdeviceptr dst, unsigned char value, size_t count))                \
  X(cuMemsetD8Async, "cuMemsetD8Async", (CUdeviceptr dst, unsigned char value, size_t count, hipStream_t stream)) \
  X(cuMemsetD32, "cuMemsetD32_v2", (CUdeviceptr dst, unsigned value, size_t count))                   \
  X(cuMemsetD32Async, "cuMemsetD32Async", (CUdeviceptr dst, unsigned value, size_t count, hipStream_t stream)) \
  X(cuStreamCreate, "cuStreamCreate", (hipStream_t* stream, unsigned flags))                          \
  X(cuStreamDestroy, "cuStreamDestroy_v2", (hipStream_t stream))                                      \
  X(cuStreamSynchronize, "cuStreamSynchronize", (hipStream_t stream))                                 \
  X(cuStreamQuery, "cuStreamQuery", (hipStream_t stream))                                             \
  X(cuStreamWaitEvent, "cuStreamWaitEvent", (hipStream_t stream, hipEvent_t event, unsigned flags))   \
  X(cuStreamBeginCapture, "cuStreamBeginCapture_v2", (hipStream_t stream, hipStreamCaptureMode mode)) \
  X(cuStreamEndCapture, "cuStreamEndCapture", (hipStream_t stream, hipGraph_t* graph))                \
  X(cuStreamIsCapturing, "cuStreamIsCapturing", (hipStream_t stream, hipStreamCaptureStatus* status)) \
  X(cuEventCreate, "cuEventCreate", (hipEvent_t* event, unsigned flags))                              \
  X(cuEventDestroy, "cuEventDestroy_v2", (hipEvent_t event))                                          \
  X(cuEventRecord, "cuEventRecord", (hipEvent_t event, hipStream_t stream))                           \
  X(cuEventQuery, "cuEventQuery", (hipEvent_t event))                                                 \
  X(cuEventSynchronize, "cuEventSynchronize", (hipEvent_t event))                                     \
  X(cuEventElapsedTime, "cuEventElapsedTime", (float* elapsed_ms, hipEvent_t start, hipEvent_t stop)) \
  X(cuGraphInstantiateWithFlags, "cuGraphInstantiateWithFlags", (hipGraphExec_t* executable, hipGraph_t graph, unsigned long long flags)) \
  X(cuGraphLaunch, "cuGraphLaunch", (hipGraphExec_t executable, hipStream_t stream))                  \
  X(cuGraphDestroy, "cuGraphDestroy", (hipGraph_t graph))                                             \
  X(cuGraphExecDestroy, "cuGraphExecDestroy", (hipGraphExec_t executable))                            \
  X(cuModuleLoadData, "cuModuleLoadData", (hipModule_t* module, const void* image))                   \
  X(cuModuleUnload, "cuModuleUnload", (hipModule_t module))                                           \
  X(cuModuleGetFunction, "cuModuleGetFunction", (hipFunction_t* function, hipModule_t module, const char* name)) \
  X(cuFuncGetAttribute, "cuFuncGetAttribute", (int* value, int attribute, hipFunction_t function))    \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor, "cuOccupancyMaxActiveBlocksPerMultiprocessor", \
    (int* blocks, hipFunction_t function, int threads, size_t shared_nbytes))                         \
  X(cuLaunchKernel, "cuLaunchKernel", (hipFunction_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z, \
                                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_nbytes, \
                                       hipStream_t stream, void** parameters, void** extra))

struct Driver {
#define X(name, symbol, parameters) CUresult(*name) parameters = nullptr;
  ASSAY_DRIVER_FUNCTIONS(X)
#undef X
  // Drivers from CUDA 12.4 on have them; null before.
  CUresult (*cuFuncGetParamInfo)(hipFunction_t function, size_t index, size_t* offset, size_t* nbytes) = nullptr;
  CUresult (*cuFuncLoad)(hipFunction_t function) = nullptr;
  CUdevice device = 0;
  CUcontext context = nullptr;
};

// What `enter` has looked up.
const Driver& driver();

// For every entry point: loads the driver and opens device 0 once in the process, makes its primary context the
// calling thread's. The error when the device is lost or there is none.
hipError_t enter();

// The driver's answer as HIP's error, remembered for hipGetLastError. An answer that leaves the process without a
// device becomes sticky; one that HIP has no number for is hipErrorUnknown, and stderr says what it was.
hipError_t answer(CUresult result, const char* call);

#define ASSAY_ENTER()                                                                    \
  do {                                                                                   \
    if (const hipError_t error = enter(); error != hipSuccess) return finish(error);     \
  } while (false)

// ASSAY_CALL(cuMemFree, pointer): calls the driver and gives HIP's error.
#define ASSAY_CALL(name, ...) answer(driver().name(__VA_ARGS__), #name)
