#include "inflight.h"

#include <cstring>

#include "memory.h"
#include "module.h"

namespace {
uint64_t hash_of(const unsigned char* bytes, size_t nbytes) {
  uint64_t hash = 0x9E3779B97F4A7C15u ^ nbytes;
  for (size_t i = 0; i < nbytes; i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + i, nbytes - i < 8 ? nbytes - i : 8);
    hash = (hash ^ word) * 0xBF58476D1CE4E5B9u;
    hash ^= hash >> 29;
  }
  return hash;
}

bool overlap(const HostRange& range, const void* other, size_t nbytes) {
  const auto* begin = static_cast<const unsigned char*>(other);
  return begin < range.begin + range.nbytes && range.begin < begin + nbytes;
}

bool launch_writes(const LaunchOperation& launch, const HostRange& range) {
  const simt_cpu_kernel& kernel = *launch.function->kernel;
  const auto* arguments = reinterpret_cast<const unsigned char*>(launch.arguments.data());
  for (uint32_t i = 0; i < kernel.parameter_count; ++i) {
    if (kernel.parameters[i].kind != SIMT_CPU_POINTER) continue;
    void* pointer;
    std::memcpy(&pointer, arguments + kernel.parameters[i].offset, sizeof pointer);
    const Range reached = find_range(pointer, true);  // anywhere in the allocation
    if (overlap(range, reinterpret_cast<const void*>(reached.begin), reached.end - reached.begin)) return true;
  }
  return false;
}
}  // namespace

std::vector<HostRange> watch_host(const Operation& operation) {
  std::vector<HostRange> ranges;
  const auto* copy = std::get_if<CopyOperation>(&operation);
  if (copy == nullptr) return ranges;
  const auto watch = [&](const void* memory, bool is_source) {
    const Range range = find_range(memory);
    if (range.place != Place::pinned || copy->nbytes > range.end - reinterpret_cast<uintptr_t>(memory)) return;
    const auto* begin = static_cast<const unsigned char*>(memory);
    ranges.push_back({begin, copy->nbytes, is_source, hash_of(begin, copy->nbytes)});
  };
  watch(copy->src, true);
  watch(copy->dst, false);
  return ranges;
}

bool has_changed(const HostRange& range) { return hash_of(range.begin, range.nbytes) != range.hash; }

void accept_change(HostRange& range) { range.hash = hash_of(range.begin, range.nbytes); }

bool writes_into(const Operation& operation, const HostRange& range) {
  if (const auto* copy = std::get_if<CopyOperation>(&operation)) return overlap(range, copy->dst, copy->nbytes);
  if (const auto* fill = std::get_if<FillOperation>(&operation))
    return overlap(range, fill->dst, fill->count * fill->value_nbytes);
  if (const auto* launch = std::get_if<LaunchOperation>(&operation)) return launch_writes(*launch, range);
  return false;
}
