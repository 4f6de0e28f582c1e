// 9. softmax(x W), and how to compare like with like
//
//     probs(b, c) = exp(l(b, c) - m(b)) / sum over j of exp(l(b, j) - m(b))
//     logits l = x W, m(b) = the maximum of row b
//     x (B, D), W (D, C), probs (B, C): fp32, row-major; D inputs, C classes
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
//     (1) library   cuBLAS's fastest, then the best softmax that we have (operators/softmax)
//     (2) unfused   our product, then the same softmax kernel
//     (3) fused     our product and softmax in one launch; half fused (below): in two or three
//
// (2) against (3) is fusion: the product is the same kernel, with another epilogue and the tiles
// that suit it best. (1) against (2) is the quality of the library. And there are two sets of
// tables, never mixed: true fp32 accuracy, and TF32, where a product may round its operands to 10
// bits of mantissa, so that tensor cores can multiply them. Both accumulate in fp32. The kernels:
//
//     fused rows      a block a row: simple; every block reads all of W (in the fp32 tables)
//     fused tiles     a block has all columns of 8 to 32 rows (all_columns() below); D is spread
//                     over its warps and, if there are too few rows to fill the GPU, over several
//                     blocks
//     fused online    more columns than a block has room for: a row is spread over several blocks
//                     (column_tiles()). They write logits and, of each part of a row, its maximum
//                     and its sum. A second kernel makes probabilities of these: it reads a logit
//                     once, where a softmax of long rows reads it twice. That is half fused. Short
//                     rows have no such row in the table: a softmax keeps them in registers
//
// and on Hopper, with its copy engine and wgmma:
//
//     fused cluster   few rows, or few columns: the blocks that share D are a cluster
//                     (cluster_columns()): their partial sums go straight into each other's
//                     shared memory
//     fused exchange  any shape: the blocks that share a row run at the same time, keep their
//                     logits in registers, and tell each other only maximum and sum. Half fused
//                     where that takes less time. It is lesson 3's product with an epilogue of its
//                     own (operators/softmax/exchange.cuh)
//
// Three more kernels are for special shapes, and stand in operators/softmax: "fused rows, D split"
// and "fused few rows" (few.cuh: few columns, few rows), and "fused narrow" (narrow.cuh: many rows
// of few columns).
//
// "unfused tiles" and so on are the same kernels with another epilogue, which writes the logits.
// Where there are few tiles, few rows and exchange may cut D into slices: each leaves a part of the
// logits, and the softmax kernel adds these up while it reads them. That saves no logits; (2) has
// no slices. Of its tiles, and slices, each has the fastest that was tried, and so has (1) of the
// library's kernels. In the fp32 tables tiles and online multiply on the CUDA cores and, as
// "3xTF32", on tensor cores: each operand as the sum of two TF32 numbers, and three products
// instead of one. Its error is held to the bound of fp32. Cluster and exchange are there as 3xTF32.
// All kernels and the softmax are launched early (primitives/early_launch.cuh): here the time
// between two kernels counts.
//
// With infinities: a logit of -inf has the probability 0. A row of only -inf has no maximum to
// subtract, and becomes NaN, in the reference, too.
//
// --all adds the fp32 tables, and more shapes where none is given. --hard-rows puts infinities and
// huge numbers among the logits, and adds tables of only -inf. What a reader may try next stands in
// exercises/9_softmax_training.cu: cross-entropy, the backward pass, fp16 inputs.

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "checks/product/library_product.h"
#include "checks/softmax/softmax.h"
#include "checks/workspace.h"
#include "operators/softmax/few.cuh"
#include "operators/softmax/finish_row.cuh"
#include "operators/softmax/fp32_product.cuh"
#include "operators/softmax/layer.cuh"
#include "operators/softmax/narrow.cuh"
#include "operators/softmax/plans.cuh"
#include "operators/softmax/rows.cuh"
#include "operators/softmax/transposed_product.cuh"

using namespace checks;
using namespace operators::softmax;

// ---- fused rows ---------------------------------------------------------------------------------

// A block owns a row, a thread the columns threadIdx.x, threadIdx.x + 256, ...: lesson 1's product,
// coalesced along W. A thread keeps the maximum and the sum of its logits so far (merge() in
// operators/softmax/rows.cuh), and writes the logits to `probs`. When the block has merged what all
// threads have, each reads its logits again, from the caches, and writes probabilities over them.
// This is fused. But W is read once per row: 2 operations for every 4 bytes, from the L1 cache at
// best, where the blocks of a multiprocessor find what another one has read.
__global__ void __launch_bounds__(kSoftmaxThreads)
    fused_rows(const float* x, const float* W, float* probs, int D, int C) {
  start_next_kernel();
  wait_for_previous_kernel();
  const float* x_row = x + static_cast<size_t>(blockIdx.x) * D;
  float* row = probs + static_cast<size_t>(blockIdx.x) * C;
  MaxSum part = {minus_infinity(), 0};
  for (int col = threadIdx.x; col < C; col += kSoftmaxThreads) {
    float logit = 0;
    for (int d = 0; d < D; ++d) logit += x_row[d] * W[static_cast<size_t>(d) * C + col];
    row[col] = logit;
    part = merge(part, {logit, logit == minus_infinity() ? 0.0f : 1.0f});
  }
  const MaxSum all = block_merge<kSoftmaxThreads / 32>(warp_merge(part));
  for (int col = threadIdx.x; col < C; col += kSoftmaxThreads) {
    row[col] = expf(row[col] - base_of(all.largest)) / all.sum;
  }
}

