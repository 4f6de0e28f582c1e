// What lesson 10's kernels with a row on chip share, *row on chip* and *rows streamed*: which
// thread has which features of which row, weights in shared memory, and how results leave.
#pragma once

#include "operators/clifford/clifford.cuh"
#include "primitives/async_copy.cuh"
#include "primitives/launch.h"

namespace operators::clifford {

using namespace primitives;

// How a block works in the kernels below: `threads`, `per_row` (whole warps) for each row that it
// has at a time. A row that is too long for one has several `blocks`, with `share` features each.
struct RowsOnChip {
  int threads, per_row, blocks, share;
  __host__ __device__ int rows() const { return threads / per_row; }
  __host__ __device__ int groups(const Layer& layer) const {
    return (layer.batch - 1) / rows() + 1;
  }
};

// A block stays, and takes one group of rows after the other. Sized for an H200, which brings each
// multiprocessor 33 bytes per nanosecond, more than a microsecond after they were asked for: about
// 40 KB have to be on the way. A thread of 512 has 128 registers; with 32 blades, of 256, 255.
template <typename A>
inline constexpr int kThreads = A::kBlades <= 16 ? 512 : 256;

// A thread's place: its row, of those that its block has at a time, and its W features. With
// kVector these are neighbours, moved as one access, for rows that all start at a multiple of its
// size. In other rows they are 32 apart: neighbouring threads have neighbouring features, and a
// warp moves 128 bytes in a row, wherever the row starts.
template <int W, bool kVector>
struct Place {
  static constexpr int kStep = kVector ? 1 : 32;
  int row, blocks;      // which of its block's rows; how many blocks share a row
  int start, features;  // the block has `features` of the row's features, from `start` on
  int first, count;     // of the thread's own: its first of these, and how many are there

  __device__ Place(const RowsOnChip& shape, const Layer& layer)
      : row(threadIdx.x / shape.per_row),
        blocks(kVector ? 1 : shape.blocks),
        start(kVector ? 0 : blockIdx.x % blocks * shape.share),
        features(kVector ? layer.features : min(shape.share, layer.features - start)),
        first(first_of(threadIdx.x % shape.per_row)),
        count(first >= features ? 0
              : kVector         ? W
                                : min(W, (features - first - 1) / kStep + 1)) {}

  // Thread t of a row has features first_of(t), first_of(t) + kStep... of the block's; and the
  // thread that has this feature, and which of the thread's W it is.
  __device__ static int first_of(int t) { return t / kStep * kStep * W + t % kStep; }
  __device__ static int thread_of(int feature) {
    return feature / (kStep * W) * kStep + feature % kStep;
  }
  __device__ static int number_of(int feature) { return feature / kStep % W; }

  // Moves the thread's features of a blade; `from` or `to` is the first's. Only `inside` exist.
  __device__ __forceinline__ void fetch(float* to, const float* from, int inside) const {
    if constexpr (kVector) {
      copy_async<sizeof(Pack<W>)>(to, from, inside > 0);
    } else {
#pragma unroll
      for (int e = 0; e < W; ++e) copy_async<sizeof(float)>(to + e, from + e * kStep, e < inside);
    }
  }
  // Asks the L2 cache to fetch them.
  __device__ __forceinline__ void prefetch(const float* from, int inside) const {
#pragma unroll
    for (int e = 0; e < (kVector ? 1 : W); ++e) {
      if (e < inside) prefetch_to_cache(from + e * kStep);
    }
  }
  __device__ __forceinline__ Pack<W> load(const float* from, int inside) const {
    Pack<W> result = {};
    if constexpr (kVector) {
      if (inside > 0) result = *reinterpret_cast<const Pack<W>*>(from);
    } else {
#pragma unroll
      for (int e = 0; e < W; ++e) result.v[e] = e < inside ? from[e * kStep] : 0;
    }
    return result;
  }
  __device__ __forceinline__ void store(float* to, const Pack<W>& pack, int inside) const {
    if constexpr (kVector) {
      if (inside > 0) *reinterpret_cast<Pack<W>*>(to) = pack;
    } else {
#pragma unroll
      for (int e = 0; e < W; ++e) {
        if (e < inside) to[e * kStep] = pack.v[e];
      }
    }
  }
};

// Shared memory: for each of a row's threads its weights; then kPlanes packs for each thread, which
// it fills, reads and refills alone. What a thread reads lies side by side, at constant offsets
// from one address: addresses that depend on a stride would each take a register. And from thread
// to thread it is an odd number of packs, so that neighbouring threads meet in no bank.
template <typename A, int W, bool kVector, int kPlanes>
struct OnChipMemory {
  static constexpr int kWeightStride = W * (A::kTriples | 1);
  static constexpr int kInputStride = kPlanes == 0 ? 0 : W * (kPlanes | 1);
  static size_t bytes(RowsOnChip shape) {
    return sizeof(float) * (static_cast<size_t>(shape.per_row) * kWeightStride +
                            static_cast<size_t>(shape.threads) * kInputStride);
  }

  float* all_weights;
  const float* weights;  // of this thread
  float* inputs;         // of this thread
  __device__ OnChipMemory(float* shared, RowsOnChip shape)
      : all_weights(shared),
        weights(shared + threadIdx.x % shape.per_row * kWeightStride),
        inputs(shared + shape.per_row * kWeightStride + threadIdx.x * kInputStride) {}

