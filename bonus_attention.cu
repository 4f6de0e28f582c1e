// Bonus. Attention: softmax(scale Q K^T + mask) V in one launch
//
//     out(b, s, h) = sum over t of p(t) V(b, t, g)        p = softmax over t of the logits
//     logit(t) = scale Q(b, s, h) . K(b, t, g)            scale = 1 / sqrt(width)
//     log_sums(b, h, s) = log of the sum of e^logit(t)    (for the backward pass)
//     Q, out (batch, S, heads, width), K, V (batch, T, kv_heads, width): bf16 or fp16, row-major
//
// Head h of Q reads head g of K and V; where there are fewer of these, neighbouring heads share
// one. With a causal mask query s sees the keys t <= s + T - S only.
//
// It is lesson 9 with a second product. There the probabilities were the result, and had to be
// written, with the right maximum and sum. Here nobody wants them: they are multiplied by V at
// once. So the S x T logits, of which there are far more than of anything else, need not exist. A
// block takes some rows of Q, walks over all of K and V, and keeps what it knows so far of each
// row: the maximum, the sum, and the row of out. When a larger maximum comes, it scales sum and row
// down, and goes on. What moves is Q, K, V and out; what is computed is 4 S T width operations a
// head, half as many with the mask. For long sequences arithmetic is the limit: the tensor cores,
// and the units for exponentials. In a cycle a multiprocessor computes 16 exponentials, and its
// tensor cores do 4096 operations.
//
//     library              cuBLAS, a softmax, cuBLAS: logits and probabilities go through memory
//     cuDNN                NVIDIA's fused kernel, where the library is found: the one to beat
//     rows                 a block a row of Q: fused, easy and slow; every block reads all of K
//                          and V
//     tensor cores         32 rows of Q to a warp, products by mma.sync. The probabilities become
//                          the left factor of the second product in the registers in which the
//                          first has left them
//     warp specialization  the copy engine brings K and V, warpgroups multiply (as in lesson 3)
//     ping-pong            two warpgroups take turns: while one multiplies, the other computes
//                          exponentials
//     overlap              while a consumer computes exponentials, its own results are still
//                          multiplied
//     rare factors         what has been summed up is scaled only where a maximum has grown by a
//                          lot
//     tile scheduler       blocks stay, take the next rows of Q when they are done, and look for a
//                          maximum only where they need one
//
// --causal and --full print one of the two tables. --hard-rows makes the logits of most queries
// hard. Some are as large as 2^17 or 2^18 times the scale, which for a width of 64 is 16384 or
// 32768, and some are -infinity.

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "primitives/approximate.cuh"
#include "primitives/async_copy.cuh"
#include "primitives/fragments.cuh"
#include "primitives/hopper/pipeline.cuh"
#include "primitives/launch.h"
#include "primitives/row_parts.cuh"
#include "problems/attention/attention.h"
#include "problems/attention/cudnn.h"
#include "problems/attention/library.cuh"

using namespace problems;
using namespace primitives;

// What a kernel gets. group: how many heads of Q share one of K and V.
template <typename T>
struct Operands {
  const T *Q, *K, *V;
  T* out;
  float* log_sums;
  int queries, keys, heads, group;
  bool causal;
  float scale;

  // The first key that query s does not see.
  __device__ int limit(int s) const {
    return causal ? max(0, min(keys, s + keys - queries + 1)) : keys;
  }
};

// ---- rows ---------------------------------------------------------------------------------------

// A block owns query blockIdx.x of head blockIdx.y of batch blockIdx.z. Each of its four warps
// takes every fourth key. A lane has kWidth / 32 neighbouring columns of the rows of Q, K, V and
// out. A warp keeps the largest logit so far, the sum of the exponentials relative to it, and the
// row of out. In the end the warps' parts of the row are merged, as in lesson 9: each is scaled to
// the largest maximum. Every block reads all of its head's K and V: one operation for every byte.
//
// (Most words from primitives/ are those of lessons 7 and 8. lanes_sum<32> adds up a number over 32
// neighbouring lanes, and lanes_max<4> finds the largest one in 4 neighbouring lanes.)
constexpr int kRowWarps = 4;

template <typename T, int kWidth>
__global__ void __launch_bounds__(32 * kRowWarps) attention_rows(Operands<T> in) {
  constexpr int kOwn = kWidth / 32;
  __shared__ float largest_of[kRowWarps];
  __shared__ float sum_of[kRowWarps];
  __shared__ float row_of[kRowWarps][kWidth];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int s = blockIdx.x, head = blockIdx.y, batch = blockIdx.z, kv_heads = in.heads / in.group;
  const size_t row = (static_cast<size_t>(batch) * in.queries + s) * in.heads + head;
  const size_t key0 = (static_cast<size_t>(batch) * in.keys * kv_heads + head / in.group) * kWidth;
  float q[kOwn], out[kOwn] = {}, largest = minus_infinity(), sum = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    q[i] = static_cast<float>(in.Q[row * kWidth + kOwn * lane + i]) * in.scale;
  }

  for (int t = warp; t < in.limit(s); t += kRowWarps) {
    const size_t key = key0 + static_cast<size_t>(t) * kv_heads * kWidth + kOwn * lane;
    float logit = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) logit += q[i] * static_cast<float>(in.K[key + i]);
    logit = lanes_sum<32>(logit);
    if (logit == minus_infinity()) continue;
    const float most = fmaxf(largest, logit), factor = expf(largest - most);
    const float p = expf(logit - most);
    sum = sum * factor + p;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) out[i] = out[i] * factor + p * static_cast<float>(in.V[key + i]);
    largest = most;
  }

  if (lane == 0) largest_of[warp] = largest, sum_of[warp] = sum;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) row_of[warp][kOwn * lane + i] = out[i];
  __syncthreads();
  for (int w = 0; w < kRowWarps; ++w) largest = fmaxf(largest, largest_of[w]);
  const bool any = largest > minus_infinity();
  float weights[kRowWarps], all = 0;
#pragma unroll
  for (int w = 0; w < kRowWarps; ++w) {
    weights[w] = any ? expf(largest_of[w] - largest) : 0;
    all += weights[w] * sum_of[w];
  }
  for (int i = threadIdx.x; i < kWidth; i += 32 * kRowWarps) {
    float result = 0;
#pragma unroll
    for (int w = 0; w < kRowWarps; ++w) result += weights[w] * row_of[w][i];
    in.out[row * kWidth + i] = T(any ? result / all : 0);
  }
  if (threadIdx.x == 0) {
    in.log_sums[(static_cast<size_t>(batch) * in.heads + head) * in.queries + s] =
        any ? largest + logf(all) : minus_infinity();
  }
}

// ---- tensor cores -------------------------------------------------------------------------------

constexpr float kLog2E = 1.44269504088896340736f, kLn2 = 0.693147180559945309417f;

// What a thread knows of its two rows of each 16 (lesson 3's picture of fragments). Element i of a
// sum is in the first of these rows where i / 2 is even, and in the second one, 8 rows below, where
// it is odd. The four lanes of a quad share a row.
struct OnlineRows {
  float largest[2] = {minus_infinity(), minus_infinity()}, sum[2] = {};

