// Products of fp16 or bf16 whose results are fp32: the epilogues that store the sums as they are.
#pragma once

#include <algorithm>
#include <cstdint>

#include "operators/product/product.cuh"
#include "primitives/fragments.cuh"

namespace operators::product {

/// Where such results go: a matrix (rows, cols), dense.
struct SumsInMemory {
  float* data;
  int rows, cols;

  /// Stores two neighbours of a row, of which the first is in column `col`, an even number.
  __device__ __forceinline__ void pair(int row, int col, float first, float second) const {
    if (row >= rows || col >= cols) return;
    float* const to = data + int64_t{row} * cols + col;
    if (cols % 2 == 0) {
      *reinterpret_cast<float2*>(to) = make_float2(first, second);
    } else {
      to[0] = first;
      if (col + 1 < cols) to[1] = second;
    }
  }
  __device__ __forceinline__ void one(int row, int col, float value) const {
    if (row < rows && col < cols) data[int64_t{row} * cols + col] = value;
  }
};

/// The epilogue on Hopper, for products of T. The copy engine does not help: as a thread holds the
/// sums, the lanes of a warp have 32 bytes of each of several rows, and these are whole sectors.
template <typename T>
struct StoreSums {
  static constexpr int kRightFactors = 1;
  SumsInMemory to;

#if HOPPER_CODE
  template <int kCols, int kBoxes>
  __device__ void operator()(const Sum<kCols>& sum, int row, int col,
                             const Outbox<T, kBoxes>&) const {
    const int row0 = row + Sum<kCols>::row(0), col0 = col + Sum<kCols>::col(0);
#pragma unroll
    for (int i = 0; i < Sum<kCols>::size(); i += 2) {
      to.pair(row0 + i / 2 % 2 * 8, col0 + i / 4 * 8, sum.element(i), sum.element(i + 1));
    }
  }

  /// The same transposed: neighbours of a thread's sum are below each other.
  template <int kRows, int kCount, int kBoxes, int kBoxRows>
  __device__ void operator()(const TransposedSum<kRows, kCount>& sum, int row, int col,
                             const Outbox<T, kBoxes, kBoxRows>&) const {
    using Of = TransposedSum<kRows, kCount>;
#pragma unroll
    for (int i = 0; i < Of::size(); ++i) {
      to.one(row + Of::row(i), col + Of::col(i), sum.element(i));
    }
  }
#endif
};

/// The epilogue on Hopper of products that may also come in slices. Then it is not used for the
/// sums of tiles, but `sums` for those of slices, and finish_slices adds these up (sliced.cuh).
template <typename T>
struct StoreRoundedOrSlices : StoreRounded<T> {
  StoreSums<T> sums = {};  ///< to the matrix of the first slice
  int64_t apart = 0;       ///< elements from a slice's matrix to the next one; 0: no slices
};

/// The epilogue on other GPUs.
template <typename T>
struct MmaStoreSums {
  SumsInMemory to;

  template <int kRows16, int kCols8>
  __device__ __forceinline__ void operator()(const float (&sum)[kRows16][kCols8][4], int row,
                                             int col) const {
    primitives::for_pairs(sum, row, col, to.rows, to.cols,
                          [&](int r, int c, float2 pair) { to.pair(r, c, pair.x, pair.y); });
  }
};

}  // namespace operators::product
