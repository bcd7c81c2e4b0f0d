// simt.h for the CPU runtime. The threads of a block are fibers of one OS thread that switch only inside the
// services below, so code between two of them never runs concurrently with the rest of its block.
#ifndef ASSAY_SIMT_CPU_H
#define ASSAY_SIMT_CPU_H

#include "simt_cpu_abi.h"

#define SIMT_DEVICE inline __attribute__((always_inline))

namespace simt::cpu {

inline const simt_cpu_services* services;

inline __attribute__((always_inline)) uint64_t stack_pointer() {
  uint64_t sp;
  // Not volatile: whatever the exact value, region and slot are constant for a fiber, so the compiler may
  // compute them once and keep them across switches.
#if defined(__x86_64__)
  __asm__("mov %%rsp, %0" : "=r"(sp));
#elif defined(__aarch64__)
  __asm__("mov %0, sp" : "=r"(sp));
#else
#error "simt_cpu.h: the CPU runtime has fibers for x86-64 and aarch64 only"
#endif
  return sp;
}

inline __attribute__((always_inline)) const simt_cpu_block* block() {
  return reinterpret_cast<const simt_cpu_block*>(stack_pointer() & ~(SIMT_CPU_REGION_NBYTES - 1));
}

template <class T> struct kind_of { static constexpr unsigned value = SIMT_CPU_SCALAR; };
template <class T> struct kind_of<T*> { static constexpr unsigned value = SIMT_CPU_POINTER; };
template <class T> struct kind_of<const T*> { static constexpr unsigned value = SIMT_CPU_CONST_POINTER; };
template <class T> struct kind_of<T* __restrict> : kind_of<T*> {};
template <class T> struct kind_of<T* const> : kind_of<T*> {};

template <unsigned... I> struct indices {};
template <unsigned N, unsigned... I> struct make_indices : make_indices<N - 1, N - 1, I...> {};
template <unsigned... I> struct make_indices<0, I...> { using type = indices<I...>; };

template <class... A>
struct signature {
  static_assert(((sizeof(A) == 4 || sizeof(A) == 8) && ...),
                "kernel arguments are pointers and 4- or 8-byte scalars");
  static constexpr unsigned count = sizeof...(A);
  struct table {
    simt_cpu_parameter rows[count + 1];  // the extra row's offset is the end of the last argument
  };
  static constexpr table make() {
    table t{};
    const unsigned sizes[] = {static_cast<unsigned>(sizeof(A))..., 0};
    const unsigned kinds[] = {kind_of<A>::value..., SIMT_CPU_SCALAR};
    unsigned end = 0;
    for (unsigned i = 0; i < count; ++i) {
      const unsigned offset = (end + sizes[i] - 1) & ~(sizes[i] - 1);
      t.rows[i] = {offset, sizes[i], kinds[i]};
      end = offset + sizes[i];
    }
    t.rows[count] = {end, 0, 0};
    return t;
  }
  static constexpr table parameters = make();
};

template <class T>
inline __attribute__((always_inline)) T load(const unsigned char* at) {
  T value;
  __builtin_memcpy(const_cast<void*>(static_cast<const volatile void*>(&value)), at, sizeof(T));
  return value;
}

template <auto F, class T = decltype(F)> struct entry;
template <auto F, class... A>
struct entry<F, void (*)(A...)> {
  using sig = signature<A...>;
  template <unsigned... I>
  static inline __attribute__((always_inline)) void call(const unsigned char* arguments, indices<I...>) {
    (void)arguments;
    F(load<A>(arguments + sig::parameters.rows[I].offset)...);
  }
  static void run(const unsigned char* arguments) {
    call(arguments, typename make_indices<sizeof...(A)>::type{});
  }
  static constexpr simt_cpu_kernel describe(const char* name) {
    return {SIMT_CPU_ABI, name, &run, sig::parameters.rows, sig::count,
            sig::parameters.rows[sig::count].offset, SIMT_BLOCK, SIMT_WAVE};
  }
};

}  // namespace simt::cpu

