// What lesson 9's kernels for Hopper share: products sum^T = W^T x^T in TF32, with W^T in
// registers.
//
// In TF32 wgmma takes a factor from shared memory only if its elements are contiguous along k (here
// D); those of x are, those of W are not. So the product is transposed: x^T is the factor from
// shared memory, as the copy engine leaves it there, and W^T is the one from registers. A warpgroup
// has 64 columns of W, a warp 16; for wgmma these are rows of W^T, and thread l has rows l / 4 and
// l / 4 + 8. Which column is which row is ours to say: a thread's two are neighbours, so that W is
// read 8 bytes at a time (not where TransposedConsumer has a W whose rows are not aligned). The
// thread's sums of the two are sum[4 j + e] and sum[4 j + 2 + e], for row 8 j + 2 (l % 4) + e of x
// (e is 0 or 1).
#pragma once

#include <algorithm>
#include <cmath>

#include "operators/softmax/fp32_product.cuh"
#include "primitives/hopper/hopper.cuh"
#include "primitives/row_parts.cuh"

namespace operators::softmax {

using namespace primitives;

#if HOPPER_CODE
// A thread's fragments of W^T, of the classes col and col + 1 for the inputs from d0 on: w[k] is
// for d0 + 8 k to d0 + 8 k + 7. All loads are under way before the first value is needed. Where d
// >= D they are zeros; for classes that do not exist they are another one's, and nobody looks at
// what becomes of them.
template <bool kInside, int kSteps>
__device__ inline void load_fragments(float (&w)[kSteps][4], const float* W, int d0, int col, int D,
                                      int C) {
  const int d = d0 + threadIdx.x % 4;
  if (kInside && C % 2 == 0) {
    const float* at = W + static_cast<size_t>(d) * C + min(col, C - 2);
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i, at += 4 * static_cast<size_t>(C)) {
      const float2 pair = *reinterpret_cast<const float2*>(at);
      w[i / 2][i % 2 * 2] = pair.x, w[i / 2][i % 2 * 2 + 1] = pair.y;
    }
  } else {
    const float* at = W + static_cast<size_t>(d) * C + min(col, C - 1);
    const int next = col + 1 < C;
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i, at += 4 * static_cast<size_t>(C)) {
      const bool inside = kInside || 4 * i < D - d;
      w[i / 2][i % 2 * 2] = inside ? at[0] : 0, w[i / 2][i % 2 * 2 + 1] = inside ? at[next] : 0;
    }
  }
}
template <int kSteps>
__device__ inline void load_fragments(float (&w)[kSteps][4], const float* W, int d0, int col, int D,
                                      int C) {
  if (d0 + 8 * kSteps <= D) {
    load_fragments<true>(w, W, d0, col, D, C);
  } else {
    load_fragments<false>(w, W, d0, col, D, C);
  }
}

// 8 neighbours of a row of D floats, of which `left` exist; zeros for the others. `from` is a
// multiple of 8 floats behind the row's start.
__device__ inline void load_inputs(float (&v)[8], const float* from, int left, int D) {
  if (left < 8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = i < left ? from[i] : 0;
  } else if (D % 4 == 0) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
    }
  } else if (D % 2 == 0) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float2 two = *reinterpret_cast<const float2*>(from + i);
      v[i] = two.x, v[i + 1] = two.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = from[i];
  }
}

