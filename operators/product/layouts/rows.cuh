// What is added to rows of a product's result, and what comes back: a bias, and its gradient.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "primitives/early_launch.cuh"
#include "primitives/launch.h"
#include "primitives/neighbours.cuh"

namespace operators::product {

/// `batch` matrices (rows, cols), row-major: so many elements from a row to the next, and from a
/// matrix to the next.
template <typename T>
struct RowsOf {
  T* data;
  int64_t batch, rows, cols, stride, between;

  __host__ __device__ int64_t all_rows() const { return batch * rows; }
  /// Where matrices lie below each other nothing is divided.
  __device__ T* row(int64_t number) const {
    if (batch == 1 || between == rows * stride) return data + number * stride;
    return data + number / rows * between + number % rows * stride;
  }
};

/// Threads of a block: so many pieces of a row beside each other, and so many rows at a time.
inline constexpr int kPiecesOfBlock = 32, kRowsOfBlock = 8;

/// How rows are divided among blocks: a grid has `across` blocks for a row, and `slices` of rows.
struct RowSlices {
  unsigned across, slices;

  RowSlices(int64_t rows, int64_t pieces) {
    across = primitives::blocks_for(pieces, kPiecesOfBlock);
    const int64_t fill = std::max<int64_t>(1, 8 * primitives::multiprocessors() / across);
    slices = static_cast<unsigned>(
        std::min({fill, primitives::ceil_div(rows, int64_t{kRowsOfBlock}), int64_t{65535}}));
  }
  dim3 grid() const { return dim3(across, slices); }
  static dim3 block() { return dim3(kPiecesOfBlock, kRowsOfBlock); }
};

/// Adds a bias (cols) to each row. A thread has kWidth neighbouring columns of its slice's rows, so
/// that it reads the bias once.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kPiecesOfBlock* kRowsOfBlock)
    add_bias(const RowsOf<T> of, const T* bias) {
  using Pack = primitives::Neighbours<T, kWidth>;
  const int64_t col = (int64_t{blockIdx.x} * kPiecesOfBlock + threadIdx.x) * kWidth;
  if (col >= of.cols) return;
  const Pack own = *reinterpret_cast<const Pack*>(bias + col);
  const int64_t step = int64_t{gridDim.y} * kRowsOfBlock;
  for (int64_t row = int64_t{blockIdx.y} * kRowsOfBlock + threadIdx.y; row < of.all_rows();
       row += step) {
    Pack* const at = reinterpret_cast<Pack*>(of.row(row) + col);
    Pack sum = *at;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      sum.values[i] =
          static_cast<T>(static_cast<float>(sum.values[i]) + static_cast<float>(own.values[i]));
    }
    *at = sum;
  }
}

/// Copies rows into rows that are longer, with zeros at their ends. A thread has a column of its
/// slice's rows.
template <typename T>
__global__ void __launch_bounds__(kPiecesOfBlock* kRowsOfBlock)
    copy_rows(const RowsOf<const T> from, const RowsOf<T> to) {
  const int64_t col = int64_t{blockIdx.x} * kPiecesOfBlock + threadIdx.x;
  if (col >= to.cols) return;
  const int64_t step = int64_t{gridDim.y} * kRowsOfBlock;
  for (int64_t row = int64_t{blockIdx.y} * kRowsOfBlock + threadIdx.y; row < to.all_rows();
       row += step) {
    to.row(row)[col] = col < from.cols ? from.row(row)[col] : T();
  }
}

/// How many rows of a thread's are on their way together while it adds up, if these are loads of so
/// many bytes: of long ones fewer, which have room in the registers.
template <int kBytes>
inline constexpr int kRowsAhead = kBytes == 16 ? 4 : 8;

/// Sums up columns in fp32: to (slices, cols / folds). The rows are dealt out to the slices, kRows
/// at a time. A thread has kWidth neighbouring columns of one of these kRows rows,
/// and loads kRowsAhead of its rows before it adds the first: without that a load waits for the sum
/// before it. Of the kRows threads with the same columns, the first one adds up what all have
/// found, always in the same order. Each row of `of` is `folds` short rows one after the other:
/// then all of them are in one block.
template <typename From, typename To, int kWidth, int kRows>
__global__ void __launch_bounds__(kPiecesOfBlock* kRows, 1024 / (kPiecesOfBlock * kRows))
    sum_rows(const RowsOf<const From> of, int folds, To* to) {
  using Pack = primitives::Neighbours<From, kWidth>;
  constexpr int kAhead = kRowsAhead<sizeof(Pack)>;
  __shared__ float found[kRows][kWidth][kPiecesOfBlock];
  const int64_t col = (int64_t{blockIdx.x} * kPiecesOfBlock + threadIdx.x) * kWidth;
  const int64_t step = int64_t{gridDim.y} * kRows, rows = of.all_rows();
  primitives::start_next_kernel();
  primitives::wait_for_previous_kernel();
  float sum[kWidth] = {};
  for (int64_t row = int64_t{blockIdx.y} * kRows + threadIdx.y; row < rows && col < of.cols;
       row += kAhead * step) {
    Pack packs[kAhead] = {};
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t own = row + i * step;
      if (own < rows) packs[i] = *reinterpret_cast<const Pack*>(of.row(own) + col);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum[e] += static_cast<float>(packs[i].values[e]);
    }
  }
