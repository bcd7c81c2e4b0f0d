// Device and pinned memory, copies and fills.
#include <cstdint>

#include "driver.h"
#include "places.h"

namespace {
constexpr int kMemoryType = 2;  // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
constexpr unsigned kHostMemory = 1;
constexpr unsigned kHostFlags = 7;  // portable, mapped, write-combined: HIP's other flags are about its coherence

CUdeviceptr address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

// A synchronous copy or fill may return before the device has done it, and streams created non-blocking don't
// wait for the NULL stream, in which it runs.
hipError_t finish_null_stream(hipError_t error) {
  return error != hipSuccess ? error : ASSAY_CALL(cuStreamSynchronize, nullptr);
}
}  // namespace

Range find_range(const void* pointer) {
  unsigned type = 0;
  // Refused for memory that the driver does not know: not an error of the caller's.
  if (driver().cuPointerGetAttribute(&type, kMemoryType, address(pointer)) != 0) return {};
  CUdeviceptr begin = 0;
  size_t nbytes = 0;
  const Place place = type == kHostMemory ? Place::pinned : Place::device;
  if (driver().cuMemGetAddressRange(&begin, &nbytes, address(pointer)) != 0) return {place, 0, UINTPTR_MAX};
  return {place, begin, begin + nbytes};
}

ASSAY_API hipError_t hipMalloc(void** pointer, size_t nbytes) {
  ASSAY_ENTER();
  if (pointer == nullptr) return finish(hipErrorInvalidValue);
  *pointer = nullptr;
  if (nbytes == 0) return finish(hipSuccess);
  CUdeviceptr allocated = 0;
  CUresult result = driver().cuMemAlloc(&allocated, nbytes);
  if (result == hipErrorInvalidValue) result = hipErrorOutOfMemory;  // only the size can be what is refused
  const hipError_t error = answer(result, "cuMemAlloc");
  *pointer = reinterpret_cast<void*>(allocated);
  return error;
}

ASSAY_API hipError_t hipFree(void* pointer) {
  ASSAY_ENTER();
  return pointer == nullptr ? finish(hipSuccess) : ASSAY_CALL(cuMemFree, address(pointer));
}

ASSAY_API hipError_t hipHostMalloc(void** pointer, size_t nbytes, unsigned flags) {
  ASSAY_ENTER();
  if (pointer == nullptr) return finish(hipErrorInvalidValue);
  *pointer = nullptr;
  return nbytes == 0 ? finish(hipSuccess) : ASSAY_CALL(cuMemHostAlloc, pointer, nbytes, flags & kHostFlags);
}

ASSAY_API hipError_t hipHostFree(void* pointer) {
  ASSAY_ENTER();
  return pointer == nullptr ? finish(hipSuccess) : ASSAY_CALL(cuMemFreeHost, pointer);
}

ASSAY_API hipError_t hipMemGetInfo(size_t* free_nbytes, size_t* total_nbytes) {
  ASSAY_ENTER();
  if (free_nbytes == nullptr || total_nbytes == nullptr) return finish(hipErrorInvalidValue);
  return ASSAY_CALL(cuMemGetInfo, free_nbytes, total_nbytes);
}

ASSAY_API hipError_t hipMemcpy(void* dst, const void* src, size_t nbytes, hipMemcpyKind kind) {
  ASSAY_ENTER();
  if (const hipError_t error = check_copy(dst, src, nbytes, kind); error != hipSuccess) return finish(error);
  if (nbytes == 0) return finish(hipSuccess);
  return finish_null_stream(ASSAY_CALL(cuMemcpy, address(dst), address(src), nbytes));
}

ASSAY_API hipError_t hipMemcpyAsync(void* dst, const void* src, size_t nbytes, hipMemcpyKind kind,
                                    hipStream_t stream) {
  ASSAY_ENTER();
  if (const hipError_t error = check_copy(dst, src, nbytes, kind); error != hipSuccess) return finish(error);
  if (nbytes == 0) return finish(hipSuccess);
  return ASSAY_CALL(cuMemcpyAsync, address(dst), address(src), nbytes, stream);
}

ASSAY_API hipError_t hipMemset(void* dst, int value, size_t nbytes) {
  ASSAY_ENTER();
  if (const hipError_t error = check_fill(dst, nbytes); error != hipSuccess) return finish(error);
  if (nbytes == 0) return finish(hipSuccess);
  return finish_null_stream(ASSAY_CALL(cuMemsetD8, address(dst), static_cast<unsigned char>(value), nbytes));
}

ASSAY_API hipError_t hipMemsetAsync(void* dst, int value, size_t nbytes, hipStream_t stream) {
  ASSAY_ENTER();
  if (const hipError_t error = check_fill(dst, nbytes); error != hipSuccess) return finish(error);
  if (nbytes == 0) return finish(hipSuccess);
  return ASSAY_CALL(cuMemsetD8Async, address(dst), static_cast<unsigned char>(value), nbytes, stream);
}

namespace {
// More words than a size_t can count in bytes fit nowhere.
hipError_t check_words(const void* dst, size_t count) {
  return count > SIZE_MAX / 4 ? hipErrorInvalidValue : check_fill(dst, 4 * count);
}
}  // namespace

ASSAY_API hipError_t hipMemsetD32(void* dst, int value, size_t count) {
  ASSAY_ENTER();
  if (const hipError_t error = check_words(dst, count); error != hipSuccess) return finish(error);
  if (count == 0) return finish(hipSuccess);
  return finish_null_stream(ASSAY_CALL(cuMemsetD32, address(dst), static_cast<unsigned>(value), count));
}

ASSAY_API hipError_t hipMemsetD32Async(void* dst, int value, size_t count, hipStream_t stream) {
  ASSAY_ENTER();
  if (const hipError_t error = check_words(dst, count); error != hipSuccess) return finish(error);
  if (count == 0) return finish(hipSuccess);
  return ASSAY_CALL(cuMemsetD32Async, address(dst), static_cast<unsigned>(value), count, stream);
}
