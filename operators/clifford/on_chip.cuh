// Lesson 10's *row on chip*, for any GPU from compute capability 7.5 on, and for rows that start
// anywhere. Blocks are persistent: each takes one group of rows after the other. A row stays in
// registers while its sums are added up.
//
// A thread prefetches its own part of a later row by cp.async while it works on this one. No other
// thread reads that part, so the block meets at a barrier only for a row's sums.
//
// Forward, the weights are in registers. So shared memory is left for stages: two of them, or one
// where a block may have less. 1024 features of 8 blades take 68 KB a stage.
//
// Backward, the sums for dw are in registers, and the weights in shared memory, 84 KB for 1024
// features of 8 blades. Beside them a block that may have 163 KB has room for two tensors of its
// rows, and one that may have 99 KB has none. So x and y are staged where there is room. d_out, or
// all three, are loaded from the L2 cache when the row is needed, since the cache was asked to
// fetch them before.
#pragma once

#include "operators/clifford/rows.cuh"

namespace operators::clifford {

// add_up_row() with the fewer shuffles of Halves. Calls take turns with two arrays of partial sums,
// too.
template <int kCount>
__device__ __forceinline__ void add_up_row_of_block(FeatureSums<kCount>& sums,
                                                    FeatureSums<kCount>* partials, int warps) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float of_warp = Halves<kCount>::of_warp(sums);
  if (lane < kCount) partials[warp].value[lane] = of_warp;
  __syncthreads();
  const float own =
      Halves<kCount>::template of_lane<kMaxWarps>(partials + warp / warps * warps, warps);
  sums = Halves<kCount>::from_lanes(own);
}

// The weights of a thread's features, in registers; zeros where it has fewer than W features.
template <typename A, int W>
struct OwnWeights {
  Pack<W> packs[A::kTriples];

  template <bool kVector>
  __device__ __forceinline__ OwnWeights(const float* w, const Place<W, kVector>& place) : packs() {
#pragma unroll
    for (int e = 0; e < W; ++e) {
      if (e >= place.count) continue;
      const size_t feature = place.start + place.first + e * place.kStep;
      const Weights<A> weights(w + feature * A::kTriples);
      unroll<0, A::kTriples>([&](auto t) { packs[t].v[e] = weights(t).v[0]; });
    }
  }
  template <typename Index>
  __device__ __forceinline__ Pack<W> operator()(Index) const {
    return packs[Index::value];
  }
};

// Which rows a block has, and where a thread's part of them is: at() says where its first feature
// of a group is in a plane, and inside() how many of its features exist.
template <int W, bool kVector>
struct RowsOfBlock {
  Layer layer;
  Place<W, kVector> place;
  int rows, groups, step;

  __device__ RowsOfBlock(const RowsOnChip& shape, const Layer& layer)
      : layer(layer),
        place(shape, layer),
        rows(shape.rows()),
        groups(shape.groups(layer)),
        step(gridDim.x) {}
  __device__ int inside(int group) const {
    return group < groups && group * rows + place.row < layer.batch ? place.count : 0;
  }
  __device__ size_t at(int group) const {
    return static_cast<size_t>(group * rows + place.row) * layer.features + place.first;
  }
};

inline constexpr int kMostStages = 2;

// The shared memory of forward: stages. A thread has its own part of each, x and y of its features,
// an odd number of packs.
template <typename A, int W, bool kVector>
struct ForwardStages {
  static constexpr int kStride = W * (2 * A::kBlades | 1);
  static size_t bytes(const RowsOnChip& shape, int stages) {
    return sizeof(float) * stages * shape.threads * kStride;
  }

  float* inputs;  // of this thread, of stage 0
  __device__ explicit ForwardStages(float* shared) : inputs(shared + threadIdx.x * kStride) {}

  __device__ float* of(int stage) const { return inputs + stage * blockDim.x * kStride; }
  // Starts the copies of a thread's part of a tensor. What was in this place has been read:
  // __syncwarp() keeps the compiler from moving these reads behind the copies.
  template <int tensor>
  __device__ __forceinline__ void fetch(int stage, const float* from, size_t plane,
                                        const Place<W, kVector>& place, int inside) const {
    float* const to = of(stage) + tensor * A::kBlades * W;
    __syncwarp();
#pragma unroll
    for (int k = 0; k < A::kBlades; ++k, from += plane) place.fetch(to + k * W, from, inside);
  }
  template <int tensor>
  __device__ __forceinline__ Multivectors<A, W> take(int stage) const {
    Multivectors<A, W> result;
    const float* from = of(stage) + tensor * A::kBlades * W;
    unroll<0, A::kBlades>(
        [&](auto k) { result.blade[k] = *reinterpret_cast<const Pack<W>*>(from + k * W); });
    return result;
  }
};

