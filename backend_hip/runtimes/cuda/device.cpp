// Device 0: identity, properties, versions.
#include <cstdio>
#include <cstring>

#include "driver.h"

ASSAY_API const char* assay_runtime_cuda() { return "assay cuda runtime"; }

namespace {
constexpr int kVersion = 70000000;  // HIP_VERSION_MAJOR * 10^7: the interface that is followed

// CU_DEVICE_ATTRIBUTE_*
enum Attribute : int {
  kMaxThreadsPerBlock = 1, kMaxBlockX, kMaxBlockY, kMaxBlockZ, kMaxGridX, kMaxGridY, kMaxGridZ,
  kSharedPerBlock = 8, kConstant, kWarp, kPitch, kRegistersPerBlock, kClock, kTextureAlignment,
  kMultiprocessors = 16, kTimeout, kIntegrated, kMapHost, kComputeMode,
  kConcurrentKernels = 31, kEcc, kPciBus, kPciDevice,
  kMemoryClock = 36, kBusWidth, kL2, kThreadsPerMultiprocessor, kAsyncEngines, kUnifiedAddressing,
  kPciDomain = 50, kMajor = 75, kMinor = 76, kSharedPerMultiprocessor = 81, kRegistersPerMultiprocessor,
  kManaged = 83, kSingleToDouble = 87, kPageable, kConcurrentManaged, kCooperative = 95, kSharedOptin = 97,
  kBlocksPerMultiprocessor = 106, kSharedReserved = 111,
};

// hipDeviceAttribute_t to the driver's, for what both have.
struct Pair { int hip; Attribute cuda; };
constexpr Pair kPairs[] = {
  {2, kAsyncEngines}, {3, kMapHost}, {5, kClock}, {6, kComputeMode}, {8, kConcurrentKernels},
  {9, kConcurrentManaged}, {10, kCooperative}, {16, kIntegrated}, {18, kTimeout}, {19, kL2}, {23, kMajor},
  {24, kManaged}, {25, kBlocksPerMultiprocessor}, {26, kMaxBlockX}, {27, kMaxBlockY}, {28, kMaxBlockZ},
  {29, kMaxGridX}, {30, kMaxGridY}, {31, kMaxGridZ}, {56, kMaxThreadsPerBlock}, {57, kThreadsPerMultiprocessor},
  {58, kPitch}, {59, kBusWidth}, {60, kMemoryClock}, {61, kMinor}, {63, kMultiprocessors}, {65, kPageable},
  {67, kPciBus}, {68, kPciDevice}, {69, kPciDomain}, {71, kRegistersPerBlock}, {72, kRegistersPerMultiprocessor},
  {73, kSharedReserved}, {74, kSharedPerBlock}, {75, kSharedOptin}, {76, kSharedPerMultiprocessor},
  {77, kSingleToDouble}, {81, kTextureAlignment}, {83, kConstant}, {85, kUnifiedAddressing}, {87, kWarp},
  {10000, kClock},                      // instruction rate: the shader clock
  {10002, kSharedPerMultiprocessor}, {10015, kMultiprocessors},
};

// 0 where the driver doesn't know the attribute.
int value_of(Attribute attribute) {
  int value = 0;
  return driver().cuDeviceGetAttribute(&value, attribute, driver().device) == 0 ? value : 0;
}
}  // namespace

ASSAY_API hipError_t hipInit(unsigned flags) {
  ASSAY_ENTER();
  return finish(flags == 0 ? hipSuccess : hipErrorInvalidValue);
}

// One: the first that the driver shows. CUDA_VISIBLE_DEVICES chooses it.
ASSAY_API hipError_t hipGetDeviceCount(int* count) {
  ASSAY_ENTER();
  if (count == nullptr) return finish(hipErrorInvalidValue);
  *count = 1;
  return finish(hipSuccess);
}

ASSAY_API hipError_t hipGetDevice(int* device) {
  ASSAY_ENTER();
  if (device == nullptr) return finish(hipErrorInvalidValue);
  *device = 0;
  return finish(hipSuccess);
}

ASSAY_API hipError_t hipSetDevice(int device) {
  ASSAY_ENTER();
  return finish(device == 0 ? hipSuccess : hipErrorInvalidDevice);
}

ASSAY_API hipError_t hipDeviceGet(int* device, int ordinal) {
  ASSAY_ENTER();
  if (device == nullptr) return finish(hipErrorInvalidValue);
  if (ordinal != 0) return finish(hipErrorInvalidDevice);
  *device = 0;
  return finish(hipSuccess);
}

ASSAY_API hipError_t hipDeviceGetName(char* name, int length, int device) {
  ASSAY_ENTER();
  if (name == nullptr || length <= 0) return finish(hipErrorInvalidValue);
  if (device != 0) return finish(hipErrorInvalidDevice);
  return ASSAY_CALL(cuDeviceGetName, name, length, driver().device);
}

