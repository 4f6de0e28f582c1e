// softmax(x W) of few columns, or of few rows. There the other kernels have too few loads under way
// at the same time.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "operators/softmax/layer.cuh"
#include "operators/softmax/rows.cuh"
#include "primitives/hopper/hopper.cuh"

namespace operators::softmax {

// ---- Few columns --------------------------------------------------------------------------------

// Lesson 9's *fused split-K*, for up to kCols columns. A block has a row, and its threads share D:
// thread t has column t % kCols, and every (256 / kCols)-th input from t / kCols on. It loads 8
// inputs of x, and 8 elements of W, before it uses the first. So with 16 columns the block's loads
// for 128 inputs are under way at once, and take one latency together. Lanes with the same column
// add up their sums by shuffles, and warps add them up through shared memory. After that the first
// warp has all of the row's logits, one in a lane. Each block reads all of W.
template <int kCols>
__global__ void __launch_bounds__(kSoftmaxThreads)
    fused_rows_split(const float* x, const float* W, float* probs, int D, int C) {
  start_next_kernel();
  wait_for_previous_kernel();
  constexpr int kWarps = kSoftmaxThreads / 32, kColThreads = kSoftmaxThreads / kCols, kAtOnce = 8;
  __shared__ float sums[kWarps][kCols];
  const float* x_row = x + static_cast<size_t>(blockIdx.x) * D;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, col = lane % kCols;
  float logit = 0;
  for (int d0 = threadIdx.x / kCols; d0 < D; d0 += kAtOnce * kColThreads) {
    // All loads come first. Beyond D or C they load some valid element: with a branch each load
    // would wait for the one before.
    float left[kAtOnce], right[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int d = min(d0 + i * kColThreads, D - 1);
      left[i] = x_row[d], right[i] = W[static_cast<size_t>(d) * C + min(col, C - 1)];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (d0 + i * kColThreads < D) logit += left[i] * right[i];
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

constexpr int kFewColumns = 16;
inline Product make_rows_split(const Layer& layer) {
  const auto kernel = fused_rows_split<kFewColumns>;
  const auto launch = [=](const Results& results) {
    layer.launch(kernel, layer.B, kSoftmaxThreads, 0, layer.x.data(), layer.W.data(), results.out,
                 layer.D, layer.C);
  };
  Product product = product_of(Kernels::rows_split, kernel, 0, launch);
  // Fitted to shapes drawn at random, on an H200. A block alone waits for its loads, and many
  // blocks of a multiprocessor take turns.
  const double loads = ceil_div(layer.D, 128), rows = 132.0 / layer.sms * layer.B;
  product.expected.microseconds =
      2.3 + (std::max(890 * loads, rows * (0.5 + 1.7 * loads)) + rows * loads) / cycles();
  return product;
}

// ---- Few rows -----------------------------------------------------------------------------------

// How the blocks of a cluster add up their partial sums of a few rows. Each row is owned by one
// block: of kRows rows each of the cluster's `splits` blocks owns every splits-th one. The other
// blocks push their partial sums of the row into the owner's inbox, which is this, in its shared
// memory. A row has kColumns columns. `rank` is the block's own number. kRows and `splits` are
// powers of two, at most kMost.
template <int kRows, int kColumns>
struct RowInbox {
  static constexpr int kMost = 8;
  static_assert(kRows <= kMost && (kRows & (kRows - 1)) == 0);
  float partials[kMost][kColumns];  // of each block, those of the rows that this one owns
  Barrier come;

#if CLUSTER_CODE
  static __device__ int most_owned(int splits) { return (kRows + splits - 1) / splits; }

  /// All threads of all blocks of the cluster call this, and cluster_wait() before the first
  /// add_up(). `rows` says how many rows there are.
  __device__ void open(int rank, int splits, int rows) {
    if (threadIdx.x == 0) {
      const int owned = (rows - rank + splits - 1) / splits;
      barrier_init(&come, 1);
      barrier_init_fence();
      barrier_arrive_expect(&come, owned * (splits - 1) * static_cast<int>(sizeof partials[0]));
    }
    cluster_arrive();
  }

  /// A warp calls this with its block's partial sums of row `number`; each lane has every 32nd
  /// column. It returns false if another block owns the row. Otherwise the lanes then have the sums
  /// of all blocks, always added in the same order: first the block's own, then those of the others
  /// by their ranks.
  template <int kCols>
  __device__ bool add_up(float (&row)[kCols], int number, int rank, int splits) {
    static_assert(32 * kCols == kColumns);
    const int lane = threadIdx.x % 32, owner = number % splits, slot = number / splits;
    if (rank != owner) {
      float* to = partials[rank * most_owned(splits) + slot] + lane;
#pragma unroll
      for (int j = 0; j < kCols; ++j) store_push(to + 32 * j, row[j], &come, owner);
      return false;
    }
    barrier_wait(&come, 0);
    for (int from = 0; from < splits; ++from) {
      if (from == rank) continue;
      const float* partial = partials[from * most_owned(splits) + slot] + lane;
#pragma unroll
      for (int j = 0; j < kCols; ++j) row[j] += partial[32 * j];
    }
    return true;
  }
#endif
};

// With up to kRows rows memory has to deliver little but W, so as much of W as possible should be
// under way. There are no tiles. A lane has kCols columns, 32 apart, so that the lanes of a warp
// read neighbours. It loads them for 16 inputs before it uses the first. All warps of a block have
// the same columns, and each takes every 8th group of 16 inputs. It copies x of that group to
// shared memory: for each input, the values of all rows.
//
// Few columns are few blocks. Then there is split-K over blocks, too, in one of two ways. Either D
// is cut into gridDim.y slices, whose partial logits go to results.out (slices, B, C), and the
// softmax adds them up. Or, from compute capability 9.0 on, the `splits` blocks of a cluster share
// D, and add up each row in one of them (RowInbox).
constexpr int kFewWarps = 8;

template <int kRows, int kCols>
__global__ void __launch_bounds__(32 * kFewWarps)
    few_rows(const float* x, const float* W, int B, int D, int C, int splits, Results results) {
  constexpr int kAtOnce = 16, kColumns = 32 * kCols;
  static_assert(kRows <= kFewWarps);
  __shared__ alignas(16) float x_group[kFewWarps][kAtOnce][kRows];
  __shared__ float sums[kFewWarps][kRows][kColumns];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = min(kRows, B);
  const int tile = blockIdx.x / splits, rank = blockIdx.x % splits;
#if CLUSTER_CODE
  __shared__ RowInbox<kRows, kColumns> inbox;
  if (splits > 1) inbox.open(rank, splits, rows);
#endif
  start_next_kernel();
  wait_for_previous_kernel();
  const int groups = (D + kAtOnce - 1) / kAtOnce, shares = gridDim.y * splits;
  const int share = blockIdx.y * splits + rank, col = tile * kColumns + lane;
  const int first = groups * share / shares, last = groups * (share + 1) / shares;
  float sum[kRows][kCols] = {};
  for (int group = first + warp; group < last; group += kFewWarps) {
    const int d0 = group * kAtOnce;
    float w[kAtOnce][kCols];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const float* row = W + static_cast<size_t>(d0 + k) * C + col;
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        w[k][j] = d0 + k < D && col + 32 * j < C ? row[32 * j] : 0;
      }
    }
    __syncwarp();  // all lanes have read the previous group
    for (int i = lane; i < kAtOnce * kRows; i += 32) {
      const int row = i / kAtOnce, k = i % kAtOnce, d = d0 + k;
      x_group[warp][k][row] = row < B && d < D ? x[static_cast<size_t>(row) * D + d] : 0;
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
#pragma unroll
        for (int j = 0; j < kCols; ++j) sum[row][j] += x_group[warp][k][row] * w[k][j];
      }
    }
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int j = 0; j < kCols; ++j) sums[warp][row][lane + 32 * j] = sum[row][j];
  }
  __syncthreads();
#if CLUSTER_CODE
  if (splits > 1) cluster_wait();  // the others' inboxes are open
#endif
  if (warp >= rows) return;  // each warp finishes a row
  float logits[kCols] = {};
#pragma unroll
  for (int i = 0; i < kFewWarps; ++i) {
#pragma unroll
    for (int j = 0; j < kCols; ++j) logits[j] += sums[i][warp][lane + 32 * j];
  }
#if CLUSTER_CODE
  if (splits > 1 && !inbox.add_up(logits, warp, rank, splits)) return;
#endif
  results.out += static_cast<size_t>(blockIdx.y) * B * C;
  finish_row(logits, warp, C, results, tile, gridDim.x / splits);
}

