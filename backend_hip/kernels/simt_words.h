// What simt.h says about words, where the compiler is clang or GCC: memcpy of a known alignment becomes one
// load or store. simt.h alone includes it, behind simt_amd.h or simt_cpu.h: flattened, a header comes once.
#ifndef ASSAY_SIMT_WORDS_H
#define ASSAY_SIMT_WORDS_H

namespace simt {

SIMT_DEVICE uint32_t masked_or(uint32_t word, uint32_t mask, uint32_t bits) {
  return (word & mask) | bits;
}
SIMT_DEVICE uint32_t selector(int i0, int i1, int i2, int i3) {
  return static_cast<uint32_t>(i0 | i1 << 8 | i2 << 16 | i3 << 24);
}

template <int ALIGNMENT>
SIMT_DEVICE void require_aligned([[maybe_unused]] const void* p) {
#if defined(SIMT_CPU)
  if (reinterpret_cast<uint64_t>(p) % ALIGNMENT != 0) [[unlikely]] cpu::services->misaligned(p, ALIGNMENT);
#endif
}

template <int ALIGNMENT, class T>
SIMT_DEVICE T load_as(const void* p) {
  require_aligned<ALIGNMENT>(p);
  T v;
  __builtin_memcpy(&v, __builtin_assume_aligned(p, ALIGNMENT), sizeof v);
  return v;
}
SIMT_DEVICE Quad load16(const void* p) { return load_as<16, Quad>(p); }
SIMT_DEVICE Quad load16_at_even(const void* p) { return load_as<2, Quad>(p); }
SIMT_DEVICE void store16(void* p, const Quad& v) {
  require_aligned<16>(p);
  __builtin_memcpy(__builtin_assume_aligned(p, 16), &v, sizeof v);
}
SIMT_DEVICE Pair load8(const void* p) { return load_as<8, Pair>(p); }
SIMT_DEVICE uint32_t load4(const void* p) { return load_as<4, uint32_t>(p); }
template <int BITS>
SIMT_DEVICE float field_to_float(uint32_t word, int shift) {
  return static_cast<float>(static_cast<int32_t>(word >> shift & ((1u << BITS) - 1u)));
}

}  // namespace simt
#endif