  // Turns a tile's logits into exponentials relative to the new maximum. What has been summed up
  // before must be multiplied by `factor`. `scale` is the scale of the logits times log2(e), since
  // the hardware computes 2^x and not e^x. A row of which nothing but -infinity has come subtracts
  // nothing: base_of(maximum) is 0 there, and else the maximum.
  //
  // kRarely: the exponentials stay relative to the old maximum, and there is no factor, as long as
  // no exponential of the warp's rows would exceed 2^8. (The 8 in the code is this exponent.)
  // Exponentials of up to 2^8 are as exact as those of up to 1. Returns whether there is a factor.
  template <bool kRarely = false, int kCount>
  __device__ __forceinline__ bool exponentials(float (&logits)[kCount], float scale,
                                               float (&factor)[2]) {
    float most[2] = {largest[0], largest[1]}, from[2];
#pragma unroll
    for (int i = 0; i < kCount; ++i) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], logits[i]);
    most[0] = lanes_max<4>(most[0]);
    most[1] = lanes_max<4>(most[1]);
    const bool grows = (most[0] - largest[0]) * scale > 8 || (most[1] - largest[1]) * scale > 8;
    const bool rescale = !kRarely || __any_sync(kAllLanes, grows);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!rescale) most[r] = largest[r];
      from[r] = base_of(most[r]);
      if (rescale) {
        factor[r] = exp2_approximate((largest[r] - from[r]) * scale);
        largest[r] = most[r];
        sum[r] *= factor[r];
      }
    }
    // (Skip this at first.) One FMA (a multiply-add that rounds once) makes an exponent: logit *
    // scale - base. `base` has been rounded before, and logit * scale has not. So all exponents of
    // a row are off by the rounding error of `base`. Up to 256 that is at most 2^-17, less than the
    // rounding of a probability to fp16. Beyond it the maximum is subtracted from the logits first,
    // without a rounding error. Else the exponents of a row whose maximum is 2^33 would be off by
    // 256, and its result would be NaN.
    float base[2] = {from[0] * scale, from[1] * scale};
    if (fabsf(base[0]) > 256 || fabsf(base[1]) > 256) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) logits[i] -= from[i / 2 % 2];
      base[0] = base[1] = 0;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      logits[i] = exp2_approximate(fmaf(logits[i], scale, -base[i / 2 % 2]));
      sum[i / 2 % 2] += logits[i];
    }
    return rescale;
  }

  // 1 / sum of each row, 0 for a row that sees no key; and the logarithms.
  __device__ __forceinline__ void finish(float scale, float (&factor)[2], float (&log_sum)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = lanes_sum<4>(sum[r]);
      factor[r] = sum[r] > 0 ? 1 / sum[r] : 0;
      log_sum[r] = largest[r] * scale * kLn2 + logf(sum[r]);
    }
  }
};

// -infinity for the logits of keys that a row does not see. `key` is the tile's first key.
template <int kCount>
__device__ __forceinline__ void mask(float (&logits)[kCount], int key, const int (&limit)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int t = key + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    if (t >= limit[i / 2 % 2]) logits[i] = minus_infinity();
  }
}

// A block owns 128 rows of Q of a head, and all of their out; K and V come 64 keys at a time, the
// next ones while these are multiplied (lesson 3's copies_ahead). A warp's rows are its own: no
// warp waits for another one's maximum or sum. It has 32 of them, two matrices of 16, so that each
// fragment of K and of V, once loaded, serves two products. (For d = 256 it has 16: the sums of
// more do not fit into its registers.) And what a lane holds of 16 x 16 logits, as mma.sync leaves
// them, is what it has to hold of them as a left factor: the probabilities never leave the
// registers.
//
// The last keys come first. With a causal mask the last tiles are those that the mask cuts, so all
// tiles that come later are whole, and need no check.
//
// The words, from primitives/:
//     copy_swizzled                 starts the copies of a tile to shared memory, where it lies as
//                                   lesson 3's *swizzled tiles* has it
//     load_left, load_right         load fragments of a left and of a right factor by ldmatrix;
//                                   load_right_transposed those of K^T from a tile of K
//     add_product                   multiplies such fragments, and adds to sums: many mma.sync
//     pack2<T>(left, right)         two numbers, rounded to T, in one register
//     store_results                 stores a warp's results by way of shared memory, in whole rows;
//                                   pair_of finds two neighbours among a lane's results
template <int kWidth>
struct MmaTile {
  static constexpr int kWarps = kWidth == 256 ? 8 : 4, kKeys = 64, kRows = 128;
  static constexpr int kCount = kRows / kWarps / 16;  // matrices of 16 rows that a warp has
  static constexpr int kThreads = 32 * kWarps, kBytes = (kRows + 4 * kKeys) * kWidth * 2;
};

template <typename T, int kWidth>
__global__ void __launch_bounds__(MmaTile<kWidth>::kThreads) attention_mma(Operands<T> in) {
  using Tile = MmaTile<kWidth>;
  constexpr int kRows = Tile::kRows, kKeys = Tile::kKeys, kThreads = Tile::kThreads;
  constexpr int kCount = Tile::kCount;
  extern __shared__ __align__(128) char shared[];
  T* const Q_tile = reinterpret_cast<T*>(shared);
  T* const stages = Q_tile + kRows * kWidth;  // [2][K and V][kKeys][kWidth]
  const int row0 = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kRows;
  const int head = blockIdx.y, batch = blockIdx.z, kv_heads = in.heads / in.group;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * (16 * kCount);
  // Matrices of S and T rows, of which a head has kWidth columns.
  const int q_cols = in.heads * kWidth, k_cols = kv_heads * kWidth;
  const int q_col = head * kWidth, k_col = head / in.group * kWidth;
  const T* const Q = in.Q + static_cast<size_t>(batch) * in.queries * q_cols;
  const T* const K = in.K + static_cast<size_t>(batch) * in.keys * k_cols;
  const T* const V = in.V + static_cast<size_t>(batch) * in.keys * k_cols;

  const int tiles = ceil_div(in.limit(min(row0 + kRows, in.queries) - 1), kKeys);
  const auto stage_of = [&](int step) { return stages + step % 2 * (2 * kKeys * kWidth); };
  const auto copy_tile = [&](int step) {
    const int key = (tiles - 1 - step) * kKeys;
    if (step == 0) {
      copy_swizzled<kRows, kWidth, kThreads>(Q_tile, Q, row0, q_col, in.queries, q_cols);
    }
    if (key < 0) return;
    T* const stage = stage_of(step);
    copy_swizzled<kKeys, kWidth, kThreads>(stage, K, key, k_col, in.keys, k_cols);
    copy_swizzled<kKeys, kWidth, kThreads>(stage + kKeys * kWidth, V, key, k_col, in.keys, k_cols);
  };
  auto ahead = copies_ahead<2>(copy_tile);

  const int row = row0 + warp_row + lane / 4;  // and every eighth below it: 2 kCount of them
  const float scale = in.scale * kLog2E;
  OnlineRows online[kCount];
  float result[kCount][kWidth / 8][4] = {};
  for (int tile = tiles - 1; tile >= 0; --tile) {
    const T* const K_tile = stage_of(ahead.next());
    const T* const V_tile = K_tile + kKeys * kWidth;
    float logits[kCount][kKeys / 8][4] = {};
#pragma unroll
    for (int k = 0; k < kWidth; k += 16) {
      unsigned q[kCount][4], keys[kKeys / 16][4];
      load_left<kWidth>(q, Q_tile, warp_row, k);
      load_right_transposed<kWidth>(keys, K_tile, k, 0);
      add_product<T>(logits, q, keys);
    }
#pragma unroll
    for (int m = 0; m < kCount; ++m) {
      auto& of_rows = reinterpret_cast<float(&)[kKeys / 2]>(logits[m]);
      if ((tile + 1) * kKeys > in.limit(row0)) {
        mask(of_rows, tile * kKeys, {in.limit(row + 16 * m), in.limit(row + 16 * m + 8)});
      }
      float factor[2];
      online[m].exponentials(of_rows, scale, factor);
#pragma unroll
      for (int j = 0; j < kWidth / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) result[m][j][i] *= factor[i / 2];
      }
    }
#pragma unroll
    for (int k = 0; k < kKeys; k += 16) {
      unsigned probs[kCount][4], values[kWidth / 16][4];
      // Registers 0 and 1 of the left factor are the lane's two rows of the left 8 keys, 2 and 3 of
      // the right 8: the lane has exactly these four pairs of the sums.
#pragma unroll
      for (int i = 0; i < 4 * kCount; ++i) {
        const float* const pair = &logits[i / 4][k / 8 + i / 2 % 2][i % 2 * 2];
        probs[i / 4][i % 4] = pack2<T>(pair[0], pair[1]);
      }
      load_right<kWidth>(values, V_tile, k, 0);
      add_product<T>(result, probs, values);
    }
  }
  if (tiles == 0) ahead.next();  // no keys: but Q must have come before results take its place

  float factor[2 * kCount];
