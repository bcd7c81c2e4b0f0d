// simt.h for AMD: clang builtins only, so that hiprtc and an offline clang without ROCm compile the same.
#ifndef ASSAY_SIMT_AMD_H
#define ASSAY_SIMT_AMD_H

#if defined(__AMDGCN_WAVEFRONT_SIZE__) && __AMDGCN_WAVEFRONT_SIZE__ != SIMT_WAVE
#error "simt_amd.h: SIMT_WAVE is not the wave size that this code is compiled for (-mwavefrontsize64)"
#endif

#define SIMT_DEVICE inline __attribute__((device, always_inline))
#define SIMT_KERNEL(name, ...)                                                                     \
  extern "C" __attribute__((global, amdgpu_flat_work_group_size(SIMT_BLOCK, SIMT_BLOCK))) void name( \
      __VA_ARGS__)
#define SIMT_KERNEL_RESIDENT(blocks, name, ...)          \
  static_assert((blocks) > 0, "no block would be resident"); \
  SIMT_KERNEL(name, __VA_ARGS__)
#define SIMT_SHARED(Type, name, count) \
  static __attribute__((shared, aligned(16))) Type name[count]

#define SIMT_SCALAR_REGISTERS

namespace simt {

SIMT_DEVICE int thread() { return static_cast<int>(__builtin_amdgcn_workitem_id_x()); }
SIMT_DEVICE int block_x() { return static_cast<int>(__builtin_amdgcn_workgroup_id_x()); }
SIMT_DEVICE int block_y() { return static_cast<int>(__builtin_amdgcn_workgroup_id_y()); }
SIMT_DEVICE int block_z() { return static_cast<int>(__builtin_amdgcn_workgroup_id_z()); }
// The dispatch packet counts threads; blocks are 1-D.
SIMT_DEVICE int grid_x() { return static_cast<int>(__builtin_amdgcn_grid_size_x() / SIMT_BLOCK); }
SIMT_DEVICE int grid_y() { return static_cast<int>(__builtin_amdgcn_grid_size_y()); }

SIMT_DEVICE void sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
SIMT_DEVICE void wave_sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

// A value that all lanes of the wave have, in a scalar register.
SIMT_DEVICE int uniform(int v) { return __builtin_amdgcn_readfirstlane(v); }
// The same value, which the compiler takes for another one: what is made of it is made here, and not
// before a loop and kept in registers. `again` is for values that all lanes have.
SIMT_DEVICE int again(int v) {
  __asm__ volatile("" : "+s"(v));
  return v;
}
template <class T>
SIMT_DEVICE T words_again(T value) {
  static_assert(sizeof(T) % 4 == 0, "words of 4 bytes");
  uint32_t words[sizeof(T) / 4];
  __builtin_memcpy(words, &value, sizeof(T));
#pragma unroll
  for (unsigned i = 0; i < sizeof(T) / 4; ++i) __asm__ volatile("" : "+v"(words[i]));
  __builtin_memcpy(&value, words, sizeof(T));
  return value;
}

SIMT_DEVICE uint32_t bits(float v) { return __builtin_bit_cast(uint32_t, v); }
SIMT_DEVICE float from_bits(uint32_t v) { return __builtin_bit_cast(float, v); }
SIMT_DEVICE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
SIMT_DEVICE float sqrt(float v) { return __builtin_sqrtf(v); }

SIMT_DEVICE float half_to_float(uint16_t code) {
  return static_cast<float>(__builtin_bit_cast(_Float16, code));
}
SIMT_DEVICE uint16_t float_to_half(float v) {
  return __builtin_bit_cast(uint16_t, static_cast<_Float16>(v));
}

SIMT_DEVICE void soon(const void*) {}
SIMT_DEVICE int32_t dot4(uint32_t a, uint32_t b, int32_t c) {
  return __builtin_amdgcn_sudot4(true, static_cast<int>(a), true, static_cast<int>(b), c, false);
}
typedef _Float16 Half2 __attribute__((ext_vector_type(2)));
SIMT_DEVICE uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  return __builtin_bit_cast(uint32_t, __builtin_elementwise_fma(__builtin_bit_cast(Half2, a),
                                                               __builtin_bit_cast(Half2, b),
                                                               __builtin_bit_cast(Half2, c)));
}
SIMT_DEVICE uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
  return __builtin_amdgcn_perm(high, low, selector);
}

SIMT_DEVICE void signed_bytes_to_floats(uint32_t word, float* values) {
  // Bytes become floats without a sign in one instruction each; 128 less is exact.
  for (int i = 0; i < 4; ++i) values[i] = static_cast<float>(static_cast<int32_t>((word ^ 0x80808080u) >> (8 * i) & 255u)) - 128.0f;
}
SIMT_DEVICE void halves_to_floats(uint32_t word, float* values) {
  values[0] = half_to_float(static_cast<uint16_t>(word));
  values[1] = half_to_float(static_cast<uint16_t>(word >> 16));
}

SIMT_DEVICE uint32_t shuffle(uint32_t v, int source_lane) {
  const int self = thread() & (SIMT_WAVE - 1);
  const int within = (self & 32) | (source_lane & 31);
  const int near = __builtin_amdgcn_ds_bpermute(within << 2, static_cast<int>(v));
#if SIMT_WAVE == 64
  // RDNA's bpermute stays inside a half of 32 lanes; the other half is reached by swapping halves first.
  const int swapped = static_cast<int>(__builtin_amdgcn_permlane64(v));
  const int far = __builtin_amdgcn_ds_bpermute(within << 2, swapped);
  return static_cast<uint32_t>(((source_lane ^ self) & 32) != 0 ? far : near);
#else
  return static_cast<uint32_t>(near);
#endif
}
SIMT_DEVICE uint32_t shuffle_xor(uint32_t v, int mask) {
  return shuffle(v, (thread() ^ mask) & (SIMT_WAVE - 1));
}

}  // namespace simt
#endif
