// 9. softmax(x W), and how to compare like with like
//
//     probs(b, c) = exp(l(b, c) - m(b)) / sum over j of exp(l(b, j) - m(b))
//     logits l = x W, m(b) = the maximum of row b
//     x (B, D), W (D, C), probs (B, C): fp32, row-major; D inputs, C classes
//
// This is the last layer of a classifier. For each logit it computes 2 D operations and five for
// the softmax, and it has to move x, W and probs, 4 (B D + D C + B C) bytes. In small layers
// neither operations nor bytes take long: launches do, and blocks that wait for one another's data.
// In large ones with many rows arithmetic is the limit. In large ones with few rows it is memory,
// since W is nearly all that moves.
//
// Unfused, one kernel writes the B C logits and another one reads them. Fused, they can stay on the
// chip. But softmax needs whole rows: every probability depends on the maximum and on the sum of
// all of its row. So a fused kernel has to bring a row's logits together, wherever on the GPU they
// were computed. How it does that is what tells the kernels below apart.
//
// "Fused is faster than cuBLAS + softmax" compares two things at once: whose product is better, and
// what fusion saves. So there are three combinations:
//
//     (1) library   cuBLAS's fastest, then our softmax of logits (softmax_rows, below)
//     (2) unfused   our product, then the same softmax kernel
//     (3) fused     our product and softmax in one launch (*online* is half fused: it has two)
//
// (2) against (3) is fusion, where the product is the same. (1) against (2) compares the library's
// product with ours, and also how the two are launched: ours starts early, the library's does not.
// Three of our products have both rows, (2) and (3): *tensor cores*, *specialized* and *tiles*.
// (The third pair is no measure of fusion: *fused tiles* says why.)
//
// How does a row come together, and which product makes its logits? The rows of a table are named
// after the two. Below each product stand its rows:
//
//     simple product, on the CUDA cores
//       unfused tiles          logits go to memory, and a kernel after it reads them
//       fused tiles            one block has whole rows
//       exchange tiles         the blocks of a row tell each other maximum and sum
//       online tiles           logits and each part's maximum and sum go to memory
//     on tensor cores, for 128 columns at most
//       unfused tensor cores   logits go to memory, as above
//       fused tensor cores     one block has whole rows
//     lesson 3's product
//       unfused specialized    logits go to memory, as above
//       fused specialized      the blocks of a row tell each other maximum and sum
//       online specialized     logits and each part's maximum and sum go to memory
//
// Three more kernels have a product of their own:
//
//     fused rows       a block has a row, and reads all of W: simple, but W is read B times
//     fused cluster    split-K: each of 8 blocks adds up an eighth of D. They send their partial
//                      sums through distributed shared memory. *tensor cores* does the same
//     fused split-K    *fused rows* again, for at most 16 columns: the threads of a block share D,
//                      so the loads of 128 inputs are under way at once
//
// *specialized* has lesson 3's warp specialization, pipeline of stages, and clusters of blocks that
// share what they copy. The simple products are there to be read; judge by the other two.
//
// So the ideas lead to *fused tensor cores* for up to 128 columns. For more columns they lead to
// *fused specialized*, or to *online specialized* where a row of logits has more tiles than run at
// a time. In the smallest layers *fused split-K* wins, without tensor cores. Where D is long the
// product takes nearly all of the time. There fusion saves nothing or costs a little: whole rows
// are finished, a few at a time, so x and W are read more often.
//
// The kernels on tensor cores take only rows that are whole vectors: D has to be a multiple of 4,
// and C of 2 (*tensor cores*) or 4 (*specialized*). For other shapes the table lacks these kernels,
// and a line below the tables says so. How any shape can be taken: docs/softmax.md.
//
// There are two sets of tables, never mixed (but for those of rows of only -inf): true fp32
// accuracy, and TF32, where a product may round its operands to 11 bits of precision (10 that are
// stored, and the leading 1), so that tensor cores can multiply them. The kernels on the CUDA cores
// do not round operands. The TF32 tables lack *fused rows*. The others are in both sets, where a
// shape is not too large for them. In the fp32 tables tensor cores multiply in "3xTF32": each
// operand is split into two TF32 numbers, and there are three products instead of one. The error is
// held to the bound of fp32.
//
// All kernels of ours, the softmax of (1) and (2) among them, are launched early
// (primitives/early_launch.cuh): here the time between two kernels counts. When all blocks of a
// kernel have called start_next_kernel() or ended, blocks of the next kernel may take the places
// that are free. wait_for_previous_kernel() waits until the kernel before has ended. Only then may
// a kernel read what the kernel before writes, or write what it reads. start_next_kernel() may be
// called before that wait: the next kernel's blocks start then, but they, too, wait for the end of
// this kernel.
//
// A logit of -inf has the probability 0. If all logits of a row are -inf, there is no maximum to
// subtract: all of the row's probabilities become NaN, in the reference, too.
//
// --all adds the fp32 tables, which a GPU before compute capability 8.0 always has, and more shapes
// where none is given. --hard-rows puts infinities and huge numbers among the logits, and adds
// tables in which some rows of logits are only -inf. What a reader may try next stands in
// exercises/9_softmax_training.cu: cross-entropy, the backward pass, fp16 inputs.

#include <algorithm>
#include <cmath>
#include <cuda/atomic>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "primitives/approximate.cuh"
#include "primitives/async_copy.cuh"
#include "primitives/early_launch.cuh"
#include "primitives/hopper/pipeline.cuh"
#include "primitives/launch.h"
#include "primitives/row_parts.cuh"
#include "primitives/spin.cuh"
#include "problems/product/library_product.h"
#include "problems/softmax/softmax_problem.h"

using namespace problems;
using namespace primitives;

constexpr int kWarps = 8, kThreads = 32 * kWarps;

// ---- Maximum and sum ----------------------------------------------------------------------------

// The words of this part:
//
//     MaxSum {largest, sum}   the largest logit of a row or of a part of it, and the sum of
//                             exp(logit - largest): "maximum and sum". Of no logits it is {-inf, 0}
//     base_of(largest)        what is subtracted from logits: the maximum, or 0 where that is -inf,
//                             since -inf - (-inf) is NaN
//     lanes_max<32>(value)    the maximum over the lanes of a warp; lanes_sum<32> is their sum
//     online softmax          parts of a row are merged, and no part has to know another one's
//                             maximum beforehand

// exp(logit - m) is an exponential relative to m. Times this factor, exponentials relative to
// `from` become relative to `to`. If both are -inf, it is 1.
__device__ inline float rebase(float from, float to) { return from == to ? 1 : expf(from - to); }

// Merges two parts of a row: both sums become relative to the larger maximum. For example, the
// logits 3 and 1 are (3, 1.135), and 5 and 4 are (5, 1.368). Together they are
// (5, 1.135 e^(3 - 5) + 1.368), which is (5, 1.522).
__device__ inline MaxSum merge(MaxSum a, MaxSum b) {
  const float largest = fmaxf(a.largest, b.largest);
  return {largest, a.sum * rebase(a.largest, largest) + b.sum * rebase(b.largest, largest)};
}

// Merges the parts of a warp's lanes by shuffles. All lanes get the result.
__device__ inline MaxSum warp_merge(MaxSum part) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) {
    part = merge(part, {__shfl_xor_sync(kAllLanes, part.largest, i),
                        __shfl_xor_sync(kAllLanes, part.sum, i)});
  }
  return part;
}

// Merges the parts of the warps of a block, of which `part` is this warp's. All threads call it,
// once in a kernel, and get the result. (A second call could change `parts` while some still read.)
__device__ inline MaxSum block_merge(MaxSum part) {
  __shared__ MaxSum parts[kWarps];
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = part;
  __syncthreads();
  // The maximum of all comes first, so that the exponentials do not wait for one another.
  MaxSum each[kWarps];
  float largest = minus_infinity(), sum = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    each[i] = parts[i];
    largest = fmaxf(largest, each[i].largest);
  }
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += each[i].sum * rebase(each[i].largest, largest);
  return {largest, sum};
}

// A warp has a part of a row in its lanes: lane l has the logits of the part's columns l, l + 32
// and so on. Of these only the first `columns` columns exist. The logits become exponentials
// relative to their maximum, and those of other columns become 0. Maximum and sum are returned.
template <int kValues>
__device__ MaxSum exponentials(float (&v)[kValues], int columns) {
  const int lane = threadIdx.x % 32;
  float largest = minus_infinity(), sum = 0;
#pragma unroll
  for (int j = 0; j < kValues; ++j) {
    if (lane + 32 * j >= columns) v[j] = minus_infinity();
    largest = fmaxf(largest, v[j]);
  }
  largest = lanes_max<32>(largest);
#pragma unroll
  for (int j = 0; j < kValues; ++j) {
    v[j] = expf(v[j] - base_of(largest));
    sum += v[j];
  }
  return {largest, lanes_sum<32>(sum)};
}

// Writes such a part, each value times `factor`. The part's first column is at `to`.
template <int kValues>
__device__ void write_part(float* to, const float (&v)[kValues], float factor, int columns) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kValues; ++j) {
    if (lane + 32 * j < columns) to[lane + 32 * j] = v[j] * factor;
  }
}

// ---- softmax of logits --------------------------------------------------------------------------

