// Seeded choices of the checker: the same on every machine.
#pragma once

#include <cstdint>

// splitmix64.
class Random {
 public:
  // A stream of its own for each pair.
  Random(uint64_t seed, uint64_t number) : state_(seed * 0x9E3779B97F4A7C15u ^ scramble(number)) {}

  uint64_t next() { return scramble(state_ += 0x9E3779B97F4A7C15u); }

  // From 0 to count - 1. The bias of 2^-64 * count is of no matter here.
  uint32_t below(uint32_t count) {
    return static_cast<uint32_t>((static_cast<unsigned __int128>(next()) * count) >> 64);
  }

  template <class T>
  void shuffle(T* values, uint32_t count) {
    for (uint32_t left = count; left > 1; --left) {
      const uint32_t other = below(left);
      const T last = values[left - 1];
      values[left - 1] = values[other];
      values[other] = last;
    }
  }

 private:
  static uint64_t scramble(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  uint64_t state_;
};
