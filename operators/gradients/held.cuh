// Gradient features for E from 65 to 128 on compute capability 8.0 and newer, forward and backward:
// by mma.sync, with right factors that stay in registers.
//
// A warp keeps 16 columns of x, M1 and M2 as fragments. So it reads from shared memory only what
// changes from tile to tile. But then registers have room for only two warps on each scheduler. If
// both multiply at the same time, each is half as fast, and then both compute tanh while the tensor
// cores are idle. So one multiplies while the other one does all the rest. Forward, two groups of
// warps take turns. Backward, one warp makes P, Q, R and S, and the other one adds them up.
#pragma once

#include <algorithm>

#include "operators/gradients/associated.cuh"
#include "primitives/hopper/cluster.cuh"

namespace operators::gradients {

/// A block has 64 columns, 16 a warp, and two groups of four warps. Each group has tiles of its
/// own, and kStageCount stages for them, each with 32 rows of Gr and of Gi. x, M1 and M2 come
/// through the stages' memory.
template <int kStageCount>
struct HeldForward {
  static constexpr bool kHeld = true;
  static constexpr int BV = 32, BN = 64, kMaxE = 128, kOwn = 16, kStages = kStageCount;
  static constexpr int kHandOver = 2;  // see add_held
  static constexpr int kGroup = BN / kOwn * 32, kThreads = 2 * kGroup, kBlocks = 1;
  static constexpr int kHalf = BV * kMaxE;  // elements of a tile of Gr, or Gi
  static constexpr int kRight = kMaxE * BN;
  static constexpr int64_t shared_bytes(int64_t) {
    return 2 * std::max(3 * kRight, 2 * kStages * 2 * kHalf);
  }
};

// A warp's sums of a tile, from its columns of x, M1 and M2 in registers. hand_over() is called
// after kHandOver products of 16 of the depth: from then on other warps have the tensor cores, too.
template <int kHandOver, int WV, int kDepth16, class HandOver>
__device__ __forceinline__ void add_held(WarpGradients<WV, 16>& sums, const bf16* Gr,
                                         const bf16* Gi, const unsigned (&right)[3][kDepth16][1][4],
                                         HandOver hand_over) {
  constexpr int kE = 16 * kDepth16;
  static_assert(kHandOver >= 1 && kHandOver <= kDepth16);
  const auto& [x, M1, M2] = right;
#pragma unroll
  for (int k = 0; k < kE; k += 16) {
    unsigned gr[WV / 16][4], gi[WV / 16][4], minus_M2[1][4];
    load_left<kE>(gr, Gr, 0, k);
    load_left<kE>(gi, Gi, 0, k);
    negate(minus_M2, M2[k / 16]);
    add_product(sums.xr, gr, x[k / 16]);
    add_product(sums.xi, gi, x[k / 16]);
    add_product(sums.ar, gr, M1[k / 16]);
    add_product(sums.ai, gi, M1[k / 16]);
    add_product(sums.ar, gi, minus_M2);
    add_product(sums.ai, gr, M2[k / 16]);
    if (k / 16 + 1 == kHandOver) hand_over();
  }
}

// Loads a warp's columns of x, M1 and M2, from `col` of the block's BN on, through `shared`, which
// is free again afterwards. The block's first kThreads threads call it, and meet() is a barrier
// among them.
template <int BN, int kThreads, int kDepth16, class Meet>
__device__ __forceinline__ void load_held(unsigned (&right)[3][kDepth16][1][4], bf16* shared,
                                          const GradientsOperands& in, const bf16* M, int w0,
                                          int col, Meet meet) {
  constexpr int kE = 16 * kDepth16;
  const bf16* const factors[3] = {in.x, M, M + static_cast<size_t>(in.E) * in.W};
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    copy_swizzled<kE, BN, kThreads>(shared + i * kE * BN, factors[i], 0, w0, in.E, in.W);
  }
  copy_async_commit();
  copy_async_wait<0>();
  meet();
#pragma unroll
  for (int i = 0; i < 3; ++i) {
#pragma unroll
    for (int k = 0; k < kE; k += 16) load_right<BN>(right[i][k / 16], shared + i * kE * BN, k, col);
  }
  meet();
}

