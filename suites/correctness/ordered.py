"""Kernels whose result rests on an order that HIP does not promise, or on an address."""

ORDERED = """
SIMT_KERNEL(last_block, int32_t* out) { if (simt::thread() == 3) out[1] = simt::block_x(); }
SIMT_KERNEL(own_place, int32_t* out) {
  out[simt::block_x() * SIMT_BLOCK + simt::thread()] = simt::thread();
}
SIMT_KERNEL(shared_by_waves, int32_t* out) {
  SIMT_SHARED(int32_t, box, SIMT_WAVE);
  box[simt::lane()] = simt::thread();
  simt::wave_sync();
  out[simt::thread()] = box[SIMT_WAVE - 1 - simt::lane()];
}
SIMT_KERNEL(wide_load_beside_its_boundary, int32_t* out) {
  if (simt::thread() == 5) out[0] = static_cast<int32_t>(simt::load16(out + 1).word[3]);
}
SIMT_KERNEL(wide_store_beside_its_boundary, int32_t* out) {
  SIMT_SHARED(int32_t, box, 8);
  if (simt::thread() == 5) simt::store16(box + 2, simt::load16(out));
}
"""
