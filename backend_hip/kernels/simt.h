// The platform layer: the only kernel header that knows what it is compiled for.
//
// A kernel is written once against this API and compiled for AMD (hiprtc or offline clang), NVIDIA (NVRTC)
// and the CPU runtime (a C++ compiler; the threads of a block are fibers). It uses no standard header,
// because the run-time compilers have none.
//
// Defines before this header:
//   SIMT_BLOCK  threads per block (1-D blocks), at most 256, a multiple of SIMT_WAVE; required
//   SIMT_WAVE   lanes per wave, 32 (default) or 64
//
//   SIMT_KERNEL(name, type argument, ...) { body }   arguments: pointers and 4- or 8-byte scalars
//   SIMT_KERNEL_RESIDENT(blocks, name, ...)          as many blocks must fit into a multiprocessor's registers
//                                                    at once: what a compiler that can be told is told
//   SIMT_SHARED(Type, name, count)                   block-shared array; at most 64 KiB in all
//   simt::thread() lane() wave() block_x() block_y() block_z() grid_x() grid_y()   grid_* count blocks
//   simt::sync()        every thread of the block must reach it
//   simt::wave_sync()   and each operation below: every lane of the wave must reach it
//   simt::load16(p) load4(p)   bytes from a 16- or 4-byte boundary; _at_even: from any even address
//   simt::store16(p, quad)      to a 16-byte boundary
//   simt::Carried c; c.fetch(to, from); later c.land(to)   16 bytes from device memory to shared memory, both
//                   at 16-byte boundaries; what stood in `to` may go from fetch on, and the new bytes are there
//                   for this thread after land and carried_wait, for others after the barrier that follows
//   simt::carried_group()   closes a group of fetches, which may be empty
//   simt::carried_wait<LATER>()   until only the last LATER groups may be on their way
//   simt::copy16(to, from) ... simt::copies_done()   fetch and land at once, and a wait for all
//   simt::soon(p)               a hint: the line of device memory around p will be read
//   simt::dot4(a, b, c)         c + the products of four signed bytes, exactly where it fits
//   simt::fma2(a, b, c)         on pairs of halves; bit-equal where the result is exact
//   simt::masked_or(word, mask, bits)   (word & mask) | bits in one instruction
//   simt::permute(low, high, selector(i0, i1, i2, i3))   bytes of eight: 0-3 of low, 4-7 of high
//   simt::field_to_float<BITS>(word, shift)   an unsigned field, exactly; shift + BITS at most 16
//   simt::load8(p)      bytes from an 8-byte boundary
//   simt::signed_bytes_to_floats(word, values)   halves_to_floats(word, values)   all of a word, exactly
//   simt::wave_sum(values, n) wave_sum(v) wave_max(v) shuffle(v, lane) shuffle_xor(v, mask)
//   simt::butterfly<HIGH, LOW>(values, n)   the steps HIGH, HIGH / 2 .. LOW of wave_sum's butterfly
//   simt::spread_sum<HIGH>(values)   the steps HIGH .. 1 of as many columns as a power of two; a lane gets
//                       only columns first .. first + count - 1, count = max(N / (2 HIGH), 1), in values[0 ..],
//                       and the call returns first. Half as many exchanges, the same bits.
//   simt::spread_max<HIGH>(values)   the same with the greatest values
//
// Arithmetic is bit-equal on every platform: contraction is off, a fused multiply-add is simt::fma, and
// wave_sum is one butterfly (offset SIMT_WAVE/2 .. 1, v = v + shuffle_xor(v, offset)). The bits of a NaN
// are not part of that promise.
#ifndef ASSAY_SIMT_H
#define ASSAY_SIMT_H

