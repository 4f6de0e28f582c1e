// The gated layer for compute capability 8.0 and newer where x has many rows and few columns: by
// mma.sync, with weights that stay in registers.
//
// A block with its weights in shared memory (resident_mma in portable.cuh) reads them again for
// each tile of x. Here a warp keeps 16 columns of W1 and of W2 as fragments. So for a tile it reads
// only x and its biases, and its sums are few enough for 16 warps on a multiprocessor. Warps with
// the same rows of x are a team. They share tiles of 16 rows of x, and the stages of shared memory
// to which these tiles are copied.
#pragma once

#include "operators/gating/portable/weights.cuh"
#include "operators/product/portable/mma_tiles.cuh"
#include "primitives/hopper/cluster.cuh"
#include "primitives/neighbours.cuh"

namespace operators::gating {

using namespace operators::product;

/// What a launch of held_mma works on. Rows of x are a multiple of 8 elements apart.
template <typename T>
struct HeldMma {
  LayerOperands<T> in;
  int64_t x_stride, out_stride;
  int team;  ///< warps: 2, 4, 8 or 16, which have kOwn columns of out each
};

/// K up to kMostDepth. A team has kStagesOfTeam stages.
template <int kMostDepth, int kStagesOfTeam>
struct HeldTile {
  static constexpr int kDepth = kMostDepth, kStages = kStagesOfTeam, kWarps = 16;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 16, kStage = kRows * kDepth;
  static constexpr int kOwn = 16;  ///< columns of out that a warp has
  /// Stages of all teams, weights, and biases.
  static constexpr int shared_bytes(int team) {
    return 2 * (kWarps / team * kStages * kStage + team * 2 * kOwn * kDepth) +
           team * 2 * kOwn * static_cast<int>(sizeof(float));
  }
};

/// Which of a warp's columns is number `place` in the fragments. mma.sync leaves a lane two
/// neighbouring places of each 8. In this order all places of a lane are neighbouring columns of
/// out: so a lane stores them as one.
template <int kOwn>
__host__ __device__ constexpr int held_column(int place) {
  return place % 8 / 2 * (kOwn / 4) + place / 8 * 2 + place % 2;
}

/// A block has 16 warps, which are 16 / team teams. A team takes every `stride`-th tile of 16 rows.
/// Each warp of it owns the same kOwn columns of out in all of these tiles. Its columns of W1 and
/// W2 go through shared memory to registers once, and stay there. Rows of x go by cp.async to the
/// team's stages, from which all of its warps load them. A lane owns four neighbouring columns of
/// two rows of out. It stores them from its registers, 8 bytes for each row. Teams do not wait for
/// each other: so while one has its sigmoids, another one multiplies.
template <class Tile, typename T>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    held_mma(const __grid_constant__ HeldMma<T> of) {
  constexpr int kRows = Tile::kRows, kStages = Tile::kStages, kDepth = Tile::kDepth;
  constexpr int kOwn = Tile::kOwn, kWidth = 2 * kOwn;
  extern __shared__ __align__(128) char held_shared[];
  const LayerOperands<T>& in = of.in;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int team = warp / of.team, member = warp % of.team, teams = Tile::kWarps / of.team;
  T* const all_stages = reinterpret_cast<T*>(held_shared);
  T* const stages = all_stages + team * kStages * Tile::kStage;
  T* const weights = all_stages + teams * kStages * Tile::kStage + member * kDepth * kWidth;
  float* const biases = reinterpret_cast<float*>(all_stages + teams * kStages * Tile::kStage +
                                                 of.team * kDepth * kWidth) +
                        member * kWidth;

  const int tiles = (in.M + kRows - 1) / kRows, stride = static_cast<int>(gridDim.x) * teams;
  const int first = static_cast<int>(blockIdx.x) * teams + team;
  // A warp copies rows of its own, as many at a time as 32 pieces of 16 bytes are. `copied` is the
  // tile whose rows come next, and `from` where the lane's first piece of it is.
  constexpr int kRowsAtOnce = 32 * 8 / kDepth;
  const int copy_row = member * kRowsAtOnce + lane / (kDepth / 8);
  const int copy_col = lane % (kDepth / 8) * 8;
  const int there = min(max(in.K - copy_col, 0), 8), row_step = of.team * kRowsAtOnce;
  const int64_t from_step = row_step * of.x_stride, tile_step = stride * kRows * of.x_stride;
  const T* from = in.x + (int64_t{first} * kRows + copy_row) * of.x_stride + copy_col;
  // Where a lane's pieces lie: see swizzle(). A step of 4 rows changes bit 2 of the row.
  const int to = swizzle<kDepth>(copy_row, copy_col), turn = row_step % 8 * 8;
  int copied = first;
  const auto copy = [&](T* stage) {
    if (copied < tiles) {
      const int rows = min(in.M - copied * kRows, kRows);
      const T* piece = from;
      int at = to;
      const auto each_row = [&](const auto& start) {
#pragma unroll 1
        for (int row = copy_row; row < kRows; row += row_step) {
          start(row);
          piece += from_step, at = (at ^ turn) + row_step * kDepth;
        }
      };
      if (in.K % 8 == 0) {
        const int inside = there > 0 ? rows : 0;
        each_row([&](int row) { copy_async<16>(stage + at, piece, row < inside); });
      } else {
        each_row([&](int row) { copy_async_part(stage + at, piece, row < rows ? 2 * there : 0); });
      }
      copied += stride, from += tile_step;
    }
    copy_async_commit();
  };

  // The weights come first, in pairs of columns. All teams have the same weights, and warps with
  // the same `member` need the same columns. So these warps divide the copies.
  for (int i = (team * 32 + lane) * 2; i < kDepth * kWidth; i += teams * 32 * 2) {
    const int k = i / kWidth, c = i % kWidth, col = member * kOwn + held_column<kOwn>(c % kOwn);
    copy_weights<2, kWidth>(weights, in, c < kOwn, k, c, col);
  }
  copy_async_commit();
  for (int s = 0; s < kStages - 1; ++s) copy(stages + s * Tile::kStage);
  if (team == 0) {
    for (int c = lane; c < kWidth; c += 32) {
      const int col = member * kOwn + held_column<kOwn>(c % kOwn);
      biases[c] = bias_at(in, c < kOwn, col);
    }
  }
  copy_async_wait<kStages - 1>();
  __syncthreads();
  unsigned b[kDepth / 16][kWidth / 16][4];
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) load_right<kWidth>(b[k / 16], weights, k, 0);

