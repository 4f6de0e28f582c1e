// The gradients of the gated layer for compute capability 8.0 and newer where x and out have few
// columns, by one kernel: for each row it reads nothing but x and d_out, and writes nothing but dx.
//
// A block goes from tile to tile of 128 or 64 rows. For each it computes [s | v] = x [W1 | W2]
// again. From these and d_out it computes [dS | dV], which goes to shared memory, and then dx =
// [dS | dV] [W1 | W2]^T. It adds x^T [dS | dV] to sums that stay in registers until the last tile.
// After that other kernels add up the sums of all blocks (add_weight_gradients,
// add_bias_gradients).
#pragma once

#include "operators/gating/portable/weights.cuh"
#include "operators/product/portable/mma_tiles.cuh"

namespace operators::gating {

using namespace operators::product;

/// What a launch works on. Rows of x and d_out are multiples of 8 elements apart, those of d_x are
/// dense. Of each block, `weights` has (K, 2 pitch) sums of x^T [dS | dV], and `biases` (2, pitch)
/// column sums.
template <typename T>
struct BackwardOnChip {
  LayerOperands<T> in;
  const T* d_out;
  T* d_x;
  int64_t x_stride, d_out_stride;
  float *weights, *biases;
  int pitch;
};

/// K up to 128, H up to 64. Four warps divide the columns, and as many groups of four the rows.
template <int kRowsOfTile, int kWarps, int kStagesAhead>
struct OnChipTile {
  static constexpr int kRows = kRowsOfTile, kDepth = 128, kHidden = 64, kWidth = 2 * kHidden;
  static constexpr int kThreads = 32 * kWarps, kStages = kStagesAhead, kGroups = kWarps / 4;
  static constexpr int kOwn = kRows / kGroups;               ///< a warp's rows of a tile
  static constexpr int kChannels = kDepth / kGroups;         ///< and of the weights' gradients
  static constexpr int kStage = kRows * (kDepth + kHidden);  ///< elements: of x, and of d_out
  static constexpr int kSharedBytes =
      2 * (kDepth * kWidth + kStages * kStage + kRows * kWidth) + kWidth * 4;
};

/// Starts the block's copy of kRows rows of kCols columns to a swizzled tile, from `from` on, of
/// which `rows` x `cols` exist. What is outside becomes 0.
template <int kRows, int kCols, int kThreads, typename T>
__device__ __forceinline__ void copy_part_swizzled(T* to, const T* from, int64_t stride, int rows,
                                                   int cols) {
  constexpr int kPieces = kCols / 8, kStep = kThreads / kPieces;
  static_assert(kStep % 8 == 0);
  const int row = static_cast<int>(threadIdx.x) / kPieces;
  const int col = static_cast<int>(threadIdx.x) % kPieces * 8, there = min(max(cols - col, 0), 8);
  T* const at = to + swizzle<kCols>(row, col);
  from += row * stride + col;
#pragma unroll
  for (int r = 0; r < kRows; r += kStep, from += kStep * stride) {
    if (cols % 8 == 0) {
      copy_async<16>(at + r * kCols, from, row + r < rows && there > 0);
    } else {
      copy_async_part(at + r * kCols, from, row + r < rows ? 2 * there : 0);
    }
  }
}

template <class Tile, typename T>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    backward_on_chip(const __grid_constant__ BackwardOnChip<T> of) {
  constexpr int kRows = Tile::kRows, kDepth = Tile::kDepth, kHidden = Tile::kHidden;
  constexpr int kWidth = Tile::kWidth, kStages = Tile::kStages, kThreads = Tile::kThreads;
  constexpr int kOwn = Tile::kOwn, kChannels = Tile::kChannels;
  extern __shared__ __align__(128) char on_chip_shared[];
  const LayerOperands<T>& in = of.in;
  T* const weights = reinterpret_cast<T*>(on_chip_shared);  // (kDepth, kWidth): [W1 | W2]
  T* const gradients = weights + kDepth * kWidth;           // (kRows, kWidth): [dS | dV]
  T* const stages = gradients + kRows * kWidth;
  float* const biases = reinterpret_cast<float*>(stages + kStages * Tile::kStage);  // b1, b2
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = warp / 4, quarter = warp % 4;

  const int tiles = (in.M + kRows - 1) / kRows;
  const auto copy = [&](int step) {
    const int64_t tile = blockIdx.x + int64_t{step} * gridDim.x;
    if (tile >= tiles) return;
    T* const stage = stages + step % kStages * Tile::kStage;
    const int rows = static_cast<int>(min(in.M - tile * kRows, int64_t{kRows}));
    copy_part_swizzled<kRows, kDepth, kThreads>(stage, in.x + tile * kRows * of.x_stride,
                                                of.x_stride, rows, in.K);
    copy_part_swizzled<kRows, kHidden, kThreads>(stage + kRows * kDepth,
                                                 of.d_out + tile * kRows * of.d_out_stride,
                                                 of.d_out_stride, rows, in.H);
  };
  // Weights and biases, with the first tile.
  for (int i = static_cast<int>(threadIdx.x) * 8; i < kDepth * kWidth; i += kThreads * 8) {
    const int k = i / kWidth, c = i % kWidth;
    copy_weights<8, kWidth>(weights, in, c < kHidden, k, c, c % kHidden);
  }
  for (int c = threadIdx.x; c < kWidth; c += kThreads) {
    biases[c] = bias_at(in, c < kHidden, c % kHidden);
  }
  auto ahead = copies_ahead<kStages>(copy);

  const MmaResults<T> d_x{of.d_x, in.K, in.M, in.K};
  Sums<kChannels, 32> d_W = {};  // rows: channels
  float4 d_biases[2] = {};       // of two columns of dS, and of dV
  for (int tile = blockIdx.x; tile < tiles; tile += static_cast<int>(gridDim.x)) {
    T* const x = stages + ahead.next() % kStages * Tile::kStage;
    T* const d_out = x + kRows * kDepth;
    const int row0 = kOwn * group, col0 = 16 * quarter;  // in the tile
    {
      Sums<kOwn, 16> s, v;
      start_at_biases(s, biases + col0);
      start_at_biases(v, biases + kHidden + col0);
#pragma unroll
      for (int k = 0; k < kDepth; k += 16) {
        unsigned a[kOwn / 16][4], gate[1][4], value[1][4];
        load_left<kDepth>(a, x, row0, k);
        load_right<kWidth>(gate, weights, k, col0);
        load_right<kWidth>(value, weights, k, kHidden + col0);
        add_product<T>(s, a, gate);
        add_product<T>(v, a, value);
      }
      with_gate(in.gate, [&]<Gate kGate>() {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
          for (int i = 0; i < kOwn / 8; ++i) {
            const unsigned pair = *pair_in<kHidden>(d_out, row0, col0, i, j);
            const T* const d = reinterpret_cast<const T*>(&pair);
            const float2 gates = pair_of(s, i, j), values = pair_of(v, i, j);
            const int col = col0 + 8 * j + lane % 4 * 2;
            const bool inside = tile * kRows + row0 + 8 * i + lane / 4 < in.M;
            float d_s[2], d_v[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const GateAt gate = gate_at<T, kGate>(e == 0 ? gates.x : gates.y);
              const float by = static_cast<float>(d[e]);
              const bool counts = inside && col + e < in.H;
              d_v[e] = counts ? by * gate.value : 0;
              d_s[e] = counts ? by * gate.slope * (e == 0 ? values.x : values.y) : 0;
            }
            d_biases[j].x += d_s[0], d_biases[j].y += d_s[1];
            d_biases[j].z += d_v[0], d_biases[j].w += d_v[1];
            *pair_in<kWidth>(gradients, row0, col0, i, j) = pack2<T>(d_s[0], d_s[1]);
            *pair_in<kWidth>(gradients, row0, kHidden + col0, i, j) = pack2<T>(d_v[0], d_v[1]);
          }
        }
      });
    }
    __syncthreads();  // all of [dS | dV] is there
    {
      Sums<kOwn, 32> sum = {};
#pragma unroll
      for (int c = 0; c < kWidth; c += 16) {
        unsigned a[kOwn / 16][4], b[2][4];
        load_left<kWidth>(a, gradients, row0, c);
        load_right_transposed<kWidth>(b, weights, c, 32 * quarter);
        add_product<T>(sum, a, b);
      }
      d_x.template store<kOwn, 32>(tile * kRows + row0, 32 * quarter, [&](int i, int j) {
        const float2 pair = pair_of(sum, i, j);
        return pack2<T>(pair.x, pair.y);
      });
    }
#pragma unroll
    for (int r = 0; r < kRows; r += 16) {
      unsigned a[kChannels / 16][4], b[2][4];
      load_left_transposed<kDepth>(a, x, kChannels * group, r);
      load_right<kWidth>(b, gradients, r, 32 * quarter);
      add_product<T>(d_W, a, b);
    }
  }

