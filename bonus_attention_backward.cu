// Bonus. Attention's gradients
//
//     P  = exp(scale Q K^T - log_sums)       as forward (bonus_attention) left the logarithms
//     dV = P^T dO        dP = dO V^T         D(s) = sum over the columns of dO(s) out(s)
//     dS = P (dP - D)    dQ = scale dS K     dK = scale dS^T Q
//     Q, out, dO, dQ (batch, S, heads, width), K, V, dK, dV (batch, T, kv_heads, width): bf16 or
//     fp16, row-major; log_sums (batch, heads, S): fp32
//
// Head h of Q reads head g of K and V; where there are fewer of these, neighbouring heads share
// one, whose dK and dV are the sums over these heads. With a causal mask query s sees the keys t <=
// s + T - S only.
//
// Forward kept neither the logits nor the probabilities: they are computed again. That makes five
// products for forward's two. In forward a block owned rows of Q, and their results never left it.
// Here something has to: dQ is a sum over the keys, and dK and dV are sums over the queries. So
// whatever a block owns, dQ, or else dK and dV, comes in parts from many blocks.
//
//     library              cuBLAS's five products: logits, P, dP and dS go through memory
//     cuDNN                NVIDIA's fused kernels, where the library is found: the ones to beat
//     tensor cores         a block owns keys, and dK and dV in its registers; Q and dO stream past,
//                          products by mma.sync; dQ is added up in memory by atomicAdd
//     warp specialization  for Hopper: a warp brings tiles by the copy engine, two warpgroups
//                          multiply; they add 16 bytes of dQ at a time, in the order of registers
//     reduce-add           the same, but the copy engine adds dQ to memory
//     deterministic        the same, in a fixed order: every run has the same bits
//
// --causal and --full print one of the two tables. --runs 100 launches each kernel so often once
// more, and says how often dQ has other bits. --hard-rows makes the logits of most queries hard:
// some are as large as 2^17 or 2^18 times the scale, which for a width of 64 is 16384 or 32768.

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "common/numerics.h"
#include "primitives/approximate.cuh"
#include "primitives/async_copy.cuh"
#include "primitives/early_launch.cuh"
#include "primitives/fragments.cuh"
#include "primitives/hopper/pipeline.cuh"
#include "primitives/launch.h"
#include "primitives/neighbours.cuh"
#include "primitives/row_parts.cuh"
#include "primitives/spin.cuh"
#include "problems/attention/backward.h"
#include "problems/attention/cudnn.h"
#include "problems/attention/library_backward.cuh"

using namespace problems;
using namespace primitives;

// What a kernel gets. group: how many heads of Q share one of K and V. row_sums (batch, heads,
// queries) is D. dq_sums is where parts of dQ are added up: for *tensor cores* (batch, queries,
// heads, width), on Hopper in an order of its own; it is padded, see padded_rows(). counts and
// abreast are for *deterministic* alone.
template <typename T>
struct Operands {
  const T *Q, *K, *V, *out, *d_out;
  const float* log_sums;
  T *dQ, *dK, *dV;
  float* row_sums;
  float* dq_sums;
  unsigned* counts;
  int batch, queries, keys, heads, group, abreast;
  bool causal;
  float scale;

  // The first key that query s does not see.
  __device__ int limit(int s) const {
    return causal ? max(0, min(keys, s + keys - queries + 1)) : keys;
  }
  // The first query that sees key t.
  __device__ int first_query(int t) const { return causal ? max(0, t + queries - keys) : 0; }
};

// ---- before and after ---------------------------------------------------------------------------

// What both ends of dQ need, in a launch each. The zeros and the sums of dQ are fp32, and memory
// moves them in addition to inputs and outputs. Counted in bytes, for 16,384 tokens and a hidden
// size (heads * width) of 2048 that is 134 MB written before and 134 MB read after.
//
// attention_row_sums: a warp owns a row of out and d_out, a lane kWidth / 32 neighbouring columns.
// It leaves D, and zeros where parts of dQ will be added up: `zeros` >= rows of them, as dq_sums is
// padded. For *deterministic*, kCounts, it leaves so many counts of 0 instead.
//
// attention_finish_dq: a thread owns four neighbours of dQ. It scales and rounds their sums.
//
// (Words from primitives/: Neighbours<T, 4> are four elements that move together, and lanes_sum<32>
// adds up a number over the lanes of a warp.)
constexpr int kSumThreads = 256;

template <typename T, int kWidth, bool kCounts>
__global__ void __launch_bounds__(kSumThreads)
    attention_row_sums(Operands<T> in, int64_t rows, int64_t zeros) {
  constexpr int kOwn = kWidth / 32;
  const int lane = threadIdx.x % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kSumThreads / 32) + threadIdx.x / 32;
  const int64_t from = row * kWidth + kOwn * lane;
  if (row < zeros) {
    if constexpr (kCounts) {
      if (lane == 0) in.counts[row] = 0;
    } else {
      *reinterpret_cast<Neighbours<float, kOwn>*>(in.dq_sums + from) = {};
    }
  }
  if (row >= rows) return;
  const auto out = *reinterpret_cast<const Neighbours<T, kOwn>*>(in.out + from);
  const auto d_out = *reinterpret_cast<const Neighbours<T, kOwn>*>(in.d_out + from);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    sum += static_cast<float>(out.values[i]) * static_cast<float>(d_out.values[i]);
  }
  sum = lanes_sum<32>(sum);
  const int64_t head = row % in.heads, s = row / in.heads % in.queries;
  const int64_t batch = row / in.heads / in.queries;
  if (lane == 0) in.row_sums[(batch * in.heads + head) * in.queries + s] = sum;
}

template <typename T>
__global__ void __launch_bounds__(kSumThreads) attention_finish_dq(Operands<T> in, int64_t count) {
  const int64_t i = 4 * (static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x);
  if (i >= count) return;
  float4 sums = *reinterpret_cast<const float4*>(in.dq_sums + i);
  sums.x *= in.scale, sums.y *= in.scale, sums.z *= in.scale, sums.w *= in.scale;
  *reinterpret_cast<uint2*>(in.dQ + i) = pack4<T>(sums);
}

// ---- tensor cores -------------------------------------------------------------------------------

constexpr float kLog2E = 1.44269504088896340736f;