// This comes after a product that is not fused. The rows *library* and *unfused* all have it, so it
// has to be good. If a row fits into registers, each logit is read once.
//
// kGroup threads, a warp or the block, share a row of at most kGroup * kValues logits, and keep it
// in registers. If C is a multiple of 4 (kWidth = 4), they read and write 16 bytes at a time. A
// thread has kWidth neighbours, then the kWidth neighbours that are kGroup * kWidth columns further
// on, and so on.
template <int kGroup, int kValues, int kWidth>
__global__ void __launch_bounds__(kThreads)
    softmax_rows(const float* logits, float* probs, int B, int C) {
  start_next_kernel();
  wait_for_previous_kernel();
  const int row = blockIdx.x * (kThreads / kGroup) + threadIdx.x / kGroup;
  if (row >= B) return;  // a warp does so as a whole; a block that shares a row always has one
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
  float largest = v[0], sum = 0;
#pragma unroll
  for (int i = 1; i < kValues; ++i) largest = fmaxf(largest, v[i]);
  largest = lanes_max<32>(largest);
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    v[i] = expf(v[i] - base_of(largest));
    sum += v[i];
  }
  sum = lanes_sum<32>(sum);
  float factor = 1 / sum;
  if constexpr (kGroup != 32) {
    const MaxSum all = block_merge({largest, sum});
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

// A row that does not fit into a block's registers is read twice, by two kernels. In both of them
// gridDim.y blocks share row blockIdx.x, and each has kLongPart of its columns. (That is half of
// what a block could hold, for twice as many blocks.) Loads are of 4 bytes, so that any C will do.
// The first kernel writes the maximum and the sum of each part. Its exponentials are not kept. So
// each thread's sum may be relative to the thread's own maximum, and merging does the rest.
constexpr int kLongestInRegisters = 32 * kThreads, kLongPart = 16 * kThreads;

__global__ void __launch_bounds__(kThreads) sum_parts(const float* logits, MaxSum* parts, int C) {
  start_next_kernel();
  wait_for_previous_kernel();
  constexpr int kValues = kLongPart / kThreads;
  const float* from = logits + static_cast<size_t>(blockIdx.x) * C;
  const int first = blockIdx.y * kLongPart + threadIdx.x;
  float v[kValues], largest = minus_infinity(), sum = 0;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int col = first + i * kThreads;
    v[i] = col < C ? from[col] : minus_infinity();
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) largest = fmaxf(largest, v[i]);
#pragma unroll
  for (int i = 0; i < kValues; ++i) sum += expf(v[i] - base_of(largest));
  const MaxSum all = block_merge(warp_merge({largest, sum}));
  if (threadIdx.x == 0) parts[static_cast<size_t>(blockIdx.x) * gridDim.y + blockIdx.y] = all;
}

// The second kernel merges all `count` parts of the row, and makes probabilities of its logits.
// (The parts may also be those that a product has left: see *online tiles*.)
__global__ void __launch_bounds__(kThreads)
    finish_rows(const float* logits, float* probs, const MaxSum* parts, int C, int count) {
  start_next_kernel();
  wait_for_previous_kernel();
  constexpr int kValues = kLongPart / kThreads;
  const size_t start = static_cast<size_t>(blockIdx.x) * C;
  const int first = blockIdx.y * kLongPart + threadIdx.x;
  float v[kValues];  // these loads are under way while the parts are merged
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    v[i] = first + i * kThreads < C ? logits[start + first + i * kThreads] : 0;
  }
  const MaxSum* of_row = parts + static_cast<size_t>(blockIdx.x) * count;
  MaxSum part = {minus_infinity(), 0};
  for (int i = threadIdx.x; i < count; i += kThreads) part = merge(part, of_row[i]);
  const MaxSum all = block_merge(warp_merge(part));
  const float base = base_of(all.largest), factor = 1 / all.sum;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    if (first + i * kThreads < C) probs[start + first + i * kThreads] = expf(v[i] - base) * factor;
  }
}

// ---- fused rows ---------------------------------------------------------------------------------

// A block owns a row, and a thread owns the columns threadIdx.x, threadIdx.x + 256 and so on:
// lesson 1's product, coalesced along W. A thread keeps the maximum and the sum of its logits so
// far, and writes the logits to `probs`. When the block has merged what its threads have, each
// thread reads its logits again, from the caches, and writes probabilities over them.
//
// This is one launch. But each block reads all of W for its one row: 2 operations for every 4
// bytes. At best these bytes come from the L1 cache, if another block of the same multiprocessor
// has read them.
__global__ void __launch_bounds__(kThreads)
    fused_rows(const float* x, const float* W, float* probs, int D, int C) {
  start_next_kernel();
  wait_for_previous_kernel();
  const float* x_row = x + static_cast<size_t>(blockIdx.x) * D;
  float* row = probs + static_cast<size_t>(blockIdx.x) * C;
  MaxSum part = {minus_infinity(), 0};
  for (int col = threadIdx.x; col < C; col += kThreads) {
    float logit = 0;
    for (int d = 0; d < D; ++d) logit += x_row[d] * W[static_cast<size_t>(d) * C + col];
    row[col] = logit;
    // A logit alone is its own maximum, and its exponential relative to that is e^0 = 1.
    part = merge(part, {logit, logit == minus_infinity() ? 0.0f : 1.0f});
  }
  const MaxSum all = block_merge(warp_merge(part));
  for (int col = threadIdx.x; col < C; col += kThreads) {
    row[col] = expf(row[col] - base_of(all.largest)) / all.sum;
  }
}

// ---- unfused tiles ------------------------------------------------------------------------------

// The words of this part:
//
//     copy_async          starts a copy from global to shared memory (cp.async, lesson 2)
//     TileStage           what one step along D needs of x and of W, in shared memory
//     copies_ahead        keeps the copies two steps ahead of what is multiplied
//     ahead.next()        waits for the copies of the next step, starts those of two steps later,
//                         and returns the number of the step that it has waited for
//
// Rows share W from here on: a block computes a tile of 32 x 128 logits, as lesson 2's *async*
// does. Steps of 16 inputs come into shared memory, two of them ahead of the one that is
// multiplied. Copies are of 4 bytes, so that any D and C will do. Warp w has rows 4 w to 4 w + 3 of
// the tile with all 128 columns, and lane l of it the columns l, l + 32, l + 64 and l + 96: 16
// sums a thread. So a row of the tile is in the lanes of one warp, which is what a softmax wants:
// its maximum and its sum take a few shuffles.
//
// The product is in fp32 on the CUDA cores. That takes the least code, and any GPU runs it.
constexpr int kRows = 32, kCols = 128, kDepth = 16, kStages = 3;
constexpr int kOwnRows = kRows / kWarps, kOwnCols = kCols / 32;  // a thread's

struct SoftmaxInputs {
  const float *x, *W;
  int B, D, C;
};

struct alignas(16) TileStage {
  float x[kRows][kDepth];
  float W[kDepth][kCols];
};

// The logits of the tile at (row0, col0), summed over the inputs d_begin <= d < d_end. Beyond the
// matrices there are zeros.
__device__ void multiply_tile(float (&sum)[kOwnRows][kOwnCols], TileStage (&stages)[kStages],
                              const SoftmaxInputs& in, int row0, int col0, int d_begin, int d_end) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int steps = (d_end - d_begin + kDepth - 1) / kDepth;
  const auto copy_step = [&](int step) {
    if (step >= steps) return;
    TileStage& stage = stages[step % kStages];
    const int d0 = d_begin + step * kDepth;
    for (int i = threadIdx.x; i < kRows * kDepth; i += kThreads) {
      const int row = row0 + i / kDepth, d = d0 + i % kDepth;
      copy_async<4>(&stage.x[i / kDepth][i % kDepth], in.x + static_cast<size_t>(row) * in.D + d,
                    row < in.B && d < d_end);
    }
    for (int i = threadIdx.x; i < kDepth * kCols; i += kThreads) {
      const int d = d0 + i / kCols, col = col0 + i % kCols;
      copy_async<4>(&stage.W[i / kCols][i % kCols], in.W + static_cast<size_t>(d) * in.C + col,
                    d < d_end && col < in.C);
    }
  };
  auto ahead = copies_ahead<kStages>(copy_step);
  for (int step = 0; step < steps; ++step) {
    const TileStage& stage = stages[ahead.next() % kStages];
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      float x[kOwnRows], w[kOwnCols];
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) x[i] = stage.x[kOwnRows * warp + i][k];
#pragma unroll
      for (int j = 0; j < kOwnCols; ++j) w[j] = stage.W[k][lane + 32 * j];
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) {
#pragma unroll
        for (int j = 0; j < kOwnCols; ++j) sum[i][j] += x[i] * w[j];
      }
    }
  }
}

// Unfused, a block writes its tile of logits, and knows nothing of the other tiles of its rows.
// (`parts` is null. It is for *online tiles*, below.)
__global__ void __launch_bounds__(kThreads)
    logit_tiles(SoftmaxInputs in, float* logits, MaxSum* parts, int tiles) {
  start_next_kernel();
  wait_for_previous_kernel();
  __shared__ TileStage stages[kStages];
  const int tile = blockIdx.x % tiles, row0 = blockIdx.x / tiles * kRows, col0 = tile * kCols;
  float sum[kOwnRows][kOwnCols] = {};
  multiply_tile(sum, stages, in, row0, col0, 0, in.D);
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i) {
    const int row = row0 + kOwnRows * (threadIdx.x / 32) + i;
    if (row >= in.B) return;
    write_part(logits + static_cast<size_t>(row) * in.C + col0, sum[i], 1, in.C - col0);
    if (!parts) continue;
    const MaxSum part = exponentials(sum[i], in.C - col0);
    if (threadIdx.x % 32 == 0) parts[static_cast<size_t>(row) * tiles + tile] = part;
  }
}

// ---- fused tiles --------------------------------------------------------------------------------

// The product is the same. But a block has 32 rows with all their columns, at most 128, and a warp
// finishes its four rows without any other warp: no logit is written. W is read B / 32 times, where
// *fused rows* reads it B times. But few rows are few blocks: 1024 rows are 32 blocks, and an H100
// has 132 multiprocessors.
//
// This row is here to be read, and is no measure of fusion: at 1024x1024x100 it takes about half of
// the time of *unfused tiles*, with the same product and the same 32 blocks, and why was not
// measured. What fusion saves there can be seen in the rows *tensor cores*: about a microsecond.
__global__ void __launch_bounds__(kThreads) fused_tiles(SoftmaxInputs in, float* probs) {
  start_next_kernel();
  wait_for_previous_kernel();
  __shared__ TileStage stages[kStages];
  const int row0 = blockIdx.x * kRows;
  float logits[kOwnRows][kOwnCols] = {};
  multiply_tile(logits, stages, in, row0, 0, 0, in.D);
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i) {
    const int row = row0 + kOwnRows * (threadIdx.x / 32) + i;
    const MaxSum all = exponentials(logits[i], in.C);
    if (row >= in.B) return;
    write_part(probs + static_cast<size_t>(row) * in.C, logits[i], 1 / all.sum, in.C);
  }
}

