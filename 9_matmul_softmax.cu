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
//     (1) library   cuBLAS, then the best softmax kernel that we have (common/softmax_rows.cuh)
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
//     fused narrow    few columns and many rows: x goes from memory straight to registers, W stays
//                     in shared memory (narrow_columns(); TF32)
//     fused online    C of thousands: a row is spread over several blocks (column_tiles()). Only
//                     half fused: they leave logits and, of each part of a row, maximum and sum;
//                     a second kernel goes on from there
//     fused few rows  half fused, one row, or up to 16 short ones: W is all there is to read
//                     (few_rows())
//
// and on Hopper, with its copy engine and wgmma:
//
//     fused cluster   the blocks that share D are a cluster (cluster_columns()): their parts of the
//                     sums go straight into each other's shared memory
//     fused exchange  the blocks that share a row run at the same time (exchange_columns()), keep
//                     their logits in registers, and tell each other only maximum and sum. Where a
//                     row has more blocks than there is room for, half fused
//     fused streamed  half fused, where rows of W are not aligned to 16 bytes: it goes from memory
//                     straight to registers (streamed_columns())
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

#include "common/fp32_product.cuh"
#include "common/softmax_rows.cuh"
#include "common/turned_product.cuh"

// ---- fused rows ---------------------------------------------------------------------------------

// A block owns a row, a thread the columns threadIdx.x, threadIdx.x + 256, ...: lesson 1's product,
// coalesced along W. Maximum and sum grow with each logit (merge() in common/softmax_rows.cuh);
// when the block has merged all threads' the thread goes through its own logits again, in the
// caches. Fused it is, and for one row there is no better way. But W is read once per row: 2
// floating-point operations for every 4 bytes that come from the L2 cache.
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

// ---- fused tiles --------------------------------------------------------------------------------

// Rows share W from here on: a block computes a tile of logits, as in lessons 2 and 3
// (common/fp32_product.cuh). What becomes of them:
enum class Epilogue {
  logits,   // out = logits: the product of the unfused way
  parts,    // the same, and of each tile's part of a row its maximum and its sum: half fused
  softmax,  // out = probs
};

struct Results {
  Epilogue epilogue;
  float* out;               // (B, C)
  float2* parts = nullptr;  // (B, tiles of C): a tile's maximum, and sum relative to it
  // What blocks of fused tiles leave to the last one of those that share a row.
  float* partial = nullptr;     // (splits of D, B, C): logits of a part of D
  unsigned* arrived = nullptr;  // blocks of these rows that have ended; zero between launches
};

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

// ---- fused narrow -------------------------------------------------------------------------------

// Many rows and few columns: then x is nearly all there is to read, each element once. It goes from
// memory straight into the fragments that a warp multiplies, wherever rows start; many loads are
// under way at a time, and none waits for a barrier. What all rows share, W, stays in shared
// memory: `depth` rows of it at a time, and if that is all of D for as long as the block lives,
// which takes one tile of 32 rows after another. Two warps have 16 rows each, with all columns, and
// eight of each share D: warp w has steps w / 2, w / 2 + 8, ... of 8 inputs. Their sums meet in
// shared memory, half of them first, and a warp finishes a row, as in fused tiles; meanwhile the
// next tile's x is coming.
template <int kCols>
struct Narrow {
  static constexpr int kRows = 32, kParts = 8, kThreads = 64 * kParts, kAtOnce = 8;
  static constexpr int kStride = kCols + 8, kTiles = kCols / 8;
  static constexpr int kStep = 8 * kParts * kAtOnce;  // inputs that the block takes at a time
  static constexpr int kLogits = kParts / 2 * kRows * kStride;
};

// All of the block's threads copy `rows` rows of W to shared memory, wherever they start, and zeros
// for the rest of the last 8: there x is 0, too.
template <int kCols>
__device__ void bring_rows(float* to, const float* W, int rows, int C) {
  constexpr int kThreads = Narrow<kCols>::kThreads, kStride = Narrow<kCols>::kStride;
  __syncthreads();  // nobody needs what is there
  int d = threadIdx.x / C, c = threadIdx.x % C;
  while (d < rows) {
    copy_async<4>(to + d * kStride + c, W + static_cast<size_t>(d) * C + c, true);
    d += kThreads / C, c += kThreads % C;
    if (c >= C) c -= C, ++d;
  }
  for (int i = threadIdx.x; i < (rows + 7) / 8 * 8 * kStride - rows * kStride; i += kThreads) {
    to[rows * kStride + i] = 0;
  }
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
}

template <int kCols>
__global__ void __launch_bounds__(Narrow<kCols>::kThreads)
    narrow_columns(const float* x, const float* W, int B, int D, int C, int depth,
                   Results results) {
  using N = Narrow<kCols>;
  constexpr int kRows = N::kRows, kParts = N::kParts, kAtOnce = N::kAtOnce, kStride = N::kStride;
  start_next_kernel();
  wait_for_previous_kernel();
  extern __shared__ __align__(128) float W_part[];  // [depth][kStride], and behind it the logits
  float* logits = W_part + depth * kStride;         // [kParts / 2][kRows][kStride]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int part = warp / 2, own_row = warp % 2 * 16 + g;
  float a[kAtOnce][4];
  const auto load = [&](int row0, int d0) {
    if (row0 >= B) return;
    const float* near = x + static_cast<size_t>(min(row0 + own_row, B - 1)) * D + t;
    const float* far = x + static_cast<size_t>(min(row0 + own_row + 8, B - 1)) * D + t;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int d = d0 + 8 * kParts * i;
      a[i][0] = d + t < D ? near[d] : 0, a[i][1] = d + t < D ? far[d] : 0;
      a[i][2] = d + t + 4 < D ? near[d + 4] : 0, a[i][3] = d + t + 4 < D ? far[d + 4] : 0;
    }
  };
  load(blockIdx.x * kRows, 8 * part);
  for (int row0 = blockIdx.x * kRows; row0 < B; row0 += gridDim.x * kRows) {
    float sums[N::kTiles][4] = {};
    for (int first = 0; first < D; first += depth) {
      const int last = min(D, first + depth);
      if (depth < D || row0 == static_cast<int>(blockIdx.x) * kRows) {
        bring_rows<kCols>(W_part, W + static_cast<size_t>(first) * C, last - first, C);
      }
      int d0 = first + 8 * part;
      do {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int d = d0 + 8 * kParts * i;
          if (d >= last) break;
          const unsigned rounded[4] = {to_tf32(a[i][0]), to_tf32(a[i][1]), to_tf32(a[i][2]),
                                       to_tf32(a[i][3])};
          const float* W_at = W_part + (d - first + t) * kStride + g;
#pragma unroll
          for (int j = 0; j < N::kTiles; ++j) {
            mma_m16n8k8_tf32(sums[j], rounded, to_tf32(W_at[8 * j]),
                             to_tf32(W_at[4 * kStride + 8 * j]));
          }
        }
        d0 += N::kStep;
        if (d0 < last) {
          load(row0, d0);
        } else if (last < D) {
          load(row0, last + 8 * part);
        } else {
          load(row0 + gridDim.x * kRows, 8 * part);
        }
      } while (d0 < last);
    }
    float* to = logits + (part % (kParts / 2) * kRows + own_row) * kStride + 2 * t;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (part / (kParts / 2) == half) {
#pragma unroll
        for (int j = 0; j < N::kTiles; ++j) {
          auto& near = *reinterpret_cast<float2*>(to + 8 * j);
          auto& far = *reinterpret_cast<float2*>(to + 8 * kStride + 8 * j);
          if (half == 0) near = {sums[j][0], sums[j][1]}, far = {sums[j][2], sums[j][3]};
          if (half == 1) near = {near.x + sums[j][0], near.y + sums[j][1]};
          if (half == 1) far = {far.x + sums[j][2], far.y + sums[j][3]};
        }
      }
      __syncthreads();
    }
    for (int row = warp; row < min(kRows, B - row0); row += N::kThreads / 32) {
      float v[(kCols + 31) / 32] = {};
#pragma unroll
      for (int k = 0; k < kParts / 2; ++k) {
#pragma unroll
        for (int i = 0; i < (kCols + 31) / 32; ++i) {
          if (lane + 32 * i < C) v[i] += logits[(k * kRows + row) * kStride + lane + 32 * i];
        }
      }
      finish_row(v, row0 + row, C, results);
    }
    __syncthreads();  // the logits have been read
  }
}

