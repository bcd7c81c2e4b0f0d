#include "module.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "capture.h"
#include "code_object.h"
#include "error.h"
#include "fiber.h"
#include "handles.h"

namespace {
Handles<Module>& modules() {
  static auto* handles = new Handles<Module>;
  return *handles;
}

std::mutex function_mutex;
std::map<const Function*, Module*>& functions() {
  static auto* all = new std::map<const Function*, Module*>;
  return *all;
}

bool write_all(int descriptor, const unsigned char* bytes, uint64_t nbytes) {
  while (nbytes > 0) {
    const ssize_t written = write(descriptor, bytes, nbytes);
    if (written <= 0) return false;
    bytes += written;
    nbytes -= static_cast<uint64_t>(written);
  }
  return true;
}

// The name must be new for every load: the loader answers a name that it knows with the library it has.
void* open_library(const unsigned char* bytes, uint64_t nbytes, std::string& problem) {
  static std::atomic<unsigned> count{0};
  const char* folder = std::getenv("TMPDIR");
  std::string path = std::string(folder != nullptr && *folder != '\0' ? folder : "/tmp") + "/assay-" +
                     std::to_string(getpid()) + "-" + std::to_string(count++) + "-XXXXXX";
  const int descriptor = mkstemp(path.data());
  if (descriptor < 0) {
    problem = "cannot write " + path + ": " + std::strerror(errno);
    return nullptr;
  }
  void* library = nullptr;
  const bool written = write_all(descriptor, bytes, nbytes);
  if (close(descriptor) != 0 || !written) {
    problem = "cannot write " + path + ": " + std::strerror(errno);
  } else {
    library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) problem = dlerror();
  }
  unlink(path.c_str());
  return library;
}
}  // namespace

Module::~Module() {
  if (library != nullptr) dlclose(library);
}

const Function* find_function(hipFunction_t handle, std::shared_ptr<Module>& module) {
  Module* owner = nullptr;
  {
    const std::lock_guard lock(function_mutex);
    const auto found = functions().find(handle);
    if (found == functions().end()) return nullptr;
    owner = found->second;
  }
  module = modules().get(owner);
  return module != nullptr ? handle : nullptr;
}

ASSAY_API hipError_t hipModuleLoadData(hipModule_t* out, const void* image) {
  ASSAY_CHECK_DEVICE();
  ASSAY_FORBID_IN_CAPTURE();
  if (out == nullptr || image == nullptr) return finish(hipErrorInvalidValue);
  *out = nullptr;
  const CodeContent code = open_code(kCpuCode, image);
  if (code.problem != nullptr) {
    complain("hipModuleLoadData: %s", code.problem);
    return finish(hipErrorInvalidImage);
  }
  auto module = std::make_shared<Module>();
  std::string problem;
  module->library = open_library(code.bytes, code.nbytes, problem);
  if (module->library == nullptr) {
    complain("hipModuleLoadData: %s", problem.c_str());
    return finish(hipErrorSharedObjectInitFailed);
  }
  using Init = uint32_t (*)(const simt_cpu_services*);
  const auto init = reinterpret_cast<Init>(dlsym(module->library, SIMT_CPU_INIT));
  if (init == nullptr || init(&fiber_services()) != SIMT_CPU_ABI) {
    complain("hipModuleLoadData: the code object was compiled with another version of simt.h");
    return finish(hipErrorInvalidImage);
  }
  *out = modules().add(std::move(module));
  return finish(hipSuccess);
}

ASSAY_API hipError_t hipModuleUnload(hipModule_t handle) {
  ASSAY_FORBID_IN_CAPTURE();
  const std::shared_ptr<Module> module = modules().remove(handle);
  if (module == nullptr) return finish(hipErrorInvalidHandle);
  const std::lock_guard lock(function_mutex);
  for (const auto& [name, function] : module->functions) functions().erase(function.get());
  module->unloaded = true;
  return finish(hipSuccess);
}

ASSAY_API hipError_t hipModuleGetFunction(hipFunction_t* out, hipModule_t handle, const char* name) {
  ASSAY_CHECK_DEVICE();
  if (out == nullptr || name == nullptr) return finish(hipErrorInvalidValue);
  *out = nullptr;
  const std::shared_ptr<Module> module = modules().get(handle);
  if (module == nullptr) return finish(hipErrorInvalidHandle);
  const auto* kernel = static_cast<const simt_cpu_kernel*>(
      dlsym(module->library, (std::string(SIMT_CPU_KERNEL_PREFIX) + name).c_str()));
  if (kernel == nullptr) return finish(hipErrorNotFound);
  const std::lock_guard lock(function_mutex);
  auto& function = module->functions[name];
  if (function == nullptr) {
    function = std::make_unique<Function>();
    function->kernel = kernel;
    function->module = module.get();
    functions().emplace(function.get(), module.get());
  }
  *out = function.get();
  return finish(hipSuccess);
}

ASSAY_API hipError_t hipFuncGetAttribute(int* value, int attribute, hipFunction_t handle) {
  ASSAY_CHECK_DEVICE();
  if (value == nullptr) return finish(hipErrorInvalidValue);
  std::shared_ptr<Module> module;
  const Function* function = find_function(handle, module);
  if (function == nullptr) return finish(hipErrorInvalidHandle);
  // Registers, LDS and scratch of a GPU don't exist here: 0.
  *value = attribute == 0 ? static_cast<int>(function->kernel->block) : 0;
  return finish(attribute >= 0 && attribute < 16 ? hipSuccess : hipErrorInvalidValue);
}

// There is no multiprocessor whose registers a block takes: 0.
ASSAY_API hipError_t hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, hipFunction_t handle, int threads,
                                                                        size_t) {
  ASSAY_CHECK_DEVICE();
  if (blocks == nullptr || threads <= 0) return finish(hipErrorInvalidValue);
  std::shared_ptr<Module> module;
  if (find_function(handle, module) == nullptr) return finish(hipErrorInvalidHandle);
  *blocks = 0;
  return finish(hipSuccess);
}