// A block owns 64 keys of a head of K and V (128 for a width of 64), a warp 16 of them (32), and of
// these dK and dV, which stay in its registers. K and V stay in shared memory. The queries of all
// heads that share them stream past, 32 at a time, the next ones' Q and d_out while these are
// multiplied (lesson 3's copies_ahead), with their logarithms and D. Nothing of S x T goes to
// memory.
//
// The logits are computed as their transpose, K Q^T, and so is dP, as V dO^T. For a lane has of a
// product's result just what it has to hold of a left factor: so P^T and dS^T, rounded, are at once
// the left factors of dV += P^T dO and dK += dS^T Q, and do not leave the registers.
//
// dQ += dS K is a sum over the keys, of which each warp has some. So dS^T goes through shared
// memory, after a barrier all warps read all of it, and each makes a quarter of the columns of dQ.
// The other blocks have other keys: the parts are added up in memory, in fp32, by atomicAdd, in
// whatever order the blocks come. What it pays for this: of each tile of queries a block adds as
// many numbers as it reads of Q, and of twice the size.
//
// With a causal mask a block begins with the first queries that see its keys. Of each head, blocks
// of the first keys, which have most to do, start first.
//
// The words, from primitives/:
//     copy_swizzled                 starts the copies of a tile to shared memory, where it lies as
//                                   lesson 3's *swizzled tiles* has it; copy_async those of a piece
//     load_left, load_right         load fragments of a left and of a right factor by ldmatrix;
//                                   load_left_transposed and load_right_transposed those of a
//                                   factor whose transpose is in memory
//     add_product                   multiplies such fragments, and adds to sums: many mma.sync
//     pack2<T>(left, right)         two numbers, rounded to T, in one register
//     to_tile                       rounds a warp's sums, and writes them to a tile
//     for_pairs                     calls a function for each pair of neighbours of a lane's sums
//     store_results                 stores a warp's results by way of shared memory, in whole rows;
//                                   pair_of finds two neighbours among a lane's results
template <typename T, int kWidth>
struct MmaTile {
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kCount = kWidth == 64 ? 2 : 1;  // matrices of 16 keys that a warp has
  static constexpr int kOwn = 16 * kCount, kKeys = kWarps * kOwn, kQueries = 32;

  struct Stage {
    alignas(128) T Q[kQueries * kWidth];
    T d_out[kQueries * kWidth];
    float log_sums[kQueries], row_sums[kQueries];
  };
  struct Shared {
    alignas(128) T K[kKeys * kWidth];
    T V[kKeys * kWidth];
    T dS[kKeys * kQueries];  // transposed: a row has all queries of a key
    Stage stages[2];
  };
};

// Columns k to k + 15 of a lane's sums, rounded, become left factors.
template <typename T, int kCount, int kCols8>
__device__ __forceinline__ void to_left(unsigned (&a)[kCount][4],
                                        const float (&sums)[kCount][kCols8][4], int k) {
  // Registers 0 and 1 of a left factor are the lane's two rows of the left 8 columns, 2 and 3 of
  // the right 8: the lane has exactly these four pairs of the sums.
#pragma unroll
  for (int i = 0; i < 4 * kCount; ++i) {
    const float* const pair = &sums[i / 4][k / 8 + i / 2 % 2][i % 2 * 2];
    a[i / 4][i % 4] = pack2<T>(pair[0], pair[1]);
  }
}

// Adds to two neighbours in memory, whichever blocks add to them at the same time: one instruction
// from compute capability 9.0 on.
__device__ __forceinline__ void add_pair(float* to, float2 pair) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  atomicAdd(reinterpret_cast<float2*>(to), pair);
#else
  atomicAdd(to, pair.x);
  atomicAdd(to + 1, pair.y);
#endif
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(MmaTile<T, kWidth>::kThreads, 2)
    attention_backward_mma(Operands<T> in) {
  using Tile = MmaTile<T, kWidth>;
  constexpr int kKeys = Tile::kKeys, kQueries = Tile::kQueries, kThreads = Tile::kThreads;
  constexpr int kCount = Tile::kCount, kOwn = Tile::kOwn;
  extern __shared__ __align__(1024) char bytes[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(bytes);
  const int key0 = static_cast<int>(blockIdx.x) * kKeys, kv_head = blockIdx.y, batch = blockIdx.z;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_key = warp * kOwn;
  // Matrices of S and T rows, of which a head has kWidth columns.
  const int kv_heads = in.heads / in.group;
  const int q_cols = in.heads * kWidth, k_cols = kv_heads * kWidth, k_col = kv_head * kWidth;
  const size_t q_from = static_cast<size_t>(batch) * in.queries * q_cols;
  const size_t k_from = static_cast<size_t>(batch) * in.keys * k_cols;

  // A step is a tile of queries of a head. Query s sees key0 if s + keys - queries >= key0.
  const int first_head = kv_head * in.group, heads_end = first_head + in.group;
  const int first_query = in.first_query(key0) / kQueries * kQueries;
  int next_head = first_head, next_query = first_query;  // to be copied
  const auto copy_step = [&](int step) {
    if (step == 0) {
      copy_swizzled<kKeys, kWidth, kThreads>(shared.K, in.K + k_from, key0, k_col, in.keys, k_cols);
      copy_swizzled<kKeys, kWidth, kThreads>(shared.V, in.V + k_from, key0, k_col, in.keys, k_cols);
    }
    if (next_head == heads_end) return;
    const int head = next_head, query = next_query, col = head * kWidth;
    next_query += kQueries;
    if (next_query >= in.queries) next_query = first_query, ++next_head;
    auto& stage = shared.stages[step % 2];
    copy_swizzled<kQueries, kWidth, kThreads>(stage.Q, in.Q + q_from, query, col, in.queries,
                                              q_cols);
    copy_swizzled<kQueries, kWidth, kThreads>(stage.d_out, in.d_out + q_from, query, col,
                                              in.queries, q_cols);
    if (threadIdx.x >= 2 * kQueries) return;
    const bool is_sum = threadIdx.x >= kQueries;
    const int i = threadIdx.x % kQueries;
    const float* const from = is_sum ? in.row_sums : in.log_sums;
    copy_async<4>((is_sum ? stage.row_sums : stage.log_sums) + i,
                  from + (static_cast<size_t>(batch) * in.heads + head) * in.queries + query + i,
                  query + i < in.queries);
  };
  auto ahead = copies_ahead<2>(copy_step);

  const float scale = in.scale * kLog2E;
  float dK[kCount][kWidth / 8][4] = {}, dV[kCount][kWidth / 8][4] = {};
  for (int head = first_head, query = first_query; head < heads_end;) {
    const auto& stage = shared.stages[ahead.next() % 2];

    float P[kCount][kQueries / 8][4] = {}, dS[kCount][kQueries / 8][4] = {};
#pragma unroll
    for (int k = 0; k < kWidth; k += 16) {
      unsigned keys[kCount][4], queries[kQueries / 16][4];
      load_left<kWidth>(keys, shared.K, warp_key, k);
      load_right_transposed<kWidth>(queries, stage.Q, k, 0);
      add_product<T>(P, keys, queries);
    }
#pragma unroll
    for (int k = 0; k < kWidth; k += 16) {
      unsigned values[kCount][4], d_out[kQueries / 16][4];
      load_left<kWidth>(values, shared.V, warp_key, k);
      load_right_transposed<kWidth>(d_out, stage.d_out, k, 0);
      add_product<T>(dS, values, d_out);
    }

    // From logits and dP to P and dS. The first query of the tile sees the fewest keys. Where it
    // sees all of the block's, nothing is masked. (A query behind the last one is all zeros, and so
    // are its parts of the results. For one that sees no key P is +infinity, and then masked to 0.)
    const bool masked = key0 + kKeys > in.limit(query);
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int q = 8 * j + lane % 4 * 2 + e;
        const float base = stage.log_sums[q] * kLog2E, row_sum = stage.row_sums[q];
        const int own_limit = in.limit(query + q) - key0 - warp_key - lane / 4;
#pragma unroll
        for (int r = 0; r < 2 * kCount; ++r) {  // the lane's keys, 8 apart
          float &p = P[r / 2][j][r % 2 * 2 + e], &ds = dS[r / 2][j][r % 2 * 2 + e];
          p = exp2_approximate(fmaf(p, scale, -base));
          if (masked && 8 * r >= own_limit) p = 0;
          ds = p * (ds - row_sum);
        }
      }
    }

    // All warps have read the last step's dS^T: the barrier in ahead.next() lies in between.
    to_tile<kQueries>(shared.dS, warp_key, 0, dS);
#pragma unroll
    for (int k = 0; k < kQueries; k += 16) {
      unsigned left[kCount][4], right[kWidth / 16][4];
      to_left<T>(left, P, k);
      load_right<kWidth>(right, stage.d_out, k, 0);
      add_product<T>(dV, left, right);
      to_left<T>(left, dS, k);
      load_right<kWidth>(right, stage.Q, k, 0);
      add_product<T>(dK, left, right);
    }

    __syncthreads();  // all of dS^T is there
    constexpr int kCols = kWidth / Tile::kWarps;
    float dQ[kQueries / 16][kCols / 8][4] = {};
#pragma unroll
    for (int k = 0; k < kKeys; k += 16) {
      unsigned left[kQueries / 16][4], keys[kCols / 16][4];
      load_left_transposed<kQueries>(left, shared.dS, 0, k);
      load_right<kWidth>(keys, shared.K, k, warp * kCols);
      add_product<T>(dQ, left, keys);
    }
    float* const sums = in.dq_sums + q_from + head * kWidth;
    for_pairs(dQ, query, warp * kCols, in.queries, kWidth, [&](int row, int col, float2 pair) {
      add_pair(sums + static_cast<size_t>(row) * q_cols + col, pair);
    });
    query += kQueries;
    if (query >= in.queries) query = first_query, ++head;
  }

  __syncthreads();  // K and V have been read: results take their place
  store_results<kOwn, kWidth>(shared.V + warp_key * kWidth, in.dV + k_from, key0 + warp_key, k_col,
                              in.keys, k_cols, [&](int i, int j) {
                                const float2 pair = pair_of(dV, i, j);
                                return pack2<T>(pair.x, pair.y);
                              });
  store_results<kOwn, kWidth>(shared.K + warp_key * kWidth, in.dK + k_from, key0 + warp_key, k_col,
                              in.keys, k_cols, [&](int i, int j) {
                                const float2 pair = pair_of(dK, i, j);
                                return pack2<T>(in.scale * pair.x, in.scale * pair.y);
                              });
}