#pragma unroll
  for (int e = 0; e < kWidth; ++e) found[threadIdx.y][e][threadIdx.x] = sum[e];
  __syncthreads();
  const int64_t cols = of.cols / folds;
  if (threadIdx.y > 0 || col >= cols) return;
#pragma unroll
  for (int e = 0; e < kWidth; ++e) {
    float all = 0;
    for (int fold = 0; fold < folds; ++fold) {
      const int x = threadIdx.x + fold * static_cast<int>(cols) / kWidth;
      for (int i = 0; i < kRows; ++i) all += found[i][e][x];
    }
    to[int64_t{blockIdx.y} * cols + col + e] = static_cast<To>(all);
  }
}

template <typename T>
void launch_add_bias(const RowsOf<T>& to, const T* bias, cudaStream_t stream) {
  constexpr int kWidth = 16 / sizeof(T);
  const bool aligned = to.cols % kWidth == 0 && to.stride % kWidth == 0 && to.between % kWidth == 0;
  if (aligned) {
    const RowSlices slices(to.all_rows(), to.cols / kWidth);
    add_bias<T, kWidth><<<slices.grid(), slices.block(), 0, stream>>>(to, bias);
  } else {
    const RowSlices slices(to.all_rows(), to.cols);
    add_bias<T, 1><<<slices.grid(), slices.block(), 0, stream>>>(to, bias);
  }
}

template <typename T>
void launch_copy_rows(const RowsOf<const T>& from, const RowsOf<T>& to, cudaStream_t stream) {
  const RowSlices slices(to.all_rows(), to.cols);
  copy_rows<T><<<slices.grid(), slices.block(), 0, stream>>>(from, to);
}

/// How the rows are divided that launch_sum_rows() adds up, kWidth columns a thread: four blocks on
/// a multiprocessor have enough loads under way.
template <int kWidth>
RowSlices slices_to_sum(int64_t rows, int64_t cols) {
  RowSlices found(rows, primitives::ceil_div(cols, int64_t{kWidth}));
  const int64_t most = primitives::ceil_div(rows, int64_t{kRowsOfBlock} * kRowsAhead<1>);
  found.slices = static_cast<unsigned>(std::clamp<int64_t>(found.slices / 2, 1, most));
  return found;
}

/// How many short rows that follow each other without a gap launch_sum_rows() counts as one row, so
/// that most threads of a block have work.
template <int kWidth>
int folds_to_sum(int64_t rows, int64_t cols) {
  int folds = 1;
  while (2 * folds * cols <= kPiecesOfBlock * kWidth && rows % (2 * folds) == 0) folds *= 2;
  return folds;
}

/// How many floats launch_sum_rows() needs.
template <typename T>
size_t floats_to_sum_rows(int64_t rows, int64_t cols) {
  return slices_to_sum<16 / sizeof(T)>(rows, cols).slices * static_cast<size_t>(cols);
}
/// to (cols) = the sums of all rows, added up in fp32. `partial` has floats_to_sum_rows() floats.
template <typename T>
void launch_sum_rows(const RowsOf<const T>& from, float* partial, T* to, cudaStream_t stream) {
  constexpr int kWidth = 16 / sizeof(T);
  const int64_t all = from.all_rows();
  RowSlices slices = slices_to_sum<1>(all, from.cols);
  if ((from.cols | from.stride | from.between) % kWidth != 0) {
    sum_rows<T, float, 1, kRowsOfBlock>
        <<<slices.grid(), slices.block(), 0, stream>>>(from, 1, partial);
  } else {
    const bool dense =
        from.stride == from.cols && (from.batch == 1 || from.between == from.rows * from.stride);
    const int folds = dense ? folds_to_sum<kWidth>(all, from.cols) : 1;
    slices = slices_to_sum<kWidth>(all / folds, folds * from.cols);
    const int64_t cols = folds * from.cols;
    const RowsOf<const T> folded =
        folds == 1 ? from : RowsOf<const T>{from.data, 1, all / folds, cols, cols, 0};
    sum_rows<T, float, kWidth, kRowsOfBlock>
        <<<slices.grid(), slices.block(), 0, stream>>>(folded, folds, partial);
  }
  const RowsOf<const float> rows{partial, 1, slices.slices, from.cols, from.cols, 0};
  const unsigned across = primitives::blocks_for(from.cols, kPiecesOfBlock);
  const auto add_slices = [&]<int kRows>() {
    primitives::launch_clusters_on(stream, sum_rows<float, T, 1, kRows>, 1, true, dim3(across),
                                   dim3(kPiecesOfBlock, kRows), 0, rows, 1, to);
  };
  // Where there are many slices, a block has more of them at a time, and fewer loads wait for
  // others.
  if (slices.slices > 64) {
    add_slices.template operator()<32>();
  } else {
    add_slices.template operator()<kRowsOfBlock>();
  }
}

}  // namespace operators::product
