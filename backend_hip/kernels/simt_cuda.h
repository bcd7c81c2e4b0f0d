// simt.h for NVIDIA (NVRTC): compiler intrinsics and inline PTX, no headers.
#ifndef ASSAY_SIMT_CUDA_H
#define ASSAY_SIMT_CUDA_H

#if SIMT_WAVE != 32
#error "simt_cuda.h: an NVIDIA warp has 32 lanes; SIMT_WAVE must be 32"
#endif

#define SIMT_DEVICE __device__ __forceinline__
#define SIMT_KERNEL(name, ...) extern "C" __global__ void __launch_bounds__(SIMT_BLOCK) name(__VA_ARGS__)
#define SIMT_KERNEL_RESIDENT(blocks, name, ...) \
  extern "C" __global__ void __launch_bounds__(SIMT_BLOCK, blocks) name(__VA_ARGS__)
#define SIMT_SHARED(Type, name, count) static __shared__ __align__(16) Type name[count]

namespace simt {

SIMT_DEVICE int thread() { return static_cast<int>(threadIdx.x); }
SIMT_DEVICE int block_x() { return static_cast<int>(blockIdx.x); }
SIMT_DEVICE int block_y() { return static_cast<int>(blockIdx.y); }
SIMT_DEVICE int block_z() { return static_cast<int>(blockIdx.z); }
SIMT_DEVICE int grid_x() { return static_cast<int>(gridDim.x); }
SIMT_DEVICE int grid_y() { return static_cast<int>(gridDim.y); }

SIMT_DEVICE void sync() { __syncthreads(); }
SIMT_DEVICE void wave_sync() { __syncwarp(); }

SIMT_DEVICE uint32_t bits(float v) { return __float_as_uint(v); }
SIMT_DEVICE float from_bits(uint32_t v) { return __uint_as_float(v); }
SIMT_DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
SIMT_DEVICE float sqrt(float v) { return __fsqrt_rn(v); }

SIMT_DEVICE float half_to_float(uint16_t code) {
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(code));
  return v;
}
SIMT_DEVICE uint16_t float_to_half(float v) {
  uint16_t code;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(code) : "f"(v));
  return code;
}

SIMT_DEVICE void soon(const void* p) { asm volatile("prefetch.global.L1 [%0];" : : "l"(p)); }
SIMT_DEVICE int32_t dot4(uint32_t a, uint32_t b, int32_t c) {
  int32_t v;
  asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
  return v;
}
SIMT_DEVICE uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t v;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
  return v;
}
SIMT_DEVICE uint32_t masked_or(uint32_t word, uint32_t mask, uint32_t bits) {
  uint32_t v;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(v) : "r"(word), "r"(mask), "r"(bits));
  return v;
}
SIMT_DEVICE uint32_t selector(int i0, int i1, int i2, int i3) {
  return static_cast<uint32_t>(i0 | i1 << 4 | i2 << 8 | i3 << 12);
}
SIMT_DEVICE uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
  return __byte_perm(low, high, selector);
}

SIMT_DEVICE Quad load16(const void* p) {
  const uint4 v = *static_cast<const uint4*>(p);
  return {{v.x, v.y, v.z, v.w}};
}
SIMT_DEVICE void store16(void* p, const Quad& v) {
  *static_cast<uint4*>(p) = make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]);
}
// The copy runs beside the thread; groups of copies land in the order of their making.
struct Carried {
  SIMT_DEVICE void fetch(void* to, const void* from) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(address), "l"(from) : "memory");
  }
  SIMT_DEVICE void land(void*) const {}
};
SIMT_DEVICE void carried_group() { asm volatile("cp.async.commit_group;" : : : "memory"); }
template <int LATER>
SIMT_DEVICE void carried_wait() {
  asm volatile("cp.async.wait_group %0;" : : "n"(LATER) : "memory");
}
SIMT_DEVICE Pair load8(const void* p) {
  const uint2 v = *static_cast<const uint2*>(p);
  return {{v.x, v.y}};
}
SIMT_DEVICE uint32_t load4(const void* p) { return *static_cast<const uint32_t*>(p); }
// Words from the boundary before; the one behind the end is read only where its bytes are needed. A pointer
// that steps back to a boundary of words, because one made from an integer is in no known memory.
SIMT_DEVICE Quad load16_at_even(const void* p) {
  const uint32_t back = static_cast<uint32_t>(reinterpret_cast<uint64_t>(p)) & 2u;
  const uint8_t* from = static_cast<const uint8_t*>(p) - back;
  uint32_t words[5];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = load4(from + 4 * i);
  words[4] = load4(from + 2 * back + 12);
  Quad v;
#pragma unroll
  for (int i = 0; i < 4; ++i) v.word[i] = __funnelshift_r(words[i], words[i + 1], back * 8);
  return v;
}
// The field becomes mantissa bits of 2^23, where it counts field * 2^shift; one fused multiply-add takes
// both powers away. Conversion instructions run at a quarter of the rate.
template <int BITS>
SIMT_DEVICE float field_to_float(uint32_t word, int shift) {
  const float placed = from_bits(masked_or(word, ((1u << BITS) - 1u) << shift, 0x4b000000u));
  return fma(placed, from_bits(static_cast<uint32_t>(127 - shift) << 23),
             -from_bits(static_cast<uint32_t>(150 - shift) << 23));
}
SIMT_DEVICE void signed_bytes_to_floats(uint32_t word, float* values) {
  const uint32_t shifted = word ^ 0x80808080u;  // 128 more, without a sign
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t selector = 0x7540u | static_cast<uint32_t>(i);
    values[i] = from_bits(__byte_perm(shifted, 0x4b000000u, selector)) - 8388736.0f;
  }
}
SIMT_DEVICE void halves_to_floats(uint32_t word, float* values) {
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
      : "=f"(values[0]), "=f"(values[1])
      : "r"(word));
}

SIMT_DEVICE uint32_t shuffle(uint32_t v, int source_lane) {
  return __shfl_sync(0xFFFFFFFFu, v, source_lane);
}
SIMT_DEVICE uint32_t shuffle_xor(uint32_t v, int mask) {
  return __shfl_xor_sync(0xFFFFFFFFu, v, mask);
}

}  // namespace simt
#endif
