// 9. softmax(x W), and how to compare like with like
//
//     probs(b, c) = exp(l(b, c) - m(b)) / sum over j of exp(l(b, j) - m(b))
//     logits l = x W, m(b) = the maximum of row b
//     x (B, D), W (D, C), probs (B, C): fp32, row-major
//
// The last layer of a classifier. What is computed is 2 B D C operations; what has to move is x, W
// and probs, 4 (B D + D C + B C) bytes. Small layers are limited by neither but by launches, and by
// waiting for one another's data; for large ones arithmetic is the limit. Unfused, one kernel
// writes the B C logits and another one reads them; fused, they never leave the chip. But softmax
// needs whole rows: every element of a row depends on the maximum and on the sum of all of it.
// Whoever wants to fuse has to bring a row's logits together, wherever on the GPU they were
// computed, and that is what tells the kernels below apart.
//
// "Fused is faster than cuBLAS + softmax" compares two things at once: whose product is better, and
// what fusion saves. So there are three ways:
//
//     (1) library   cuBLAS, then the best softmax kernel that we have
//     (2) unfused   our product, then the same softmax kernel
//     (3) fused     our product and softmax in one launch
//
// (2) against (3) is fusion alone: the product is the same kernel, only its epilogue differs. (1)
// against (2) is the quality of the library. And there are two sets of tables, never mixed: true
// fp32 accuracy, and TF32, where the operands of the product are rounded to 10 bits of mantissa so
// that tensor cores can multiply them. Both accumulate in fp32. The kernels:
//
//     fused rows      a block a row: simple; every block reads all of W
//     ..., D split    few columns: the row's inputs are spread over the block's threads as well
//     fused tiles     a block has all columns of 8 to 32 rows (all_columns() below); D is spread
//                     over its warps and, if there are too few rows to fill the GPU, over several
//                     blocks
//     fused online    C of thousands: a row is spread over several blocks (column_tiles()), which
//                     write exponentials relative to their own maximum; the last of them to end
//                     corrects them
//
// and on Hopper, with its copy engine and wgmma:
//
//     fused cluster   the blocks that share D are a cluster (cluster_columns()): their parts of the
//                     sums go straight into each other's shared memory
//     fused exchange  the blocks that share a row run at the same time (exchange_columns()), keep
//                     their logits in registers, and tell each other only maximum and sum
//     fused streamed  where rows of W are not aligned to 16 bytes, or too long for fused exchange:
//                     W goes from memory straight to registers (streamed_columns()). Only half
//                     fused: logits are written, and a second kernel goes on from there
//
// "unfused tiles" and so on are the same kernels with another epilogue, which writes the logits. In
// the fp32 tables tiles and online multiply on the CUDA cores and, as "3xTF32", on tensor cores:
// each operand as the sum of two TF32 numbers, and three products instead of one. Its error is held
// to the bound of fp32. Of Hopper's, cluster and exchange are there, as 3xTF32. All of these
// kernels and the softmax are launched early (common/early_launch.cuh): here the time between two
// kernels counts.
//
// With infinities: a logit of -inf has the probability 0. A row of only -inf has no maximum to
// subtract, and becomes NaN, in the reference, too.
//
// --all adds the fp32 tables, and more shapes where none is given. --hard-rows puts infinities and
// huge numbers among the logits. What a reader may try next stands in
// exercises/9_softmax_training.cu: cross-entropy, the backward pass, fp16 inputs.

#include <array>
#include <cuda/atomic>
#include <optional>

#include "common/async_copy.cuh"
#include "common/early_launch.cuh"
#include "common/hopper.cuh"
#include "common/mma.cuh"
#include "common/row_parts.cuh"
#include "common/softmax.h"

// ---- Maximum and sum ----------------------------------------------------------------------------

// What softmax has to know of a row, or of a part of it: the largest logit, and the sum of
// exp(logit - largest). Of nothing at all: -inf and 0.
struct MaxSum {
  float largest, sum;
};

// What exponentials are relative to: the maximum, unless that is -inf; then all of them are 0.
__device__ float base_of(float largest) { return largest == minus_infinity() ? 0 : largest; }

// The factor by which exponentials relative to `from` become relative to `to`. Of two -inf: 1.
__device__ float rebase(float from, float to) { return from == to ? 1 : expf(from - to); }

// Two parts of a row together. This is "online softmax": no part has to know the others' maximum
// beforehand.
__device__ MaxSum merge(MaxSum a, MaxSum b) {
  const float largest = fmaxf(a.largest, b.largest);
  return {largest, a.sum * rebase(a.largest, largest) + b.sum * rebase(b.largest, largest)};
}

__device__ MaxSum warp_merge(MaxSum part) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) {
    part = merge(part, {__shfl_xor_sync(kAllLanes, part.largest, i),
                        __shfl_xor_sync(kAllLanes, part.sum, i)});
  }
  return part;
}

// All parts of a block of kWarps warps, of which `part` is this warp's.
template <int kWarps>
__device__ MaxSum block_merge(MaxSum part) {
  __shared__ MaxSum parts[kWarps];
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = part;
  __syncthreads();
  MaxSum all = parts[0];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) all = merge(all, parts[i]);
  return all;
}

// ---- The softmax kernels of (1) and (2) ---------------------------------------------------------

constexpr int kSoftmaxThreads = 256;

// kGroup threads, a warp or the block, share a row of at most kGroup * kValues logits and keep it
// in registers: each logit is read once and each probability written once, 16 bytes at a time if C
// is a multiple of 4 (kWidth = 4). A thread has kWidth neighbours, and then again every kGroup *
// kWidth columns.
template <int kGroup, int kValues, int kWidth>
__global__ void __launch_bounds__(kSoftmaxThreads)
    softmax_rows(const float* logits, float* probs, int B, int C) {
  start_next_kernel();
  wait_for_previous_kernel();
  const int row = blockIdx.x * (kSoftmaxThreads / kGroup) + threadIdx.x / kGroup;
  if (row >= B) return;
  const float* from = logits + static_cast<size_t>(row) * C;
  float* to = probs + static_cast<size_t>(row) * C;
  const int col0 = threadIdx.x % kGroup * kWidth;
  float v[kValues];
#pragma unroll
  for (int i = 0; i < kValues; i += kWidth) {
    const int col = col0 + i * kGroup;
    if constexpr (kWidth == 4) {
      float4 four = {minus_infinity(), minus_infinity(), minus_infinity(), minus_infinity()};
      if (col < C) four = *reinterpret_cast<const float4*>(from + col);
      v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
    } else {
      v[i] = col < C ? from[col] : minus_infinity();
    }
  }
  float largest = v[0];
#pragma unroll
  for (int i = 1; i < kValues; ++i) largest = fmaxf(largest, v[i]);
  largest = lanes_max<32>(largest);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kValues; ++i) sum += v[i] = expf(v[i] - base_of(largest));
  sum = lanes_sum<32>(sum);
  float factor;
  if constexpr (kGroup == 32) {
    factor = 1 / sum;
  } else {
    const MaxSum all = block_merge<kGroup / 32>({largest, sum});
    factor = rebase(largest, all.largest) / all.sum;
  }
#pragma unroll
  for (int i = 0; i < kValues; i += kWidth) {
    const int col = col0 + i * kGroup;
    if (col >= C) continue;
    if constexpr (kWidth == 4) {
      *reinterpret_cast<float4*>(to + col) = {v[i] * factor, v[i + 1] * factor, v[i + 2] * factor,
                                              v[i + 3] * factor};
    } else {
      to[col] = v[i] * factor;
    }
  }
}

// A block turns a row of any length into its softmax: reads it twice.
template <int kThreads>
__device__ void softmax_of_long_row(const float* from, float* to, int C) {
  MaxSum part = {minus_infinity(), 0};
  for (int col = threadIdx.x; col < C; col += kThreads) {
    const float logit = from[col], largest = fmaxf(part.largest, logit);
    part.sum = part.sum * rebase(part.largest, largest) + expf(logit - base_of(largest));
    part.largest = largest;
  }
  const MaxSum all = block_merge<kThreads / 32>(warp_merge(part));
#pragma unroll 4
  for (int col = threadIdx.x; col < C; col += kThreads) {
    to[col] = expf(from[col] - base_of(all.largest)) / all.sum;
  }
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    softmax_long_rows(const float* logits, float* probs, int C) {
  start_next_kernel();
  wait_for_previous_kernel();
  const size_t start = static_cast<size_t>(blockIdx.x) * C;
  softmax_of_long_row<kThreads>(logits + start, probs + start, C);
}

// ---- fused rows ---------------------------------------------------------------------------------

// A block owns a row, a thread the columns threadIdx.x, threadIdx.x + 256, ...: lesson 1's product,
// coalesced along W, followed by the softmax of the block's row, which it finds in the caches.
// Fused it is, and for one row there is no better way. But W is read once per row: 2 floating-point
// operations for every 4 bytes that come from the L2 cache.
__global__ void __launch_bounds__(kSoftmaxThreads)
    fused_rows(const float* x, const float* W, float* probs, int D, int C) {
  start_next_kernel();
  wait_for_previous_kernel();
  const float* x_row = x + static_cast<size_t>(blockIdx.x) * D;
  float* row = probs + static_cast<size_t>(blockIdx.x) * C;
  for (int col = threadIdx.x; col < C; col += kSoftmaxThreads) {
    float logit = 0;
    for (int d = 0; d < D; ++d) logit += x_row[d] * W[static_cast<size_t>(d) * C + col];
    row[col] = logit;
  }
  softmax_of_long_row<kSoftmaxThreads>(row, row, C);
}

// ---- fused rows, D split ------------------------------------------------------------------------

// 10 columns occupy 10 of the 256 threads above, each with a long sum. Here D is spread over the
// block, too: thread t has column t % kCols and every 256 / kCols-th input, so that all of the
// row's loads are under way at once; lanes with the same column add up by shuffles, warps through
// shared memory. The first warp then has all of the row's logits, one a lane. W is still read once
// per row.
template <int kCols>
__global__ void __launch_bounds__(kSoftmaxThreads)
    fused_narrow_rows(const float* x, const float* W, float* probs, int D, int C) {
  start_next_kernel();
  wait_for_previous_kernel();
  constexpr int kWarps = kSoftmaxThreads / 32, kParts = kSoftmaxThreads / kCols, kAtOnce = 8;
  __shared__ float sums[kWarps][kCols];
  const float* x_row = x + static_cast<size_t>(blockIdx.x) * D;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, col = lane % kCols;
  float logit = 0;
  for (int d0 = threadIdx.x / kCols; d0 < D; d0 += kAtOnce * kParts) {
    // First all loads, where needed of another element that exists: a branch would wait for each.
    float left[kAtOnce], right[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int d = min(d0 + i * kParts, D - 1);
      left[i] = x_row[d], right[i] = W[static_cast<size_t>(d) * C + min(col, C - 1)];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (d0 + i * kParts < D) logit += left[i] * right[i];
    }
  }
#pragma unroll
  for (int i = kCols; i < 32; i *= 2) logit += __shfl_xor_sync(kAllLanes, logit, i);
  if (lane < kCols) sums[warp][col] = logit;
  __syncthreads();
  if (warp != 0) return;
  logit = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) logit += sums[i][col];
  if (col >= C) logit = minus_infinity();
  const float largest = lanes_max<kCols>(logit);
  const float exponential = expf(logit - base_of(largest)), sum = lanes_sum<kCols>(exponential);
  if (lane < C) probs[static_cast<size_t>(blockIdx.x) * C + col] = exponential / sum;
}

// ---- The product --------------------------------------------------------------------------------

// Rows share W from here on: a block computes a tile of logits, as in lessons 2 and 3. How they are
// computed; all accumulate in fp32.
enum class Math {
  fp32,   // multiply-adds on the CUDA cores
  tf32,   // tensor cores, operands rounded to TF32
  split,  // tensor cores, operands as sums of two TF32 numbers
};

