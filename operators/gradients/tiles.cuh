// What the blocks of lesson 8's Hopper kernels do, step by step: load factors, multiply, and
// backward make a tile's sums the factors of the gradients, and add those up. The kernels in
// 8_spatial_gradients.cu are their order.
//
// All work on 64 vertices at a time. E comes in steps of 64. Forward two of them are a segment: its
// fragments are as many as a thread can hold beside its sums. What E and W do not fill is zero.
#pragma once

#include "operators/gradients/gradients.h"
#include "primitives/approximate.cuh"
#include "primitives/early_launch.cuh"
#include "primitives/fragments.cuh"
#include "primitives/hopper/block_grid.cuh"
#include "primitives/hopper/pipeline.cuh"
#include "primitives/hopper/tiles.cuh"

namespace operators::gradients {

using namespace primitives;
using bf16 = __nv_bfloat16;

inline constexpr int kSegment = 128, kSegmentSteps = kSegment / kStepK;

/// How many of a segment's steps there are if E has `steps` in all.
__host__ __device__ constexpr int steps_of(int segment, int steps) {
  return steps - kSegmentSteps * segment < kSegmentSteps ? steps - kSegmentSteps * segment
                                                         : kSegmentSteps;
}

/// What the copy engine moves: row-major matrices in boxes of 64 rows and 64 columns. Backward M1
/// is [M1 | M2], 32 columns of either in turn.
struct GradientMaps {
  CUtensorMap Gr, Gi, minus_M2, M1, M2, x;
  CUtensorMap vertices;  // out, or dOut
};

/// 64 rows (of E) and 64 columns of each right factor, forward. wgmma reads two neighbours as one:
/// [M1 | M2] for Gr, and [-M2 | M1] for Gi.
struct RightFactors {
  Box<bf16, 64> minus_M2, M1, M2, x;
};

/// The same backward, 32 columns. wgmma reads 96 columns as one: [M1 | M2 | x].
struct BackwardFactors {
  Box<bf16, 64> M1_M2, x;  // of this x the first 32 columns
};

/// 64 rows (of V) and 64 columns of Gr and Gi.
struct LeftFactors {
  LeftTile<bf16, 64> Gr, Gi;
};

#if HOPPER_CODE

// ---- Load ---------------------------------------------------------------------------------------

/// Rows 64 `step` to 64 `step` + 63, columns from `col` on, of the right factors that are products
/// with x: M1 and M2.
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

/// All right factors of a block, kCols columns in each of `groups`, from col0 on. While `associate`
/// makes M1 and M2, x is already on its way. A group has a barrier of its own, so that the first
/// one can be multiplied while the others come.
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

/// Of a tile's columns from 64 `step` on, the box that one block of a cluster of two fetches for
/// both; a block on its own fetches both boxes.
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

// ---- Multiply -----------------------------------------------------------------------------------

// A warpgroup's sums of 64 vertices and of features, fp32: ar(i), ai(i), xr(i), xi(i) belong to one
// vertex and feature, those of Sum::row(i) and col(i).

/// What a thread holds of LeftFactors.
struct FactorFragments {
  LeftFragments<bf16> Gr, Gi;
};

template <int kSteps, int kCount>
__device__ inline void load_fragments(FactorFragments (&to)[kCount],
                                      const LeftFactors (&from)[kCount]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    to[step] = {from[step].Gr.load_fragments(), from[step].Gi.load_fragments()};
  }
}

/// Forward, 64 features: [ar | ai] = Gr [M1 | M2] + Gi [-M2 | M1],   xr = Gr x,   xi = Gi x: 128
/// registers.
struct Gradients {
  Sum<128> a;
  Sum<64> r, i;

  __device__ float& ar(int e) { return a.elements[e]; }
  __device__ float& ai(int e) { return a.elements[32 + e]; }
  __device__ float& xr(int e) { return r.elements[e]; }
  __device__ float& xi(int e) { return i.elements[e]; }
  __device__ void multiply(const FactorFragments& left, const RightFactors& right, int slice,
                           bool add) {
    multiply_slice(a.elements, left.Gr, right.M1.across_k(), slice, add);
    multiply_slice(r.elements, left.Gr, right.x.across_k(), slice, add);
    multiply_slice(a.elements, left.Gi, right.minus_M2.across_k(), slice, true);
    multiply_slice(i.elements, left.Gi, right.x.across_k(), slice, add);
  }
};