// ---- fused cluster ------------------------------------------------------------------------------

// The words of this part (compute capability 9.0 and newer, where CLUSTER_CODE is 1):
//
//     split-K                  blocks share the sum: each adds up a part of the inputs. (K is the
//                              field's letter for the dimension that is summed, here D.)
//     cluster                  blocks that run at the same time, on neighbouring multiprocessors
//     distributed shared       the shared memory of all blocks of a cluster: a block can write into
//     memory                   another one's
//     cluster_rank()           which block of its cluster this is
//     Barrier                  counts the bytes that have come (an mbarrier).
//                              barrier_arrive_expect tells it how many there will be
//     store_push               writes a float into another block, whose barrier counts its bytes
//
// In *fused tiles* few rows are few blocks. Here eight blocks compute the same tile, and each of
// them adds up an eighth of the D inputs, so eight partial sums of each logit have to be added. The
// launch makes the eight blocks a cluster, so partial sums need not go through global memory.
//
// In every block warp w has the same four rows of the tile, 4 w to 4 w + 3. Block w of the cluster
// adds up these four rows: warp w of each block pushes its partial sums to block w. Hence there are
// as many blocks in a cluster as warps in a block. Each block has an inbox with room for each of
// the eight senders. Then four warps of the block take a row each: they add what the eight have
// sent, and finish the row.
constexpr int kSplits = kWarps;  // blocks that share the inputs

__global__ void __launch_bounds__(kThreads) fused_cluster(SoftmaxInputs in, float* probs) {
#if CLUSTER_CODE
  __shared__ TileStage stages[kStages];
  __shared__ float inbox[kSplits][kOwnRows][kCols];
  __shared__ Barrier come;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = cluster_rank();
  if (threadIdx.x == 0) {
    barrier_init(&come, 1);
    barrier_init_fence();
    barrier_arrive_expect(&come, sizeof inbox);
  }
  // cluster_wait() below waits until all threads of the eight blocks have called cluster_arrive().
  // Thread 0 of each block does so after it has initialized its block's barrier. So a thread that
  // has passed cluster_wait() may push into all eight inboxes. (By barrier_init_fence() it sees
  // their barriers. Of other data that was written before, it may read nothing.)
  cluster_arrive();
  start_next_kernel();
  wait_for_previous_kernel();

  const int row0 = blockIdx.x / kSplits * kRows, share = (in.D + kSplits - 1) / kSplits;
  const int d_begin = min(in.D, rank * share), d_end = min(in.D, d_begin + share);
  float sum[kOwnRows][kOwnCols] = {};
  multiply_tile(sum, stages, in, row0, 0, d_begin, d_end);

  cluster_wait();
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i) {
#pragma unroll
    for (int j = 0; j < kOwnCols; ++j) {
      store_push(&inbox[rank][i][lane + 32 * j], sum[i][j], &come, warp);  // in block `warp`
    }
  }
  // After this wait what all eight have pushed is here. (What this block has pushed may still be on
  // its way. The block may end all the same, since the values have left its registers: a receiver
  // has to stay.)
  barrier_wait(&come, 0);

  const int row = row0 + kOwnRows * rank + warp;
  if (warp >= kOwnRows || row >= in.B) return;
  float logits[kOwnCols] = {};
#pragma unroll
  for (const auto& from : inbox) {
#pragma unroll
    for (int j = 0; j < kOwnCols; ++j) logits[j] += from[warp][lane + 32 * j];
  }
  const MaxSum all = exponentials(logits, in.C);
  write_part(probs + static_cast<size_t>(row) * in.C, logits, 1 / all.sum, in.C);
#endif
}

// ---- online tiles -------------------------------------------------------------------------------

// With more than 128 columns a row is spread over the tiles of several blocks, which know nothing
// of each other. But a block can find the maximum and the sum of its part of a row while it has the
// logits in its registers. logit_tiles(), above, leaves these two numbers in `parts` (B, tiles), if
// `parts` is not null. The sum is relative to the part's own maximum, so no part has to know
// another one's. finish_rows(), above, merges a row's parts, and makes probabilities of its logits.
//
// So the logits are still written and read. After *unfused tiles* a row of more than 8192 columns
// is read twice, and here once. For shorter rows this saves nothing, since softmax_rows() reads
// them once, too. And *online tiles* computes exponentials twice: for sums, and for probabilities.

// ---- exchange tiles -----------------------------------------------------------------------------

// The words of this part:
//
//     resident blocks     those that the GPU has room for at the same time
//     GridCount           a counter in global memory, for all blocks of the launch
//     release, acquire    A thread writes data, and then adds to a counter by a release. A thread
//                         that has read this count by an acquire also sees the data. A
//                         __syncthreads() before the release, and one after the acquire, extend
//                         this to all threads of both blocks
//     wait_for_count      reads a counter until it is high enough, by an acquire
//
// Here a row's blocks wait for each other, so that no logit leaves the registers. Each block posts
// (writes to global memory) the maximum and the sum of its part, 8 bytes a row. Then it waits until
// all blocks of these rows have posted theirs, and writes probabilities.
//
// In our tables this is slower than *unfused tiles*: the product takes nearly all of the time, and
// blocks that wait do not multiply. Also, blocks may be too few: at C = 50304 a strip is 393 tiles,
// and an H100 has room for 528. So one strip runs at a time, and a quarter of the places stays
// empty. This is here for the idea, on which *fused specialized* rests.
//
// A block that waits for one that never starts waits for ever. So there are at most as many blocks
// as can be resident. (The blocks of the next kernel, which start early, take no place from them:
// they start when all of these have called start_next_kernel(), and so have started.) Together the
// blocks compute some strips of 32 rows, with all of their tiles, and then the next strips. For
// each strip there are two counters: `posted` counts the blocks that have posted, and `done` those
// that need `posted` no more. Both are zero before a launch, and again after it: is_last_block()
// clears `done`, and the last block that calls it clears `posted`.
__global__ void __launch_bounds__(kThreads)
    exchange_tiles(SoftmaxInputs in, float* probs, MaxSum* parts, unsigned* posted, unsigned* done,
                   int tiles) {
  start_next_kernel();
  wait_for_previous_kernel();
  __shared__ TileStage stages[kStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tile = blockIdx.x % tiles, col0 = tile * kCols, columns = in.C - col0;
  const int strips = (in.B + kRows - 1) / kRows;
  for (int strip = blockIdx.x / tiles; strip < strips; strip += gridDim.x / tiles) {
    const int row0 = strip * kRows + kOwnRows * warp;  // the warp's
    float logits[kOwnRows][kOwnCols] = {}, own_largest[kOwnRows];
    multiply_tile(logits, stages, in, strip * kRows, col0, 0, in.D);
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      const MaxSum part = exponentials(logits[i], columns);
      own_largest[i] = part.largest;
      if (lane == 0 && row0 + i < in.B) parts[static_cast<size_t>(row0 + i) * tiles + tile] = part;
    }
    __syncthreads();  // the block's parts are written
    if (threadIdx.x == 0) {
      const GridCount count(posted[strip]);
      count.fetch_add(1, cuda::memory_order_release);
      wait_for_count(count, tiles, "the other blocks' maxima and sums of these rows");
    }
    __syncthreads();  // the parts of all blocks of these rows are written
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      if (row0 + i >= in.B) break;
      const size_t row = row0 + i;
      MaxSum all = {minus_infinity(), 0};
      for (int t = lane; t < tiles; t += 32) all = merge(all, parts[row * tiles + t]);
      all = warp_merge(all);
      // The exponentials are relative to the part's maximum, and become relative to the row's.
      write_part(probs + row * in.C + col0, logits[i],
                 rebase(own_largest[i], all.largest) / all.sum, columns);
    }
    const bool last = is_last_block(done + strip, tiles);  // it has barriers: all threads call it
    if (last && threadIdx.x == 0) posted[strip] = 0;
  }
}

// ---- Tensor cores: a transposed product, and 3xTF32 ---------------------------------------------

// The words of this part (Hopper, as in lesson 3):
//
//     TF32                    fp32 with 10 bits of mantissa: what tensor cores multiply
//     wgmma                   a warpgroup (128 threads) multiplies 64 rows of a left factor by up
//                             to 256 columns of a right one; it runs while the threads go on
//     Sum<kCols>              a warpgroup's sums of 64 rows by kCols columns, in its registers
//     ColumnTile<float, 40>   for example, a right factor of 32 inputs and 40 columns in shared
//                             memory, each column contiguous
//     LeftFragments<float>    a thread's elements of a left factor of 64 rows and 32 inputs, in its
//                             registers; slices[k] are those of 8 inputs, for one wgmma
//     multiply_slice          starts one wgmma; a step has kSlices = 4 of them. wgmma_fence() comes
//                             before them, wgmma_commit() and, later, wgmma_wait() after them
//     start_product           starts the products of 32 inputs, for one step: all but the wait
//
// In TF32 wgmma takes a factor from shared memory only if its elements are contiguous along the
// dimension that is summed, D here. A row of x is, and a column of W is not. So W has to come from
// registers, and wgmma takes only a left factor from there. Hence W^T is the left factor:
//
//     logits^T (C, B)  =  W^T (C, D)  x^T (D, B)
//     in registers        in registers   in shared memory, as the copy engine leaves it
//
// So rows of a Sum are columns of W, and columns of a Sum are rows of x: sum.col(i) is a row of x.
// A warpgroup has 64 columns of W, and a warp has 16.
//
// 3xTF32: an fp32 number is nearly the sum of two TF32 numbers. `high` has the first 11 of its 24
// bits (with the leading 1), and `low` the next 11, rounded. So a product has four parts:
//
//     (x.high + x.low) (w.high + w.low) = high high + high low + low high + low low
//
// The last part is too small to matter. For each 8 inputs the other three are added, the small ones
// first. Tensor cores truncate what they accumulate, and over a long sum these errors add up. So
// they sum only one step, and the CUDA cores add its result to the others, rounded to nearest.
constexpr int kStep = kLine<float>;  // the inputs of a step: 128 bytes of floats, 32