  float* const to = of.weights + int64_t{blockIdx.x} * in.K * 2 * of.pitch;
  for_pairs(d_W, kChannels * group, 32 * quarter, in.K, kWidth, [&](int k, int c, float2 pair) {
    if (c % kHidden >= of.pitch) return;
    const int col = c < kHidden ? c : of.pitch + c - kHidden;
    *reinterpret_cast<float2*>(to + int64_t{k} * 2 * of.pitch + col) = pair;
  });
  // The column sums: of a warp's rows by shuffles, of all groups in the stages' memory.
  float* const column_sums = reinterpret_cast<float*>(stages);  // (kGroups, kWidth)
  float* const own_sums = reinterpret_cast<float*>(d_biases);   // of 2 times 8 columns
  copy_async_wait<0>();
  __syncthreads();  // all have read the last stage
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    for (int by = 4; by < 32; by *= 2) own_sums[i] += __shfl_xor_sync(kAllLanes, own_sums[i], by);
    const int c = i / 2 % 2 * kHidden + 16 * quarter + i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (lane < 4) column_sums[group * kWidth + c] = own_sums[i];
  }
  __syncthreads();
  const int c = static_cast<int>(threadIdx.x), col = c % kHidden;
  if (c >= kWidth || col >= of.pitch) return;
  float sum = 0;
  for (int i = 0; i < Tile::kGroups; ++i) sum += column_sums[i * kWidth + c];
  of.biases[(int64_t{blockIdx.x} * 2 + c / kHidden) * of.pitch + col] = sum;
}

}  // namespace operators::gating