// ---- fused tiles --------------------------------------------------------------------------------

// Rows share W from here on: a block computes a tile of logits, as in lessons 2 and 3
// (operators/softmax/fp32_product.cuh). Results (operators/softmax/layer.cuh) say what becomes of
// them: logits, or of each tile's part of a row its maximum and sum as well, or probabilities. A
// warp has a row's logits in its lanes when finish_row() (operators/softmax/finish_row.cuh) finds
// their maximum and their sum by shuffles, and writes what is wanted.

// A block has BM rows with all their columns (C <= BN), so W is read B / BM times instead of B. It
// also has one of gridDim.y splits of D: the sums of its warps meet in shared memory, those of the
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

  TileSums<Tile> sums;
  multiply_tiles<Tile>(sums, stages, factors, row0, 0, d_begin, d_end);

  const int warp_row = warp / Tile::kWarpsN % Tile::kWarpsM * Tile::kRows;
  const int warp_col = warp % Tile::kWarpsN * Tile::kCols;
  const int warp_k = warp / (Tile::kWarpsM * Tile::kWarpsN);
#pragma unroll
  for (int i = 0; i < TileSums<Tile>::kOwnRows; ++i) {
    float* to =
        logits + (warp_k * Tile::BM + warp_row + TileSums<Tile>::row(i)) * kStride + warp_col;
#pragma unroll
    for (int j = 0; j < TileSums<Tile>::kOwnCols; ++j) to[TileSums<Tile>::col(j)] = sums.at(i, j);
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
    for (int s = 0; s < splits; ++s) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        const int col = lane + 32 * i;
        if (col < C) v[i] += from[static_cast<size_t>(s) * B * C + col];
      }
    }
    finish_row(v, row0 + row, C, results);
  }
}

// ---- fused online -------------------------------------------------------------------------------

// Here a row does not fit into a block: 1000 columns of 64 rows are as many sums as a
// multiprocessor has registers, and blocks of fewer rows would read W too often. So blocks have
// tiles of BM x BN, as for any product, and of each row a warp has kCols columns. It writes their
// logits and leaves their maximum and their sum relative to it, which the lanes that share a row
// find with a few shuffles: this is "online softmax", no part has to know another one's maximum.
// finish_columns() (operators/softmax/rows.cuh) merges a row's parts and makes probabilities of the
// logits: each is read once. (A row's last block could do it in the same launch. But it would have
// all of the row's logits to go through while other multiprocessors have nothing to do.)
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads) column_tiles(Factors factors, Results results) {
  start_next_kernel();
  wait_for_previous_kernel();
  static_assert(Tile::kWarpsK == 1 && Tile::kCols % 4 == 0);
  extern __shared__ __align__(128) char shared[];
  const int B = factors.B, C = factors.C, block_columns = (C + Tile::BN - 1) / Tile::BN;
  const int row0 = blockIdx.x / block_columns * Tile::BM;
  const int col0 = blockIdx.x % block_columns * Tile::BN;
  TileSums<Tile> sums;
  multiply_tiles<Tile>(sums, reinterpret_cast<float*>(shared), factors, row0, col0, 0, factors.D);

  const int warp = threadIdx.x / 32, tiles = (C + Tile::kCols - 1) / Tile::kCols;
  const int warp_row = row0 + warp / Tile::kWarpsN * Tile::kRows;
  const int warp_col = col0 + warp % Tile::kWarpsN * Tile::kCols;
  constexpr int kRun = TileSums<Tile>::kRun, kOwnCols = TileSums<Tile>::kOwnCols;
  constexpr int kLanes = TileSums<Tile>::kLanesPerRow;
#pragma unroll
  for (int i = 0; i < TileSums<Tile>::kOwnRows; ++i) {
    const int row = warp_row + TileSums<Tile>::row(i);
    if (row < B) {
      float* to = results.out + static_cast<size_t>(row) * C + warp_col;
#pragma unroll
      for (int j = 0; j < kOwnCols; j += kRun) {
        float run[kRun];
#pragma unroll
        for (int e = 0; e < kRun; ++e) run[e] = sums.at(i, j + e);
        const int col = TileSums<Tile>::col(j);
        store_run<kRun>(to + col, run, C - warp_col - col, C % kRun == 0);
      }
    }
    if (results.epilogue == Epilogue::logits) continue;
    float largest = minus_infinity(), sum = 0;
#pragma unroll
    for (int j = 0; j < kOwnCols; ++j) {
      if (warp_col + TileSums<Tile>::col(j) >= C) sums.at(i, j) = minus_infinity();
      largest = fmaxf(largest, sums.at(i, j));
    }
    largest = lanes_max<kLanes>(largest);
#pragma unroll
    for (int j = 0; j < kOwnCols; ++j) sum += expf(sums.at(i, j) - base_of(largest));
    sum = lanes_sum<kLanes>(sum);
    if (threadIdx.x % kLanes == 0 && row < B && warp_col < C) {
      results.parts[static_cast<size_t>(row) * tiles + warp_col / Tile::kCols] = {largest, sum};
    }
  }
}

