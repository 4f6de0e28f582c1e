// 9. softmax(x W), and how to compare like with like
//
//     probs(b, c) = exp(l(b, c) - m(b)) / sum over j of exp(l(b, j) - m(b))
//     logits l = x W, m(b) = the maximum of row b
//     x (B, D), W (D, C), probs (B, C): fp32, row-major; D inputs, C classes
//
// The last layer of a classifier. What is computed is 2 B D C operations; what has to move is x, W
// and probs, 4 (B D + D C + B C) bytes. In small layers neither operations nor bytes take long:
// launches do, and blocks that wait for one another's data. In large ones with many rows arithmetic
// is the limit. In large ones with few rows it is memory, since W is nearly all that moves.
//
// Unfused, one kernel writes the B C logits and another one reads them. Fused, they never leave the
// chip. But softmax needs whole rows: every probability depends on the maximum and on the sum of
// all of its row. So whoever fuses has to bring a row's logits together, wherever on the GPU they
// were computed. How they do that is what tells the kernels below apart.
//
// "Fused is faster than cuBLAS + softmax" compares two things at once: whose product is better, and
// what fusion saves. So there are three combinations:
//
//     (1) library   cuBLAS's fastest, then the best softmax that we have (operators/softmax)
//     (2) unfused   our product, then the same softmax kernel
//     (3) fused     our product and softmax in one launch; half fused (below): in two
//
// (2) against (3) is fusion, where the product is the same. (1) against (2) compares the library's
// product with ours, and also how the two are launched: ours starts early, the library's does not.
// The tables have (2) and (3) with two products. The rows *unfused*, *fused tiles* and so on have
// the lesson's own, the rows *unfused any shape* and *fused any shape* the operator's.
//
// The kernels. All but *fused rows* and *any shape* multiply by the same code, multiply_tile():
//
//     unfused         tiles of logits, and a softmax that reads them
//     fused rows      a block has a row, and reads all of W: simple, and slow. (This row is in the
//                     fp32 tables alone.)
//     fused tiles     a block has 32 rows with all their columns (at most 128): a row's logits are
//                     in the lanes of one warp
//     fused cluster   (Hopper) the same, and 8 blocks share D: a block's partial sums go straight
//                     into the shared memory of the blocks that finish the rows
//     fused online    a row has more columns than a block: each block writes logits and, of its
//                     part of each row, maximum and sum. A second kernel makes probabilities of
//                     these. So this is half fused
//     fused exchange  the blocks of a row run at the same time, keep their logits in registers, and
//                     tell each other only maximum and sum
//     any shape       no lesson, but the operator that a program would call
//                     (operators/softmax/softmax_product.cuh): unfused, and fused
//
// But for *fused rows*, which has no tiles, the lesson's kernels have one size of tile, 32 x 128.
// They multiply in fp32 on the CUDA cores, as lesson 2 does. That takes the least code, and any GPU
// runs it. The lesson is about how a row comes together, and this does not depend on how the
// product is made. The operator has what is fast: other tiles for other shapes, tensor cores, D cut
// into slices. docs/softmax.md tells which shape takes which kernel, and why.
//
// There are two sets of tables, never mixed: true fp32 accuracy, and TF32, where a product may
// round its operands to 10 bits of mantissa, so that tensor cores can multiply them. The lesson's
// kernels round nothing. All but *fused rows* are in both sets, where a shape is not too large for
// the CUDA cores. In TF32's tables they show how rows are brought together, and how much slower a
// product is that does not use the tensor cores. In the fp32 tables the operator multiplies on the
// CUDA cores and, as "3xTF32", on tensor cores: each operand as the sum of two TF32 numbers, and
// three products instead of one. Its error is held to the bound of fp32.
//
// All kernels of ours, the softmax of (1) and (2) among them, are launched early
// (primitives/early_launch.cuh): here the time between two kernels counts. So each kernel begins
// with two calls. start_next_kernel() lets blocks of the next kernel take the places of those that
// end from now on. wait_for_previous_kernel() waits until the kernel before this one has ended: not
// until then may this one read what that one writes, or write what that one reads. The first call
// can stand before the wait, since the next kernel's blocks have to wait, too, for this kernel.
//
// With infinities: a logit of -inf has the probability 0. A row of only -inf has no maximum to
// subtract, and becomes NaN, in the reference, too.
//
// --all adds the fp32 tables, and more shapes where none is given. (A GPU before compute capability
// 8.0 has no TF32. It always has the fp32 tables, and those of TF32 with --all only, for the rows
// that need no tensor cores.) --kinds shows the operator's kernels one by one. --hard-rows puts
// infinities and huge numbers among the logits, and adds tables in which some rows of logits are
// only -inf. What a reader may try next stands in exercises/9_softmax_training.cu: cross-entropy,
// the backward pass, fp16 inputs.

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "checks/product/library_product.h"
#include "checks/softmax/softmax_problem.h"
#include "checks/workspace.h"
#include "operators/softmax/rows.cuh"
#include "operators/softmax/softmax_product.cuh"
#include "primitives/async_copy.cuh"
#include "primitives/hopper/hopper.cuh"
#include "primitives/spin.cuh"

