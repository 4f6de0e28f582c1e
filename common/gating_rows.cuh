// What a thread of lesson 6's Hopper kernels does with its sums, and a second "Hopper resident" for
// loose rows: rows of any length. sigmoid() is the lesson's.
//
// x and the result are read and written where they are, without an aligned copy. The copy engine
// moves boxes of a matrix only if its rows are multiples of 16 bytes, and quickly only if they are
// whole lines of 128 bytes. But 64 rows one after the other are one piece of memory, which starts
// at a multiple of 128 bytes, whatever the length of a row. So a tile of x comes as that piece.
// wgmma cannot read such rows from shared memory: it takes them from registers.
#pragma once

#include <algorithm>
#include <bit>

#include "common/async_copy.cuh"
#include "common/gating.h"
#include "common/tiles.cuh"

#if HOPPER_CODE
/// The gate of 64 columns of out, from col0 on. A thread keeps the biases of its columns, two
/// neighbours in each group of 8 (see Sum::col). Columns beyond H are never stored; they take the
/// last bias, so that no load depends on a condition, and all of them are on their way at once.
struct Gate {
  float2 b1[8], b2[8];

  __device__ Gate(const half* bias1, const half* bias2, int col0, int H) {
    H % 2 == 0 ? load<true>(bias1, bias2, col0, H) : load<false>(bias1, bias2, col0, H);
  }
  /// kPairs: H is even, and two neighbours are one load.
  template <bool kPairs>
  __device__ void load(const half* bias1, const half* bias2, int col0, int H) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int col = min(col0 + Sum<64>::col(4 * j), (H - 1) / 2 * 2);
      b1[j] = two<kPairs>(bias1, col, H);
      b2[j] = two<kPairs>(bias2, col, H);
    }
  }
  template <bool kPairs>
  __device__ static float2 two(const half* from, int col, int H) {
    if constexpr (kPairs) return __half22float2(*reinterpret_cast<const half2*>(from + col));
    return make_float2(__half2float(from[col]), __half2float(from[min(col + 1, H - 1)]));
  }
  /// A sum has the gates in the left half of its columns, the values in the right. Puts the results
  /// of 64 columns, from `first` on, into a box.
  template <int kAll>
  __device__ void store(const Sum<kAll>& sum, int first, Box<half, 64>& to) const {
    sum.store(to, first, [&](int i) {
      const float2 gate_bias = b1[i % 32 / 4], value_bias = b2[i % 32 / 4];
      const float gate = sum.elements[i] + (i % 2 == 0 ? gate_bias.x : gate_bias.y);
      return sigmoid(gate) *
             (sum.elements[kAll / 4 + i] + (i % 2 == 0 ? value_bias.x : value_bias.y));
    });
  }
};
#endif

/// What a block has in shared memory: kWidth columns of both weights, their biases, 64 rows of
/// results for each consumer, and `stages` tiles of x, 64 rows by K. Only blocks of 64 columns may
/// have a part of H, and M is a multiple of 64; else, or if nothing fits, there are no stages.
template <int kWidth_, int kConsumers_>
struct LooseRows {
  static constexpr int kWidth = kWidth_, kMostStages = 18;
  static constexpr int kConsumers = kConsumers_;  // warpgroups, beside one that copies
  static constexpr int kThreads = 128 * (1 + kConsumers);
  int K, H, slices;  ///< slices: of 16 channels
  int columns;       ///< blocks side by side that cover all of H
  int pitch;         ///< from a row of results to the next: H, or kWidth and some more
  int shift;         ///< K 2^shift is a multiple of 8
  int stages = 0;