// ---- Hopper: fused cluster ----------------------------------------------------------------------

// A block's shared memory. kSplits: the blocks of a cluster, over which D is split. kDepth: how
// many of the D inputs are taken at a time. kHighLow: an operand is the sum of two TF32 numbers.
template <Math kMath, int kSplits, int kRows, int kClasses, int kDepth>
struct ClusterShared {
  static constexpr bool kHighLow = kMath == Math::split;
  static constexpr int kOwnRows = kRows / kSplits;  // that a block finishes
  static_assert(kRows % kSplits == 0 && kDepth % 32 == 0);
  // The floats of a row that one block sends to another: some padding, so that 4 rows start on
  // different banks, and a multiple of 4, as the copy engine needs.
  static __host__ __device__ constexpr int stride(int C) {
    return ((C < kClasses ? C : kClasses) + 7) / 8 * 8 + 4;
  }
  static constexpr int kBoxes = kDepth / kLine<float>;
  using Boxes = ColumnTile<float, kRows>[kBoxes];
  // x rounded to TF32; in 3xTF32 also what the rounding has left, as a second TF32 number.
  Boxes x[kHighLow ? 2 : 1];
  // To and from each other block of the cluster: kOwnRows rows, stride(C) apart. A block's own sums
  // stay in its outbox.
  alignas(16) float outbox[kSplits][kOwnRows * stride(kClasses)];
  alignas(16) float inbox[kSplits][kOwnRows * stride(kClasses)];
  Barrier full;  // x is there
  Barrier come;  // what the other blocks send is in the inbox
};

#if HOPPER_CODE
// A block's partial sums go to its outbox, those of some rows for each block of the cluster.
template <class Shared, int kRows>
__device__ void put_in_outbox(Shared& shared, const Sum<kRows>& sum, int col, int stride) {
#pragma unroll
  for (int i = 0; i < sum.size(); i += 4) {
#pragma unroll
    for (int e = i; e < i + 2; ++e) {
      const int row = sum.col(e);
      float* to = shared.outbox[row / Shared::kOwnRows] + row % Shared::kOwnRows * stride + col;
      if (col < stride) *reinterpret_cast<float2*>(to) = {sum.element(e), sum.element(e + 2)};
    }
  }
}

// A warp takes a row at a time: adds up what has come from the blocks of the cluster.
template <int kSplits, int kClasses, class Shared>
__device__ void finish_cluster_rows(const Shared& shared, int row0, int rank, int tile, int tiles,
                                    int B, int C, const Results& results) {
  constexpr int kOwnRows = Shared::kOwnRows;
  const int lane = threadIdx.x % 32, stride = Shared::stride(C);
  for (int i = threadIdx.x / 32; i < kOwnRows; i += kClasses / 16) {
    const int row = row0 + rank * kOwnRows + i;
    if (row >= B) break;
    float v[kClasses / 32] = {};
#pragma unroll
    for (int block = 0; block < kSplits; ++block) {
      const float* from = (block == rank ? shared.outbox : shared.inbox)[block] + i * stride;
#pragma unroll
      for (int j = 0; j < kClasses / 32; ++j) {
        if (lane + 32 * j < stride) v[j] += from[lane + 32 * j];
      }
    }
    finish_row(v, row, C, results, tile, tiles);
  }
}
#endif