// ---- warp specialization, reduce-add, deterministic ---------------------------------------------

// A block owns 128 keys of a head of K and V. It has two consumers, warpgroups that multiply by
// wgmma: each owns 64 of the keys, with their dK and dV in its registers. And it has a producer, a
// warp that does not multiply. It has the copy engine bring K and V once, and then tiles of Q and
// d_out to the two stages of a pipeline; the tile's logarithms and D it reads itself. With a width
// of 128 a block has twice as many keys as in *tensor cores*. So half as many numbers are added to
// dQ, and Q and d_out are read half as often.
//
// As in *tensor cores* the logits and dP are computed as their transposes, here 64 keys by all
// queries of a tile. In the products for dV and dK, P^T and dS^T are left factors in the registers
// in which they were computed. wgmma reads the right factors where they lie: Q and d_out along
// their rows for the logits and for dP, and across them for dV and dK.
//
// Tensor cores and the other units work side by side. While the products for dV run, a consumer
// computes dS; while those for dK run, it adds its part of dQ to the sums in memory.
//
// dQ = dS K has queries as rows, and sums over the keys of both consumers. In registers a thread
// has rows of dS^T, which are keys, and only those of its own consumer. So both write dS^T to
// shared memory, where wgmma reads it transposed, as the left factor. Each consumer computes 64
// queries by 64 columns of dQ, a *part*. With a width of 64 a tile has 128 queries, and each
// consumer has half of them; with a width of 128 it has 64, and each has half of the columns.
//
// Who waits for whom. A part of dQ needs dS^T of both consumers. If a consumer waited for the other
// one's dS^T of this step, the two would meet in each step. Then both would compute exponentials
// at the same time, and the tensor cores would have nothing to do; after that both would have
// products, and one would wait for the other. So dQ is *late*: a consumer writes its dS^T of this
// step, but computes dQ of the step before. The other one has usually written its dS^T of that step
// long ago. So nobody has to wait, the two are at different places of a step, and while one
// computes exponentials, products of the other one run. dQ of the last step comes behind the loop.
//
// dS^T has two places, one for even and one for odd steps. Each has two barriers:
//
//     dS_full    both consumers have written dS^T of a step: now both may compute its dQ
//     dS_empty   both have computed its dQ: now both may write dS^T of the step after the next one
//
// So one consumer may be ahead of the other by more than half a step, but not by two.
//
// That is so where kLate is true: with a width of 64, if there are more than four steps. With
// fewer steps dQ of the last one, which comes behind the loop, takes longer than waiting would. And
// a width of 128 has half as many exponentials for as many products, so nothing is gained. In both
// cases the consumers meet once in each step, when all of dS^T is there. The next step writes the
// other place. So a consumer that is ahead after that does not overwrite what the other one still
// reads.
//
// Nobody but attention_finish_parts reads the sums in memory, so they may lie there in any order.
// Here it is that of the registers. Of a part a thread has 32 numbers, in eight groups of four. For
// each group the four numbers of a consumer's 128 threads are neighbours in memory. So a thread
// adds 16 bytes by one instruction, and a warp 512 bytes in a row.
//
// The three kernels differ in how dQ is added up, `Adding` below:
//
//     by_threads   *warp specialization*: as said, see add_part()
//     by_engine    *reduce-add*: the consumer writes its part to shared memory and goes on, while
//                  the copy engine adds these 16 KB to the sums
//     in_order     *deterministic*: each part is added to in the order of the keys, see
//                  add_in_order(). For blocks that wait for others, see take_place()
//
// At the first reading take by_threads, and skip what is `if constexpr (kInOrder)`.
//
// The words are those of bonus_attention at *warp specialization*, and these:
//     Box, LeftTile                 rows of 128 bytes in shared memory, as the copy engine brings
//                                   them and wgmma reads them
//     named_barrier(id, threads)    __syncthreads() of some of a block's warps, here of both
//                                   consumers or of one
//     store_box<true>               has the copy engine store a box of one of a batch's matrices
//     bulk_add, bulk_store          have the copy engine add floats in shared memory to those in
//                                   memory, or store them there
//     tensor_store_wait<0>          waits until what the copy engine has added is in memory
//     wait_for_count                reads a counter until it is high enough, by an acquire
//     launch_early                  starts a kernel when all blocks of the one before have called
//                                   start_next_kernel(), or have ended, as here: nobody calls it.
//                                   Their results are sure to be seen only after
//                                   wait_for_previous_kernel()
enum class Adding { by_threads, by_engine, in_order };