  LooseRows(const GatingShape& shape, int64_t room)
      : K(static_cast<int>(shape.channels)),
        H(static_cast<int>(shape.hidden)),
        slices((K + 15) / 16),
        columns((H + kWidth - 1) / kWidth),
        pitch(columns == 1 ? H : kWidth + (H % 8 == 0 ? 8 : 2)),
        shift(3 - std::min(3, std::countr_zero(static_cast<unsigned>(K)))) {
    // A stage always has the same consumer, which sees one phase end before it waits for the next.
    if (shape.rows % 64 != 0 || K > 1024 || (columns > 1 && kWidth != 64)) return;
    const int64_t left = room - static_cast<int64_t>(bytes());
    const int64_t most = left / (tile_bytes() + static_cast<int64_t>(2 * sizeof(Barrier)));
    const int64_t turns = std::clamp<int64_t>(most, 0, kMostStages) / kConsumers;
    stages = static_cast<int>(turns) * kConsumers;
  }
  __host__ __device__ int weight_bytes() const { return 64 * kWidth * slices; }
  __host__ __device__ int out_bytes() const { return 128 * pitch; }
  __host__ __device__ int tile_bytes() const { return 128 * K; }
  size_t bytes() const {
    return weight_bytes() + kConsumers * out_bytes() + 2 * kWidth * sizeof(float) +
           stages * (tile_bytes() + 2 * sizeof(Barrier));
  }
};

#if HOPPER_CODE
/// A block's columns of W1 and W2, in turns: 8 of the one, 8 of the other, and so on. So one wgmma
/// computes both sums, and a thread gets both of an element. They lie in boxes of 64 columns by
/// `depth` rows of k; zeros beyond K or H.
struct WeightsInTurns {
  half* elements;
  int depth;

  /// All of the calling threads copy, pieces of 8 columns; this is number `own` of them.
  template <int kWidth, int kThreads>
  __device__ void load(const GatingOperands& in, int col0, int own) const {
    constexpr int kPieces = kWidth / 4;
#pragma unroll 2
    for (int i = own; i < depth * kPieces; i += kThreads) {
      const int k = i / kPieces, piece = i % kPieces, col = col0 + piece / 2 * 8;
      const half* from = (piece % 2 == 0 ? in.W1 : in.W2) + static_cast<size_t>(k) * in.H + col;
      half* to = elements + piece / 8 * depth * kBoxCols + swizzled(k, piece % 8);
      if (in.H % 8 == 0) {
        copy_async<16>(to, from, k < in.K && col < in.H);
      } else {
        alignas(16) half eight[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          eight[j] = k < in.K && col + j < in.H ? from[j] : __float2half_rn(0);
        }
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(eight);
      }
    }
    copy_async_commit();
    copy_async_wait<0>();
    shared_fence();
  }
  /// For wgmma: 16 rows from 16 `slice` on.
  __device__ uint64_t operand(int slice) const {
    return descriptor_b(elements, depth) + 128 * slice;
  }
};

/// A consumer's part: a warpgroup, which multiplies 64 rows of x and applies the gate. Which row of
/// a tile is which row of wgmma is ours to say. There are 8 sets of 8 rows; a thread has one row of
/// each of its warp's two sets. The rows of a set are 2^shift apart, and so on different banks,
/// unless K is a multiple of 16.
template <class Plan>
struct LooseConsumer {
  static constexpr int kWidth = Plan::kWidth;
  const Plan& plan;
  const WeightsInTurns W;
  const float* biases;  ///< kWidth of the gates, then of the values
  half* results;
  const int thread = threadIdx.x % 128, consumer = threadIdx.x / 128 - 1, pair = thread % 4 * 2;

  __device__ void meet() const { named_barrier(1 + consumer, 128); }
  __device__ int row(int which) const {
    const int set = thread / 32 * 2 + which, shift = plan.shift;
    return (set >> shift << (shift + 3)) + (thread % 32 / 4 << shift) + (set & ((1 << shift) - 1));
  }

