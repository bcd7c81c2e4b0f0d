#include "fault.h"

#include <csignal>
#include <cstdlib>
#include <mutex>

#include <sys/mman.h>
#include <ucontext.h>

#include "fiber.h"

namespace {
constexpr size_t kSignalStackNbytes = 64 * 1024;

std::mutex mutex;
int scopes = 0;
struct sigaction previous_segv, previous_bus;

thread_local Region* current = nullptr;
thread_local stack_t previous_stack;

// One signal stack per thread, mapped when first needed.
struct SignalStack {
  void* memory = MAP_FAILED;
  ~SignalStack() {
    if (memory != MAP_FAILED) munmap(memory, kSignalStackNbytes);
  }
};
thread_local SignalStack signal_stack;

// Sends the interrupted context to `main_stack` as if assay_fiber_resume had been called: returning from the
// handler then restores the signal mask and stack, which a jump out of it would not.
void leave_block(ucontext_t& context, void* main_stack) {
#if defined(__x86_64__)
  auto* registers = context.uc_mcontext.gregs;
  registers[REG_RDI] = reinterpret_cast<greg_t>(main_stack);
  registers[REG_RSP] = reinterpret_cast<greg_t>(main_stack);
  registers[REG_RIP] = reinterpret_cast<greg_t>(&assay_fiber_resume);
  registers[REG_EFL] &= ~greg_t{0x400};  // direction flag
#else
  context.uc_mcontext.regs[0] = reinterpret_cast<uint64_t>(main_stack);
  context.uc_mcontext.sp = reinterpret_cast<uint64_t>(main_stack);
  context.uc_mcontext.pc = reinterpret_cast<uint64_t>(&assay_fiber_resume);
#endif
}

uint64_t interrupted_stack(const ucontext_t& context) {
#if defined(__x86_64__)
  return static_cast<uint64_t>(context.uc_mcontext.gregs[REG_RSP]);
#else
  return context.uc_mcontext.sp;
#endif
}

bool is_write(const ucontext_t& context) {
#if defined(__x86_64__)
  return (context.uc_mcontext.gregs[REG_ERR] & 2) != 0;
#else
  (void)context;
  return false;
#endif
}

void pass_on(int number, siginfo_t* info, void* context) {
  const struct sigaction& previous = number == SIGSEGV ? previous_segv : previous_bus;
  if ((previous.sa_flags & SA_SIGINFO) != 0) {
    previous.sa_sigaction(number, info, context);
  } else if (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN) {
    // The faulting instruction runs again after the return and meets the default action.
    signal(number, SIG_DFL);
  } else {
    previous.sa_handler(number);
  }
}

// Only async-signal-safe work here: facts go into the region, run_launch words them.
void on_fault(int number, siginfo_t* info, void* context) {
  Region* region = current;
  if (region == nullptr || region->running == 0 || info->si_code <= 0) return pass_on(number, info, context);
  auto& interrupted = *static_cast<ucontext_t*>(context);
  const uint64_t stack = interrupted_stack(interrupted);
  const uint64_t begin = reinterpret_cast<uint64_t>(region);
  const auto address = reinterpret_cast<uint64_t>(info->si_addr);
  const int guard = guard_of(*region, address);
  const bool on_fiber = stack - begin < SIMT_CPU_REGION_NBYTES;
  if (!on_fiber && guard < 0) return pass_on(number, info, context);  // not a kernel's doing
  region->fault_thread = guard >= 0 ? static_cast<uint32_t>(guard)
                                    : static_cast<uint32_t>((stack - begin) >> SIMT_CPU_SLOT_SHIFT);
  region->fault_address = address;
  region->fault_is_write = is_write(interrupted) ? 1 : 0;
  region->message[0] = '\0';
  region->failed = 1;
  region->failure = hipErrorIllegalAddress;
  leave_block(interrupted, region->main_stack);
}
}  // namespace

FaultScope::FaultScope() {
  const std::lock_guard lock(mutex);
  if (scopes++ != 0) return;
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, &previous_segv);
  sigaction(SIGBUS, &action, &previous_bus);
}

FaultScope::~FaultScope() {
  const std::lock_guard lock(mutex);
  if (--scopes != 0) return;
  sigaction(SIGSEGV, &previous_segv, nullptr);
  sigaction(SIGBUS, &previous_bus, nullptr);
}

FaultStack::FaultStack(Region& region) : outer_(current) {
  if (signal_stack.memory == MAP_FAILED)
    signal_stack.memory = mmap(nullptr, kSignalStackNbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  previous_stack = {};
  previous_stack.ss_flags = SS_DISABLE;
  if (signal_stack.memory != MAP_FAILED) {
    stack_t stack{};
    stack.ss_sp = signal_stack.memory;
    stack.ss_size = kSignalStackNbytes;
    sigaltstack(&stack, &previous_stack);
  }
  current = &region;
}

FaultStack::~FaultStack() {
  current = outer_;
  if (signal_stack.memory != MAP_FAILED) sigaltstack(&previous_stack, nullptr);
}