#pragma unroll
  for (int m = 0; m < kCount; ++m) {
    float of_rows[2], log_sum[2];
    online[m].finish(scale, of_rows, log_sum);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = row + 16 * m + 8 * r;
      factor[2 * m + r] = of_rows[r];
      if (lane % 4 == 0 && query < in.queries) {
        in.log_sums[(static_cast<size_t>(batch) * in.heads + head) * in.queries + query] =
            log_sum[r];
      }
    }
  }
  T* const out = in.out + static_cast<size_t>(batch) * in.queries * q_cols;
  store_results<16 * kCount, kWidth>(Q_tile + warp_row * kWidth, out, row0 + warp_row, q_col,
                                     in.queries, q_cols, [&](int i, int j) {
                                       const float2 pair = pair_of(result, i, j);
                                       return pack2<T>(pair.x * factor[i], pair.y * factor[i]);
                                     });
}

// ---- warp specialization ------------------------------------------------------------------------

// A block owns 128 rows of Q of a head. Its producer has the copy engine bring them, and then tiles
// of K and V, one after the other, to the stages of one pipeline: a stage is a tile of K or of V.
// Two consumers, a warpgroup each, have 64 rows of Q each. wgmma reads both right factors as they
// lie in shared memory: K^T, whose columns are rows of K, and V. The probabilities are a left
// factor in registers.
//
// The words are those that lesson 3 has at its kernels for Hopper, and these:
//     LeftFragments                 a left factor in the registers of a warpgroup, in slices of 16
//     kSlices                       64 of what a product sums over are four slices, a wgmma each
//     AlongK                        what wgmma reads of a factor whose rows in memory are summed
//                                   along, as rows of Q and of K are in Q K^T
//     descriptor_a                  the address and layout of such a tile, as wgmma takes it
//     across_k                      what wgmma reads of a factor of which a row in memory is one
//                                   key (one k of the sum), as rows of V are
//     tensor_load                   has two arguments more: which matrix of the batch, and what the
//                                   L2 cache is asked for. evict_normal asks for nothing
template <int kWidth>
struct HopperTile {
  static constexpr int kRows = 128, kKeys = kWidth == 256 ? 64 : 128, kBoxes = kWidth / kBoxCols;
  static constexpr int kStages = kWidth == 64 ? 8 : kWidth == 128 ? 5 : 4;
};

template <typename T, int kWidth>
struct HopperShared : HopperTile<kWidth> {
  using Tile = HopperTile<kWidth>;
  struct Stage {
    Box<T, Tile::kKeys> boxes[Tile::kBoxes];  // of 64 columns each: of K or V
  };
  LeftTile<T, Tile::kRows> Q[Tile::kBoxes];
  Pipeline<Stage, Tile::kStages> pipeline;
  Barrier Q_full, turns[2];
};

// As the copy engine sees them: matrices (S or T, heads * width), one a batch.
struct HopperMaps {
  CUtensorMap Q, K, V;
};

#if HOPPER_CODE

// What the three kernels have in common: a block's place, its producer, and the parts of a step.
template <typename T, int kWidth>
struct HopperBlock : HopperTile<kWidth> {
  using Shared = HopperShared<T, kWidth>;
  using Stage = typename Shared::Stage;
  using Logits = Sum<HopperTile<kWidth>::kKeys>;
  using Probs = LeftFragments<T, HopperTile<kWidth>::kKeys / 16>;
  Shared& shared;
  const Operands<T>& in;
  int row0 = static_cast<int>(gridDim.x - 1 - blockIdx.x) * 128;  // rows with most keys first
  int head = blockIdx.y, batch = blockIdx.z, consumer = static_cast<int>(threadIdx.x) / 128 - 1;
  int tiles = ceil_div(in.limit(min(row0 + 128, in.queries) - 1), HopperTile<kWidth>::kKeys);
  float scale = in.scale * kLog2E;

  __device__ HopperBlock(char* bytes, const Operands<T>& operands)
      : shared(*reinterpret_cast<Shared*>(bytes)), in(operands) {
    if (threadIdx.x == 0) {
      prepare(shared.pipeline, 2);
      barrier_init(&shared.Q_full, 1);
      for (Barrier& turn : shared.turns) barrier_init(&turn, 1);
      barrier_init_fence();
    }
    __syncthreads();
  }

  // The producer's thread. The order is K, V, K, V; with kAhead K, K, V, K, V, ..., V.
  template <bool kAhead>
  __device__ void bring(const HopperMaps& maps) const {
    const uint64_t policy = evict_normal();  // tensor_load() wants a hint for the L2 cache: none
    barrier_arrive_expect(&shared.Q_full, sizeof shared.Q);
    for (int box = 0; box < this->kBoxes; ++box) {
      tensor_load(shared.Q[box].row(0), &maps.Q, batch, row0, head * kWidth + kBoxCols * box,
                  &shared.Q_full, policy);
    }
    Writer writer(shared.pipeline);
    const auto put = [&](const CUtensorMap& map, int tile) {
      if (tile < 0) return;
      writer.put([&](Stage& stage, Barrier* arrived) {
        for (int box = 0; box < this->kBoxes; ++box) {
          tensor_load(stage.boxes[box].row(0), &map, batch, tile * this->kKeys,
                      head / in.group * kWidth + kBoxCols * box, arrived, policy);
        }
      });
    };
    if (kAhead) put(maps.K, tiles - 1);
    for (int tile = tiles - 1; tile >= 0; --tile) {
      put(maps.K, kAhead ? tile - 1 : tile);
      put(maps.V, tile);
    }
  }

  // logits = Q K^T of the consumer's 64 rows. A tile of K has the shape of a left factor: its rows
  // are keys, and along a row are the features over which the product sums. A row of K is a column
  // of K^T, so as the right factor the tile is read along its rows, as left factors are.
  __device__ __forceinline__ void start_logits(Logits& logits, const Stage& K) const {
#pragma unroll
    for (int box = 0; box < this->kBoxes; ++box) {
      logits.template start_product<kSlices>(shared.Q[box].rows(64 * consumer),
                                             AlongK<T>{descriptor_a(K.boxes[box].elements)},
                                             box > 0);
    }
  }
  // result += probs V
  __device__ __forceinline__ void start_result(Sum<kWidth>& result, const Probs& probs,
                                               const Stage& V) const {
    result.template start_product<HopperTile<kWidth>::kKeys / 16>(probs, V.boxes[0].across_k(),
                                                                  true);
  }
  // Logits become exponentials; those of keys that a row does not see become 0.
  template <bool kRarely = false>
  __device__ __forceinline__ bool exponentials(OnlineRows& online, Logits& logits, int tile,
                                               float (&factor)[2]) const {
    const int row = row0 + 64 * consumer, own = row + Logits::row(0);
    if ((tile + 1) * this->kKeys > in.limit(row)) {
      const int limit[2] = {in.limit(own), in.limit(own + 8)};
      mask(logits.elements, tile * this->kKeys, limit);
    }
    return online.exponentials<kRarely>(logits.elements, scale, factor);
  }
  // Exponentials, rounded, are the left factor where they are: element for element.
  __device__ __forceinline__ static void to_factor(Probs& probs, const Logits& logits) {
#pragma unroll
    for (int k = 0; k < HopperTile<kWidth>::kKeys / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = &logits.elements[8 * k + 2 * i];
        probs.slices[k][i] = pack2<T>(pair[0], pair[1]);
      }
    }
  }
  __device__ __forceinline__ static void scale_rows(Sum<kWidth>& result, const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < result.size(); ++i) result.elements[i] *= factor[i / 2 % 2];
  }
  // Two neighbours of a row at a time, straight from the registers.
  __device__ __forceinline__ void store(OnlineRows& online, Sum<kWidth>& result) const {
    float factor[2], log_sum[2];
    online.finish(scale, factor, log_sum);
    const int row = row0 + 64 * consumer;
#pragma unroll
    for (int i = 0; i < result.size(); i += 2) {
      const int s = row + result.row(i), r = i / 2 % 2;
      if (s >= in.queries) continue;
      const size_t place = (static_cast<size_t>(batch) * in.queries + s) * in.heads + head;
      *reinterpret_cast<unsigned*>(in.out + place * kWidth + result.col(i)) =
          pack2<T>(result.elements[i] * factor[r], result.elements[i + 1] * factor[r]);
      // The logarithm of a row's sum: once for each of the thread's two rows (i = 0 and 2), by one
      // of the four lanes that have the row.
      if (i < 4 && threadIdx.x % 4 == 0) {
        in.log_sums[(static_cast<size_t>(batch) * in.heads + head) * in.queries + s] = log_sum[r];
      }
    }
  }
};
#endif