#ifndef SIMT_WAVE
#define SIMT_WAVE 32
#endif
#ifndef SIMT_BLOCK
#error "simt.h: define SIMT_BLOCK, the threads per block"
#endif
#if SIMT_WAVE != 32 && SIMT_WAVE != 64
#error "simt.h: SIMT_WAVE must be 32 or 64"
#endif
#if SIMT_BLOCK < SIMT_WAVE || SIMT_BLOCK > 256 || SIMT_BLOCK % SIMT_WAVE != 0
#error "simt.h: SIMT_BLOCK must be a multiple of SIMT_WAVE and at most 256"
#endif

#if defined(__HIPCC_RTC__)
// Some hiprtc versions predefine these names with other underlying types, others don't define them at all.
#define int8_t simt_int8_t
#define uint8_t simt_uint8_t
#define int16_t simt_int16_t
#define uint16_t simt_uint16_t
#define int32_t simt_int32_t
#define uint32_t simt_uint32_t
#define int64_t simt_int64_t
#define uint64_t simt_uint64_t
#endif
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
#if defined(__CUDACC_RTC__)
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
typedef __INT64_TYPE__ int64_t;
typedef __UINT64_TYPE__ uint64_t;
#endif

namespace simt {
struct Quad {  // 16 bytes as loaded, little-endian words
  uint32_t word[4];
};
struct Pair {  // 8 bytes
  uint32_t word[2];
};
}  // namespace simt

#if defined(SIMT_CPU)
#include "simt_cpu.h"
#elif defined(__CUDACC__) || defined(__CUDACC_RTC__)
#include "simt_cuda.h"
#elif defined(__HIP__) || defined(__HIPCC_RTC__)
#include "simt_amd.h"
#else
#error "simt.h: unknown platform; known: HIP clang, NVRTC, the CPU runtime (SIMT_CPU)"
#endif
#if !defined(__CUDACC__) && !defined(__CUDACC_RTC__)
#include "simt_words.h"
#endif

#define SIMT_PRAGMA(text) _Pragma(#text)
#if defined(__clang__) || defined(__CUDACC_RTC__) || defined(__CUDACC__)
#define SIMT_UNROLL SIMT_PRAGMA(unroll)
#else  // the CPU: unrolled in full, loops over MAX_COLS run no faster and take g++ four times as long
#define SIMT_UNROLL SIMT_PRAGMA(GCC unroll 8)
#endif

