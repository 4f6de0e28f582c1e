// What lesson 9's kernels for Hopper share: products sum^T = W^T x^T in TF32, with W^T in
// registers.
//
// In TF32 wgmma takes a factor from shared memory only if its elements are contiguous along k (here
// D); those of x are, those of W are not. So the product is turned round: x^T is the factor from
// shared memory, as the copy engine leaves it there, and W^T is the one from registers. A warpgroup
// has 64 columns of W, a warp 16; for wgmma those are rows of W^T, and thread l has rows l / 4 and
// l / 4 + 8 of its warp's 16. Which column is which row is ours to say: these two are neighbours, 2
// (l / 4) and the next one, so that W can be read 8 bytes at a time. The thread's sums of the first
// are sum[4 j + e], of the second sum[4 j + 2 + e], each for row 8 j + 2 (l % 4) + e of x.
#pragma once

#include <algorithm>

#include "common/fp32_product.cuh"
#include "common/hopper.cuh"
#include "common/row_parts.cuh"

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

// Each of the elements becomes a TF32 number, rounded to nearest.
__device__ inline void round_all(float* x, int count, int first, int threads) {
#pragma unroll 2
  for (int i = 4 * first; i < count; i += 4 * threads) {
    auto& four = *reinterpret_cast<uint4*>(x + i);
    four = {to_tf32(__uint_as_float(four.x)), to_tf32(__uint_as_float(four.y)),
            to_tf32(__uint_as_float(four.z)), to_tf32(__uint_as_float(four.w))};
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

// Sums of kRows rows of x with 128 columns of W, in steps of 32 along D: lesson 3's last product,
// turned round. A block is a producer warpgroup and two consumers, of 64 columns each. The two
// blocks of a cluster have the same rows of x, of which each fetches one half for both.
template <Math kMath_, int kRows_>
struct TurnedShared {
  static constexpr Math kMath = kMath_;
  static constexpr int kRows = kRows_, kColumns = 128, kDepth = 32, kThreads = 384;
  static constexpr bool kSplit = kMath == Math::split;
  struct Stage {
    float x[kRows * kDepth];
    float W[kColumns / 32][kDepth * 32];
  };
  static constexpr int kStageBytes = sizeof(Stage) + (kSplit ? kRows * kDepth * 4 : 0);
  static constexpr int kStages = std::min(8, (200 << 10) / kStageBytes);
  Stage stages[kStages];
  float x_low[kSplit ? kStages : 1][kSplit ? kRows * kDepth : 1];
  Barrier full[kStages], empty[kStages], split_done[kStages];
};

#if HOPPER_CODE
// One thread does this, before the cluster meets.
template <Math kMath, int kRows>
__device__ void init_barriers(TurnedShared<kMath, kRows>& shared) {
  for (int s = 0; s < shared.kStages; ++s) {
    barrier_init(&shared.full[s], 1);
    barrier_init(&shared.empty[s], 4);  // two consumers in each of two blocks
    barrier_init(&shared.split_done[s], 96);
  }
  barrier_init_fence();
}

// What the producer's threads do for one strip of rows: the first starts copies, of its cluster's
// half of x and of the block's columns of W. For 3xTF32 those of the other warps split x, all of a
// stage: in whatever order it lies there.
template <Math kMath, int kRows>
__device__ void produce(TurnedShared<kMath, kRows>& shared,
                        Ring<TurnedShared<kMath, kRows>::kStages>& ring, const CUtensorMap* x,
                        const CUtensorMap* W, int row0, int col0, int steps) {
  using Shared = TurnedShared<kMath, kRows>;
  constexpr int kDepth = Shared::kDepth;
  if (threadIdx.x == 0) {
    const int half = cluster_rank() * kRows / 2;
    for (int step = 0; step < steps; ++step, ring.advance()) {
      auto& stage = shared.stages[ring.stage];
      Barrier* arrived = &shared.full[ring.stage];
      barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
      barrier_arrive_expect(arrived, sizeof stage);
      const int k = step * kDepth;
      tensor_load_multicast(stage.x + half * kDepth, x, row0 + half, k, arrived, 3);
      for (int box = 0; box < Shared::kColumns / 32; ++box) {
        tensor_load(stage.W[box], W, k, col0 + 32 * box, arrived);
      }
    }
  } else if (Shared::kSplit && threadIdx.x >= 32) {
    for (int step = 0; step < steps; ++step, ring.advance()) {
      barrier_wait(&shared.full[ring.stage], ring.parity);
      split_all(shared.stages[ring.stage].x, shared.x_low[ring.stage], kRows * kDepth,
                threadIdx.x - 32, 96);
      shared_fence();
      barrier_arrive(&shared.split_done[ring.stage]);
    }
  }
}

// One of the 256 threads of the consumers. A warp has 16 columns, half of a box of 32 in shared
// memory, and a thread two neighbours of them; which half is chosen so that reads of four rows of W
// meet no bank twice.
template <Math kMath, int kRows>
struct TurnedConsumer {
  using Shared = TurnedShared<kMath, kRows>;
  static constexpr int kSums = kRows / 2, kStages = Shared::kStages;
  Shared& shared;
  int own = threadIdx.x - 128, g = own % 32 / 4, t = own % 4;
  int box = own / 64, piece = 2 * (own / 32 % 2) + g / 2 % 2 * 4 + g / 4, half = g % 2;
  int near = t * 32 + (piece ^ t) * 4 + half * 2;
  int far = (t + 4) * 32 + (piece ^ t ^ 4) * 4 + half * 2;

  // The first of its two columns among those of the block.
  __device__ int col() const { return 32 * box + 4 * piece + 2 * half; }

  // Threads 0 and 1 of a warpgroup tell the producers of blocks 0 and 1.
  __device__ void release(int stage) const {
    if (own % 128 < 2) barrier_arrive(&shared.empty[stage], own % 128);
  }
  __device__ void load(float (&w)[4][4], const Ring<kStages>& ring) const {
    barrier_wait(&shared.full[ring.stage], ring.parity);
    const float* from = shared.stages[ring.stage].W[box];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float2 a = *reinterpret_cast<const float2*>(from + 8 * 32 * k + near);
      const float2 b = *reinterpret_cast<const float2*>(from + 8 * 32 * k + far);
      w[k][0] = a.x, w[k][1] = a.y, w[k][2] = b.x, w[k][3] = b.y;
    }
  }

  // The sums over all of D. While one step is multiplied, the fragments of the next one are loaded:
  // two sets of registers, and therefore two steps a turn.
  __device__ void multiply(float (&sum)[kSums], Ring<kStages>& ring, int steps) const {
    float w[2][4][4];
    int previous = 0;
    const auto add = [&](const float(&set)[4][4], int step) {
      if constexpr (Shared::kSplit) barrier_wait(&shared.split_done[ring.stage], ring.parity);
      add_products<kMath, kMath == Math::tf32>(sum, set, shared.stages[ring.stage].x,
                                               shared.x_low[Shared::kSplit ? ring.stage : 0],
                                               step > 0);
      wgmma_wait<1>();
      if (step > 0) release(previous);
      previous = ring.stage;
      ring.advance();
    };
    load(w[0], ring);
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

  // To `out`, which starts at the block's first row, of which there are `rows`, and at the thread's
  // first column, of an even number C: the sums, each times its row's of `factors`.
  __device__ void store(const float (&sum)[kSums], const float* factors, float* out, int rows,
                        int C) const {
    const auto write = [&](auto put) {
      float* to = out + static_cast<size_t>(2 * t) * C;
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) {
        const int row = 8 * j + 2 * t;
        const float2 of = *reinterpret_cast<const float2*>(&factors[row]);
        put(row, to, float2{sum[4 * j] * of.x, sum[4 * j + 2] * of.x});
        put(row + 1, to + C, float2{sum[4 * j + 1] * of.y, sum[4 * j + 3] * of.y});
        to += 8 * static_cast<size_t>(C);
      }
    };
    if (rows < kRows) {
      write([&](int row, float* to, float2 pair) {
        if (row < rows) *reinterpret_cast<float2*>(to) = pair;
      });
    } else {
      write([](int, float* to, float2 pair) { *reinterpret_cast<float2*>(to) = pair; });
    }
  }
};
#endif