// A thread's fragments of W^T for mma.sync, of a chunk of 32 inputs: of the columns g and g + 8 of
// each tile of 16 the inputs d0 to d0 + 7, two for each of 4 steps.
template <int kTiles>
__device__ inline void load_columns(unsigned (&w)[kTiles][4][4], const float* W, int d0, int D,
                                    int C) {
  const int g = threadIdx.x % 32 / 4;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int d = d0 + i / 2, col = 16 * tile + g + i % 2 * 8;
      w[tile][i / 4][i % 4] = to_tf32(d < D && col < C ? W[static_cast<size_t>(d) * C + col] : 0);
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
        const SplitTf32 split = split_tf32(w[k][e]);
        high[k][e] = split.high, low[k][e] = split.low;
        finite[k][e] =
            is_infinite(split.high) ? 0 : split.high;  // see add_products() of fp32_product.cuh
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

// ---- A product whose factors both come through shared memory ------------------------------------

// Sums of kRows rows of x with kColumns columns of W, 128 or 192, in steps of 32 along D: lesson
// 3's last product, transposed. A block is a producer warpgroup and two or three consumers, of 64
// columns each. The kPeers blocks of a cluster (1 to 3) have the same rows of x: each fetches some
// boxes of kBoxRows rows for all of them, one box if equal shares are whole groups of 8 rows.
//
// W comes in boxes of 32 columns. If its rows may start anywhere (kAligned is false), it is
// four matrices: matrix i has rows i, i + 4, ..., from the last multiple of 16 bytes before row i
// on, so that all of its rows start at such multiples. Of each comes a box of 8 rows that has the
// block's columns among its own, from 8 columns before the previous box's on: then four rows of W
// share few banks. A strip of x is of every row, every second, or every fourth of x (RowsOfX).
template <Math kMath_, int kRows_, int kColumns_, int kPeers_, bool kAligned_>
struct TransposedShared {
  static constexpr Math kMath = kMath_;
  static constexpr int kRows = kRows_, kColumns = kColumns_, kPeers = kPeers_;
  static constexpr bool kAligned = kAligned_, kHighLow = kMath == Math::split;
  static constexpr int kDepth = 32, kConsumers = kColumns / 64;  // warpgroups that multiply
  static constexpr int kThreads = 128 * (1 + kConsumers), kWarps = 4 * kConsumers;
  static constexpr int kBoxRows = kRows % (8 * kPeers) == 0 ? kRows / kPeers : 32;
  static_assert(kRows % kBoxRows == 0);
  static constexpr int kPitch = kAligned ? 32 : kColumns + 28;               // of a box
  static constexpr int kBox = kAligned ? 32 * kPitch : kDepth / 4 * kPitch;  // floats
  static constexpr int kBoxes = kAligned ? kColumns / 32 : 4;                // of W
  static constexpr int kLoaded = (kRows * kDepth + kBoxes * kBox) * 4;       // bytes
  struct alignas(1024) Stage {
    float x[kRows * kDepth];
    float W[kBoxes * kBox];
  };
  static constexpr int kStageBytes = sizeof(Stage) + (kHighLow ? kRows * kDepth * 4 : 0);
  static constexpr int kStages = std::min(8, (208 << 10) / kStageBytes);
  Stage stages[kStages];
  float x_low[kHighLow ? kStages : 1][kHighLow ? kRows * kDepth : 1];
  Barrier full[kStages], empty[kStages], split_done[kStages];
};

// W for the copy engine: as one matrix, or four.
struct MapsOfW {
  CUtensorMap of[4];
};
template <bool kAligned, int kColumns>
MapsOfW maps_of(const float* W, int D, int C, bool to_tf32, int64_t stride) {
  MapsOfW maps = {};
  if constexpr (kAligned) {
    maps.of[0] = tensor_map<float>(W, D, C, 32, to_tf32, stride, Reads::often);
  } else {
    for (int64_t i = 0; i < 4; ++i) {
      const int64_t before = i * C % 4, rows = (D - i + 3) / 4;
      const cuuint64_t extents[] = {static_cast<cuuint64_t>(C + before),
                                    static_cast<cuuint64_t>(rows)};
      const cuuint64_t strides[] = {static_cast<cuuint64_t>(C) * 16};
      const cuuint32_t box[] = {kColumns + 28, 8};
      maps.of[i] = encode_tensor_map(W + i * C - before, 2, extents, strides, box,
                                     CU_TENSOR_MAP_SWIZZLE_NONE, to_tf32, Reads::often);
    }
  }
  return maps;
}

// x (B, D) for the copy engine, for which a row has to start at a multiple of 16 bytes. Of 2^shift
// neighbouring rows (1, 2 or 4) row i starts before(i) elements after such a multiple. So x is
// 2^shift matrices: matrix i has rows i, i + 2^shift, ..., each from that multiple on. In a tile of
// it all inputs stand `before` columns further right, so rows of W stand as many rows lower. The
// first `before` columns are the end of another row of x, and have to become zeros.
struct RowsOfX {
  CUtensorMap of[4] = {};
  int B, D, shift;

  RowsOfX(const float* x, int rows, int inputs, int64_t stride, unsigned box_rows, bool to_tf32)
      : B(rows), D(inputs), shift(shift_of(stride)) {
    for (int i = 0; i < 1 << shift; ++i) {
      if (i >= rows) {  // no such row: nobody looks at what becomes of another one's
        of[i] = of[0];
        continue;
      }
      of[i] = tensor_map<float>(x + i * stride - before(i), rows_from(i), D + before(i), box_rows,
                                to_tf32, stride << shift, Reads::often);
    }
  }
  static int shift_of(int64_t stride) { return stride % 4 == 0 ? 0 : stride % 2 == 0 ? 1 : 2; }
  // Strips of kRows rows, if there are `rows` rows: strip s is of the matrix s % 2^shift.
  template <int kRows>
  __host__ __device__ static int strips(int rows, int shift) {
    return (rows + (kRows << shift) - 1) / (kRows << shift) << shift;
  }
  __host__ __device__ int before(int i) const { return i * (D % 4) % 4; }
  // How many rows there are of row `first`'s matrix, from it on.
  __host__ __device__ int rows_from(int first) const {
    return (B - first + (1 << shift) - 1) >> shift;
  }
  __device__ int matrix(int strip) const { return strip & ((1 << shift) - 1); }
  // The block's steps of 32 inputs along D, in a strip of that matrix: of gridDim.y slices one.
  struct Steps {
    int first, last;
  };
  __device__ Steps steps(int matrix) const {
    const int all = (before(matrix) + D + 31) / 32, slice = blockIdx.y, slices = gridDim.y;
    if (slices == 1) return {0, all};
    return {all * slice / slices, all * (slice + 1) / slices};
  }
};

// Microseconds that these blocks should take: `active` run at a time (`most` could), `rounds` times
// one after another, each with one of `slices` slices of a strip's steps along D. Fitted to 700
// measurements on an H200, 12 % off (rms). A step takes its products or its copies, whichever is
// longer. Products: 1.73 ns for each row of the tile and 80 more (only a fit, for 64 to 256 rows).
// Copies from L2: 69 GB/s for each block if all run, more if fewer do. 128 bytes of a row count
// once if they are one line of the cache, 1.13 times on two lines, 1.7 times on five sectors of 32
// bytes; twice where rows of x start anywhere, 2.2 times for such a W, whose boxes are wider than
// the tile. Memory: 28 GB/s for each block; few blocks get more each, but less in all.
template <class Shared>
struct TransposedTime {
  int B, D, C, shift;  // see RowsOfX

  double operator()(double rounds, double active, double most, int slices) const {
    constexpr int kDepth = Shared::kDepth, kColumns = Shared::kColumns;
    constexpr double kWide = kColumns / 128.0;
    const auto lines = [](int n) { return (n + 3) % 32 < 4 ? 1 : (n + 3) % 8 < 4 ? 1.13 : 1.7; };
    const double products = 1.73e-3 * (Shared::kRows + 80) * kWide * (Shared::kHighLow ? 3.4 : 1);
    const double rows = std::min(1.0 * Shared::kRows, std::ceil(1.0 * B / (1 << shift)));
    const double pieces = rows / Shared::kPeers * (shift > 0 ? 2 : lines(D)) +
                          (Shared::kAligned ? std::min(kColumns, C) * lines(C) : 2.2 * kColumns);
    const double copies = 4 * kDepth * pieces * std::pow(active / most, 0.78) / 69e3;
    const double steps = std::ceil(std::ceil(1.0 * D / kDepth) / slices);
    const double memory = 4.0 * D * (1.0 * B + C) / (28e3 * (0.7 * most + 0.3 * active));
    const double store = (Shared::kAligned ? 0.0178 : 0.0198) * Shared::kRows * kWide;  // epilogue
    return 0.5 + rounds * store + std::max(rounds * steps * std::max(products, copies), memory);
  }
};

#if HOPPER_CODE
// Zeros for the first `before` elements (at most 3) of each row of a tile of x, kRows by 32. Thread
// `own` of `threads` does it for some rows.
template <int kRows>
__device__ void blank_before(float* tile, int before, int own, int threads) {
  for (int row = own; row < kRows; row += threads) {
    for (int i = 0; i < before; ++i) tile[row * 32 + row % 8 * 4 + i] = 0;
  }
}

// One thread does this, before the cluster meets.
template <class Shared>
__device__ void init_barriers(Shared& shared) {
  for (int s = 0; s < Shared::kStages; ++s) {
    barrier_init(&shared.full[s], 1);
    barrier_init(&shared.empty[s], Shared::kConsumers * Shared::kPeers);  // of the whole cluster
    barrier_init(&shared.split_done[s], 96);
  }
  barrier_init_fence();
}

// What the producer's threads do for some steps of a strip of rows. One starts copies, of its
// block's boxes of x and of the block's columns of W. In 3xTF32 the other warps put zeros before
// the rows of x, and split x, all of a stage: in whatever order it lies there.
template <class Shared>
__device__ void produce(Shared& shared, Ring<Shared::kStages>& ring, const RowsOfX& x,
                        const MapsOfW& W, int strip, int col0, RowsOfX::Steps steps) {
  constexpr int kDepth = Shared::kDepth, kPeers = Shared::kPeers, kBoxRows = Shared::kBoxRows;
  const int matrix = x.matrix(strip), before = x.before(matrix);
  if (warp_of_block() == 0 && elect_one()) {
    const int rank = kPeers == 1 ? 0 : cluster_rank(), row = (strip >> x.shift) * Shared::kRows;
    for (int k = steps.first * kDepth; k < steps.last * kDepth; k += kDepth, ring.advance()) {
      auto& stage = shared.stages[ring.stage];
      Barrier* arrived = &shared.full[ring.stage];
      barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
      barrier_arrive_expect(arrived, Shared::kLoaded);
      if constexpr (kPeers == 1) {
        tensor_load(stage.x, &x.of[matrix], row, k, arrived);
      } else {
        for (int i = rank * kBoxRows; i < Shared::kRows; i += kPeers * kBoxRows) {
          tensor_load_multicast(stage.x + i * kDepth, &x.of[matrix], row + i, k, arrived,
                                (1 << kPeers) - 1);
        }
      }
      for (int i = 0; i < Shared::kBoxes; ++i) {
        float* box = stage.W + i * Shared::kBox;
        if constexpr (Shared::kAligned) {
          tensor_load(box, &W.of[0], k - before, col0 + 32 * i, arrived);
        } else {  // from row k + i - before of W on
          const int fourth = k / 4 - (i < before);
          tensor_load(box, &W.of[(i - before) & 3], fourth, col0 - 8 * i, arrived);
        }
      }
    }
  } else if (Shared::kHighLow && threadIdx.x >= 32) {
    for (int step = steps.first; step < steps.last; ++step, ring.advance()) {
      barrier_wait(&shared.full[ring.stage], ring.parity);
      if (step == 0 && before > 0) {
        blank_before<Shared::kRows>(shared.stages[ring.stage].x, before, threadIdx.x - 32, 96);
        named_barrier(2, 96);
      }
      split_all(shared.stages[ring.stage].x, shared.x_low[ring.stage], Shared::kRows * kDepth,
                threadIdx.x - 32, 96);
      shared_fence();
      barrier_arrive(&shared.split_done[ring.stage]);
    }
  }
}

// One of the consumers' threads. A warp has 16 columns, and a thread two of them. If W
// is aligned these are neighbours, in that half of a box for which reads of four rows of W meet no
// bank twice. Else they are columns g and g + 8 of the warp's, so that 8 lanes read, and in the
// end write, what lies together.
template <class Shared>
struct TransposedConsumer {
  static constexpr Math kMath = Shared::kMath;
  static constexpr int kRows = Shared::kRows, kSums = kRows / 2, kStages = Shared::kStages;
  static constexpr int kNext = Shared::kAligned ? 1 : 8;  // from the thread's first column on
  Shared& shared;
  int C, before = 0;  // how many places the strip's inputs come late
  int own = threadIdx.x - 128, g = own % 32 / 4, t = own % 4;
  int box = own / 64, piece = 2 * (own / 32 % 2) + g / 2 % 2 * 4 + g / 4, half = g % 2;
  int near = box * Shared::kBox + t * 32 + (piece ^ t) * 4 + half * 2;
  int far = box * Shared::kBox + (t + 4) * 32 + (piece ^ t ^ 4) * 4 + half * 2;

  // The first of its two columns among those of the block.
  __device__ int col() const {
    return Shared::kAligned ? 32 * box + 4 * piece + 2 * half : own / 32 * 16 + g;
  }

  // The first threads of a warpgroup tell the producers of the cluster's blocks.
  __device__ void release(int stage) const {
    if constexpr (Shared::kPeers == 1) {
      if (own % 128 == 0) barrier_arrive(&shared.empty[stage]);
    } else {
      if (own % 128 < Shared::kPeers) barrier_arrive(&shared.empty[stage], own % 128);
    }
  }

  __device__ void load(float (&w)[4][4], const Ring<kStages>& ring) const {
    barrier_wait(&shared.full[ring.stage], ring.parity);
    const float* from = shared.stages[ring.stage].W;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (Shared::kAligned) {
        const float2 a = *reinterpret_cast<const float2*>(from + 8 * 32 * k + near);
        const float2 b = *reinterpret_cast<const float2*>(from + 8 * 32 * k + far);
        w[k][0] = a.x, w[k][1] = a.y, w[k][2] = b.x, w[k][3] = b.y;
      } else {
        const int first = t * (Shared::kBox + 8) + ((t - before) & 3) * (C % 4) % 4 + col();
        const float* row = from + first + 2 * k * Shared::kPitch;
        w[k][0] = row[0], w[k][1] = row[8];
        w[k][2] = row[Shared::kPitch], w[k][3] = row[Shared::kPitch + 8];
      }
    }
  }

  // The sums over some steps. While one is multiplied, the fragments of the next one are loaded:
  // two sets of registers, and therefore two steps a turn.
  __device__ void multiply(float (&sum)[kSums], Ring<kStages>& ring, RowsOfX::Steps of) const {
    const int steps = of.last - of.first;
    float w[2][4][4];
    int previous = 0;
    const auto add = [&](const float(&set)[4][4], int step) {
      if constexpr (Shared::kHighLow) barrier_wait(&shared.split_done[ring.stage], ring.parity);
      add_products<kMath, kMath == Math::tf32>(sum, set, shared.stages[ring.stage].x,
                                               shared.x_low[Shared::kHighLow ? ring.stage : 0],
                                               step > 0);
      wgmma_wait<1>();
      if (step > 0) release(previous);
      previous = ring.stage;
      ring.advance();
    };
    load(w[0], ring);
    if (!Shared::kHighLow && of.first == 0 && before > 0) {
      blank_before<kRows>(shared.stages[ring.stage].x, before, own, 128 * Shared::kConsumers);
      shared_fence();
      named_barrier(1, 128 * Shared::kConsumers);
    }
    for (int step = 0; step < steps; step += 2) {
      add(w[0], step);
      if (step + 1 == steps) break;
      load(w[1], ring);
      add(w[1], step + 1);
      if (step + 2 < steps) load(w[0], ring);
    }
    wgmma_wait<0>();
    release(previous);
  }

  // Writes the sums, each times its row's factor. `out` is where the block's first row has the
  // thread's first column. There are `rows` rows, `stride` elements apart; from that column on a
  // row has `left` columns left.
  __device__ void store(const float (&sum)[kSums], const float* factors, float* out, int64_t stride,
                        int rows, int left) const {
    const auto write = [&](auto put) {
      float* to = out + 2 * t * stride;
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) {
        const int row = 8 * j + 2 * t;
        const float2 of = *reinterpret_cast<const float2*>(&factors[row]);
        put(row, to, float2{sum[4 * j] * of.x, sum[4 * j + 2] * of.x});
        put(row + 1, to + stride, float2{sum[4 * j + 1] * of.y, sum[4 * j + 3] * of.y});
        to += 8 * stride;
      }
    };
    if (left <= 0) return;
    // Where TF32's rows of W are aligned those of `out` are, too; 3xTF32's may be aligned copies.
    constexpr bool kPairs = Shared::kAligned && kMath == Math::tf32;
    if (!kPairs && (!Shared::kAligned || C % 2 != 0)) {
      write([&](int row, float* to, float2 pair) {
        if (row < rows) to[0] = pair.x;
        if (row < rows && left > kNext) to[kNext] = pair.y;
      });
    } else if (rows < kRows) {
      write([&](int row, float* to, float2 pair) {
        if (row < rows) *reinterpret_cast<float2*>(to) = pair;
      });
    } else {
      write([](int, float* to, float2 pair) { *reinterpret_cast<float2*>(to) = pair; });
    }
  }
};