// ---- fused online -------------------------------------------------------------------------------

// Here a row does not fit into a block: 1000 columns of 64 rows are as many sums as a
// multiprocessor has registers, and blocks of fewer rows would read W too often. So blocks have
// tiles of BM x BN, as for any product, and of each row a warp has kCols columns. It writes their
// logits and leaves their maximum and their sum relative to it, which the lanes that share a row
// find with a few shuffles: this is "online softmax", no part has to know another one's maximum.
// finish_columns() merges a row's parts and makes probabilities of the logits: they are read once
// more, but not twice. (That a row's last block does so, in the same launch, loses: it has all of
// the rows' logits to go through when the others are done. 128 rows of 50257 took 8 ms that way.)
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads) column_tiles(Factors factors, Results results) {
  start_next_kernel();
  wait_for_previous_kernel();
  static_assert(Tile::kWarpsK == 1 && Tile::kCols % 4 == 0);
  extern __shared__ __align__(128) char shared[];
  const int B = factors.B, C = factors.C, block_columns = (C + Tile::BN - 1) / Tile::BN;
  const int row0 = blockIdx.x / block_columns * Tile::BM;
  const int col0 = blockIdx.x % block_columns * Tile::BN;
  Sums<Tile> sums;
  multiply_tiles<Tile>(sums, reinterpret_cast<float*>(shared), factors, row0, col0, 0, factors.D);

  const int warp = threadIdx.x / 32, tiles = (C + Tile::kCols - 1) / Tile::kCols;
  const int warp_row = row0 + warp / Tile::kWarpsN * Tile::kRows;
  const int warp_col = col0 + warp % Tile::kWarpsN * Tile::kCols;
  constexpr int kRun = Sums<Tile>::kRun, kOwnCols = Sums<Tile>::kOwnCols;
  constexpr int kLanes = Sums<Tile>::kLanesPerRow;
#pragma unroll
  for (int i = 0; i < Sums<Tile>::kOwnRows; ++i) {
    const int row = warp_row + Sums<Tile>::row(i);
    if (row < B) {
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
    if (results.epilogue == Epilogue::logits) continue;
    float largest = minus_infinity(), sum = 0;
#pragma unroll
    for (int j = 0; j < kOwnCols; ++j) {
      if (warp_col + Sums<Tile>::col(j) >= C) sums.at(i, j) = minus_infinity();
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

// ---- fused few rows -----------------------------------------------------------------------------

// Of up to kRows rows all there is to read is W, and all that counts is how many of its bytes are
// on their way. So no tiles: a thread has a column, and loads 16 of its elements before it needs
// the first one; a warp's are neighbours in memory, wherever a row starts. x comes from shared
// memory, the same element for all threads. kParts threads share a column, for there are few
// columns, too: each has every kParts-th group of 16 inputs. A block has one of gridDim.y slices of
// D, of which `out` (slices, B, C) gets the logits: what adds them up is the softmax.
template <int kRows, int kParts>
__global__ void __launch_bounds__(256)
    few_rows(const float* x, const float* W, float* out, int B, int D, int C) {
  start_next_kernel();
  wait_for_previous_kernel();
  constexpr int kDepth = 256, kAtOnce = 16, kCols = 256 / kParts;
  __shared__ alignas(16) float x_part[kDepth][kRows];
  __shared__ float sums[kParts][kRows][kCols];
  const int part = threadIdx.x / kCols, col = blockIdx.x * kCols + threadIdx.x % kCols;
  const int chunks = (D + kAtOnce - 1) / kAtOnce, slices = gridDim.y, slice = blockIdx.y;
  const int first = chunks * slice / slices * kAtOnce;
  const int last = min(D, chunks * (slice + 1) / slices * kAtOnce);
  const float* column = W + min(col, C - 1);
  float sum[kRows] = {};
  for (int d0 = first; d0 < last; d0 += kDepth) {
    __syncthreads();
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const int d = d0 + threadIdx.x;
      x_part[threadIdx.x][row] = row < B && d < last ? x[static_cast<size_t>(row) * D + d] : 0;
    }
    __syncthreads();
    for (int k0 = part * kAtOnce; k0 < min(kDepth, last - d0); k0 += kParts * kAtOnce) {
      float w[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int d = d0 + k0 + k;
        w[k] = d < last ? column[static_cast<size_t>(d) * C] : 0;
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
        for (int row = 0; row < kRows; ++row) sum[row] += x_part[k0 + k][row] * w[k];
      }
    }
  }
  if constexpr (kParts > 1) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) sums[part][row][threadIdx.x % kCols] = sum[row];
    __syncthreads();
  }
  if (part > 0 || col >= C) return;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int i = 1; i < kParts; ++i) sum[row] += sums[i][row][threadIdx.x];
    if (row < B) out[(static_cast<size_t>(slice) * B + row) * C + col] = sum[row];
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

// x for the copy engine or, if its rows start anywhere, for the block's threads.
struct ClusterInput {
  CUtensorMap map;
  const float* x;
};

#if HOPPER_CODE
// Where x starts anywhere the copy engine does not find it, and to copy it into aligned rows takes
// as long as all the rest. So the block's kThreads threads bring kRows x kDepth of it element by
// element, to where the copy engine would have put them.
template <int kRows, int kDepth, int kThreads>
__device__ void copy_elements(float (*boxes)[kRows * 32], const float* x, int row0, int d0, int B,
                              int D) {
#pragma unroll 8
  for (int i = threadIdx.x; i < kRows * kDepth; i += kThreads) {
    const int row = i / kDepth, d = i % kDepth;
    float* to = boxes[d / 32] + row * 32 + (d / 4 % 8 ^ row % 8) * 4 + d % 4;
    copy_async<4>(to, x + static_cast<size_t>(row0 + row) * D + d0 + d,
                  row0 + row < B && d0 + d < D);
  }
  copy_async_commit();
}

// A block's part of the sums goes to its outbox, one part for each block of the cluster.
template <class Shared, int kSums>
__device__ void put_in_outbox(Shared& shared, const float (&sum)[kSums], int col, int stride) {
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = 8 * j + 2 * (threadIdx.x % 4) + e;
      float* to = shared.outbox[row / Shared::kOwnRows] + row % Shared::kOwnRows * stride + col;
      if (col < stride) *reinterpret_cast<float2*>(to) = {sum[4 * j + e], sum[4 * j + 2 + e]};
    }
  }
}

