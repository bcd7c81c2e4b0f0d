// Memory faults of kernels: caught during a launch only, reported, and the block abandoned.
#pragma once

struct Region;

// While one lives, SIGSEGV and SIGBUS come here first; the previous handlers are back when the last one goes.
class FaultScope {
 public:
  FaultScope();
  ~FaultScope();
  FaultScope(const FaultScope&) = delete;
  FaultScope& operator=(const FaultScope&) = delete;
};

// Gives the calling thread a signal stack of its own (a fault may be an exhausted stack) and names the region
// whose blocks it runs. The previous signal stack, for instance faulthandler's, is restored.
class FaultStack {
 public:
  explicit FaultStack(Region& region);
  ~FaultStack();
  FaultStack(const FaultStack&) = delete;
  FaultStack& operator=(const FaultStack&) = delete;

 private:
  Region* outer_;
};