  /// A thread's fragments of slice number `slice` of a tile of x, zeros beyond K. With kPairs (K is
  /// even) two neighbours are one load; if K is odd, only in even rows, which are those of row(0).
  template <bool kPairs>
  __device__ void load_fragments(uint32_t (&fragments)[4], const half* x, int slice) const {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int col = 16 * slice + pair + m / 2 * 8, left = plan.K - col;
      const half* from = x + row(m % 2) * plan.K + col;
      if (kPairs || m % 2 == 0) {
        const uint32_t both = left > 0 ? *reinterpret_cast<const uint32_t*>(from) : 0;
        fragments[m] = kPairs || left > 1 ? both : both & 0xffff;
      } else {
        const uint32_t first = left > 0 ? *reinterpret_cast<const uint16_t*>(from) : 0;
        const uint32_t second = left > 1 ? *reinterpret_cast<const uint16_t*>(from + 1) : 0;
        fragments[m] = first | second << 16;
      }
    }
  }

  /// sum = x W, for a tile of x, whose stage is then given back. While a slice is multiplied the
  /// next one is loaded.
  template <bool kPairs>
  __device__ void multiply(Sum<2 * kWidth>& sum, const half* x, Barrier& empty) const {
    uint32_t fragments[2][4];
    const auto add = [&](uint32_t(&of)[4], int slice) {
      load_fragments<kPairs>(of, x, slice);
      wgmma_fence();
      wgmma<half>(sum.elements, of, W.operand(slice), slice > 0);
      wgmma_commit();
      wgmma_wait<1>();
    };
    for (int slice = 0; slice < plan.slices; slice += 2) {
      add(fragments[0], slice);
      if (slice + 1 < plan.slices) add(fragments[1], slice + 1);
    }
    // All of the warp have loaded what they multiply: wgmma is one instruction of all its threads.
    if (thread % 32 == 0) barrier_arrive(&empty);
    wgmma_wait<0>();
  }

  /// Puts the gated sums into `results`; `cols` columns exist from the block's first one on.
  __device__ void apply_gate(const Sum<2 * kWidth>& sum, int cols) const {
    half* const rows[2] = {results + row(0) * plan.pitch + pair,
                           results + row(1) * plan.pitch + pair};
#pragma unroll
    for (int j = 0; j < kWidth; j += 8) {
      if (j >= cols) break;
      const float2 b1 = *reinterpret_cast<const float2*>(biases + j + pair);
      const float2 b2 = *reinterpret_cast<const float2*>(biases + kWidth + j + pair);
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const float* gate = &sum.elements[j + 2 * which];
        const float* value = gate + 4;
        const float left = sigmoid(gate[0] + b1.x) * (value[0] + b2.x);
        const float right = sigmoid(gate[1] + b1.y) * (value[1] + b2.y);
        half* to = rows[which] + j;
        const int there = cols - j - pair;
        if (plan.pitch % 2 == 0) {
          if (there > 0) *reinterpret_cast<uint32_t*>(to) = pack2<half>(left, right);
        } else {
          if (there > 0) to[0] = __float2half_rn(left);
          if (there > 1) to[1] = __float2half_rn(right);
        }
      }
    }
  }

  /// The warpgroup copies 64 rows of results to `out`, whole ones: they are one piece there, too.
  __device__ void store(half* out) const {
    const auto* from = reinterpret_cast<const uint4*>(results);
    auto* to = reinterpret_cast<uint4*>(out);
#pragma unroll 4
    for (int i = thread; i < 8 * plan.H; i += 128) to[i] = from[i];
  }
  /// The same for `cols` columns of longer rows, kPack elements at a time.
  template <int kPack>
  __device__ void store_part(half* out, int cols) const {
    constexpr int kPieces = kWidth / kPack, kStep = 128 / kPieces;
    static_assert(128 % kPieces == 0);
    using Pack = Neighbours<half, kPack>;
    const int first = thread / kPieces, col = thread % kPieces * kPack;
    if (col >= cols) return;
    half* to = out + static_cast<size_t>(first) * plan.H + col;
#pragma unroll 8
    for (int r = first; r < 64; r += kStep, to += kStep * plan.H) {
      *reinterpret_cast<Pack*>(to) = *reinterpret_cast<const Pack*>(results + r * plan.pitch + col);
    }
  }
};
#endif

