// The order in which a launch runs its blocks, waves and lanes, where it is not the plain one.
//
// Lanes of a wave run one after another from one meeting to the next, in `lane_order`. A wave that completed
// a wave operation goes on until it waits for its block, or, when `interleaved`, any wave that can run is
// next. Every such order is one that a GPU might have taken.
#pragma once

#include <cstdint>
#include <vector>

#include "random.h"
#include "simt_cpu_abi.h"

struct Region;

constexpr unsigned char kSharedPoison = 0xFF;  // float NaN, index -1
constexpr uint32_t kMostWaves = SIMT_CPU_THREADS / 32;

// Who last changed one byte, while an order runs that is asked to look (repeat.cpp, to name the culprit).
struct Watch {
  const volatile unsigned char* byte = nullptr;  // null: not looking
  unsigned char seen = 0;
  bool written = false;
  uint32_t thread = 0, block_x = 0, block_y = 0, block_z = 0;
};

class Order {
 public:
  // Shuffled by seed and launch number.
  Order(uint32_t threads, uint32_t wave_size, uint32_t block_count, uint64_t seed, uint64_t launch);

  void reverse_blocks();
  void reverse_threads();  // of waves in a block, of lanes in each wave
  void interleave();

  const std::vector<uint32_t>& blocks() const { return blocks_; }
  uint64_t wave_meetings() const { return wave_meetings_; }  // completed where others could have run between

  // For fiber.cpp. A block starts with the thread that `begin_block` names.
  uint32_t begin_block();
  void meet(Region& region, uint32_t thread, uint32_t meeting);

  Watch watch;
  unsigned char poison = kSharedPoison;  // what shared memory holds at the start of a block

 private:
  uint32_t first_lane(uint32_t wave) const { return lane_order_[wave * wave_size_]; }
  uint32_t next_wave(uint32_t wave, bool may_go_on);
  void look(const Region& region, uint32_t thread);

  const uint32_t threads_, wave_size_, waves_;
  bool interleaved_ = false;
  Random random_;
  std::vector<uint32_t> blocks_;
  uint8_t wave_order_[kMostWaves];
  uint8_t lane_order_[SIMT_CPU_THREADS];  // threads of wave w from w * wave_size on
  uint64_t wave_meetings_ = 0;

  // State of the block that runs.
  struct Arrivals {
    uint32_t count, meeting, first;
  };
  Arrivals lanes_[kMostWaves];
  Arrivals block_;
  bool waits_[kMostWaves];  // for the other waves
};
