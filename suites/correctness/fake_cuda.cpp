// A driver without a GPU, for tests of the CUDA runtime: a libcuda.so.1 that writes each call as a line into the
// file FAKE_CUDA_LOG and answers what FAKE_CUDA_ERRORS says ("cuMemAlloc_v2=2 cuStreamSynchronize=700", else 0).
// It is NVRTC too, whose options are logged and whose code is four bytes.
// -DWITHOUT_GRAPHS leaves a symbol out, as an old driver does; -DWITHOUT_PARAMETERS those that drivers before
// CUDA 12.4 lack.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

namespace {
std::map<uintptr_t, size_t> device_memory;
uintptr_t next_handle = 0x1000;

void say(const std::string& line) {
  if (const char* path = std::getenv("FAKE_CUDA_LOG")) {
    std::FILE* file = std::fopen(path, "a");
    std::fprintf(file, "%s\n", line.c_str());
    std::fclose(file);
  }
}

int scripted(const char* name) {
  const char* script = std::getenv("FAKE_CUDA_ERRORS");
  const char* found = script == nullptr ? nullptr : std::strstr(script, (std::string(name) + "=").c_str());
  return found == nullptr ? 0 : std::atoi(found + std::strlen(name) + 1);
}

// Logs the call; what it must answer.
int called(const char* name, const std::string& arguments = "") {
  say(std::string(name) + (arguments.empty() ? "" : " " + arguments));
  return scripted(name);
}

template <class Handle>
void make(Handle* out) { *out = reinterpret_cast<Handle>(next_handle++); }

std::string number(uint64_t value) { return std::to_string(value); }

std::string bytes(const void* data, size_t count) {
  std::string text;
  char part[3];
  for (size_t i = 0; i < count; ++i) {
    std::snprintf(part, sizeof part, "%02x", static_cast<const unsigned char*>(data)[i]);
    text += part;
  }
  return text;
}
}  // namespace

#define FAKE(name, parameters, arguments, body)                       \
  extern "C" int name parameters {                                    \
    if (const int error = called(#name, arguments); error != 0) return error; \
    body;                                                             \
    return 0;                                                         \
  }

FAKE(cuInit, (unsigned flags), number(flags), )
FAKE(cuDriverGetVersion, (int* version), "", *version = 13000)
FAKE(cuDeviceGet, (int* device, int ordinal), number(ordinal), *device = 7)
FAKE(cuDeviceGetCount, (int* count), "", *count = std::getenv("FAKE_CUDA_NO_GPU") == nullptr ? 1 : 0)
FAKE(cuDeviceGetName, (char* name, int length, int), "", std::snprintf(name, length, "Fake GPU"))
FAKE(cuDeviceTotalMem_v2, (size_t* nbytes, int), "", *nbytes = size_t{1} << 40)
FAKE(cuDevicePrimaryCtxRetain, (void** context, int device), number(device), make(context))
FAKE(cuCtxSetCurrent, (void*), "", )
FAKE(cuCtxSynchronize, (), "", )
FAKE(cuMemGetInfo_v2, (size_t* free_nbytes, size_t* total), "", *free_nbytes = 5; *total = 9)
FAKE(cuMemHostAlloc, (void** pointer, size_t nbytes, unsigned flags), number(nbytes) + " " + number(flags),
     *pointer = std::malloc(nbytes))
FAKE(cuMemFreeHost, (void* pointer), "", std::free(pointer))
FAKE(cuMemcpy, (uintptr_t dst, uintptr_t src, size_t n), number(n),
     std::memcpy(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), n))
FAKE(cuMemcpyAsync, (uintptr_t dst, uintptr_t src, size_t n, void*), number(n),
     std::memcpy(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), n))
FAKE(cuMemsetD8_v2, (uintptr_t dst, unsigned char value, size_t n), number(value) + " " + number(n),
     std::memset(reinterpret_cast<void*>(dst), value, n))
FAKE(cuMemsetD8Async, (uintptr_t dst, unsigned char value, size_t n, void*), number(value) + " " + number(n),
     std::memset(reinterpret_cast<void*>(dst), value, n))
FAKE(cuMemsetD32_v2, (uintptr_t, unsigned value, size_t n), number(value) + " " + number(n), )
FAKE(cuMemsetD32Async, (uintptr_t, unsigned value, size_t n, void*), number(value) + " " + number(n), )
FAKE(cuStreamCreate, (void** stream, unsigned flags), number(flags), make(stream))
FAKE(cuStreamDestroy_v2, (void*), "", )
FAKE(cuStreamSynchronize, (void* stream), stream == nullptr ? "null" : "", )
FAKE(cuStreamQuery, (void*), "", )
FAKE(cuStreamWaitEvent, (void*, void*, unsigned flags), number(flags), )
FAKE(cuStreamBeginCapture_v2, (void*, int mode), number(mode), )
FAKE(cuStreamEndCapture, (void*, void** graph), "", make(graph))
FAKE(cuStreamIsCapturing, (void*, int* status), "", *status = 2)
FAKE(cuEventCreate, (void** event, unsigned flags), number(flags), make(event))
FAKE(cuEventDestroy_v2, (void*), "", )
FAKE(cuEventRecord, (void*, void*), "", )
FAKE(cuEventQuery, (void*), "", )
FAKE(cuEventSynchronize, (void*), "", )
FAKE(cuEventElapsedTime, (float* elapsed_ms, void*, void*), "", *elapsed_ms = 1.5f)
FAKE(cuGraphInstantiateWithFlags, (void** executable, void*, unsigned long long flags), number(flags), make(executable))
#ifndef WITHOUT_GRAPHS
FAKE(cuGraphLaunch, (void*, void*), "", )
#endif
FAKE(cuGraphDestroy, (void*), "", )
FAKE(cuGraphExecDestroy, (void*), "", )
FAKE(cuModuleLoadData, (void** module, const void* image), bytes(image, 4), make(module))
FAKE(cuModuleUnload, (void*), "", )
FAKE(cuModuleGetFunction, (void** function, void*, const char* name), name, make(function))
FAKE(cuFuncGetAttribute, (int* value, int attribute, void*), number(attribute), *value = 40)
FAKE(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int* blocks, void*, int threads, size_t shared),
     number(threads) + " " + number(shared), *blocks = 6)