// Computes out = tanh(xr ar + xi ai). Block (x, y) owns BN columns. Its two groups of four warps
// take tiles of BV rows: group 0 begins with tile 2 y, group 1 with tile 2 y + 1, and each goes on
// to every 2 gridDim.y-th one. A warp has all rows of its group's tile, and 16 columns. Each group
// copies Gr and Gi of its tiles to stages of its own. Results go from registers to memory.
//
// The groups take turns. A group computes the first kHandOver parts of its products alone. Then the
// other group may begin. So the rest of these products overlaps the other group's first ones, and
// tanh and the stores overlap the others. (No block may be without a tile: see holds().)
template <class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kBlocks)
    held_features(GradientsOperands in, const bf16* M) {
  constexpr int BV = Tiles::BV, BN = Tiles::BN, kE = Tiles::kMaxE, kStages = Tiles::kStages;
  constexpr int kOwn = Tiles::kOwn, kGroup = Tiles::kGroup, kAll = Tiles::kThreads;
  constexpr int kTurn = 1;  // kTurn + group is the id of the barrier before this group's turn
  extern __shared__ __align__(128) bf16 tiles[];
  const int group = static_cast<int>(threadIdx.x) / kGroup;
  const int thread = static_cast<int>(threadIdx.x) % kGroup;
  const int w0 = blockIdx.x * BN, col = thread / 32 * kOwn;
  unsigned right[3][kE / 16][1][4];
  load_held<BN, kAll>(right, tiles, in, M, w0, col, [] { __syncthreads(); });

  bf16* const stages = tiles + group * kStages * 2 * Tiles::kHalf;
  const int64_t first = 2 * int64_t{blockIdx.y} + group, tile_step = 2 * int64_t{gridDim.y};
  // Group 1 may have a tile less. Then it multiplies zeros, and takes its turns all the same.
  const int steps =
      static_cast<int>(ceil_div(ceil_div(in.V, BV) - 2 * int64_t{blockIdx.y}, tile_step));
  const auto copy = [&](int step) {
    if (step < steps) {
      const int64_t row = (first + step * tile_step) * BV;
      bf16* const stage = stages + step % kStages * 2 * Tiles::kHalf;
      copy_swizzled<BV, kE, kGroup>(stage, in.Gr, row, 0, in.V, in.E, thread);
      copy_swizzled<BV, kE, kGroup>(stage + Tiles::kHalf, in.Gi, row, 0, in.V, in.E, thread);
    }
    copy_async_commit();
  };
  for (int step = 0; step < kStages - 1; ++step) copy(step);
  if (group == 1) named_arrive(kTurn, kAll);
  for (int step = 0; step < steps; ++step) {
    const int64_t row = (first + step * tile_step) * BV;
    copy_async_wait<kStages - 2>();
    // Behind this barrier it is the group's turn, all of its copies for this step are there, and
    // all of its warps have read the stage of the step before.
    named_barrier(kTurn + group, kAll);
    WarpGradients<BV, kOwn> sums;
    const bf16* const Gr = stages + step % kStages * 2 * Tiles::kHalf;
    add_held<Tiles::kHandOver>(sums, Gr, Gr + Tiles::kHalf, right, [&] {
      if (group == 0 || step + 1 < steps) named_arrive(kTurn + 1 - group, kAll);
    });
    copy(step + kStages - 1);
    // A lane stores pairs of 4 bytes. To exchange pairs among lanes first, so that a lane stores 16
    // bytes at a time, takes longer.
#pragma unroll
    for (int i = 0; i < BV / 8; ++i) {
#pragma unroll
      for (int j = 0; j < kOwn / 8; ++j) {
        const float2 xr = pair_of(sums.xr, i, j), xi = pair_of(sums.xi, i, j);
        const float2 ar = pair_of(sums.ar, i, j), ai = pair_of(sums.ai, i, j);
        const int64_t v = row + 8 * i + thread % 32 / 4;
        const int w = w0 + col + 8 * j + thread % 4 * 2;
        const unsigned pair = pack2<bf16>(tanh_approximate(xr.x * ar.x + xi.x * ai.x),
                                          tanh_approximate(xr.y * ar.y + xi.y * ai.y));
        if (v < in.V && w < in.W) *reinterpret_cast<unsigned*>(in.out + v * in.W + w) = pair;
      }
    }
  }
}

