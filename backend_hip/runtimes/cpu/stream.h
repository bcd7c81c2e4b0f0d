// Streams, events and the operations that a stream runs or a capture records.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "hip_types.h"

struct CopyOperation {
  void* dst;
  const void* src;
  size_t nbytes;
  hipMemcpyKind kind;
  std::shared_ptr<std::vector<unsigned char>> staged = nullptr;  // owns `src` where the source was copied first
};

struct FillOperation {
  void* dst;
  uint32_t value;
  uint32_t value_nbytes;  // 1 or 4
  size_t count;           // values
};

struct LaunchOperation {
  std::shared_ptr<Module> module;  // keeps the code mapped
  const Function* function;
  uint32_t grid[3];
  std::vector<uint64_t> arguments;  // the packed buffer, copied: the caller may change its own at once
  uint64_t number = 0;              // 0 until submitted: each replay of a graph is a launch of its own
};

struct RecordOperation {
  std::shared_ptr<Event> event;
};

struct WaitOperation {};  // a place in a queue that comes after work of other streams

using Operation = std::variant<CopyOperation, FillOperation, LaunchOperation, RecordOperation, WaitOperation>;

struct Capture;

struct Stream {
  unsigned flags = 0;
  std::shared_ptr<Capture> capture;       // guarded by capture.h's mutex
  std::atomic<uint64_t> last_queued{0};  // id of the last item under --sanitize (queue.h); 0: none
};

struct Event {
  unsigned flags = 0;
  std::atomic<int64_t> recorded_ns{-1};  // steady clock; -1: never reached
  std::atomic<uint64_t> last_record{0};  // id of the last queued record; 0: none was ever queued
  // Last recorded inside a capture: it then orders captured work only. Guarded by capture.h's mutex.
  std::shared_ptr<Capture> capture;
  Stream* capture_stream = nullptr;
  size_t capture_position = 0;
};

// A live stream, the null stream for nullptr, or nothing for a stale handle.
std::shared_ptr<Stream> find_stream(hipStream_t handle);
bool is_null_stream(const Stream& stream);

enum class Manner {
  asynchronous,  // an entry point whose name ends so, a launch, a record
  blocking,      // the host waits for it
  replayed,      // a node of a graph
};

// Records the operation when the stream captures, else runs it: at once, in submission order, or, under
// --sanitize, once something requires it.
hipError_t submit(const std::shared_ptr<Stream>& stream, Operation operation, Manner manner = Manner::asynchronous);

// Runs one operation now, with its checks. Also what a graph replays.
hipError_t execute(const Operation& operation);