// A step is four things, one after the other: logits, exponentials, the factor for what has been
// summed up so far, and results. While a consumer computes exponentials it has no products under
// way; whether the other one has is left to chance. (reader.wait(), next() and give_back() are a
// take() in three parts: wait until the next stage is full, go on to the one after it, say that it
// is empty. reader.ring.stage is the stage's number.)
template <typename T, int kWidth>
__global__ void __launch_bounds__(384, 1) attention_hopper(const __grid_constant__ HopperMaps maps,
                                                           const __grid_constant__ Operands<T> in) {
#if HOPPER_CODE
  extern __shared__ __align__(1024) char bytes[];
  using Block = HopperBlock<T, kWidth>;
  const Block block(bytes, in);
  if (warp_of_block() < 4) {
    registers_shrink_to<24>();
    if (warp_of_block() == 0 && elect_one()) block.template bring<false>(maps);
  } else {
    registers_grow_to<240>();
    const BlockGrid<1, 1> alone;
    Reader reader(block.shared.pipeline, alone);
    OnlineRows online;
    Sum<kWidth> result = {};
    typename Block::Logits logits;
    typename Block::Probs probs;
    float factor[2];
    barrier_wait(&block.shared.Q_full, 0);
    for (int tile = block.tiles - 1; tile >= 0; --tile) {
      block.start_logits(logits, reader.wait());
      wgmma_wait<0>();
      reader.give_back();
      reader.next();
      block.exponentials(online, logits, tile, factor);
      block.scale_rows(result, factor);
      block.to_factor(probs, logits);
      block.start_result(result, probs, reader.wait());
      wgmma_wait<0>();
      reader.give_back();
      reader.next();
    }
    block.store(online, result);
  }
#endif
}

// ---- ping-pong ----------------------------------------------------------------------------------

// The tensor cores are idle while all warpgroups compute exponentials, and two that have begun at
// the same time do so together. Here the two consumers take turns:
//
//     consumer 0     products        exponentials    products        exponentials
//     consumer 1     waits           products        exponentials    products
//
// In its turn a consumer starts the results of this tile and the logits of the next one.

#if HOPPER_CODE
// Whose turn it is to start products. Each consumer has a barrier in shared memory at which it
// waits for its turn; who passes the turn on arrives at the other one's.
struct Turn {
  Barrier (&barriers)[2];
  int consumer;
  // A new barrier lets parity 1 pass at once: so consumer 0 begins, and consumer 1 waits for it.
  int parity = consumer == 0 ? 1 : 0;

  __device__ __forceinline__ void wait() {
    barrier_wait(&barriers[consumer], parity);
    parity ^= 1;
  }
  __device__ __forceinline__ void pass() const {
    if (threadIdx.x % 128 == 0) barrier_arrive(&barriers[1 - consumer]);
  }
};
#endif

// A step begins with logits that are there. Both products of a turn run at the same time, so two
// stages are in use: V's of this tile, and K's of the next one.
template <typename T, int kWidth>
__global__ void __launch_bounds__(384, 1)
    attention_ping_pong(const __grid_constant__ HopperMaps maps,
                        const __grid_constant__ Operands<T> in) {
#if HOPPER_CODE
  extern __shared__ __align__(1024) char bytes[];
  using Block = HopperBlock<T, kWidth>;
  const Block block(bytes, in);
  if (warp_of_block() < 4) {
    registers_shrink_to<24>();
    if (warp_of_block() == 0 && elect_one()) block.template bring<false>(maps);
  } else {
    registers_grow_to<240>();
    const BlockGrid<1, 1> alone;
    Reader reader(block.shared.pipeline, alone);
    OnlineRows online;
    Sum<kWidth> result = {};
    typename Block::Logits logits;
    typename Block::Probs probs;
    float factor[2];
    Turn turn{block.shared.turns, block.consumer};
    barrier_wait(&block.shared.Q_full, 0);
    if (block.tiles > 0) {
      turn.wait();
      block.start_logits(logits, reader.wait());
      turn.pass();
      wgmma_wait<0>();
      reader.give_back();
      reader.next();
      for (int tile = block.tiles - 1; tile > 0; --tile) {
        block.exponentials(online, logits, tile, factor);
        block.scale_rows(result, factor);
        block.to_factor(probs, logits);
        turn.wait();
        block.start_result(result, probs, reader.wait());
        const int V = reader.ring.stage;
        reader.next();
        block.start_logits(logits, reader.wait());
        turn.pass();
        wgmma_wait<0>();
        reader.give_back(V);
        reader.give_back();
        reader.next();
      }
      block.exponentials(online, logits, 0, factor);
      block.scale_rows(result, factor);
      block.to_factor(probs, logits);
      // Nothing comes after the last results, and both consumers have the same number of tiles:
      // nobody waits for a turn any more.
      block.start_result(result, probs, reader.wait());
      wgmma_wait<0>();
    }
    block.store(online, result);
  }
#endif
}

// ---- overlap ------------------------------------------------------------------------------------

// In *ping-pong* a consumer waits for both of its products before it computes. Here it starts the
// logits of the next tile first, and then the results of this one. wgmma finishes in order, so the
// logits are there first, and their exponentials are computed while the results are still being
// multiplied. With tile 5 as this tile and tile 4 as the next one:
//
//     tensor cores     logits of 4     results of 5
//     consumer                         exponentials of 4     scales the results
//
// So a step begins with exponentials of this tile in `probs`, the left factor, and ends with those
// of the next tile. If the next tile has a larger maximum, the rows of the results have to be
// multiplied by a number, `factor`. But wgmma still adds to the registers of the results. So this
// consumer first waits until wgmma is done, and then multiplies them. Meanwhile it has no products
// under way. By itself the new order gains little.
//
// *rare factors*, kRarely, multiplies them in few tiles only: see OnlineRows.
template <typename T, int kWidth, bool kRarely>
__global__ void __launch_bounds__(384, 1)
    attention_overlap(const __grid_constant__ HopperMaps maps,
                      const __grid_constant__ Operands<T> in) {
#if HOPPER_CODE
  extern __shared__ __align__(1024) char bytes[];
  using Block = HopperBlock<T, kWidth>;
  const Block block(bytes, in);
  if (warp_of_block() < 4) {
    registers_shrink_to<24>();
    if (warp_of_block() == 0 && elect_one()) block.template bring<true>(maps);
  } else {
    registers_grow_to<240>();
    const BlockGrid<1, 1> alone;
    Reader reader(block.shared.pipeline, alone);
    OnlineRows online;
    Sum<kWidth> result = {};
    typename Block::Logits logits;
    typename Block::Probs probs;
    float factor[2];
    Turn turn{block.shared.turns, block.consumer};
    barrier_wait(&block.shared.Q_full, 0);
    if (block.tiles > 0) {
      turn.wait();
      block.start_logits(logits, reader.wait());
      turn.pass();
      wgmma_wait<0>();
      reader.give_back();
      reader.next();
      block.exponentials(online, logits, block.tiles - 1, factor);
      block.to_factor(probs, logits);
      for (int tile = block.tiles - 2; tile >= 0; --tile) {
        turn.wait();
        block.start_logits(logits, reader.wait());
        const int K = reader.ring.stage;
        reader.next();
        block.start_result(result, probs, reader.wait());
        turn.pass();
        wgmma_wait<1>();  // the logits are there
        reader.give_back(K);
        const bool rescale = block.template exponentials<kRarely>(online, logits, tile, factor);
        wgmma_wait<0>();  // and the results
        reader.give_back();
        reader.next();
        if (rescale) block.scale_rows(result, factor);
        block.to_factor(probs, logits);
      }
      block.start_result(result, probs, reader.wait());
      wgmma_wait<0>();
    }
    block.store(online, result);
  }
#endif
}

