// One head by one block: its RMS norm where NORMED, then RoPE.
#pragma once
#include "rms.h"

#if !defined(ROPE_NEOX) || !defined(NORMED)
#error "rope_head.h: define ROPE_NEOX (as rope.hip) and NORMED (0 or 1)"
#endif
static_assert(SIMT_BLOCK == rms::THREADS, "one group of threads a head");

namespace rope_head {

constexpr int LARGEST = 512;  // elements

// head = value(i) for i < size, normed with `weight` where NORMED. Every thread must reach it.
template <class Value>
SIMT_DEVICE void fill(float* head, Value value, const float* weight, int size, float epsilon) {
#if NORMED
    float squares = 0.0f;
    for (int i = simt::thread(); i < size; i += SIMT_BLOCK) {
        head[i] = value(i);
        squares = simt::fma(head[i], head[i], squares);
    }
    const float scale = rms::inverse_rms(squares, size, epsilon);
    for (int i = simt::thread(); i < size; i += SIMT_BLOCK) head[i] = head[i] * scale * weight[i];
#else
    (void)weight;
    (void)epsilon;
    for (int i = simt::thread(); i < size; i += SIMT_BLOCK) head[i] = value(i);
#endif
    simt::sync();
}

// Calls store(i, value) for each element of the head turned by the angles of a position, whose `half`
// cosines and sines are given; elements from 2 * half on stay as they are.
template <class Store>
SIMT_DEVICE void rotate(const float* head, const float* cosine, const float* sine, int size, int half,
                        Store store) {
    for (int j = simt::thread(); j < half; j += SIMT_BLOCK) {
#if ROPE_NEOX
        const int first = j;
        const int second = j + half;
#else
        const int first = 2 * j;
        const int second = 2 * j + 1;
#endif
        const float c = cosine[j];
        const float s = sine[j];
        const float a = head[first];
        const float b = head[second];
        store(first, a * c - b * s);
        store(second, a * s + b * c);
    }
    for (int i = 2 * half + simt::thread(); i < size; i += SIMT_BLOCK) store(i, head[i]);
}

}  // namespace rope_head