// A block of kWarpsM x kWarpsN x kWarpsK warps computes BM x BN logits in steps of BK along D. The
// warps that differ in the third coordinate have the same logits, and each its share of every step:
// when B and C are small, that is how a block gets enough warps to hide latencies, and enough
// copies in flight. kStages tiles of x and W are in shared memory at a time.
template <Math kMath_, int BM_, int BN_, int BK_, int kWarpsM_, int kWarpsN_, int kWarpsK_,
          int kStages_>
struct Tile {
  static constexpr Math kMath = kMath_;
  static constexpr int BM = BM_, BN = BN_, BK = BK_, kStages = kStages_;
  static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_, kWarpsK = kWarpsK_;
  static constexpr bool kTensor = kMath != Math::fp32;
  static constexpr int kWarps = kWarpsM * kWarpsN * kWarpsK, kThreads = 32 * kWarps;
  static constexpr int kRows = BM / kWarpsM, kCols = BN / kWarpsN;  // a warp's
  static constexpr int kDepth = BK / kWarpsK;                       // and its share of a step

  // Rows of x start 16 bytes further along the banks than a multiple of 128: eight of them, 16
  // bytes each, are on different banks. So are 4 rows of 8 floats of W, whose rows start 8 or 24
  // banks further.
  static constexpr int kStrideX = BK + 4;
  static constexpr int kStrideW = BN + (BN % 16 == 0 ? 8 : 0);
  static constexpr int kTileX = BM * kStrideX, kTileW = BK * kStrideW;
  static constexpr int kStageBytes = kStages * (kTileX + kTileW) * 4;

  // Where all_columns() brings logits together: kWarpsK times BM x BN of them.
  static constexpr int kStrideLogits = BN + 8;
  static constexpr int kLogitBytes = kWarpsK * BM * kStrideLogits * static_cast<int>(sizeof(float));

  static constexpr int kStepK = kMath == Math::fp32 ? 4 : 8;
  static_assert(BM % kWarpsM == 0 && BN % kWarpsN == 0 && BK % (kWarpsK * kStepK) == 0);
  static_assert(kTensor ? kRows % 16 == 0 && kCols % 8 == 0 : kRows % 4 == 0 && kCols % 8 == 0);
};

// A warp's kRows x kCols logits. A thread has kOwnRows x kOwnCols of them: (row(i), col(j)). Along
// a row they come in runs of kRun neighbours, and kLanesPerRow consecutive lanes share a row.
template <class Tile>
struct Sums {
  // Tensor cores: fragments of 16 x 8, see mma.cuh. CUDA cores: the lanes of a warp stand 4 x 8.
  static constexpr bool kTensor = Tile::kTensor;
  static constexpr int kOwnRows = kTensor ? Tile::kRows / 8 : Tile::kRows / 4;
  static constexpr int kOwnCols = kTensor ? Tile::kCols / 4 : Tile::kCols / 8;
  static constexpr int kRun =
      kTensor || kOwnCols % 4 != 0 ? kTensor || kOwnCols % 2 == 0 ? 2 : 1 : 4;
  static constexpr int kLanesPerRow = kTensor ? 4 : 8;
  static constexpr int kHeight = kTensor ? 2 : 1, kWidth = kTensor ? 2 : 1;  // of an entry of v
  float v[kOwnRows / kHeight][kOwnCols / kWidth][kHeight * kWidth] = {};

  __device__ float& at(int i, int j) {
    return v[i / kHeight][j / kWidth][i % kHeight * kWidth + j % kWidth];
  }
  static __device__ int row(int i) {
    const int lane = threadIdx.x % 32;
    return lane / kLanesPerRow + (32 / kLanesPerRow) * i;
  }
  static __device__ int col(int j) {
    const int lane = threadIdx.x % 32;
    return lane % kLanesPerRow * kRun + j / kRun * kLanesPerRow * kRun + j % kRun;
  }
};

// An fp32 number as the sum of two TF32 numbers: its first 11 bits, and the next 11, rounded. An
// infinity has no `low`.
struct SplitTf32 {
  unsigned high, low;
};
__device__ bool is_infinite(unsigned bits) { return (bits & 0x7fffffff) == 0x7f800000; }
__device__ SplitTf32 split_tf32(float value) {
  constexpr unsigned kMantissa = 0xffffe000, kHalf = 0x1000;
  const unsigned high = __float_as_uint(value) & kMantissa;
  const unsigned rest = __float_as_uint(value - __uint_as_float(high));
  return {high, is_infinite(high) ? 0 : (rest + kHalf) & kMantissa};
}

// Adds a warp's products of one step; x_tile and W_tile point to its rows, its columns, and its
// share of the step, all in shared memory.
template <class Tile>
__device__ void add_products(Sums<Tile>& sums, const float* x_tile, const float* W_tile) {
  constexpr int kX = Tile::kStrideX, kW = Tile::kStrideW;
  const int lane = threadIdx.x % 32;
  if constexpr (Tile::kMath == Math::fp32) {
    // Per 4 steps of k a thread reads 4 floats of each of its rows at once, and per k its columns.
    constexpr int kOwnRows = Sums<Tile>::kOwnRows, kOwnCols = Sums<Tile>::kOwnCols;
    constexpr int kRun = Sums<Tile>::kRun;
#pragma unroll
    for (int k = 0; k < Tile::kDepth; k += 4) {
      float4 x[kOwnRows];
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) {
        x[i] = *reinterpret_cast<const float4*>(x_tile + Sums<Tile>::row(i) * kX + k);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float w[kOwnCols];
#pragma unroll
        for (int j = 0; j < kOwnCols; j += kRun) {
          const float* at = W_tile + (k + e) * kW + Sums<Tile>::col(j);
          if constexpr (kRun == 4) {
            const float4 four = *reinterpret_cast<const float4*>(at);
            w[j] = four.x, w[j + 1] = four.y, w[j + 2] = four.z, w[j + 3] = four.w;
          } else if constexpr (kRun == 2) {
            const float2 two = *reinterpret_cast<const float2*>(at);
            w[j] = two.x, w[j + 1] = two.y;
          } else {
            w[j] = *at;
          }
        }
#pragma unroll
        for (int i = 0; i < kOwnRows; ++i) {
          const float factor = e == 0 ? x[i].x : e == 1 ? x[i].y : e == 2 ? x[i].z : x[i].w;
#pragma unroll
          for (int j = 0; j < kOwnCols; ++j) sums.v[i][j][0] += factor * w[j];
        }
      }
    }
  } else {
    constexpr int kM = Tile::kRows / 16, kN = Tile::kCols / 8;
    constexpr bool kSplit = Tile::kMath == Math::split;
    // Tensor cores truncate what they accumulate, and over a long sum that adds up. For the
    // accuracy of fp32 they sum only a step, which then is added, rounded to nearest, to the rest.
    Sums<Tile> step;
    Sums<Tile>& to = kSplit ? step : sums;
#pragma unroll
    for (int k = 0; k < Tile::kDepth; k += 8) {
      unsigned x[kM][4], x_low[kSplit ? kM : 1][4];
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        ldmatrix_x4(x[i], x_tile + (16 * i + lane % 16) * kX + k + lane / 16 * 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (kSplit) {
            const SplitTf32 parts = split_tf32(__uint_as_float(x[i][e]));
            x[i][e] = parts.high, x_low[i][e] = parts.low;
          } else {
            x[i][e] = to_tf32(__uint_as_float(x[i][e]));
          }
        }
      }
      const float* W_at = W_tile + (k + lane % 4) * kW + lane / 4;
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        const float w0 = W_at[8 * j], w1 = W_at[4 * kW + 8 * j];
        if constexpr (kSplit) {
          const SplitTf32 p0 = split_tf32(w0), p1 = split_tf32(w1);
          // An infinity of W times what x lacks of itself, perhaps 0, could be NaN: no such
          // product. (With an infinity of x the whole row is NaN either way.)
          const unsigned f0 = is_infinite(p0.high) ? 0 : p0.high;
          const unsigned f1 = is_infinite(p1.high) ? 0 : p1.high;
#pragma unroll
          for (int i = 0; i < kM; ++i) {  // the smallest products first
            mma_m16n8k8_tf32(to.v[i][j], x_low[i], f0, f1);
            mma_m16n8k8_tf32(to.v[i][j], x[i], p0.low, p1.low);
            mma_m16n8k8_tf32(to.v[i][j], x[i], p0.high, p1.high);
          }
        } else {
          const unsigned b0 = to_tf32(w0), b1 = to_tf32(w1);
#pragma unroll
          for (int i = 0; i < kM; ++i) mma_m16n8k8_tf32(to.v[i][j], x[i], b0, b1);
        }
      }
    }
    if constexpr (kSplit) {
#pragma unroll
      for (int i = 0; i < Sums<Tile>::kOwnRows; ++i) {
#pragma unroll
        for (int j = 0; j < Sums<Tile>::kOwnCols; ++j) sums.at(i, j) += step.at(i, j);
      }
    }
  }
}

// The factors. Rows start at a multiple of row_bytes (16, 8 or 4), the size of their copies.
struct Factors {
  const float *x, *W;
  int B, D, C;
  int row_bytes_x, row_bytes_W;
};

// The block's kThreads threads copy a kRows x kCols tile at (row0, col0) of a matrix with `pitch`
// elements a row to shared memory, kBytes at a time; zeros where row >= rows or col >= cols.
template <int kRows, int kCols, int kStride, int kThreads, int kBytes>
__device__ void copy_pieces(float* to, const float* from, int row0, int col0, int rows, int cols,
                            int pitch) {
  constexpr int kWidth = kBytes / 4, kPieces = kCols / kWidth;
#pragma unroll 4
  for (int i = threadIdx.x; i < kRows * kPieces; i += kThreads) {
    const int row = i / kPieces, col = i % kPieces * kWidth;
    const bool inside = row0 + row < rows && col0 + col < cols;
    copy_async<kBytes>(to + row * kStride + col,
                       from + static_cast<size_t>(row0 + row) * pitch + col0 + col, inside);
  }
}

template <int kRows, int kCols, int kStride, int kThreads>
__device__ void copy_tile_of(float* to, const float* from, int row0, int col0, int rows, int cols,
                             int pitch, int row_bytes) {
  if (row_bytes == 16) {
    copy_pieces<kRows, kCols, kStride, kThreads, 16>(to, from, row0, col0, rows, cols, pitch);
  } else if (row_bytes == 8) {
    copy_pieces<kRows, kCols, kStride, kThreads, 8>(to, from, row0, col0, rows, cols, pitch);
  } else {
    copy_pieces<kRows, kCols, kStride, kThreads, 4>(to, from, row0, col0, rows, cols, pitch);
  }
}

// The BM x BN logits at (row0, col0), summed over d_begin <= d < d_end: kStages - 1 steps are on
// their way while one is multiplied, as in lesson 2's last kernel.
template <class Tile>
__device__ void multiply_tiles(Sums<Tile>& sums, float* stages, const Factors& factors, int row0,
                               int col0, int d_begin, int d_end) {
  constexpr int kStages = Tile::kStages;
  const int warp = threadIdx.x / 32;
  const int warp_row = warp / Tile::kWarpsN % Tile::kWarpsM * Tile::kRows;
  const int warp_col = warp % Tile::kWarpsN * Tile::kCols;
  const int warp_k = warp / (Tile::kWarpsM * Tile::kWarpsN) * Tile::kDepth;
  const auto copy_step = [&](int step) {
    auto* x_tile = stages + step % kStages * (Tile::kTileX + Tile::kTileW);
    const int d = d_begin + step * Tile::BK;
    copy_tile_of<Tile::BM, Tile::BK, Tile::kStrideX, Tile::kThreads>(
        x_tile, factors.x, row0, d, factors.B, d_end, factors.D, factors.row_bytes_x);
    copy_tile_of<Tile::BK, Tile::BN, Tile::kStrideW, Tile::kThreads>(
        x_tile + Tile::kTileX, factors.W, d, col0, d_end, factors.C, factors.C,
        factors.row_bytes_W);
  };

  const int steps = (d_end - d_begin + Tile::BK - 1) / Tile::BK;
  for (int step = 0; step < kStages - 1; ++step) {
    if (step < steps) copy_step(step);
    copy_async_commit();
  }
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    if (step + kStages - 1 < steps) copy_step(step + kStages - 1);
    copy_async_commit();
    const auto* x_tile = stages + step % kStages * (Tile::kTileX + Tile::kTileW);
    add_products<Tile>(sums, x_tile + warp_row * Tile::kStrideX + warp_k,
                       x_tile + Tile::kTileX + warp_k * Tile::kStrideW + warp_col);
  }
}