/// Adds (or, if not `add`, assigns) the product of a segment's first kSteps steps, of each the
/// first kTaken slices. The left factors come from registers: from shared memory, which has no
/// bandwidth to spare, each would be read for each right factor.
template <int kSteps, int kTaken = kSlices, int kCount>
__device__ inline void multiply_segment(Gradients& sums, const FactorFragments (&left)[kCount],
                                        const RightFactors* right, bool add) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int slice = 0; slice < kTaken; ++slice) {
      sums.multiply(left[step], right[step], slice, add || step > 0 || slice > 0);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
}

/// Assigns the product of the first segment, which has kSteps steps. Up to E = 32 half a step is
/// all.
template <int kSteps>
__device__ inline void multiply_first_segment(Gradients& sums,
                                              const FactorFragments (&left)[kSteps],
                                              const RightFactors* right, int E) {
  if (kSteps == 1 && E <= kStepK / 2) {
    multiply_segment<kSteps, kSlices / 2>(sums, left, right, false);
  } else {
    multiply_segment<kSteps>(sums, left, right, false);
  }
}

/// Backward, 32 features: Gr [M1 | M2 | x] and Gi [M1 | M2 | x], 96 registers, of which combine()
/// makes ar and ai. That is half as many registers again for a feature, but M1 and M2 are on chip
/// only once, and a left factor from shared memory is read once for all three right ones.
struct GradientPairs {
  Sum<96> by_gr, by_gi;

  __device__ float& ar(int e) { return by_gr.elements[e]; }
  __device__ float& ai(int e) { return by_gr.elements[16 + e]; }
  __device__ float& xr(int e) { return by_gr.elements[32 + e]; }
  __device__ float& xi(int e) { return by_gi.elements[32 + e]; }
  /// Starts to add (or, if not `add`, to assign) the product of a step's first kTaken slices, as
  /// one group of wgmma.
  template <int kTaken = kSlices>
  __device__ void start_product(const LeftFactors& left, const BackwardFactors& right, bool add) {
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kTaken; ++slice) {
      const AcrossK<bf16> all = right.M1_M2.across_k();
      multiply_slice(by_gr.elements, left.Gr.rows(0), all, slice, add || slice > 0);
      multiply_slice(by_gi.elements, left.Gi.rows(0), all, slice, add || slice > 0);
    }
    wgmma_commit();
  }
  __device__ void combine() {
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      ar(e) -= by_gi.elements[16 + e];
      ai(e) += by_gi.elements[e];
    }
  }
};

// ---- Backward: the factors of the gradients -----------------------------------------------------
#endif

/// P, R, Q, S and -P of a tile, side by side: [P | R | Q] is the right factor of Gr^T, [Q | S | -P]
/// that of Gi^T.
template <int kCols>
struct Products {
  Box<bf16, 64> boxes[(5 * kCols + 63) / 64];
#if HOPPER_CODE
  __device__ AcrossK<bf16> by_gr() const { return boxes[0].across_k(); }
  __device__ AcrossK<bf16> by_gi() const { return boxes[2 * kCols / 64].across_k(); }
  /// Those of 32 features from column `col` on.
  __device__ void store(GradientPairs& from, int col) {
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
/// A thread's elements of dOut (V, W), from (row, col) on, in pairs: see Sum::load_pairs().
__device__ inline void load_pairs(uint32_t (&pairs)[8], const bf16* d_out, int row, int col, int V,
                                  int W) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int v = row + Sum<32>::row(2 * i), w = col + Sum<32>::col(2 * i);
    pairs[i] = v < V && w < W ? *reinterpret_cast<const uint32_t*>(d_out + int64_t{v} * W + w) : 0;
  }
}