// ---- tile scheduler -----------------------------------------------------------------------------

// What is left? A block of *overlap* waits for its first tiles, and its tensor cores wait again
// when it stores its last results. And with a causal mask some blocks have more to do than others.
// What is new:
//
//   - Blocks stay, one on each multiprocessor. A work tile is some rows of Q of one head. When the
//     producer has ordered all tiles of one, it takes the number of the next one from a counter in
//     memory: that is the tile scheduler.
//   - There are two places for rows of Q. So the first logits of the next work tile are multiplied
//     beside the last results of this one. The copy engine stores results from the place where
//     their rows of Q were, and a warp of the producer's warpgroup waits for it.
//   - The exponentials take fewer instructions, since hardly any tile looks for a maximum.
//
// Which number a row's exponentials are relative to does not matter for the result, as long as
// nothing overflows and not all of a row underflows. So it is the maximum of the first tile in
// which a row has logits, the row's `base`. Later tiles are not compared with it. If an exponential
// was too large, the sum shows it. Then (hardly ever) a new maximum is needed. But exponentials
// have taken the place of the logits, so the logits are multiplied once more.
struct LazyRows {
  float base[2] = {NAN, NAN};  // in logits times scale; NaN before the first logit
  float sum[2] = {};           // of the thread's own exponentials

  // Makes exponentials of a tile's logits, relative to the base that there is. Returns whether that
  // was right for all rows of the warp. If not, the logits are lost, and the sums are as before.
  // `most` is how large the sum may become.
  template <int kCount>
  __device__ __forceinline__ bool try_exponentials(float (&logits)[kCount], float scale,
                                                   float most) {
    float more[2];
    sum_of_exponentials(more, logits, scale);
    const bool right = more[0] <= most && more[1] <= most;  // false for NaN, too
    if (!__all_sync(kAllLanes, right)) return false;
    sum[0] += more[0];
    sum[1] += more[1];
    return true;
  }

  // The same with a base that is large enough for these logits, too. What has been summed up for a
  // row must be multiplied by `factor`.
  template <int kCount>
  __device__ __forceinline__ void exponentials(float (&logits)[kCount], float scale,
                                               float (&factor)[2]) {
    float most[2] = {logits[0], logits[2]}, more[2];
#pragma unroll
    for (int i = 1; i < kCount; ++i) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], logits[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most[r] = lanes_max<4>(most[r]) * scale;
      const float to = most[r] == minus_infinity() ? base[r] : fmaxf(most[r], base[r]);
      factor[r] = isnan(base[r]) ? 0 : exp2_approximate(base[r] - to);
      sum[r] *= factor[r];
      base[r] = to;
    }
    sum_of_exponentials(more, logits, scale);
    // Where all of a row was -infinity so far its exponentials are 0, not NaN.
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] += isnan(base[r]) ? 0 : more[r];
    if (isnan(base[0]) || isnan(base[1])) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (isnan(base[i / 2 % 2])) logits[i] = 0;
      }
    }
  }

  // 1 / sum of each row, 0 for a row that sees no key; and the logarithms.
  __device__ __forceinline__ void finish(float (&factor)[2], float (&log_sum)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = lanes_sum<4>(sum[r]);
      const bool none = isnan(base[r]);
      factor[r] = none ? 0 : 1 / sum[r];
      log_sum[r] = none ? minus_infinity() : fmaf(base[r], kLn2, logf(sum[r]));
    }
  }

 private:
  template <int kCount>
  __device__ __forceinline__ void sum_of_exponentials(float (&all)[2], float (&logits)[kCount],
                                                      float scale) const {
    float more[2][2] = {};  // two chains for each row: a chain waits for each of its additions
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      logits[i] = exp2_approximate(fmaf(logits[i], scale, -base[i / 2 % 2]));
      more[i / 2 % 2][i / 4 % 2] += logits[i];
    }
    all[0] = more[0][0] + more[0][1];
    all[1] = more[1][0] + more[1][1];
  }
};

// Far below what T, and sums in fp32, can hold.
template <typename T>
constexpr float kMostExponentials = std::is_same_v<T, half> ? 0x1p14f : 0x1p64f;

// For d = 64 three consumers share what comes of K and V. For d = 256 there are no turns.
template <int kWidth>
struct StayTile {
  static constexpr int kConsumers = kWidth == 64 ? 3 : 2, kKeys = kWidth == 256 ? 64 : 128;
  static constexpr int kStages = kWidth == 64 ? 8 : kWidth == 128 ? 5 : 3, kRowStages = 2;
  static constexpr int kRows = 64 * kConsumers, kThreads = 128 * (1 + kConsumers);
  static constexpr int kBoxes = kWidth / kBoxCols;
  static constexpr bool kTurns = kWidth < 256;
};

// A work tile: rows of Q of a head, and how many tiles of keys they see, at least one. The last
// tile is taken first. tiles < 0: there is no more work.
struct Piece {
  int row, head, batch, tiles;
};

// Heads are taken in `sections` sections of `section` heads, and then in a last one that has all
// heads which are left. In a section the rows with the most keys come first. For example, with a
// causal mask, 5 heads, 3 tiles of rows in each, and 1 section of 2 heads:
//
//     number           0  1  2  3  4  5    6  7  8  9 10 11 12 13 14
//     head             0  1  0  1  0  1    2  3  4  2  3  4  2  3  4
//     tile of rows     2  2  1  1  0  0    2  2  2  1  1  1  0  0  0
//
// next[0] counts the work tiles that were taken beside the first one of each block, next[1] the
// blocks that are done. Both are 0 before the launch and after it.
struct TileScheduler {
  int row_tiles, heads, section, sections;  // heads: of all batches
  unsigned total;
  unsigned* next;

  template <int kWidth, typename T>
  __device__ Piece piece(const Operands<T>& in, unsigned number) const {
    using Tile = StayTile<kWidth>;
    if (number >= total) return {0, 0, 0, -1};
    const unsigned of_section = section * row_tiles;
    const unsigned own = min(number / of_section, static_cast<unsigned>(sections));
    const unsigned within = number - own * of_section, head = own * section;
    const unsigned count = own < static_cast<unsigned>(sections) ? section : heads - head;
    const unsigned tile = in.causal ? row_tiles - 1 - within / count : within / count;
    const int row = static_cast<int>(tile) * Tile::kRows;
    const int sequence = static_cast<int>(head + within % count);
    const int seen = in.limit(min(row + Tile::kRows, in.queries) - 1);
    return {row, sequence % in.heads, sequence / in.heads, max(1, ceil_div(seen, Tile::kKeys))};
  }
};

template <typename T, int kWidth>
struct StayShared : StayTile<kWidth> {
  using Tile = StayTile<kWidth>;
  LeftTile<T, Tile::kRows> q[Tile::kRowStages][Tile::kBoxes];
  Box<T, Tile::kKeys> kv[Tile::kStages][Tile::kBoxes];  // of K or V
  Piece pieces[Tile::kRowStages];
  StageBarriers<Tile::kRowStages> rows;  // of q and pieces
  StageBarriers<Tile::kStages> keys;
  Barrier results[Tile::kRowStages][Tile::kConsumers];  // they are where their rows of Q were
  Barrier turns[Tile::kConsumers];
};

struct StayMaps {
  CUtensorMap Q, K, V, out;
};

#if HOPPER_CODE
// Each warp of a consumer gives a stage back for itself: four arrivals.
struct EachWarp {
  static constexpr int kReleases = 4;
  __device__ static void release(Barrier& empty) {
    if (threadIdx.x % 32 == 0) barrier_arrive(&empty);
  }
};

