// The words of kernels that do not need Hopper. A warp loads the fragments of both factors from
// swizzled tiles in shared memory to its registers, multiplies them, and writes the sums back. The
// instructions below these words are in primitives/mma.cuh. Hopper's words are in
// primitives/hopper/tiles.cuh.
//
// All of these functions are for a whole warp. "A tile with kCols columns" is swizzled, as
// swizzle<kCols>() says.
#pragma once

#include <cuda_bf16.h>

#include "primitives/mma.cuh"

namespace primitives {

/// What one lane holds of a warp's kRows x kCols sums, as mma_m16n8k16 leaves it.
template <int kRows, int kCols>
using Sums = float[kRows / 16][kCols / 8][4];

/// Loads the fragments of a left factor a from a tile with kCols columns: 16 kCount rows, from
/// `row` on, and 16 columns, from k on. Lane l passes row l % 16 of each 16 rows: lanes 0 to 15 its
/// left half, lanes 16 to 31 its right half. So matrices 0 to 3 of an ldmatrix are top left, bottom
/// left, top right and bottom right, as mma_m16n8k16 wants them.
template <int kCols, typename T, int kCount>
__device__ inline void load_left(unsigned (&a)[kCount][4], const T* tile, int row, int k) {
  const int lane = threadIdx.x % 32;
  const T* from = tile + (swizzle<kCols>(row + lane % 16, lane / 16 * 8) ^ k);
#pragma unroll
  for (int i = 0; i < kCount; ++i) ldmatrix_x4(a[i], from + 16 * i * kCols);
}

/// The same where memory has the transpose of a: `row` is a column of the tile, k is a row of it,
/// and ldmatrix transposes on the way to the registers.
template <int kCols, typename T, int kCount>
__device__ inline void load_left_transposed(unsigned (&a)[kCount][4], const T* tile, int row,
                                            int k) {
  const int lane = threadIdx.x % 32;
  const int from = swizzle<kCols>(lane % 8 + lane / 16 * 8, row + lane / 8 % 2 * 8);
#pragma unroll
  for (int i = 0; i < kCount; ++i) ldmatrix_x4_trans(a[i], tile + (from ^ 16 * i) + k * kCols);
}

/// Loads the fragments of a right factor b: 16 rows, from k on, and 16 kCount columns, from `col`
/// on. A right factor's fragments are held the other way round (see mma.cuh). So ldmatrix has to
/// transpose a b that lies row by row, and not a b that lies column by column.
template <int kCols, typename T, int kCount>
__device__ inline void load_right(unsigned (&b)[kCount][4], const T* tile, int k, int col) {
  const int lane = threadIdx.x % 32;
  const int from = swizzle<kCols>(lane % 16, col + lane / 16 * 8);
#pragma unroll
  for (int j = 0; j < kCount; ++j) ldmatrix_x4_trans(b[j], tile + (from ^ 16 * j) + k * kCols);
}

/// The same where memory has the transpose of b: `col` is a row of the tile, k is a column of it.
template <int kCols, typename T, int kCount>
__device__ inline void load_right_transposed(unsigned (&b)[kCount][4], const T* tile, int k,
                                             int col) {
  const int lane = threadIdx.x % 32;
  const T* from = tile + (swizzle<kCols>(col + lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8) ^ k);
#pragma unroll
  for (int j = 0; j < kCount; ++j) ldmatrix_x4(b[j], from + 16 * j * kCols);
}

/// Adds the product a b to the sums.
template <typename T = __nv_bfloat16, int kRows, int kCols>
__device__ inline void add_product(float (&sum)[kRows][2 * kCols][4], const unsigned (&a)[kRows][4],
                                   const unsigned (&b)[kCols][4]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < 2 * kCols; ++j) {
      mma_m16n8k16<T>(sum[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
  }
}

/// Changes the sign of a left factor of bf16: the tensor cores only add, so sum -= a b is sum +=
/// (-a) b. The sign is the top bit of each of the two numbers in a register.
template <int kCount>
__device__ inline void negate(unsigned (&negative)[kCount][4], const unsigned (&a)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) negative[i][j] = a[i][j] ^ 0x80008000u;
  }
}

/// A lane's results are pairs of neighbours in a row. Pair (i, j) is in row 8 i + lane / 4, columns
/// 8 j + 2 (lane % 4) and the next one. pair_of() returns it. pair_in() returns where it lies in a
/// tile, if the warp's results begin at (row, col) of the tile. unpack2() makes two floats of a
/// pair of bf16.
template <int kRows, int kCols>
__device__ inline float2 pair_of(const float (&sum)[kRows][kCols][4], int i, int j) {
  return make_float2(sum[i / 2][j][i % 2 * 2], sum[i / 2][j][i % 2 * 2 + 1]);
}
template <int kCols, typename T>
__device__ inline unsigned* pair_in(T* tile, int row, int col, int i, int j) {
  const int lane = threadIdx.x % 32;
  return reinterpret_cast<unsigned*>(
      tile + swizzle<kCols>(row + 8 * i + lane / 4, col + 8 * j + lane % 4 * 2));
}
__device__ inline float2 unpack2(unsigned pair) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
}

/// Rounds a warp's sums to T, and writes them into a tile with kCols columns, from (row, col) on.
template <int kCols, typename T, int kRows16, int kCols8>
__device__ inline void to_tile(T* tile, int row, int col, const float (&sum)[kRows16][kCols8][4]) {
#pragma unroll
  for (int i = 0; i < 2 * kRows16; ++i) {
#pragma unroll
    for (int j = 0; j < kCols8; ++j) {
      const float2 pair = pair_of(sum, i, j);
      *pair_in<kCols>(tile, row, col, i, j) = pack2<T>(pair.x, pair.y);
    }
  }
}

/// Calls visit(row, col, pair) for each of the lane's pairs that lies inside of a matrix of rows x
/// cols. The warp's sums begin at (row0, col0) of that matrix.
template <int kRows16, int kCols8, typename Visit>
__device__ inline void for_pairs(const float (&sum)[kRows16][kCols8][4], int row0, int col0,
                                 int rows, int cols, Visit visit) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2 * kRows16; ++i) {
#pragma unroll
    for (int j = 0; j < kCols8; ++j) {
      const int row = row0 + 8 * i + lane / 4, col = col0 + 8 * j + lane % 4 * 2;
      if (row < rows && col < cols) visit(row, col, pair_of(sum, i, j));
    }
  }
}

/// Stores a warp's kRows x kCols results to `to` (rows x cols), from (row0, col0) on. pair(i, j)
/// computes a pair of them, rounded. From its fragments a lane could only store 4 bytes at a time.
/// So the results go to `staging` first, shared memory of the warp's own and of the same size, and
/// leave from there as 16 bytes a lane.
template <int kRows, int kCols, typename T, typename Pair>
__device__ inline void store_results(T* staging, T* to, int64_t row0, int col0, int64_t rows,
                                     int cols, Pair pair) {
  __syncwarp();  // what was here before has left
#pragma unroll
  for (int i = 0; i < kRows / 8; ++i) {
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j) *pair_in<kCols>(staging, 0, 0, i, j) = pair(i, j);
  }
  __syncwarp();
#pragma unroll
  for (int i = threadIdx.x % 32 * 8; i < kRows * kCols; i += 32 * 8) {
    const int row = i / kCols, col = i % kCols;
    if (row0 + row < rows && col0 + col < cols) {
      *reinterpret_cast<uint4*>(to + (row0 + row) * cols + col0 + col) =
          *reinterpret_cast<const uint4*>(staging + swizzle<kCols>(row, col));
    }
  }
}

}  // namespace primitives
