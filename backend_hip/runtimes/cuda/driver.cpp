#include "driver.h"

#include <dlfcn.h>

#include <string>

const char* const kRuntimeName = "cuda";

namespace {
constexpr const char* kLibrary = "libcuda.so.1";
constexpr CUresult kNotReady = 600;
Driver functions;  // written once, by start()

// Every later call in the process gives the same error, says cuda.h of these.
bool loses_device(CUresult result) {
  switch (result) {
    case 214: case 220: case 226:  // uncorrectable ECC, uncorrectable NVLink, contained error
    case 700: case 702: case 710:  // illegal address, timeout, assert
    case 714: case 715: case 716: case 717: case 718: case 719: case 721:  // what a kernel ended with
      return true;
    default: return false;
  }
}

// HIP numbers its errors as the driver does where it has them.
hipError_t translate(CUresult result) {
  switch (result) {
#define X(name, value, text) case value:
    ASSAY_HIP_ERRORS(X)
#undef X
      return static_cast<hipError_t>(result);
    // Stack error, illegal instruction, misaligned address, address space, program counter.
    case 714: case 715: case 716: case 717: case 718: return hipErrorLaunchFailure;
    default: return hipErrorUnknown;
  }
}

std::string describe(CUresult result) {
  const char *name = nullptr, *text = nullptr;
  if (functions.cuGetErrorName != nullptr) functions.cuGetErrorName(result, &name);
  if (functions.cuGetErrorString != nullptr) functions.cuGetErrorString(result, &text);
  return (name != nullptr ? name : "CUDA error " + std::to_string(result)) +
         (text != nullptr ? std::string(", ") + text : "");
}

hipError_t start() {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    return set_sticky(hipErrorSharedObjectInitFailed, std::string("NVIDIA's driver can't be loaded: ") +
                      (why != nullptr ? why : kLibrary));
  }
  const char* missing = nullptr;
#define X(name, symbol, parameters)                                                        \
  functions.name = reinterpret_cast<CUresult(*) parameters>(dlsym(library, symbol));        \
  if (functions.name == nullptr) missing = symbol;
  ASSAY_DRIVER_FUNCTIONS(X)
#undef X
  if (missing != nullptr)
    return set_sticky(hipErrorSharedObjectInitFailed, std::string(kLibrary) + " has no " + missing +
                      ", expected NVIDIA's driver for CUDA 11.8 or newer");
  functions.cuFuncGetParamInfo =
      reinterpret_cast<decltype(functions.cuFuncGetParamInfo)>(dlsym(library, "cuFuncGetParamInfo"));
  functions.cuFuncLoad = reinterpret_cast<decltype(functions.cuFuncLoad)>(dlsym(library, "cuFuncLoad"));
  if (const hipError_t error = ASSAY_CALL(cuInit, 0); error != hipSuccess) return error;
  if (const hipError_t error = ASSAY_CALL(cuDeviceGet, &functions.device, 0); error != hipSuccess) return error;
  return ASSAY_CALL(cuDevicePrimaryCtxRetain, &functions.context, functions.device);
}
}  // namespace

const Driver& driver() { return functions; }

hipError_t enter() {
  if (const hipError_t lost = sticky_error(); lost != hipSuccess) return lost;
  static const hipError_t started = start();
  if (started != hipSuccess) return started;
  thread_local bool current = false;
  if (!current) {
    if (const hipError_t error = ASSAY_CALL(cuCtxSetCurrent, functions.context); error != hipSuccess) return error;
    current = true;
  }
  return hipSuccess;
}

hipError_t answer(CUresult result, const char* call) {
  if (result == 0) return hipSuccess;
  if (result == kNotReady) return hipErrorNotReady;  // a query's answer, no failed call
  const hipError_t error = translate(result);
  if (loses_device(result)) return finish(set_sticky(error, std::string(call) + ": " + describe(result)));
  if (error == hipErrorUnknown) complain("%s: %s", call, describe(result).c_str());
  return finish(error);
}
