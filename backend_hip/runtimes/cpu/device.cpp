// The one emulated device: identity, properties, versions.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "capture.h"
#include "error.h"
#include "fiber.h"
#include "memory.h"

const char* const kRuntimeName = "cpu";

ASSAY_API const char* assay_runtime_cpu() { return "assay cpu runtime"; }

namespace {
constexpr int kVersion = 70000000;  // HIP_VERSION_MAJOR * 10^7: the interface that is followed
constexpr int kWave = 32;
constexpr int kMaxGrid = 2147483647;

int processors() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }
}  // namespace

ASSAY_API hipError_t hipInit(unsigned flags) {
  return finish(flags == 0 ? hipSuccess : hipErrorInvalidValue);
}

ASSAY_API hipError_t hipGetDeviceCount(int* count) {
  if (count == nullptr) return finish(hipErrorInvalidValue);
  *count = 1;
  return finish(hipSuccess);
}

ASSAY_API hipError_t hipGetDevice(int* device) {
  if (device == nullptr) return finish(hipErrorInvalidValue);
  *device = 0;
  return finish(hipSuccess);
}

ASSAY_API hipError_t hipSetDevice(int device) {
  return finish(device == 0 ? hipSuccess : hipErrorInvalidDevice);
}

ASSAY_API hipError_t hipDeviceGet(int* device, int ordinal) {
  if (device == nullptr) return finish(hipErrorInvalidValue);
  if (ordinal != 0) return finish(hipErrorInvalidDevice);
  *device = 0;
  return finish(hipSuccess);
}

ASSAY_API hipError_t hipDeviceGetName(char* name, int length, int device) {
  if (name == nullptr || length <= 0) return finish(hipErrorInvalidValue);
  if (device != 0) return finish(hipErrorInvalidDevice);
  std::strncpy(name, "Assay CPU", static_cast<size_t>(length) - 1);
  name[length - 1] = '\0';
  return finish(hipSuccess);
}

ASSAY_API hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_tR0600* out, int device) {
  if (out == nullptr) return finish(hipErrorInvalidValue);
  if (device != 0) return finish(hipErrorInvalidDevice);
  hipDeviceProp_tR0600 p{};
  std::strcpy(p.name, "Assay CPU");
  std::strcpy(p.gcnArchName, "emulated");
  p.totalGlobalMem = memory_total();
  p.sharedMemPerBlock = p.sharedMemPerMultiprocessor = p.maxSharedMemoryPerMultiProcessor = kSharedNbytes;
  p.sharedMemPerBlockOptin = kSharedNbytes;
  p.regsPerBlock = p.regsPerMultiprocessor = 65536;
  p.warpSize = kWave;
  p.maxThreadsPerBlock = p.maxThreadsPerMultiProcessor = static_cast<int>(SIMT_CPU_THREADS);
  p.maxThreadsDim[0] = static_cast<int>(SIMT_CPU_THREADS);
  p.maxThreadsDim[1] = p.maxThreadsDim[2] = 1;  // blocks are 1-D
  for (int& size : p.maxGridSize) size = kMaxGrid;
  p.clockRate = p.memoryClockRate = p.clockInstructionRate = 1000000;  // kHz; nominal
  p.memoryBusWidth = 64;
  p.l2CacheSize = 1 << 20;
  p.multiProcessorCount = processors();
  p.maxBlocksPerMultiProcessor = 1;
  p.integrated = p.canMapHostMemory = p.unifiedAddressing = 1;
  p.memPitch = static_cast<size_t>(kMaxGrid);
  *out = p;
  return finish(hipSuccess);
}

ASSAY_API hipError_t hipDeviceGetAttribute(int* value, int attribute, int device) {
  if (value == nullptr) return finish(hipErrorInvalidValue);
  if (device != 0) return finish(hipErrorInvalidDevice);
  switch (attribute) {
    case 5:      // ClockRate
    case 60:     // MemoryClockRate
    case 10000:  // ClockInstructionRate
      *value = 1000000;
      break;
    case 3:   // CanMapHostMemory
    case 16:  // Integrated
    case 85:  // UnifiedAddressing
      *value = 1;
      break;
    case 19: *value = 1 << 20; break;            // L2CacheSize
    case 23: case 61: *value = 0; break;         // ComputeCapabilityMajor, Minor
    case 26: case 56: case 57:                   // MaxBlockDimX, MaxThreadsPerBlock, PerMultiProcessor
      *value = static_cast<int>(SIMT_CPU_THREADS);
      break;
    case 27: case 28: *value = 1; break;         // MaxBlockDimY, Z
    case 29: case 30: case 31: *value = kMaxGrid; break;
    case 59: *value = 64; break;                 // MemoryBusWidth
    case 63: case 10015: *value = processors(); break;
    case 71: case 72: *value = 65536; break;     // registers
    case 74: case 75: case 76: case 10002: *value = kSharedNbytes; break;
    case 87: *value = kWave; break;
    default: return finish(hipErrorInvalidValue);  // not known here: no invented figures
  }
  return finish(hipSuccess);
}

ASSAY_API hipError_t hipDriverGetVersion(int* version) {
  if (version == nullptr) return finish(hipErrorInvalidValue);
  *version = kVersion;
  return finish(hipSuccess);
}

ASSAY_API hipError_t hipRuntimeGetVersion(int* version) { return hipDriverGetVersion(version); }
