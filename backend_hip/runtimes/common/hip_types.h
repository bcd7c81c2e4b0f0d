// The part of HIP's C interface that the runtime exports: values and layouts as hip-python's bindings have
// them (HIP 7, hipDeviceProp_tR0600).
#pragma once

#include <cstddef>
#include <cstdint>

#define ASSAY_API extern "C" __attribute__((visibility("default")))

// X(name, value, text). Aliases with equal values appear once, under HIP's newer name.
#define ASSAY_HIP_ERRORS(X)                                                              \
  X(hipSuccess, 0, "no error")                                                           \
  X(hipErrorInvalidValue, 1, "invalid argument")                                         \
  X(hipErrorOutOfMemory, 2, "out of memory")                                             \
  X(hipErrorNotInitialized, 3, "initialization error")                                   \
  X(hipErrorDeinitialized, 4, "driver shutting down")                                    \
  X(hipErrorInvalidConfiguration, 9, "invalid configuration argument")                   \
  X(hipErrorInvalidDevicePointer, 17, "invalid device pointer")                          \
  X(hipErrorInvalidMemcpyDirection, 21, "invalid copy direction for memcpy")             \
  X(hipErrorInvalidDeviceFunction, 98, "invalid device function")                        \
  X(hipErrorNoDevice, 100, "no ROCm-capable device is detected")                         \
  X(hipErrorInvalidDevice, 101, "invalid device ordinal")                                \
  X(hipErrorInvalidImage, 200, "device kernel image is invalid")                         \
  X(hipErrorInvalidContext, 201, "invalid device context")                               \
  X(hipErrorNoBinaryForGpu, 209, "no kernel image is available for execution on the device") \
  X(hipErrorECCNotCorrectable, 214, "uncorrectable ECC error encountered")               \
  X(hipErrorInvalidKernelFile, 218, "invalid kernel file")                               \
  X(hipErrorSharedObjectInitFailed, 303, "shared object initialization failed")          \
  X(hipErrorOperatingSystem, 304, "OS call failed or operation not supported on this OS") \
  X(hipErrorInvalidHandle, 400, "invalid resource handle")                               \
  X(hipErrorIllegalState, 401, "the operation cannot be performed in the present state") \
  X(hipErrorNotFound, 500, "named symbol not found")                                     \
  X(hipErrorNotReady, 600, "device not ready")                                           \
  X(hipErrorIllegalAddress, 700, "an illegal memory access was encountered")             \
  X(hipErrorLaunchOutOfResources, 701, "out of resources at launch")                     \
  X(hipErrorLaunchTimeOut, 702, "the launch timed out and was terminated")               \
  X(hipErrorContextIsDestroyed, 709, "context is destroyed")                             \
  X(hipErrorAssert, 710, "device-side assert triggered")                                 \
  X(hipErrorLaunchFailure, 719, "unspecified launch failure")                            \
  X(hipErrorNotSupported, 801, "operation not supported")                                \
  X(hipErrorStreamCaptureUnsupported, 900, "operation not permitted when stream is capturing") \
  X(hipErrorStreamCaptureInvalidated, 901, "operation failed due to a previous error during capture") \
  X(hipErrorStreamCaptureMerge, 902, "operation would result in a merge of separate capture sequences") \
  X(hipErrorStreamCaptureUnmatched, 903, "capture was not ended in the same stream as it began") \
  X(hipErrorStreamCaptureUnjoined, 904, "capturing stream has unjoined work")            \
  X(hipErrorStreamCaptureIsolation, 905, "dependency created on uncaptured work in another stream") \
  X(hipErrorStreamCaptureImplicit, 906, "operation would make the legacy stream depend on a capturing blocking stream") \
  X(hipErrorCapturedEvent, 907, "operation not permitted on an event last recorded in a capturing stream") \
  X(hipErrorStreamCaptureWrongThread, 908, "attempt to terminate a thread-local capture sequence from another thread") \
  X(hipErrorUnknown, 999, "unknown error")

enum hipError_t : int {
#define X(name, value, text) name = value,
  ASSAY_HIP_ERRORS(X)
#undef X
};

enum hipMemcpyKind : int {
  hipMemcpyHostToHost = 0,
  hipMemcpyHostToDevice = 1,
  hipMemcpyDeviceToHost = 2,
  hipMemcpyDeviceToDevice = 3,
  hipMemcpyDefault = 4,
};