using namespace checks;
using namespace operators::softmax;

// ---- fused rows ---------------------------------------------------------------------------------

// A block owns a row, and a thread owns the columns threadIdx.x, threadIdx.x + 256 and so on:
// lesson 1's product, coalesced along W. A thread keeps the maximum and the sum of its logits so
// far, by merge() (operators/softmax/rows.cuh), and writes the logits to `probs`. Then the block
// merges what all of its threads have. After that each thread reads its logits again, from the
// caches, and writes probabilities over them. base_of(largest), here and below, is what is
// subtracted from logits: the maximum, or 0 where that is -infinity, for which there would be NaN.
//
// This is fused. But each block reads all of W for its one row: 2 operations for every 4 bytes. At
// best these bytes come from the L1 cache, if another block of the same multiprocessor has read
// them.
constexpr int kWarps = 8, kThreads = 32 * kWarps;

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
  const MaxSum all = block_merge<kWarps>(warp_merge(part));
  for (int col = threadIdx.x; col < C; col += kThreads) {
    row[col] = expf(row[col] - base_of(all.largest)) / all.sum;
  }
}

// ---- The product of all kernels below -----------------------------------------------------------

// Rows share W from here on: a block computes a tile of 32 x 128 logits, as lesson 2's *async*
// does. Steps of 16 inputs come into shared memory, two of them ahead of the one that is
// multiplied. Warp w has the rows 4 w to 4 w + 3 of the tile with all 128 columns, and lane l of it
// the columns l, l + 32, l + 64 and l + 96: 16 sums a thread. So a row of the tile is in the lanes
// of one warp, which is what a softmax wants: its maximum and its sum take a few shuffles.
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

// Returns the maximum of a tile's part of a row, and the sum of its exponentials relative to that.
// A warp has the part's logits in its lanes. The part has `columns` columns, at most 128. The
// logits of those that do not exist become -infinity, so their exponentials are 0.
__device__ MaxSum max_and_sum(float (&logits)[kOwnCols], int columns) {
  const int lane = threadIdx.x % 32;
  float largest = minus_infinity(), sum = 0;
#pragma unroll
  for (int j = 0; j < kOwnCols; ++j) {
    if (lane + 32 * j >= columns) logits[j] = minus_infinity();
    largest = fmaxf(largest, logits[j]);
  }
  largest = lanes_max<32>(largest);
#pragma unroll
  for (int j = 0; j < kOwnCols; ++j) sum += expf(logits[j] - base_of(largest));
  return {largest, lanes_sum<32>(sum)};
}

// Writes the probabilities of a tile's part of a row. `row` has the maximum and sum of all of it.
__device__ void write_probabilities(float* to, const float (&logits)[kOwnCols], MaxSum row,
                                    int columns) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kOwnCols; ++j) {
    if (lane + 32 * j >= columns) continue;
    to[lane + 32 * j] = expf(logits[j] - base_of(row.largest)) / row.sum;
  }
}

