#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "capture.h"
#include "error.h"
#include "queue.h"

namespace {
constexpr size_t kAlignment = 16;         // what the end of an allocation is rounded to
constexpr unsigned char kPoison = 0xFF;   // float NaN, id -1
constexpr unsigned char kSlack = 0xA5;    // differs from the poison, so that an overrun with poison shows
constexpr size_t kKeepNbytes = 64u << 20; // freed mappings kept for reuse

// One mapping: guard page, body, guard page. The allocation sits at the end of the body.
struct Allocation {
  unsigned char* body;
  size_t body_nbytes, nbytes;
  Place place;
  unsigned char* begin() const {
    return body + body_nbytes - (nbytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  unsigned char* body_end() const { return body + body_nbytes; }
};

std::shared_mutex mutex;
std::map<uintptr_t, Allocation> allocations;                        // by begin
std::unordered_map<size_t, std::vector<unsigned char*>> kept;       // body size -> bodies, inaccessible
size_t kept_nbytes = 0, used_nbytes = 0;

size_t page_nbytes() {
  static const size_t nbytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return nbytes;
}

void unmap(unsigned char* body, size_t body_nbytes) {
  munmap(body - page_nbytes(), body_nbytes + 2 * page_nbytes());
}

// What the kernel could hand out without swapping or killing. SIZE_MAX when it does not say.
size_t available_nbytes() {
  size_t kibibytes = 0;
  bool found = false;
  if (std::FILE* file = std::fopen("/proc/meminfo", "r")) {
    char line[128];
    while (!found && std::fgets(line, sizeof line, file) != nullptr)
      found = std::sscanf(line, "MemAvailable: %zu kB", &kibibytes) == 1;
    std::fclose(file);
  }
  return found ? kibibytes * 1024 : SIZE_MAX;
}

unsigned char* map_body(size_t body_nbytes) {  // `mutex` held
  auto found = kept.find(body_nbytes);
  if (found != kept.end() && !found->second.empty()) {
    unsigned char* body = found->second.back();
    if (mprotect(body, body_nbytes, PROT_READ | PROT_WRITE) != 0) return nullptr;
    found->second.pop_back();
    kept_nbytes -= body_nbytes;
    return body;
  }
  const size_t guard = page_nbytes();
  void* map = mmap(nullptr, body_nbytes + 2 * guard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) return nullptr;
  unsigned char* body = static_cast<unsigned char*>(map) + guard;
  if (mprotect(body, body_nbytes, PROT_READ | PROT_WRITE) == 0) return body;
  unmap(body, body_nbytes);
  return nullptr;
}

hipError_t allocate(void** out, size_t nbytes, Place place) {
  if (out == nullptr) return hipErrorInvalidValue;
  *out = nullptr;
  if (nbytes == 0) return hipSuccess;
  const size_t page = page_nbytes();
  if (nbytes > memory_total()) return hipErrorOutOfMemory;
  const size_t body_nbytes = (nbytes + page - 1) / page * page;
  // The poison touches every page at once; a large request must fail here and not in the OOM killer.
  if (body_nbytes > kKeepNbytes && body_nbytes > available_nbytes()) return hipErrorOutOfMemory;
  Allocation allocation{nullptr, body_nbytes, nbytes, place};
  {
    const std::unique_lock lock(mutex);
    if (used_nbytes + body_nbytes > memory_total()) return hipErrorOutOfMemory;
    allocation.body = map_body(body_nbytes);
    if (allocation.body == nullptr) return hipErrorOutOfMemory;
    used_nbytes += body_nbytes;
  }
  unsigned char* begin = allocation.begin();
  std::memset(allocation.body, kSlack, static_cast<size_t>(begin - allocation.body));
  std::memset(begin, kPoison, nbytes);
  std::memset(begin + nbytes, kSlack, static_cast<size_t>(allocation.body_end() - begin) - nbytes);
  const std::unique_lock lock(mutex);
  allocations.emplace(reinterpret_cast<uintptr_t>(begin), allocation);
  *out = begin;
  return hipSuccess;
}

// Bytes of slack that were overwritten.
size_t damage(const unsigned char* from, const unsigned char* to) {
  return static_cast<size_t>(to - from) - static_cast<size_t>(std::count(from, to, kSlack));
}

hipError_t release(void* pointer, Place place) {
  if (pointer == nullptr) return hipSuccess;
  // Freeing waits for the whole device, as HIP documents.
  if (const hipError_t lost = complete_all(); lost != hipSuccess) return lost;
  Allocation a{};
  {
    const std::unique_lock lock(mutex);
    const auto found = allocations.find(reinterpret_cast<uintptr_t>(pointer));
    if (found == allocations.end() || found->second.place != place) return hipErrorInvalidValue;
    a = found->second;
    allocations.erase(found);
  }
  const unsigned char* begin = a.begin();
  hipError_t error = hipSuccess;
  const size_t before = damage(a.body, begin), after = damage(begin + a.nbytes, a.body_end());
  if (before + after != 0) {
    char text[200];
    std::snprintf(text, sizeof text, "hipFree: %zu bytes before and %zu bytes past the end of the allocation %p of %zu "
                  "bytes were overwritten", before, after, pointer, a.nbytes);
    error = set_sticky(hipErrorIllegalAddress, text);
  }
  const std::unique_lock lock(mutex);
  used_nbytes -= a.body_nbytes;
  // Kept inaccessible: a use after free faults until the mapping is handed out again.
  if (kept_nbytes + a.body_nbytes <= kKeepNbytes && mprotect(a.body, a.body_nbytes, PROT_NONE) == 0) {
    kept[a.body_nbytes].push_back(a.body);
    kept_nbytes += a.body_nbytes;
  } else {
    unmap(a.body, a.body_nbytes);
  }
  return error;
}
}  // namespace

size_t memory_total() {
  static const size_t nbytes = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page_nbytes();
  return nbytes;
}

Range find_range(const void* pointer, bool allow_end) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const std::shared_lock lock(mutex);
  auto next = allocations.upper_bound(address);
  if (next == allocations.begin()) return {};
  const auto& [begin, allocation] = *std::prev(next);
  const uintptr_t end = begin + allocation.nbytes;
  if (address < end || (allow_end && address == end)) return {allocation.place, begin, end};
  return {};
}

std::string describe_address(uintptr_t address) {
  const std::shared_lock lock(mutex);
  auto next = allocations.upper_bound(address);
  char text[160] = "";
  const size_t reach = 2 * page_nbytes();
  if (next != allocations.begin()) {
    const auto& [begin, a] = *std::prev(next);
    if (address >= begin + a.nbytes && address - begin - a.nbytes < reach) {
      std::snprintf(text, sizeof text, "%zu bytes past the end of the allocation 0x%zx of %zu bytes",
                    address - begin - a.nbytes, begin, a.nbytes);
      return text;
    }
  }
  if (next != allocations.end() && next->first - address < reach)
    std::snprintf(text, sizeof text, "%zu bytes before the allocation 0x%zx of %zu bytes",
                  next->first - address, next->first, next->second.nbytes);
  return text;
}

Range find_range(const void* pointer) { return find_range(pointer, false); }

ASSAY_API hipError_t hipMalloc(void** pointer, size_t nbytes) {
  ASSAY_CHECK_DEVICE();
  ASSAY_FORBID_IN_CAPTURE();
  return finish(allocate(pointer, nbytes, Place::device));
}

ASSAY_API hipError_t hipFree(void* pointer) {
  ASSAY_CHECK_DEVICE();
  ASSAY_FORBID_IN_CAPTURE();
  return finish(release(pointer, Place::device));
}

ASSAY_API hipError_t hipHostMalloc(void** pointer, size_t nbytes, unsigned) {
  ASSAY_CHECK_DEVICE();
  ASSAY_FORBID_IN_CAPTURE();
  return finish(allocate(pointer, nbytes, Place::pinned));
}

ASSAY_API hipError_t hipHostFree(void* pointer) {
  ASSAY_CHECK_DEVICE();
  ASSAY_FORBID_IN_CAPTURE();
  return finish(release(pointer, Place::pinned));
}

ASSAY_API hipError_t hipMemGetInfo(size_t* free_nbytes, size_t* total_nbytes) {
  ASSAY_CHECK_DEVICE();
  if (free_nbytes == nullptr || total_nbytes == nullptr) return finish(hipErrorInvalidValue);
  const std::shared_lock lock(mutex);
  *total_nbytes = memory_total();
  *free_nbytes = std::min(available_nbytes(), memory_total() - used_nbytes);
  return finish(hipSuccess);
}
