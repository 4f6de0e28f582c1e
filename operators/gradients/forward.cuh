// Lesson 8's forward *cluster*, for E up to 256: out = tanh(xr ar + xi ai), all six products by
// wgmma. What lies in shared memory, and how it is loaded, is in tiles.cuh; the launch in
// features.cuh.
#pragma once

#include <algorithm>

#include "operators/gradients/tiles.cuh"
#include "primitives/approximate.cuh"
#include "primitives/hopper/block_grid.cuh"
#include "primitives/hopper/pipeline.cuh"
#include "primitives/hopper/tiles.cuh"

namespace operators::gradients {

#if HOPPER_CODE
// A thread's fragments of 64 rows and 64 columns of Gr and Gi, as left factors.
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

// A warpgroup's sums of 64 vertices and 64 features, 128 registers of a thread. ar(e), ai(e), xr(e)
// and xi(e) belong to the same vertex and feature. So a thread computes the result of this element
// without any other thread.
struct Gradients {
  Sum<128> a;  // [ar | ai]
  Sum<64> r, i;

  __device__ float& ar(int e) { return a.elements[e]; }
  __device__ float& ai(int e) { return a.elements[32 + e]; }
  __device__ float& xr(int e) { return r.elements[e]; }
  __device__ float& xi(int e) { return i.elements[e]; }
};

// Adds (or, if not `add`, assigns) all six products of a segment's first kSteps steps, and of each
// step its first kTaken slices of 16. Two right factors side by side, M1 and M2, or -M2 and M1, are
// one of 128 columns. Left factors are in registers. If wgmma took them from shared memory, it
// would read each of them again for each right factor, and shared memory has no bandwidth to spare.
template <int kSteps, int kTaken = kSlices, int kCount>
__device__ inline void multiply_segment(Gradients& sums, const FactorFragments (&left)[kCount],
                                        const RightFactors* right, bool add) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const LeftFragments<bf16>&Gr = left[step].Gr, &Gi = left[step].Gi;
#pragma unroll
    for (int slice = 0; slice < kTaken; ++slice) {
      const bool adds = add || step > 0 || slice > 0;
      multiply_slice(sums.a.elements, Gr, right[step].M1.across_k(), slice, adds);
      multiply_slice(sums.r.elements, Gr, right[step].x.across_k(), slice, adds);
      multiply_slice(sums.a.elements, Gi, right[step].minus_M2.across_k(), slice, true);
      multiply_slice(sums.i.elements, Gi, right[step].x.across_k(), slice, adds);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
}

// Assigns the products of the first segment, which has kSteps steps. If E is at most 32, half a
// step is all.
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
#endif

template <int kSteps>
struct HopperForward {
  static constexpr int kSegments = (kSteps + 1) / 2, kFirst = steps_of(0, kSteps);
  static constexpr int kStages = kSteps == 1 ? 8 : 2;  // narrow rows: more have to be under way
  static constexpr int kTurns = std::max(kStages, 2 * kSegments);
  static constexpr int kGroups = 2 / kSegments;  // of 64 columns, at most
  struct Segment {
    LeftFactors steps[kFirst];
  };
  RightFactors right[kGroups][kSteps];
  Box<bf16, 64> out[2][kGroups];  // of each consumer
  Pipeline<Segment, kStages, kTurns> segments;
  Barrier loaded[kGroups];
};

// Clusters are persistent, and take tile after tile of 64 rows. Each block has one or two `groups`
// of 64 columns of the right factors, up to 128 KB (one group, if E has two segments). Two consumer
// warpgroups take every other tile each. While one of them computes tanh and stores, the other one
// has the tensor cores to itself (ping-pong). A segment's fragments stay in 64 registers of each
// thread and serve all columns, so that its stage is free again early.
//
// A segment fills one stage. With E = 256 a tile has two segments and fills both stages, so every
// second phase of a stage is the other consumer's. But a barrier only shows whether its phase is
// odd or even, and a consumer that skips a phase could take an old one for a new one. Hence
// barriers do not belong to stages. Two tiles, one for each consumer, have four segments, and each
// of these four *turns* has barriers of its own, at which only one consumer waits: tile 0 has turns
// 0 and 1, tile 1 turns 2 and 3, tile 2 turns 0 and 1 again. Turns 0 and 2 fill stage 0, turns 1
// and 3 stage 1 (StageBarriers in primitives/hopper/pipeline.cuh).
template <int kSteps>
__global__ void __launch_bounds__(384, 1)
    hopper_features(const __grid_constant__ GradientMaps maps, int V, int E, int column_groups) {
#if HOPPER_CODE
  using Shared = HopperForward<kSteps>;
  constexpr int kSegments = Shared::kSegments, kFirst = Shared::kFirst, kGroups = Shared::kGroups;
  using Segment = typename Shared::Segment;
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const BlockRow<Releases::warp> cluster;
  const int tiles = (V + 63) / 64, first = blockIdx.y, clusters = gridDim.y;
  const int groups = kGroups > 1 ? column_groups : 1;
  const int col0 = 64 * groups * (cluster.blocks * blockIdx.z + cluster.rank);
  if (threadIdx.x == 0) {
    for (Barrier& each : shared.loaded) barrier_init(&each, 1);
    prepare(shared.segments, 4 * cluster.blocks);  // the warps of a consumer in each block
  }
  cluster.meet();

  if (threadIdx.x < 128) {
    registers_shrink_to<40>();
    if (threadIdx.x == 0) {
      Writer writer(shared.segments);
      for (int tile = first; tile < tiles; tile += clusters) {
#pragma unroll
        for (int segment = 0; segment < kSegments; ++segment) {
          const int steps = steps_of(segment, kSteps);
          writer.put(steps * sizeof(LeftFactors), [&](Segment& to, Barrier* arrived) {
            for (int step = 0; step < steps; ++step) {
              load_left_factors(to.steps[step], maps, tile, kSegmentSteps * segment + step, cluster,
                                arrived);
            }
          });
        }
        if (tile == first) load_right_factors<64>(shared.right, groups, maps, col0, shared.loaded);
      }
      writer.finish();
    }
  } else {
    registers_grow_to<232>();
    const int consumer = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
    Reader reader(shared.segments, cluster);
    reader.next(kSegments * consumer);
    int stored = 0;
    for (int tile = first + consumer * clusters; tile < tiles; tile += 2 * clusters) {
      FactorFragments left[kFirst];
      load_fragments<kFirst>(left, reader.wait().steps);
#pragma unroll 1
      for (int group = 0; group < groups; ++group, ++stored) {
        if (tile < first + 2 * clusters) barrier_wait(&shared.loaded[group], 0);
        const RightFactors* right = shared.right[group];
        Gradients sums;
        multiply_first_segment<kFirst>(sums, left, right, E);
        // The stage is not given back before this product. The loads of fragments might still be
        // under way then, and the stage would be overwritten too early. A product that has used the
        // fragments proves that they are there.
        if (group == 0) reader.give_back();
        if constexpr (kSegments > 1) {
          constexpr int kRest = kSteps - kSegmentSteps;
          reader.next();
          load_fragments<kRest>(left, reader.wait().steps);
          multiply_segment<kRest>(sums, left, right + kSegmentSteps, true);
          reader.give_back();
        }
        Sum<64> out;
#pragma unroll
        for (int e = 0; e < 32; ++e) {
          out.elements[e] = tanh_approximate(sums.xr(e) * sums.ar(e) + sums.xi(e) * sums.ai(e));
        }
        // Waits until the copy engine has read this box. The other box may still be on its way.
        if (thread == 0) tensor_store_wait_read<kGroups - 1>();
        named_barrier(1 + consumer, 128);
        auto& box = shared.out[consumer][stored % kGroups];
        out.store(box, 0, [&](int e) { return out.elements[e]; });
        shared_fence();
        named_barrier(1 + consumer, 128);
        if (thread == 0) {
          tensor_store(&maps.vertices, 64 * tile, col0 + 64 * group, &box);
          tensor_store_commit();
        }
      }
      reader.next(1 + kSegments);  // also over the other consumer's tile
    }
    if (thread == 0) tensor_store_wait_read<0>();
  }
#endif
}

}  // namespace operators::gradients