struct SplitTf32 {
  unsigned high, low;
};
__device__ inline bool is_infinite(unsigned bits) { return (bits & 0x7fffffff) == 0x7f800000; }
// `high` is `value` without the 13 bits that TF32 lacks. `low` is the rest, rounded: half of the
// last bit that is kept is added, and then it is cut. A carry goes into the exponent, as it should.
// An infinity has no `low`.
__device__ inline SplitTf32 split_tf32(float value) {
  constexpr unsigned kMantissa = 0xffffe000, kHalf = 0x1000;
  const unsigned high = __float_as_uint(value) & kMantissa;
  const unsigned rest = __float_as_uint(value - __uint_as_float(high));
  return {high, is_infinite(high) ? 0 : (rest + kHalf) & kMantissa};
}

#if HOPPER_CODE
// Splits `count` elements of x (a multiple of 4). `high` is x before, and high + low is nearly x
// after. `threads` threads call this; `first` is the caller's number among them.
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

// Adds the products of one step in 3xTF32. w are fragments of W^T in fp32, which are split here. x
// has been split into two tiles before. When this returns, the products are done. An infinity of W
// must not be multiplied by x_low, which may be 0: infinity times 0 is NaN. So `finite` has 0 in
// its place. (With an infinity of x all of its row's logits are infinite or NaN, and all
// probabilities NaN either way.)
template <int kCount>
__device__ inline void add_3xtf32(Sum<kCount>& sum, const LeftFragments<float>& w,
                                  const ColumnTile<float, kCount>& x_high,
                                  const ColumnTile<float, kCount>& x_low) {
  LeftFragments<float> high, low, finite;
#pragma unroll
  for (int k = 0; k < kSlices; ++k) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const SplitTf32 split = split_tf32(__uint_as_float(w.slices[k][e]));
      high.slices[k][e] = split.high, low.slices[k][e] = split.low;
      finite.slices[k][e] = is_infinite(split.high) ? 0 : split.high;
    }
  }
  Sum<kCount> step;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSlices; ++k) {
    multiply_slice(step.elements, finite, x_low.columns(), k, k > 0);  // k = 0 sets `step`
    multiply_slice(step.elements, low, x_high.columns(), k, true);
    multiply_slice(step.elements, high, x_high.columns(), k, true);
  }
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < Sum<kCount>::size(); ++i) sum.elements[i] += step.elements[i];
}
#endif

// ---- unfused tensor cores, fused tensor cores ---------------------------------------------------

// The words of this part:
//
//     copy engine (TMA)     one thread orders a copy of a whole box, and a barrier counts its bytes
//     CUtensorMap           tells the copy engine where a matrix lies, and which box is copied
//     tensor_load           orders such a copy. What lies outside of the matrix becomes zero
//     bulk_push             copies from this block's shared memory into that of another block
//     shared_fence          has to come before the copy engine or wgmma reads what threads wrote
//
// This is *fused cluster* with another product. The blocks of a cluster share D again, and push
// partial sums to each other. A block takes a chunk of kInputs inputs at a time. x comes by the
// copy engine. An element of W is needed by one thread of the block only. So W goes from memory
// straight to the registers, all of a chunk at once: all loads are under way (started, and not
// there yet) before the first value is needed. That is what counts here. These layers take a few
// microseconds, and each load that waits for another adds a trip to the L2 cache or to memory.
// There is no pipeline of stages: at the sizes of the GPU's tables a block has one chunk, or none,
// and then it pushes zeros.
//
// A block has a warpgroup for each 64 columns. Each of the kSplits blocks finishes its share of the
// rows, and the others push their partial sums of that share into its inbox. A single copy moves
// all that goes to one block. Unfused, the same kernel writes the sums as they are. (In the kernels
// on tensor cores kSplits, kRows, kOwnRows and kStages are their own, and not the constants above.)
template <bool k3xTF32, int kSplits, int kRows, int kClasses, int kInputs>
struct ClusterShared {
  static constexpr int kOwnRows = kRows / kSplits;  // that a block finishes
  static constexpr int kBoxes = kInputs / kStep;
  static_assert(kRows % kSplits == 0 && kInputs % kStep == 0);
  // How many floats of a row one block sends to another: the columns, and padding, so that the four
  // rows that a half warp stores begin 8 banks apart. It is 8 times some number, plus 4. Stores of
  // 8 bytes go by half warps. Lanes with the same lane % 4 have the same row, so a half warp stores
  // 8 floats of each of the rows 0, 2, 4 and 6. With a stride of 8 m + 4 these begin on the banks
  // 0, 8, 16 and 24, in some order, so there is no conflict. (There may be one where the rows are
  // in two outboxes.) Copies need a multiple of 4.
  static __device__ int stride(int C) { return (C + 7) / 8 * 8 + 4; }
  static constexpr int kMostStride = kClasses + 4;

  ColumnTile<float, kRows> x[k3xTF32 ? 2 : 1][kBoxes];  // in 3xTF32 x[0] is `high`, x[1] is `low`
  // What goes to each other block of the cluster, and what comes from each: kOwnRows rows that are
  // stride(C) floats apart. A block's own sums stay in its outbox.
  alignas(16) float outbox[kSplits][kOwnRows * kMostStride];
  alignas(16) float inbox[kSplits][kOwnRows * kMostStride];
  Barrier full;  // x is there
  Barrier come;  // what the other blocks send is in the inbox
};

#if HOPPER_CODE
// Loads a thread's fragments of W^T, for the inputs from d0 on, 32 for each of w[]. wgmma gives a
// thread two rows of W^T, and any two columns of W may be these, as long as the results are read in
// the same order. For example, thread 0 is given rows 0 and 8. We load columns 0 and 1 there, and
// its results are those of columns 0 and 1. We take `col` and col + 1, so that one load of 8 bytes
// brings both. Of 8 inputs the thread has d, in to[0] and to[1], and d + 4, in to[2] and to[3]:
// load i is of input d + 4 i. With kInside all inputs exist; otherwise those that do not are zeros.
// Columns that do not exist get another column's values, and their sums are not written to `out`.
template <bool kInside, int kCount>
__device__ inline void load_fragments(LeftFragments<float> (&w)[kCount], const float* W, int d0,
                                      int col, int D, int C) {
  const int d = d0 + threadIdx.x % 4;
  const float* at = W + static_cast<size_t>(d) * C + min(col, C - 2);
#pragma unroll
  for (int i = 0; i < 8 * kCount; ++i, at += 4 * static_cast<size_t>(C)) {
    float2 pair = {};
    if (kInside || 4 * i < D - d) pair = *reinterpret_cast<const float2*>(at);
    uint32_t(&to)[4] = w[i / 8].slices[i / 2 % 4];
    to[i % 2 * 2] = __float_as_uint(pair.x), to[i % 2 * 2 + 1] = __float_as_uint(pair.y);
  }
}
#endif

template <bool k3xTF32, int kSplits, int kRows, int kClasses, int kInputs>
__global__ void HOPPER_CLUSTER(kSplits) __launch_bounds__(2 * kClasses, 1)
    tensor_core_cluster(const __grid_constant__ CUtensorMap x, const float* W, float* out, int B,
                        int D, int C, bool fused) {
#if HOPPER_CODE
  using Shared = ClusterShared<k3xTF32, kSplits, kRows, kClasses, kInputs>;
  constexpr int kOwnRows = Shared::kOwnRows, kBlockWarps = kClasses / 16;  // a warp: 16 columns
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const int rank = cluster_rank(), row0 = blockIdx.x / kSplits * kRows;
  const int chunks = (D + kInputs - 1) / kInputs;
  const int first = chunks * rank / kSplits, last = chunks * (rank + 1) / kSplits;
  const int stride = Shared::stride(C), sums_bytes = kOwnRows * stride * 4;
  const int warp = warp_of_block(), lane = threadIdx.x % 32;
  const auto fetch = [&](int chunk) {
    if (warp != 0 || !elect_one()) return;
    barrier_arrive_expect(&shared.full, sizeof shared.x[0]);
    for (int box = 0; box < Shared::kBoxes; ++box) {
      tensor_load(shared.x[0][box].row(0), &x, row0, chunk * kInputs + box * kStep, &shared.full);
    }
  };
  if (threadIdx.x == 0) {
    barrier_init(&shared.full, 1);
    barrier_init(&shared.come, 1);
    barrier_init_fence();
    barrier_arrive_expect(&shared.come, (kSplits - 1) * sums_bytes);
  }
  __syncthreads();  // `full` is initialized
  cluster_arrive();
  start_next_kernel();
  wait_for_previous_kernel();
  if (first < last) fetch(first);

  const int col = 16 * warp + lane / 4 * 2;  // the thread's columns: this one and the next
  Sum<kRows> sum = {};
  for (int chunk = first; chunk < last; ++chunk) {
    LeftFragments<float> w[Shared::kBoxes];
    if ((chunk + 1) * kInputs <= D) {
      load_fragments<true>(w, W, chunk * kInputs, col, D, C);
    } else {
      load_fragments<false>(w, W, chunk * kInputs, col, D, C);
    }
    barrier_wait(&shared.full, (chunk - first) % 2);
    if constexpr (k3xTF32) {  // all boxes as one array: there are no gaps between them
      split_all(shared.x[0][0].elements, shared.x[1][0].elements, kRows * kInputs, threadIdx.x,
                2 * kClasses);
      shared_fence();
      __syncthreads();
    }
#pragma unroll
    for (int box = 0; box < Shared::kBoxes; ++box) {
      if constexpr (k3xTF32) {
        add_3xtf32(sum, w[box], shared.x[0][box], shared.x[1][box]);
      } else {
        // wgmma truncates to TF32. So W is rounded here, as the copy engine has rounded x.
#pragma unroll
        for (auto& slice : w[box].slices) {
#pragma unroll
          for (uint32_t& element : slice) element = to_tf32(__uint_as_float(element));
        }
        sum.start_product(w[box], shared.x[0][box].columns(), chunk > first || box > 0);
      }
    }
    wgmma_wait<0>();
    __syncthreads();  // all products are done: x may be overwritten
    if (chunk + 1 < last) fetch(chunk + 1);
  }

  // Elements e and e + 2 of a thread are its two columns of one row.
#pragma unroll
  for (int i = 0; i < sum.size(); i += 4) {
#pragma unroll
    for (int e = i; e < i + 2; ++e) {
      const int row = sum.col(e);
      float* to = shared.outbox[row / kOwnRows] + row % kOwnRows * stride + col;
      if (col < stride) *reinterpret_cast<float2*>(to) = {sum.element(e), sum.element(e + 2)};
    }
  }
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
  cluster_arrive();  // this block has copies of what it needs of the others' outboxes
  // A warp takes a row at a time, and adds up what has come from the blocks of the cluster.
  for (int i = threadIdx.x / 32; i < kOwnRows; i += kBlockWarps) {
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
    float factor = 1;
    if (fused) factor = 1 / exponentials(v, C).sum;  // v becomes exponentials
    write_part(out + static_cast<size_t>(row) * C, v, factor, C);
  }
  cluster_wait();  // all copies out of this block's outbox have come: it may end
#endif
}