// What becomes of the logits.
enum class Epilogue {
  logits,   // out = logits: the product of the unfused way
  softmax,  // out = probs
};

struct Results {
  Epilogue epilogue;
  float* out;  // (B, C)
  // What blocks leave to the last one of those that share a row.
  float* partial = nullptr;      // (splits of D, B, C): logits of a part of D
  float2* tile_stats = nullptr;  // (B, tiles of C): a tile's maximum, and sum relative to it
  unsigned* arrived = nullptr;   // blocks of these rows that have ended; zero between launches
};

// ---- fused tiles --------------------------------------------------------------------------------

// A warp has a row: lane l its columns l, l + 32, ... Writes what the epilogue makes of them.
template <int kValues>
__device__ void finish_row(float (&v)[kValues], int row, int C, const Results& results) {
  const int lane = threadIdx.x % 32;
  float* out = results.out + static_cast<size_t>(row) * C;
  float factor = 1;
  if (results.epilogue == Epilogue::softmax) {
    float largest = minus_infinity(), sum = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (lane + 32 * i >= C) v[i] = minus_infinity();
      largest = fmaxf(largest, v[i]);
    }
    largest = lanes_max<32>(largest);
#pragma unroll
    for (int i = 0; i < kValues; ++i) sum += v[i] = expf(v[i] - base_of(largest));
    sum = lanes_sum<32>(sum);
    factor = 1 / sum;
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int col = lane + 32 * i;
    if (col < C) out[col] = v[i] * factor;
  }
}

// A block has BM rows with all their columns (C <= BN), so W is read B / BM times instead of B. It
// also has one of gridDim.y parts of D: the sums of its warps meet in shared memory, those of the
// blocks of the same rows in `partial`, where the last of them to arrive adds them up, always in
// the same order. Then a warp takes a row at a time.
//
// What D is split for: 1024 rows are 32 blocks of 32, for a GPU of 132 multiprocessors, and each of
// them would read all of W by itself (1024 x 100: 400 KB, at some 64 bytes a clock). Four times as
// many blocks read a quarter each.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) all_columns(Factors factors, Results results) {
  start_next_kernel();
  wait_for_previous_kernel();
  constexpr int kValues = (Tile::BN + 31) / 32, kStride = Tile::kStrideLogits;
  extern __shared__ __align__(128) char shared[];
  auto* stages = reinterpret_cast<float*>(shared);
  float* logits = reinterpret_cast<float*>(shared + Tile::kStageBytes);  // [kWarpsK][BM][kStride]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int B = factors.B, D = factors.D, C = factors.C;
  const int row0 = blockIdx.x * Tile::BM, splits = gridDim.y, split = blockIdx.y;
  const int steps = (D + Tile::BK - 1) / Tile::BK;
  const int d_begin = static_cast<int>(static_cast<int64_t>(steps) * split / splits) * Tile::BK;
  const int d_end =
      min(D, static_cast<int>(static_cast<int64_t>(steps) * (split + 1) / splits) * Tile::BK);

  Sums<Tile> sums;
  multiply_tiles<Tile>(sums, stages, factors, row0, 0, d_begin, d_end);

  const int warp_row = warp / Tile::kWarpsN % Tile::kWarpsM * Tile::kRows;
  const int warp_col = warp % Tile::kWarpsN * Tile::kCols;
  const int warp_k = warp / (Tile::kWarpsM * Tile::kWarpsN);
#pragma unroll
  for (int i = 0; i < Sums<Tile>::kOwnRows; ++i) {
    float* to = logits + (warp_k * Tile::BM + warp_row + Sums<Tile>::row(i)) * kStride + warp_col;
#pragma unroll
    for (int j = 0; j < Sums<Tile>::kOwnCols; ++j) to[Sums<Tile>::col(j)] = sums.at(i, j);
  }
  __syncthreads();

  const int rows = min(Tile::BM, B - row0);
  for (int row = warp; row < rows; row += Tile::kWarps) {
    float v[kValues] = {};
#pragma unroll
    for (int k = 0; k < Tile::kWarpsK; ++k) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        const int col = lane + 32 * i;
        if (col < C) v[i] += logits[(k * Tile::BM + row) * kStride + col];
      }
    }
    if (splits == 1) {
      finish_row(v, row0 + row, C, results);
    } else {
      float* to = results.partial + (static_cast<size_t>(split) * B + row0 + row) * C;
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        if (lane + 32 * i < C) to[lane + 32 * i] = v[i];
      }
    }
  }
  if (splits == 1 || !is_last_block(results.arrived + blockIdx.x, splits)) return;

  for (int row = warp; row < rows; row += Tile::kWarps) {
    float v[kValues] = {};
    const float* from = results.partial + static_cast<size_t>(row0 + row) * C;
#pragma unroll 4
    for (int part = 0; part < splits; ++part) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        const int col = lane + 32 * i;
        if (col < C) v[i] += from[static_cast<size_t>(part) * B * C + col];
      }
    }
    finish_row(v, row0 + row, C, results);
  }
}

// ---- fused online -------------------------------------------------------------------------------

// kRun neighbours of a row, at once if the row's start allows it.
template <int kRun>
__device__ void store_run(float* to, const float* values, int left, bool aligned) {
  if (aligned && left >= kRun) {
    if constexpr (kRun == 4) {
      *reinterpret_cast<float4*>(to) = {values[0], values[1], values[2], values[3]};
    } else if constexpr (kRun == 2) {
      *reinterpret_cast<float2*>(to) = {values[0], values[1]};
    } else {
      *to = *values;
    }
    return;
  }
#pragma unroll
  for (int e = 0; e < kRun; ++e) {
    if (e < left) to[e] = values[e];
  }
}

// A warp turns a row of exponentials, each relative to the maximum of its tile of kCols columns,
// into probabilities.
template <int kCols>
__device__ void correct_row(int row, int C, const Results& results) {
  const int lane = threadIdx.x % 32, tiles = (C + kCols - 1) / kCols;
  const float2* stats = results.tile_stats + static_cast<size_t>(row) * tiles;
  float* out = results.out + static_cast<size_t>(row) * C;
  MaxSum all = {minus_infinity(), 0};
  for (int t = lane; t < tiles; t += 32) all = merge(all, {stats[t].x, stats[t].y});
  all = warp_merge(all);
  if (C % 4 == 0) {
#pragma unroll 4
    for (int col = 4 * lane; col < C; col += 128) {
      const float factor = rebase(stats[col / kCols].x, all.largest) / all.sum;
      const float4 four = *reinterpret_cast<const float4*>(out + col);
      *reinterpret_cast<float4*>(out + col) = {four.x * factor, four.y * factor, four.z * factor,
                                               four.w * factor};
    }
  } else {
#pragma unroll 4
    for (int col = lane; col < C; col += 32) {
      const float factor = rebase(stats[col / kCols].x, all.largest) / all.sum;
      out[col] *= factor;
    }
  }
}

// Here a row does not fit into a block: 1000 columns of 64 rows are as many sums as a
// multiprocessor has registers, and blocks of fewer rows would read W too often. So blocks have
// tiles of BM x BN, as for any product, and the blocks of BM rows share the softmax: each warp
// writes exponentials relative to the maximum of its own kCols columns, which the lanes that share
// a row find with a few shuffles, and leaves that maximum and the sum. The last block of these rows
// to arrive knows them all, and corrects the rows while they still are in the L2 cache. So the
// result is written twice, but to memory once, and the logits not at all. What it costs: all of BM
// rows are corrected by one block, the last, when the others are done.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads) column_tiles(Factors factors, Results results) {
  start_next_kernel();
  wait_for_previous_kernel();
  static_assert(Tile::kWarpsK == 1 && Tile::kCols % 4 == 0);
  extern __shared__ __align__(128) char shared[];
  const int B = factors.B, C = factors.C, block_columns = (C + Tile::BN - 1) / Tile::BN;
  const int strip = blockIdx.x / block_columns;
  const int row0 = strip * Tile::BM, col0 = blockIdx.x % block_columns * Tile::BN;
  Sums<Tile> sums;
  multiply_tiles<Tile>(sums, reinterpret_cast<float*>(shared), factors, row0, col0, 0, factors.D);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = row0 + warp / Tile::kWarpsN * Tile::kRows;
  const int warp_col = col0 + warp % Tile::kWarpsN * Tile::kCols;
  constexpr int kRun = Sums<Tile>::kRun, kOwnCols = Sums<Tile>::kOwnCols;
  constexpr int kLanes = Sums<Tile>::kLanesPerRow;
  const bool softmax = results.epilogue == Epilogue::softmax;
#pragma unroll
  for (int i = 0; i < Sums<Tile>::kOwnRows; ++i) {
    const int row = warp_row + Sums<Tile>::row(i);
    if (softmax) {
      float largest = minus_infinity(), sum = 0;
#pragma unroll
      for (int j = 0; j < kOwnCols; ++j) {
        if (warp_col + Sums<Tile>::col(j) >= C) sums.at(i, j) = minus_infinity();
        largest = fmaxf(largest, sums.at(i, j));
      }
      largest = lanes_max<kLanes>(largest);
#pragma unroll
      for (int j = 0; j < kOwnCols; ++j) {
        sum += sums.at(i, j) = expf(sums.at(i, j) - base_of(largest));
      }
      sum = lanes_sum<kLanes>(sum);
      if (lane % kLanes == 0 && row < B && warp_col < C) {
        const int tiles = (C + Tile::kCols - 1) / Tile::kCols;
        results.tile_stats[static_cast<size_t>(row) * tiles + warp_col / Tile::kCols] = {largest,
                                                                                         sum};
      }
    }
    if (row >= B) continue;
    float* to = results.out + static_cast<size_t>(row) * C + warp_col;
#pragma unroll
    for (int j = 0; j < kOwnCols; j += kRun) {
      float run[kRun];
#pragma unroll
      for (int e = 0; e < kRun; ++e) run[e] = sums.at(i, j + e);
      const int col = Sums<Tile>::col(j);
      store_run<kRun>(to + col, run, C - warp_col - col, C % kRun == 0);
    }
  }
  if (!softmax || !is_last_block(results.arrived + strip, block_columns)) return;

  for (int row = row0 + warp; row < min(B, row0 + Tile::BM); row += Tile::kWarps) {
    correct_row<Tile::kCols>(row, C, results);
  }
}

// ---- Hopper: fused cluster ----------------------------------------------------------------------

// Up to this many classes (columns) fused cluster, beyond them fused exchange.
constexpr int kClusterClasses = 128;

// The floats that one block sends to another for a row, C and some padding: a multiple of 4, as the
// copy engine needs, and 4 more than one of 8, so that 4 rows start on different banks.
__host__ __device__ constexpr int cluster_stride(int C) { return (C + 7) / 8 * 8 + 4; }

// A block's shared memory. kSplits: the blocks of a cluster, over which D is split. kDepth: how
// many of the D inputs are taken at a time. kSplit: whether operands are in two parts (3xTF32).
template <Math kMath, int kSplits, int kRows, int kClasses, int kDepth>
struct ClusterShared {
  static constexpr bool kSplit = kMath == Math::split;
  static constexpr int kOwnRows = kRows / kSplits;  // that a block finishes
  static_assert(kRows % kSplits == 0 && kDepth % 32 == 0);
  float x[kDepth / 32][kRows * 32];  // boxes of kRows x 32, as the copy engine leaves them
  float x_low[kSplit ? kDepth / 32 : 1][kSplit ? kRows * 32 : 1];
  // To and from each other block of the cluster: kOwnRows rows, cluster_stride(C) apart. A block's
  // own part stays in its outbox.
  alignas(16) float outbox[kSplits][kOwnRows * cluster_stride(kClasses)];
  alignas(16) float inbox[kSplits][kOwnRows * cluster_stride(kClasses)];
  Barrier full, come;  // x is there; all of the inbox is
};

