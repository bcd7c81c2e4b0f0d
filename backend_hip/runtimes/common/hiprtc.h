// What both halves of a libhiprtc.so share: the entry points (hiprtc.cpp here) and a runtime's compiler.
#pragma once

#include <string>
#include <vector>

#include "hip_types.h"

enum hiprtcResult : int {
  HIPRTC_SUCCESS = 0,
  HIPRTC_ERROR_OUT_OF_MEMORY = 1,
  HIPRTC_ERROR_PROGRAM_CREATION_FAILURE = 2,
  HIPRTC_ERROR_INVALID_INPUT = 3,
  HIPRTC_ERROR_INVALID_PROGRAM = 4,
  HIPRTC_ERROR_INVALID_OPTION = 5,
  HIPRTC_ERROR_COMPILATION = 6,
  HIPRTC_ERROR_BUILTIN_OPERATION_FAILURE = 7,
  HIPRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION = 8,
  HIPRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION = 9,
  HIPRTC_ERROR_NAME_EXPRESSION_NOT_VALID = 10,
  HIPRTC_ERROR_INTERNAL_ERROR = 11,
};

// The one set of options that every runtime takes, read. Contraction is off and optimisation full in each of
// them, so -ffp-contract=off and -O3 leave nothing to say.
struct CompileOptions {
  std::vector<std::string> defines;  // -DNAME=VALUE, in order
  std::string standard;              // -std=c++17 or -std=c++20; empty: the runtime's own
  std::string architecture;          // of --offload-arch=; empty: none was given
};

struct Program {
  std::string source, name, log;
  std::vector<char> code;
};

// Each runtime has one: fills `code` and `log`, which are empty before.
hiprtcResult compile_program(Program& program, const CompileOptions& options);