// As in fused tiles, D is split over blocks that share kRows rows. But here these are a cluster,
// and can write to each other's shared memory: the partial sums need not go through the L2 cache to
// whoever comes last. Each of the kSplits blocks finishes its share of the rows, and the others
// push their partial sums of that share into its inbox. If there are more than kClasses
// classes, a cluster computes a tile of so many columns, and another kernel finishes the rows: that
// is half fused, as in fused online. (To exchange maxima and
// sums here, as fused exchange does, took longer than a softmax kernel whose launch is early.)
//
// The product is transposed (operators/softmax/transposed_product.cuh): x^T comes from shared
// memory, W^T from registers. No other thread of the block needs the same elements of W: they go
// from memory straight to the registers, all of a chunk of kDepth inputs at once. (wgmma ignores
// the bits that TF32 does not have. That would truncate x, so the copy engine rounds it on the way
// to shared memory.)
template <Math kMath, int kSplits, int kRows, int kClasses, int kDepth>
__global__ void HOPPER_CLUSTER(kSplits) __launch_bounds__(2 * kClasses, 1)
    cluster_columns(const __grid_constant__ CUtensorMap x, const float* W, int B, int D, int C,
                    Results results) {
#if HOPPER_CODE
  using Shared = ClusterShared<kMath, kSplits, kRows, kClasses, kDepth>;
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const int rank = cluster_rank(), row0 = blockIdx.x / kSplits * kRows;
  const int tile = blockIdx.y, tiles = gridDim.y;
  const int chunks = (D + kDepth - 1) / kDepth;
  const int first = chunks * rank / kSplits, last = chunks * (rank + 1) / kSplits;
  const int sums_bytes = Shared::kOwnRows * Shared::stride(C) * 4;
  const int warp = warp_of_block(), lane = threadIdx.x % 32;
  const auto fetch = [&](int chunk) {
    if (warp != 0 || !elect_one()) return;
    barrier_arrive_expect(&shared.full, sizeof shared.x[0]);
    for (int box = 0; box < Shared::kBoxes; ++box) {
      tensor_load(shared.x[0][box].row(0), &x, row0, chunk * kDepth + box * kLine<float>,
                  &shared.full);
    }
  };
  if (threadIdx.x == 0) {
    barrier_init(&shared.full, 1);
    barrier_init(&shared.come, 1);
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) barrier_arrive_expect(&shared.come, (kSplits - 1) * sums_bytes);
  cluster_arrive();
  start_next_kernel();
  wait_for_previous_kernel();
  if (first < last) fetch(first);

  const int col = 16 * warp + lane / 4 * 2;
  Sum<kRows> sum = {};
  for (int chunk = first; chunk < last; ++chunk) {
    LeftFragments<float> w[Shared::kBoxes];
    load_fragments(w, W, chunk * kDepth, tile * kClasses + col, D, C);
    barrier_wait(&shared.full, (chunk - first) % 2);
    if constexpr (kMath == Math::split) {
      split_all(shared.x[0][0].elements, shared.x[1][0].elements, kRows * kDepth, threadIdx.x,
                2 * kClasses);
      shared_fence();
      __syncthreads();
    }
#pragma unroll
    for (int box = 0; box < Shared::kBoxes; ++box) {
      if constexpr (kMath == Math::split) {
        add_split(sum, w[box], shared.x[0][box], shared.x[1][box]);
      } else {
        start_rounded(sum, w[box], shared.x[0][box], chunk > first || box > 0);
      }
    }
    wgmma_wait<0>();
    __syncthreads();
    if (chunk + 1 < last) fetch(chunk + 1);
  }

  put_in_outbox(shared, sum, col, Shared::stride(C));
  shared_fence();  // the copy engine will read this
  __syncthreads();
  cluster_wait();  // the others' `come` is initialized
  if (warp == 0 && elect_one()) {
    for (int i = 0; i < kSplits; ++i) {
      if (i == rank) continue;
      bulk_push(shared.inbox[rank], shared.outbox[i], sums_bytes, &shared.come, i);
    }
  }
  barrier_wait(&shared.come, 0);
  cluster_arrive();
  finish_cluster_rows<kSplits, kClasses>(shared, row0, rank, tile, tiles, B, C, results);
  cluster_wait();  // nobody's outbox is needed any more
#endif
}

// ---- Which kernel, with which tiles -------------------------------------------------------------

// Nothing about softmax is in what follows up to the tables: it says with which tiles, how many
// blocks and how much shared memory each kernel is launched for a shape.

// D is split until the GPU is full, but into no less than kLeastDepth.
constexpr int kLeastDepth = 128;
template <class Tile>
Product make_all_columns(const Layer& layer) {
  constexpr int kBytes = Tile::kStageBytes + Tile::kLogitBytes;
  const int row_tiles = static_cast<int>(blocks_for(layer.B, Tile::BM));
  const int splits =
      std::max(1, std::min({layer.D / kLeastDepth, kMostSplits, layer.sms / row_tiles}));
  const auto partial =
      layer.workspace.any<float>(splits > 1 ? splits * layer.shape.rows * layer.C : 1);
  const auto arrived = layer.workspace.zeros<unsigned>(row_tiles);
  const auto launch = [=](Results results) {
    results.partial = partial;
    results.arrived = arrived;
    launch_early(all_columns<Tile>, dim3(row_tiles, splits), Tile::kThreads, kBytes,  //
                 factors_of(layer.x, layer.W, layer.B, layer.D, layer.C), results);
  };
  return product_of("tiles", all_columns<Tile>, kBytes, launch);
}

