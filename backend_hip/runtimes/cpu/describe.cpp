#include "describe.h"

#include "launch.h"
#include "memory.h"
#include "module.h"

namespace {
const char* direction(const CopyOperation& copy) {
  const bool to_device = find_range(copy.dst).place == Place::device;
  const bool from_device = find_range(copy.src).place == Place::device;
  if (to_device && from_device) return "on the device";
  if (copy.kind == hipMemcpyHostToDevice || to_device) return "to the device";
  return copy.kind == hipMemcpyDeviceToHost || from_device ? "from the device" : "on the host";
}
}  // namespace

std::string describe(const Operation& operation, uint64_t id) {
  if (const auto* launch = std::get_if<LaunchOperation>(&operation))
    return std::string("kernel ") + launch->function->kernel->name + " (launch " + std::to_string(launch->number) + ")";
  const std::string number = " (operation " + std::to_string(id) + ")";
  if (const auto* copy = std::get_if<CopyOperation>(&operation))
    return "a copy of " + std::to_string(copy->nbytes) + " bytes " + direction(*copy) + number;
  if (const auto* fill = std::get_if<FillOperation>(&operation))
    return "a fill of " + std::to_string(fill->count * fill->value_nbytes) + " bytes" + number;
  return (std::holds_alternative<RecordOperation>(operation) ? "an event's record" : "a wait for an event") + number;
}

std::string explain(const Operation& operation) {
  if (const auto* launch = std::get_if<LaunchOperation>(&operation)) return check_launch(*launch).message;
  return "its memory was freed, or is smaller than when it was queued";
}

std::string describe_change(const HostRange& range) {
  char text[160];
  std::snprintf(text, sizeof text, "host memory was written while a copy %s it was queued: %zu bytes at %p",
                range.is_source ? "from" : "to", range.nbytes, static_cast<const void*>(range.begin));
  return text;
}
