// libhiprtc.so: the entry points, the same over every compiler.
#include "hiprtc.h"

#include <cstring>
#include <memory>

#include "handles.h"

namespace {
Handles<Program>& programs() {
  static auto* handles = new Handles<Program>;
  return *handles;
}

// False: not an option that every runtime knows.
bool read_option(const std::string& option, CompileOptions& options) {
  const auto starts = [&](const std::string& prefix) { return option.rfind(prefix, 0) == 0; };
  const std::string architecture = "--offload-arch=";
  if (starts("-D") && option.size() > 2) {
    options.defines.push_back(option);
  } else if (starts(architecture)) {
    options.architecture = option.substr(architecture.size());
  } else if (option == "-std=c++17" || option == "-std=c++20") {
    options.standard = option;
  } else {
    return option == "-ffp-contract=off" || option == "-O3";
  }
  return true;
}
}  // namespace

ASSAY_API const char* hiprtcGetErrorString(hiprtcResult result) {
  switch (result) {
    case HIPRTC_SUCCESS: return "HIPRTC_SUCCESS";
    case HIPRTC_ERROR_OUT_OF_MEMORY: return "HIPRTC_ERROR_OUT_OF_MEMORY";
    case HIPRTC_ERROR_PROGRAM_CREATION_FAILURE: return "HIPRTC_ERROR_PROGRAM_CREATION_FAILURE";
    case HIPRTC_ERROR_INVALID_INPUT: return "HIPRTC_ERROR_INVALID_INPUT";
    case HIPRTC_ERROR_INVALID_PROGRAM: return "HIPRTC_ERROR_INVALID_PROGRAM";
    case HIPRTC_ERROR_INVALID_OPTION: return "HIPRTC_ERROR_INVALID_OPTION";
    case HIPRTC_ERROR_COMPILATION: return "HIPRTC_ERROR_COMPILATION";
    case HIPRTC_ERROR_BUILTIN_OPERATION_FAILURE: return "HIPRTC_ERROR_BUILTIN_OPERATION_FAILURE";
    case HIPRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION: return "HIPRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION";
    case HIPRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION: return "HIPRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION";
    case HIPRTC_ERROR_NAME_EXPRESSION_NOT_VALID: return "HIPRTC_ERROR_NAME_EXPRESSION_NOT_VALID";
    case HIPRTC_ERROR_INTERNAL_ERROR: return "HIPRTC_ERROR_INTERNAL_ERROR";
  }
  return "Invalid HIPRTC error code";
}

ASSAY_API hiprtcResult hiprtcVersion(int* major, int* minor) {
  if (major == nullptr || minor == nullptr) return HIPRTC_ERROR_INVALID_INPUT;
  *major = 9;
  *minor = 0;
  return HIPRTC_SUCCESS;
}

ASSAY_API hiprtcResult hiprtcCreateProgram(Program** out, const char* source, const char* name, int header_count,
                                           const char* const*, const char* const*) {
  if (out == nullptr || source == nullptr || header_count != 0) return HIPRTC_ERROR_INVALID_INPUT;
  auto program = std::make_shared<Program>();
  program->source = source;
  program->name = name != nullptr && *name != '\0' ? name : "kernel";
  for (char& each : program->name)
    if (each == '"' || each == '\\' || each == '\n') each = '_';  // it goes into a #line directive
  *out = programs().add(std::move(program));
  return HIPRTC_SUCCESS;
}

ASSAY_API hiprtcResult hiprtcDestroyProgram(Program** handle) {
  if (handle == nullptr) return HIPRTC_ERROR_INVALID_INPUT;
  if (programs().remove(*handle) == nullptr) return HIPRTC_ERROR_INVALID_PROGRAM;
  *handle = nullptr;
  return HIPRTC_SUCCESS;
}

ASSAY_API hiprtcResult hiprtcCompileProgram(Program* handle, int option_count, const char* const* options) {
  const auto program = programs().get(handle);
  if (program == nullptr) return HIPRTC_ERROR_INVALID_PROGRAM;
  if (option_count < 0 || (option_count > 0 && options == nullptr)) return HIPRTC_ERROR_INVALID_INPUT;
  program->code.clear();
  program->log.clear();
  CompileOptions read;
  for (int i = 0; i < option_count; ++i)
    if (options[i] == nullptr || !read_option(options[i], read)) {
      program->log = "assay: unknown option " + std::string(options[i] == nullptr ? "(null)" : options[i]) +
                     "; known: -DNAME=VALUE -std=c++17 -std=c++20 -O3 -ffp-contract=off --offload-arch=ARCH";
      return HIPRTC_ERROR_INVALID_OPTION;
    }
  return compile_program(*program, read);
}

// A log's size counts the terminating zero, as NVRTC's does.
ASSAY_API hiprtcResult hiprtcGetProgramLogSize(Program* handle, size_t* nbytes) {
  const auto program = programs().get(handle);
  if (program == nullptr || nbytes == nullptr) return HIPRTC_ERROR_INVALID_INPUT;
  *nbytes = program->log.size() + 1;
  return HIPRTC_SUCCESS;
}

ASSAY_API hiprtcResult hiprtcGetProgramLog(Program* handle, char* log) {
  const auto program = programs().get(handle);
  if (program == nullptr || log == nullptr) return HIPRTC_ERROR_INVALID_INPUT;
  std::memcpy(log, program->log.c_str(), program->log.size() + 1);
  return HIPRTC_SUCCESS;
}

ASSAY_API hiprtcResult hiprtcGetCodeSize(Program* handle, size_t* nbytes) {
  const auto program = programs().get(handle);
  if (program == nullptr || nbytes == nullptr) return HIPRTC_ERROR_INVALID_INPUT;
  if (program->code.empty()) return HIPRTC_ERROR_INVALID_PROGRAM;  // not compiled
  *nbytes = program->code.size();
  return HIPRTC_SUCCESS;
}

ASSAY_API hiprtcResult hiprtcGetCode(Program* handle, char* code) {
  const auto program = programs().get(handle);
  if (program == nullptr || code == nullptr) return HIPRTC_ERROR_INVALID_INPUT;
  if (program->code.empty()) return HIPRTC_ERROR_INVALID_PROGRAM;
  std::memcpy(code, program->code.data(), program->code.size());
  return HIPRTC_SUCCESS;
}