template <class Tile>
Product make_column_tiles(const Layer& layer) {
  const unsigned tiles = blocks_for(layer.B, Tile::BM) * blocks_for(layer.C, Tile::BN);
  const auto launch = [=](Results results, int) {
    launch_early(column_tiles<Tile>, tiles, Tile::kThreads, Tile::kStageBytes,  //
                 factors_of(layer.x, layer.W, layer.B, layer.D, layer.C), results);
  };
  return half_fused(layer, "online", column_tiles<Tile>, Tile::kStageBytes, 1,
                    static_cast<int>(blocks_for(layer.C, Tile::kCols)), launch);
}

// The tiles for a shape. BM, BN, BK; warps along rows, columns and D; stages.
template <Math kMath>
Product make_product(const Layer& layer) {
  const int C = layer.C;
  // A block of compute capability 9.0 has 227 KB of shared memory, of 8.0 163 KB, of 8.6 99 KB, of
  // 7.5 64 KB: where all columns of a row do not fit, they are spread over column_tiles().
  const bool large = most_shared_bytes() >= 220 << 10;
  const bool medium = most_shared_bytes() >= 126 << 10;
  if (C <= 16) {
    return make_all_columns<Tile<kMath, kMath == Math::fp32 ? 8 : 16, 16, 64, 1, 1, 8, 3>>(layer);
  }
  constexpr int kCols = kMath == Math::fp32 ? 64 : 56;
  if (C <= kCols && medium) return make_all_columns<Tile<kMath, 16, kCols, 64, 1, 1, 8, 4>>(layer);
  if (C <= 104 && large) return make_all_columns<Tile<kMath, 32, 104, 64, 2, 1, 4, 4>>(layer);
  if (C <= 256 && large) return make_all_columns<Tile<kMath, 32, 256, 32, 1, 4, 2, 3>>(layer);
  if (large || (medium && C > 256)) {
    // A warp's sums. TF32: 64 x 32, as W comes from shared memory in single floats. fp32: 32 x 64,
    // as both factors come as vectors of 4. 3xTF32: 32 x 32 of twice as many warps, as a thread
    // also has the sums of a step, and both numbers of each split operand.
    constexpr int kWarpsM = kMath == Math::tf32 ? 2 : 4;
    constexpr int kWarpsN = kMath == Math::fp32 ? 2 : 4;
    return make_column_tiles<Tile<kMath, 128, 128, 32, kWarpsM, kWarpsN, 1, 3>>(layer);
  }
  return make_column_tiles<Tile<kMath, 64, 64, 32, 2, 2, 1, 2>>(layer);
}

template <Math kMath, int kSplits, int kRows, int kClasses, int kDepth>
Plan plan_cluster(const Layer& layer) {
  constexpr int kThreads = 2 * kClasses;
  constexpr int kBytes = sizeof(ClusterShared<kMath, kSplits, kRows, kClasses, kDepth>);
  const auto kernel = cluster_columns<kMath, kSplits, kRows, kClasses, kDepth>;
  allow_shared_bytes(kernel, kBytes);
  const int at_once = clusters_that_fit(kernel, kSplits, kThreads, kBytes);
  if (at_once == 0) return {};
  const double microseconds =
      cluster_microseconds(layer, kSplits, kRows, kClasses, kDepth, at_once);
  const auto make = [=](const Layer& in) {
    const int tiles = static_cast<int>(blocks_for(in.C, kClasses));
    const auto launch = [=](Results results, int = 1) {
      const CUtensorMap x = tensor_map<float>(in.x, in.B, in.D, kRows, kMath == Math::tf32,
                                              in.x_stride, Reads::often);
      launch_early(kernel, dim3(kSplits * blocks_for(in.B, kRows), tiles), kThreads, kBytes,  //
                   x, in.W, in.B, in.D, in.C, results);
    };
    return tiles == 1 ? product_of("cluster", kernel, kBytes, launch)
                      : half_fused(in, "cluster", kernel, kBytes, 1, tiles, launch);
  };
  return {{microseconds, microseconds}, layer.x_stride % 4 != 0, false, make};
}

// Few rows: D is split over more blocks. Many rows, or columns: 64 rows. Else 40: 1024 rows are
// then as many clusters of 4 as fit at a time. Split operands take twice the registers for W: fewer
// inputs at a time, more blocks.
template <Math kMath, int kClasses>
Plan choose_cluster(const Layer& layer) {
  constexpr bool kHighLow = kMath == Math::split;
  if (layer.B <= 32 || (layer.B <= 512 && layer.C <= kClasses)) {
    return plan_cluster<kMath, 8, 16, kClasses, 64>(layer);
  }
  if (layer.B > 1536 || layer.C > kClasses) return plan_cluster<kMath, 8, 64, kClasses, 64>(layer);
  constexpr int kSplits = kHighLow ? 8 : 4, kRows = kHighLow ? 80 : 40;
  constexpr int kDepth = kHighLow ? 128 : 256;
  return plan_cluster<kMath, kSplits, kRows, kClasses, kDepth>(layer);
}