/// A block keeps kWidth columns of both weights. One thread copies tiles of x, each in one piece. A
/// warpgroup in turn owns a tile of out: 64 rows, 2 of them a thread's. M is a multiple of 64.
template <class Plan>
__global__ void __launch_bounds__(Plan::kThreads, 1)
    gating_loose_rows(const __grid_constant__ GatingOperands in,
                      const __grid_constant__ Plan plan) {
#if HOPPER_CODE
  constexpr int kWidth = Plan::kWidth, kConsumers = Plan::kConsumers;
  extern __shared__ __align__(1024) char memory[];
  char* results = memory + plan.weight_bytes();
  float* biases = reinterpret_cast<float*>(results + kConsumers * plan.out_bytes());
  char* x_tiles = reinterpret_cast<char*>(biases + 2 * kWidth);
  Barrier* full = reinterpret_cast<Barrier*>(x_tiles + plan.stages * plan.tile_bytes());
  Barrier* empty = full + plan.stages;
  const int col0 = blockIdx.y * kWidth, tiles = in.M / 64;
  if (threadIdx.x == 0) {
    for (int s = 0; s < plan.stages; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], 4);  // the consumer's warps
    }
    barrier_init_fence();
  }
  __syncthreads();

  int parity = 0;
  if (threadIdx.x < 128) {
    registers_shrink_to<24>();
    if (threadIdx.x != 0) return;
    const int bytes = plan.tile_bytes();
    for (int tile = blockIdx.x, stage = 0; tile < tiles; tile += gridDim.x) {
      barrier_wait(&empty[stage], parity ^ 1);
      barrier_arrive_expect(&full[stage], bytes);
      bulk_load(x_tiles + stage * bytes, in.x + static_cast<size_t>(64 * plan.K) * tile, bytes,
                &full[stage]);
      if (++stage == plan.stages) stage = 0, parity ^= 1;
    }
  } else {
    registers_grow_to<kConsumers == 2 ? 240 : 160>();
    const int own = threadIdx.x - 128, consumer = own / 128, cols = in.H - col0;
    const LooseConsumer<Plan> me{plan,
                                 {reinterpret_cast<half*>(memory), 16 * plan.slices},
                                 biases,
                                 reinterpret_cast<half*>(results + consumer * plan.out_bytes())};
    for (int i = own; i < 2 * kWidth; i += 128 * kConsumers) {
      const half* from = i < kWidth ? in.b1 : in.b2;
      biases[i] = i % kWidth < cols ? __half2float(from[col0 + i % kWidth]) : 0;
    }
    me.W.template load<kWidth, 128 * kConsumers>(in, col0, own);
    named_barrier(1 + kConsumers, 128 * kConsumers);
    for (int tile = blockIdx.x + consumer * gridDim.x, stage = consumer; tile < tiles;
         tile += kConsumers * gridDim.x) {
      const half* x = reinterpret_cast<const half*>(x_tiles + stage * plan.tile_bytes());
      Sum<2 * kWidth> sum;
      barrier_wait(&full[stage], parity);
      if (plan.K % 2 == 0) {
        me.template multiply<true>(sum, x, empty[stage]);
      } else {
        me.template multiply<false>(sum, x, empty[stage]);
      }
      me.meet();  // the last results have been read
      me.apply_gate(sum, cols);
      me.meet();
      half* out = in.out + static_cast<size_t>(64) * tile * in.H + col0;
      if (plan.columns == 1) {
        me.store(out);
      } else if constexpr (kWidth == 64) {
        if (in.H % 8 == 0) {
          me.template store_part<8>(out, cols);
        } else if (in.H % 2 == 0) {
          me.template store_part<2>(out, cols);
        } else {
          me.template store_part<1>(out, cols);
        }
      }
      if ((stage += kConsumers) >= plan.stages) stage = consumer, parity ^= 1;
    }
  }
#endif
}
