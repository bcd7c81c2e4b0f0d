#include "places.h"

hipError_t check_fill(const void* dst, size_t nbytes) {
  if (nbytes == 0) return hipSuccess;
  const Range range = find_range(dst);
  if (range.place == Place::host) return hipErrorInvalidValue;
  return nbytes <= range.end - reinterpret_cast<uintptr_t>(dst) ? hipSuccess : hipErrorInvalidValue;
}

hipError_t check_copy(const void* dst, const void* src, size_t nbytes, hipMemcpyKind kind) {
  if (kind < hipMemcpyHostToHost || kind > hipMemcpyDefault) return hipErrorInvalidMemcpyDirection;
  if (nbytes == 0) return hipSuccess;
  if (dst == nullptr || src == nullptr) return hipErrorInvalidValue;
  const bool to_device = kind == hipMemcpyHostToDevice || kind == hipMemcpyDeviceToDevice;
  const bool from_device = kind == hipMemcpyDeviceToHost || kind == hipMemcpyDeviceToDevice;
  const Range to = find_range(dst), from = find_range(src);
  if (kind != hipMemcpyDefault) {
    // A pointer the runtime does not know where a device one belongs is a bad value; a device pointer where a
    // host one belongs is a wrong direction. Pinned memory is both.
    if ((to_device && to.place == Place::host) || (from_device && from.place == Place::host))
      return hipErrorInvalidValue;
    if ((!to_device && to.place == Place::device) || (!from_device && from.place == Place::device))
      return hipErrorInvalidMemcpyDirection;
  }
  const bool fits =
      (to.place == Place::host || nbytes <= to.end - reinterpret_cast<uintptr_t>(dst)) &&
      (from.place == Place::host || nbytes <= from.end - reinterpret_cast<uintptr_t>(src));
  return fits ? hipSuccess : hipErrorInvalidValue;
}
