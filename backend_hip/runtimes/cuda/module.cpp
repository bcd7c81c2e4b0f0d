// Modules, functions and kernel launches.
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "code_object.h"
#include "driver.h"

namespace {
constexpr size_t kUnknown = SIZE_MAX;

using Image = std::vector<uint64_t>;  // aligned as the driver needs it

std::mutex mutex;  // guards both maps
// Never destroyed: Python may unload modules after this library's static destructors would have run. The images
// are kept because the driver may load functions from them later.
std::unordered_map<hipModule_t, Image>& modules() {
  static auto* all = new std::unordered_map<hipModule_t, Image>;
  return *all;
}

struct Entry {
  hipModule_t module;
  std::string name;
  size_t argument_nbytes;  // up to the last argument's end; kUnknown where the driver doesn't say
};
std::unordered_map<hipFunction_t, Entry>& entries() {
  static auto* all = new std::unordered_map<hipFunction_t, Entry>;
  return *all;
}

size_t argument_nbytes(hipFunction_t function) {
  if (driver().cuFuncGetParamInfo == nullptr) return kUnknown;
  size_t total = 0, offset = 0, nbytes = 0;
  for (size_t index = 0; driver().cuFuncGetParamInfo(function, index, &offset, &nbytes) == 0; ++index)
    total = offset + nbytes;
  return total;
}

// HIP's list of keys and values, which ends with 3.
bool read_extra(void** extra, void*& buffer, size_t*& nbytes) {
  for (size_t i = 0;; i += 2) {
    const auto key = reinterpret_cast<uintptr_t>(extra[i]);
    if (key == 3) return buffer != nullptr && nbytes != nullptr;
    if (key == 1) buffer = extra[i + 1];
    else if (key == 2) nbytes = static_cast<size_t*>(extra[i + 1]);
    else return false;
  }
}

// The driver would read past a buffer that is too short.
bool is_right_size(hipFunction_t function, size_t nbytes) {
  const std::lock_guard lock(mutex);
  const auto found = entries().find(function);
  if (found == entries().end() || found->second.argument_nbytes == kUnknown) return true;
  const size_t wanted = found->second.argument_nbytes;
  // A caller that packs a C struct rounds its end up to the struct's alignment.
  if (nbytes == wanted || nbytes == (wanted + 7) / 8 * 8) return true;
  complain("hipModuleLaunchKernel: kernel %s: the argument buffer has %zu bytes, expected %zu",
           found->second.name.c_str(), nbytes, wanted);
  return false;
}
}  // namespace

ASSAY_API hipError_t hipModuleLoadData(hipModule_t* out, const void* image) {
  ASSAY_ENTER();
  if (out == nullptr || image == nullptr) return finish(hipErrorInvalidValue);
  *out = nullptr;
  const CodeContent code = open_code(kCudaCode, image);
  if (code.problem != nullptr) {
    complain("hipModuleLoadData: %s", code.problem);
    return finish(hipErrorInvalidImage);
  }
  Image aligned((code.nbytes + 7) / 8);
  std::memcpy(aligned.data(), code.bytes, code.nbytes);
  const hipError_t error = ASSAY_CALL(cuModuleLoadData, out, aligned.data());
  if (error != hipSuccess) return error;
  const std::lock_guard lock(mutex);
  modules()[*out] = std::move(aligned);
  return finish(hipSuccess);
}

ASSAY_API hipError_t hipModuleUnload(hipModule_t module) {
  ASSAY_ENTER();
  if (module == nullptr) return finish(hipErrorInvalidHandle);
  const hipError_t error = ASSAY_CALL(cuModuleUnload, module);
  if (error != hipSuccess) return error;
  const std::lock_guard lock(mutex);
  modules().erase(module);
  for (auto each = entries().begin(); each != entries().end();)
    each = each->second.module == module ? entries().erase(each) : std::next(each);
  return finish(hipSuccess);
}

ASSAY_API hipError_t hipModuleGetFunction(hipFunction_t* out, hipModule_t module, const char* name) {
  ASSAY_ENTER();
  if (out == nullptr || name == nullptr) return finish(hipErrorInvalidValue);
  *out = nullptr;
  if (module == nullptr) return finish(hipErrorInvalidHandle);
  hipError_t error = ASSAY_CALL(cuModuleGetFunction, out, module, name);
  // Lazy loading would else load at the first launch, inside a capture or a timed span.
  if (error == hipSuccess && driver().cuFuncLoad != nullptr) error = ASSAY_CALL(cuFuncLoad, *out);
  if (error != hipSuccess) return error;
  Entry entry{module, name, argument_nbytes(*out)};
  const std::lock_guard lock(mutex);
  entries()[*out] = std::move(entry);
  return finish(hipSuccess);
}

// HIP numbers these attributes as the driver does.
ASSAY_API hipError_t hipFuncGetAttribute(int* value, int attribute, hipFunction_t function) {
  ASSAY_ENTER();
  if (value == nullptr) return finish(hipErrorInvalidValue);
  if (function == nullptr) return finish(hipErrorInvalidHandle);
  return ASSAY_CALL(cuFuncGetAttribute, value, attribute, function);
}

// Blocks of so many threads that one multiprocessor holds at a time.
ASSAY_API hipError_t hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, hipFunction_t function,
                                                                        int threads, size_t shared_nbytes) {
  ASSAY_ENTER();
  if (blocks == nullptr) return finish(hipErrorInvalidValue);
  if (function == nullptr) return finish(hipErrorInvalidHandle);
  return ASSAY_CALL(cuOccupancyMaxActiveBlocksPerMultiprocessor, blocks, function, threads, shared_nbytes);
}

ASSAY_API hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                           unsigned block_x, unsigned block_y, unsigned block_z,
                                           unsigned shared_nbytes, hipStream_t stream, void** parameters,
                                           void** extra) {
  ASSAY_ENTER();
  if (function == nullptr) return finish(hipErrorInvalidHandle);
  if (grid_x == 0 || grid_y == 0 || grid_z == 0 || block_x == 0 || block_y == 0 || block_z == 0)
    return finish(hipErrorInvalidConfiguration);
  if (parameters != nullptr && extra != nullptr) return finish(hipErrorInvalidValue);
  void* buffer = nullptr;
  size_t* nbytes = nullptr;
  if (extra != nullptr && (!read_extra(extra, buffer, nbytes) || !is_right_size(function, *nbytes)))
    return finish(hipErrorInvalidValue);
  // CUDA numbers the keys as HIP does, but ends the list with 0.
  void* list[] = {reinterpret_cast<void*>(1), buffer, reinterpret_cast<void*>(2), nbytes, nullptr};
  const bool packed = extra != nullptr && *nbytes > 0;
  return ASSAY_CALL(cuLaunchKernel, function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_nbytes, stream,
                    parameters, packed ? list : nullptr);
}