template <int kWidth>
struct HopperTile {
  static constexpr int kKeys = 128, kQueries = kWidth == 64 ? 128 : 64, kBoxes = kWidth / kBoxCols;
  static constexpr int kStages = 2, kThreads = 384;
  static constexpr int kPartFloats = 64 * 64;
  // Of 168 a thread. Neither width has many to spare: with 24, a warp that brings 128 queries'
  // numbers would spill.
  static constexpr int kProducerRegisters = kWidth == 64 ? 40 : 24;
  static constexpr int kConsumerRegisters = kWidth == 64 ? 232 : 240;
};

template <typename T, int kWidth>
struct HopperShared : HopperTile<kWidth> {
  using Tile = HopperTile<kWidth>;
  struct Stage {
    static constexpr int kLoaded = 2 * Tile::kQueries * kWidth * sizeof(T);  // by the copy engine
    Box<T, Tile::kQueries> Q[Tile::kBoxes], d_out[Tile::kBoxes];
    float log_sums[Tile::kQueries], row_sums[Tile::kQueries];
  };
  LeftTile<T, Tile::kKeys> K[Tile::kBoxes], V[Tile::kBoxes];
  Box<T, Tile::kKeys> dS[2][Tile::kQueries / 64];     // transposed: 128 keys by 64 queries each
  float4 parts[2][Tile::kPartFloats / 4 / 128][128];  // of each consumer, for the copy engine
  Pipeline<Stage, Tile::kStages> pipeline;
  Barrier KV_full, dS_full[2], dS_empty[2], part_full[2], part_empty[2];
};

// As the copy engine sees them: matrices (S or T, heads * width), one a batch.
struct HopperMaps {
  CUtensorMap Q, d_out, K, V, dK, dV;
};

// The number of the part that a consumer, 0 or 1, has of a tile of queries. Parts lie one after the
// other in dq_sums.
template <typename T, int kWidth>
__device__ inline size_t part_of(const Operands<T>& in, int batch, int head, int tile,
                                 int consumer) {
  const int tiles = ceil_div(in.queries, HopperTile<kWidth>::kQueries);
  return ((static_cast<size_t>(batch) * in.heads + head) * tiles + tile) * 2 + consumer;
}

#if HOPPER_CODE
// Adds four numbers to four neighbours in memory; each addition is atomic by itself. PTX ISA,
// "red".
__device__ inline void add_quad(float4* to, float4 sums) {
#ifdef CUDA_CPU
  atomicAdd(&to->x, sums.x), atomicAdd(&to->y, sums.y);
  atomicAdd(&to->z, sums.z), atomicAdd(&to->w, sums.w);
#else
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(sums.x),
               "f"(sums.y), "f"(sums.z), "f"(sums.w)
               : "memory");
#endif
}

// A block's place, its producer, and the parts of a consumer's step.
template <typename T, int kWidth, Adding kAdding, bool kLate>
struct HopperBlock : HopperTile<kWidth> {
  static constexpr bool kInOrder = kAdding == Adding::in_order;
  using Tile = HopperTile<kWidth>;
  using Shared = HopperShared<T, kWidth>;
  using Stage = typename Shared::Stage;
  using Product = Sum<Tile::kQueries>;                   // 64 keys by a tile's queries
  using Factor = LeftFragments<T, Tile::kQueries / 16>;  // the same, rounded
  Shared& shared;
  const HopperMaps& maps;
  const Operands<T>& in;
  int key_tile = blockIdx.x, kv_head = blockIdx.y, batch = blockIdx.z;
  int consumer = static_cast<int>(threadIdx.x) / 128 - 1;
  int key0, own_key0;  // of the block, and of the consumer
  // tile0 has the first query that sees key0. A step is a tile of queries of a head, of all heads
  // that share the keys. Every block has a step, as the last query sees all keys.
  int tile0, tiles, steps;

  __device__ int head_of(int step) const {
    return kv_head * in.group + (kInOrder ? step % in.group : step / tiles);
  }
  __device__ int tile_of(int step) const {
    return tile0 + (kInOrder ? tiles - 1 - step / in.group : step % tiles);
  }

  __device__ HopperBlock(char* bytes, const HopperMaps& of, const Operands<T>& operands)
      : shared(*reinterpret_cast<Shared*>(bytes)), maps(of), in(operands) {
    if (threadIdx.x == 0) {
      // Two consumers give a stage back. 33 arrivals fill it: one thread announces the bytes of the
      // copies, and 32 lanes have written the logarithms and D.
      prepare(shared.pipeline, 2, 1 + 32);
      barrier_init(&shared.KV_full, 1);
      for (int i = 0; i < 2; ++i) {
        barrier_init(&shared.dS_full[i], 8);    // the warps of both consumers
        barrier_init(&shared.dS_empty[i], 2);   // a thread of each
        barrier_init(&shared.part_full[i], 4);  // the warps of a consumer
        barrier_init(&shared.part_empty[i], 1);
      }
      barrier_init_fence();
    }
    __syncthreads();
    if constexpr (kInOrder) take_place(static_cast<int>(blockIdx.x));
    key0 = key_tile * Tile::kKeys;
    own_key0 = key0 + 64 * consumer;
    tile0 = in.first_query(key0) / Tile::kQueries;
    tiles = ceil_div(in.queries, Tile::kQueries) - tile0;
    steps = tiles * in.group;
  }

  // *deterministic*: the place of the block with this number. A block waits for the blocks of the
  // keys before. If blocks start in the order of their numbers, it never waits for one that has not
  // started: of all that have not ended the one with the lowest number waits for none, so it ends,
  // and so do all. GPUs so far start blocks in that order, but CUDA's documentation does not
  // promise it. (If each block drew its number from a counter in memory, when it starts, this would
  // hold on every GPU.)
  //
  // The numbers go through some heads of K and V, `abreast` of them: first through their first
  // tiles of keys, then through the second ones, and so on. The more heads there are, the further
  // apart the blocks of a head start. But these heads share the L2 cache. Of the last heads there
  // may be fewer.
  __device__ void take_place(int number) {
    const int key_tiles = ceil_div(in.keys, Tile::kKeys), kv_heads = in.heads / in.group;
    const int first = number / (in.abreast * key_tiles) * in.abreast;
    const int together = min(in.abreast, in.batch * kv_heads - first);
    const int rest = number - first * key_tiles, sequence = first + rest % together;
    key_tile = rest / together;
    kv_head = sequence % kv_heads;
    batch = sequence / kv_heads;
  }