// Turn, for any number of consumers, whose warps pass it on for themselves.
template <int kWidth>
struct Turns {
  using Tile = StayTile<kWidth>;
  Barrier* barriers;
  int consumer, parity = consumer == 0 ? 1 : 0;

  __device__ __forceinline__ void wait() {
    if constexpr (Tile::kTurns) {
      barrier_wait(&barriers[consumer], parity);
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void pass() const {
    if constexpr (Tile::kTurns) EachWarp::release(barriers[(consumer + 1) % Tile::kConsumers]);
  }
};

// The producer's thread. K of each tile comes before V of the tile before it, also from one work
// tile to the next.
template <typename T, int kWidth>
__device__ __forceinline__ void bring_pieces(StayShared<T, kWidth>& shared, const StayMaps& maps,
                                             const Operands<T>& in,
                                             const TileScheduler& scheduler) {
  using Tile = StayTile<kWidth>;
  Writer rows(shared.rows);
  Writer keys(shared.keys);
  const uint64_t once = evict_first(), of_keys = evict_last();
  const auto put = [&](const CUtensorMap& map, const Piece& piece, int tile) {
    keys.put(sizeof shared.kv[0], [&](int stage, Barrier* arrived) {
#pragma unroll
      for (int box = 0; box < Tile::kBoxes; ++box) {
        tensor_load(shared.kv[stage][box].row(0), &map, piece.batch, tile * Tile::kKeys,
                    piece.head / in.group * kWidth + kBoxCols * box, arrived, of_keys);
      }
    });
  };
  Piece before;
  bool first = true;
  unsigned number = blockIdx.x;
  for (;; first = false) {
    const Piece piece = scheduler.template piece<kWidth>(in, number);
    shared.pieces[rows.wait()] = piece;
    if (piece.tiles < 0) break;
    rows.put(sizeof shared.q[0], [&](int stage, Barrier* arrived) {
#pragma unroll
      for (int box = 0; box < Tile::kBoxes; ++box) {
        tensor_load(shared.q[stage][box].row(0), &maps.Q, piece.batch, piece.row,
                    piece.head * kWidth + kBoxCols * box, arrived, once);
      }
    });
    put(maps.K, piece, piece.tiles - 1);
    if (!first) put(maps.V, before, 0);
    for (int tile = piece.tiles - 1; tile > 0; --tile) {
      put(maps.K, piece, tile - 1);
      put(maps.V, piece, tile);
    }
    before = piece;
    // The next number is taken only now. A block that took it before a long work tile would keep
    // it for all that time, while a block with a short one could begin with it sooner.
    number = gridDim.x + atomicAdd(scheduler.next, 1u);
  }
  put(maps.V, before, 0);
  rows.put(0, [](int, Barrier*) {});  // no more work
  // The block that is done last leaves the counters as they were.
  if (atomicAdd(scheduler.next + 1, 1u) == gridDim.x - 1) {
    scheduler.next[0] = 0;
    scheduler.next[1] = 0;
  }
}

// A thread that has a consumer's results stored. Rows beyond the last are dropped.
template <typename T, int kWidth>
__device__ __forceinline__ void store_pieces(StayShared<T, kWidth>& shared, const StayMaps& maps,
                                             int consumer) {
  using Tile = StayTile<kWidth>;
  for (Ring ring{Tile::kRowStages};; ring.advance()) {
    barrier_wait(&shared.rows.full[ring.stage], ring.parity);
    const Piece piece = shared.pieces[ring.stage];
    if (piece.tiles < 0) return;
    barrier_wait(&shared.results[ring.stage][consumer], ring.parity);
#pragma unroll
    for (int box = 0; box < Tile::kBoxes; ++box) {
      store_box<true>(&maps.out, piece.batch, piece.row + 64 * consumer,
                      piece.head * kWidth + kBoxCols * box,
                      shared.q[ring.stage][box].row(64 * consumer), evict_normal());
    }
    tensor_store_commit();
    tensor_store_wait_read<0>();
    barrier_arrive(&shared.rows.empty[ring.stage]);
  }
}

// What a consumer has of a work tile: 64 rows, from `row` on. `tile` is the tile of keys that comes
// next. Its rows see some key of each tile below `end`. The other tiles are hidden: the mask hides
// all of their keys from these rows.
struct ConsumerPiece {
  int stage, row, tile, end;
  int whole;     // tiles below it have no key that one of the rows does not see
  int limit[2];  // of the thread's two rows
};

template <typename T, int kWidth>
struct StayConsumer {
  using Tile = StayTile<kWidth>;
  static constexpr int kKeys = Tile::kKeys;
  using Logits = Sum<kKeys>;
  using Probs = LeftFragments<T, kKeys / 16>;
  StayShared<T, kWidth>& shared;
  const Operands<T>& in;
  int consumer;
  float scale = in.scale * kLog2E;

  // The same number in all lanes, which the compiler then knows.
  __device__ static int uniform(int number) { return __shfl_sync(kAllLanes, number, 0); }

  __device__ __forceinline__ ConsumerPiece piece_at(int stage) const {
    ConsumerPiece own;
    own.stage = stage;
    own.row = uniform(shared.pieces[stage].row) + 64 * consumer;
#pragma unroll
    for (int r = 0; r < 2; ++r) own.limit[r] = in.limit(own.row + Sum<8>::row(2 * r));
    own.whole = in.limit(own.row) / kKeys;
    own.tile = uniform(shared.pieces[stage].tiles) - 1;
    const int seen = ceil_div(in.limit(min(in.queries - 1, own.row + 63)), kKeys);
    own.end = own.row < in.queries ? max(1, seen) : 0;
    return own;
  }
  __device__ __forceinline__ void start_logits(Logits& logits, int stage, int k) const {
#pragma unroll
    for (int box = 0; box < Tile::kBoxes; ++box) {
      logits.template start_product<kSlices>(shared.q[stage][box].rows(64 * consumer),
                                             AlongK<T>{descriptor_a(shared.kv[k][box].elements)},
                                             box > 0);
    }
  }
  __device__ __forceinline__ void start_result(Sum<kWidth>& result, const Probs& probs, int v,
                                               bool add) const {
    result.template start_product<kKeys / 16>(probs, shared.kv[v][0].across_k(), add);
  }
  // The logits of start_logits() once more. By mma.sync a warp can do that alone, and wgmma would
  // need all four warps of the warpgroup.
  __device__ __noinline__ void multiply_again(Logits& logits, int stage, int k) const {
    const int row = 64 * consumer + threadIdx.x % 128 / 32 * 16;
    float sum[1][kKeys / 8][4] = {};
    for (int box = 0; box < Tile::kBoxes; ++box) {
      for (int i = 0; i < kBoxCols; i += 16) {
        unsigned q[1][4], keys[kKeys / 16][4];
        load_left<kBoxCols>(q, shared.q[stage][box].elements, row, i);
        load_right_transposed<kBoxCols>(keys, shared.kv[k][box].elements, i, 0);
        add_product<T>(sum, q, keys);
      }
    }
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) logits.elements[i] = sum[0][i / 4][i % 4];
    __syncwarp();  // all lanes have read the keys, whose stage one lane gives back
  }
  __device__ __forceinline__ void hide(Logits& logits, const ConsumerPiece& own, int tile) const {
    if (tile >= own.whole) mask(logits.elements, tile * kKeys, own.limit);
  }
  // The results of a work tile, to where their rows of Q were.
  __device__ __forceinline__ void put(const ConsumerPiece& own, LazyRows& lazy,
                                      Sum<kWidth>& result) const {
    const Piece& piece = shared.pieces[own.stage];
    float factor[2], log_sum[2];
    lazy.finish(factor, log_sum);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int s = own.row + Sum<8>::row(2 * r);
      if (s >= in.queries || threadIdx.x % 4 > 0) continue;
      const size_t head = static_cast<size_t>(piece.batch) * in.heads + piece.head;
      in.log_sums[head * in.queries + s] = log_sum[r];
    }
#pragma unroll
    for (int box = 0; box < Tile::kBoxes; ++box) {
      auto& out = *reinterpret_cast<Box<T, 64>*>(shared.q[own.stage][box].row(64 * consumer));
      result.store(out, kBoxCols * box,
                   [&](int i) { return result.elements[i] * factor[i / 2 % 2]; });
    }
    shared_fence();
  }