// What Hopper has for a shape, a row each: fused narrow, or else fused cluster; and fused exchange.
// But none that should take much longer. In TF32 fused exchange needs either rows of W that are
// aligned to 16 bytes, or at least 4 inputs.
template <Math kMath>
std::vector<std::vector<Product>> make_hopper_products(const Layer& layer) {
  constexpr int64_t kMost = INT32_MAX - 1024;  // where a tile ends is an int, too
  if (layer.shape.rows > kMost || layer.C > 65535 * 128) return {};  // the grid's y: its tiles
  std::vector<Plan> exchange;
  if (kMath != Math::tf32 || layer.C % 4 == 0) {
    exchange = plan_exchange<kMath, true>(layer);
  } else if (layer.D >= 4) {
    exchange = plan_exchange<kMath, kMath != Math::tf32>(layer);  // TF32: W as it lies
  }
  const Plan cluster = layer.C <= 64 ? choose_cluster<kMath, 64>(layer)  //
                                     : choose_cluster<kMath, 128>(layer);
  const double exchange_time = exchange.empty() ? INFINITY : exchange[0].microseconds();
  std::vector<std::vector<Product>> rows;
  if (const auto narrow = choose_narrow(layer); kMath == Math::tf32 && !narrow.empty()) {
    rows.push_back(narrow);
  } else if (cluster.microseconds() < kHopeless * exchange_time) {
    rows.push_back(products_of(layer, {cluster}));
  }
  if (exchange_time < kHopeless * cluster.microseconds()) {
    rows.push_back(products_of(layer, exchange));
  }
  return rows;  // none if no cluster fits on the device
}

// ---- The tables ---------------------------------------------------------------------------------

// logits (B, C) = x W by cuBLAS; row-major: W and x swapped, see lesson 4.
inline void library_product(cublasHandle_t blas, const float* x, const float* W, float* logits,
                            const SoftmaxShape& shape, cublasComputeType_t compute) {
  const float one = 1, zero = 0;
  const int B = static_cast<int>(shape.rows), D = static_cast<int>(shape.inputs),
            C = static_cast<int>(shape.classes);
  CUBLAS_CHECK(cublasGemmEx(blas, CUBLAS_OP_N, CUBLAS_OP_N, C, B, D, &one, W, CUDA_R_32F, C, x,
                            CUDA_R_32F, D, &zero, logits, CUDA_R_32F, C, compute,
                            CUBLAS_GEMM_DEFAULT));
}

inline std::string text_of(const SoftmaxShape& shape) {
  return std::to_string(shape.rows) + "x" + std::to_string(shape.inputs) + "x" +
         std::to_string(shape.classes);
}

// What a table is about. only_infinite, with --hard-rows: rows of only -inf, beside others. Of
// these tables what is verified are their NaN.
enum class Kind { tf32, fp32, only_infinite };

// A table of softmax(x W) with its buffers, and the rows that such tables have in common.
struct SoftmaxTable : Layer {
  Problem& problem;
  Kind kind;
  std::string name;
  Buffer<float> probs;
  Buffer<float> logits;  // of the unfused ways
  Buffer<float> parts;   // of long rows
  Buffer<float> result;  // what is verified: probs, or that with its NaN marked

  SoftmaxTable(Lesson& lesson, Kind kind, const SoftmaxShape& shape)
      : SoftmaxTable(problem_of(lesson, kind, shape), kind, shape) {}
  SoftmaxTable(Problem& problem, Kind kind, const SoftmaxShape& shape)
      : Layer(layer_of(problem, shape)),
        problem(problem),
        kind(kind),
        name(name_of(kind, shape)),
        probs(problem.output<float>(shape.rows * shape.classes)),
        logits(problem.output<float>(shape.rows * shape.classes)),
        parts(problem.workspace<float>(C > kLeastForParts ? 2 * shape.rows * (blocks_for(C, 32) + 1)
                                                          : 2)),
        result(kind == Kind::only_infinite ? problem.output<float>(probs.size()) : probs) {
    problem.in_graph();
  }

  static std::string name_of(Kind kind, const SoftmaxShape& shape) {
    const char* names[] = {"TF32 ", "fp32 ", "only -inf "};
    return names[static_cast<int>(kind)] + text_of(shape);
  }