// The real NVRTC asks for it and takes no for an answer.
extern "C" int cuGetExportTable(const void**, const void*) { return 500; }

extern "C" int cuDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case 10: *value = 32; break;
    case 75: *value = 9; break;
    case 76: *value = 0; break;
    default: *value = 1000 + attribute;
  }
  return scripted("cuDeviceGetAttribute");
}

extern "C" int cuGetErrorName(int, const char** name) { *name = "CUDA_ERROR_FAKE"; return 0; }
extern "C" int cuGetErrorString(int, const char** text) { *text = "a scripted error"; return 0; }

extern "C" int cuMemAlloc_v2(uintptr_t* pointer, size_t nbytes) {
  if (const int error = called("cuMemAlloc_v2", number(nbytes)); error != 0) return error;
  *pointer = reinterpret_cast<uintptr_t>(std::malloc(nbytes));
  device_memory[*pointer] = nbytes;
  return 0;
}

extern "C" int cuMemFree_v2(uintptr_t pointer) {
  if (const int error = called("cuMemFree_v2"); error != 0) return error;
  if (device_memory.erase(pointer) == 0) return 1;
  std::free(reinterpret_cast<void*>(pointer));
  return 0;
}

extern "C" int cuMemGetAddressRange_v2(uintptr_t* base, size_t* nbytes, uintptr_t pointer) {
  const auto next = device_memory.upper_bound(pointer);
  if (next == device_memory.begin() || pointer >= std::prev(next)->first + std::prev(next)->second) return 500;
  *base = std::prev(next)->first;
  *nbytes = std::prev(next)->second;
  return 0;
}

extern "C" int cuPointerGetAttribute(void* value, int, uintptr_t pointer) {
  uintptr_t base;
  size_t nbytes;
  *static_cast<unsigned*>(value) = 2;  // device memory
  return cuMemGetAddressRange_v2(&base, &nbytes, pointer) == 0 ? 0 : 1;
}

#ifndef WITHOUT_PARAMETERS
FAKE(cuFuncLoad, (void*), "", )

// Three pointers and an int, as the kernel `add` has.
extern "C" int cuFuncGetParamInfo(void*, size_t index, size_t* offset, size_t* nbytes) {
  if (index > 3) return 1;
  *offset = 8 * index;
  *nbytes = index == 3 ? 4 : 8;
  return 0;
}
#endif

extern "C" int cuLaunchKernel(void*, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                              unsigned shared, void*, void** parameters, void** extra) {
  std::string text;
  for (const unsigned each : {gx, gy, gz, bx, by, bz, shared}) text += number(each) + " ";
  text += parameters == nullptr ? "none" : "parameters";
  if (extra != nullptr) {
    const size_t nbytes = *static_cast<size_t*>(extra[3]);
    for (const int place : {0, 2, 4}) text += " " + number(reinterpret_cast<uintptr_t>(extra[place]));
    text += " " + number(nbytes) + " " + bytes(extra[1], nbytes);
  }
  return called("cuLaunchKernel", text);
}

// --- NVRTC ---------------------------------------------------------------------------------------

FAKE(nvrtcVersion, (int* major, int* minor), "",
     *major = std::getenv("FAKE_NVRTC_MAJOR") == nullptr ? 13 : std::atoi(std::getenv("FAKE_NVRTC_MAJOR")); *minor = 0)
FAKE(nvrtcCreateProgram, (void** program, const char*, const char* name, int, const char* const*, const char* const*),
     name, make(program))
FAKE(nvrtcDestroyProgram, (void**), "", )
FAKE(nvrtcGetProgramLogSize, (void*, size_t* nbytes), "", *nbytes = sizeof "a line of log")
FAKE(nvrtcGetProgramLog, (void*, char* log), "", std::strcpy(log, "a line of log"))
FAKE(nvrtcGetCUBINSize, (void*, size_t* nbytes), "", *nbytes = 4)
FAKE(nvrtcGetCUBIN, (void*, char* code), "", std::memcpy(code, "\x7f" "ELF", 4))

extern "C" int nvrtcCompileProgram(void*, int count, const char* const* options) {
  std::string text;
  for (int i = 0; i < count; ++i) text += std::string(i == 0 ? "" : " ") + options[i];
  return called("nvrtcCompileProgram", text);
}