#if HOPPER_CODE
// What is known of the fragments of W that a thread loads.
enum class Known {
  pairs,   // C is even, and no d >= D
  inside,  // no d >= D
  nothing
};

// A thread's fragments of W^T, of the classes col and col + 1 for the inputs from d0 on: w[k] is
// for d0 + 8 k to d0 + 8 k + 7. All loads are under way before the first value is needed. Where d
// >= D they are zeros; for classes that do not exist they are another one's, and nobody looks at
// what becomes of them.
template <Known kKnown, int kSteps>
__device__ inline void load_fragments(float (&w)[kSteps][4], const float* W, int d0, int col, int D,
                                      int C) {
  const int t = threadIdx.x % 4;
  if constexpr (kKnown == Known::pairs) {
    const float* near = W + static_cast<size_t>(d0 + t) * C + min(col, C - 2);
    const float* far = near + 4 * static_cast<size_t>(C);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const float2 a = *reinterpret_cast<const float2*>(near);
      const float2 b = *reinterpret_cast<const float2*>(far);
      w[k][0] = a.x, w[k][1] = a.y, w[k][2] = b.x, w[k][3] = b.y;
      near += 8 * static_cast<size_t>(C), far += 8 * static_cast<size_t>(C);
    }
  } else {
    const float *first = W + min(col, C - 1), *second = W + min(col + 1, C - 1);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int d = d0 + 8 * k + t + 4 * e;
        const bool inside = kKnown == Known::inside || d < D;
        const size_t row = static_cast<size_t>(inside ? d : D - 1) * C;
        const float a = first[row], b = second[row];
        w[k][2 * e] = inside ? a : 0, w[k][2 * e + 1] = inside ? b : 0;
      }
    }
  }
}

// Each of the `count` elements of `high` (a multiple of 4) becomes the sum of two TF32 numbers,
// high + low. All `threads` threads call this; `first` is the caller's number among them.
__device__ inline void split_all(float* high, float* low, int count, int first, int threads) {
#pragma unroll 2
  for (int i = 4 * first; i < count; i += 4 * threads) {
    auto& h = *reinterpret_cast<float4*>(high + i);
    const SplitTf32 a = split_tf32(h.x), b = split_tf32(h.y), c = split_tf32(h.z),
                    d = split_tf32(h.w);
    h = {__uint_as_float(a.high), __uint_as_float(b.high), __uint_as_float(c.high),
         __uint_as_float(d.high)};
    *reinterpret_cast<float4*>(low + i) = {__uint_as_float(a.low), __uint_as_float(b.low),
                                           __uint_as_float(c.low), __uint_as_float(d.low)};
  }
}

// Adds the products of a warpgroup's 64 classes with 2 kSums rows of x, for 32 of the D inputs.
// w[k]: a thread's fragment of W^T for inputs 8 k to 8 k + 7, in TF32 already if kRounded. If kMath
// is split they are done when this returns, else under way: wgmma_wait() then.
template <Math kMath, bool kRounded, int kSums>
__device__ inline void add_products(float (&sum)[kSums], const float (&w)[4][4], const float* x,
                                    const float* x_low, bool add) {
  if constexpr (kMath == Math::split) {
    uint32_t high[4][4], low[4][4], finite[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const SplitTf32 parts = split_tf32(w[k][e]);
        high[k][e] = parts.high, low[k][e] = parts.low;
        finite[k][e] = is_infinite(parts.high) ? 0 : parts.high;  // as for mma.sync, above
      }
    }
    float step[kSums];
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma_tf32(step, finite[k], descriptor_a(x_low) + 2 * k, k > 0);
      wgmma_tf32(step, low[k], descriptor_a(x) + 2 * k, true);
      wgmma_tf32(step, high[k], descriptor_a(x) + 2 * k, true);
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kSums; ++i) sum[i] = add ? sum[i] + step[i] : step[i];
  } else {
    uint32_t rounded[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        rounded[k][e] = kRounded ? __float_as_uint(w[k][e]) : to_tf32(w[k][e]);
    }
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma_tf32(sum, rounded[k], descriptor_a(x) + 2 * k, add || k > 0);
    }
    wgmma_commit();
  }
}
#endif

// As in fused tiles, D is split over blocks that share kRows rows. But here these are a cluster,
// and can write to each other's shared memory: the parts of the sums need not go through the L2
// cache to whoever comes last. Each of the kSplits blocks finishes its share of the rows, and the
// others push their parts of that share into its inbox.
//
// The product is wgmma's. In TF32 it takes a factor from shared memory only if its elements are
// contiguous along k (here D); those of x are, those of W are not. So the product is turned round,
// logits^T = W^T x^T: x^T is the factor from shared memory, where the copy engine brings it, and
// W^T is the one from registers. No other thread of the block needs the same elements of W: they go
// from memory straight to the registers, all of a chunk of kDepth inputs at once. (Of what it finds
// in shared memory wgmma ignores the bits that TF32 does not have, which would truncate x. So the
// copy engine rounds it on the way.)
//
// A warpgroup has 64 classes, a warp 16. For wgmma those are rows of W^T, and thread l has rows l /
// 4 and l / 4 + 8 of its warp's 16. Which class is which row is ours to say: these two are
// neighbours, 2 (l / 4) and the next one, so that W is read 8 bytes at a time. The thread's sums of
// the first are sum[4 j + e], of the second sum[4 j + 2 + e], each for row 8 j + 2 (l % 4) + e of
// x.
template <Math kMath, int kSplits, int kRows, int kClasses, int kDepth>
__global__ void HOPPER_CLUSTER(kSplits) __launch_bounds__(2 * kClasses, 1)
    cluster_columns(const __grid_constant__ CUtensorMap x, const float* W, int B, int D, int C,
                    Results results) {
#if HOPPER_CODE
  using Shared = ClusterShared<kMath, kSplits, kRows, kClasses, kDepth>;
  constexpr int kOwnRows = Shared::kOwnRows, kThreads = 2 * kClasses, kBoxes = kDepth / 32;
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const int rank = cluster_rank(), row0 = blockIdx.x / kSplits * kRows;
  const int chunks = (D + kDepth - 1) / kDepth;
  const int first = chunks * rank / kSplits, last = chunks * (rank + 1) / kSplits;
  const int stride = cluster_stride(C), part_bytes = kOwnRows * stride * 4;
  const auto fetch = [&](int chunk) {
    barrier_arrive_expect(&shared.full, sizeof shared.x);
    for (int box = 0; box < kBoxes; ++box) {
      tensor_load(shared.x[box], &x, row0, chunk * kDepth + 32 * box, &shared.full);
    }
  };
  if (threadIdx.x == 0) {
    barrier_init(&shared.full, 1);
    barrier_init(&shared.come, 1);
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) barrier_arrive_expect(&shared.come, (kSplits - 1) * part_bytes);
  cluster_arrive();
  start_next_kernel();
  wait_for_previous_kernel();
  const int warp = warp_of_block(), lane = threadIdx.x % 32, t = lane % 4;
  if (warp == 0 && first < last && elect_one()) fetch(first);

  const int col = 16 * warp + lane / 4 * 2;
  float sum[kRows / 2] = {};
  const auto add_chunk = [&](int chunk, auto known) {
    float w[kDepth / 8][4];
    load_fragments<known>(w, W, chunk * kDepth, col, D, C);
    barrier_wait(&shared.full, (chunk - first) % 2);
    if constexpr (kMath == Math::split) {
      split_all(shared.x[0], shared.x_low[0], kRows * kDepth, threadIdx.x, kThreads);
      shared_fence();
      __syncthreads();
    }
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      add_products<kMath, false>(sum, reinterpret_cast<const float(&)[4][4]>(w[4 * box]),
                                 shared.x[box], shared.x_low[kMath == Math::split ? box : 0],
                                 chunk > first || box > 0);
    }
    wgmma_wait<0>();
  };
  for (int chunk = first; chunk < last; ++chunk) {
    if (C % 2 == 0 && (chunk + 1) * kDepth <= D) {
      add_chunk(chunk, std::integral_constant<Known, Known::pairs>());
    } else {
      add_chunk(chunk, std::integral_constant<Known, Known::nothing>());
    }
    __syncthreads();
    if (warp == 0 && chunk + 1 < last && elect_one()) fetch(chunk + 1);
  }

#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = 8 * j + 2 * t + e;
      float* to = shared.outbox[row / kOwnRows] + row % kOwnRows * stride + col;
      if (col < stride) *reinterpret_cast<float2*>(to) = {sum[4 * j + e], sum[4 * j + 2 + e]};
    }
  }
  shared_fence();  // the copy engine will read this
  __syncthreads();
  cluster_wait();  // the others' `come` is initialized
  if (warp == 0 && elect_one()) {
    for (int i = 0; i < kSplits; ++i) {
      if (i == rank) continue;
      bulk_push(shared.inbox[rank], shared.outbox[i], part_bytes, &shared.come, i);
    }
  }
  barrier_wait(&shared.come, 0);
  cluster_arrive();

  for (int i = warp; i < kOwnRows; i += kThreads / 32) {
    const int row = row0 + rank * kOwnRows + i;
    if (row >= B) break;
    float v[kClasses / 32] = {};
#pragma unroll
    for (int part = 0; part < kSplits; ++part) {
      const float* from = (part == rank ? shared.outbox : shared.inbox)[part] + i * stride;
#pragma unroll
      for (int j = 0; j < kClasses / 32; ++j) {
        if (lane + 32 * j < C) v[j] += from[lane + 32 * j];
      }
    }
    finish_row(v, row, C, results);
  }
  cluster_wait();  // nobody's outbox is needed any more
#endif
}

// ---- Hopper: fused streamed ---------------------------------------------------------------------

// Where C is not a multiple of 4, rows of W start anywhere, and no copy of 16 bytes finds them; to
// copy W into aligned rows first would take longer than the rest. But fused cluster's fragments of
// W come from memory as single floats, or pairs of them where C is even. So its product is turned
// round here, too, for tiles of kRows rows and 64 classes for each of kGroups warpgroups. W is read
// once (the blocks that share it run at about the same time), kAhead chunks before it is needed,
// and x comes through a ring of stages. There is no producer: thread 0 also orders the next x, when
// all warpgroups have given its stage back.
//
// The logits of a tile go to `out`, and its maximum and sum for each row to tile_stats. As in fused
// online, but the next kernel finishes the rows, with all multiprocessors and not only the block
// that happens to be the last, which takes 8 ms for 128 rows of 50257.
constexpr int kStreamDepth = 32;

template <int kRows, int kGroups>
struct StreamShared {
  static constexpr int kStages = 6;
  union {
    float x[kStages][kRows * kStreamDepth];  // boxes as the copy engine leaves them
    MaxSum parts[4 * kGroups][kRows];        // in the end: of each warp's 16 classes
  };
  Barrier full[kStages], empty[kStages];
};