extern "C" {
__attribute__((used, visibility("default"))) inline uint32_t assay_module_init(
    const simt_cpu_services* services) {
  simt::cpu::services = services;
  return SIMT_CPU_ABI;
}
}

#define SIMT_KERNEL(name, ...)                                                             \
  static void simt_body_##name(__VA_ARGS__);                                               \
  extern "C" {                                                                             \
  __attribute__((used, visibility("default"))) simt_cpu_kernel assay_kernel_##name =       \
      simt::cpu::entry<&simt_body_##name>::describe(#name);                                \
  }                                                                                        \
  static inline __attribute__((always_inline)) void simt_body_##name(__VA_ARGS__)
#define SIMT_KERNEL_RESIDENT(blocks, name, ...)          \
  static_assert((blocks) > 0, "no block would be resident"); \
  SIMT_KERNEL(name, __VA_ARGS__)

// The address of the static names the array, as its symbol does on a GPU: one array a site, whoever reaches it.
#define SIMT_SHARED(Type, name, count)                                                      \
  static const char simt_site_##name = 0;                                                   \
  Type* const name = static_cast<Type*>(                                                    \
      simt::cpu::services->shared(&simt_site_##name, sizeof(Type) * static_cast<uint64_t>(count)))

namespace simt {

SIMT_DEVICE int thread() {
  return static_cast<int>((cpu::stack_pointer() >> SIMT_CPU_SLOT_SHIFT) & (SIMT_CPU_THREADS - 1));
}
SIMT_DEVICE int block_x() { return static_cast<int>(cpu::block()->block_x); }
SIMT_DEVICE int block_y() { return static_cast<int>(cpu::block()->block_y); }
SIMT_DEVICE int block_z() { return static_cast<int>(cpu::block()->block_z); }
SIMT_DEVICE int grid_x() { return static_cast<int>(cpu::block()->grid_x); }
SIMT_DEVICE int grid_y() { return static_cast<int>(cpu::block()->grid_y); }

SIMT_DEVICE void sync() { cpu::services->sync(); }
SIMT_DEVICE void wave_sync() { cpu::services->wave_sync(); }

SIMT_DEVICE uint32_t bits(float v) { return __builtin_bit_cast(uint32_t, v); }
SIMT_DEVICE float from_bits(uint32_t v) { return __builtin_bit_cast(float, v); }
SIMT_DEVICE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
SIMT_DEVICE float sqrt(float v) { return __builtin_sqrtf(v); }

#if defined(SIMT_CPU_PORTABLE_HALF)
#define SIMT_CPU_HALF_BY_ARITHMETIC
#elif defined(__aarch64__) || (defined(__F16C__) && defined(__clang__))
#if defined(__aarch64__)
typedef __fp16 machine_half;  // GCC's C++ has _Float16 there from 13 only
#else
typedef _Float16 machine_half;
#endif
SIMT_DEVICE float half_to_float(uint16_t code) {
  return static_cast<float>(__builtin_bit_cast(machine_half, code));
}
SIMT_DEVICE uint16_t float_to_half(float v) {
  return __builtin_bit_cast(uint16_t, static_cast<machine_half>(v));
}
#elif defined(__F16C__)  // GCC has _Float16 on x86 from 12 only, and newer clangs lack these builtins
SIMT_DEVICE float half_to_float(uint16_t code) {
  typedef short v8hi __attribute__((vector_size(16)));
  return __builtin_ia32_vcvtph2ps(v8hi{static_cast<short>(code), 0, 0, 0, 0, 0, 0, 0})[0];
}
SIMT_DEVICE uint16_t float_to_half(float v) {
  typedef float v4sf __attribute__((vector_size(16)));
  return static_cast<uint16_t>(__builtin_ia32_vcvtps2ph(v4sf{v, 0, 0, 0}, 0)[0]);  // 0: nearest even
}
#else
#define SIMT_CPU_HALF_BY_ARITHMETIC
#endif
#if defined(SIMT_CPU_HALF_BY_ARITHMETIC)
SIMT_DEVICE float half_to_float(uint16_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x8000u) << 16;
  const uint32_t magnitude = code & 0x7FFFu;
  // Placing the half's exponent in a float's field is off by 127 - 15 = 112; the product by 2^112 is exact
  // for normal and subnormal halves alike.
  const uint32_t scaled = bits(from_bits(magnitude << 13) * from_bits(0x77800000u));
  const uint32_t special = 0x7F800000u | (magnitude << 13) | (magnitude > 0x7C00u ? 0x00400000u : 0u);
  return from_bits(sign | (magnitude >= 0x7C00u ? special : scaled));
}
SIMT_DEVICE uint16_t float_to_half(float v) {
  const uint32_t sign = (bits(v) >> 16) & 0x8000u;
  const uint32_t magnitude = bits(v) & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u)  // NaN: keep the payload's upper bits, quieted
    return static_cast<uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // 65520 and above
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the adder rounds: in 0.5 + |v| the last bit of the sum weighs 2^-24, a subnormal's step.
    const float sum = from_bits(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bits(sum) - 0x3F000000u));
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xFFFu + odd) >> 13));
}
#endif