// ---- fused tiles --------------------------------------------------------------------------------

// A block has 32 rows with all their columns, at most 128. W is read B / 32 times instead of B, and
// a warp finishes its four rows without asking anybody. But few rows are few blocks: 1024 rows are
// 32 blocks, for a GPU of 132 multiprocessors.
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
    const MaxSum all = max_and_sum(logits[i], in.C);
    if (row >= in.B) return;
    write_probabilities(probs + static_cast<size_t>(row) * in.C, logits[i], all, in.C);
  }
}

// ---- Hopper: fused cluster ----------------------------------------------------------------------

// In *fused tiles* few rows are few blocks. Here eight blocks compute the same tile, and each of
// them adds up an eighth of the D inputs. So each block has a partial sum of every logit, and eight
// partial sums have to be added. The eight blocks are a cluster: they run at the same time, and can
// write into each other's shared memory, so that partial sums need not go through global memory.
//
// In every block warp w has the same four rows of the tile, 4 w to 4 w + 3. Block w of the cluster
// adds up these four rows: warp w of each block pushes its partial sums to block w. Hence there are
// as many blocks in a cluster as warps in a block. Each block has an inbox with a place for each of
// the eight senders, and a barrier that counts the bytes that have come. Then four warps of the
// block take a row each: they add what the eight have sent, and finish the row.
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
  // Thread 0 of each block does so after it has initialized its block's barrier. So who has passed
  // cluster_wait() may push into all eight inboxes. (All threads of a warp have to execute
  // cluster_arrive() as one instruction. So __syncwarp() lets the others of its warp wait for
  // thread 0.)
  __syncwarp();
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
  barrier_wait(&come, 0);  // what all eight have pushed is here

  const int row = row0 + kOwnRows * rank + warp;
  if (warp >= kOwnRows || row >= in.B) return;
  float logits[kOwnCols] = {};
#pragma unroll
  for (const auto& from : inbox) {
#pragma unroll
    for (int j = 0; j < kOwnCols; ++j) logits[j] += from[warp][lane + 32 * j];
  }
  const MaxSum all = max_and_sum(logits, in.C);
  write_probabilities(probs + static_cast<size_t>(row) * in.C, logits, all, in.C);
#endif
}

// ---- unfused, and fused online ------------------------------------------------------------------

// With more than 128 columns a row is spread over the tiles of several blocks, which know nothing
// of each other. They write logits. Unfused, that is all, and a softmax comes after it.
//
// But a block can find the maximum and the sum of its part of a row while it has the logits in its
// registers. It leaves these two numbers in `parts` (B, tiles of C). The sum is relative to the
// part's own maximum, so no part has to know another one's. For example, the logits 3 and 1 leave 3
// and 1.135, and 5 and 4 leave 5 and 1.368. A second kernel merges a row's parts, here to 5 and
// 1.522, and makes probabilities of its logits. (merge() multiplies the sum of the part with the
// smaller maximum by e^(3 - 5), so that both are relative to 5. Attention does the same to what it
// has when a larger logit comes. That is the method of the *online softmax*.) The second kernel
// reads each logit once; a softmax of a row that is too long for registers reads it twice.
__global__ void __launch_bounds__(kThreads)
    logit_tiles(SoftmaxInputs in, float* logits, MaxSum* parts, int tiles) {
  start_next_kernel();
  wait_for_previous_kernel();
  __shared__ TileStage stages[kStages];
  const int tile = blockIdx.x % tiles, row0 = blockIdx.x / tiles * kRows, col0 = tile * kCols;
  const int lane = threadIdx.x % 32;
  float sum[kOwnRows][kOwnCols] = {};
  multiply_tile(sum, stages, in, row0, col0, 0, in.D);
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i) {
    const int row = row0 + kOwnRows * (threadIdx.x / 32) + i;
    if (row >= in.B) return;
    float* to = logits + static_cast<size_t>(row) * in.C + col0;
#pragma unroll
    for (int j = 0; j < kOwnCols; ++j) {
      if (col0 + lane + 32 * j < in.C) to[lane + 32 * j] = sum[i][j];
    }
    if (!parts) continue;
    const MaxSum part = max_and_sum(sum[i], in.C - col0);
    if (lane == 0) parts[static_cast<size_t>(row) * tiles + tile] = part;
  }
}