// ---- unfused specialized, online specialized, fused specialized ---------------------------------

// The words of this part (all but take_ahead and TransposedLeftTile are lesson 3's):
//
//     warp specialization   one thread, the producer, only orders copies; two warpgroups, the
//                           consumers, copy nothing
//     Pipeline              stages in shared memory, each with two barriers: `full` and `empty`
//     Writer, put           fills the next stage as soon as it is empty
//     Reader, take_ahead    waits until the next stage is full, and starts its products. In TF32
//                           the next step's left factor goes to registers while these run
//     BlockGrid<2, 1>       a cluster of two blocks. In the transposed product their tiles lie one
//                           below the other, with the same rows of x: each fetches one half of
//                           them, and multicasts it to both. (In 3xTF32 a block is alone)
//     TransposedLeftTile    the tile of W, as the copy engine leaves it; load_fragments() takes a
//                           thread's elements of W^T from it
//     named_barrier         a barrier for some of the block's threads, here the 256 that multiply
//
// With more than 128 columns a row has several tiles. The product is that of lesson 3's *clusters*,
// in TF32 and transposed: tiles of kRows rows of x by 128 columns of W, in steps of 32 inputs. A
// consumer has 64 of the tile's columns. A block stays, and takes one tile after another. The
// copies of the next tile start while the consumers still finish this one.
//
// What happens to the sums in the end tells three kernels apart:
//
//     Then::logits          unfused: logits are written
//     Then::parts           online: the same, and of each row the maximum and the sum of the tile's
//                           part. finish_rows() makes probabilities of them. In our tables this is
//                           slower than *unfused specialized*, but for C = 50304
//     Then::probabilities   fused: the blocks of a row tell each other maximum and sum, as in
//                           *exchange tiles*, and write probabilities
//
// In *exchange tiles* a block writes its numbers, and then a counter that says so, and others read
// the counter, and then the numbers: that is four trips to the L2 cache, one after another. Here
// maximum and sum are 8 bytes that are written and read as one access:
//
//     Posted     from the highest bit: 31 bits of the sum, 1 bit "turn", 32 bits of the maximum
//
// How does a reader know that these 8 bytes are of this launch? The sum can spare its last bit:
// without it a sum changes by 2^-23 of itself at most. In its place is the turn, and readers read
// again until it is this launch's turn:
//
//     launch     writes turn    finds in an entry, until it has been written
//     first      1              0: memory begins as zeros
//     second     0              1: of the first launch
//     third      1              0: of the second launch
//
// One bit is enough, because every launch overwrites every entry, also those of rows beyond B. So
// no counter is needed, and there are two trips. Nor is a release needed, or an acquire: all that a
// reader wants is in this one access.
enum class Then { logits, parts, probabilities };

using Posted = unsigned long long;  // a maximum, a sum, and the bit

// What the kernel is given beside x and W. A strip is kRows rows. The tiles of all strips, in the
// order of the tile scheduler, are the *places*: block b has the places b, b + gridDim.x and so on.
struct Specialized {
  int together = 1;  // strips of a band: see strip_and_tile()
  float* out = nullptr;
  MaxSum* parts = nullptr;   // (B, tiles)
  Posted* posted = nullptr;  // (strips, tiles, kRows)
  // Of each block: the turn of its last launch, 0 before the first. A block writes its own at its
  // end. (One turn for all could change before another block has read it.)
  unsigned* turns = nullptr;
  int B = 0, D = 0, C = 0;
  int strips = 0, tiles = 0;  // tiles of a strip: whole clusters, so one may be beyond C, and empty

  // The tile scheduler: which tile of which strip is place i? Blocks that wait for one another need
  // all tiles of a strip at the same time: then `together` is 1, and strips come one by one.
  // Otherwise a band of strips, 2048 rows (the last may have fewer), comes tile after tile
  // (rasterization). So blocks that run at the same time share what they read of W as well as of x.
  // The kPeers blocks of a cluster have neighbouring tiles. For 2 strips together, 4 tiles and
  // clusters of 2:
  //
  //     place i    0  1  2  3  4  5  6  7
  //     strip      0  0  1  1  0  0  1  1
  //     tile       0  1  0  1  2  3  2  3
  template <int kPeers>
  __device__ int2 strip_and_tile(int i) const {
    const int of_band = together * tiles, band = i / of_band, cluster = i % of_band / kPeers;
    const int here = min(together, strips - band * together);  // strips of this band
    return {band * together + cluster % here, cluster / here * kPeers + i % kPeers};
  }
};

template <bool k3xTF32, int kRows>
struct SpecializedShared {
  static constexpr int kConsumers = 2, kColumns = 64 * kConsumers;
  struct Stage {
    ColumnTile<float, kRows> x[k3xTF32 ? 2 : 1];  // in 3xTF32 x[0] is `high`, x[1] is `low`
    TransposedLeftTile<kColumns> W;
    static constexpr int kLoaded = sizeof(ColumnTile<float, kRows>) + sizeof W;
  };
  // 4 stages of 48 KB or 6 of 32 KB, of the 227 KB that a block may have. What follows takes up to
  // 10 KB more.
  static constexpr int kStages = (192 << 10) / sizeof(Stage);
  Pipeline<Stage, kStages> pipeline;
  Barrier split_done[kStages];  // in 3xTF32: a stage's x has been split
  // Of each warp that multiplies: its columns' maximum or sum, for each row.
  alignas(16) float parts[4 * kConsumers][kRows];
  alignas(16) float rows[kRows];  // what a row's exponentials are relative to; later its factor
};

#if HOPPER_CODE
constexpr int kMultiplying = 256, kSplitting = 96;  // threads that multiply, threads that split x

// e^value. In TF32, whose operands have 10 bits, the hardware's 2^x is good enough. It is off by 2
// units in the last place at most. The product value * log2(e) is rounded, too. With a value of
// -10, say, that makes the result wrong by up to 10 units more.
template <bool k3xTF32>
__device__ float exp_of(float value) {
  return k3xTF32 ? expf(value) : exp2_approximate(value * 1.44269504f);
}

__device__ inline Posted post(MaxSum part, unsigned turn) {
  return static_cast<Posted>((__float_as_uint(part.sum) & ~1u) | turn) << 32 |
         __float_as_uint(part.largest);
}
__device__ inline bool is_posted(Posted part, unsigned turn) { return (part >> 32 & 1) == turn; }
__device__ inline MaxSum part_of(Posted posted) {
  return {__uint_as_float(static_cast<unsigned>(posted)),
          __uint_as_float(static_cast<unsigned>(posted >> 32) & ~1u)};
}

// A thread calls this for a row. It has `own`, the maximum and the sum of its tile's part, and
// posts them for other blocks. It reads those of all tiles (the first tile's are at `of_tiles`), 16
// loads at a time, and merges them. Beyond the last tile a part counts as posted, and is empty.
template <bool k3xTF32, int kRows>
__device__ MaxSum exchange_row(MaxSum own, Posted* of_tiles, int tile, int tiles, unsigned turn) {
  const auto posted_at = [&](int i) {
    return cuda::atomic_ref<Posted, cuda::thread_scope_device>(
        of_tiles[static_cast<size_t>(i) * kRows]);
  };
  posted_at(tile).store(post(own, turn), cuda::memory_order_relaxed);
  MaxSum all = {minus_infinity(), 0};
  constexpr int kAtOnce = 16;
  for (int first = 0; first < tiles; first += kAtOnce) {
    Posted posted[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      posted[i] = post({minus_infinity(), 0}, turn);
      if (first + i < tiles) posted[i] = posted_at(first + i).load(cuda::memory_order_relaxed);
    }
    float largest = all.largest;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const Spin spin("another tile's maximum and sum of a row");
      while (!is_posted(posted[i], turn)) {
        posted[i] = posted_at(first + i).load(cuda::memory_order_relaxed);
        spin.again();
      }
      largest = fmaxf(largest, part_of(posted[i]).largest);
    }
    all = {largest, all.sum * rebase(all.largest, largest)};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const MaxSum part = part_of(posted[i]);
      all.sum += part.sum * exp_of<k3xTF32>(part.largest - base_of(largest));
    }
  }
  return all;
}