namespace simt {

#if !defined(SIMT_SCALAR_REGISTERS)  // one kind of register: nothing to place, nothing to give up
SIMT_DEVICE int uniform(int v) { return v; }
SIMT_DEVICE int again(int v) { return v; }
template <class T>
SIMT_DEVICE T words_again(T value) {
  return value;
}
#endif

SIMT_DEVICE int lane() { return thread() & (SIMT_WAVE - 1); }
SIMT_DEVICE int wave() { return thread() / SIMT_WAVE; }

// Comparisons, not fmin/fmax, whose treatment of NaN and of the two zeros differs between platforms.
// A NaN in `b` is dropped by these two; wave_max keeps it.
SIMT_DEVICE float min(float a, float b) { return b < a ? b : a; }
SIMT_DEVICE float max(float a, float b) { return a < b ? b : a; }
SIMT_DEVICE int32_t min(int32_t a, int32_t b) { return b < a ? b : a; }
SIMT_DEVICE int32_t max(int32_t a, int32_t b) { return a < b ? b : a; }

SIMT_DEVICE float bf16_to_float(uint16_t code) { return from_bits(static_cast<uint32_t>(code) << 16); }

SIMT_DEVICE float shuffle(float v, int source_lane) {
  return from_bits(shuffle(bits(v), source_lane));
}
SIMT_DEVICE int32_t shuffle(int32_t v, int source_lane) {
  return static_cast<int32_t>(shuffle(static_cast<uint32_t>(v), source_lane));
}
SIMT_DEVICE float shuffle_xor(float v, int mask) { return from_bits(shuffle_xor(bits(v), mask)); }
SIMT_DEVICE int32_t shuffle_xor(int32_t v, int mask) {
  return static_cast<int32_t>(shuffle_xor(static_cast<uint32_t>(v), mask));
}

#if defined(SIMT_CPU) || !(defined(__CUDACC__) || defined(__CUDACC_RTC__))
// Without an engine for such copies the bytes wait in registers.
struct Carried {
  Quad quad;
  SIMT_DEVICE void fetch(void*, const void* from) { quad = load16(from); }
  SIMT_DEVICE void land(void* to) const { store16(to, quad); }
};
SIMT_DEVICE void carried_group() {}
template <int LATER>
SIMT_DEVICE void carried_wait() {}
#endif
SIMT_DEVICE void copy16(void* to, const void* from) {
  Carried carried;
  carried.fetch(to, from);
  carried.land(to);
}
SIMT_DEVICE void copies_done() {
  carried_group();
  carried_wait<0>();
}

#if !defined(SIMT_CPU)  // The CPU does a whole wave's reduction in the lane that arrives last (simt_cpu.h).
SIMT_DEVICE float wave_sum(float v) {
  SIMT_UNROLL
  for (int offset = SIMT_WAVE / 2; offset > 0; offset /= 2) v = v + shuffle_xor(v, offset);
  return v;
}

// Sums the first n columns over the wave; every lane gets the results.
template <int N>
SIMT_DEVICE void wave_sum(float (&values)[N], int n) {
  SIMT_UNROLL
  for (int column = 0; column < N; ++column)  // a constant bound keeps `values` in registers
    if (column < n) values[column] = wave_sum(values[column]);
}

template <int HIGH, int LOW, int N>
SIMT_DEVICE void butterfly(float (&values)[N], int n) {
  SIMT_UNROLL
  for (int offset = HIGH; offset >= LOW && offset > 0; offset /= 2) {
    SIMT_UNROLL
    for (int column = 0; column < N; ++column)
      if (column < n) values[column] = values[column] + shuffle_xor(values[column], offset);
  }
}

template <int HIGH, int N>
SIMT_DEVICE int spread_sum(float (&values)[N]) {
  int first = 0;
  int count = N;
  SIMT_UNROLL
  for (int offset = HIGH; offset > 0; offset /= 2) {
    if (count == 1) {
      values[0] = values[0] + shuffle_xor(values[0], offset);
      continue;
    }
    count /= 2;
    const bool upper = (thread() & offset) != 0;
    if (upper) first += count;
    SIMT_UNROLL
    for (int column = 0; column < N / 2; ++column) {
      if (column >= count) continue;
      const float low = values[column], high = values[column + count];
      values[column] = (upper ? high : low) + shuffle_xor(upper ? low : high, offset);
    }
  }
  return first;
}

// NaN if any lane holds one; +0 is above -0, so that every lane gets the same bits.
SIMT_DEVICE float wave_max(float v) {
  SIMT_UNROLL
  for (int offset = SIMT_WAVE / 2; offset > 0; offset /= 2) {
    const float other = shuffle_xor(v, offset);
    if (v == other) v = from_bits(bits(v) & bits(other));
    else if (v < other || other != other) v = other;
  }
  return v;
}
#endif

// The greatest of a wave's values as spread_sum adds them; a NaN may be dropped.
template <int HIGH, int N>
SIMT_DEVICE int spread_max(float (&values)[N]) {
  int first = 0;
  int count = N;
  SIMT_UNROLL
  for (int offset = HIGH; offset > 0; offset /= 2) {
    if (count == 1) {
      values[0] = max(values[0], shuffle_xor(values[0], offset));
      continue;
    }
    count /= 2;
    const bool upper = (thread() & offset) != 0;
    if (upper) first += count;
    SIMT_UNROLL
    for (int column = 0; column < N / 2; ++column) {
      if (column >= count) continue;
      const float low = values[column], high = values[column + count];
      values[column] = max(upper ? high : low, shuffle_xor(upper ? low : high, offset));
    }
  }
  return first;
}

}  // namespace simt
#endif
