#include "depend.h"

#include <unordered_map>

namespace {
// Takes part in the null stream's rule, the null stream itself included.
bool is_blocking(const Stream& stream) { return (stream.flags & kStreamNonBlocking) == 0; }

template <class Wanted>
std::vector<uint64_t> ids_of(const Queue& queue, Wanted wanted) {
  std::vector<uint64_t> ids;
  for (const auto& [id, item] : queue)
    if (wanted(*item.stream)) ids.push_back(id);
  return ids;
}
}  // namespace

std::vector<uint64_t> predecessors(const Stream& stream, const Queue& queue) {
  if (is_null_stream(stream)) return ids_of(queue, is_blocking);
  std::vector<uint64_t> ids{stream.last_queued};
  if (is_blocking(stream)) ids.push_back(find_stream(nullptr)->last_queued);
  return ids;
}

std::vector<uint64_t> work_of(const Stream& stream, const Queue& queue) {
  if (is_null_stream(stream)) return ids_of(queue, is_blocking);
  return {stream.last_queued};
}

std::vector<uint64_t> legal_order(const Queue& queue, const std::vector<uint64_t>& wanted, Random& random) {
  std::unordered_map<uint64_t, size_t> missing;                   // of each required item: what must still run
  std::unordered_map<uint64_t, std::vector<uint64_t>> dependents;
  std::vector<uint64_t> open, ready, order;
  const auto require = [&](uint64_t id) {
    if (queue.count(id) == 0) return false;
    if (missing.emplace(id, 0).second) open.push_back(id);
    return true;
  };
  for (const uint64_t id : wanted) require(id);
  while (!open.empty()) {
    const uint64_t id = open.back();
    open.pop_back();
    size_t count = 0;
    for (const uint64_t before : queue.at(id).after)
      if (require(before)) {
        dependents[before].push_back(id);
        ++count;
      }
    missing[id] = count;
    if (count == 0) ready.push_back(id);
  }
  while (!ready.empty()) {
    const uint32_t chosen = ready.size() == 1 ? 0 : random.below(static_cast<uint32_t>(ready.size()));
    const uint64_t id = ready[chosen];
    ready[chosen] = ready.back();
    ready.pop_back();
    order.push_back(id);
    for (const uint64_t next : dependents[id])
      if (--missing[next] == 0) ready.push_back(next);
  }
  return order;
}
