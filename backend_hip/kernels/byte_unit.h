// The matrix unit's products of signed bytes: D (16 x COLUMNS, int32) += A (16 x 32) B (32 x COLUMNS), exactly.
//
// Operands are made in registers by a whole wave. PARTS lanes share a line (a row of A, or a column of B), of
// which each holds WORDS words of four bytes. Which k stand there is the caller's, as long as both operands
// agree.
//
// A's rows are the signed digits of four rows of numbers ("heads"), in base 256: digit 3 is the highest. A
// lane's sums are PAIRS pairs of neighbouring digits' products with one column.
//
//   part()                            this lane's part of its lines
//   row_head(i) row_digit(i)          of row i < ROWS that this lane holds
//   column()                          the column that this lane holds
//   Unit unit;  unit.multiply_add(sums, rows, columns)   int32_t sums[2 * PAIRS], uint32_t rows[ROWS][WORDS],
//                                     columns[WORDS]; every lane must reach it. Two units of one kernel are
//                                     parted by a barrier of the block
//   pair(sums, p)                     upper digit * 256 + lower digit
//   pair_head(p) pair_level(p) pair_column(p)   where it belongs; level 0: digits 3 and 2, 1: digits 1 and 0.
//                                     The column depends on p % PAIR_COLUMNS alone
#pragma once
#include "simt.h"

namespace byte_unit {

constexpr int DEPTH = 32;  // k of a product
constexpr int HEADS = 4;
constexpr int DIGITS = 4;

}  // namespace byte_unit

#if !defined(__CUDACC__) && !defined(__CUDACC_RTC__)
#include "byte_unit_gfx12.h"  // here, because a header comes once in a flattened source
#endif
#if defined(SIMT_CPU)
#include "byte_unit_cpu.h"
#elif defined(__CUDACC__) || defined(__CUDACC_RTC__)
#include "byte_unit_cuda.h"
#else
#include "byte_unit_amd.h"
#endif

namespace byte_unit {

constexpr int WORDS = DEPTH / PARTS / 4;

}  // namespace byte_unit