ASSAY_API hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_tR0600* out, int device) {
  ASSAY_ENTER();
  if (out == nullptr) return finish(hipErrorInvalidValue);
  if (device != 0) return finish(hipErrorInvalidDevice);
  hipDeviceProp_tR0600 p{};
  hipError_t error = ASSAY_CALL(cuDeviceGetName, p.name, static_cast<int>(sizeof p.name), driver().device);
  if (error == hipSuccess) error = ASSAY_CALL(cuDeviceTotalMem, &p.totalGlobalMem, driver().device);
  if (error != hipSuccess) return error;
  const auto nbytes_of = [](Attribute attribute) { return static_cast<size_t>(value_of(attribute)); };
  p.major = value_of(kMajor);
  p.minor = value_of(kMinor);
  std::snprintf(p.gcnArchName, sizeof p.gcnArchName, "cuda sm_%d%d", p.major, p.minor);
  p.sharedMemPerBlock = nbytes_of(kSharedPerBlock);
  p.sharedMemPerMultiprocessor = p.maxSharedMemoryPerMultiProcessor = nbytes_of(kSharedPerMultiprocessor);
  p.sharedMemPerBlockOptin = nbytes_of(kSharedOptin);
  p.reservedSharedMemPerBlock = nbytes_of(kSharedReserved);
  p.regsPerBlock = value_of(kRegistersPerBlock);
  p.regsPerMultiprocessor = value_of(kRegistersPerMultiprocessor);
  p.warpSize = value_of(kWarp);
  p.memPitch = nbytes_of(kPitch);
  p.maxThreadsPerBlock = value_of(kMaxThreadsPerBlock);
  p.maxThreadsPerMultiProcessor = value_of(kThreadsPerMultiprocessor);
  p.maxBlocksPerMultiProcessor = value_of(kBlocksPerMultiprocessor);
  for (int i = 0; i < 3; ++i) {
    p.maxThreadsDim[i] = value_of(static_cast<Attribute>(kMaxBlockX + i));
    p.maxGridSize[i] = value_of(static_cast<Attribute>(kMaxGridX + i));
  }
  p.clockRate = p.clockInstructionRate = value_of(kClock);  // kHz
  p.memoryClockRate = value_of(kMemoryClock);
  p.memoryBusWidth = value_of(kBusWidth);
  p.l2CacheSize = value_of(kL2);
  p.totalConstMem = nbytes_of(kConstant);
  p.textureAlignment = nbytes_of(kTextureAlignment);
  p.multiProcessorCount = value_of(kMultiprocessors);
  p.kernelExecTimeoutEnabled = value_of(kTimeout);
  p.integrated = value_of(kIntegrated);
  p.canMapHostMemory = value_of(kMapHost);
  p.computeMode = value_of(kComputeMode);
  p.concurrentKernels = value_of(kConcurrentKernels);
  p.ECCEnabled = value_of(kEcc);
  p.pciBusID = value_of(kPciBus);
  p.pciDeviceID = value_of(kPciDevice);
  p.pciDomainID = value_of(kPciDomain);
  p.asyncEngineCount = value_of(kAsyncEngines);
  p.deviceOverlap = p.asyncEngineCount > 0;
  p.unifiedAddressing = value_of(kUnifiedAddressing);
  p.managedMemory = value_of(kManaged);
  p.pageableMemoryAccess = value_of(kPageable);
  p.concurrentManagedAccess = value_of(kConcurrentManaged);
  p.cooperativeLaunch = value_of(kCooperative);
  p.singleToDoublePrecisionPerfRatio = value_of(kSingleToDouble);
  *out = p;
  return finish(hipSuccess);
}

ASSAY_API hipError_t hipDeviceGetAttribute(int* value, int attribute, int device) {
  ASSAY_ENTER();
  if (value == nullptr) return finish(hipErrorInvalidValue);
  if (device != 0) return finish(hipErrorInvalidDevice);
  for (const Pair& pair : kPairs)
    if (pair.hip == attribute) return ASSAY_CALL(cuDeviceGetAttribute, value, pair.cuda, driver().device);
  return finish(hipErrorInvalidValue);  // not known here: no invented figures
}

// The newest CUDA that the driver serves: 1000 * major + 10 * minor.
ASSAY_API hipError_t hipDriverGetVersion(int* version) {
  ASSAY_ENTER();
  return version == nullptr ? finish(hipErrorInvalidValue) : ASSAY_CALL(cuDriverGetVersion, version);
}

ASSAY_API hipError_t hipRuntimeGetVersion(int* version) {
  if (version == nullptr) return finish(hipErrorInvalidValue);
  *version = kVersion;
  return finish(hipSuccess);
}