// A thread owns W features of one of the block's rows. As soon as it has taken its part of a stage
// into registers it starts the copies of a later row's part into the same place, and multiplies
// then. z stays in registers while its row's squares are added up, so nothing is read or computed
// twice. There are `count` stages, 1 or 2.
template <typename A, int W, bool kVector>
__global__ void __launch_bounds__(kThreads<A>, 1)
    forward_on_chip(const float* x, const float* y, const float* w, float* out, Layer layer,
                    RowsOnChip shape, int count) {
  extern __shared__ __align__(128) float on_chip[];
  __shared__ FeatureSums<A::kGrades> partials[2][kMaxWarps];
  const RowsOfBlock<W, kVector> work(shape, layer);
  const ForwardStages<A, W, kVector> stages(on_chip);
  const auto& place = work.place;
  const size_t plane = layer.plane();
  const auto fetch = [&](int group, int stage) {
    const size_t at = work.at(group);
    if (group < work.groups) {
      stages.template fetch<0>(stage, x + at, plane, place, work.inside(group));
      stages.template fetch<1>(stage, y + at, plane, place, work.inside(group));
    }
    copy_async_commit();
  };
  int group = blockIdx.x, stage = 0, turn = 0;
  for (int s = 0; s < count; ++s) fetch(group + s * work.step, s);
  const OwnWeights<A, W> weights(w, place);
  for (; group < work.groups; group += work.step, turn ^= 1) {
    if (count == 1) {
      copy_async_wait<0>();
    } else {
      copy_async_wait<kMostStages - 1>();
    }
    __syncwarp();  // no read is moved before this
    const auto left = stages.template take<0>(stage), right = stages.template take<1>(stage);
    fetch(group + count * work.step, stage);
    stage = stage + 1 == count ? 0 : stage + 1;
    const Multivectors<A, W> z = gated_product(left, right, weights, layer.gated);
    FeatureSums<A::kGrades> sums = {};
    if (layer.normed) {
      add_squares(z, sums);
      add_up_row_of_block(sums, partials[turn], shape.per_row / 32);
    }
    store_normed(z, sums, layer, out + work.at(group), place, work.inside(group));
  }
}

// A thread owns W features, as forward. x and d_out of a row are taken once, and stay in registers
// until the row is finished. So the next row's x and d_out are ordered early. y has no registers to
// stay in: it is taken once for the sums and once more for the gradients, and then the next row's y
// is ordered. kStaged, 0 or 2, says how many of x, y and d_out have a place in shared memory; of
// the others a prefetch to the L2 cache is ordered. Each row of a block has its own partial sums of
// dw, which stay in registers until the end.
template <typename A, int W, bool kVector, int kStaged>
__global__ void __launch_bounds__(kThreads<A>, 1)
    backward_on_chip(const float* x, const float* y, const float* w, const float* d_out, float* dx,
                     float* dy, float* dw_partials, Layer layer, RowsOnChip shape) {
  extern __shared__ __align__(128) float on_chip[];
  __shared__ GradientSums<A> partials[2][kMaxWarps];
  const RowsOfBlock<W, kVector> work(shape, layer);
  const OnChipMemory<A, W, kVector, kStaged * A::kBlades> memory(on_chip, shape);
  const auto& place = work.place;
  const size_t plane = layer.plane();
  const auto order = [&]<int tensor>(Constant<tensor>, const float* from, int group) {
    if (group >= work.groups) return;
    from += work.at(group);
    if constexpr (tensor < kStaged) {
      __syncwarp();  // what was there has been read
      memory.template fetch<tensor * A::kBlades>(from, plane, place, work.inside(group));
    } else {
      const int inside = work.inside(group);
#pragma unroll
      for (int k = 0; k < A::kBlades; ++k, from += plane) place.prefetch(from, inside);
    }
  };
  const auto take = [&]<int tensor>(Constant<tensor>, const float* from, int group) {
    if constexpr (tensor < kStaged) {
      return memory.template take<tensor * A::kBlades>();
    } else {
      Multivectors<A, W> result;
      from += work.at(group);
      const int inside = work.inside(group);
      unroll<0, A::kBlades>([&](auto k) {
        result.blade[k] = place.load(from, inside);
        from += plane;
      });
      return result;
    }
  };
  constexpr Constant<0> kX{};
  constexpr Constant<1> kY{};
  constexpr Constant<2> kDOut{};

  int group = blockIdx.x, turn = 0;
  memory.fetch_weights(w, shape, place);
  order(kX, x, group), order(kDOut, d_out, group), order(kY, y, group);
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();  // for the weights, which all threads have copied
  Pack<W> dw[A::kTriples] = {};
  for (; group < work.groups; group += work.step, turn ^= 1) {
    const int next = group + work.step;
    copy_async_wait<0>();
    __syncwarp();
    const auto left = take(kX, x, group);
    auto right = take(kY, y, group);
    const auto d = take(kDOut, d_out, group);
    order(kX, x, next), order(kDOut, d_out, next);
    const Multivectors<A, W> P = weighted_product(left, right, memory);
    const Gates<W> gates(left.blade[0], right.blade[0], layer.gated);
    GradientSums<A> sums = {};
    if (layer.normed) {
      add_gradient_sums(P, gates.product(), d, sums);
      add_up_row_of_block(sums, partials[turn], shape.per_row / 32);
    }
    Pack<W> dg;
    const Multivectors<A, W> dP = gradient_of_product(P, gates.product(), d, sums, layer, dg);
    right = take(kY, y, group);
    order(kY, y, next);
    copy_async_commit();
    store_gradients(left, right, dP, dg, gates, memory, dw, dx + work.at(group),
                    dy + work.at(group), layer, place, work.inside(group));
  }
  store_weight_gradients<A>(dw, dw_partials, place, shape, layer);
}

}  // namespace operators::clifford
