// The small products of lesson 8, of matrices with E or W rows: M1 = x Lr^T and M2 = x Li^T before
// the large products, and after them the gradients of x, Lr and Li. They have few results and long
// sums. One block for each 64 x 64 results would leave most of a GPU idle.
#pragma once

#include "operators/gradients/gradients.h"
#include "primitives/approximate.cuh"
#include "primitives/async_copy.cuh"
#include "primitives/early_launch.cuh"
#include "primitives/fragments.cuh"
#include "primitives/launch.h"

namespace operators::gradients {

using namespace primitives;
using bf16 = __nv_bfloat16;

/// How a factor lies in memory.
enum class Lies { as_it_is, transposed };

struct Matrix {
  const bf16* data;
  int rows, cols;
};

// A block owns 32 x 32 results of a product of two small matrices, or of a sum of two such
// products. There is so little to do that what counts is how often a block waits for memory. So the
// copies of up to kSmallStages - 1 steps are under way at once. A step is 128 of the inner
// dimension, and each of the eight warps multiplies 16 of these, for all results. At the end the
// warps' sums are added up in shared memory, where a thread gets four neighbours: split-K in a
// block.
inline constexpr int kSmall = 32, kSmallDepth = 128, kSmallStages = 5, kSmallThreads = 256;
inline constexpr int kSmallTile = kSmall * kSmallDepth;                           // elements
inline constexpr int kSmallBytes = kSmallStages * 2 * kSmallTile * sizeof(bf16);  // 80 KB
inline constexpr int kSmallStride = kSmall + 8;  // floats: rows start in different banks
static_assert(kSmallThreads / 32 * kSmall * kSmallStride * sizeof(float) <= kSmallBytes);

// Where a thread's four results are, four neighbours in a row:
__device__ inline int small_row() { return blockIdx.y * kSmall + threadIdx.x / 8; }
__device__ inline int small_col() { return blockIdx.x * kSmall + threadIdx.x % 8 * 4; }

// Returns the thread's four results: the sum of the warps' sums, and of `first`. The warps' sums
// meet in the memory of the stages, which is free by then.
__device__ inline float4 add_warps(void* stages, const Sums<kSmall, kSmall>& sum, float4 first) {
  float* all = static_cast<float*>(stages);
  float* mine = all + threadIdx.x / 32 * kSmall * kSmallStride;
  __syncthreads();  // the tiles have been read
  for_pairs(sum, 0, 0, kSmall, kSmall, [&](int row, int col, float2 pair) {
    *reinterpret_cast<float2*>(mine + row * kSmallStride + col) = pair;
  });
  __syncthreads();
  const float* from = all + threadIdx.x / 8 * kSmallStride + threadIdx.x % 8 * 4;
#pragma unroll
  for (int warp = 0; warp < kSmallThreads / 32; ++warp) {
    const float4 quad = *reinterpret_cast<const float4*>(from + warp * kSmall * kSmallStride);
    add(first, quad);
  }
  return first;
}

// Returns the thread's four results of left[0] right[0], or of left[0] right[0] + left[1] right[1]
// if there are two `terms`. Four numbers at `first` are added, unless it is null. Either factor may
// be transposed in memory. `depth` is the inner dimension. With kEarly the left factors and `first`
// are results of the kernel before this one. While that one ends, copies of the right factors are
// on their way.
template <Lies kLeft, Lies kRight, bool kEarly>
__device__ float4 small_products(bf16* stages, const Matrix* left, const Matrix* right, int terms,
                                 int depth, const float* first) {
  constexpr int kDepth = kSmallDepth, kCopies = kSmallThreads;
  const int boxes = (depth + kDepth - 1) / kDepth, steps = terms * boxes;
  const int row0 = blockIdx.y * kSmall, col0 = blockIdx.x * kSmall;
  const auto stage_of = [&](int step) { return stages + step % kSmallStages * 2 * kSmallTile; };
  const auto copy_left = [&](int step) {
    const Matrix a = left[step / boxes];
    const int k0 = step % boxes * kDepth;
    if constexpr (kLeft == Lies::transposed) {
      copy_swizzled<kDepth, kSmall, kCopies>(stage_of(step), a.data, k0, row0, a.rows, a.cols);
    } else {
      copy_swizzled<kSmall, kDepth, kCopies>(stage_of(step), a.data, row0, k0, a.rows, a.cols);
    }
  };
  const auto copy_right = [&](int step) {
    bf16* tile = stage_of(step) + kSmallTile;
    const Matrix b = right[step / boxes];
    const int k0 = step % boxes * kDepth;
    if constexpr (kRight == Lies::transposed) {
      copy_swizzled<kSmall, kDepth, kCopies>(tile, b.data, col0, k0, b.rows, b.cols);
    } else {
      copy_swizzled<kDepth, kSmall, kCopies>(tile, b.data, k0, col0, b.rows, b.cols);
    }
  };

  if constexpr (kEarly) {
    // These copies are in one group with those of step 0: the first next() waits for all of them.
    for (int step = 0; step < kSmallStages - 1 && step < steps; ++step) copy_right(step);
    wait_for_previous_kernel();
  }
  const auto copy_step = [&](int step) {
    if (step >= steps) return;
    copy_left(step);
    if (!kEarly || step >= kSmallStages - 1) copy_right(step);
  };
  auto ahead = copies_ahead<kSmallStages>(copy_step);
  const float4 start = first ? *reinterpret_cast<const float4*>(first) : float4{};
  const int k = threadIdx.x / 32 * 16;
  Sums<kSmall, kSmall> sum = {};
  for (int step = 0; step < steps; ++step) {
    const bf16 *left_tile = stage_of(ahead.next()), *right_tile = left_tile + kSmallTile;
    unsigned a[kSmall / 16][4], b[kSmall / 16][4];
    if constexpr (kLeft == Lies::transposed) {
      load_left_transposed<kSmall>(a, left_tile, 0, k);
    } else {
      load_left<kDepth>(a, left_tile, 0, k);
    }
    if constexpr (kRight == Lies::transposed) {
      load_right_transposed<kDepth>(b, right_tile, k, 0);
    } else {
      load_right<kSmall>(b, right_tile, k, 0);
    }
    add_product(sum, a, b);
  }
  return add_warps(stages, sum, start);
}

// Where M1 and M2 lie in memory: column 32 g + c of row e of matrix i is element i * matrix + e *
// row + g * group + c. Columns that W does not fill, up to `cols`, are zero.
struct Layout {
  int64_t matrix;
  int row, group, cols;
};

// M becomes M1 = x Lr^T and M2 = x Li^T, each by a layer of blocks (blockIdx.z). A third layer
// computes -M2.
__global__ void __launch_bounds__(kSmallThreads)
    associate(GradientsOperands in, bf16* M, Layout layout) {
  // The next kernel starts early only on Hopper. It has other things to load first, and waits
  // before it reads M.
  start_next_kernel();
  extern __shared__ __align__(128) bf16 stages[];
  const Matrix left = {in.x, in.E, in.W}, right = {blockIdx.z == 0 ? in.Lr : in.Li, in.W, in.W};
  const float4 sum = small_products<Lies::as_it_is, Lies::transposed, false>(stages, &left, &right,
                                                                             1, in.W, nullptr);
  const int row = small_row(), col = small_col();
  if (row >= in.E || col >= layout.cols) return;
  const float sign = blockIdx.z == 2 ? -1 : 1;
  bf16* to = M + blockIdx.z * layout.matrix + blockIdx.x * static_cast<int64_t>(layout.group);
  *reinterpret_cast<uint2*>(to + static_cast<int64_t>(row) * layout.row + col % kSmall) =
      pack4<bf16>(make_float4(sign * sum.x, sign * sum.y, sign * sum.z, sign * sum.w));
}

// Adds up the partial sums, in the same order in every run. dM (2, E, W) becomes dM1 and dM2 in
// bf16, as factors of the last products. D (E, W) is in fp32. `count` is E W. The four warps of a
// block have the same 128 elements, 4 neighbours a lane. Each warp adds up every fourth slice, so
// that many loads are on their way at once. Then warp 0 adds up the warps' sums.
inline constexpr int kSliceWarps = 4;
__global__ void __launch_bounds__(32 * kSliceWarps)
    add_slices(const float* partials, int slices, bf16* dM, float* D, size_t count) {
  wait_for_previous_kernel();
  start_next_kernel();
  __shared__ float4 sums[kSliceWarps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const size_t i = (static_cast<size_t>(blockIdx.x) * 32 + lane) * 4;
  const bool inside = i < 3 * count;
  float4 sum = {};
  // A thread that has nothing to add begins behind the last slice.
#pragma unroll 8
  for (int slice = inside ? warp : slices; slice < slices; slice += kSliceWarps) {
    const float4 quad = *reinterpret_cast<const float4*>(partials + slice * 3 * count + i);
    add(sum, quad);
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || !inside) return;
  for (int other = 1; other < kSliceWarps; ++other) {
    const float4 quad = sums[other][lane];
    add(sum, quad);
  }
  if (i < 2 * count) {
    *reinterpret_cast<uint2*>(dM + i) = pack4<bf16>(sum);
  } else {
    *reinterpret_cast<float4*>(D + i - 2 * count) = sum;
  }
}

// dLr = dM1^T x, dLi = dM2^T x, dx = D + dM1 Lr + dM2 Li: the small products again; blockIdx.z says
// which.
__global__ void __launch_bounds__(kSmallThreads)
    finish_backward(GradientsOperands in, const bf16* dM, const float* D) {
  extern __shared__ __align__(128) bf16 stages[];
  const bool is_dx = blockIdx.z == 2;
  const int rows = is_dx ? in.E : in.W, row = small_row(), col = small_col();
  if (static_cast<int>(blockIdx.y) * kSmall >= rows) return;
  const Matrix dM1 = {dM, in.E, in.W}, dM2 = {dM + static_cast<size_t>(in.E) * in.W, in.E, in.W};
  const bool inside = row < rows && col < in.W;
  const size_t at = static_cast<size_t>(row) * in.W + col;
  float4 sum;
  if (is_dx) {
    const Matrix left[2] = {dM1, dM2}, right[2] = {{in.Lr, in.W, in.W}, {in.Li, in.W, in.W}};
    sum = small_products<Lies::as_it_is, Lies::as_it_is, true>(stages, left, right, 2, in.W,
                                                               inside ? D + at : nullptr);
  } else {
    const Matrix left = blockIdx.z == 0 ? dM1 : dM2, right = {in.x, in.E, in.W};
    sum = small_products<Lies::transposed, Lies::as_it_is, true>(stages, &left, &right, 1, in.E,
                                                                 nullptr);
  }
  bf16* to = is_dx ? in.d_x : blockIdx.z == 0 ? in.d_Lr : in.d_Li;
  if (inside) *reinterpret_cast<uint2*>(to + at) = pack4<bf16>(sum);
}

/// To be called before these kernels are launched.
inline void allow_small_products() {
  allow_shared_bytes(associate, kSmallBytes);
  allow_shared_bytes(finish_backward, kSmallBytes);
}

/// For a kernel of small products with `layers` results of up to rows x cols.
inline dim3 small_blocks(int64_t rows, int64_t cols, unsigned layers) {
  return dim3(blocks_for(cols, kSmall), blocks_for(rows, kSmall), layers);
}

/// Matrices (E, W), one after another.
inline Layout dense(const GradientsShape& shape) {
  const int W = static_cast<int>(shape.W);
  return {.matrix = shape.coefficients(), .row = W, .group = kSmall, .cols = W};
}

/// Launches what follows the partial sums (slices, 3, E, W), early: add_slices, which leaves dM and
/// D, and finish_backward.
inline void launch_rest(cudaStream_t stream, const GradientsOperands& in, const float* partials,
                        int slices, bf16* dM, float* D) {
  const size_t count = static_cast<size_t>(in.E) * in.W;
  const dim3 last = small_blocks(std::max(in.E, in.W), in.W, 3);
  launch_clusters_on(stream, add_slices, 1, true,
                     blocks_for(3 * static_cast<int64_t>(count), 4 * 32), 32 * kSliceWarps, 0,
                     partials, slices, dM, D, count);
  launch_clusters_on(stream, finish_backward, 1, true, last, kSmallThreads, kSmallBytes, in, dM, D);
}

}  // namespace operators::gradients