  // The logits of a tile come one step before its results. So a step takes K of the next tile and V
  // of this one, also from a work tile to the next one. Each has three tiles here, and K2' is of
  // the next one:
  //
  //     K2   |   K1 V2   |   K0 V1   |   K2' V0   |   K1' V2'   |   ...
  //
  // begin() is the start, without results. pass_keys() passes over a K that is hidden.
  __device__ __forceinline__ void run() const {
    using Block = HopperBlock<T, kWidth>;  // whose scale_rows() and to_factor() these are
    const EachWarp warps;
    Reader rows(shared.rows, warps);
    Reader keys(shared.keys, warps);
    Turns<kWidth> turns{shared.turns, consumer};
    const auto next_piece = [&] {
      const int stage = rows.wait();
      rows.next();
      return piece_at(stage);
    };
    const auto take = [&] {  // the next tile: of K and V in turn
      const int stage = keys.wait();
      keys.next();
      return stage;
    };
    const auto give_back = [&](int stage) { keys.give_back(stage); };
    LazyRows lazy;
    Logits logits;
    Sum<kWidth> result;
    Probs probs;
    float factor[2];
    // The first tile of keys of a work tile, without the last one of another.
    const auto begin = [&](const ConsumerPiece& piece) {
      turns.wait();
      const int k = take();
      start_logits(logits, piece.stage, k);
      turns.pass();
      wgmma_wait<0>();
      give_back(k);
      hide(logits, piece, piece.tile);
      lazy.exponentials(logits.elements, scale, factor);
      Block::to_factor(probs, logits);
    };
    const auto pass_keys = [&] {
      turns.wait();
      give_back(take());
      turns.pass();
    };

    ConsumerPiece own = next_piece();
    bool active = own.tile < own.end, add = false;
    if (active) {
      begin(own);
    } else {
      pass_keys();
    }
    for (;;) {
      if (active) {
        for (; own.tile > 0; add = true) {
          turns.wait();
          const int k = take();
          start_logits(logits, own.stage, k);
          const int v = take();
          start_result(result, probs, v, add);
          turns.pass();
          --own.tile;
          wgmma_wait<1>();
          hide(logits, own, own.tile);
          const bool right = lazy.try_exponentials(logits.elements, scale, kMostExponentials<T>);
          if (!right) {
            Logits again;  // so that `logits`, whose address nobody takes, stay in registers
            multiply_again(again, own.stage, k);
            logits = again;
            hide(logits, own, own.tile);
            lazy.exponentials(logits.elements, scale, factor);
          }
          give_back(k);
          wgmma_wait<0>();
          give_back(v);
          if (!right) Block::scale_rows(result, factor);
          Block::to_factor(probs, logits);
        }
      }
      // From here on the next tile may be of the next work tile, and may be hidden. The flags:
      //   active       `probs` has the exponentials of this tile, `own`; else the tile is hidden
      //   last         this tile is the last one of its work tile
      //   more         there is a next tile, of this work tile or of the next one
      //   next_active  there is a next tile, and it is not hidden
      //
      // What happens to this tile's V, and to the next tile's K:
      //   active  next_active   this tile                              the next tile
      //   yes     yes           the last product with V, then it is    its logits, at the same time
      //                         put (written)
      //   yes     no            the last product with V, then put      its K is passed over, if any
      //   no      yes           its V is given back unread             its logits: begin()
      //   no      no            its V is given back unread             its K is passed over, if any
      const bool last = own.tile == 0;
      ConsumerPiece next = own;
      bool more = true;
      if (last) {
        next = next_piece();
        more = next.tile >= 0;
      } else {
        --next.tile;
      }
      const bool next_active = more && next.tile < next.end;
      if (active && next_active) {  // the last of a work tile, the first of the next
        turns.wait();
        const int k = take();
        start_logits(logits, next.stage, k);
        const int v = take();
        start_result(result, probs, v, add);
        turns.pass();
        wgmma_wait<1>();
        give_back(k);
        hide(logits, next, next.tile);
        LazyRows of_next;
        of_next.exponentials(logits.elements, scale, factor);
        wgmma_wait<0>();
        give_back(v);
        put(own, lazy, result);
        lazy = of_next;
        Block::to_factor(probs, logits);
        add = false;
      } else if (active) {
        if (more) pass_keys();
        const int v = take();
        start_result(result, probs, v, add);
        wgmma_wait<0>();
        give_back(v);
        add = false;
        put(own, lazy, result);
        lazy = LazyRows();
      } else {
        if (next_active) {
          begin(next);
        } else if (more) {
          pass_keys();
        }
        give_back(take());
      }
      if (last) {  // the warp has no more to do with this work tile
        __syncwarp();
        EachWarp::release(shared.results[own.stage][consumer]);
      }
      if (!more) return;
      own = next;
      active = next_active;
    }
  }
};
#endif