template <int kRows, int kGroups, int kAhead, int kBlocksPerSm>
__global__ void __launch_bounds__(128 * kGroups, kBlocksPerSm)
    streamed_columns(const __grid_constant__ CUtensorMap x, const float* W, int B, int D, int C,
                     Results results) {
#if HOPPER_CODE
  using Shared = StreamShared<kRows, kGroups>;
  constexpr int kStages = Shared::kStages;
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const int row_tiles = (B + kRows - 1) / kRows, tiles = gridDim.x / row_tiles;
  const int tile = blockIdx.x / row_tiles, row0 = (blockIdx.x - tile * row_tiles) * kRows;
  const int warp = warp_of_block(), lane = threadIdx.x % 32, t = lane % 4;
  const int col = tile * 64 * kGroups + 16 * warp + lane / 4 * 2;  // and the next one
  const int chunks = (D + kStreamDepth - 1) / kStreamDepth;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(&shared.full[s], 1);
      barrier_init(&shared.empty[s], kGroups);
    }
    barrier_init_fence();
  }
  start_next_kernel();
  wait_for_previous_kernel();
  __syncthreads();
  const auto fetch = [&](int chunk) {
    const int s = chunk % kStages;
    barrier_arrive_expect(&shared.full[s], sizeof shared.x[s]);
    tensor_load(shared.x[s], &x, row0, chunk * kStreamDepth, &shared.full[s]);
  };
  if (threadIdx.x == 0) {
    for (int chunk = 0; chunk < min(chunks, kStages); ++chunk) fetch(chunk);
  }
  const auto load = [&](float(&w)[4][4], int chunk) {
    const int d0 = chunk * kStreamDepth;
    if (d0 + kStreamDepth > D) {
      load_fragments<Known::nothing>(w, W, d0, col, D, C);
    } else if (C % 2 != 0) {
      load_fragments<Known::inside>(w, W, d0, col, D, C);
    } else {
      load_fragments<Known::pairs>(w, W, d0, col, D, C);
    }
  };

  float w[kAhead + 1][4][4], sum[kRows / 2];  // w: of chunk c in w[c % (kAhead + 1)]
  uint32_t rounded[4][4];  // what wgmma reads while the warps go on; w is free for the next loads
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (i < chunks) load(w[i], i);
  }
  const auto add_chunk = [&](int chunk, float(&now)[4][4], float(&later)[4][4]) {
    if (chunk + kAhead < chunks) load(later, chunk + kAhead);
    if (chunk > 0) {
      wgmma_wait<0>();  // of the last chunk: its stage can be given back
      const int s = (chunk - 1) % kStages, next = chunk - 1 + kStages;
      if (threadIdx.x % 128 == 0) barrier_arrive(&shared.empty[s]);
      if (threadIdx.x == 0 && next < chunks) {
        barrier_wait(&shared.empty[s], (chunk - 1) / kStages % 2);
        fetch(next);
      }
    }
    const int s = chunk % kStages;
    barrier_wait(&shared.full[s], chunk / kStages % 2);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int e = 0; e < 4; ++e) rounded[k][e] = to_tf32(now[k][e]);
    }
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma_tf32(sum, rounded[k], descriptor_a(shared.x[s]) + 2 * k, chunk > 0 || k > 0);
    }
    wgmma_commit();
  };
  for (int chunk = 0; chunk < chunks; chunk += kAhead + 1) {
#pragma unroll
    for (int i = 0; i <= kAhead; ++i) {
      if (chunk + i < chunks) add_chunk(chunk + i, w[i], w[(i + kAhead) % (kAhead + 1)]);
    }
  }
  wgmma_wait<0>();
  __syncthreads();  // nobody needs the stages any more

  const bool stats = results.epilogue != Epilogue::logits;
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = 8 * j + 2 * t + e;
      const float a = col < C ? sum[4 * j + e] : minus_infinity();
      const float b = col + 1 < C ? sum[4 * j + 2 + e] : minus_infinity();
      if (row0 + row < B) {
        float* to = results.out + static_cast<size_t>(row0 + row) * C + col;
        if (col < C) to[0] = a;
        if (col + 1 < C) to[1] = b;
      }
      if (!stats) continue;
      // The lanes with the same t have the same row.
      MaxSum part = {fmaxf(a, b), 0};
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        part.largest = fmaxf(part.largest, __shfl_xor_sync(kAllLanes, part.largest, lanes));
      }
      part.sum = expf(a - base_of(part.largest)) + expf(b - base_of(part.largest));
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        part.sum += __shfl_xor_sync(kAllLanes, part.sum, lanes);
      }
      if (lane < 4) shared.parts[warp][row] = part;
    }
  }
  if (!stats) return;
  __syncthreads();
  for (int row = threadIdx.x; row < min(kRows, B - row0); row += 128 * kGroups) {
    MaxSum all = shared.parts[0][row];
    for (int i = 1; i < 4 * kGroups; ++i) all = merge(all, shared.parts[i][row]);
    results.tile_stats[static_cast<size_t>(row0 + row) * tiles + tile] = {all.largest, all.sum};
  }
#endif
}

// Turns the logits in `out` (B, C) into probabilities. A block has kFinishColumns columns of row
// blockIdx.x, and all of the row's `tiles` maxima and sums.
constexpr int kFinishColumns = 4096;

__global__ void __launch_bounds__(kSoftmaxThreads)
    finish_columns(float* out, const float2* tile_stats, int C, int tiles) {
  start_next_kernel();
  wait_for_previous_kernel();
  const float2* stats = tile_stats + static_cast<size_t>(blockIdx.x) * tiles;
  MaxSum part = {minus_infinity(), 0};
  for (int i = threadIdx.x; i < tiles; i += kSoftmaxThreads) {
    part = merge(part, {stats[i].x, stats[i].y});
  }
  const MaxSum all = block_merge<kSoftmaxThreads / 32>(warp_merge(part));
  const float base = base_of(all.largest), factor = 1 / all.sum;
  float* row = out + static_cast<size_t>(blockIdx.x) * C;
  const int first = blockIdx.y * kFinishColumns + threadIdx.x;
  const int last = min(C, (static_cast<int>(blockIdx.y) + 1) * kFinishColumns);
#pragma unroll 8
  for (int c = first; c < last; c += kSoftmaxThreads) row[c] = expf(row[c] - base) * factor;
}

// Copies rows of D floats into rows that start `stride` floats apart, a block a row: for the copy
// engine, which finds only what is aligned to 16 bytes.
__global__ void align_rows(const float* from, float* to, int D, int stride) {
  start_next_kernel();
  wait_for_previous_kernel();
  const size_t row = blockIdx.x;
  for (int d = threadIdx.x; d < D; d += blockDim.x) to[row * stride + d] = from[row * D + d];
}

// ---- Hopper: fused exchange ---------------------------------------------------------------------

// For C of thousands. Of its row a block needs to know only a maximum and a sum; what fused online
// pays for is that no block knows them in time, so that each writes what another one has to
// correct. Here the blocks of some rows run at the same time, keep their logits in registers, leave
// each row's maximum and sum in memory, wait until all of the others have, and then write
// probabilities, once.
//
// The product is turned round, as in fused cluster, and otherwise lesson 3's last one: a warpgroup
// that copies, two that multiply, several stages, and clusters of two. For all of the D inputs W
// has no room in registers: it comes through the stages, too, and from there to the registers.
constexpr int kBlockClasses = 128, kExchangeDepth = 32;

template <Math kMath, int kRows>
struct ExchangeShared {
  static constexpr bool kSplit = kMath == Math::split;
  struct Stage {
    float x[kRows * kExchangeDepth];
    float W[kBlockClasses / 32][kExchangeDepth * 32];
  };
  static constexpr int kStageBytes = sizeof(Stage) + (kSplit ? kRows * kExchangeDepth * 4 : 0);
  static constexpr int kStages = std::min(8, (200 << 10) / kStageBytes);
  Stage stages[kStages];
  float x_low[kSplit ? kStages : 1][kSplit ? kRows * kExchangeDepth : 1];
  alignas(16) float parts[8][kRows];  // of the 8 warps: their columns' maximum or sum, for each row
  alignas(16) float rows[kRows];      // what exponentials are relative to; then their factor
  Barrier full[kStages], empty[kStages], split_done[kStages];
};

// What blocks leave to those that have the same rows. Zero before the first launch; a launch leaves
// it ready for the next one. One launch at a time: two streams need one of these each.
struct Exchange {
  // (strips of kRows rows, tiles of 128 classes, kRows): see Left.
  unsigned long long* left;
  unsigned* launches;  // how many have ended, and how many blocks of this one
  int strips_at_once;
};

#if HOPPER_CODE
// A row's maximum in a tile, and the sum relative to it, as 8 bytes that are written and read at
// once. The sum's last bit (which its accuracy can do without) says whether an odd or an even
// launch has written them, so that readers look until it is this launch's: no flag, and no fence.
using Left = unsigned long long;
__device__ inline Left leave(MaxSum part, unsigned turn) {
  return static_cast<Left>((__float_as_uint(part.sum) & ~1u) | turn) << 32 |
         __float_as_uint(part.largest);
}
__device__ inline bool is_left(Left left, unsigned turn) { return (left >> 32 & 1) == turn; }
__device__ inline MaxSum part_of(Left left) {
  return {__uint_as_float(static_cast<unsigned>(left)),
          __uint_as_float(static_cast<unsigned>(left >> 32) & ~1u)};
}

// The 8 lanes with the same l % 4 have kCount values each, and combine them: value i of all of them
// becomes one. Each time a lane keeps one half of its values and gives the other one to a partner,
// so that after three times it has kCount / 8: those from (l / 4 with its 3 bits reversed) * kCount
// / 8 on.
template <int kHalf, int kCount, typename Op>
__device__ inline void combine_halves(float (&v)[kCount], Op op, int lanes) {
  const bool upper = threadIdx.x & lanes;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float send = upper ? v[i] : v[i + kHalf], keep = upper ? v[i + kHalf] : v[i];
    v[i] = op(keep, __shfl_xor_sync(kAllLanes, send, lanes));
  }
}
template <int kCount, typename Op>
__device__ inline void combine_quads(float (&v)[kCount], Op op) {
  combine_halves<kCount / 2>(v, op, 4);
  combine_halves<kCount / 4>(v, op, 8);
  combine_halves<kCount / 8>(v, op, 16);
}

// Beside operands of 10 bits, exp() may be the hardware's 2^x: its error is 2 units in the last
// place, and that of the product another one for each unit of |value|.
template <Math kMath>
__device__ float exp_of(float value) {
  return kMath == Math::tf32 ? exp2_approximate(value * 1.44269504f) : expf(value);
}
#endif

