// Lesson 8's backward *warp specialization*, for E up to 256: dM1, dM2 and D, summed up over the
// vertices. What lies in shared memory, and how it is loaded, is in tiles.cuh; what becomes of the
// sums in small_products.cuh.
#pragma once

#include "operators/gradients/tiles.cuh"
#include "primitives/approximate.cuh"
#include "primitives/fragments.cuh"
#include "primitives/hopper/block_grid.cuh"
#include "primitives/hopper/pipeline.cuh"
#include "primitives/hopper/tiles.cuh"

namespace operators::gradients {

// Four warpgroups work like an assembly line. In warpgroup 0 one thread copies. Warpgroups 1 and 2,
// the makers, make P, Q, R and S. Warpgroup 3 multiplies these by Gr^T and Gi^T, transposed where
// they lie, and keeps the sums,
//
//     [dM1 | D | dM2] += Gr^T [P | R | Q] + Gi^T [Q | S | -P]
//
// in up to 192 registers of a thread. Shared memory is nearly as busy as the tensor cores. So the
// three products with Gr^T are one instruction of up to 192 columns, which reads its rows of Gr^T
// once.
//
// To make P, Q, R and S from the sums takes a warpgroup as long as the products before it, or
// longer. With one maker warpgroup 3 and the tensor cores would wait for it. Of two, each makes
// half of a tile's columns, or they take turns, tile by tile. A maker has 128 registers a thread,
// of which 96 are sums. So left factors come from shared memory.
//
// Two things differ from other kernels. A stage of Gr and Gi is read twice, by the makers and by
// warpgroup 3, and only warpgroup 3 gives it back. And P, Q, R and S go to it through a pipeline of
// one stage, which threads fill (Maker), and not the copy engine.

// A block's part of the sums is E x kCols: 32 columns, or up to E = 128 also 64.
template <int kStepCount, int kColCount>
struct HopperBackward {
  static constexpr int kSteps = kStepCount, kCols = kColCount, kHalves = kCols / 32;
  static constexpr int kStages = kCols == 64 ? 6 : 12 - kSteps;  // as many as fit
  // The number of tiles whose steps are in the stages at a time.
  static constexpr int kTiles = kCols == 64 ? kStages / kSteps : 1;
  static constexpr int kMakers = kCols == 64 ? 1 : 2;  // that take turns
  BackwardFactors right[kHalves][kSteps];
  LeftFactors left[kStages];
  Box<bf16, 64> d_out[kTiles];  // with 64 columns: it comes with a tile's first step
  Pipeline<Products<kCols>, 1, kMakers> products;
  StageBarriers<kStages> stages;
  Barrier loaded[kHalves];
};

#if HOPPER_CODE
// A maker's sums of 64 vertices and 32 features, 96 registers of a thread: Gr [M1 | M2 | x] and Gi
// [M1 | M2 | x]. combine() makes ar = Gr M1 - Gi M2 and ai = Gr M2 + Gi M1 of them, in the places
// of Gr M1 and Gr M2. Forward a thread has 128 registers of sums for 64 features. But here -M2 need
// not be on chip, and a left factor from shared memory is read once for all three right factors.
struct GradientPairs {
  Sum<96> by_gr, by_gi;

  __device__ float& ar(int e) { return by_gr.elements[e]; }
  __device__ float& ai(int e) { return by_gr.elements[16 + e]; }
  __device__ float& xr(int e) { return by_gr.elements[32 + e]; }
  __device__ float& xi(int e) { return by_gi.elements[32 + e]; }

  // Starts the product of a step's first kTaken slices, which is added to the sums or, if not
  // `add`, assigned.
  template <int kTaken = kSlices>
  __device__ void start_product(const LeftFactors& left, const BackwardFactors& right, bool add) {
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kTaken; ++slice) {
      const AcrossK<bf16> all = right.M1_M2.across_k();  // [M1 | M2 | x]
      multiply_slice(by_gr.elements, left.Gr.rows(0), all, slice, add || slice > 0);
      multiply_slice(by_gi.elements, left.Gi.rows(0), all, slice, add || slice > 0);
    }
    wgmma_commit();
  }
  // Makes ar and ai in their places.
  __device__ void combine() {
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      ar(e) -= by_gi.elements[16 + e];
      ai(e) += by_gi.elements[e];
    }
  }
};

