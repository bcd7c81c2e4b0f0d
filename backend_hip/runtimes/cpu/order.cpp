#include "order.h"

#include <algorithm>
#include <numeric>

#include "fiber.h"
#include "meeting.h"

Order::Order(uint32_t threads, uint32_t wave_size, uint32_t block_count, uint64_t seed, uint64_t launch)
    : threads_(threads), wave_size_(wave_size), waves_(threads / wave_size), random_(seed, launch),
      blocks_(block_count) {
  std::iota(blocks_.begin(), blocks_.end(), 0u);
  random_.shuffle(blocks_.data(), block_count);
  std::iota(wave_order_, wave_order_ + waves_, uint8_t{0});
  random_.shuffle(wave_order_, waves_);
  std::iota(lane_order_, lane_order_ + threads_, uint8_t{0});
  for (uint32_t wave = 0; wave < waves_; ++wave) random_.shuffle(lane_order_ + wave * wave_size_, wave_size_);
}

void Order::reverse_blocks() { std::reverse(blocks_.begin(), blocks_.end()); }

void Order::reverse_threads() {
  std::reverse(wave_order_, wave_order_ + waves_);
  for (uint32_t wave = 0; wave < waves_; ++wave)
    std::reverse(lane_order_ + wave * wave_size_, lane_order_ + (wave + 1) * wave_size_);
}

void Order::interleave() { interleaved_ = true; }

uint32_t Order::begin_block() {
  block_ = {};
  std::fill(lanes_, lanes_ + waves_, Arrivals{});
  std::fill(waits_, waits_ + waves_, false);
  return first_lane(wave_order_[interleaved_ ? random_.below(waves_) : 0]);
}

// After `wave` has come to a stop: itself or the first in order; when interleaved any other that can run.
uint32_t Order::next_wave(uint32_t wave, bool may_go_on) {
  if (!interleaved_ && may_go_on) return wave;
  uint32_t ready[kMostWaves], count = 0;
  for (uint32_t i = 0; i < waves_; ++i)
    if (!waits_[wave_order_[i]] && !(interleaved_ && wave_order_[i] == wave)) ready[count++] = wave_order_[i];
  if (count == 0) return wave;
  return ready[interleaved_ ? random_.below(count) : 0];
}

void Order::look(const Region& region, uint32_t thread) {
  if (*watch.byte == watch.seen) return;
  watch.seen = *watch.byte;
  watch.written = true;
  watch.thread = thread;
  watch.block_x = region.block.block_x;
  watch.block_y = region.block.block_y;
  watch.block_z = region.block.block_z;
}

void Order::meet(Region& region, uint32_t thread, uint32_t meeting) {
  if (watch.byte != nullptr) look(region, thread);
  const uint32_t wave = thread / wave_size_;
  Arrivals& lanes = lanes_[wave];
  if (lanes.count == 0) lanes = {0, meeting, thread};
  else if (lanes.meeting != meeting) diverged(region, "wave", thread, meeting, lanes.first, lanes.meeting);
  if (++lanes.count < wave_size_)
    return hand_over(region, thread, lane_order_[wave * wave_size_ + lanes.count]);

  lanes.count = 0;
  bool may_go_on = meeting > kBlockBarrier;
  if (may_go_on) {
    complete_wave(region, wave * wave_size_, meeting);
    if (waves_ > 1) ++wave_meetings_;
  } else {
    if (block_.count == 0) block_ = {0, meeting, thread};
    else if (block_.meeting != meeting) diverged(region, "block", thread, meeting, block_.first, block_.meeting);
    waits_[wave] = true;
    if (++block_.count == waves_) {
      if (meeting == kExit) return leave_block(region, thread);
      block_.count = 0;
      std::fill(waits_, waits_ + waves_, false);
    }
  }
  // Nothing of this object may be used after a switch: a thread that ended comes back in another launch.
  hand_over(region, thread, first_lane(next_wave(wave, may_go_on)));
}