// Where do a thread's sums stand? Element i of its Sum is row col(i) of x, since the product is
// transposed, and elements i and i + 2 (i % 4 is 0 or 1) are the thread's two columns of that row.
// So a thread has a pair in kRows / 4 rows. This is the first element of a pair.
__device__ constexpr int element_of(int pair) { return pair / 2 * 4 + pair % 2; }

// The 8 lanes with the same lane % 4 have kCount values each. For each i, their eight values v[i]
// become one: the maximum, or the sum. (The field calls this a reduce-scatter: each lane ends with
// a part of the results.)
//
// Each time a lane keeps one half of its values and gives the other half to a partner. After three
// times it has kCount / 8 of them. With 8 values, and lane 4 standing for lanes 4 to 7:
//
//     lanes    0      4      8      12     16     20     24     28
//     first    0-3    4-7    0-3    4-7    0-3    4-7    0-3    4-7      partner: 4 lanes away
//     then     0-1    4-5    2-3    6-7    0-1    4-5    2-3    6-7      8 lanes away
//     last     0      4      2      6      1      5      3      7        16 lanes away
//
// first_combined() says with which values a lane ends: lane / 4 with its 3 bits reversed, times
// kCount / 8.
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
__device__ inline void combine_rows(float (&v)[kCount], Op op) {
  combine_halves<kCount / 2>(v, op, 4);
  combine_halves<kCount / 4>(v, op, 8);
  combine_halves<kCount / 8>(v, op, 16);
}
template <int kCount>
__device__ inline int first_combined() {
  const int g = threadIdx.x % 32 / 4;
  return ((g & 1) * 4 + (g & 2) + (g >> 2)) * (kCount / 8);
}

// Turns the block's logits into exponentials relative to the row's maximum in this tile. Of the
// threads that multiply, number `thread` < kRows returns the maximum and the sum of row `thread` of
// the tile. There are two rounds, one for the maxima and one for the sums. In each the lanes of a
// warp combine what they have of each row, a warp leaves the results in shared.parts, and the row's
// thread combines those of the eight warps. From the thread's first column on there are `columns`
// columns, an even number: both of the thread's columns exist, or, if it is not positive, neither.
template <bool k3xTF32, int kRows>
__device__ MaxSum tile_exponentials(SpecializedShared<k3xTF32, kRows>& shared, Sum<kRows>& sum,
                                    int thread, int columns) {
  constexpr int kPairs = kRows / 4;
  named_barrier(1, kMultiplying);  // all have read `parts` and `rows` of the tile before
  float of_row[kPairs];
  const auto share = [&] {
#pragma unroll
    for (int i = 0; i < kPairs / 8; ++i) {
      const int pair = first_combined<kPairs>() + i;
      shared.parts[thread / 32][Sum<kRows>::col(element_of(pair))] = of_row[i];
    }
  };
  if (columns <= 0) {
#pragma unroll
    for (int i = 0; i < Sum<kRows>::size(); ++i) sum.element(i) = minus_infinity();
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    of_row[i] = fmaxf(sum.element(element_of(i)), sum.element(element_of(i) + 2));
  }
  combine_rows(of_row, [](float a, float b) { return fmaxf(a, b); });
  share();
  named_barrier(1, kMultiplying);
  MaxSum part = {minus_infinity(), 0};
  if (thread < kRows) {
#pragma unroll
    for (const auto& of_warp : shared.parts) part.largest = fmaxf(part.largest, of_warp[thread]);
    shared.rows[thread] = base_of(part.largest);
  }
  named_barrier(1, kMultiplying);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const float base = shared.rows[Sum<kRows>::col(element_of(i))];
    float &a = sum.element(element_of(i)), &b = sum.element(element_of(i) + 2);
    a = exp_of<k3xTF32>(a - base), b = exp_of<k3xTF32>(b - base);
    of_row[i] = a + b;
  }
  combine_rows(of_row, [](float a, float b) { return a + b; });
  share();
  named_barrier(1, kMultiplying);
  if (thread < kRows) {
#pragma unroll
    for (const auto& of_warp : shared.parts) part.sum += of_warp[thread];
  }
  return part;
}

// Writes the sums, each times its row's factor: factors(row) returns those of `row`, which is even,
// and of the next row. `out` is where the tile's first row has the thread's first column, with
// `rows` rows from there on. Each row is checked only in the last strip, if that is not whole. Four
// elements further on is 8 rows further down.
template <int kRows, typename Factors>
__device__ void write_sums(const Sum<kRows>& sum, float* out, int C, int rows, Factors factors) {
  const auto each = [&](auto put) {
    float* to = out + static_cast<int64_t>(Sum<kRows>::col(0)) * C;
#pragma unroll
    for (int i = 0; i < Sum<kRows>::size(); i += 4, to += 8 * static_cast<int64_t>(C)) {
      const int row = Sum<kRows>::col(i);
      const float2 of = factors(row);
      put(row, to, float2{sum.element(i) * of.x, sum.element(i + 2) * of.x});
      put(row + 1, to + C, float2{sum.element(i + 1) * of.y, sum.element(i + 3) * of.y});
    }
  };
  if (rows < kRows) {
    each([&](int row, float* to, float2 pair) {
      if (row < rows) *reinterpret_cast<float2*>(to) = pair;
    });
  } else {
    each([](int, float* to, float2 pair) { *reinterpret_cast<float2*>(to) = pair; });
  }
}
#endif

template <bool k3xTF32, int kRows, int kPeers, Then kThen>
__global__ void HOPPER_CLUSTER(kPeers) __launch_bounds__(384, 1)
    softmax_specialized(const __grid_constant__ CUtensorMap x,
                        const __grid_constant__ CUtensorMap W,
                        const __grid_constant__ Specialized job) {
#if HOPPER_CODE
  using Shared = SpecializedShared<k3xTF32, kRows>;
  using Stage = typename Shared::Stage;
  constexpr int kColumns = Shared::kColumns;
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const BlockGrid<kPeers, 1> cluster;
  const int steps = (job.D + kStep - 1) / kStep, places = job.strips * job.tiles;
  const int warp = warp_of_block();
  if (warp == 1 && elect_one()) {
    if (k3xTF32) {
      for (Barrier& barrier : shared.split_done) barrier_init(&barrier, kSplitting);
    }
    start_next_kernel();                   // one thread of a block is enough
    prepare(shared.pipeline, 2 * kPeers);  // two consumers in each block
  }
  cluster.meet();
  wait_for_previous_kernel();

  // 384 * 168 registers divided anew: 128 * 40 + 256 * 232; with 128 rows 128 * 56 + 256 * 224.
  if (warp < 4) {
    registers_shrink_to<kRows == 256 ? 40 : 56>();
    if (warp == 0) {
      if (!elect_one()) return;
      Writer writer(shared.pipeline);
      for (int i = blockIdx.x; i < places; i += gridDim.x) {
        const int2 at = job.template strip_and_tile<kPeers>(i);  // x: strip, y: tile
        for (int step = 0; step < steps; ++step) {
          writer.put([&](Stage& stage, Barrier* arrived) {
            cluster.load(stage.x[0], &x, at.x * kRows, step * kStep, arrived);  // half, to both
            cluster.load(stage.W, &W, at.y * kColumns, step * kStep, arrived);  // all, for itself
          });
        }
      }
      if constexpr (kPeers > 1) writer.finish();
    } else if constexpr (k3xTF32) {
      // Warps 1 to 3 split a stage's x into two tiles, in whatever order x lies there. done_with()
      // tells the consumers, which wait in wait_for(), and give the stage back.
      Reader reader(shared.pipeline, cluster);
      for (int i = blockIdx.x; i < places; i += gridDim.x) {
        for (int step = 0; step < steps; ++step) {
          Stage& stage = reader.wait();
          split_all(stage.x[0].elements, stage.x[1].elements, kRows * kStep, threadIdx.x - 32,
                    kSplitting);
          shared_fence();
          reader.done_with(shared.split_done);
          reader.next();
        }
      }
    }
  } else {
    registers_grow_to<kRows == 256 ? 232 : 224>();
    const int consumer = threadIdx.x / 128 - 1, thread = threadIdx.x - 128;
    const unsigned turn = kThen == Then::probabilities ? job.turns[blockIdx.x] ^ 1 : 0;
    Reader reader(shared.pipeline, cluster);
    for (int i = blockIdx.x; i < places; i += gridDim.x) {
      Sum<kRows> sum;  // in TF32 the first products take the place of what is in its registers
      if constexpr (k3xTF32) sum = {};
      const auto load = [&](LeftFragments<float>& w, const Stage& stage) {
        w = stage.W.load_fragments(64 * consumer);
      };
      const auto start = [&](const LeftFragments<float>& w, const Stage& stage, bool add) {
        if constexpr (k3xTF32) {
          reader.wait_for(shared.split_done);
          add_3xtf32(sum, w, stage.x[0], stage.x[1]);
        } else {  // the copy engine has rounded both
          sum.start_product(w, stage.x[0].columns(), add);
        }
      };
      reader.template take_ahead<LeftFragments<float>>(steps, load, start);
      reader.finish();

      const int2 at = job.template strip_and_tile<kPeers>(i);
      const int row0 = at.x * kRows, rows = job.B - row0, tile = at.y, tiles = job.tiles;
      const int col = tile * kColumns + 64 * consumer + TransposedLeftTile<kColumns>::row(0);
      const int columns = job.C - col;  // from this on, the thread's first of two
      float* out = job.out + static_cast<size_t>(row0) * job.C + col;
      if constexpr (kThen != Then::probabilities) {
        if (columns > 0) write_sums(sum, out, job.C, rows, [](int) { return float2{1, 1}; });
      }
      if constexpr (kThen != Then::logits) {
        const MaxSum part = tile_exponentials(shared, sum, thread, columns);
        if constexpr (kThen == Then::parts) {
          if (thread < min(kRows, rows)) {
            job.parts[static_cast<int64_t>(row0 + thread) * tiles + tile] = part;
          }
        } else {
          if (thread < kRows) {
            Posted* of_tiles = job.posted + static_cast<size_t>(at.x) * tiles * kRows + thread;
            const MaxSum all = exchange_row<k3xTF32, kRows>(part, of_tiles, tile, tiles, turn);
            shared.rows[thread] = rebase(part.largest, all.largest) / all.sum;
          }
          named_barrier(1, kMultiplying);
          if (columns > 0) {
            write_sums(sum, out, job.C, rows,
                       [&](int r) { return *reinterpret_cast<const float2*>(&shared.rows[r]); });
          }
        }
      }
    }
    if constexpr (kThen == Then::probabilities) {
      named_barrier(1, kMultiplying);  // all have read the turn
      if (thread == 0) job.turns[blockIdx.x] = turn;
    }
  }
#endif
}