// The two blocks of a cluster have the same kRows rows of x, of which each fetches one half for
// both, and 128 columns of W each. A block is a producer warpgroup and two consumers, of 64 columns
// each. The clusters side by side have all columns of a strip of kRows rows; in a round they take
// strips_at_once strips, which is as many as have all of their blocks running.
//
// A warp has 16 columns, half of a box of 32 in shared memory, and a thread two neighbours of them;
// which half is chosen so that reads of four rows of W meet no bank twice. Which sums a thread has:
// as in fused cluster.
template <Math kMath, int kRows>
__global__ void HOPPER_CLUSTER(2) __launch_bounds__(384, 1)
    exchange_columns(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap W,
                     int B, int D, int C, Exchange others, Results results) {
#if HOPPER_CODE
  using Shared = ExchangeShared<kMath, kRows>;
  constexpr int kStages = Shared::kStages, kSums = kRows / 2;
  constexpr bool kSplit = Shared::kSplit;
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const int rank = cluster_rank(), steps = (D + kExchangeDepth - 1) / kExchangeDepth;
  const int strips = (B + kRows - 1) / kRows;
  const int tiles = (C + 2 * kBlockClasses - 1) / (2 * kBlockClasses) * 2;  // of a strip
  const int tile = blockIdx.x % tiles, col0 = tile * kBlockClasses;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(&shared.full[s], 1);
      barrier_init(&shared.empty[s], 4);  // two consumers in each of two blocks
      barrier_init(&shared.split_done[s], 96);
    }
    barrier_init_fence();
  }
  cluster_meet();
  start_next_kernel();
  wait_for_previous_kernel();

  const unsigned turn = ~others.launches[0] & 1;
  Ring<kStages> ring;
  if (threadIdx.x < 128) {
    registers_shrink_to<40>();
    for (int strip = blockIdx.x / tiles; strip < strips; strip += others.strips_at_once) {
      if (threadIdx.x == 0) {
        for (int step = 0; step < steps; ++step, ring.advance()) {
          auto& stage = shared.stages[ring.stage];
          Barrier* arrived = &shared.full[ring.stage];
          barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
          barrier_arrive_expect(arrived, sizeof stage);
          const int row = rank * kRows / 2, k = step * kExchangeDepth;
          tensor_load_multicast(stage.x + row * kExchangeDepth, &x, strip * kRows + row, k, arrived,
                                3);
          for (int box = 0; box < kBlockClasses / 32; ++box) {
            tensor_load(stage.W[box], &W, k, col0 + 32 * box, arrived);
          }
        }
      } else if (kSplit && threadIdx.x >= 32) {
        // The producer's other warps split x, all of a stage: in whatever order it lies there.
        for (int step = 0; step < steps; ++step, ring.advance()) {
          barrier_wait(&shared.full[ring.stage], ring.parity);
          split_all(shared.stages[ring.stage].x, shared.x_low[ring.stage], kRows * kExchangeDepth,
                    threadIdx.x - 32, 96);
          shared_fence();
          barrier_arrive(&shared.split_done[ring.stage]);
        }
      }
    }
    if (threadIdx.x == 0) wait_until_empty(shared.empty, ring);
  } else {
    registers_grow_to<232>();
    const int consumer = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
    const int warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const auto release = [&](int stage) {  // threads 0 and 1 tell the producers of blocks 0 and 1
      if (thread < 2) barrier_arrive(&shared.empty[stage], thread);
    };
    // Of its warp's box: 16-byte piece, and which half of it.
    const int piece = 2 * (warp % 2) + g / 2 % 2 * 4 + g / 4, half = g % 2;
    const int box = 2 * consumer + warp / 2;
    const int near = t * 32 + (piece ^ t) * 4 + half * 2;
    const int far = (t + 4) * 32 + (piece ^ t ^ 4) * 4 + half * 2;
    const auto load_next = [&](float(&w)[4][4]) {
      barrier_wait(&shared.full[ring.stage], ring.parity);
      const float* from = shared.stages[ring.stage].W[box];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 a = *reinterpret_cast<const float2*>(from + 8 * 32 * k + near);
        const float2 b = *reinterpret_cast<const float2*>(from + 8 * 32 * k + far);
        w[k][0] = a.x, w[k][1] = a.y, w[k][2] = b.x, w[k][3] = b.y;
      }
    };
    float sum[kSums];
    for (int strip = blockIdx.x / tiles; strip < strips; strip += others.strips_at_once) {
      // While one step is multiplied, the fragments of the next one are loaded: two sets of
      // registers, and therefore two steps a turn.
      float w[2][4][4];
      int previous = 0;
      const auto multiply = [&](const float(&set)[4][4], int step) {
        if constexpr (kSplit) barrier_wait(&shared.split_done[ring.stage], ring.parity);
        add_products<kMath, kMath == Math::tf32>(sum, set, shared.stages[ring.stage].x,
                                                 shared.x_low[kSplit ? ring.stage : 0], step > 0);
        wgmma_wait<1>();
        if (step > 0) release(previous);
        previous = ring.stage;
        ring.advance();
      };
      load_next(w[0]);
      for (int step = 0; step < steps; step += 2) {
        multiply(w[0], step);
        if (step + 1 == steps) break;
        load_next(w[1]);
        multiply(w[1], step + 1);
        if (step + 2 < steps) load_next(w[0]);
      }
      wgmma_wait<0>();
      release(previous);

      const int row0 = strip * kRows;
      const int col = col0 + 32 * box + 4 * piece + 2 * half;
      const int own = threadIdx.x - 128, warp8 = own / 32;  // of the 256 consumers
      const int reversed = (g & 1) * 4 + (g & 2) + (g >> 2);
      if (results.epilogue == Epilogue::softmax) {
        // For each row the maximum of the thread's two columns, of the warp's 16, of the block's.
        constexpr int kPairs = kRows / 4, kLeft = kPairs / 8;
        float of_row[kPairs];
        const auto leave_parts = [&] {
#pragma unroll
          for (int i = 0; i < kLeft; ++i) {
            const int at = reversed * kLeft + i;
            shared.parts[warp8][at / 2 * 8 + 2 * t + at % 2] = of_row[i];
          }
        };
        if (col >= C) {
#pragma unroll
          for (int i = 0; i < kSums; ++i) sum[i] = minus_infinity();
        }
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          of_row[i] = fmaxf(sum[i / 2 * 4 + i % 2], sum[i / 2 * 4 + 2 + i % 2]);
        }
        combine_quads(of_row, [](float a, float b) { return fmaxf(a, b); });
        leave_parts();
        named_barrier(1, 256);
        MaxSum row = {minus_infinity(), 0};
        if (own < kRows) {
#pragma unroll
          for (int i = 0; i < 8; ++i) row.largest = fmaxf(row.largest, shared.parts[i][own]);
          shared.rows[own] = base_of(row.largest);
        }
        named_barrier(1, 256);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          const float base = shared.rows[i / 2 * 8 + 2 * t + i % 2];
          float &a = sum[i / 2 * 4 + i % 2], &b = sum[i / 2 * 4 + 2 + i % 2];
          a = exp_of<kMath>(a - base), b = exp_of<kMath>(b - base);
          of_row[i] = a + b;
        }
        combine_quads(of_row, [](float a, float b) { return a + b; });
        leave_parts();
        named_barrier(1, 256);
        const auto left_at = [&](int tile) {
          const size_t at = (static_cast<size_t>(strip) * tiles + tile) * kRows + own;
          return cuda::atomic_ref<Left, cuda::thread_scope_device>(others.left[at]);
        };
        if (own < kRows) {
#pragma unroll
          for (int i = 0; i < 8; ++i) row.sum += shared.parts[i][own];
          left_at(tile).store(leave(row, turn), cuda::memory_order_relaxed);

          // Those of all blocks of these rows, 16 loads at a time.
          MaxSum all = {minus_infinity(), 0};
          constexpr int kAtOnce = 16;
          for (int first = 0; first < tiles; first += kAtOnce) {
            Left left[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
              left[i] = leave({minus_infinity(), 0}, turn);
              if (first + i < tiles) left[i] = left_at(first + i).load(cuda::memory_order_relaxed);
            }
            float largest = all.largest;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
              while (!is_left(left[i], turn)) {
                left[i] = left_at(first + i).load(cuda::memory_order_relaxed);
              }
              largest = fmaxf(largest, part_of(left[i]).largest);
            }
            all = {largest, all.sum * rebase(all.largest, largest)};
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
              const MaxSum part = part_of(left[i]);
              all.sum += part.sum * exp_of<kMath>(part.largest - base_of(largest));
            }
          }
          shared.rows[own] = rebase(row.largest, all.largest) / all.sum;
        }
      } else if (own < kRows) {
        shared.rows[own] = 1;
      }
      named_barrier(1, 256);

      if (col >= C) continue;
      const auto write = [&](auto inside) {
        float* to = results.out + static_cast<size_t>(row0 + 2 * t) * C + col;
#pragma unroll
        for (int j = 0; j < kRows / 8; ++j) {
          const int row = 8 * j + 2 * t;
          const float2 factors = *reinterpret_cast<const float2*>(&shared.rows[row]);
          const float2 a = {sum[4 * j] * factors.x, sum[4 * j + 2] * factors.x};
          const float2 b = {sum[4 * j + 1] * factors.y, sum[4 * j + 3] * factors.y};
          if (inside(row)) *reinterpret_cast<float2*>(to) = a;
          if (inside(row + 1)) *reinterpret_cast<float2*>(to + C) = b;
          to += 8 * static_cast<size_t>(C);
        }
      };
      if (row0 + kRows <= B) {
        write([](int) { return true; });
      } else {
        write([&](int row) { return row0 + row < B; });
      }
    }
  }
  __syncthreads();  // all have read `launches`
  if (threadIdx.x == 0 && results.epilogue == Epilogue::softmax) {
    if (atomicAdd(others.launches + 1, 1) == gridDim.x - 1) {
      others.launches[1] = 0;
      ++others.launches[0];
    }
  }
#endif
}

// -------------------------------------------------------------------------------------------------

unsigned blocks(int64_t count, int64_t per_block) {
  return static_cast<unsigned>((count + per_block - 1) / per_block);
}

// logits (B, C) = x W by cuBLAS; row-major: W and x swapped, see lesson 4.
void library_product(cublasHandle_t blas, const float* x, const float* W, float* logits,
                     const SoftmaxShape& shape, cublasComputeType_t compute) {
  const float one = 1, zero = 0;
  const int B = static_cast<int>(shape.rows), D = static_cast<int>(shape.inputs),
            C = static_cast<int>(shape.classes);
  CUBLAS_CHECK(cublasGemmEx(blas, CUBLAS_OP_N, CUBLAS_OP_N, C, B, D, &one, W, CUDA_R_32F, C, x,
                            CUDA_R_32F, D, &zero, logits, CUDA_R_32F, C, compute,
                            CUBLAS_GEMM_DEFAULT));
}

// probs = softmax(logits): a warp a row, or a block where that is too long.
void softmax(const float* logits, float* probs, const SoftmaxShape& shape) {
  const int B = static_cast<int>(shape.rows), C = static_cast<int>(shape.classes);
  const unsigned warps = blocks(B, kSoftmaxThreads / 32);
  if (C > 8192 && B <= 512) {  // few blocks: each has to be fast
    launch_early(softmax_long_rows<1024>, B, 1024, 0, logits, probs, C);
  } else if (C > 8192) {
    launch_early(softmax_long_rows<kSoftmaxThreads>, B, kSoftmaxThreads, 0, logits, probs, C);
  } else if (C % 4 != 0) {
    if (C <= 32) {
      launch_early(softmax_rows<32, 1, 1>, warps, kSoftmaxThreads, 0, logits, probs, B, C);
    } else if (C <= 128) {
      launch_early(softmax_rows<32, 4, 1>, warps, kSoftmaxThreads, 0, logits, probs, B, C);
    } else if (C <= 1024) {
      launch_early(softmax_rows<32, 32, 1>, warps, kSoftmaxThreads, 0, logits, probs, B, C);
    } else {
      launch_early(softmax_rows<256, 32, 1>, B, kSoftmaxThreads, 0, logits, probs, B, C);
    }
  } else if (C <= 128) {
    launch_early(softmax_rows<32, 4, 4>, warps, kSoftmaxThreads, 0, logits, probs, B, C);
  } else if (C <= 1024) {
    launch_early(softmax_rows<32, 32, 4>, warps, kSoftmaxThreads, 0, logits, probs, B, C);
  } else {
    launch_early(softmax_rows<256, 32, 4>, B, kSoftmaxThreads, 0, logits, probs, B, C);
  }
}

// One of the kernels above with its tile, its grid, and what it needs besides results.
struct Product {
  const char* name;
  std::function<void(Results)> launch;
  std::function<void(Kernel&)> state_resources;
};

template <typename Function>
Product product_of(const char* name, Function* kernel, int threads, int shared_bytes,
                   std::function<void(Results)> launch) {
  allow_shared_bytes(kernel, shared_bytes);
  return {name, std::move(launch),
          [=](Kernel& row) { row.resources(kernel, threads, shared_bytes); }};
}

Factors factors_of(const float* x, const float* W, const SoftmaxShape& shape) {
  const auto row_bytes = [](int64_t columns) {
    const int64_t bytes = 4 * columns;
    return static_cast<int>(std::min<int64_t>(16, bytes & -bytes));
  };
  return {x,
          W,
          static_cast<int>(shape.rows),
          static_cast<int>(shape.inputs),
          static_cast<int>(shape.classes),
          row_bytes(shape.inputs),
          row_bytes(shape.classes)};
}

// D is split until the GPU is full, but into no less than kLeastDepth.
constexpr int64_t kLeastDepth = 128, kMostSplits = 8;