// A warp takes a row at a time: adds up what has come from the blocks of the cluster.
template <int kSplits, int kClasses, class Shared>
__device__ void finish_cluster_rows(const Shared& shared, int row0, int rank, int stride, int B,
                                    int C, const Results& results) {
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < Shared::kOwnRows; i += kClasses / 16) {
    if (row0 + i >= B) break;
    float v[kClasses / 32] = {};
#pragma unroll
    for (int part = 0; part < kSplits; ++part) {
      const float* from = (part == rank ? shared.outbox : shared.inbox)[part] + i * stride;
#pragma unroll
      for (int j = 0; j < kClasses / 32; ++j) {
        if (lane + 32 * j < C) v[j] += from[lane + 32 * j];
      }
    }
    finish_row(v, row0 + i, C, results);
  }
}
#endif

// As in fused tiles, D is split over blocks that share kRows rows. But here these are a cluster,
// and can write to each other's shared memory: the parts of the sums need not go through the L2
// cache to whoever comes last. Each of the kSplits blocks finishes its share of the rows, and the
// others push their parts of that share into its inbox.
//
// The product is turned round (common/turned_product.cuh): x^T comes from shared memory, W^T from
// registers. No other thread of the block needs the same elements of W: they go from memory
// straight to the registers, all of a chunk of kDepth inputs at once. (Of what it finds in shared
// memory wgmma ignores the bits that TF32 does not have, which would truncate x. So the copy engine
// rounds it on the way, and where it does not bring x, the threads do.)
template <Math kMath, int kSplits, int kRows, int kClasses, int kDepth, bool kAligned>
__global__ void HOPPER_CLUSTER(kSplits) __launch_bounds__(2 * kClasses, 1)
    cluster_columns(const __grid_constant__ ClusterInput x, const float* W, int B, int D, int C,
                    Results results) {
#if HOPPER_CODE
  using Shared = ClusterShared<kMath, kSplits, kRows, kClasses, kDepth>;
  constexpr int kOwnRows = Shared::kOwnRows, kBoxes = kDepth / 32;
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const int rank = cluster_rank(), row0 = blockIdx.x / kSplits * kRows;
  const int chunks = (D + kDepth - 1) / kDepth;
  const int first = chunks * rank / kSplits, last = chunks * (rank + 1) / kSplits;
  const int stride = cluster_stride(C), part_bytes = kOwnRows * stride * 4;
  const int warp = warp_of_block(), lane = threadIdx.x % 32;
  const auto fetch = [&](int chunk) {
    if constexpr (!kAligned) {
      copy_elements<kRows, kDepth, 2 * kClasses>(shared.x, x.x, row0, chunk * kDepth, B, D);
    } else if (warp == 0 && elect_one()) {
      barrier_arrive_expect(&shared.full, sizeof shared.x);
      for (int box = 0; box < kBoxes; ++box) {
        tensor_load(shared.x[box], &x.map, row0, chunk * kDepth + 32 * box, &shared.full);
      }
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
  if (first < last) fetch(first);

  const int col = 16 * warp + lane / 4 * 2;
  float sum[kRows / 2] = {};
  const auto add_chunk = [&](int chunk, auto known) {
    float w[kDepth / 8][4];
    load_fragments<known>(w, W, chunk * kDepth, col, D, C);
    if constexpr (kAligned) {
      barrier_wait(&shared.full, (chunk - first) % 2);
    } else {
      copy_async_wait<0>();
      __syncthreads();
    }
    if constexpr (kMath == Math::split) {
      split_all(shared.x[0], shared.x_low[0], kRows * kDepth, threadIdx.x, 2 * kClasses);
    } else if constexpr (!kAligned) {
      round_all(shared.x[0], kRows * kDepth, threadIdx.x, 2 * kClasses);
    }
    if constexpr (kMath == Math::split || !kAligned) {
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
    if (chunk + 1 < last) fetch(chunk + 1);
  }

  put_in_outbox(shared, sum, col, stride);
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
  finish_cluster_rows<kSplits, kClasses>(shared, row0 + rank * kOwnRows, rank, stride, B, C,
                                         results);
  cluster_wait();  // nobody's outbox is needed any more
#endif
}

// ---- Hopper: fused streamed ---------------------------------------------------------------------

// Where C is not a multiple of 4, rows of W start anywhere, and no copy of 16 bytes finds them;
// where few rows share W, to copy it into aligned rows first would take longer than the rest. But
// fused cluster's fragments of W come from memory as single floats, or pairs of them where C is
// even. So its product is turned round here, too, for tiles of kRows rows and 64 classes for each
// of kGroups warpgroups. W is read once (the blocks that share it run at about the same time),
// kAhead chunks before it is needed, and x comes through a ring of stages. There is no producer:
// thread 0 also orders the next x, when all warpgroups have given its stage back.
//
// The logits of a tile go to `out`, and its maximum and sum for each row to `parts`, as in fused
// online. Where there are few tiles, D is cut into gridDim.y slices: `out` is then (slices, B, C),
// and what adds the slices up is the softmax.
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

#if HOPPER_CODE
// A thread's logits, of the columns col and col + 1, and its warp's parts of the rows.
template <int kRows, int kGroups>
__device__ void leave_tile(StreamShared<kRows, kGroups>& shared, const float (&sum)[kRows / 2],
                           int row0, int col, int B, int C, const Results& results) {
  const int warp = warp_of_block(), lane = threadIdx.x % 32, t = lane % 4;
  const bool parts = results.epilogue == Epilogue::parts;
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = 8 * j + 2 * t + e;
      const float a = col < C ? sum[4 * j + e] : minus_infinity();
      const float b = col + 1 < C ? sum[4 * j + 2 + e] : minus_infinity();
      if (row0 + row < B) {
        float* to = results.out + (static_cast<size_t>(blockIdx.y) * B + row0 + row) * C + col;
        if (col < C) to[0] = a;
        if (col + 1 < C) to[1] = b;
      }
      if (!parts) continue;
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
}
#endif

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
  const int col = tile * 64 * kGroups + 16 * warp_of_block() + threadIdx.x % 32 / 4 * 2;
  const int all_chunks = (D + kStreamDepth - 1) / kStreamDepth, slices = gridDim.y;
  const int slice = blockIdx.y, first = all_chunks * slice / slices;
  const int chunks = all_chunks * (slice + 1) / slices - first;
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
    tensor_load(shared.x[s], &x, row0, (first + chunk) * kStreamDepth, &shared.full[s]);
  };
  if (threadIdx.x == 0) {
    for (int chunk = 0; chunk < min(chunks, kStages); ++chunk) fetch(chunk);
  }
  const auto load = [&](float(&w)[4][4], int chunk) {
    const int d0 = (first + chunk) * kStreamDepth;
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
  leave_tile<kRows, kGroups>(shared, sum, row0, col, B, C, results);
  if (results.epilogue != Epilogue::parts) return;
  __syncthreads();
  for (int row = threadIdx.x; row < min(kRows, B - row0); row += 128 * kGroups) {
    MaxSum all = shared.parts[0][row];
    for (int i = 1; i < 4 * kGroups; ++i) all = merge(all, shared.parts[i][row]);
    results.parts[static_cast<size_t>(row0 + row) * tiles + tile] = {all.largest, all.sum};
  }
#endif
}

// Copies rows of x into rows `stride` floats apart, a block a row: for the copy engine, which finds
// only what is aligned to 16 bytes.
__global__ void align_rows(const float* from, float* to, int D, int64_t stride) {
  start_next_kernel();
  wait_for_previous_kernel();
  const size_t row = blockIdx.x;
  for (int d = threadIdx.x; d < D; d += blockDim.x) to[row * stride + d] = from[row * D + d];
}

// ---- Hopper: fused exchange ---------------------------------------------------------------------

// For C of thousands. Of its row a block needs to know only a maximum and a sum; what fused online
// pays for is that no block knows them in time, so that each writes logits that are read again.
// Here the blocks of some rows run at the same time, keep their logits in registers, leave each
// row's maximum and sum in memory, wait until all of the others have, and then write probabilities,
// once. (Where a row has more blocks than can run at a time, it is online: logits and parts.)
//
// The product is turned round, as in fused cluster, and otherwise lesson 3's last one: a warpgroup
// that copies, two that multiply, several stages, and clusters of two. For all of the D inputs W
// has no room in registers: it comes through the stages, too, and from there to the registers.
template <Math kMath, int kRows>
struct ExchangeShared : TurnedShared<kMath, kRows> {
  alignas(16) float parts[8][kRows];  // of the 8 warps: their columns' maximum or sum, for each row
  alignas(16) float rows[kRows];      // what exponentials are relative to; then their factor
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

// A row's maximum and sum in all of its tiles, of which this block has `own`: leaves that, and
// waits for the others', 16 loads at a time. `of_tiles` points to the row's in the first tile.
template <Math kMath, int kRows>
__device__ MaxSum exchange_row(MaxSum own, Left* of_tiles, int tile, int tiles, unsigned turn) {
  const auto left_at = [&](int i) {
    return cuda::atomic_ref<Left, cuda::thread_scope_device>(
        of_tiles[static_cast<size_t>(i) * kRows]);
  };
  left_at(tile).store(leave(own, turn), cuda::memory_order_relaxed);
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
  return all;
}

// The thread's columns exist if `inside`. Its sums become exponentials relative to the maximum of
// the row in this block; that and their sum is what thread `row` returns.
template <Math kMath, int kRows>
__device__ MaxSum exponentials(ExchangeShared<kMath, kRows>& shared,
                               const TurnedConsumer<kMath, kRows>& of, float (&sum)[kRows / 2],
                               bool inside) {
  constexpr int kPairs = kRows / 4, kLeft = kPairs / 8;
  const int own = of.own, g = of.g, t = of.t;
  const int reversed = (g & 1) * 4 + (g & 2) + (g >> 2);
  float of_row[kPairs];
  const auto leave_parts = [&] {
#pragma unroll
    for (int i = 0; i < kLeft; ++i) {
      const int at = reversed * kLeft + i;
      shared.parts[own / 32][at / 2 * 8 + 2 * t + at % 2] = of_row[i];
    }
  };
  if (!inside) {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) sum[i] = minus_infinity();
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
  if (own < kRows) {
#pragma unroll
    for (int i = 0; i < 8; ++i) row.sum += shared.parts[i][own];
  }
  return row;
}
#endif

// The clusters side by side have all columns of a strip of kRows rows; in a round they take
// strips_at_once strips, which is as many as have all of their blocks running.
template <Math kMath, int kRows>
__global__ void HOPPER_CLUSTER(2) __launch_bounds__(384, 1)
    exchange_columns(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap W,
                     int B, int D, int C, Exchange others, Results results) {
#if HOPPER_CODE
  using Shared = ExchangeShared<kMath, kRows>;
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const int steps = (D + Shared::kDepth - 1) / Shared::kDepth, strips = (B + kRows - 1) / kRows;
  const int tiles = (C + 2 * Shared::kColumns - 1) / (2 * Shared::kColumns) * 2;  // of a strip
  const int tile = blockIdx.x % tiles, col0 = tile * Shared::kColumns;
  if (threadIdx.x == 0) init_barriers<kMath, kRows>(shared);
  cluster_meet();
  start_next_kernel();
  wait_for_previous_kernel();

  const unsigned turn = ~others.launches[0] & 1;
  Ring<Shared::kStages> ring;
  if (threadIdx.x < 128) {
    registers_shrink_to<40>();
    for (int strip = blockIdx.x / tiles; strip < strips; strip += others.strips_at_once) {
      produce<kMath, kRows>(shared, ring, &x, &W, strip * kRows, col0, steps);
    }
    if (threadIdx.x == 0) wait_until_empty(shared.empty, ring);
  } else {
    registers_grow_to<232>();
    const TurnedConsumer<kMath, kRows> consumer{shared};
    const int own = consumer.own, col = col0 + consumer.col();
    const bool softmax = results.epilogue == Epilogue::softmax;
    float sum[kRows / 2];
    if (!softmax) {
      if (own < kRows) shared.rows[own] = 1;
      named_barrier(1, 256);
    }
    for (int strip = blockIdx.x / tiles; strip < strips; strip += others.strips_at_once) {
      consumer.multiply(sum, ring, steps);
      const int row0 = strip * kRows;
      if (softmax) {
        const MaxSum row = exponentials(shared, consumer, sum, col < C);
        if (own < kRows) {
          Left* of_tiles = others.left + static_cast<size_t>(strip) * tiles * kRows + own;
          const MaxSum all = exchange_row<kMath, kRows>(row, of_tiles, tile, tiles, turn);
          shared.rows[own] = rebase(row.largest, all.largest) / all.sum;
        }
        named_barrier(1, 256);
      }
      float* out = results.out + static_cast<size_t>(row0) * C + col;
      if (col < C) consumer.store(sum, shared.rows, out, B - row0, C);
      if (results.epilogue == Epilogue::parts) {  // then a block has one strip
        named_barrier(1, 256);
        const MaxSum row = exponentials(shared, consumer, sum, col < C);
        if (own < min(kRows, B - row0)) {
          results.parts[static_cast<size_t>(row0 + own) * tiles + tile] = {row.largest, row.sum};
        }
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

// What a product is made for, and from which float of a row to the next one.
struct Layer {
  const Lesson& lesson;
  Problem& problem;
  SoftmaxShape shape;
  Buffer<float> x, W;
  int64_t x_stride = shape.inputs;
  int B = static_cast<int>(shape.rows), D = static_cast<int>(shape.inputs);
  int C = static_cast<int>(shape.classes), sms = lesson.device().sms;
};

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

// A half fused product: `launch` (results, slices) leaves logits or, of that many slices of D,
// parts of them; and, if asked for and for one slice, the parts of rows in `tiles` tiles (0: it
// cannot). Probabilities are made by another kernel. Where a row fits into registers, the usual
// softmax is as good as one that knows the parts.
template <typename Launch>
std::function<void(Results)> half_fused(const Layer& layer, int slices, int tiles, Launch launch) {
  const auto sums =
      layer.problem.output<float>(slices > 1 ? slices * layer.shape.rows * layer.C : 1);
  return [=, shape = layer.shape, B = layer.B, C = layer.C](Results results) {
    if (results.epilogue == Epilogue::logits) return launch(results, 1);
    float* out = results.out;
    const bool parts = slices == 1 && C > 4096 && tiles > 0;
    results.epilogue = parts ? Epilogue::parts : Epilogue::logits;
    if (slices > 1) results.out = sums;
    launch(results, slices);
    if (parts) {
      launch_early(finish_columns<kSoftmaxThreads>, dim3(B, blocks(C, kPartColumns)),
                   kSoftmaxThreads, 0, out, out, results.parts, C, tiles);
    } else {
      softmax(results.out, out, shape, results.parts, slices);
    }
  };
}

Factors factors_of(const Layer& layer) {
  const auto row_bytes = [](int64_t columns) {
    const int64_t bytes = 4 * columns;
    return static_cast<int>(std::min<int64_t>(16, bytes & -bytes));
  };
  return {layer.x, layer.W, layer.B, layer.D, layer.C, row_bytes(layer.D), row_bytes(layer.C)};
}

// D is split until the GPU is full, but into no less than kLeastDepth.
constexpr int kLeastDepth = 128, kMostSplits = 8;

template <class Tile>
Product make_all_columns(const Layer& layer) {
  constexpr int kBytes = Tile::kStageBytes + Tile::kLogitBytes;
  const int row_tiles = static_cast<int>(blocks(layer.B, Tile::BM));
  const int splits =
      std::max(1, std::min({layer.D / kLeastDepth, kMostSplits, layer.sms / row_tiles}));
  const auto partial =
      layer.problem.output<float>(splits > 1 ? splits * layer.shape.rows * layer.C : 1);
  const auto arrived = layer.problem.workspace<unsigned>(row_tiles);
  const auto launch = [=](Results results) {
    results.partial = partial;
    results.arrived = arrived;
    launch_early(all_columns<Tile>, dim3(row_tiles, splits), Tile::kThreads, kBytes,  //
                 factors_of(layer), results);
  };
  return product_of("tiles", all_columns<Tile>, Tile::kThreads, kBytes, launch);
}

template <class Tile>
Product make_column_tiles(const Layer& layer) {
  const unsigned tiles = blocks(layer.B, Tile::BM) * blocks(layer.C, Tile::BN);
  const auto launch = [=](Results results, int) {
    launch_early(column_tiles<Tile>, tiles, Tile::kThreads, Tile::kStageBytes,  //
                 factors_of(layer), results);
  };
  return product_of("online", column_tiles<Tile>, Tile::kThreads, Tile::kStageBytes,
                    half_fused(layer, 1, static_cast<int>(blocks(layer.C, Tile::kCols)), launch));
}

template <int kCols>
Product make_narrow(const Layer& layer) {
  // All of W if it fits, else as much of it as does.
  using N = Narrow<kCols>;
  constexpr int kRowBytes = 4 * N::kStride, kThreads = N::kThreads;
  const int most = static_cast<int>(layer.lesson.device().shared_bytes) - 4 * N::kLogits - 1024;
  const int depth = std::min(static_cast<int>(blocks(layer.D, 8)), most / kRowBytes / 8) * 8;
  const int bytes = depth * kRowBytes + 4 * N::kLogits;
  const int tiles = static_cast<int>(blocks(layer.B, N::kRows));
  const int blocks_per_sm = std::clamp((most + 4 * N::kLogits) / bytes, 1, 2);
  const auto launch = [=](Results results) {
    launch_early(narrow_columns<kCols>, std::min(tiles, blocks_per_sm * layer.sms), kThreads,
                 bytes,  //
                 layer.x, layer.W, layer.B, layer.D, layer.C, depth, results);
  };
  return product_of("narrow", narrow_columns<kCols>, kThreads, bytes, launch);
}

// From so many rows on fused narrow, if there are few classes.
constexpr int kManyRows = 2048;

// The tiles for a shape. BM, BN, BK; warps along rows, columns and D; stages.
template <Math kMath>
Product make_product(const Layer& layer) {
  const int C = layer.C;
  // Compute capability 8.0 has 163 KB of shared memory for a block, 8.6 99 KB, 7.5 64 KB: where a
  // tile does not fit, smaller ones of column_tiles() do.
  const bool large = layer.lesson.device().shared_bytes >= 220 << 10;
  const bool medium = layer.lesson.device().shared_bytes >= 110 << 10;
  if constexpr (kMath == Math::tf32) {
    if (layer.B >= kManyRows && C <= 16) return make_narrow<16>(layer);
    if (layer.B >= kManyRows && C <= 48) return make_narrow<48>(layer);
    if (layer.B >= kManyRows && C <= 80) return make_narrow<80>(layer);
    if (layer.B >= kManyRows && C <= 128) return make_narrow<128>(layer);
  }
  if (C <= 16) {
    return make_all_columns<Tile<kMath, kMath == Math::fp32 ? 8 : 16, 16, 64, 1, 1, 8, 3>>(layer);
  }
  constexpr int kCols = kMath == Math::fp32 ? 64 : 56;
  if (C <= kCols && large) return make_all_columns<Tile<kMath, 16, kCols, 64, 1, 1, 8, 4>>(layer);
  if (C <= 104 && large) return make_all_columns<Tile<kMath, 32, 104, 64, 2, 1, 4, 4>>(layer);
  if (C <= 256 && large) return make_all_columns<Tile<kMath, 32, 256, 32, 1, 4, 2, 3>>(layer);
  if (large || (medium && C > 256)) {
    // Of a warp: 64 x 32 where W comes from shared memory as single floats; 32 x 64 where both
    // factors come as vectors of 4; 32 x 32, of twice as many warps, where it also has to have
    // the sums of a step, and the parts of split operands.
    constexpr int kWarpsM = kMath == Math::tf32 ? 2 : 4;
    constexpr int kWarpsN = kMath == Math::fp32 ? 2 : 4;
    return make_column_tiles<Tile<kMath, 128, 128, 32, kWarpsM, kWarpsN, 1, 3>>(layer);
  }
  return make_column_tiles<Tile<kMath, 64, 64, 32, 2, 2, 1, 2>>(layer);
}

// x for the copy engine, in boxes of kRows rows.
template <Math kMath>
CUtensorMap map_of_x(const Layer& layer, unsigned rows) {
  return tensor_map<float>(layer.x, layer.shape.rows, layer.shape.inputs, rows, kMath == Math::tf32,
                           layer.x_stride);
}

template <Math kMath, int kSplits, int kRows, int kClasses, int kDepth, bool kAligned>
Product make_cluster(const Layer& layer) {
  constexpr int kBytes = sizeof(ClusterShared<kMath, kSplits, kRows, kClasses, kDepth>);
  const auto launch = [=](Results results) {
    ClusterInput x = {{}, layer.x};
    if constexpr (kAligned) x.map = map_of_x<kMath>(layer, kRows);
    launch_early(cluster_columns<kMath, kSplits, kRows, kClasses, kDepth, kAligned>,
                 kSplits * blocks(layer.B, kRows), 2 * kClasses, kBytes,  //
                 x, layer.W, layer.B, layer.D, layer.C, results);
  };
  return product_of("cluster", cluster_columns<kMath, kSplits, kRows, kClasses, kDepth, kAligned>,
                    2 * kClasses, kBytes, launch);
}

// Few rows: D is split over more blocks. 40 rows: of 1024 rows 26 clusters of 4, which is about as
// many as fit on the GPU at a time.
template <Math kMath, bool kAligned>
Product choose_cluster(const Layer& layer) {
  if (layer.B <= 512) {
    return layer.C <= 64 ? make_cluster<kMath, 8, 16, 64, 64, kAligned>(layer)
                         : make_cluster<kMath, 8, 16, 128, 64, kAligned>(layer);
  }
  // Split operands take twice the registers for W: fewer inputs at a time, and more rows and
  // blocks.
  if constexpr (kMath == Math::split) {
    return layer.C <= 64 ? make_cluster<kMath, 8, 80, 64, 128, kAligned>(layer)
                         : make_cluster<kMath, 8, 80, 128, 128, kAligned>(layer);
  } else {
    return layer.C <= 64 ? make_cluster<kMath, 4, 40, 64, 256, kAligned>(layer)
                         : make_cluster<kMath, 4, 40, 128, 256, kAligned>(layer);
  }
}

constexpr int kFewRows = 16;

template <int kRows, int kParts>
Product make_few_rows(const Layer& layer) {
  // As many slices of D as give each multiprocessor seven blocks, of 16 inputs a thread or more.
  const int columns = static_cast<int>(blocks(layer.C, 256 / kParts));
  const int most = kParts > 1 ? std::max(1, layer.D / (16 * kParts)) : std::max(1, layer.D / 64);
  const int wanted = kParts > 1 ? std::min(4, layer.sms / columns) : 7 * layer.sms / columns;
  const auto launch = [=](Results results, int slices) {
    launch_early(few_rows<kRows, kParts>, dim3(columns, slices), 256, 0, layer.x, layer.W,
                 results.out, layer.B, layer.D, layer.C);
  };
  return product_of("few rows", few_rows<kRows, kParts>, 256, 0,
                    half_fused(layer, std::clamp(wanted, 1, most), 0, launch));
}

Product choose_few_rows(const Layer& layer) {
  if (layer.C > kLongestInRegisters) return make_few_rows<1, 1>(layer);
  if (layer.B == 1) return make_few_rows<1, 8>(layer);
  return layer.B <= 8 ? make_few_rows<8, 8>(layer) : make_few_rows<kFewRows, 8>(layer);
}

template <int kRows, int kGroups, int kAhead, int kBlocksPerSm>
Product make_streamed(const Layer& layer) {
  constexpr int kBytes = sizeof(StreamShared<kRows, kGroups>), kThreads = 128 * kGroups;
  // Slices of D where tiles leave multiprocessors without work, of four chunks or more.
  const int tiles = static_cast<int>(blocks(layer.C, 64 * kGroups) * blocks(layer.B, kRows));
  const int slices = std::clamp(kBlocksPerSm * layer.sms / tiles, 1,
                                std::max(1, static_cast<int>(blocks(layer.D, 4 * kStreamDepth))));
  const auto launch = [=](Results results, int parts) {
    launch_early(streamed_columns<kRows, kGroups, kAhead, kBlocksPerSm>, dim3(tiles, parts),
                 kThreads, kBytes, map_of_x<Math::tf32>(layer, kRows), layer.W, layer.B, layer.D,
                 layer.C, results);
  };
  return product_of(
      "streamed", streamed_columns<kRows, kGroups, kAhead, kBlocksPerSm>, kThreads, kBytes,
      half_fused(layer, slices, static_cast<int>(blocks(layer.C, 64 * kGroups)), launch));
}

// Tiles of 128, 192 or 256 classes: whichever keep the multiprocessors busy to the end. Of the
// narrow ones two blocks fit at a time. If there are few rows, there is room to look further ahead.
Product choose_streamed(const Layer& layer) {
  const bool few = layer.B <= 64;
  const auto cost = [&](int groups, int blocks_per_sm) {
    const int64_t all = int64_t{1} * blocks(layer.C, 64 * groups) * blocks(layer.B, 128);
    return static_cast<double>(blocks(all, layer.sms * blocks_per_sm) * groups * blocks_per_sm);
  };
  const double two = few ? cost(2, 1) * 1.2 : cost(2, 2), three = cost(3, 1) * 1.1;
  if (three < std::min(two, cost(4, 1))) {
    return few ? make_streamed<64, 3, 2, 1>(layer) : make_streamed<128, 3, 2, 1>(layer);
  }
  if (two < cost(4, 1)) {
    return few ? make_streamed<64, 2, 3, 1>(layer) : make_streamed<128, 2, 1, 2>(layer);
  }
  return few ? make_streamed<64, 4, 2, 1>(layer) : make_streamed<128, 4, 1, 1>(layer);
}

constexpr int kExchangeColumns = 128, kExchangeThreads = 384;

// fused exchange in strips of kRows rows, of which `at_once` have all of their blocks running;
// none: it is half fused.
template <Math kMath, int kRows>
Product make_exchange(const Layer& layer, int at_once) {
  constexpr int kBytes = sizeof(ExchangeShared<kMath, kRows>);
  const int tiles = static_cast<int>(2 * blocks(layer.C, 2 * kExchangeColumns));
  const int strips = static_cast<int>(blocks(layer.B, kRows));
  const int count = at_once > 0 ? static_cast<int>(persistent(strips, at_once)) : strips;
  const size_t exchanged = at_once > 0 ? static_cast<size_t>(strips) * tiles * kRows : 1;
  const auto left = layer.problem.workspace<float>(2 * exchanged);
  const auto launches = layer.problem.workspace<unsigned>(2);
  const auto launch = [=](Results results) {
    const CUtensorMap W = tensor_map<float>(layer.W, layer.D, layer.C, 32, kMath == Math::tf32);
    const Exchange others = {reinterpret_cast<unsigned long long*>(left.data()), launches, count};
    launch_early(exchange_columns<kMath, kRows>, count * tiles, kExchangeThreads, kBytes,  //
                 map_of_x<kMath>(layer, kRows / 2), W, layer.B, layer.D, layer.C, others, results);
  };
  const auto half = [=](Results results, int) { launch(results); };
  return product_of("exchange", exchange_columns<kMath, kRows>, kExchangeThreads, kBytes,
                    at_once > 0 ? launch : half_fused(layer, 1, tiles, half));
}

// Strips of kRows rows or fewer, and exchange or half fused: what should take the least time. A
// block multiplies some 2.9 TFLOP/s, of 48 rows more than it has; half fused, logits are written
// and read once more. (Blocks are counted for a GPU that this launch has to itself, as in lesson
// 7.)
template <Math kMath, int kRows>
Product choose_exchange(const Layer& layer, double least = INFINITY) {
  constexpr int kBytes = sizeof(ExchangeShared<kMath, kRows>);
  const auto kernel = exchange_columns<kMath, kRows>;
  allow_shared_bytes(kernel, kBytes);
  const int64_t tiles = 2 * blocks(layer.C, 2 * kExchangeColumns), strips = blocks(layer.B, kRows);
  const int64_t all = 2 * resident_clusters(kernel, 2, kExchangeThreads, kBytes);
  const double round = 2.0 * (kRows + 48) * kExchangeColumns * layer.D / 2.9e12;
  const double half = round * blocks(strips * tiles, all) + 8 * layer.shape.logits() / 4e12;
  int at_once = static_cast<int>(all / tiles);
  double seconds = at_once > 0 ? round * blocks(strips, at_once) : INFINITY;
  if (half < seconds) at_once = 0, seconds = half;
  if constexpr (kRows > 64) {
    Product smaller = choose_exchange<kMath, kRows / 2>(layer, std::min(seconds, least));
    if (smaller.launch) return smaller;
  }
  return seconds < least ? make_exchange<kMath, kRows>(layer, at_once) : Product{};
}

// The layer, and a launch that brings rows of x into such as the copy engine finds, if they are
// none.
std::pair<Layer, std::function<void()>> with_aligned_rows(const Layer& layer) {
  if (layer.D % 4 == 0) return {layer, nullptr};
  Layer aligned = layer;
  aligned.x_stride = blocks(layer.D, 4) * 4;
  aligned.x = layer.problem.workspace<float>(layer.shape.rows * aligned.x_stride);
  return {aligned, [=] {
            launch_early(align_rows, layer.B, 256, 0, layer.x, aligned.x, layer.D,
                         aligned.x_stride);
          }};
}

// What Hopper has for a shape, if anything.
template <Math kMath>
std::optional<Product> make_hopper_product(const Layer& layer) {
  constexpr int64_t kMost = INT32_MAX - 512;  // where a tile ends is an int, too
  if (layer.shape.rows > kMost || layer.shape.inputs > kMost) return {};
  const bool narrow = layer.C <= kClusterClasses;
  if constexpr (kMath == Math::tf32) {
    if (narrow && layer.D % 4 != 0) return choose_cluster<kMath, false>(layer);
  }
  // Where there are few tiles fused streamed takes slices of D.
  const int64_t tiles = blocks(layer.B, 64) * 2 * blocks(layer.C, 2 * kExchangeColumns);
  const bool streamed = !narrow && (layer.C % 4 != 0 || tiles <= layer.sms / 4);
  if (kMath != Math::tf32 && !narrow && layer.C % 4 != 0) return {};
  const auto [aligned, align] = with_aligned_rows(layer);
  const auto choose = [](const Layer& layer, bool narrow, bool streamed) {
    if (narrow) return choose_cluster<kMath, true>(layer);
    if constexpr (kMath == Math::tf32) {
      return streamed ? choose_streamed(layer) : choose_exchange<kMath, 256>(layer);
    } else {  // a thread has the sums of a step, too: half as many rows
      return choose_exchange<kMath, 128>(layer);
    }
  };
  Product product = choose(aligned, narrow, streamed);
  if (align) {
    product.launch = [align = align, launch = product.launch](Results results) {
      align();
      launch(results);
    };
  }
  return product;
}

// ---- The tables ---------------------------------------------------------------------------------

std::string text_of(const SoftmaxShape& shape) {
  return std::to_string(shape.rows) + "x" + std::to_string(shape.inputs) + "x" +
         std::to_string(shape.classes);
}

// What a table is about. only_infinite, with --hard-rows: rows of only -inf, beside others. Of
// these tables what is verified are their NaN.
enum class Kind { tf32, fp32, only_infinite };

// A table of softmax(x W) with its buffers, and the rows that such tables have in common.
struct Table : Layer {
  Kind kind;
  std::string name;
  Buffer<float> probs;
  Buffer<float> logits;  // of the unfused ways
  Buffer<float> parts;   // of long rows
  Buffer<float> result;  // what is verified: probs, or that with its NaN marked

  Table(Lesson& lesson, Kind kind, const SoftmaxShape& shape)
      : Layer(layer_of(lesson, kind, shape)),
        kind(kind),
        name(name_of(kind, shape)),
        probs(problem.output<float>(shape.rows * shape.classes)),
        logits(problem.output<float>(shape.rows * shape.classes)),
        parts(problem.workspace<float>(C > 4096 ? 2 * shape.rows * (blocks(C, 32) + 1) : 2)),
        result(kind == Kind::only_infinite ? problem.output<float>(probs.size()) : probs) {
    problem.in_graph();
  }

  static std::string name_of(Kind kind, const SoftmaxShape& shape) {
    const char* names[] = {"TF32 ", "fp32 ", "only -inf "};
    return names[static_cast<int>(kind)] + text_of(shape);
  }

  static Layer layer_of(Lesson& lesson, Kind kind, const SoftmaxShape& shape) {
    const bool tf32 = kind == Kind::tf32;
    Problem& problem = lesson.problem(
        name_of(kind, shape), {{"B", shape.rows}, {"D", shape.inputs}, {"C", shape.classes}},
        tf32 ? "tf32" : "fp32", {.flops = shape.flops(), .bytes = shape.bytes(sizeof(float))},
        tf32 ? Rate::tf32 : Rate::fp32);
    const auto x = problem.input<float>(shape.rows * shape.inputs);
    const auto W = problem.input<float>(shape.inputs * shape.classes,
                                        kWeightScale / sqrt(static_cast<double>(shape.inputs)));
    return {lesson, problem, shape, x, W};
  }

  Kernel& add(const std::string& row, Role role, int needs_cc, std::function<void()> launch) const {
    if (kind == Kind::only_infinite) {
      launch = [launch, probs = probs, result = result] {
        launch();
        mark_nan(probs, result, probs.size());
      };
    }
    return problem.kernel(row, role, launch).needs(needs_cc);
  }

  Results results(Epilogue epilogue) const {
    float* out = epilogue == Epilogue::softmax ? probs : logits;
    return {.epilogue = epilogue, .out = out, .parts = reinterpret_cast<float2*>(parts.data())};
  }
  void softmax_of_logits() const {
    softmax(logits, probs, shape, reinterpret_cast<float2*>(parts.data()));
  }

  // Ways (2) and (3), by the same product.
  void add_ours(const Product& product, const std::string& suffix, int needs_cc) const {
    const std::string fused = std::string("fused ") + product.name + suffix;
    const std::string unfused = "un" + fused;
    product.state_resources(add(unfused, Role::ours, needs_cc, [product, *this] {
      product.launch(results(Epilogue::logits));
      softmax_of_logits();
    }));
    product.state_resources(add(fused, Role::ours, needs_cc,
                                [product, *this] { product.launch(results(Epilogue::softmax)); }));
    const std::string what = name + ", " + product.name + suffix + ": ";
    problem.compare(fused, unfused, what + "fused (3) against unfused (2), % times faster.");
    problem.compare(unfused, "library", what + "unfused (2) against library (1), % times faster.");
  }

  // With a math's tiles, and with Hopper's product if the shape has one.
  template <Math kMath>
  void add_products(const std::string& suffix) const {
    add_ours(make_product<kMath>(*this), suffix, kMath == Math::fp32 ? 0 : 80);
    if constexpr (kMath != Math::fp32) {
      const auto product = make_hopper_product<kMath>(*this);
      if (product) add_ours(*product, suffix, 90);
    }
  }
};

constexpr double kMostFlopsOfFusedRows = 1e11;

void add_table(Lesson& lesson, cublasHandle_t blas, Kind kind, const SoftmaxShape& shape) {
  const Table table(lesson, kind, shape);
  Problem& problem = table.problem;
  const auto x = table.x, W = table.W, probs = table.probs;
  const int B = table.B, D = table.D, C = table.C;
  const bool tf32 = kind == Kind::tf32, only_infinite = kind == Kind::only_infinite;
  const auto expected = problem.reference(probs.size());
  if (only_infinite) {
    problem.adjust_inputs([=] { make_only_minus_infinity(x, W, shape); });
  } else if (lesson.flag("--hard-rows")) {
    problem.adjust_inputs([=] { make_hard(x, W, shape); });
  }
  problem.reference_from(softmax_scratch(shape), [=] {
    reference_softmax<float>(blas, x, W, expected, shape);
    if (only_infinite) mark_nan(expected, expected.size());
  });
  problem.check(table.result, expected,
                kind != Kind::fp32
                    ? softmax_tolerance(shape.inputs, tensor_core_sum(shape.inputs), kRoundoffTf32)
                    : softmax_tolerance(shape.inputs, kRoundoffFp32));

  table.add("library", Role::library, tf32 ? 80 : 0, [=] {  // way (1)
    library_product(blas, x, W, table.logits, shape,
                    tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F);
    table.softmax_of_logits();
  });
  // It reads W once per row: of the largest shapes 20 calls would take a minute.
  if (!tf32 && shape.flops() < kMostFlopsOfFusedRows) {
    const auto launch = [=] { launch_early(fused_rows, B, kSoftmaxThreads, 0, x, W, probs, D, C); };
    table.add("fused rows", Role::baseline, 0, launch).resources(fused_rows, kSoftmaxThreads);
  }
  // These round nothing, in TF32's table either: for a few columns, or rows, they are what tensor
  // cores have to beat.
  if (C <= 16) {
    const auto kernel = fused_narrow_rows<16>;
    const auto launch = [=] { launch_early(kernel, B, kSoftmaxThreads, 0, x, W, probs, D, C); };
    table.add("fused rows, D split", Role::ours, 0, launch).resources(kernel, kSoftmaxThreads);
  }
  if (C > kClusterClasses && (B == 1 || (B <= kFewRows && C <= kLongestInRegisters)))
    table.add_ours(choose_few_rows(table), "", 0);
  if (kind != Kind::fp32) table.add_products<Math::tf32>(only_infinite ? ", TF32" : "");
  if (tf32) return;
  table.add_products<Math::fp32>("");
  table.add_products<Math::split>(", 3xTF32");
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
    if (all || has_tf32) add_table(lesson, blas, Kind::tf32, shape);
    if (all || !has_tf32) add_table(lesson, blas, Kind::fp32, shape);
    add_bytes_note(lesson, shape);
  }
  if (lesson.flag("--hard-rows")) {
    for (const SoftmaxShape& shape : shapes) add_table(lesson, blas, Kind::only_infinite, shape);
  }
  return lesson.run();
}
