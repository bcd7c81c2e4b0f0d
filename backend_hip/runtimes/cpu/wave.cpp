#include "wave.h"

#include <cstring>

namespace {
constexpr uint32_t kColumns = 16;  // columns done together: the unit that the compiler makes vectors of
constexpr uint32_t kMaxLanes = 64;

template <uint32_t Lanes, uint32_t Columns>
void sum_columns(float* const* values, uint32_t column) {
  float partial[Lanes / 2][Columns];
  for (uint32_t lane = 0; lane < Lanes / 2; ++lane) {
    const float* a = values[lane] + column;
    const float* b = values[lane + Lanes / 2] + column;
    for (uint32_t c = 0; c < Columns; ++c) partial[lane][c] = a[c] + b[c];
  }
  for (uint32_t offset = Lanes / 4; offset > 0; offset /= 2)
    for (uint32_t lane = 0; lane < offset; ++lane)
      for (uint32_t c = 0; c < Columns; ++c) partial[lane][c] = partial[lane][c] + partial[lane + offset][c];
  for (uint32_t lane = 0; lane < Lanes; ++lane) std::memcpy(values[lane] + column, partial[0], sizeof partial[0]);
}

template <uint32_t Lanes>
void sum_one(float* const* values, uint32_t column) {
  float partial[Lanes];
  for (uint32_t lane = 0; lane < Lanes; ++lane) partial[lane] = values[lane][column];
  for (uint32_t offset = Lanes / 2; offset > 0; offset /= 2)
    for (uint32_t lane = 0; lane < offset; ++lane) partial[lane] = partial[lane] + partial[lane + offset];
  for (uint32_t lane = 0; lane < Lanes; ++lane) values[lane][column] = partial[0];
}

template <uint32_t Lanes>
void sum(float* const* values, uint32_t n) {
  uint32_t column = 0;
  for (; column + kColumns <= n; column += kColumns) sum_columns<Lanes, kColumns>(values, column);
  for (; column + 4 <= n; column += 4) sum_columns<Lanes, 4>(values, column);
  for (; column < n; ++column) sum_one<Lanes>(values, column);
}
}  // namespace

void sum_wave(float* const* values, uint32_t lanes, uint32_t n) {
  if (lanes == 32) sum<32>(values, n);
  else sum<kMaxLanes>(values, n);
}

void butterfly_wave(float* const* values, uint32_t lanes, uint32_t n, uint32_t high, uint32_t low) {
  for (uint32_t offset = high; offset >= low && offset > 0; offset /= 2)
    for (uint32_t lane = 0; lane < lanes; ++lane) {
      if ((lane & offset) != 0) continue;
      float* a = values[lane];
      float* b = values[lane + offset];
      for (uint32_t column = 0; column < n; ++column) a[column] = b[column] = a[column] + b[column];
    }
}

uint32_t max_wave(const uint32_t* bits, uint32_t lanes) {
  float best;
  std::memcpy(&best, &bits[0], 4);
  for (uint32_t lane = 1; lane < lanes; ++lane) {
    float other;
    std::memcpy(&other, &bits[lane], 4);
    if (best == other) {
      uint32_t a;
      std::memcpy(&a, &best, 4);
      a &= bits[lane];
      std::memcpy(&best, &a, 4);
    } else if (best < other || other != other) {
      best = other;
    }
  }
  uint32_t result;
  std::memcpy(&result, &best, 4);
  return result;
}