template <class Tile>
Product make_all_columns(const Lesson& lesson, Problem& problem, const SoftmaxShape& shape,
                         const Buffer<float>& x, const Buffer<float>& W) {
  constexpr int kBytes = Tile::kStageBytes + Tile::kLogitBytes;
  const unsigned row_tiles = blocks(shape.rows, Tile::BM);
  const int64_t sms = lesson.device().sms;
  const int64_t most = std::min(shape.inputs / kLeastDepth, kMostSplits);
  const unsigned splits =
      static_cast<unsigned>(std::max<int64_t>(1, std::min(most, sms / row_tiles)));
  const auto partial = problem.output<float>(splits > 1 ? splits * shape.rows * shape.classes : 1);
  const auto arrived = problem.workspace<unsigned>(row_tiles);
  const auto launch = [=](Results results) {
    results.partial = partial;
    results.arrived = arrived;
    launch_early(all_columns<Tile>, dim3(row_tiles, splits), Tile::kThreads, kBytes,  //
                 factors_of(x, W, shape), results);
  };
  return product_of("tiles", all_columns<Tile>, Tile::kThreads, kBytes, launch);
}

template <class Tile>
Product make_column_tiles(Problem& problem, const SoftmaxShape& shape, const Buffer<float>& x,
                          const Buffer<float>& W) {
  constexpr int kBytes = Tile::kStageBytes;
  const unsigned strips = blocks(shape.rows, Tile::BM), columns = blocks(shape.classes, Tile::BN);
  const auto stats = problem.output<float>(2 * shape.rows * blocks(shape.classes, Tile::kCols));
  const auto arrived = problem.workspace<unsigned>(strips);
  const auto launch = [=](Results results) {
    results.tile_stats = reinterpret_cast<float2*>(stats.data());
    results.arrived = arrived;
    launch_early(column_tiles<Tile>, strips * columns, Tile::kThreads, kBytes,  //
                 factors_of(x, W, shape), results);
  };
  return product_of("online", column_tiles<Tile>, Tile::kThreads, kBytes, launch);
}

// From a row of x to the next in what the copy engine reads, in floats.
int64_t aligned_stride(const SoftmaxShape& shape) { return (shape.inputs + 3) / 4 * 4; }

template <Math kMath, int kSplits, int kRows, int kClasses, int kDepth>
Product make_cluster(const SoftmaxShape& shape, const Buffer<float>& x, const Buffer<float>& W) {
  constexpr int kBytes = sizeof(ClusterShared<kMath, kSplits, kRows, kClasses, kDepth>);
  const auto launch = [=](Results results) {
    const CUtensorMap x_map = tensor_map<float>(x, shape.rows, shape.inputs, kRows,
                                                kMath == Math::tf32, aligned_stride(shape));
    launch_early(cluster_columns<kMath, kSplits, kRows, kClasses, kDepth>,
                 kSplits * blocks(shape.rows, kRows), 2 * kClasses, kBytes,  //
                 x_map, W, static_cast<int>(shape.rows), static_cast<int>(shape.inputs),
                 static_cast<int>(shape.classes), results);
  };
  return product_of("cluster", cluster_columns<kMath, kSplits, kRows, kClasses, kDepth>,
                    2 * kClasses, kBytes, launch);
}

template <int kRows, int kGroups, int kAhead, int kBlocksPerSm>
Product make_streamed(Problem& problem, const SoftmaxShape& shape, const Buffer<float>& x,
                      const Buffer<float>& W) {
  constexpr int kBytes = sizeof(StreamShared<kRows, kGroups>), kThreads = 128 * kGroups;
  const int B = static_cast<int>(shape.rows), D = static_cast<int>(shape.inputs),
            C = static_cast<int>(shape.classes), tiles = blocks(C, 64 * kGroups);
  const auto stats = problem.workspace<float>(2 * shape.rows * tiles);
  const auto launch = [=](Results results) {
    const CUtensorMap x_map = tensor_map<float>(x, B, D, kRows, true, aligned_stride(shape));
    results.tile_stats = reinterpret_cast<float2*>(stats.data());
    // Where a row fits into registers, the usual softmax is as good: then this is the unfused form.
    const bool probabilities = results.epilogue == Epilogue::softmax, short_rows = C <= 4096;
    if (short_rows) results.epilogue = Epilogue::logits;
    launch_early(streamed_columns<kRows, kGroups, kAhead, kBlocksPerSm>, tiles * blocks(B, kRows),
                 kThreads, kBytes, x_map, W, B, D, C, results);
    if (probabilities && short_rows) {
      softmax(results.out, results.out, shape);
    } else if (probabilities) {
      launch_early(finish_columns, dim3(B, blocks(C, kFinishColumns)), kSoftmaxThreads, 0,
                   results.out, results.tile_stats, C, tiles);
    }
  };
  return product_of("streamed", streamed_columns<kRows, kGroups, kAhead, kBlocksPerSm>, kThreads,
                    kBytes, launch);
}

// Tiles of 128, 192 or 256 classes: whichever keep the multiprocessors busy to the end. Of the
// narrow ones two blocks fit at a time. If there are few rows, there is room to look further ahead.
Product choose_streamed(const Lesson& lesson, Problem& problem, const SoftmaxShape& shape,
                        const Buffer<float>& x, const Buffer<float>& W) {
  const bool few_rows = shape.rows <= 64;
  const int64_t sms = lesson.device().sms;
  const auto cost = [&](int groups, int blocks_per_sm) {
    const int64_t all = int64_t{1} * blocks(shape.classes, 64 * groups) * blocks(shape.rows, 128);
    return static_cast<double>(blocks(all, sms * blocks_per_sm) * groups * blocks_per_sm);
  };
  const double two = few_rows ? cost(2, 1) * 1.2 : cost(2, 2), three = cost(3, 1) * 1.1;
  if (three < std::min(two, cost(4, 1))) {
    return few_rows ? make_streamed<64, 3, 2, 1>(problem, shape, x, W)
                    : make_streamed<128, 3, 2, 1>(problem, shape, x, W);
  }
  if (two < cost(4, 1)) {
    return few_rows ? make_streamed<64, 2, 3, 1>(problem, shape, x, W)
                    : make_streamed<128, 2, 1, 2>(problem, shape, x, W);
  }
  return few_rows ? make_streamed<64, 4, 2, 1>(problem, shape, x, W)
                  : make_streamed<128, 4, 1, 1>(problem, shape, x, W);
}

constexpr int kExchangeThreads = 384;

template <Math kMath, int kRows>
Product make_exchange(Problem& problem, const SoftmaxShape& shape, const Buffer<float>& x,
                      const Buffer<float>& W, int clusters) {
  constexpr int kBytes = sizeof(ExchangeShared<kMath, kRows>);
  const unsigned tiles = 2 * blocks(shape.classes, 2 * kBlockClasses);
  const unsigned strips = blocks(shape.rows, kRows);
  // Only as many strips at a time as have all of their blocks running: these wait for each other.
  // (Counted for a GPU that this launch has to itself, as in lesson 7.)
  const unsigned at_once = persistent(strips, 2 * clusters / tiles);
  const auto left = problem.workspace<float>(2 * static_cast<size_t>(strips) * tiles * kRows);
  const auto launches = problem.workspace<unsigned>(2);
  const auto launch = [=](Results results) {
    const CUtensorMap x_map = tensor_map<float>(x, shape.rows, shape.inputs, kRows / 2,
                                                kMath == Math::tf32, aligned_stride(shape));
    const CUtensorMap W_map =
        tensor_map<float>(W, shape.inputs, shape.classes, kExchangeDepth, kMath == Math::tf32);
    const Exchange others = {reinterpret_cast<unsigned long long*>(left.data()), launches,
                             static_cast<int>(at_once)};
    launch_early(exchange_columns<kMath, kRows>, at_once * tiles, kExchangeThreads, kBytes,  //
                 x_map, W_map, static_cast<int>(shape.rows), static_cast<int>(shape.inputs),
                 static_cast<int>(shape.classes), others, results);
  };
  return product_of("exchange", exchange_columns<kMath, kRows>, kExchangeThreads, kBytes, launch);
}

// Of strips of kRows rows or less, the most rows that leave few multiprocessors without work.
template <Math kMath, int kRows>
std::optional<Product> choose_exchange(const Lesson& lesson, Problem& problem,
                                       const SoftmaxShape& shape, const Buffer<float>& x,
                                       const Buffer<float>& W) {
  const unsigned tiles = 2 * blocks(shape.classes, 2 * kBlockClasses);
  if constexpr (kRows > 64) {
    if (blocks(shape.rows, kRows) * tiles * 10 < lesson.device().sms * 9u) {
      return choose_exchange<kMath, kRows / 2>(lesson, problem, shape, x, W);
    }
  }
  const auto kernel = exchange_columns<kMath, kRows>;
  constexpr int kBytes = sizeof(ExchangeShared<kMath, kRows>);
  allow_shared_bytes(kernel, kBytes);
  const int clusters = resident_clusters(kernel, 2, kExchangeThreads, kBytes);
  if (2u * clusters < tiles) return {};
  return make_exchange<kMath, kRows>(problem, shape, x, W, clusters);
}

// What Hopper has for a shape, if anything; rows of x are aligned.
template <Math kMath>
std::optional<Product> choose_hopper_product(const Lesson& lesson, Problem& problem,
                                             const SoftmaxShape& shape, const Buffer<float>& x,
                                             const Buffer<float>& W) {
  const int64_t B = shape.rows, C = shape.classes;
  if (C > kClusterClasses) {
    // With split operands a thread has the sums of a step, too: half as many rows.
    constexpr int kRows = kMath == Math::split ? 128 : 256;
    std::optional<Product> product;
    if (C % 4 == 0) product = choose_exchange<kMath, kRows>(lesson, problem, shape, x, W);
    if constexpr (kMath == Math::tf32) {
      if (!product) product = choose_streamed(lesson, problem, shape, x, W);
    }
    return product;
  }
  // cluster<kMath, kSplits, kRows, kClasses, kDepth>. Few rows: D is split over more blocks. 40
  // rows: of 1024 rows 26 clusters of 4, which is about as many as fit on the GPU at a time.
  if (B <= 512) {
    return C <= 64 ? make_cluster<kMath, 8, 16, 64, 64>(shape, x, W)
                   : make_cluster<kMath, 8, 16, 128, 64>(shape, x, W);
  }
  // Split operands take twice the registers for W: fewer inputs at a time, and more rows and
  // blocks.
  if constexpr (kMath == Math::split) {
    return C <= 64 ? make_cluster<kMath, 8, 80, 64, 128>(shape, x, W)
                   : make_cluster<kMath, 8, 80, 128, 128>(shape, x, W);
  } else {
    return C <= 64 ? make_cluster<kMath, 4, 40, 64, 256>(shape, x, W)
                   : make_cluster<kMath, 4, 40, 128, 256>(shape, x, W);
  }
}

// The same for rows of x that start anywhere: they are aligned first, if they have to be.
template <Math kMath>
std::optional<Product> make_hopper_product(const Lesson& lesson, Problem& problem,
                                           const SoftmaxShape& shape, const Buffer<float>& x,
                                           const Buffer<float>& W) {
  constexpr int64_t kMost = INT32_MAX - 512;  // where a tile ends is an int, too
  if (shape.rows > kMost || shape.inputs > kMost) return {};
  const int D = static_cast<int>(shape.inputs);
  if (D % 4 == 0) return choose_hopper_product<kMath>(lesson, problem, shape, x, W);
  const int stride = static_cast<int>(aligned_stride(shape));
  const auto aligned = problem.workspace<float>(shape.rows * stride);
  auto product = choose_hopper_product<kMath>(lesson, problem, shape, aligned, W);
  if (product) {
    product->launch = [=, launch = product->launch](Results results) {
      launch_early(align_rows, static_cast<unsigned>(shape.rows), 256, 0, x, aligned, D, stride);
      launch(results);
    };
  }
  return product;
}