constexpr int kMostSplits = 8;  ///< blocks of a cluster

/// Adds the products with D in 1, 2, 4 and so on shares of at least 64 inputs: at most 16 shares, 8
/// in a cluster, and at most 8 blocks for each multiprocessor. The estimate is the time in which W
/// comes, or, if a block's inputs take longer, that of a block. Few blocks do not get W at the full
/// rate.
template <int kRows, int kCols>
void add_few_rows(const Layer& layer, std::vector<Product>& products) {
  constexpr int kThreads = 32 * kFewWarps;
  const auto kernel = few_rows<kRows, kCols>;
  const int tiles = static_cast<int>(blocks_for(layer.C, 32 * kCols));
  const auto microseconds = [&](int slices, int splits) {
    const double idle = std::max(1.0, 1.0 * layer.sms / (tiles * slices * splits));
    const double W = 4.3 * layer.D * layer.C / memory_rate() * idle;
    const double block = (8 + 2.6 * kCols) * layer.D / (slices * splits) / cycles();
    return 3 + std::max(W, block) + 0.06 * (slices - 1);
  };
  const std::string text = std::to_string(32 * kCols) + " columns; cluster: ";
  const auto add = [&](int slices, int splits) {
    const auto launch = [=](Results results, int of_D) {
      const Caller& caller = layer.caller;
      launch_clusters_on(caller.stream, kernel, splits, caller.alone, dim3(tiles * splits, of_D),
                         kThreads, 0,  //
                         layer.x, layer.W, layer.B, layer.D, layer.C, splits, results);
    };
    products.push_back(half_fused(layer, Kernels::few_rows, kernel, 0, slices, tiles, launch));
    products.back().expected = {
        microseconds(slices, splits),  microseconds(1, splits),
        way_id({kCols, splits}),       slices,
        text + std::to_string(splits), "; half fused; slices: " + std::to_string(slices)};
  };
  const int most = std::min(layer.most_slices(64), 8 * layer.sms / tiles);
  const int most_splits = has_clusters(kernel) ? std::min(kMostSplits, layer.sms) : 1;
  for (int shares = 1; shares == 1 || shares <= most; shares *= 2) {
    if (shares > 1 && shares <= most_splits) add(1, shares);
    add(shares, 1);
  }
}

template <int kRows>
std::vector<Product> few_rows_of(const Layer& layer) {
  std::vector<Product> products;
  add_few_rows<kRows, 4>(layer, products);
  add_few_rows<kRows, 2>(layer, products);
  return products;
}

constexpr int kMostFewRows = 8;
inline std::vector<Product> make_few_rows(const Layer& layer) {
  return layer.B == 1   ? few_rows_of<1>(layer)
         : layer.B <= 4 ? few_rows_of<4>(layer)
                        : few_rows_of<kMostFewRows>(layer);
}

}  // namespace operators::softmax