SIMT_DEVICE void halves_to_floats(uint32_t word, float* values) {
  values[0] = half_to_float(static_cast<uint16_t>(word));
  values[1] = half_to_float(static_cast<uint16_t>(word >> 16));
}
SIMT_DEVICE void signed_bytes_to_floats(uint32_t word, float* values) {
  for (int i = 0; i < 4; ++i) values[i] = static_cast<float>(static_cast<int8_t>(word >> (8 * i)));
}
SIMT_DEVICE void soon(const void*) {}
SIMT_DEVICE int32_t dot4(uint32_t a, uint32_t b, int32_t c) {
  for (int i = 0; i < 32; i += 8) c += static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i);
  return c;
}
SIMT_DEVICE uint16_t fma1(uint32_t a, uint32_t b, uint32_t c) {
  return float_to_half(fma(half_to_float(static_cast<uint16_t>(a)), half_to_float(static_cast<uint16_t>(b)),
                           half_to_float(static_cast<uint16_t>(c))));
}
SIMT_DEVICE uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  return fma1(a, b, c) | static_cast<uint32_t>(fma1(a >> 16, b >> 16, c >> 16)) << 16;
}
SIMT_DEVICE uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t both = low | static_cast<uint64_t>(high) << 32;
  uint32_t v = 0;
  for (int i = 0; i < 32; i += 8)
    v |= static_cast<uint32_t>(both >> ((selector >> i & 7u) * 8) & 0xFFu) << i;
  return v;
}

SIMT_DEVICE uint32_t shuffle(uint32_t v, int source_lane) {
  return cpu::services->shuffle(v, static_cast<uint32_t>(source_lane) & (SIMT_WAVE - 1));
}
SIMT_DEVICE uint32_t shuffle_xor(uint32_t v, int mask) { return shuffle(v, thread() ^ mask); }

template <int N>
SIMT_DEVICE void wave_sum(float (&values)[N], int n) {
  cpu::services->wave_sum(values, n <= N ? n : -1);  // -1: the runtime reports it
}
template <int HIGH, int LOW, int N>
SIMT_DEVICE void butterfly(float (&values)[N], int n) {
  if (HIGH >= LOW && HIGH > 0) cpu::services->butterfly(values, n <= N ? n : -1, HIGH, LOW);
}
template <int HIGH, int N>
SIMT_DEVICE int spread_sum(float (&values)[N]) {
  butterfly<HIGH, 1>(values, N);
  int first = 0, count = N;
  for (int offset = HIGH; offset > 0 && count > 1; offset /= 2) {
    count /= 2;
    if ((thread() & offset) != 0) first += count;
  }
  for (int column = 0; column < count; ++column) values[column] = values[first + column];
  return first;
}
SIMT_DEVICE float wave_sum(float v) {
  cpu::services->wave_sum(&v, 1);
  return v;
}
SIMT_DEVICE float wave_max(float v) { return cpu::services->wave_max(v); }

}  // namespace simt
#endif