enum hipStreamCaptureMode : int {
  hipStreamCaptureModeGlobal = 0,
  hipStreamCaptureModeThreadLocal = 1,
  hipStreamCaptureModeRelaxed = 2,
};

enum hipStreamCaptureStatus : int {
  hipStreamCaptureStatusNone = 0,
  hipStreamCaptureStatusActive = 1,
  hipStreamCaptureStatusInvalidated = 2,
};

constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDisableTiming = 2;

struct Stream;
struct Event;
struct Graph;
struct GraphExec;
struct Module;
struct Function;
using hipStream_t = Stream*;
using hipEvent_t = Event*;
using hipGraph_t = Graph*;
using hipGraphExec_t = GraphExec*;
using hipModule_t = Module*;
using hipFunction_t = Function*;

struct hipDeviceProp_tR0600 {
  char name[256];
  char uuid[16];
  char luid[8];
  unsigned luidDeviceNodeMask;
  size_t totalGlobalMem, sharedMemPerBlock;
  int regsPerBlock, warpSize;
  size_t memPitch;
  int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3], clockRate;
  size_t totalConstMem;
  int major, minor;
  size_t textureAlignment, texturePitchAlignment;
  int deviceOverlap, multiProcessorCount, kernelExecTimeoutEnabled, integrated, canMapHostMemory, computeMode;
  int maxTexture1D, maxTexture1DMipmap, maxTexture1DLinear, maxTexture2D[2], maxTexture2DMipmap[2];
  int maxTexture2DLinear[3], maxTexture2DGather[2], maxTexture3D[3], maxTexture3DAlt[3], maxTextureCubemap;
  int maxTexture1DLayered[2], maxTexture2DLayered[3], maxTextureCubemapLayered[2];
  int maxSurface1D, maxSurface2D[2], maxSurface3D[3], maxSurface1DLayered[2], maxSurface2DLayered[3];
  int maxSurfaceCubemap, maxSurfaceCubemapLayered[2];
  size_t surfaceAlignment;
  int concurrentKernels, ECCEnabled, pciBusID, pciDeviceID, pciDomainID, tccDriver, asyncEngineCount;
  int unifiedAddressing, memoryClockRate, memoryBusWidth, l2CacheSize, persistingL2CacheMaxSize;
  int maxThreadsPerMultiProcessor, streamPrioritiesSupported, globalL1CacheSupported, localL1CacheSupported;
  size_t sharedMemPerMultiprocessor;
  int regsPerMultiprocessor, managedMemory, isMultiGpuBoard, multiGpuBoardGroupID, hostNativeAtomicSupported;
  int singleToDoublePrecisionPerfRatio, pageableMemoryAccess, concurrentManagedAccess;
  int computePreemptionSupported, canUseHostPointerForRegisteredMem, cooperativeLaunch;
  int cooperativeMultiDeviceLaunch;
  size_t sharedMemPerBlockOptin;
  int pageableMemoryAccessUsesHostPageTables, directManagedMemAccessFromHost, maxBlocksPerMultiProcessor;
  int accessPolicyMaxWindowSize;
  size_t reservedSharedMemPerBlock;
  int hostRegisterSupported, sparseHipArraySupported, hostRegisterReadOnlySupported;
  int timelineSemaphoreInteropSupported, memoryPoolsSupported, gpuDirectRDMASupported;
  unsigned gpuDirectRDMAFlushWritesOptions;
  int gpuDirectRDMAWritesOrdering;
  unsigned memoryPoolSupportedHandleTypes;
  int deferredMappingHipArraySupported, ipcEventSupported, clusterLaunch, unifiedFunctionPointers;
  int reserved[63];
  int hipReserved[32];
  char gcnArchName[256];
  size_t maxSharedMemoryPerMultiProcessor;
  int clockInstructionRate;
  unsigned arch;  // hipDeviceArch_t: a bit field of 32 bits
  unsigned *hdpMemFlushCntl, *hdpRegFlushCntl;
  int cooperativeMultiDeviceUnmatchedFunc, cooperativeMultiDeviceUnmatchedGridDim;
  int cooperativeMultiDeviceUnmatchedBlockDim, cooperativeMultiDeviceUnmatchedSharedMem;
  int isLargeBar, asicRevision;
};
// The size that hip-python allocates (hip.hipDeviceProp_t.c_sizeof()).
static_assert(sizeof(hipDeviceProp_tR0600) == 1472);