  // The producer. One thread starts the copies; all 32 load logarithms and D, and arrive when they
  // have written them. A query that sees no key, or only logits of -infinity, has a logarithm of
  // -infinity. There, and where there is no query, it becomes +infinity, so that P is 0.
  __device__ void bring() const {
    const int lane = threadIdx.x % 32;
    const uint64_t policy = evict_normal();
    Writer writer(shared.pipeline);
    if (lane == 0) {
      barrier_arrive_expect(&shared.KV_full, sizeof shared.K + sizeof shared.V);
      for (int box = 0; box < Tile::kBoxes; ++box) {
        const int col = kv_head * kWidth + kBoxCols * box;
        tensor_load(shared.K[box].row(0), &maps.K, batch, key0, col, &shared.KV_full, policy);
        tensor_load(shared.V[box].row(0), &maps.V, batch, key0, col, &shared.KV_full, policy);
      }
    }
    for (int step = 0; step < steps; ++step) {
      const int query0 = tile_of(step) * Tile::kQueries, head = head_of(step);
      Stage& stage = writer.wait();  // each lane for itself, as it will write
      Barrier& full = shared.pipeline.full[writer.ring.stage];
      if (lane > 0) {
        writer.ring.advance();
      } else {
        writer.put([&](Stage& to, Barrier* arrived) {
          for (int box = 0; box < Tile::kBoxes; ++box) {
            const int col = head * kWidth + kBoxCols * box;
            tensor_load(to.Q[box].row(0), &maps.Q, batch, query0, col, arrived, policy);
            tensor_load(to.d_out[box].row(0), &maps.d_out, batch, query0, col, arrived, policy);
          }
        });
      }
      // For D, and for the zeros to which parts are added, or the counts: whoever uses them comes
      // after this by the full barrier. Inputs may be copied before, as attention_row_sums was
      // launched as usual.
      if (step == 0) wait_for_previous_kernel();
      const size_t row = (static_cast<size_t>(batch) * in.heads + head) * in.queries + query0;
#pragma unroll
      for (int i = lane; i < Tile::kQueries; i += 32) {
        const bool exists = query0 + i < in.queries;
        const float log_sum = exists ? in.log_sums[row + i] : minus_infinity();
        stage.log_sums[i] = log_sum == minus_infinity() ? -minus_infinity() : log_sum * kLog2E;
        stage.row_sums[i] = exists ? in.row_sums[row + i] : 0;
      }
      barrier_arrive(&full);
    }
  }

  // product = left right^T: 64 keys of K or V by the rows of Q or d_out.
  __device__ __forceinline__ void start_transposed(Product& product,
                                                   const LeftTile<T, Tile::kKeys>* left,
                                                   const Box<T, Tile::kQueries>* right) const {
#pragma unroll
    for (int box = 0; box < Tile::kBoxes; ++box) {
      product.template start_product<kSlices>(
          left[box].rows(64 * consumer), AlongK<T>{descriptor_a(right[box].elements)}, box > 0);
    }
  }
  // Logits become P; for keys that a query does not see it is 0.
  __device__ __forceinline__ void to_probabilities(Product& P, const Stage& stage,
                                                   int query0) const {
    const float scale = in.scale * kLog2E;
#pragma unroll
    for (int i = 0; i < P.size(); ++i) {
      P.elements[i] =
          exp2_approximate(fmaf(P.elements[i], scale, -stage.log_sums[Product::col(i)]));
    }
    if (own_key0 + 64 <= in.limit(query0)) return;
#pragma unroll
    for (int i = 0; i < P.size(); ++i) {
      if (own_key0 + Product::row(i) >= in.limit(query0 + Product::col(i))) P.elements[i] = 0;
    }
  }
  // A thread's sums, rounded, are its registers of a left factor, in the same order.
  __device__ __forceinline__ static void to_factor(Factor& factor, const Product& sum) {
#pragma unroll
    for (int i = 0; i < sum.size(); i += 2) {
      factor.slices[i / 8][i / 2 % 4] = pack2<T>(sum.elements[i], sum.elements[i + 1]);
    }
  }
  // dP becomes dS = P (dP - D). With a width of 64 a tile has twice as many queries, and P and dP
  // together 128 registers of a thread. There dS is computed from P as the tensor cores get it,
  // rounded, so that the registers of P are free once it has been rounded.
  __device__ __forceinline__ static void to_gradients(Product& dS, const Product& P,
                                                      const Factor& rounded, const Stage& stage) {
#pragma unroll
    for (int i = 0; i < dS.size(); i += 2) {
      const auto& pair = reinterpret_cast<const T(&)[2]>(rounded.slices[i / 8][i / 2 % 4]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float p = kWidth == 64 ? static_cast<float>(pair[j]) : P.elements[i + j];
        dS.elements[i + j] = p * (dS.elements[i + j] - stage.row_sums[Product::col(i + j)]);
      }
    }
  }
  // Waits until both have computed dQ of two steps ago, so that hand_over() may write where its
  // dS^T was. On a new barrier parity 1 is over: in the first two steps nobody waits.
  __device__ __forceinline__ void wait_for_place(int step) const {
    if constexpr (kLate) barrier_wait(&shared.dS_empty[step % 2], step / 2 % 2 ^ 1);
  }
  // Writes the consumer's rows of dS^T, and tells both.
  __device__ __forceinline__ void hand_over(const Product& dS, int step) const {
#pragma unroll
    for (int box = 0; box < Tile::kQueries / 64; ++box) {
      auto& own = reinterpret_cast<Box<T, 64>&>(*shared.dS[step % 2][box].row(64 * consumer));
      dS.store(own, 64 * box, [&](int i) { return dS.elements[i]; });
    }
    shared_fence();
    if constexpr (kLate) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(&shared.dS_full[step % 2]);
    } else {
      named_barrier(1, 256);  // all of dS^T is there
    }
  }
  // The consumer's part of dQ = dS K, of all 128 keys, when both have handed over dS^T. There is no
  // step -1: then nobody waits, the product reads whatever lies in shared memory, and its result is
  // not used. (Where it was left out in the first step, ptxas serialized all products of the loop.)
  __device__ __forceinline__ void start_part(Sum<64>& part, int step) const {
    const bool halves = kWidth == 64;  // of the queries, or else of the columns
    if (kLate && step >= 0) barrier_wait(&shared.dS_full[step & 1], step / 2 % 2);
    part.template start_product<Tile::kKeys / 16>(
        shared.dS[step & 1][halves ? consumer : 0].across_k(),
        shared.K[halves ? 0 : consumer].across_k(), false);
  }
  __device__ __forceinline__ size_t part_of_step(int step, int of_consumer) const {
    return part_of<T, kWidth>(in, batch, head_of(step), tile_of(step), of_consumer);
  }
  // Adds the part, which has been computed, to its sums in memory: from registers, or by way of
  // shared memory. This consumer does not read dS^T of that step any longer, and says so.
  __device__ __forceinline__ void add_part(const Sum<64>& part, int step) const {
    const int thread = threadIdx.x % 128;
    if (kLate && thread == 0) barrier_arrive(&shared.dS_empty[step % 2]);
    const auto quad = [&](int i) {
      const float* const of = &part.elements[4 * i];
      return make_float4(of[0], of[1], of[2], of[3]);
    };
    if constexpr (kAdding == Adding::by_threads) {
      float4* const to = reinterpret_cast<float4*>(in.dq_sums) +
                         part_of_step(step, consumer) * (Tile::kPartFloats / 4);
#pragma unroll
      for (int i = 0; i < part.size() / 4; ++i) add_quad(to + 128 * i + thread, quad(i));
      return;
    }
    // The copy engine has read the part before.
    if constexpr (kInOrder) {
      barrier_wait(&shared.part_empty[consumer], step % 2 ^ 1);
    } else {
      if (thread == 0) tensor_store_wait_read<0>();
      named_barrier(2 + consumer, 128);
    }
#pragma unroll
    for (int i = 0; i < part.size() / 4; ++i) shared.parts[consumer][i][thread] = quad(i);
    shared_fence();
    if constexpr (kInOrder) {
      __syncwarp();
      if (thread % 32 == 0) barrier_arrive(&shared.part_full[consumer]);
    } else {
      named_barrier(2 + consumer, 128);
      if (thread == 0) {
        // No global_fence(): the zeros were written by a kernel that has ended.
        bulk_add(in.dq_sums + part_of_step(step, consumer) * Tile::kPartFloats,
                 &shared.parts[consumer][0][0].x, sizeof shared.parts[consumer]);
        tensor_store_commit();
      }
    }
  }
  // *deterministic*. When the blocks of a head add to a part of dQ in whatever order they come, the
  // last bits of dQ differ from run to run, as a sum of rounded numbers depends on their order.
  // Here there is a count beside the sums of each part: of the blocks that have added to it. The
  // block of key tile j waits until the count is j, adds, and raises the count when its numbers
  // have arrived in memory. The first block stores in place of adding, so the sums need not begin
  // as zeros.
  //
  // Nobody should wait for long. All blocks of a head go through the tiles of queries in the same
  // order, from the last one on. So a block that begins a little later than the one of the keys
  // before it stays behind it, and always finds its turn come. With a causal mask blocks of later
  // keys end earlier, and are otherwise the same. (Heads of Q that share keys alternate with each
  // tile. If they came one after the other, a block that the mask hides more from would come to the
  // second head too early.) And it is not a consumer that waits: the producer's warpgroup has three
  // more warps, and a thread in each of two of them runs this function.
  //
  // It adds a consumer's parts in order. A count has an acquire where it is read and a release
  // where it is raised. These order what threads do; the fence orders what the copy engine does
  // behind the acquire. A look at the next step's count takes as long as a part on its way to
  // memory: so it is taken meanwhile.
  __device__ void add_in_order(int of_consumer) const {
    const auto& from = shared.parts[of_consumer];
    const auto before = static_cast<unsigned>(key_tile);
    bool is_turn = key_tile == 0;
    for (int step = 0; step < steps; ++step) {
      const size_t part = part_of_step(step, of_consumer);
      float* const to = in.dq_sums + part * Tile::kPartFloats;
      const GridCount count(in.counts[part]);
      barrier_wait(&shared.part_full[of_consumer], step % 2);
      if (!is_turn) wait_for_count(count, before, "the parts of dQ of the keys before");
      global_fence();
      key_tile == 0 ? bulk_store(to, &from[0][0].x, sizeof from)
                    : bulk_add(to, &from[0][0].x, sizeof from);
      tensor_store_commit();
      tensor_store_wait_read<0>();
      barrier_arrive(&shared.part_empty[of_consumer]);
      if (key_tile > 0 && step + 1 < steps) {
        const GridCount next(in.counts[part_of_step(step + 1, of_consumer)]);
        is_turn = next.load(cuda::memory_order_acquire) >= before;
      }
      tensor_store_wait<0>();
      count.fetch_add(1, cuda::memory_order_release);
    }
  }
  // 64 rows of dK or dV, by way of shared memory that nobody reads any longer.
  __device__ __forceinline__ void store(const Sum<kWidth>& sum, float factor,
                                        LeftTile<T, Tile::kKeys>* room,
                                        const CUtensorMap& map) const {
#pragma unroll
    for (int box = 0; box < Tile::kBoxes; ++box) {
      auto& own = reinterpret_cast<Box<T, 64>&>(*room[box].row(64 * consumer));
      Sum<kWidth>::store(own, kBoxCols * box, [&](int i) { return factor * sum.elements[i]; });
    }
    shared_fence();
    named_barrier(2 + consumer, 128);
    if (threadIdx.x % 128 == 0) {
      for (int box = 0; box < Tile::kBoxes; ++box) {
        store_box<true>(&map, batch, own_key0, kv_head * kWidth + kBoxCols * box,
                        room[box].row(64 * consumer), evict_normal());
      }
      tensor_store_commit();
    }
  }
};
#endif

