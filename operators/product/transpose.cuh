// A matrix transposed, for products whose factors lie the other way round: the products of this
// folder read both factors row by row.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "primitives/launch.h"

namespace operators::product {

/// A matrix (rows, cols), row-major, `stride` elements from a row to the next.
template <typename T>
struct Strided {
  T* data;
  int64_t rows, cols, stride;
};

inline constexpr int kTransposeTile = 32, kTransposeRows = 8;

/// to = from^T for each of a batch, gridDim.y of them, whose matrices are so many elements apart;
/// what `to` has beyond from^T becomes 0. A block has a tile of 32 x 32, which is read and written
/// by rows, 32 neighbours a warp, and changes places in shared memory. The tile's rows are an odd
/// number of elements apart, so that a column of it lies in other banks.
template <typename T>
__global__ void __launch_bounds__(kTransposeTile* kTransposeRows)
    transpose(Strided<const T> from, Strided<T> to, int64_t from_between, int64_t to_between) {
  from.data += blockIdx.y * from_between;
  to.data += blockIdx.y * to_between;
  __shared__ T tile[kTransposeTile][kTransposeTile + 1];
  const int64_t tiles = (to.cols + kTransposeTile - 1) / kTransposeTile;  // of a row of `to`
  const int64_t row0 = blockIdx.x % tiles * kTransposeTile;               // of `from`
  const int64_t col0 = blockIdx.x / tiles * kTransposeTile;
  for (int i = threadIdx.y; i < kTransposeTile; i += kTransposeRows) {
    const int64_t row = row0 + i, col = col0 + threadIdx.x;
    const bool inside = row < from.rows && col < from.cols;
    tile[i][threadIdx.x] = inside ? from.data[row * from.stride + col] : T();
  }
  __syncthreads();
  for (int i = threadIdx.y; i < kTransposeTile; i += kTransposeRows) {
    const int64_t row = col0 + i, col = row0 + threadIdx.x;  // of `to`
    if (row < to.rows && col < to.cols) to.data[row * to.stride + col] = tile[threadIdx.x][i];
  }
}

template <typename T>
void launch_transpose(const Strided<const T>& from, const Strided<T>& to, cudaStream_t stream,
                      unsigned count = 1, int64_t from_between = 0, int64_t to_between = 0) {
  const int64_t blocks = primitives::ceil_div(to.rows, int64_t{kTransposeTile}) *
                         primitives::ceil_div(to.cols, int64_t{kTransposeTile});
  transpose<T><<<dim3(static_cast<unsigned>(blocks), count), dim3(kTransposeTile, kTransposeRows),
                 0, stream>>>(from, to, from_between, to_between);
}

}  // namespace operators::product