// Turns the block's logits into exponentials relative to the row's maximum in this block. Thread
// r < kRows returns row r's maximum and sum. `columns_left` of a row: from the thread's first on.
template <class Shared, int kSums>
__device__ MaxSum exponentials(Shared& shared, const TransposedConsumer<Shared>& of,
                               float (&sum)[kSums], int columns_left) {
  constexpr Math kMath = Shared::kMath;
  constexpr int kRows = Shared::kRows, kNext = TransposedConsumer<Shared>::kNext;
  constexpr int kPairs = kRows / 4, kLeft = kPairs / 8;
  const int own = of.own, g = of.g, t = of.t;
  const int reversed = (g & 1) * 4 + (g & 2) + (g >> 2);  // see combine_quads()
  float of_row[kPairs];
  const auto share = [&] {
#pragma unroll
    for (int i = 0; i < kLeft; ++i) {
      const int at = reversed * kLeft + i;
      shared.parts[own / 32][at / 2 * 8 + 2 * t + at % 2] = of_row[i];
    }
  };
  if (columns_left <= kNext) {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      if (columns_left < 1 || i % 4 >= 2) sum[i] = minus_infinity();
    }
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    of_row[i] = fmaxf(sum[i / 2 * 4 + i % 2], sum[i / 2 * 4 + 2 + i % 2]);
  }
  combine_quads(of_row, [](float a, float b) { return fmaxf(a, b); });
  share();
  named_barrier(1, 128 * Shared::kConsumers);
  MaxSum row = {minus_infinity(), 0};
  if (own < kRows) {
#pragma unroll
    for (int i = 0; i < Shared::kWarps; ++i) row.largest = fmaxf(row.largest, shared.parts[i][own]);
    shared.rows[own] = base_of(row.largest);
  }
  named_barrier(1, 128 * Shared::kConsumers);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const float base = shared.rows[i / 2 * 8 + 2 * t + i % 2];
    float &a = sum[i / 2 * 4 + i % 2], &b = sum[i / 2 * 4 + 2 + i % 2];
    a = exp_of<kMath>(a - base), b = exp_of<kMath>(b - base);
    of_row[i] = a + b;
  }
  combine_quads(of_row, [](float a, float b) { return a + b; });
  share();
  named_barrier(1, 128 * Shared::kConsumers);
  if (own < kRows) {
#pragma unroll
    for (int i = 0; i < Shared::kWarps; ++i) row.sum += shared.parts[i][own];
  }
  return row;
}
#endif

}  // namespace operators::softmax
