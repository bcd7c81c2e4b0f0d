// Error state: the last error of each thread, and the sticky error of the process.
#pragma once

#include <string>

#include "hip_types.h"

// Remembers a failed call for hipGetLastError and returns it. Every entry point ends with this.
hipError_t finish(hipError_t error);

// "cpu" or "cuda"; each runtime defines it.
extern const char* const kRuntimeName;

// Writes one line, "assay cpu runtime: ...", to stderr.
void complain(const char* format, ...) __attribute__((format(printf, 1, 2)));

// A kernel or memory fault leaves contents that prove nothing, so every later call fails with the same error,
// as on a GPU. Reports `text` on stderr; hipGetErrorString(error) carries it too. The first one stays.
hipError_t set_sticky(hipError_t error, const std::string& text);
hipError_t sticky_error();
void forget_sticky();

// For entry points: leave at once when the device is lost.
#define ASSAY_CHECK_DEVICE()                                    \
  do {                                                          \
    if (const hipError_t lost = sticky_error(); lost != hipSuccess) return finish(lost); \
  } while (false)