template <typename T, int kWidth>
__global__ void __launch_bounds__(StayTile<kWidth>::kThreads, 1)
    attention_stay(const __grid_constant__ StayMaps maps, const __grid_constant__ Operands<T> in,
                   const __grid_constant__ TileScheduler scheduler) {
#if HOPPER_CODE
  using Tile = StayTile<kWidth>;
  extern __shared__ __align__(1024) char bytes[];
  auto& shared = *reinterpret_cast<StayShared<T, kWidth>*>(bytes);
  if (threadIdx.x == 0) {
    prepare(shared.rows, Tile::kConsumers);
    prepare(shared.keys, EachWarp::kReleases * Tile::kConsumers);
    for (int i = 0; i < Tile::kConsumers; ++i) {
      for (auto& results : shared.results) barrier_init(&results[i], EachWarp::kReleases);
      barrier_init(&shared.turns[i], EachWarp::kReleases);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int warp = warp_of_block();
  if (warp < 4) {
    registers_shrink_to<Tile::kConsumers == 2 ? 24 : 32>();
    if (!elect_one()) return;
    if (warp == 0) {
      bring_pieces<T, kWidth>(shared, maps, in, scheduler);
    } else if (warp <= Tile::kConsumers) {
      store_pieces<T, kWidth>(shared, maps, warp - 1);
    }
  } else {
    registers_grow_to<Tile::kConsumers == 2 ? 240 : 160>();
    StayConsumer<T, kWidth>{shared, in, warp / 4 - 1}.run();
  }
#endif
}

// -------------------------------------------------------------------------------------------------

template <typename T>
struct Table : AttentionProblem<T> {
  using AttentionProblem<T>::AttentionProblem;

  Operands<T> operands() const {
    const AttentionShape& of = this->shape;
    const auto narrow = [](int64_t value) { return static_cast<int>(value); };
    return {this->Q,         this->K,          this->V,
            this->out,       this->lse,        narrow(of.queries),
            narrow(of.keys), narrow(of.heads), narrow(of.group()),
            of.causal,       of.scale()};
  }

  // A block for `rows` rows of Q of each head of each batch.
  dim3 grid(int rows) const {
    const AttentionShape& of = this->shape;
    return dim3(blocks_for(of.queries, rows), static_cast<unsigned>(of.heads),
                static_cast<unsigned>(of.batch));
  }

  HopperMaps maps(int rows, int keys) const {
    const AttentionShape& of = this->shape;
    const int64_t q_cols = of.heads * of.width, k_cols = of.kv_heads * of.width;
    return {batch_map<T>(this->Q, of.batch, of.queries, q_cols, rows),
            batch_map<T>(this->K, of.batch, of.keys, k_cols, keys),
            batch_map<T>(this->V, of.batch, of.keys, k_cols, keys)};
  }

  template <int kWidth>
  void add_lesson_kernels() const {
    // Every row reads all of K and V: of long sequences that would take seconds.
    if (this->shape.flops() < 2e12) {
      this->kernel("rows", Role::baseline,
                   [this] { attention_rows<T, kWidth><<<grid(1), 32 * kRowWarps>>>(operands()); });
    }
    using Mma = MmaTile<kWidth>;
    allow_shared_bytes(attention_mma<T, kWidth>, Mma::kBytes);
    const dim3 mma_grid = grid(Mma::kRows);
    this->kernel("tensor cores", Role::ours,
                 [=, this] {
                   attention_mma<T, kWidth><<<mma_grid, Mma::kThreads, Mma::kBytes>>>(operands());
                 })
        .needs(80)
        .needs_shared(Mma::kBytes);

    using Tile = HopperTile<kWidth>;
    constexpr int kBytes = sizeof(HopperShared<T, kWidth>);
    allow_shared_bytes(attention_hopper<T, kWidth>, kBytes);
    allow_shared_bytes(attention_ping_pong<T, kWidth>, kBytes);
    allow_shared_bytes(attention_overlap<T, kWidth, false>, kBytes);
    allow_shared_bytes(attention_overlap<T, kWidth, true>, kBytes);
    this->kernel("warp specialization", Role::ours,
                 [this] {
                   attention_hopper<T, kWidth><<<grid(Tile::kRows), 384, kBytes>>>(
                       maps(Tile::kRows, Tile::kKeys), operands());
                 })
        .hopper_only()
        .needs_shared(kBytes);
    this->kernel("ping-pong", Role::ours,
                 [this] {
                   attention_ping_pong<T, kWidth><<<grid(Tile::kRows), 384, kBytes>>>(
                       maps(Tile::kRows, Tile::kKeys), operands());
                 })
        .hopper_only()
        .needs_shared(kBytes);
    this->kernel("overlap", Role::ours,
                 [this] {
                   attention_overlap<T, kWidth, false><<<grid(Tile::kRows), 384, kBytes>>>(
                       maps(Tile::kRows, Tile::kKeys), operands());
                 })
        .hopper_only()
        .needs_shared(kBytes);
    this->kernel("rare factors", Role::ours,
                 [this] {
                   attention_overlap<T, kWidth, true><<<grid(Tile::kRows), 384, kBytes>>>(
                       maps(Tile::kRows, Tile::kKeys), operands());
                 })
        .hopper_only()
        .needs_shared(kBytes);
    add_tile_scheduler<kWidth>();
  }

  // Without a mask all work tiles are equally long, and heads come one after the other: so each K
  // and V is read from memory once. With a causal mask the long ones of a section come first, so
  // that its last ones are short, and blocks end at nearly the same time. That matters only at the
  // end of the launch. So all sections but the last one are small: a quarter of the heads that are
  // computed at a time. The last section is large, but half of the L2 cache has room for K and V of
  // all its heads.
  TileScheduler scheduler(int rows, unsigned blocks, unsigned* next) const {
    const AttentionShape& of = this->shape;
    const int row_tiles = static_cast<int>(ceil_div(of.queries, int64_t{rows}));
    const int heads = static_cast<int>(of.heads * of.batch);
    TileScheduler result{row_tiles, heads, 1, heads, static_cast<unsigned>(row_tiles * heads),
                         next};
    if (!of.causal) return result;
    const int64_t cached = (int64_t{24} << 20) / (4 * of.keys * of.width);
    const int64_t fit = std::max<int64_t>(1, cached) * of.group();
    const int64_t at_once = ceil_div(blocks, static_cast<unsigned>(row_tiles));
    const int64_t last = std::min({std::max<int64_t>(24, 2 * at_once), fit, int64_t{heads}});
    result.section = static_cast<int>(
        std::clamp<int64_t>(ceil_div(at_once, int64_t{4}), std::min<int64_t>(2, fit), fit));
    result.sections = static_cast<int>((heads - last) / result.section);
    return result;
  }

  template <int kWidth>
  void add_tile_scheduler() const {
    using Tile = StayTile<kWidth>;
    constexpr int kBytes = sizeof(StayShared<T, kWidth>);
    const AttentionShape& of = this->shape;
    allow_shared_bytes(attention_stay<T, kWidth>, kBytes);
    const int64_t pieces = ceil_div(of.queries, int64_t{Tile::kRows}) * of.heads * of.batch;
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(pieces, multiprocessors()));
    const auto next = this->problem.template workspace<unsigned>(2);
    this->kernel("tile scheduler", Role::ours,
                 [=, this] {
                   const HopperMaps of_inputs = maps(Tile::kRows, Tile::kKeys);
                   const StayMaps all = {
                       of_inputs.Q, of_inputs.K, of_inputs.V,
                       batch_map<T>(this->out, this->shape.batch, this->shape.queries,
                                    this->shape.heads * this->shape.width, 64)};
                   attention_stay<T, kWidth><<<blocks, Tile::kThreads, kBytes>>>(
                       all, operands(), scheduler(Tile::kRows, blocks, next));
                 })
        .hopper_only()
        .needs_shared(kBytes);
  }
};

template <typename T>
void add_table(Lesson& lesson, cublasHandle_t blas, const std::string& type, AttentionShape shape,
               std::vector<std::shared_ptr<void>>& tables) {
  const std::string name = type + (shape.causal ? " causal" : " full");
  const auto table =
      std::make_shared<Table<T>>(lesson, blas, name, shape, lesson.flag("--hard-rows"));
  tables.push_back(table);
  const auto library = std::make_shared<LibraryAttention<T>>(blas, *table);
  table->kernel("library", Role::library, [library] { (*library)(); });
  const std::string why = lesson.on_cpu() ? "" : add_cudnn<T>(*table);
  if (!why.empty()) lesson.note("cuDNN is left out: " + why + ".");
  switch (shape.width) {
    case 64:
      table->template add_lesson_kernels<64>();
      break;
    case 128:
      table->template add_lesson_kernels<128>();
      break;
    case 256:
      table->template add_lesson_kernels<256>();
      break;
    default:
      lesson.note("These kernels have widths of 64, 128 and 256. operators/ has others.");
  }
  Problem& problem = table->problem;
  problem.compare("overlap", "warp specialization",
                  name + ": turns, and products beside exponentials: % times as fast.");
  problem.compare("tile scheduler", "cuDNN", name + ": the last kernel runs at % of cuDNN's rate.");
}

int main(int argc, char** argv) {
  Lesson lesson(
      argc, argv,
      {.name = "bonus_attention",
       .title = "softmax(scale Q K^T + mask) V in one launch",
       .n_meaning = "S, queries of a head",
       .n_gpu = 4096,
       .n_cpu = 70,
       // Three tiles of keys, of which the last is not full; and heads that share keys.
       .options = {{.name = "--keys",
                    .meaning = "T, keys of a head; 0: as many as queries",
                    .value = 0,
                    .cpu = 300},
                   {"--width", "columns of a head, at most 256", 128},
                   {.name = "--heads", .meaning = "of Q; 0: 2048 / width", .value = 0, .cpu = 2},
                   {.name = "--kv-heads",
                    .meaning = "of K and V, a divisor of --heads; 0: as many",
                    .value = 0,
                    .cpu = 1},
                   {.name = "--batch",
                    .meaning = "0: as many as make 16384 queries",
                    .value = 0,
                    .cpu = 1}},
       .flags = {{"--causal", "only the table with the causal mask"},
                 {"--full", "only the table without it"},
                 {"--fp16", "fp16 in place of bf16"},
                 {"--hard-rows", "logits of up to 2^18 scale, and of -infinity, in most rows"}}});
  AttentionShape shape = attention_shape(lesson);
  Cublas blas;
  std::vector<std::shared_ptr<void>> tables;
  for (const bool causal : {false, true}) {
    if (lesson.flag(causal ? "--full" : "--causal")) continue;
    shape.causal = causal;
    lesson.flag("--fp16") ? add_table<half>(lesson, blas, "fp16", shape, tables)
                          : add_table<__nv_bfloat16>(lesson, blas, "bf16", shape, tables);
  }
  return lesson.run();
}