/// Backward. A block has 64 columns. Its first kMakers threads are makers, and the others add up
/// (see held_backward). It has kStageCount stages, each with 32 rows of Gr, of Gi and of these
/// columns of dOut. Beside them it has two rooms, each for P, Q, R and S of 32 vertices.
template <int kStageCount>
struct HeldBackward {
  static constexpr bool kHeld = true;
  static constexpr int BV = 32, BN = 64, kMaxE = 128, kOwn = 16, kStages = kStageCount;
  static constexpr int kHandOver = 6;
  static constexpr int kMakers = 128, kThreads = 256, kBlocks = 1;
  static constexpr int kHalf = BV * kMaxE, kStage = 2 * kHalf + BV * BN;  // elements
  static constexpr int kRight = kMaxE * BN, kProducts = 4 * BV * BN;
  static constexpr int kRooms =
      std::max<int>(3 * kRight, kStage* kStages);  // where the rooms begin
  static constexpr int64_t shared_bytes(int64_t) { return 2 * (kRooms + 2 * kProducts); }
};

// Writes partials (slices, 3, E, W), as accumulate_backward does: for each slice dM1, dM2 and D,
// summed up over every gridDim.y-th tile of BV vertices. Block (i, slice) owns BN columns of them.
//
// Four warps are makers. Each keeps 16 columns of x, M1 and M2 in registers. For each tile it
// computes P, Q, R and S in these columns, and leaves them, rounded, in a room of shared memory.
// The makers also start all copies. The other four warps add up. Each owns 64 rows x 32 columns of
// dM1, of dM2 and of D, in registers, for all tiles. It reads Gr and Gi of a tile, transposed, from
// the stage, and P, Q, R and S from the room.
//
// In accumulate_backward all warps have products at the same time, and then tanh. Here the sums of
// a tile are multiplied while the makers have the tanh of the next tile. And the makers do not read
// x, M1 and M2 from shared memory again for each tile.
template <class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, 1)
    held_backward(GradientsOperands in, const bf16* M, float* partials) {
  constexpr int BV = Tiles::BV, BN = Tiles::BN, kE = Tiles::kMaxE, kStages = Tiles::kStages;
  constexpr int kMakers = Tiles::kMakers, kAll = Tiles::kThreads, kOwn = Tiles::kOwn;
  // Ids of barriers. kMade + r: P, Q, R and S are in room r. kRead + r: room r has been read, and
  // so has the stage of its tile. kAmongMakers is for the makers alone.
  constexpr int kMade = 1, kRead = 3, kAmongMakers = 5;
  extern __shared__ __align__(128) bf16 tiles[];
  bf16* const rooms = tiles + Tiles::kRooms;
  const int warp = threadIdx.x / 32, w0 = blockIdx.x * BN;
  const int64_t tile_count = ceil_div(in.V, BV);
  const int steps = static_cast<int>(ceil_div(tile_count - blockIdx.y, gridDim.y));
  const auto stage_of = [&](int step) { return tiles + step % kStages * Tiles::kStage; };
  const auto room_of = [&](int step) { return rooms + step % 2 * Tiles::kProducts; };

  if (threadIdx.x < kMakers) {
    const auto meet = [] { named_barrier(kAmongMakers, kMakers); };
    const int own_col = warp * kOwn;
    unsigned right[3][kE / 16][1][4];
    load_held<BN, kMakers>(right, tiles, in, M, w0, own_col, meet);
    const auto copy = [&](int step) {
      if (step < steps) {
        const int64_t row = (blockIdx.y + int64_t{step} * gridDim.y) * BV;
        bf16* const to = stage_of(step);
        copy_swizzled<BV, kE, kMakers>(to, in.Gr, row, 0, in.V, in.E);
        copy_swizzled<BV, kE, kMakers>(to + Tiles::kHalf, in.Gi, row, 0, in.V, in.E);
        copy_swizzled<BV, BN, kMakers>(to + 2 * Tiles::kHalf, in.d_out, row, w0, in.V, in.W);
      }
      copy_async_commit();
    };
    // Copies are only kStages - 2 steps ahead: the stages of this step and of the step before are
    // still read, since a tile is added up a step later than it is made.
    for (int step = 0; step < kStages - 2; ++step) copy(step);
    for (int step = 0; step < steps; ++step) {
      copy_async_wait<kStages - 3>();
      // All makers' copies for this step are there. And the tile of two steps before has been added
      // up: so its stage and its room are free.
      step < 2 ? meet() : named_barrier(kRead + step % 2, kAll);
      copy(step + kStages - 2);
      bf16* const Gr = stage_of(step);
      bf16* const Gi = Gr + Tiles::kHalf;
      WarpGradients<BV, kOwn> sums;
      // The sums of the tile before begin only when kHandOver parts of this tile's products are
      // done. Until then the makers have the tensor cores alone. After that the sums have them,
      // while the makers compute P, Q, R and S.
      add_held<Tiles::kHandOver>(sums, Gr, Gi, right, [&] {
        if (step > 0) named_arrive(kMade + (step - 1) % 2, kAll);
      });
      leave_products<BV, BN>(room_of(step), sums, Gi + Tiles::kHalf, 0, own_col);
    }
    named_arrive(kMade + (steps - 1) % 2, kAll);
    return;
  }

  const int row = (warp - kMakers / 32) / 2 * 64, col = warp % 2 * 32;
  Sums<64, 32> dM1 = {}, dM2 = {}, D = {};
  for (int step = 0; step < steps; ++step) {
    named_barrier(kMade + step % 2, kAll);
    const bf16* const Gr = stage_of(step);
    const bf16* const Gi = Gr + Tiles::kHalf;
    const bf16* const products = room_of(step);
    if (row < in.E) {
#pragma unroll
      for (int k = 0; k < BV; k += 16) {
        unsigned left[4][4], by[2][4];
        const auto load = [&](int which) {
          load_right<BN>(by, products + which * BV * BN, k, col);
        };
        load_left_transposed<kE>(left, Gr, row, k);
        load(0);  // P
        add_product(dM1, left, by);
        load(1);  // Q
        add_product(dM2, left, by);
        load(2);  // R
        add_product(D, left, by);
        load_left_transposed<kE>(left, Gi, row, k);
        load(3);  // S
        add_product(D, left, by);
        load(1);  // Q
        add_product(dM1, left, by);
        load(0);  // P
        negate(by, by);
        add_product(dM2, left, by);
      }
    }
    if (step + 2 < steps) named_arrive(kRead + step % 2, kAll);
  }
  const auto store = [&](const Sums<64, 32>& sum, int which) {
    float* to = partials + (static_cast<size_t>(blockIdx.y) * 3 + which) * in.E * in.W;
    for_pairs(sum, row, w0 + col, in.E, in.W, [&](int e, int w, float2 pair) {
      *reinterpret_cast<float2*>(to + static_cast<size_t>(e) * in.W + w) = pair;
    });
  };
  store(dM1, 0);
  store(dM2, 1);
  store(D, 2);
}

}  // namespace operators::gradients