  static Problem& problem_of(Lesson& lesson, Kind kind, const SoftmaxShape& shape) {
    // Where a block's steps end is an int, too; and a grid's y counts the parts of a row.
    constexpr int64_t kMostInputs = INT32_MAX - 1023, kMostClasses = int64_t{65535} * kPartColumns;
    if (shape.inputs > kMostInputs || shape.classes > kMostClasses) {
      fail(kBadUsage, "at most %lld inputs and %lld classes", static_cast<long long>(kMostInputs),
           static_cast<long long>(kMostClasses));
    }
    const bool tf32 = kind == Kind::tf32;
    return lesson.problem(
        name_of(kind, shape), {{"B", shape.rows}, {"D", shape.inputs}, {"C", shape.classes}},
        tf32 ? "tf32" : "fp32", {.flops = shape.flops(), .bytes = shape.bytes(sizeof(float))},
        tf32 ? Rate::tf32 : Rate::fp32);
  }

  static Layer layer_of(Problem& problem, const SoftmaxShape& shape) {
    const auto x = problem.input<float>(shape.rows * shape.inputs);
    const auto W = problem.input<float>(shape.inputs * shape.classes,
                                        kWeightScale / sqrt(static_cast<double>(shape.inputs)));
    const double floats = std::min<double>(kMostSlices * shape.logits(), kMostSliced);
    const auto sliced = problem.output<float>(static_cast<size_t>(floats));
    return {workspace_of(problem), shape, x, W, sliced};
  }

  Kernel& add(const std::string& row, Role role, std::function<void()> launch) const {
    return problem.kernel(row, role, verifiable(launch));
  }
  // `needs` is 90 for what Hopper alone runs, or else the least compute capability, times 10.
  void add(const std::string& row, Role role, int needs, std::vector<Way> ways) const {
    for (Way& way : ways) way.launch = verifiable(way.launch);
    Kernel& kernel =
        problem.kernel(row, role, ways, {.most = kMostPlans, .hopeless = kHopeless}).needs(needs);
    if (needs == 90) kernel.hopper_only();
  }
  std::function<void()> verifiable(const std::function<void()>& launch) const {
    if (kind != Kind::only_infinite) return launch;
    return [launch, probs = probs, result = result] {
      launch();
      mark_nan(probs, result, probs.size());
    };
  }

  void softmax_of_logits() const {
    softmax(logits, probs, shape, reinterpret_cast<float2*>(parts.data()));
  }

  // (1): cuBLAS's own choice, or one of cuBLASLt's candidates if that is faster; and our softmax.
  void add_library(cublasHandle_t blas) const {
    const bool tf32 = kind == Kind::tf32;
    const auto compute = tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    std::vector<Way> ways;
    const auto add_product = [&](const std::string& name, const std::function<void()>& product) {
      const auto launch = [product, *this] {
        product();
        softmax_of_logits();
      };
      // Nobody says how long which of them takes: all are tried.
      ways.push_back({name, shape.flops() / (tf32 ? 400e6 : 50e6), launch});
    };
    add_product("cuBLAS", [=, *this] { library_product(blas, x, W, logits, shape, compute); });
    const LibraryProduct::Shape product_shape = {shape.rows, shape.classes, shape.inputs};
    const auto product =
        std::make_shared<LibraryProduct>(problem, product_shape, CUDA_R_32F, compute);
    for (int i = 0; i < product->candidates(); ++i) {
      add_product("cuBLASLt, candidate " + std::to_string(i),
                  [=, *this] { product->call(i, x, W, logits); });
    }
    add("library", Role::library, tf32 ? 80 : 0, ways);
  }

  Results results(Epilogue epilogue) const {
    float* out = epilogue == Epilogue::softmax ? probs : logits;
    return {.epilogue = epilogue, .out = out, .parts = reinterpret_cast<float2*>(parts.data())};
  }

  // Rows (2) and (3), by the same kind of product, each with the fastest of its tiles; no row (3)
  // if with none of them it differs from (2).
  void add_ours(const std::vector<Product>& products, const std::string& suffix,
                int needs_cc) const {
    const std::string kind = products[0].name + suffix, fused = "fused " + kind;
    std::vector<operators::Way> with_logits, with_softmax;
    for (const Product& product : products) {
      const auto launch_unfused = [product, *this] {
        product.launch(results(Epilogue::logits));
        softmax_of_logits();
      };
      const auto launch_fused = [product, *this] { product.launch(results(Epilogue::softmax)); };
      // Half fused or not, (2) is the same.
      const auto& [microseconds, unfused_microseconds, tiles, how] = product.expected;
      const auto same = [&name = tiles](const operators::Way& way) { return way.name == name; };
      if (std::none_of(with_logits.begin(), with_logits.end(), same)) {
        with_logits.push_back({tiles, unfused_microseconds, launch_unfused, product.shared_bytes});
      }
      if (product.fuses) {
        with_softmax.push_back({tiles + how, microseconds, launch_fused, product.shared_bytes});
      }
    }
    add("un" + fused, Role::ours, needs_cc, ways_of_row(with_logits));
    const std::string what = name + ", " + kind + ": ";
    if (!with_softmax.empty()) {
      add(fused, Role::ours, needs_cc, ways_of_row(with_softmax));
      problem.compare(fused, "un" + fused, what + "fused (3) against unfused (2), % times faster.");
    }
    problem.compare("un" + fused, "library",
                    what + "unfused (2) against library (1), % times faster.");
  }