// ---- fused split-K ------------------------------------------------------------------------------

// Back to *fused rows*, for at most 16 columns, and with split-K among the threads of a block. In
// *fused rows* 10 columns would occupy 10 of a block's 256 threads, each with a long sum of one
// load after another. Here thread t has column t % 16, and every 16th input from t / 16 on. It
// loads 8 inputs of x, and 8 elements of W, before it uses the first. So the block's loads for 128
// inputs are under way at once, and take one latency together (how long a thread waits for what it
// loads). Lanes with the same column add up their sums by shuffles, and warps do so through shared
// memory. After that the first warp has all of the row's logits, each in two lanes, l and l + 16.
//
// Each block reads all of W, for one row, as in *fused rows*. And yet this is faster than tensor
// cores and clusters where the whole layer takes only a few latencies.
constexpr int kFewColumns = 16;

__global__ void __launch_bounds__(kThreads)
    fused_split_k(const float* x, const float* W, float* probs, int D, int C) {
  start_next_kernel();
  wait_for_previous_kernel();
  constexpr int kSharers = kThreads / kFewColumns, kAtOnce = 8;
  __shared__ float sums[kWarps][kFewColumns];
  const float* x_row = x + static_cast<size_t>(blockIdx.x) * D;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, col = lane % kFewColumns;
  float logit = 0;
  for (int d0 = threadIdx.x / kFewColumns; d0 < D; d0 += kAtOnce * kSharers) {
    // All loads come first. Beyond D or C they load some valid element, which does not count.
    float from_x[kAtOnce], from_W[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int d = min(d0 + i * kSharers, D - 1);
      from_x[i] = x_row[d];
      from_W[i] = W[static_cast<size_t>(d) * C + min(col, C - 1)];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (d0 + i * kSharers < D) logit += from_x[i] * from_W[i];
    }
  }
#pragma unroll
  for (int i = kFewColumns; i < 32; i *= 2) logit += __shfl_xor_sync(kAllLanes, logit, i);
  if (lane < kFewColumns) sums[warp][col] = logit;
  __syncthreads();
  if (warp != 0) return;
  logit = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) logit += sums[i][col];
  if (col >= C) logit = minus_infinity();
  const float largest = lanes_max<kFewColumns>(logit);
  const float exponential = expf(logit - base_of(largest));
  const float sum = lanes_sum<kFewColumns>(exponential);
  if (lane < C) probs[static_cast<size_t>(blockIdx.x) * C + col] = exponential / sum;
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

// A table is one shape in one precision. All tables have *library*. Which other rows there are
// depends on C, on whether rows of x and W are whole vectors, and on the GPU: blocks that wait for
// one another need room. From 1e11 operations on, the table has of the kernels on the CUDA cores
// only *fused split-K*.
//
//     columns      on the CUDA cores               on tensor cores, of whole vectors only
//     up to 128    unfused tiles, fused tiles,     unfused tensor cores, fused tensor cores
//                  fused cluster; up to 16
//                  columns also fused split-K
//     more         unfused tiles, online tiles,    unfused, online and fused specialized
//                  exchange tiles
//     any          fused rows, except in TF32
struct SoftmaxTable : SoftmaxProblem {
  int B = static_cast<int>(shape.rows), D = static_cast<int>(shape.inputs),
      C = static_cast<int>(shape.classes);
  Buffer<float> logits;       // of what is not fused in one launch
  Buffer<MaxSum> long_parts;  // of a softmax of long rows

  SoftmaxTable(Lesson& lesson, About about, const SoftmaxShape& shape)
      : SoftmaxProblem(lesson, about, shape),
        logits(problem.output<float>(shape.rows * shape.classes)),
        long_parts(problem.output<MaxSum>(shape.rows * ceil_div(shape.classes, kLongPart))) {}

  // The softmax of (1) and (2). The parameters of softmax_rows are kGroup, kValues and kWidth.
  void softmax_of_logits() const {
    const auto in_registers = [this](auto* kernel, int rows_of_a_block) {
      launch_early(kernel, blocks_for(B, rows_of_a_block), kThreads, 0, logits, probs, B, C);
    };
    const bool vectors = C % 4 == 0;
    if (C <= 32 && !vectors) {
      in_registers(softmax_rows<32, 1, 1>, kWarps);
    } else if (C <= 128) {
      in_registers(vectors ? softmax_rows<32, 4, 4> : softmax_rows<32, 4, 1>, kWarps);
    } else if (C <= 1024) {
      in_registers(vectors ? softmax_rows<32, 32, 4> : softmax_rows<32, 32, 1>, kWarps);
    } else if (C <= kLongestInRegisters) {
      in_registers(vectors ? softmax_rows<kThreads, 32, 4> : softmax_rows<kThreads, 32, 1>, 1);
    } else {
      const int count = ceil_div(C, kLongPart);
      launch_early(sum_parts, dim3(B, count), kThreads, 0, logits, long_parts, C);
      finish(long_parts, count);
    }
  }
  void finish(const MaxSum* parts, int count) const {
    launch_early(finish_rows, dim3(B, ceil_div(C, kLongPart)), kThreads, 0, logits, probs, parts, C,
                 count);
  }