template <typename T, int kWidth, Adding kAdding, bool kLate>
__global__ void __launch_bounds__(HopperTile<kWidth>::kThreads, 1)
    attention_backward_hopper(const __grid_constant__ HopperMaps maps,
                              const __grid_constant__ Operands<T> in) {
#if HOPPER_CODE
  extern __shared__ __align__(1024) char bytes[];
  using Block = HopperBlock<T, kWidth, kAdding, kLate>;
  const Block block(bytes, maps, in);
  auto& shared = block.shared;
  if (warp_of_block() < 4) {
    registers_shrink_to<Block::kProducerRegisters>();
    const int warp = warp_of_block();
    if (warp == 0) block.bring();
    if constexpr (Block::kInOrder) {
      if ((warp == 1 || warp == 2) && elect_one()) block.add_in_order(warp - 1);
    }
  } else {
    registers_grow_to<Block::kConsumerRegisters>();
    const BlockGrid<1, 1> alone;
    Reader reader(shared.pipeline, alone);
    Sum<kWidth> dK = {}, dV = {};
    typename Block::Product P, dS;
    typename Block::Factor P_factor, dS_factor;
    Sum<64> dQ;
    constexpr int kOfQueries = Block::kQueries / 16;
    barrier_wait(&shared.KV_full, 0);
    for (int step = 0; step < block.steps; ++step) {
      auto& stage = reader.wait();
      block.start_transposed(P, shared.K, stage.Q);
      block.start_transposed(dS, shared.V, stage.d_out);
      // A product has a group of wgmma for each box: one for a width of 64, two for 128. So this
      // waits for the logits, and the groups of dP may still run.
      wgmma_wait<Block::kBoxes>();
      block.to_probabilities(P, stage, block.tile_of(step) * Block::kQueries);
      block.to_factor(P_factor, P);
      // across_k() reads the boxes behind this one, too.
      dV.template start_product<kOfQueries>(P_factor, stage.d_out[0].across_k(), true);
      wgmma_wait<1>();  // for dP
      // Not just before hand_over(): there fewer registers are free, and some spilled.
      block.wait_for_place(step);
      block.to_gradients(dS, P, P_factor, stage);
      block.to_factor(dS_factor, dS);
      block.hand_over(dS, step);
      const int dQ_step = kLate ? step - 1 : step;
      block.start_part(dQ, dQ_step);
      dK.template start_product<kOfQueries>(dS_factor, stage.Q[0].across_k(), true);
      wgmma_wait<1>();  // for dQ
      if (dQ_step >= 0) block.add_part(dQ, dQ_step);
      wgmma_wait<0>();
      // One thread's arrival, for all: for these products they have read log_sums and row_sums.
      reader.give_back();
      reader.next();
    }
    if constexpr (kLate) {
      block.start_part(dQ, block.steps - 1);
      wgmma_wait<0>();
      block.add_part(dQ, block.steps - 1);
    }
    // Both have read K: dK takes its place. dV takes that of the 64 rows of V which only this
    // consumer reads.
    named_barrier(1, 256);
    block.store(dV, 1, shared.V, maps.dV);
    block.store(dK, in.scale, shared.K, maps.dK);
    // Shared memory has to live until it is read; the writes are complete when the kernel ends.
    if (threadIdx.x % 128 == 0) tensor_store_wait_read<0>();
  }
#endif
}

