// The matrix unit's fragments: D (16 x 16, float) += A (16 x 16 halves) B (16 x 16 halves).
//
// A holds 16 weight rows of 16 k, B 16 activation columns of 16 k; both lie in block-shared memory with
// k contiguous ("lines"), as they are read. A whole wave works on one fragment; which lane holds what
// is the platform's secret, so results are reached through row(i) and column(i) only.
//
//   fragment::Rows a; Columns b; Sums d;      one lane's part of each
//   load(a, lines, stride)   lines: line 0, k 0, in shared memory; stride: halves between lines. Lines
//                            start at multiples of 16 bytes. stride / 8 odd: no bank conflicts.
//   load<Layout>(a, lines, quad)   the same from k 8 quad on of lines that Layout arranges: eight halves from
//                            lines + Layout::place(line 0 .. 15, quad); quad is even
//   zero(d)   multiply_add(d, a, b)   every lane of the wave must reach load and multiply_add
//   d.value(i), row(i), column(i) for i < SUMS   this lane's results and where they belong
//   halves(low, high)        two floats rounded to nearest even as a pair of halves, low bits first
//
// For operands that are made in registers, PARTS lanes share a line (a row of weights, or a column of
// activations), and a lane holds LINES lines of each operand, of each its part of the 16 k as WORDS
// pairs of halves. Which k stand there is the caller's, as long as both operands agree.
//
//   Own a, b;  a.word[i][n]   pair n of line i;  part() line(i)   this lane's part; line i's number
//   Unit unit;  unit.multiply_add(sums, rows, columns)   float sums[SUMS]; every lane must reach it
//   own_line(i) own_column(i)   of sum i: the line held here that is its row, and its column
//
// Products of halves are exact in float. Their sum's order and rounding are the unit's own (CPU: fma in
// ascending k), so results agree between platforms within a bound and not bit for bit.
#pragma once
#include "simt.h"

#if !defined(__CUDACC__) && !defined(__CUDACC_RTC__)
#include "fragment_gfx12.h"  // here, because a header comes once in a flattened source
#endif
#if defined(SIMT_CPU)
#include "fragment_cpu.h"
#elif defined(__CUDACC__) || defined(__CUDACC_RTC__)
#include "fragment_cuda.h"
#else
#include "fragment_amd.h"
#endif