  // What every row of the table is held to.
  void verify(cublasHandle_t blas, bool hard_rows) const {
    const bool only_infinite = kind == Kind::only_infinite;
    const auto expected = problem.reference(probs.size());
    if (only_infinite) {
      problem.adjust_inputs([=, *this] { make_only_minus_infinity(x, W, shape); });
    } else if (hard_rows) {
      problem.adjust_inputs([=, *this] { make_hard(x, W, shape); });
    }
    const Uncancelled uncancelled;
    problem.reference_from(softmax_scratch(shape), [=, *this] {
      reference_softmax<float>(blas, x, W, expected, shape);
      // The logits of hard rows are exact.
      if (!only_infinite && !hard_rows) uncancelled.find(x.data(), W.data(), shape, {});
      if (only_infinite) mark_nan(expected, expected.size());
    });
    problem.check(
        result, expected,
        kind != Kind::fp32
            ? softmax_tolerance(shape.inputs, tensor_core_sum(shape.inputs), kRoundoffTf32)
            : softmax_tolerance(shape.inputs, kRoundoffFp32),
        uncancelled.probs);
  }
};

// A line a shape: what whole fusion saves (half fused saves none of it).
inline void add_bytes_note(Lesson& lesson, const SoftmaxShape& shape) {
  char text[160];
  snprintf(text, sizeof text,
           "%s: fused in one launch, logits are neither written nor read: 2 x %.4g of %.4g MB.",
           text_of(shape).c_str(), 4e-6 * shape.logits(),
           1e-6 * (shape.bytes(sizeof(float)) + 8 * shape.logits()));
  lesson.note(text);
}

// A table of softmax(x W), and what is ours in it.
struct Table : SoftmaxTable {
  using SoftmaxTable::SoftmaxTable;

  // With a math's tiles, and with Hopper's product if the shape has one.
  template <Math kMath>
  void add_products(const std::string& suffix) const {
    const std::vector<Product> portable = {make_product<kMath>(*this)};
    add_ours(portable, suffix, kMath == Math::fp32 ? 0 : 80);
    if constexpr (kMath != Math::fp32) {
      for (const auto& row : make_hopper_products<kMath>(*this)) add_ours(row, suffix, 90);
    }
  }
};

void add_table(Lesson& lesson, cublasHandle_t blas, Kind kind, const SoftmaxShape& shape) {
  const Table table(lesson, kind, shape);
  const Memory<float> x = table.x, W = table.W, probs = table.probs;
  const int B = table.B, D = table.D, C = table.C;
  const bool tf32 = kind == Kind::tf32;
  table.verify(blas, lesson.flag("--hard-rows"));

  table.add_library(blas);
  // fused rows reads W once per row: of the largest shapes 20 calls would take a minute.
  if (!tf32 && shape.flops() < 1e11) {
    const auto launch = [=] { launch_early(fused_rows, B, kSoftmaxThreads, 0, x, W, probs, D, C); };
    table.add("fused rows", Role::baseline, launch);
  }
  // These round nothing, not even in TF32's table: what tensor cores have to beat.
  if (C <= 16) {
    const auto kernel = fused_rows_split<16>;
    const auto launch = [=] { launch_early(kernel, B, kSoftmaxThreads, 0, x, W, probs, D, C); };
    table.add("fused rows, D split", Role::ours, launch);
  }
  if (C > 16 && B == 1) table.add_ours(make_few_rows<1>(table), "", 0);
  if (C > 16 && B > 1 && B <= 4) table.add_ours(make_few_rows<4>(table), "", 0);
  if (C > 16 && B > 4 && B <= 8) table.add_ours(make_few_rows<8>(table), "", 0);
  if (kind != Kind::fp32)
    table.add_products<Math::tf32>(kind == Kind::only_infinite ? ", TF32" : "");
  if (tf32) return;
  table.add_products<Math::fp32>("");
  table.add_products<Math::split>(", 3xTF32");
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
  const bool has_tf32 = lesson.device().major >= 8;
  for (const SoftmaxShape& shape : shapes) {
    if (all || has_tf32) add_table(lesson, blas, Kind::tf32, shape);
    if (all || !has_tf32) add_table(lesson, blas, Kind::fp32, shape);
    add_bytes_note(lesson, shape);
  }
  if (lesson.flag("--hard-rows")) {
    for (const SoftmaxShape& shape : shapes) add_table(lesson, blas, Kind::only_infinite, shape);
  }
  return lesson.run();
}