// What attention_finish_dq does, from sums in the order of registers. A block owns a part of dQ,
// and a thread what a consumer's thread had of it: of every four numbers two are neighbours in a
// row, and the other two lie 8 rows below. Queries before the first one that sees a key have zeros:
// to their tiles, *deterministic* has not written anything.
template <typename T, int kWidth>
__global__ void __launch_bounds__(128) attention_finish_parts(Operands<T> in) {
  using Part = Sum<64>;
  constexpr int kQueries = HopperTile<kWidth>::kQueries;
  const int part = blockIdx.x % 2, tile = blockIdx.x / 2, head = blockIdx.y, batch = blockIdx.z;
  const int query0 = tile * kQueries + (kWidth == 64 ? 64 * part : 0);
  const int col0 = head * kWidth + (kWidth == 64 ? 0 : 64 * part);
  wait_for_previous_kernel();
  const float4* const from =
      reinterpret_cast<const float4*>(in.dq_sums +
                                      part_of<T, kWidth>(in, batch, head, tile, part) * (64 * 64)) +
      threadIdx.x;
  const bool is_written = tile >= in.first_query(0) / kQueries;
  const size_t rows = static_cast<size_t>(batch) * in.queries;
#pragma unroll
  for (int i = 0; i < Part::size() / 4; ++i) {
    const float4 sums = is_written ? from[128 * i] : float4{};
    const float pairs[2][2] = {{sums.x, sums.y}, {sums.z, sums.w}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = query0 + Part::row(4 * i + 2 * half);
      if (query >= in.queries) continue;
      *reinterpret_cast<unsigned*>(in.dQ + (rows + query) * in.heads * kWidth + col0 +
                                   Part::col(4 * i)) =
          pack2<T>(in.scale * pairs[half][0], in.scale * pairs[half][1]);
    }
  }
}

// -------------------------------------------------------------------------------------------------

template <typename T>
struct Table : AttentionBackwardProblem<T> {
  Table(Lesson& lesson, cublasHandle_t blas, const std::string& name, const AttentionShape& shape,
        std::function<void(double)> report)
      : AttentionBackwardProblem<T>(lesson, blas, name, shape, std::move(report),
                                    lesson.flag("--hard-rows")),
        lesson(lesson),
        row_sums(this->problem.template output<float>(shape.rows())),
        dq_sums(
            this->problem.template output<float>(padded_rows() * static_cast<size_t>(shape.width))),
        counts(this->problem.template output<unsigned>(count_of_counts())) {}

  // The rows of dQ, if each head had whole tiles of 128 queries.
  size_t padded_rows() const {
    const AttentionShape& of = this->shape;
    return static_cast<size_t>(of.batch * of.heads * ceil_div(of.queries, int64_t{128}) * 128);
  }

  // A count for each part of dQ, of which a tile of 64 queries has two.
  size_t count_of_counts() const {
    const AttentionShape& of = this->shape;
    return static_cast<size_t>(of.batch * of.heads * ceil_div(of.queries, int64_t{64}) * 2);
  }

  // For *deterministic*: as many heads side by side as make a block for each multiprocessor, and
  // as let two steps pass from the start of one of a head's blocks to that of the next one. Then
  // as many more as make groups of equal size: in a small last one blocks would wait.
  template <int kQueries>
  int abreast() const {
    const AttentionShape& of = this->shape;
    const int64_t heads = of.batch * of.kv_heads;
    if (lesson.given("--abreast")) {
      return static_cast<int>(std::min(heads, lesson.option("--abreast")));
    }
    const int64_t steps = of.group() * ceil_div(of.queries, kQueries);
    const int64_t most = std::max<int64_t>(1, of.causal ? steps / 2 : steps);
    const int64_t apart = std::min(2 * ceil_div(of.keys, int64_t{128}), most);
    const int64_t least = std::min(heads, ceil_div(int64_t{2} * multiprocessors(), apart));
    return static_cast<int>(ceil_div(heads, heads / least));
  }

  template <int kQueries = 64>
  Operands<T> operands() const {
    const AttentionShape& of = this->shape;
    const auto narrow = [](int64_t value) { return static_cast<int>(value); };
    return {this->Q,
            this->K,
            this->V,
            this->out,
            this->d_out,
            this->log_sums,
            this->dQ,
            this->dK,
            this->dV,
            row_sums,
            dq_sums,
            counts,
            narrow(of.batch),
            narrow(of.queries),
            narrow(of.keys),
            narrow(of.heads),
            narrow(of.group()),
            abreast<kQueries>(),
            of.causal,
            of.scale()};
  }

  // D, and zeros in dq_sums or in the counts.
  template <int kWidth, bool kCounts>
  void start() const {
    const auto rows = static_cast<int64_t>(this->shape.rows());
    const auto zeros = static_cast<int64_t>(kCounts ? count_of_counts() : padded_rows());
    attention_row_sums<T, kWidth, kCounts>
        <<<blocks_for(std::max(rows, zeros), kSumThreads / 32), kSumThreads>>>(operands(), rows,
                                                                               zeros);
  }
  void finish_dq() const {
    const auto count = static_cast<int64_t>(this->shape.query_elements());
    attention_finish_dq<T><<<blocks_for(count, 4 * kSumThreads), kSumThreads>>>(operands(), count);
  }

  template <int kWidth>
  void add_lesson_kernels() const {
    using Mma = MmaTile<T, kWidth>;
    constexpr int kBytes = sizeof(typename Mma::Shared);
    allow_shared_bytes(attention_backward_mma<T, kWidth>, kBytes);
    const AttentionShape& of = this->shape;
    const dim3 grid(blocks_for(of.keys, Mma::kKeys), static_cast<unsigned>(of.kv_heads),
                    static_cast<unsigned>(of.batch));
    row("tensor cores", Role::ours,
        [=, this] {
          start<kWidth, false>();
          attention_backward_mma<T, kWidth><<<grid, Mma::kThreads, kBytes>>>(operands());
          finish_dq();
        })
        .occupies(this->ends() + row_sums.bytes() + dq_sums.bytes())
        .needs(80)
        .needs_shared(kBytes);
    add_hopper<kWidth, Adding::by_threads>("warp specialization");
    add_hopper<kWidth, Adding::by_engine>("reduce-add");
    add_hopper<kWidth, Adding::in_order>("deterministic");
  }