/// R, S, P, Q in the place of ar, ai, xr, xi: times g = dOut * (1 - tanh(u)^2), which is dOut *
/// 4 e / (1 + e)^2 with e = exp(-2 |u|), see tanh_slope. Here 4 e is computed as a power of 2; a
/// result below 2^-126 becomes 0.
__device__ inline void multiply_by_g(GradientPairs& sums, const uint32_t (&d_out)[8]) {
  constexpr float kLog2E = 1.44269504f;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 pair = unpack2(d_out[i / 2]);
    const float u = sums.xr(i) * sums.ar(i) + sums.xi(i) * sums.ai(i);
    const float four_e = exp2_approximate(2 - 2 * kLog2E * fabsf(u));
    const float inverse = reciprocal_approximate(1 + four_e / 4);
    const float g = (i % 2 == 0 ? pair.x : pair.y) * inverse * (four_e * inverse);
    sums.ar(i) *= g;
    sums.ai(i) *= g;
    sums.xr(i) *= g;
    sums.xi(i) *= g;
  }
}

/// What two warpgroups do: they compute what the forward pass did, then P, Q, R, S, and leave these
/// in shared memory. Of 64 columns either has one half, of 32 columns every second tile. They read
/// stages, but give none back: the third warpgroup does, which reads the same later.
template <class Shared, class Cluster>
__device__ inline void make_products(Shared& shared, const Cluster& cluster, const bf16* d_out,
                                     int col0, int V, int E, int W) {
  constexpr int kSteps = Shared::kSteps;
  constexpr bool kShare = Shared::kCols == 64;
  const int number = warp_of_block() / 4 - 1, half = kShare ? number : 0;
  const int first = blockIdx.y + (kShare ? 0 : number * gridDim.y);
  Reader reader(shared.stages, cluster);
  Maker maker(shared.products);
  if (!kShare && number == 1) reader.next(kSteps), maker.next();
  barrier_wait(&shared.loaded[half], 0);
  for (int tile = first; 64 * tile < V; tile += (kShare ? 1 : 2) * gridDim.y) {
    GradientPairs sums;
    uint32_t d_out_pairs[8];
    if constexpr (!kShare) load_pairs(d_out_pairs, d_out, 64 * tile, col0, V, W);
    int first_stage = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step, reader.next()) {
      const int stage = reader.wait();
      const LeftFactors& left = shared.left[stage];
      const BackwardFactors& right = shared.right[half][step];
      if (step == 0) first_stage = stage;
      if (kSteps == 1 && E <= kStepK / 2) {
        sums.template start_product<kSlices / 2>(left, right, false);
      } else {
        sums.start_product(left, right, step > 0);
      }
    }
    wgmma_wait<0>();
    if constexpr (kShare) {
      Sum<32>::load_pairs(d_out_pairs, shared.d_out[first_stage / kSteps], 32 * half);
    }
    sums.combine();
    multiply_by_g(sums, d_out_pairs);
    maker.wait().store(sums, 32 * half);
    maker.fill();
    maker.next(Shared::kMakers);
    if constexpr (!kShare) reader.next(kSteps);  // the other one's tile
  }
}

// ---- Backward: the gradients --------------------------------------------------------------------

/// 64 rows of E and kCols columns of each of dM1, D and dM2, side by side.
template <int kCols>
struct Slice {
  Sum<3 * kCols> sum;

  /// Starts to add (or, if not `add`, to assign) [dM1 | D | dM2] of a tile, Gr^T [P | R | Q] + Gi^T
  /// [Q | S | -P], as one group of wgmma.
  __device__ void start_product(const LeftFactors& left, const Products<kCols>& products,
                                bool add) {
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      multiply_slice(sum.elements, left.Gr.across_k(), products.by_gr(), slice, add || slice > 0);
      multiply_slice(sum.elements, left.Gi.across_k(), products.by_gi(), slice, true);
    }
    wgmma_commit();
  }

  /// To row e0, column w0 of dM1, dM2 and D (3, E, W).
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
#endif

}  // namespace operators::gradients