  // Row (1): the fastest of cuBLAS's own choice and cuBLASLt's candidates, and then our softmax.
  void add_library(cublasHandle_t blas) const {
    const bool tf32 = about == About::tf32;
    const auto compute = tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    std::vector<Way> ways;
    const auto add_product = [&](const std::string& name, const std::function<void()>& product) {
      const auto launch = [product, *this] {
        product();
        softmax_of_logits();
      };
      // An estimate, in microseconds. None is much worse than the first, so up to 24 are tried.
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
    add("library", Role::library, tf32 ? 80 : 0, ways, 24);  // 80: capability 8.0
  }

  // A line after the tables, with the quotient of the two times in the place of %.
  void compare_rows(const std::string& fused, const std::string& unfused) const {
    problem.compare(fused, unfused,
                    name + ", " + fused + " (3) against " + unfused + " (2), % times as fast.");
  }

  void add_on_cuda_cores() const {
    const int strips = ceil_div(B, kRows), tiles = ceil_div(C, kCols);
    // Buffers get memory only in lesson.run(). So SoftmaxInputs and, below, tensor maps are made in
    // the launch.
    const auto in = [=, *this] { return SoftmaxInputs{x, W, B, D, C}; };
    MaxSum* const no_parts = nullptr;

    if (about != About::tf32) {
      add("fused rows", Role::baseline,
          [=, *this] { launch_early(fused_rows, B, kThreads, 0, x, W, probs, D, C); });
    }
    add("unfused tiles", Role::ours, [=, *this] {
      launch_early(logit_tiles, strips * tiles, kThreads, 0, in(), logits, no_parts, tiles);
      softmax_of_logits();
    });
    if (tiles == 1) {
      add("fused tiles", Role::ours,
          [=, *this] { launch_early(fused_tiles, strips, kThreads, 0, in(), probs); });
      if (clusters_that_fit(fused_cluster, kSplits, kThreads, 0) > 0) {
        add("fused cluster", Role::ours, [=, *this] {
          launch_clusters(fused_cluster, kSplits, true, kSplits * strips, kThreads, 0, in(), probs);
        }).needs(90);
      }
      return;
    }
    const auto parts = problem.output<MaxSum>(shape.rows * tiles);
    add("online tiles", Role::ours, [=, *this] {
      launch_early(logit_tiles, strips * tiles, kThreads, 0, in(), logits, parts, tiles);
      finish(parts, tiles);
    });
    const int at_once = resident_blocks(exchange_tiles, kThreads, 0) / tiles;
    if (at_once == 0) return;
    const auto posted = problem.workspace<unsigned>(strips);  // zeros at first; outputs are NaN
    const auto done = problem.workspace<unsigned>(strips);
    add("exchange tiles", Role::ours, [=, *this] {
      launch_early(exchange_tiles, tiles * std::min(strips, at_once), kThreads, 0, in(), probs,
                   parts, posted, done, tiles);
    });
  }

  // Adds the kernels on tensor cores for up to 128 columns. The numbers are the blocks that share
  // D, the rows and columns of a tile, and the inputs of a chunk. In 3xTF32 a thread needs
  // registers for what it splits, and for the sums of a step. So with more than 64 columns a block
  // takes fewer inputs at a time, and more blocks share D. A tile then has twice as many rows: 1024
  // rows are 13 clusters of 8 blocks instead of 26 of 4. Both are 104 blocks, and an H100 has room
  // for all of them at once.
  template <bool k3xTF32>
  void add_tensor_cores(const std::string& suffix) const {
    if (C <= 64) {
      add_tensor_cores_of<k3xTF32, 8, 16, 64, 64>(suffix);
    } else if constexpr (k3xTF32) {
      add_tensor_cores_of<true, 8, 80, 128, 128>(suffix);
    } else {
      add_tensor_cores_of<false, 4, 40, 128, 256>(suffix);
    }
  }
  template <bool k3xTF32, int kSplits, int kRows, int kClasses, int kInputs>
  void add_tensor_cores_of(const std::string& suffix) const {
    constexpr int kBytes = sizeof(ClusterShared<k3xTF32, kSplits, kRows, kClasses, kInputs>);
    const auto kernel = tensor_core_cluster<k3xTF32, kSplits, kRows, kClasses, kInputs>;
    allow_shared_bytes(kernel, kBytes);
    if (clusters_that_fit(kernel, kSplits, 2 * kClasses, kBytes) == 0) return;
    const auto launch = [=, *this](float* out, bool fused) {
      // The rows of a box, whether it is rounded to TF32, the distance of rows, a hint for the L2.
      const CUtensorMap map = tensor_map<float>(x, B, D, kRows, !k3xTF32, D, Reads::often);
      launch_early(kernel, kSplits * ceil_div(B, kRows), 2 * kClasses, kBytes, map, W, out, B, D, C,
                   fused);
    };
    const auto unfused = [=, *this] {
      launch(logits, false);
      softmax_of_logits();
    };
    const std::string names[] = {"unfused tensor cores" + suffix, "fused tensor cores" + suffix};
    add(names[0], Role::ours, unfused).hopper_only().needs_shared(kBytes);
    add(names[1], Role::ours, [=, *this] { launch(probs, true); })
        .hopper_only()
        .needs_shared(kBytes);
    compare_rows(names[1], names[0]);
  }

  // Adds the kernels on tensor cores for more than 128 columns. Up to 128 rows are one strip. In
  // 3xTF32 a thread has the sums of a step, too, so a strip has no more than 128 rows. Returns
  // whether *fused specialized*, which needs all tiles of a strip at a time, is among them.
  template <bool k3xTF32>
  bool add_specialized(const std::string& suffix) const {
    if constexpr (k3xTF32) {
      return add_specialized<true, 128, 1>(suffix);
    } else {
      return B <= 128 ? add_specialized<false, 128, 2>(suffix)
                      : add_specialized<false, 256, 2>(suffix);
    }
  }
  template <bool k3xTF32, int kRows, int kPeers>
  bool add_specialized(const std::string& suffix) const {
    using Shared = SpecializedShared<k3xTF32, kRows>;
    constexpr int kBytes = sizeof(Shared), kColumns = Shared::kColumns, kBlock = 384;
    const auto to_logits = softmax_specialized<k3xTF32, kRows, kPeers, Then::logits>;
    const auto to_parts = softmax_specialized<k3xTF32, kRows, kPeers, Then::parts>;
    const auto to_probs = softmax_specialized<k3xTF32, kRows, kPeers, Then::probabilities>;
    for (auto* kernel : {to_logits, to_parts, to_probs}) allow_shared_bytes(kernel, kBytes);
    const int clusters = clusters_that_fit(to_probs, kPeers, kBlock, kBytes);
    if (clusters == 0) return false;
    const int tiles = kPeers * ceil_div(C, kPeers * kColumns), strips = ceil_div(B, kRows);
    const auto parts = problem.output<MaxSum>(shape.rows * tiles);
    const auto launch = [=, *this](auto* kernel, Specialized job, int grid) {
      const CUtensorMap map_x =  // each block of a cluster fetches such a part of x's tile
          tensor_map<float>(x, B, D, kRows / kPeers, !k3xTF32, D, Reads::often);
      const CUtensorMap map_W = tensor_map<float>(W, D, C, kStep, !k3xTF32, C, Reads::often);
      job.B = B, job.D = D, job.C = C, job.strips = strips, job.tiles = tiles;
      launch_early(kernel, grid, kBlock, kBytes, map_x, map_W, job);
    };
    const auto add_row = [&](const std::string& row, const std::function<void()>& way) {
      add(row + suffix, Role::ours, way).hopper_only().needs_shared(kBytes);
    };
    // An H100's 132 blocks have about a square of 2048 x 2048 logits in tiles of 256 x 128: for a
    // square the fewest rows of x and columns of W are read (lesson 3, tile_of_block).
    const int band = 2048 / kRows;
    // At most so many clusters, evenly over the rounds.
    const int grid = kPeers * persistent(int64_t{strips} * tiles / kPeers, clusters);
    add_row("unfused specialized", [=, *this] {
      launch(to_logits, {.together = band, .out = logits}, grid);
      softmax_of_logits();
    });
    add_row("online specialized", [=, *this] {
      launch(to_parts, {.together = band, .out = logits, .parts = parts}, grid);
      finish(parts, tiles);
    });
    const int at_once = kPeers * clusters / tiles;  // strips of which all tiles run at a time
    if (at_once == 0) {
      compare_rows("online specialized" + suffix, "unfused specialized" + suffix);
      return false;
    }
    const auto posted = problem.workspace<Posted>(int64_t{strips} * tiles * kRows);
    const auto turns = problem.workspace<unsigned>(int64_t{strips} * tiles);
    const int waiting = tiles * persistent(strips, at_once);
    add_row("fused specialized", [=, *this] {
      launch(to_probs, {.together = 1, .out = probs, .posted = posted, .turns = turns}, waiting);
    });
    compare_rows("fused specialized" + suffix, "unfused specialized" + suffix);
    return true;
  }

  void add_split_k() const {
    add("fused split-K", Role::ours,
        [=, *this] { launch_early(fused_split_k, B, kThreads, 0, x, W, probs, D, C); });
  }
};

// The line below the tables: for each shape, how many bytes are saved if logits stay on the chip.
inline void add_bytes_note(Lesson& lesson, const std::vector<SoftmaxShape>& shapes) {
  std::string text;
  for (const SoftmaxShape& shape : shapes) {
    char part[100];
    snprintf(part, sizeof part, "%s 2 x %.3g of %.3g MB at %s", text.empty() ? "" : ",",
             4e-6 * shape.logits(), 1e-6 * (shape.bytes(sizeof(float)) + 8 * shape.logits()),
             text_of(shape).c_str());
    text += part;
  }
  lesson.note("Kept on the chip, logits are neither written nor read:" + text + ".");
}

// Adds a table, and to `left_out` the lines that say which rows its shape cannot have.
void add_table(Lesson& lesson, cublasHandle_t blas, About about, const SoftmaxShape& shape,
               std::set<std::string>& left_out) {
  const SoftmaxTable table(lesson, about, shape);
  table.verify(blas, lesson.flag("--hard-rows"));
  table.add_library(blas);
  // On the CUDA cores 20 calls of the largest shapes take long, and show nothing new.
  if (shape.flops() < 1e11) table.add_on_cuda_cores();
  // Rows of 3xTF32 say so in their names. Those of TF32 do it only in the tables with rows of only
  // -inf, which have both.
  const std::string tf32 = about == About::only_infinite ? ", TF32" : "";
  const bool one_tile = table.C <= kCols;
  if (one_tile && (table.D % 4 != 0 || table.C % 2 != 0)) {
    left_out.insert("Tensor cores: left out where D is no multiple of 4, or C of 2.");
  } else if (one_tile) {
    if (about != About::fp32) table.add_tensor_cores<false>(tf32);
    if (about != About::tf32) table.add_tensor_cores<true>(", 3xTF32");
  } else if (table.D % 4 != 0 || table.C % 4 != 0) {
    left_out.insert("Specialized: left out where D or C is no multiple of 4.");
  } else {
    bool fused = true;
    if (about != About::fp32) fused = table.add_specialized<false>(tf32) && fused;
    if (about != About::tf32) fused = table.add_specialized<true>(", 3xTF32") && fused;
    if (!fused)
      left_out.insert(
          "Specialized: left out where no cluster fits; fused also where a row's tiles do not.");
  }
  if (table.C <= kFewColumns) table.add_split_k();
}

int main(int argc, char** argv) {
  Lesson lesson(
      argc, argv,
      {.name = "9_matmul_softmax",
       .title = "softmax(x W): the library, ours unfused, ours fused",
       .n_meaning = "B, rows of x; without a shape: some of those of --all",
       .n_gpu = 4096,
       .n_cpu = 64,
       .options = {{"--inputs", "D, columns of x", 1024}, {"--classes", "C, columns of W", 1000}},
       .flags = {{"--all", "the fp32 tables, too; without a shape: five shapes (CPU: four)"},
                 {"--hard-rows", "make logits huge, equal and -inf in some rows"}}});
  const bool all = lesson.flag("--all");
  std::vector<SoftmaxShape> shapes = {
      {64, 128, 10}, {256, 512, 50}, {1024, 1024, 100}, {4096, 1024, 1000}, {8192, 4096, 8192}};
  if (lesson.on_cpu()) shapes = {{8, 1100, 10}, {33, 1100, 50}, {17, 129, 261}, {5, 72, 300}};
  if (lesson.given("N") || lesson.given("--inputs") || lesson.given("--classes")) {
    shapes = {{lesson.n(), lesson.option("--inputs"), lesson.option("--classes")}};
  } else if (!all) {  // keeps a small shape, a larger one, and on a GPU one with a long product
    shapes.erase(shapes.begin() + 2), shapes.erase(shapes.begin());
  }
  if (lesson.flag("--hard-rows") && shapes.front().inputs < kSpecialInputs) {
    fail(kBadUsage, "--hard-rows needs at least %d inputs", kSpecialInputs);
  }

  Cublas blas;
  const bool has_tf32 = lesson.device().major >= 8;
  std::set<std::string> left_out;
  for (const SoftmaxShape& shape : shapes) {
    if (all || has_tf32) add_table(lesson, blas, About::tf32, shape, left_out);
    if (all || !has_tf32) add_table(lesson, blas, About::fp32, shape, left_out);
  }
  add_bytes_note(lesson, shapes);
  if (lesson.flag("--hard-rows")) {
    for (const SoftmaxShape& shape : shapes) {
      add_table(lesson, blas, About::only_infinite, shape, left_out);
    }
  }
  for (const std::string& line : left_out) lesson.note(line);
  return lesson.run();
}
