#include "error.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <mutex>

namespace {
thread_local hipError_t last_error = hipSuccess;
std::atomic<hipError_t> sticky{hipSuccess};
std::mutex sticky_mutex;
char sticky_text[1024];  // written before `sticky` is

const char* text_of(hipError_t error) {
  switch (error) {
#define X(name, value, text) \
  case name:                 \
    return text;
    ASSAY_HIP_ERRORS(X)
#undef X
  }
  return "unknown error code";
}

const char* name_of(hipError_t error) {
  switch (error) {
#define X(name, value, text) \
  case name:                 \
    return #name;
    ASSAY_HIP_ERRORS(X)
#undef X
  }
  return "hipErrorUnknown";
}
}  // namespace

hipError_t finish(hipError_t error) {
  if (error != hipSuccess) last_error = error;
  return error;
}

void complain(const char* format, ...) {
  char line[1200];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "assay %s runtime: %s\n", kRuntimeName, line);
  std::fflush(stderr);
}

hipError_t set_sticky(hipError_t error, const std::string& text) {
  complain("%s", text.c_str());
  const std::lock_guard lock(sticky_mutex);
  if (sticky.load() == hipSuccess) {
    std::snprintf(sticky_text, sizeof sticky_text, "%s: %s", text_of(error), text.c_str());
    sticky.store(error, std::memory_order_release);
  }
  return sticky.load();
}

hipError_t sticky_error() { return sticky.load(std::memory_order_acquire); }

void forget_sticky() {
  const std::lock_guard lock(sticky_mutex);
  sticky.store(hipSuccess, std::memory_order_release);
  last_error = hipSuccess;
}

ASSAY_API hipError_t hipGetLastError() {
  if (const hipError_t error = sticky_error(); error != hipSuccess) return error;
  const hipError_t error = last_error;
  last_error = hipSuccess;
  return error;
}

ASSAY_API hipError_t hipPeekAtLastError() {
  const hipError_t error = sticky_error();
  return error != hipSuccess ? error : last_error;
}

ASSAY_API const char* hipGetErrorName(hipError_t error) { return name_of(error); }

ASSAY_API const char* hipGetErrorString(hipError_t error) {
  return error != hipSuccess && error == sticky_error() ? sticky_text : text_of(error);
}