  template <int kWidth, Adding kAdding>
  void add_hopper(const char* name) const {
    using Tile = HopperTile<kWidth>;
    constexpr int kBytes = sizeof(HopperShared<T, kWidth>);
    const AttentionShape& of = this->shape;
    const auto heads = static_cast<unsigned>(of.heads), batch = static_cast<unsigned>(of.batch);
    const unsigned tiles = blocks_for(of.keys, Tile::kKeys),
                   kv_heads = static_cast<unsigned>(of.kv_heads);
    const dim3 grid =
        kAdding == Adding::in_order ? dim3(tiles * kv_heads * batch) : dim3(tiles, kv_heads, batch);
    const dim3 parts(2 * blocks_for(of.queries, Tile::kQueries), heads, batch);
    // With a width of 128 both are the same kernel.
    constexpr bool kMayBeLate = kWidth == 64;
    const int64_t steps = of.group() * blocks_for(of.queries, Tile::kQueries);
    const auto kernel = steps > 4 ? attention_backward_hopper<T, kWidth, kAdding, kMayBeLate>
                                  : attention_backward_hopper<T, kWidth, kAdding, false>;
    allow_shared_bytes(kernel, kBytes);
    row(name, Role::ours,
        [=, this] {
          start<kWidth, kAdding == Adding::in_order>();
          launch_early(kernel, grid, Tile::kThreads, kBytes, maps<kWidth>(),
                       operands<Tile::kQueries>());
          launch_early(attention_finish_parts<T, kWidth>, parts, 128, 0, operands());
        })
        .occupies(this->ends() + row_sums.bytes() + dq_sums.bytes() +
                  (kAdding == Adding::in_order ? counts.bytes() : 0))
        .hopper_only()
        .needs_shared(kBytes);
  }

  // cuDNN's row; or why there is none.
  std::string add_peer() const {
    return add_cudnn(*this, type_of<T>, CudnnAttention::Pass::backward, [=, this] {
      return CudnnAttention::Memory{this->Q,     this->K,  this->V,  this->out, this->log_sums,
                                    this->d_out, this->dQ, this->dK, this->dV};
    });
  }

  // A row, of which --runs is told.
  template <class Launch>
  Kernel& row(const std::string& name, Role role, Launch launch) const {
    Kernel& kernel = this->kernel(name, role, launch);
    if (!lesson.given("--runs")) return kernel;
    const auto collect = kernel.hooks.collect;
    const auto said = std::make_shared<bool>(false);  // it is verified twice
    kernel.hooks.collect = [=, this] {
      if (!*said) compare_runs(name, launch);
      *said = true;
      if (collect) collect();
    };
    return kernel;
  }
  void compare_runs(const std::string& name, const std::function<void()>& launch) const {
    const int64_t runs = lesson.option("--runs");
    const uint64_t first = common::checksum(*this->dQ.storage());
    int64_t others = 0;
    for (int64_t i = 0; i < runs; ++i) {
      launch();
      others += common::checksum(*this->dQ.storage()) != first;
    }
    lesson.note(this->problem.name + ", " + name + ": dQ has other bits in " +
                std::to_string(others) + " of " + std::to_string(runs) + " more runs.");
  }

  template <int kWidth>
  HopperMaps maps() const {
    using Tile = HopperTile<kWidth>;
    const AttentionShape& of = this->shape;
    const auto of_queries = [&](const T* rows) {
      return batch_map<T>(rows, of.batch, of.queries, of.heads * of.width, Tile::kQueries);
    };
    const auto of_keys = [&](const T* rows, unsigned box_rows) {
      return batch_map<T>(rows, of.batch, of.keys, of.kv_heads * of.width, box_rows);
    };
    return {of_queries(this->Q),           of_queries(this->d_out), of_keys(this->K, Tile::kKeys),
            of_keys(this->V, Tile::kKeys), of_keys(this->dK, 64),   of_keys(this->dV, 64)};
  }

 private:
  Lesson& lesson;
  // Workspace of the table.
  Buffer<float> row_sums, dq_sums;
  Buffer<unsigned> counts;
};

template <typename T>
void add_table(Lesson& lesson, cublasHandle_t blas, const std::string& type, AttentionShape shape,
               const std::function<void(double)>& report,
               std::vector<std::shared_ptr<void>>& tables) {
  const std::string name = type + (shape.causal ? " causal" : " full");
  const auto table = std::make_shared<Table<T>>(lesson, blas, name, shape, report);
  tables.push_back(table);
  const auto library = std::make_shared<LibraryAttentionBackward<T>>(blas, *table);
  table->row("library", Role::library, [library] { (*library)(); })
      .occupies(table->ends() + library->workspace_bytes());
  const std::string why = lesson.on_cpu() ? "" : table->add_peer();
  if (!why.empty()) lesson.note("cuDNN is left out: " + why + ".");
  switch (shape.width) {
    case 64:
      table->template add_lesson_kernels<64>();
      break;
    case 128:
      table->template add_lesson_kernels<128>();
      break;
    default:
      lesson.note("These kernels have widths of 64 and 128.");
  }
  table->problem.compare("tensor cores", "library",
                         name + ": without S x T numbers in memory: % times as fast.");
  table->problem.compare("deterministic", "cuDNN",
                         name + ": the last kernel runs at % of cuDNN's rate.");
}

int main(int argc, char** argv) {
  Lesson lesson(
      argc, argv,
      {.name = "bonus_attention_backward",
       .title = "The gradients of attention",
       .n_meaning = "S, queries of a head",
       .n_gpu = 4096,
       .n_cpu = 70,
       // Tiles of keys of which the last is not full; and heads that share keys.
       .options = {{.name = "--keys",
                    .meaning = "T, keys of a head; 0: as many as queries",
                    .value = 0,
                    .cpu = 150},
                   {"--width", "columns of a head, at most 256", 128},
                   {.name = "--heads", .meaning = "of Q; 0: 2048 / width", .value = 0, .cpu = 2},
                   {.name = "--kv-heads",
                    .meaning = "of K and V, a divisor of --heads; 0: as many",
                    .value = 0,
                    .cpu = 1},
                   {.name = "--batch",
                    .meaning = "0: as many as make 16384 queries",
                    .value = 0,
                    .cpu = 1},
                   {"--runs", "launches of each kernel whose bits of dQ are compared", 0},
                   {"--abreast", "heads of K and V side by side in *deterministic*", 0}},
       .flags = {{"--causal", "only the table with the causal mask"},
                 {"--full", "only the table without it"},
                 {"--fp16", "fp16 in place of bf16"},
                 {"--hard-rows", "logits of up to 2^18 scale in most rows"}}});
  AttentionShape shape = attention_shape(lesson);
  Cublas blas;
  std::vector<std::shared_ptr<void>> tables;
  double worst = 0;
  for (const bool causal : {false, true}) {
    if (lesson.flag(causal ? "--full" : "--causal")) continue;
    shape.causal = causal;
    const bool last = causal || lesson.flag("--full");
    const auto report = [&, last](double difference) {
      worst = std::max(worst, difference);
      char text[128];
      snprintf(text, sizeof text,
               "The reference's gradients agree with finite differences to within %.0e.", worst);
      if (last) lesson.note(text);
    };
    lesson.flag("--fp16") ? add_table<half>(lesson, blas, "fp16", shape, report, tables)
                          : add_table<__nv_bfloat16>(lesson, blas, "bf16", shape, report, tables);
  }
  return lesson.run();
}
