#include "repeat.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <vector>

#include "memory.h"
#include "order.h"

namespace {
std::mutex one_at_a_time;  // two launches that both restore memory would undo each other's work

struct Part {
  uint32_t argument;
  unsigned char* begin;
  size_t nbytes;
};

// The allocations that a launch may write, each once, under the first argument that points there.
std::vector<Part> writable_parts(const GridLaunch& launch) {
  std::vector<Part> parts;
  const simt_cpu_kernel& kernel = *launch.function->kernel;
  for (uint32_t i = 0; i < kernel.parameter_count; ++i) {
    if (kernel.parameters[i].kind != SIMT_CPU_POINTER) continue;
    void* pointer;
    std::memcpy(&pointer, launch.arguments + kernel.parameters[i].offset, sizeof pointer);
    const Range range = find_range(pointer, true);
    if (range.place == Place::host) continue;  // null
    auto* begin = reinterpret_cast<unsigned char*>(range.begin);
    const auto same = [begin](const Part& part) { return part.begin == begin; };
    if (std::none_of(parts.begin(), parts.end(), same)) parts.push_back({i, begin, range.end - range.begin});
  }
  return parts;
}

using Contents = std::vector<std::vector<unsigned char>>;

Contents save(const std::vector<Part>& parts) {
  Contents contents;
  for (const Part& part : parts) contents.emplace_back(part.begin, part.begin + part.nbytes);
  return contents;
}

void restore(const std::vector<Part>& parts, const Contents& contents) {
  for (size_t i = 0; i < parts.size(); ++i) std::memcpy(parts[i].begin, contents[i].data(), parts[i].nbytes);
}

struct Difference {
  const Part* part = nullptr;  // null: none
  size_t offset = 0;
};

Difference compare(const std::vector<Part>& parts, const Contents& contents) {
  for (size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    if (std::memcmp(part.begin, contents[i].data(), part.nbytes) == 0) continue;
    const auto* at = std::mismatch(part.begin, part.begin + part.nbytes, contents[i].data()).first;
    return {&part, static_cast<size_t>(at - part.begin)};
  }
  return {};
}

enum class Run { forward, reverse, woven, threads_reversed, other_poison };

constexpr unsigned char kOtherPoison = 0;  // what a kernel that forgot to write may have relied on

const char* name_of(Run run) {
  switch (run) {
    case Run::forward: return "order";
    case Run::reverse: return "the reverse of the order";
    case Run::woven: return "interleaved waves";
    default: return "a part of the order";
  }
}

class Repeated {
 public:
  Repeated(const GridLaunch& launch, uint64_t seed)
      : launch_(launch), seed_(seed), parts_(writable_parts(launch)), before_(save(parts_)) {}

  Failure run() {
    Order forward = order(Run::forward);
    if (Failure failure = run_in(forward, Run::forward); failure.error != hipSuccess) return failure;
    after_ = save(parts_);
    Failure failure = repeat(Run::reverse);
    if (failure.error != hipSuccess || forward.wave_meetings() == 0) return failure;
    return repeat(Run::woven);
  }

 private:
  Order order(Run run) const {
    const simt_cpu_kernel& kernel = *launch_.function->kernel;
    Order made(kernel.block, kernel.wave, launch_.block_count(), seed_, launch_.number);
    if (run == Run::reverse) made.reverse_blocks();
    if (run == Run::reverse || run == Run::threads_reversed) made.reverse_threads();
    if (run == Run::woven) made.interleave();
    if (run == Run::reverse || run == Run::other_poison) made.poison = kOtherPoison;
    return made;
  }

  Failure run_in(Order& order, Run run) const {
    Failure failure = run_alone(launch_, order);
    if (failure.error != hipSuccess)
      failure.message += std::string(" (") + name_of(run) + " of seed " + std::to_string(seed_) + ")";
    return failure;
  }

  Failure repeat(Run run) const {
    restore(parts_, before_);
    Order other = order(run);
    if (Failure failure = run_in(other, run); failure.error != hipSuccess) return failure;
    const Difference difference = compare(parts_, after_);
    return difference.part == nullptr ? Failure{} : report(difference, run);
  }

  Failure report(const Difference& difference, Run run) const {
    const unsigned char* byte = difference.part->begin + difference.offset;
    Watch watch = watch_run(Run::forward, byte);
    if (!watch.written) watch = watch_run(run, byte);  // only the other order changes it
    char who[96] = "";
    if (watch.written)
      std::snprintf(who, sizeof who, ", last written by thread %u of block (%u, %u, %u)", watch.thread, watch.block_x,
                    watch.block_y, watch.block_z);
    const Cause cause = find_cause(run);
    char text[560];
    std::snprintf(text, sizeof text,
                  "kernel %.200s (launch %llu): its result depends on %s: argument %u differs at byte %zu of its "
                  "allocation of %zu bytes%s; order of seed %llu against %s; %s",
                  launch_.function->kernel->name, static_cast<unsigned long long>(launch_.number), cause.what,
                  difference.part->argument, difference.offset, difference.part->nbytes, who,
                  static_cast<unsigned long long>(seed_), run == Run::woven ? "waves interleaved" : "its reverse",
                  cause.why);
    return {hipErrorLaunchFailure, text};
  }

  struct Cause {
    const char *what, *why;
  };

  // Changes one thing at a time against the first run.
  Cause find_cause(Run run) const {
    const Cause threads{"the order in which the threads of a block run", "a barrier is missing"};
    if (run == Run::woven || differs(Run::threads_reversed)) return threads;
    if (differs(Run::other_poison))
      return {"what shared memory held before", "it is read before it is written: a barrier or a value is missing"};
    return {"the order in which blocks run", "blocks are not independent"};
  }

  bool differs(Run run) const {
    watch_run(run, nullptr);
    return compare(parts_, after_).part != nullptr;
  }

  // Runs once more from the same memory, looking who changes `byte` last (null: nobody looks).
  Watch watch_run(Run run, const unsigned char* byte) const {
    restore(parts_, before_);
    Order looking = order(run);
    looking.watch.byte = byte;
    if (byte != nullptr) looking.watch.seen = *byte;
    run_alone(launch_, looking);
    return looking.watch;
  }

  const GridLaunch& launch_;
  const uint64_t seed_;
  const std::vector<Part> parts_;
  const Contents before_;
  Contents after_;
};
}  // namespace

Failure run_repeatedly(const GridLaunch& launch, uint64_t seed) {
  const std::lock_guard lock(one_at_a_time);
  return Repeated(launch, seed).run();
}