  // Where the lane's first results of a tile go: in every eighth row kOwn / 4 neighbours.
  constexpr int kBeside = kOwn / 4;
  const int own_col = member * kOwn + lane % 4 * kBeside;
  const bool whole_cols = of.out_stride % kBeside == 0 && own_col + kBeside <= in.H;
  const int64_t out_step = int64_t{stride} * kRows * of.out_stride;
  T* to_out = in.out + (int64_t{first} * kRows + lane / 4) * of.out_stride + own_col;
  int stage = 0, next = kStages - 1;  // that is multiplied, and that is filled
  for (int tile = first; tile < tiles; tile += stride) {
    copy_async_wait<kStages - 2>();
    named_barrier(1 + team, 32 * of.team);  // the team's copies are there, and all have read `next`
    copy(stages + next * Tile::kStage);
    const T* const x = stages + stage * Tile::kStage;
    stage = stage + 1 == kStages ? 0 : stage + 1;
    next = next + 1 == kStages ? 0 : next + 1;
    Sums<kRows, kWidth> sum;
    start_at_biases(sum, biases);
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      unsigned a[kRows / 16][4];
      load_left<kDepth>(a, x, 0, k);
      add_product<T>(sum, a, b[k / 16]);
    }
    make_sigmoids(in.gate, sum);
    Neighbours<T, kBeside> results[kRows / 8];
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
#pragma unroll
      for (int j = 0; j < kOwn / 8; ++j) {
        const float2 gate = pair_of(sum, i, j), value = pair_of(sum, i, j + kOwn / 8);
        reinterpret_cast<unsigned*>(results[i].values)[j] =
            pack2<T>(gated(gate.x, value.x), gated(gate.y, value.y));
      }
    }
    const int rows = in.M - tile * kRows - lane / 4;  // from the lane's first one on
    if (whole_cols && rows > kRows - 8) {
#pragma unroll
      for (int i = 0; i < kRows / 8; ++i) {
        *reinterpret_cast<Neighbours<T, kBeside>*>(to_out + 8 * i * of.out_stride) = results[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kRows / 8; ++i) {
#pragma unroll
        for (int e = 0; e < kBeside; ++e) {
          if (8 * i < rows && own_col + e < in.H) {
            to_out[8 * i * of.out_stride + e] = results[i].values[e];
          }
        }
      }
    }
    to_out += out_step;
  }
}

}  // namespace operators::gating
