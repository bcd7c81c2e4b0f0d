// Keys and values of new tokens into the cache, converted to its storage types.
#include "flow.h"
#include "kv_type.h"

#if !defined(K_TYPE) || !defined(V_TYPE)
#error "kv_write.hip: define K_TYPE and V_TYPE (see kv_type.h)"
#endif
using K = kv::Storage<K_TYPE>;
using V = kv::Storage<V_TYPE>;

// k, v (count, width); keys, values (context, width). Grid: (ceil(width / block), count).
SIMT_KERNEL(kv_write, const float* k, const float* v, K::Element* keys, V::Element* values,
            const int32_t* step, int32_t width) {
    const int i = simt::block_x() * SIMT_BLOCK + simt::thread();
    if (i >= width) return;
    const int64_t source = static_cast<int64_t>(simt::block_y()) * width + i;
    const int64_t position = flow::position(step, simt::block_y());
    const int64_t target = (flow::cache_start(step, simt::block_y()) + position) * width + i;
    keys[target] = K::store(k[source]);
    values[target] = V::store(v[source]);
}
