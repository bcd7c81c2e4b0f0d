// simt.h for NVIDIA (NVRTC): compiler intrinsics and inline PTX, no headers.
#ifndef ASSAY_SIMT_CUDA_H
#define ASSAY_SIMT_CUDA_H

#if SIMT_WAVE != 32
#error "simt_cuda.h: an NVIDIA warp has 32 lanes; SIMT_WAVE must be 32"
#endif

#define SIMT_DEVICE __device__ __forceinline__
#define SIMT_KERNEL(name, ...) \
  extern "C" __global__ void __launch_bounds__(SIMT_BLOCK) name(__VA_ARGS__)
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

SIMT_DEVICE uint32_t shuffle(uint32_t v, int source_lane) {
  return __shfl_sync(0xFFFFFFFFu, v, source_lane);
}
SIMT_DEVICE uint32_t shuffle_xor(uint32_t v, int mask) {
  return __shfl_xor_sync(0xFFFFFFFFu, v, mask);
}

}  // namespace simt
#endif