// The second kernel: a block a row.
__global__ void __launch_bounds__(kThreads)
    finish_rows(const float* logits, const MaxSum* parts, float* probs, int C, int tiles) {
  start_next_kernel();
  wait_for_previous_kernel();
  const MaxSum* of_row = parts + static_cast<size_t>(blockIdx.x) * tiles;
  MaxSum part = {minus_infinity(), 0};
  for (int tile = threadIdx.x; tile < tiles; tile += kThreads) part = merge(part, of_row[tile]);
  const MaxSum all = block_merge<kWarps>(warp_merge(part));
  const size_t start = static_cast<size_t>(blockIdx.x) * C;
  for (int col = threadIdx.x; col < C; col += kThreads) {
    probs[start + col] = expf(logits[start + col] - base_of(all.largest)) / all.sum;
  }
}

// ---- fused exchange -----------------------------------------------------------------------------

// Here a row's blocks wait for each other, so that no logit leaves the registers. Each block posts
// the maximum and the sum of its part, waits until all blocks of these rows have, and writes
// probabilities, once. What blocks tell each other is 8 bytes for each row and tile.
//
// Who waits for a block that never starts waits for ever. So there are only as many blocks as run
// at the same time. Together they compute some strips of 32 rows, with all of their tiles, and then
// the next strips. For each strip there are two counters: `arrived` counts the blocks that have
// posted, and `left` those that have read. Both are zero before a launch, and again after it.
// (is_last_block in primitives/row_parts.cuh clears `left`.)
__global__ void __launch_bounds__(kThreads)
    fused_exchange(SoftmaxInputs in, float* probs, MaxSum* parts, unsigned* arrived, unsigned* left,
                   int tiles) {
  start_next_kernel();
  wait_for_previous_kernel();
  __shared__ TileStage stages[kStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tile = blockIdx.x % tiles, col0 = tile * kCols, columns = in.C - col0;
  const int strips = (in.B + kRows - 1) / kRows;
  for (int strip = blockIdx.x / tiles; strip < strips; strip += gridDim.x / tiles) {
    const int row0 = strip * kRows + kOwnRows * warp;  // the warp's
    float logits[kOwnRows][kOwnCols] = {};
    multiply_tile(logits, stages, in, strip * kRows, col0, 0, in.D);
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      const MaxSum part = max_and_sum(logits[i], columns);
      if (lane == 0 && row0 + i < in.B) parts[static_cast<size_t>(row0 + i) * tiles + tile] = part;
    }
    __syncthreads();  // the block's parts are written
    if (threadIdx.x == 0) {
      // The count is raised by a release: whoever has waited for it also sees the block's parts.
      const GridCount count(arrived[strip]);
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
      write_probabilities(probs + row * in.C + col0, logits[i], warp_merge(all), columns);
    }
    // All threads have to call is_last_block, which has barriers: so it stands first in the `&&`.
    if (is_last_block(left + strip, tiles) && threadIdx.x == 0) arrived[strip] = 0;
  }
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

// A row of the table may have several ways to compute it. At most kMostWays of them, those with the
// lowest estimates, are tried, and the row is timed with the fastest.
constexpr Tries kTries = {.most = kMostWays, .hopeless = kHopeless};

// A table is one shape in one precision. Each add_...() adds rows to it.
struct SoftmaxTable : SoftmaxProblem {
  Buffer<float> logits;   // of the kernels that are not fused
  Buffer<float2> halves;  // of a softmax of long rows: maximum and sum of parts of a row

  SoftmaxTable(Lesson& lesson, About about, const SoftmaxShape& shape)
      : SoftmaxProblem(lesson, about, shape),
        logits(problem.output<float>(shape.rows * shape.classes)),
        halves(problem.output<float2>(shape.rows * blocks_for(shape.classes, kPartColumns))) {}

  void softmax_of_logits() const { softmax(logits, probs, shape, halves); }

  // Row (1), library: a product by cuBLAS's own choice or by one of cuBLASLt's candidates,
  // whichever is the fastest, and then our softmax.
  void add_library(cublasHandle_t blas) const {
    const bool tf32 = about == About::tf32;
    const auto compute = tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    std::vector<Way> ways;
    const auto add_product = [&](const std::string& name, const std::function<void()>& product) {
      const auto launch = [product, *this] {
        product();
        softmax_of_logits();
      };
      // A way has an estimate of its microseconds. Here it is the same for all, so none is left out
      // as hopeless.
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
    add("library", Role::library, tf32 ? 80 : 0, ways, kTries);
  }

  // The kernels of this lesson. Up to 128 columns are one tile: *fused tiles* and *fused cluster*.
  // More columns are several: *fused online* and *fused exchange*.
  void add_kernels() const {
    const int B = static_cast<int>(shape.rows), D = static_cast<int>(shape.inputs),
              C = static_cast<int>(shape.classes);
    const int strips = ceil_div(B, kRows), tiles = ceil_div(C, kCols);
    const auto in = [=, *this] { return SoftmaxInputs{x, W, B, D, C}; };
    MaxSum* const no_parts = nullptr;

    add("unfused", Role::ours, [=, *this] {
      launch_early(logit_tiles, strips * tiles, kThreads, 0, in(), logits, no_parts, tiles);
      softmax_of_logits();
    });
    if (about != About::tf32) {
      add("fused rows", Role::baseline,
          [=, *this] { launch_early(fused_rows, B, kThreads, 0, x, W, probs, D, C); });
    }
    if (tiles == 1) {
      add("fused tiles", Role::ours,
          [=, *this] { launch_early(fused_tiles, strips, kThreads, 0, in(), probs); });
      if (clusters_that_fit(fused_cluster, kSplits, kThreads, 0) > 0) {
        add("fused cluster", Role::ours, [=, *this] {
          launch_clusters(fused_cluster, kSplits, true, kSplits * strips, kThreads, 0, in(), probs);
        }).needs(90);
      }
      problem.compare("fused tiles", "unfused",
                      name + ", tiles: fused (3) against unfused (2), % times as fast.");
      return;
    }
    const auto parts = problem.output<MaxSum>(shape.rows * tiles);
    add("fused online", Role::ours, [=, *this] {
      launch_early(logit_tiles, strips * tiles, kThreads, 0, in(), logits, parts, tiles);
      launch_early(finish_rows, B, kThreads, 0, logits, parts, probs, C, tiles);
    });
    // All tiles of a strip wait for each other, so there must be room for them.
    const int at_once = resident_blocks(fused_exchange, kThreads, 0) / tiles;
    if (at_once == 0) return;
    const auto arrived = problem.workspace<unsigned>(strips);
    const auto left = problem.workspace<unsigned>(strips);
    add("fused exchange", Role::ours, [=, *this] {
      launch_early(fused_exchange, tiles * std::min(strips, at_once), kThreads, 0, in(), probs,
                   parts, arrived, left, tiles);
    });
  }

  // The operator, for any shape: a row for its unfused ways and one for its fused ways. With
  // --kinds each kind of its kernels has two rows of its own.
  void add_operator(const SoftmaxProduct& product, Math math, bool each_kind) const {
    // Rows of 3xTF32 always say so in their names: their tables have rows of fp32, too. Rows of
    // TF32 say so only in the tables with rows of only -inf, which have all three arithmetics. Rows
    // of fp32 have no suffix.
    const std::string suffix = math == Math::split             ? ", 3xTF32"
                               : about == About::only_infinite ? math == Math::tf32 ? ", TF32" : ""
                                                               : "";
    const auto add_both = [&](const std::string& row, int needs, const auto& ways) {
      if (!ways.unfused.empty()) {
        add("unfused " + row, Role::ours, needs, ways_of_row(ways.unfused), kTries);
        problem.compare("unfused " + row, "library",
                        name + ", " + row + ": unfused (2) against library (1), % times as fast.");
      }
      if (ways.fused.empty()) return;
      add("fused " + row, Role::ours, needs, ways_of_row(ways.fused), kTries);
      problem.compare("fused " + row, "unfused " + row,
                      name + ", " + row + ": fused (3) against unfused (2), % times as fast.");
    };
    const std::vector<Kind> kinds = product.kinds(math);
    if (!each_kind) add_both("any shape" + suffix, 0, product.together(kinds));
    for (const Kind& kind : kinds) {
      if (each_kind) add_both("any shape: " + kind.name + suffix, kind.capability, kind);
    }
  }
};

// The line below the tables: how many bytes of logits one launch saves, for each shape.
inline void add_bytes_note(Lesson& lesson, const std::vector<SoftmaxShape>& shapes) {
  std::string text;
  for (const SoftmaxShape& shape : shapes) {
    char part[100];
    snprintf(part, sizeof part, "%s 2 x %.3g of %.3g MB at %s", text.empty() ? "" : ",",
             4e-6 * shape.logits(), 1e-6 * (shape.bytes(sizeof(float)) + 8 * shape.logits()),
             text_of(shape).c_str());
    text += part;
  }
  lesson.note("Fused in one launch, logits are neither written nor read:" + text + ".");
}

void add_table(Lesson& lesson, cublasHandle_t blas, About about, const SoftmaxShape& shape) {
  const SoftmaxTable table(lesson, about, shape);
  table.verify(blas, lesson.flag("--hard-rows"));
  table.add_library(blas);
  // On the CUDA cores 20 calls of the largest shapes take long, and show nothing new.
  if (shape.flops() < 1e11) table.add_kernels();
  const SoftmaxProduct product(workspace_of(table.problem), table.x, table.W, table.probs, shape);
  const bool each_kind = lesson.flag("--kinds");
  if (about != About::fp32) table.add_operator(product, Math::tf32, each_kind);
  if (about == About::tf32) return;
  table.add_operator(product, Math::fp32, each_kind);
  table.add_operator(product, Math::split, each_kind);
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
                 {"--kinds", "rows for each kind of kernel that any shape chooses from"},
                 {"--hard-rows", "make logits huge, equal and -inf in some rows"}}});
  const bool all = lesson.flag("--all");
  std::vector<SoftmaxShape> shapes = {
      {64, 128, 10}, {256, 512, 50}, {1024, 1024, 100}, {4096, 1024, 1000}, {8192, 4096, 8192}};
  if (lesson.on_cpu()) shapes = {{8, 16, 10}, {33, 65, 50}, {17, 129, 130}, {5, 40, 300}};
  if (lesson.given("N") || lesson.given("--inputs") || lesson.given("--classes")) {
    shapes = {{lesson.n(), lesson.option("--inputs"), lesson.option("--classes")}};
  } else if (!all) {  // where launches count, a larger one, and on a GPU one with a long product
    shapes.erase(shapes.begin() + 2), shapes.erase(shapes.begin());
  }
  if (lesson.flag("--hard-rows") && shapes.front().inputs < kSpecialInputs) {
    fail(kBadUsage, "--hard-rows needs at least %d inputs", kSpecialInputs);
  }

  Cublas blas;
  const bool has_tf32 = lesson.device().major >= 8;
  for (const SoftmaxShape& shape : shapes) {
    if (all || has_tf32) add_table(lesson, blas, About::tf32, shape);
    if (all || !has_tf32) add_table(lesson, blas, About::fp32, shape);
  }
  add_bytes_note(lesson, shapes);
  if (lesson.flag("--hard-rows")) {
    for (const SoftmaxShape& shape : shapes) add_table(lesson, blas, About::only_infinite, shape);
  }
  return lesson.run();
}