// The tiles for a shape. BM, BN, BK; warps along rows, columns and D; stages.
template <Math kMath>
Product make_product(const Lesson& lesson, Problem& problem, const SoftmaxShape& shape,
                     const Buffer<float>& x, const Buffer<float>& W) {
  const int64_t C = shape.classes;
  // Compute capability 8.0 has 163 KB of shared memory for a block, 8.6 99 KB, 7.5 64 KB: where a
  // tile does not fit, smaller ones of column_tiles() do.
  const bool large = lesson.device().shared_bytes >= 220 << 10;
  const bool medium = lesson.device().shared_bytes >= 110 << 10;
  if (C <= 16) {
    constexpr int kRows = kMath == Math::fp32 ? 8 : 16;
    return make_all_columns<Tile<kMath, kRows, 16, 64, 1, 1, 8, 3>>(lesson, problem, shape, x, W);
  }
  if (C <= 64 && large) {
    constexpr int kCols = kMath == Math::fp32 ? 64 : 56;
    if (C <= kCols) {
      return make_all_columns<Tile<kMath, 16, kCols, 64, 1, 1, 8, 4>>(lesson, problem, shape, x, W);
    }
  }
  if (C <= 104 && large) {
    return make_all_columns<Tile<kMath, 32, 104, 64, 2, 1, 4, 4>>(lesson, problem, shape, x, W);
  }
  if (C <= 256 && large) {
    return make_all_columns<Tile<kMath, 32, 256, 32, 1, 4, 2, 3>>(lesson, problem, shape, x, W);
  }
  if (large || (medium && C > 256)) {
    // Of a warp: 64 x 32 where W comes from shared memory as single floats; 32 x 64 where both
    // factors come as vectors of 4; 32 x 32, of twice as many warps, where it also has to have
    // the sums of a step, and the parts of split operands.
    constexpr int kWarpsM = kMath == Math::tf32 ? 2 : 4;
    constexpr int kWarpsN = kMath == Math::fp32 ? 2 : 4;
    return make_column_tiles<Tile<kMath, 128, 128, 32, kWarpsM, kWarpsN, 1, 3>>(problem, shape, x,
                                                                                W);
  }
  return make_column_tiles<Tile<kMath, 64, 64, 32, 2, 2, 1, 2>>(problem, shape, x, W);
}

// ---- The tables ---------------------------------------------------------------------------------

// A table of softmax(x W) with its buffers, and the rows that such tables have in common.
struct Layer {
  std::string name;
  SoftmaxShape shape;
  Problem& problem;
  Buffer<float> x, W;
  Buffer<float> probs;
  Buffer<float> logits;  // of the unfused ways

  Layer(Lesson& lesson, const std::string& name, const SoftmaxShape& shape, const char* dtype,
        Rate rate)
      : name(name),
        shape(shape),
        problem(lesson.problem(name, {{"B", shape.rows}, {"D", shape.inputs}, {"C", shape.classes}},
                               dtype, {.flops = shape.flops(), .bytes = shape.bytes(sizeof(float))},
                               rate)),
        x(problem.input<float>(shape.rows * shape.inputs)),
        W(problem.input<float>(shape.inputs * shape.classes,
                               kWeightScale / sqrt(static_cast<double>(shape.inputs)))),
        probs(problem.output<float>(shape.rows * shape.classes)),
        logits(problem.output<float>(shape.rows * shape.classes)) {
    problem.in_graph();
  }

  // Ways (2) and (3), by the same product.
  void add_ours(const Product& product, const std::string& suffix, int needs_cc) const {
    const auto out = probs, between = logits;
    const auto form = shape;
    const std::string fused = std::string("fused ") + product.name + suffix;
    const std::string unfused = "un" + fused;
    product.state_resources(problem
                                .kernel(unfused, Role::ours,
                                        [=] {
                                          product.launch(
                                              {.epilogue = Epilogue::logits, .out = between});
                                          softmax(between, out, form);
                                        })
                                .needs(needs_cc));
    product.state_resources(
        problem
            .kernel(fused, Role::ours,
                    [=] { product.launch({.epilogue = Epilogue::softmax, .out = out}); })
            .needs(needs_cc));
    const std::string what = name + ", " + product.name + suffix + ": ";
    problem.compare(fused, unfused, what + "fused (3) against unfused (2), % times faster.");
    problem.compare(unfused, "library", what + "unfused (2) against library (1), % times faster.");
  }

  // The same for Hopper's product, if the shape has one.
  template <Math kMath>
  void add_hopper(const Lesson& lesson, const std::string& suffix) const {
    const auto product = make_hopper_product<kMath>(lesson, problem, shape, x, W);
    if (product) add_ours(*product, suffix, 90);
  }
};

std::string text_of(const SoftmaxShape& shape) {
  return std::to_string(shape.rows) + "x" + std::to_string(shape.inputs) + "x" +
         std::to_string(shape.classes);
}

constexpr double kMostFlopsOfFusedRows = 1e11;

// The table of a shape in fp32 or, if `tf32`, in TF32.
void add_table(Lesson& lesson, cublasHandle_t blas, const SoftmaxShape& shape, bool tf32) {
  const std::string name = (tf32 ? "TF32 " : "fp32 ") + text_of(shape);
  const Layer layer(lesson, name, shape, tf32 ? "tf32" : "fp32", tf32 ? Rate::tf32 : Rate::fp32);
  Problem& problem = layer.problem;
  const auto x = layer.x, W = layer.W, probs = layer.probs, logits = layer.logits;
  const auto expected = problem.reference(probs.size());
  if (lesson.flag("--hard-rows")) problem.adjust_inputs([=] { make_hard(x, W, shape); });
  problem.reference_from(softmax_scratch(shape),
                         [=] { reference_softmax<float>(blas, x, W, expected, shape); });
  problem.check(probs, expected,
                tf32 ? softmax_tolerance(shape.inputs, tensor_core_sum(shape.inputs), kRoundoffTf32)
                     : softmax_tolerance(shape.inputs, kRoundoffFp32));

  const int needs_cc = tf32 ? 80 : 0;
  problem
      .kernel("library", Role::library,
              [=] {
                library_product(blas, x, W, logits, shape,
                                tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F);
                softmax(logits, probs, shape);
              })
      .needs(needs_cc);
  // It reads W once per row: of the largest shapes 20 calls would take a minute.
  if (!tf32 && shape.flops() < kMostFlopsOfFusedRows) {
    problem
        .kernel("fused rows", Role::baseline,
                [=] {
                  launch_early(fused_rows, static_cast<unsigned>(shape.rows), kSoftmaxThreads, 0, x,
                               W, probs, static_cast<int>(shape.inputs),
                               static_cast<int>(shape.classes));
                })
        .resources(fused_rows, kSoftmaxThreads);
  }
  // It rounds nothing, in TF32's table either: for a few columns, that is what tensor cores have to
  // beat.
  if (shape.classes <= 16) {
    problem
        .kernel("fused rows, D split", Role::ours,
                [=] {
                  launch_early(fused_narrow_rows<16>, static_cast<unsigned>(shape.rows),
                               kSoftmaxThreads, 0, x, W, probs, static_cast<int>(shape.inputs),
                               static_cast<int>(shape.classes));
                })
        .resources(fused_narrow_rows<16>, kSoftmaxThreads);
  }
  if (tf32) {
    layer.add_ours(make_product<Math::tf32>(lesson, problem, shape, x, W), "", needs_cc);
    layer.add_hopper<Math::tf32>(lesson, "");
    return;
  }
  layer.add_ours(make_product<Math::fp32>(lesson, problem, shape, x, W), "", needs_cc);
  layer.add_ours(make_product<Math::split>(lesson, problem, shape, x, W), ", 3xTF32", 80);
  layer.add_hopper<Math::split>(lesson, ", 3xTF32");
}

// A line a shape: what fusion saves.
void add_bytes_note(Lesson& lesson, const SoftmaxShape& shape) {
  char text[160];
  snprintf(text, sizeof text,
           "%s: logits that fusion does not write and not read: 2 x %.4g MB, of %.4g MB without.",
           text_of(shape).c_str(), 4e-6 * shape.logits(),
           1e-6 * (shape.bytes(sizeof(float)) + 8 * shape.logits()));
  lesson.note(text);
}

// With --hard-rows: rows of only -inf, beside others. What is verified are their NaN.
void add_only_minus_infinity(Lesson& lesson, cublasHandle_t blas, const SoftmaxShape& shape) {
  const Layer layer(lesson, "only -inf " + text_of(shape), shape, "fp32", Rate::fp32);
  Problem& problem = layer.problem;
  const auto x = layer.x, W = layer.W, probs = layer.probs, logits = layer.logits;
  const auto marked = problem.output<float>(probs.size());
  const auto expected = problem.reference(probs.size());
  const int B = static_cast<int>(shape.rows), D = static_cast<int>(shape.inputs),
            C = static_cast<int>(shape.classes);
  problem.adjust_inputs([=] { make_only_minus_infinity(x, W, shape); });
  problem.reference_from(softmax_scratch(shape), [=] {
    reference_softmax<float>(blas, x, W, expected, shape);
    mark_nan(expected, expected.size());
  });
  problem.check(marked, expected,
                softmax_tolerance(shape.inputs, tensor_core_sum(shape.inputs), kRoundoffTf32));
  const auto add = [&](const std::string& name, int needs_cc, std::function<void()> launch) {
    problem
        .kernel(name, Role::ours,
                [=] {
                  launch();
                  mark_nan(probs, marked, probs.size());
                })
        .needs(needs_cc);
  };
  const auto fused = [&](const auto& product, const std::string& suffix, int needs_cc) {
    add(std::string("fused ") + product.name + suffix, needs_cc,
        [=] { product.launch({.epilogue = Epilogue::softmax, .out = probs}); });
  };
  add("library", 0, [=] {
    library_product(blas, x, W, logits, shape, CUBLAS_COMPUTE_32F);
    softmax(logits, probs, shape);
  });
  add("fused rows", 0, [=] { launch_early(fused_rows, B, kSoftmaxThreads, 0, x, W, probs, D, C); });
  fused(make_product<Math::fp32>(lesson, problem, shape, x, W), "", 0);
  fused(make_product<Math::tf32>(lesson, problem, shape, x, W), ", TF32", 80);
  fused(make_product<Math::split>(lesson, problem, shape, x, W), ", 3xTF32", 80);
  const auto rounded = make_hopper_product<Math::tf32>(lesson, problem, shape, x, W);
  if (rounded) fused(*rounded, ", TF32", 90);
  const auto split = make_hopper_product<Math::split>(lesson, problem, shape, x, W);
  if (split) fused(*split, ", 3xTF32", 90);
}

int main(int argc, char** argv) {
  Lesson lesson(
      argc, argv,
      {.name = "9_matmul_softmax",
       .title = "softmax(x W): the library, ours unfused, ours fused",
       .n_meaning = "B, rows of x; without a shape: two of those of --all",
       .n_gpu = 4096,
       .n_cpu = 64,
       .options = {{"--inputs", "D, columns of x", 1024}, {"--classes", "C, columns of W", 1000}},
       .flags = {{"--all", "the fp32 tables, too; without a shape: five shapes (CPU: four)"},
                 {"--hard-rows", "make logits huge, equal and -inf in some rows"}}});
  const bool all = lesson.flag("--all");
  std::vector<SoftmaxShape> shapes = {
      {64, 128, 10}, {256, 512, 50}, {1024, 1024, 100}, {4096, 1024, 1000}, {8192, 4096, 8192}};
  if (lesson.on_cpu()) shapes = {{8, 16, 10}, {33, 65, 50}, {17, 129, 130}, {5, 40, 300}};
  if (lesson.given("N") || lesson.given("--inputs") || lesson.given("--classes")) {
    shapes = {{lesson.n(), lesson.option("--inputs"), lesson.option("--classes")}};
  } else if (!all) {  // one where fusion counts, one where the product does
    shapes = {shapes[1], shapes.back()};
  }
  if (lesson.flag("--hard-rows") && shapes.front().inputs < kSpecialInputs) {
    fail(kBadUsage, "--hard-rows needs at least %d inputs", kSpecialInputs);
  }

  Cublas blas;
  const bool has_tf32 = lesson.on_cpu() || lesson.device().major >= 8;
  for (const SoftmaxShape& shape : shapes) {
    if (all || has_tf32) add_table(lesson, blas, shape, true);
    if (all || !has_tf32) add_table(lesson, blas, shape, false);
    add_bytes_note(lesson, shape);
  }
  if (lesson.flag("--hard-rows")) {
    for (const SoftmaxShape& shape : shapes) add_only_minus_infinity(lesson, blas, shape);
  }
  return lesson.run();
}
