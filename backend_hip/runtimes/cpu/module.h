// Loaded code objects and their kernels.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "hip_types.h"
#include "simt_cpu_abi.h"

struct Function {
  const simt_cpu_kernel* kernel;
  Module* module;
};

struct Module {
  void* library = nullptr;
  bool unloaded = false;  // by hipModuleUnload, while a graph may still hold the code
  std::map<std::string, std::unique_ptr<Function>> functions;
  ~Module();
};

// The live function for a handle with the module that keeps it mapped; null for anything else.
const Function* find_function(hipFunction_t handle, std::shared_ptr<Module>& module);
