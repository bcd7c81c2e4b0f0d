// Keys and values of new tokens into the cache, converted to its storage types (kv_type.h).
#include "flow.h"
#include "kv_store.h"

#if !defined(K_TYPE) || !defined(V_TYPE)
#error "kv_write.hip: define K_TYPE and V_TYPE (see kv_type.h)"
#endif
using K = kv::Storage<K_TYPE>;
using V = kv::Storage<V_TYPE>;

// k, v (count, width); keys, values: cache rows. Grid: (ceil(width / block), count).
SIMT_KERNEL(kv_write, const float* k, const float* v, K::Element* keys, V::Element* values,
            const int32_t* step, int32_t width, int32_t head_size, int32_t cache_rows) {
    const int i = simt::block_x() * SIMT_BLOCK + simt::thread();
    if (i >= width) return;
    const int64_t source = static_cast<int64_t>(simt::block_y()) * width + i;
    const int64_t position = flow::position(step, simt::block_y());
    const int64_t row = flow::cache_start(step, simt::block_y()) + position;
    kv::write<K>(keys, k[source], row, i, width, head_size, cache_rows);
    kv::write<V>(values, v[source], row, i, width, head_size, cache_rows);
}