// Multiplies by g: R, S, P and Q take the places of ar, ai, xr and xi. g = dOut * (1 - tanh(u)^2),
// which is computed as slope_of_tanh() in associated.cuh does.
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

// What a maker does with its tiles: it computes what the forward pass did, then P, Q, R and S, and
// leaves these in shared memory. With 64 columns either maker has one half of them, with 32 columns
// every second tile. Makers give no stage back: warpgroup 3 reads the same stage later, and does
// that.
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
    if constexpr (!kShare) reader.next(kSteps);  // past the other maker's tile
  }
}
#endif

// Writes partials (slices, 3, E, W): for each slice dM1, dM2 and D, summed up over its tiles.
// blockIdx.y is the slice, and its tiles are every gridDim.y-th one. A row of the grid is a
// cluster, and each of its blocks has other columns. blockIdx.z counts the clusters along W.
template <int kSteps, int kCols>
__global__ void __launch_bounds__(512, 1)
    hopper_accumulate_backward(const __grid_constant__ GradientMaps maps, const bf16* d_out,
                               float* partials, int V, int E, int W) {
#if HOPPER_CODE
  using Shared = HopperBackward<kSteps, kCols>;
  constexpr int kHalves = Shared::kHalves;
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const BlockRow<> cluster;
  const int tiles = (V + 63) / 64, first = blockIdx.y, clusters = gridDim.y;
  const int col0 = kCols * (cluster.blocks * blockIdx.z + cluster.rank);
  if (threadIdx.x == 0) {
    for (Barrier& each : shared.loaded) barrier_init(&each, 1);
    prepare(shared.products, 1, 128 * kHalves);
    prepare(shared.stages, cluster.blocks);
  }
  cluster.meet();
  start_next_kernel();

  if (threadIdx.x < 128) {
    registers_shrink_to<24>();
    if (threadIdx.x == 0) {
      Writer writer(shared.stages);
      for (int tile = first; tile < tiles; tile += clusters) {
        for (int step = 0; step < kSteps; ++step) {
          const bool with_d_out = kCols == 64 && step == 0;
          const int of_d_out = with_d_out ? sizeof shared.d_out[0] : 0;
          writer.put(sizeof(LeftFactors) + of_d_out, [&](int stage, Barrier* arrived) {
            load_left_factors(shared.left[stage], maps, tile, step, cluster, arrived);
            if (with_d_out) {
              tensor_load(&shared.d_out[stage / kSteps], &maps.vertices, 64 * tile, col0, arrived);
            }
          });
        }
        if (kCols == 32) prefetch_l2(&maps.vertices, 64 * (tile + clusters), col0);
        if (tile == first) load_right_factors<32>(shared.right, kHalves, maps, col0, shared.loaded);
      }
      writer.finish();
    }
  } else if (threadIdx.x < 384) {  // these keep the 128 registers that all start with
    make_products(shared, cluster, d_out, col0, V, E, W);
  } else {
    registers_grow_to<224>();
    const BlockGrid<1, 1> alone;
    Reader reader(shared.stages, cluster);
    Reader made(shared.products, alone);
    Slice<kCols> slices[kSteps];
    for (int tile = first; tile < tiles; tile += clusters, made.next()) {
      const Products<kCols>& products = made.wait();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        reader.take([&](int stage, bool) {
          const LeftFactors& left = shared.left[stage];
          auto& sum = slices[step].sum.elements;
          wgmma_fence();
#pragma unroll
          for (int slice = 0; slice < kSlices; ++slice) {
            const bool add = tile > first || slice > 0;
            multiply_slice(sum, left.Gr.across_k(), products.by_gr(), slice, add);
            multiply_slice(sum, left.Gi.across_k(), products.by_gi(), slice, true);
          }
          wgmma_commit();
        });
      }
      reader.finish();
      made.give_back();
    }
    float* to = partials + static_cast<size_t>(first) * 3 * E * W;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      slices[step].store(to, kStepK * step, col0, E, W);
    }
  }
#endif
}

}  // namespace operators::gradients
