// The tiles of lesson 8's Hopper kernels: what lies in shared memory, how factors come there, and
// how results leave. What is multiplied, and what waits for what, is in forward.cuh and
// backward.cuh.
//
// All kernels work on 64 vertices at a time. E comes in steps of 64. Forward two steps are a
// *segment*: a thread has room for its fragments beside the sums. What E and W do not fill is zero.
#pragma once

#include "operators/gradients/gradients.h"
#include "primitives/early_launch.cuh"
#include "primitives/hopper/block_grid.cuh"
#include "primitives/hopper/tiles.cuh"

namespace operators::gradients {

using namespace primitives;
using bf16 = __nv_bfloat16;

inline constexpr int kSegment = 128, kSegmentSteps = kSegment / kStepK;

/// How many steps a segment has if E has `steps` in all.
__host__ __device__ constexpr int steps_of(int segment, int steps) {
  return steps - kSegmentSteps * segment < kSegmentSteps ? steps - kSegmentSteps * segment
                                                         : kSegmentSteps;
}

/// Row-major matrices as the copy engine sees them, in boxes of 64 rows and 64 columns. Backward M1
/// is [M1 | M2], 32 columns of either in turn.
struct GradientMaps {
  CUtensorMap Gr, Gi, minus_M2, M1, M2, x;
  CUtensorMap vertices;  // out, or dOut
};

/// Forward: 64 rows (of E) and 64 columns of each right factor. wgmma reads two neighbours as one
/// factor: [M1 | M2] for Gr, and [-M2 | M1] for Gi. So the order matters.
struct RightFactors {
  Box<bf16, 64> minus_M2, M1, M2, x;
};

/// Backward: 64 rows (of E) and 32 columns of each right factor. wgmma reads 96 columns as one
/// factor: [M1 | M2 | x].
struct BackwardFactors {
  Box<bf16, 64> M1_M2, x;  // of box x the first 32 columns are read
};

/// 64 rows (of V) and 64 columns of Gr and Gi.
struct LeftFactors {
  LeftTile<bf16, 64> Gr, Gi;
};

#if HOPPER_CODE

/// Starts the copies of the right factors that `associate` makes, M1 and M2: rows 64 `step` to 64
/// `step` + 63, columns from `col` on.
__device__ inline void load_products_with_x(RightFactors& to, const GradientMaps& maps, int step,
                                            int col, Barrier* loaded) {
  tensor_load(&to.minus_M2, &maps.minus_M2, kStepK * step, col, loaded);
  tensor_load(&to.M1, &maps.M1, kStepK * step, col, loaded);
  tensor_load(&to.M2, &maps.M2, kStepK * step, col, loaded);
}
__device__ inline void load_products_with_x(BackwardFactors& to, const GradientMaps& maps, int step,
                                            int col, Barrier* loaded) {
  tensor_load(&to.M1_M2, &maps.M1, kStepK * step, 2 * col, loaded);
}

/// Starts the copies of all right factors of a block, kCols columns in each of `groups`, from col0
/// on. While `associate` still makes M1 and M2, x is already on its way. A group has a barrier of
/// its own, so that the first one can be multiplied while the others come.
template <int kCols, typename Factors, int kGroups, int kSteps>
__device__ inline void load_right_factors(Factors (&to)[kGroups][kSteps], int groups,
                                          const GradientMaps& maps, int col0,
                                          Barrier (&loaded)[kGroups]) {
  for (int group = 0; group < groups; ++group) {
    barrier_arrive_expect(&loaded[group], sizeof to[group]);
    for (int step = 0; step < kSteps; ++step) {
      tensor_load(&to[group][step].x, &maps.x, kStepK * step, col0 + kCols * group, &loaded[group]);
    }
  }
  wait_for_previous_kernel();  // associate
  for (int group = 0; group < groups; ++group) {
    for (int step = 0; step < kSteps; ++step) {
      load_products_with_x(to[group][step], maps, step, col0 + kCols * group, &loaded[group]);
    }
  }
}

/// Starts a block's copies of a tile, of 64 columns of Gr and Gi from 64 `step` on. They go to all
/// blocks of the cluster: the first block copies Gr, and the last one copies Gi. A block on its own
/// copies both.
template <class Cluster>
__device__ inline void load_left_factors(LeftFactors& to, const GradientMaps& maps, int tile,
                                         int step, const Cluster& cluster, Barrier* arrived) {
  if (cluster.rank == 0) {
    tensor_load_multicast(&to.Gr, &maps.Gr, 64 * tile, kStepK * step, arrived, cluster.all());
  }
  if (cluster.rank == cluster.blocks - 1) {
    tensor_load_multicast(&to.Gi, &maps.Gi, 64 * tile, kStepK * step, arrived, cluster.all());
  }
}

#endif  // HOPPER_CODE

/// P, R, Q, S and -P of a tile, side by side: [P | R | Q] is the right factor of Gr^T, and [Q | S |
/// -P] that of Gi^T. (wgmma can change the sign of a whole factor only: PTX ISA,
/// "wgmma.mma_async".)
template <int kCols>
struct Products {
  Box<bf16, 64> boxes[(5 * kCols + 63) / 64];
#if HOPPER_CODE
  __device__ AcrossK<bf16> by_gr() const { return boxes[0].across_k(); }
  __device__ AcrossK<bf16> by_gi() const { return boxes[2 * kCols / 64].across_k(); }
  /// Stores those of 32 features from column `col` on. `from` has a thread's elements.
  template <class Pairs>
  __device__ void store(Pairs& from, int col) {
    const auto put = [&](int which, auto f) {
      Sum<32>::store(boxes[which * kCols / 64], 0, f, which * kCols % 64 + col);
    };
    put(0, [&](int e) { return from.xr(e); });
    put(1, [&](int e) { return from.ar(e); });
    put(2, [&](int e) { return from.xi(e); });
    put(3, [&](int e) { return from.ai(e); });
    put(4, [&](int e) { return -from.xr(e); });
  }
#endif
};

#if HOPPER_CODE
/// Loads a thread's elements of dOut (V, W), from (row, col) on, in pairs, as Sum::load_pairs()
/// does from shared memory.
__device__ inline void load_pairs(uint32_t (&pairs)[8], const bf16* d_out, int row, int col, int V,
                                  int W) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int v = row + Sum<32>::row(2 * i), w = col + Sum<32>::col(2 * i);
    pairs[i] = v < V && w < W ? *reinterpret_cast<const uint32_t*>(d_out + int64_t{v} * W + w) : 0;
  }
}

/// 64 rows of E and kCols columns of each of dM1, D and dM2, side by side.
template <int kCols>
struct Slice {
  Sum<3 * kCols> sum;

  /// Stores it to row e0 and column w0 of dM1, dM2 and D (3, E, W). Here the order is dM1, D, dM2:
  /// so matrices 0, 1 and 2 in memory are parts 0, 2 and 1 of the sum.
  __device__ void store(float* to, int e0, int w0, int E, int W) const {
#pragma unroll
    for (int i = 0; i < kCols / 2; i += 2) {
      const int e = e0 + Sum<kCols>::row(i), w = w0 + Sum<kCols>::col(i);
      if (e >= E || w >= W) continue;
      const size_t next = static_cast<size_t>(E) * W, at = static_cast<size_t>(e) * W + w;
#pragma unroll
      for (int which = 0; which < 3; ++which) {
        const float* pair = sum.elements + which * 2 % 3 * kCols / 2 + i;
        *reinterpret_cast<float2*>(to + which * next + at) = make_float2(pair[0], pair[1]);
      }
    }
  }
};
#endif  // HOPPER_CODE

}  // namespace operators::gradients
