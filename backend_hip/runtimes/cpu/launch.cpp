#include "launch.h"

#include <cstdio>
#include <cstring>

#include "checking.h"
#include "error.h"
#include "fiber.h"
#include "memory.h"
#include "module.h"
#include "repeat.h"
#include "workers.h"

namespace {
constexpr uint64_t kMaxGrid = 2147483647;  // per dimension, and blocks in all

// Pointers were accepted as numbers; on a GPU a host address faults, here it would silently work.
std::string find_bad_pointer(const LaunchOperation& launch) {
  const simt_cpu_kernel& kernel = *launch.function->kernel;
  const auto* arguments = reinterpret_cast<const unsigned char*>(launch.arguments.data());
  for (uint32_t i = 0; i < kernel.parameter_count; ++i) {
    if (kernel.parameters[i].kind == SIMT_CPU_SCALAR) continue;
    void* pointer;
    std::memcpy(&pointer, arguments + kernel.parameters[i].offset, sizeof pointer);
    if (pointer == nullptr || find_range(pointer, true).place != Place::host) continue;
    char text[200];
    std::snprintf(text, sizeof text, "argument %u is %p, expected null or a pointer into a live device or pinned "
                  "allocation", i, pointer);
    return text;
  }
  return "";
}

hipError_t pack_extra(const simt_cpu_kernel& kernel, void** extra, std::vector<uint64_t>& packed) {
  const void* buffer = nullptr;
  const size_t* nbytes = nullptr;
  for (size_t i = 0;; i += 2) {
    const auto key = reinterpret_cast<uintptr_t>(extra[i]);
    if (key == 3) break;  // HIP_LAUNCH_PARAM_END
    if (key == 1) buffer = extra[i + 1];
    else if (key == 2) nbytes = static_cast<const size_t*>(extra[i + 1]);
    else return hipErrorInvalidValue;
  }
  if (buffer == nullptr || nbytes == nullptr) return hipErrorInvalidValue;
  // A caller that packs a C struct rounds its end up to the struct's alignment.
  const size_t padded = (kernel.argument_nbytes + size_t{7}) / 8 * 8;
  if (*nbytes != kernel.argument_nbytes && *nbytes != padded) {
    complain("hipModuleLaunchKernel: kernel %s: the argument buffer has %zu bytes, expected %u for %u arguments",
             kernel.name, *nbytes, kernel.argument_nbytes, kernel.parameter_count);
    return hipErrorInvalidValue;
  }
  std::memcpy(packed.data(), buffer, kernel.argument_nbytes);
  return hipSuccess;
}
}  // namespace

Failure check_launch(const LaunchOperation& launch) {
  if (launch.module->unloaded) return {hipErrorInvalidDeviceFunction, "its module was unloaded"};
  std::string problem = find_bad_pointer(launch);
  return {problem.empty() ? hipSuccess : hipErrorInvalidDevicePointer, std::move(problem)};
}

hipError_t refuse_bad_launch(const LaunchOperation& launch) {
  const Failure failure = check_launch(launch);
  if (failure.error != hipSuccess)
    complain("kernel %s (launch %llu): %s", launch.function->kernel->name,
             static_cast<unsigned long long>(launch.number), failure.message.c_str());
  return failure.error;
}

hipError_t run_launch(const LaunchOperation& launch) {
  if (const hipError_t error = refuse_bad_launch(launch); error != hipSuccess) return error;
  const GridLaunch grid{launch.function, reinterpret_cast<const unsigned char*>(launch.arguments.data()), launch.grid,
                        launch.number};
  const Failure failure = checking.shuffle ? run_repeatedly(grid, checking.seed) : run_grid(grid);
  return failure.error == hipSuccess ? hipSuccess : set_sticky(failure.error, failure.message);
}

ASSAY_API hipError_t hipModuleLaunchKernel(hipFunction_t handle, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                           unsigned block_x, unsigned block_y, unsigned block_z,
                                           unsigned shared_nbytes, hipStream_t stream_handle, void** parameters,
                                           void** extra) {
  ASSAY_CHECK_DEVICE();
  std::shared_ptr<Module> module;
  const Function* function = find_function(handle, module);
  const std::shared_ptr<Stream> stream = find_stream(stream_handle);
  if (function == nullptr || stream == nullptr) return finish(hipErrorInvalidHandle);
  const simt_cpu_kernel& kernel = *function->kernel;
  const uint64_t blocks = uint64_t{grid_x} * grid_y;
  if (blocks == 0 || grid_z == 0 || blocks > kMaxGrid || blocks * grid_z > kMaxGrid)
    return finish(hipErrorInvalidConfiguration);
  if (block_x != kernel.block || block_y != 1 || block_z != 1) {
    complain("hipModuleLaunchKernel: kernel %s: the block is (%u, %u, %u), expected (%u, 1, 1) because it was "
             "compiled with SIMT_BLOCK=%u", kernel.name, block_x, block_y, block_z, kernel.block, kernel.block);
    return finish(hipErrorInvalidConfiguration);
  }
  if (shared_nbytes != 0) {
    complain("hipModuleLaunchKernel: kernel %s: dynamic shared memory is %u bytes, expected 0 because kernels declare "
             "theirs with SIMT_SHARED", kernel.name, shared_nbytes);
    return finish(hipErrorInvalidValue);
  }
  LaunchOperation launch{std::move(module), function, {grid_x, grid_y, grid_z}, {}, 0};
  launch.arguments.resize((kernel.argument_nbytes + 7) / 8);
  if (parameters != nullptr && extra != nullptr) return finish(hipErrorInvalidValue);
  if (extra != nullptr) {
    if (const hipError_t error = pack_extra(kernel, extra, launch.arguments); error != hipSuccess)
      return finish(error);
  } else if (kernel.parameter_count != 0) {
    if (parameters == nullptr) return finish(hipErrorInvalidValue);
    auto* packed = reinterpret_cast<unsigned char*>(launch.arguments.data());
    for (uint32_t i = 0; i < kernel.parameter_count; ++i) {
      if (parameters[i] == nullptr) return finish(hipErrorInvalidValue);
      std::memcpy(packed + kernel.parameters[i].offset, parameters[i], kernel.parameters[i].nbytes);
    }
  }
  return finish(submit(stream, std::move(launch)));
}
