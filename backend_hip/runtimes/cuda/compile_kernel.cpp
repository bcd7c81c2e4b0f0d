// The kernel compiler of libhiprtc.so: NVRTC, loaded at the first compilation from the path in ASSAY_NVRTC.
#include <dlfcn.h>

#include <cctype>
#include <cstdlib>
#include <string>
#include <vector>

#include "code_object.h"
#include "hiprtc.h"

namespace {
using nvrtcProgram = struct NvrtcProgram*;

// X(name, parameters): the functions used, as nvrtc.h declares them; results are ints numbered like HIP's.
#define ASSAY_NVRTC_FUNCTIONS(X)                                                                           \
  X(nvrtcVersion, (int* major, int* minor))                                                                \
  X(nvrtcCreateProgram, (nvrtcProgram* program, const char* source, const char* name, int header_count,    \
                         const char* const* headers, const char* const* include_names))                    \
  X(nvrtcDestroyProgram, (nvrtcProgram* program))                                                          \
  X(nvrtcCompileProgram, (nvrtcProgram program, int option_count, const char* const* options))             \
  X(nvrtcGetProgramLogSize, (nvrtcProgram program, size_t* nbytes))                                        \
  X(nvrtcGetProgramLog, (nvrtcProgram program, char* log))                                                 \
  X(nvrtcGetCUBINSize, (nvrtcProgram program, size_t* nbytes))                                             \
  X(nvrtcGetCUBIN, (nvrtcProgram program, char* code))

struct Nvrtc {
#define X(name, parameters) int(*name) parameters = nullptr;
  ASSAY_NVRTC_FUNCTIONS(X)
#undef X
  std::string problem;  // empty when every function was found
};

// NVRTC looks for its builtins by name alone, which finds them next to it only where its run path says so. What
// is loaded already is found.
void load_builtins(const Nvrtc& nvrtc) {
  Dl_info info{};
  int major = 0, minor = 0;
  if (dladdr(reinterpret_cast<const void*>(nvrtc.nvrtcVersion), &info) == 0 || nvrtc.nvrtcVersion(&major, &minor) != 0)
    return;
  const std::string path = info.dli_fname;
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return;
  const std::string name = "libnvrtc-builtins.so." + std::to_string(major) + "." + std::to_string(minor);
  dlopen((path.substr(0, slash + 1) + name).c_str(), RTLD_NOW | RTLD_GLOBAL);
}

Nvrtc load() {
  Nvrtc nvrtc;
  const char* path = std::getenv("ASSAY_NVRTC");
  if (path == nullptr || *path == '\0') {
    nvrtc.problem = "ASSAY_NVRTC does not name NVRTC's library";
    return nvrtc;
  }
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    nvrtc.problem = std::string("NVRTC can't be loaded: ") + (why != nullptr ? why : path);
    return nvrtc;
  }
#define X(name, parameters)                                                      \
  nvrtc.name = reinterpret_cast<int(*) parameters>(dlsym(library, #name));        \
  if (nvrtc.name == nullptr) nvrtc.problem = std::string(path) + " has no " #name;
  ASSAY_NVRTC_FUNCTIONS(X)
#undef X
  if (nvrtc.problem.empty()) load_builtins(nvrtc);
  return nvrtc;
}

hiprtcResult translate(int result) {
  return result >= 0 && result <= HIPRTC_ERROR_INTERNAL_ERROR ? static_cast<hiprtcResult>(result)
                                                              : HIPRTC_ERROR_INTERNAL_ERROR;
}

// "cuda sm_90", as the device's properties name it, or "sm_90"; empty: neither.
std::string target_of(std::string architecture) {
  const std::string prefix = "cuda ";
  if (architecture.rfind(prefix, 0) == 0) architecture.erase(0, prefix.size());
  if (architecture.rfind("sm_", 0) != 0 || architecture.size() < 5) return "";
  for (size_t i = 3; i < architecture.size(); ++i)
    if (std::isalnum(static_cast<unsigned char>(architecture[i])) == 0) return "";
  return architecture;
}

// NVRTC's program, which goes with the scope.
class Compilation {
 public:
  Compilation(const Nvrtc& nvrtc, const Program& program) : nvrtc_(nvrtc) {
    created_ = nvrtc.nvrtcCreateProgram(&handle_, program.source.c_str(), program.name.c_str(), 0, nullptr, nullptr);
  }
  ~Compilation() {
    if (created_ == 0) nvrtc_.nvrtcDestroyProgram(&handle_);
  }
  Compilation(const Compilation&) = delete;
  Compilation& operator=(const Compilation&) = delete;
  int created() const { return created_; }
  nvrtcProgram handle() const { return handle_; }

 private:
  const Nvrtc& nvrtc_;
  nvrtcProgram handle_ = nullptr;
  int created_ = 0;
};
}  // namespace

ASSAY_API const char* assay_runtime_cuda() { return "assay cuda runtime"; }

hiprtcResult compile_program(Program& program, const CompileOptions& options) {
  static const Nvrtc nvrtc = load();
  if (!nvrtc.problem.empty()) {
    program.log = "assay: " + nvrtc.problem;
    return HIPRTC_ERROR_INTERNAL_ERROR;
  }
  const std::string target = target_of(options.architecture);
  if (target.empty() && !options.architecture.empty()) {
    program.log = "assay: --offload-arch is \"" + options.architecture + "\", expected \"cuda sm_NN\"";
    return HIPRTC_ERROR_INVALID_OPTION;
  }
  // Rounding is the contract's: nothing contracted, denormals kept, division and root correctly rounded. Line
  // numbers cost nothing at run time and let compute-sanitizer name them.
  std::vector<std::string> arguments{"--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true",
                                     "--generate-line-info"};
  if (!target.empty()) arguments.push_back("--gpu-architecture=" + target);
  if (!options.standard.empty()) arguments.push_back("-" + options.standard);
  arguments.insert(arguments.end(), options.defines.begin(), options.defines.end());
  std::vector<const char*> raw;
  for (const std::string& each : arguments) raw.push_back(each.c_str());

  const Compilation compilation(nvrtc, program);
  if (compilation.created() != 0) return translate(compilation.created());
  const int result = nvrtc.nvrtcCompileProgram(compilation.handle(), static_cast<int>(raw.size()), raw.data());
  size_t nbytes = 0;
  if (nvrtc.nvrtcGetProgramLogSize(compilation.handle(), &nbytes) == 0 && nbytes > 1) {
    program.log.resize(nbytes);
    if (nvrtc.nvrtcGetProgramLog(compilation.handle(), program.log.data()) != 0) program.log.clear();
    program.log.resize(program.log.find_last_not_of('\0') + 1);
  }
  if (result != 0) return translate(result);
  int fetched = nvrtc.nvrtcGetCUBINSize(compilation.handle(), &nbytes);
  std::string code(fetched == 0 ? nbytes : 0, '\0');
  if (fetched == 0 && nbytes > 0) fetched = nvrtc.nvrtcGetCUBIN(compilation.handle(), code.data());
  if (fetched != 0 || code.empty()) {
    program.log += "assay: NVRTC compiled the program but gave no code for \"" + target +
                   "\", expected an --offload-arch\n";
    return HIPRTC_ERROR_INTERNAL_ERROR;
  }
  program.code = frame_code(kCudaCode, code);
  return HIPRTC_SUCCESS;
}
