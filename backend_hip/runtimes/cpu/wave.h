// Reductions over one wave's lanes, done by one lane for all.
#pragma once

#include <cstdint>

// values[lane][column], columns < n: replaced by the sum over `lanes` (32 or 64) lanes. The tree is the
// butterfly's: v[l] + v[l ^ offset] for offset = lanes/2 .. 1. Addition commutes, so the two partners of a
// step hold equal bits and half of the lanes need computing.
void sum_wave(float* const* values, uint32_t lanes, uint32_t n);

// The steps offset = high .. low of that butterfly alone: lanes keep what differs between groups.
void butterfly_wave(float* const* values, uint32_t lanes, uint32_t n, uint32_t high, uint32_t low);

// Bits of the maximum; a NaN if any value is one; +0 above -0.
uint32_t max_wave(const uint32_t* bits, uint32_t lanes);