  // Starts the copies of all weights, a float at a time: they change places. Zeros beyond the row's
  // end, so that zeros are all that threads without a feature have and compute.
  __device__ void fetch_weights(const float* w, RowsOnChip shape,
                                const Place<W, kVector>& place) const {
    for (int i = threadIdx.x; i < shape.per_row * W * A::kTriples; i += shape.threads) {
      const int feature = i / A::kTriples, t = i % A::kTriples;
      float* to = all_weights + place.thread_of(feature) * kWeightStride + t * W;
      copy_async<sizeof(float)>(to + place.number_of(feature),
                                w + static_cast<size_t>(place.start) * A::kTriples + i,
                                feature < place.features);
    }
  }
  template <typename Index>
  __device__ __forceinline__ Pack<W> operator()(Index t) const {
    return *reinterpret_cast<const Pack<W>*>(weights + t * W);
  }
  // Starts the copies of a thread's part of a multivector's planes, as number first, first + 1...
  template <int first>
  __device__ __forceinline__ void fetch(const float* from, size_t plane,
                                        const Place<W, kVector>& place, int inside) const {
#pragma unroll
    for (int k = 0; k < A::kBlades; ++k, from += plane) {
      place.fetch(inputs + (first + k) * W, from, inside);
    }
  }
  template <int first>
  __device__ __forceinline__ Multivectors<A, W> take() const {
    Multivectors<A, W> result;
    unroll<0, A::kBlades>([&](auto k) {
      result.blade[k] = *reinterpret_cast<const Pack<W>*>(inputs + (first + k) * W);
    });
    return result;
  }
};

// A thread's z, divided by its row's rms if that is wanted, to memory.
template <typename A, int W, bool kVector>
__device__ __forceinline__ void store_normed(const Multivectors<A, W>& z,
                                             const FeatureSums<A::kGrades>& sums,
                                             const Layer& layer, float* to,
                                             const Place<W, kVector>& place, int inside) {
  unroll<0, A::kGrades>([&](auto c) {
    const float r = layer.normed ? inverse_rms(sums.value[c], layer) : 1;
    unroll<A::first(c), A::first(c + 1)>([&](auto k) {
      Pack<W> normed;
#pragma unroll
      for (int e = 0; e < W; ++e) normed.v[e] = z.blade[k].v[e] * r;
      place.store(to, normed, inside);
      to += layer.plane();
    });
  });
}

// dx and dy of a thread's multivectors to memory, blade by blade; dw is added to what it has.
template <typename A, int W, bool kVector, typename Weight>
__device__ __forceinline__ void store_gradients(const Multivectors<A, W>& left,
                                                const Multivectors<A, W>& right,
                                                const Multivectors<A, W>& dP, const Pack<W>& dg,
                                                const Gates<W>& gates, const Weight& weight,
                                                Pack<W>* dw, float* dx, float* dy, size_t plane,
                                                const Place<W, kVector>& place, int inside) {
  const Pack<W> dx_through_gate = through_gate(dg, left.blade[0], gates.y);
  const Pack<W> dy_through_gate = through_gate(dg, right.blade[0], gates.x);
  const auto take_w = [&](auto t) { return dw[t]; };
  const auto give_w = [&](auto t, const Pack<W>& sum) { dw[t] = sum; };
  const auto give_x = [&, to = dx](auto i, Pack<W> value) mutable {
    if (i == 0) add(value, dx_through_gate);
    place.store(to, value, inside);
    to += plane;
  };
  const auto give_y = [&, to = dy](auto j, Pack<W> value) mutable {
    if (j == 0) add(value, dy_through_gate);
    place.store(to, value, inside);
    to += plane;
  };
  gradients<Of::x>(left, right, dP, weight, give_x, take_w, give_w);
  __syncwarp();  // for the compiler: do not keep all weights in registers from above
  gradients<Of::y>(left, right, dP, weight, give_y, take_w, give_w);
}

// The sums of a thread's dw to the partial sums of its row.
template <typename A, int W, bool kVector>
__device__ __forceinline__ void store_weight_gradients(const Pack<W>* dw, float* partials,
                                                       const Place<W, kVector>& place,
                                                       const RowsOnChip& shape,
                                                       const Layer& layer) {
  const size_t partial = static_cast<size_t>(blockIdx.x / place.blocks) * shape.rows() + place.row;
  float* to = partials + partial * A::kTriples * layer.features + place.start + place.first;
  unroll<0, A::kTriples>([&](auto t) {
    place.store(to, dw[t], place.count);
    to += layer.features;
  });
}

// Blocks of kThreads or less for rows of W features a thread: several where one has too few.
template <typename A, int W>
RowsOnChip rows_on_chip(const Layer& layer) {
  const int blocks = ceil_div(layer.features, kThreads<A> * W);
  const int share = ceil_div(layer.features, blocks), per_row = ceil_div(share, 32 * W) * 32;
  return {kThreads<A> / per_row * per_row, per_row, blocks, share};
}

// Whether all rows start at a multiple of `width` floats and have one block: then kVector holds.
template <typename A, int W>
bool whole_packs(const Layer& layer, int width) {
  return layer.features % width == 0 && rows_on_chip<A, W>(layer).blocks == 1;
}

}  // namespace operators::clifford
