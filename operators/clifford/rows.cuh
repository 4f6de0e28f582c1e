// What *row on chip* and *rows streamed* share: which thread has which features of which row, the
// weights in shared memory, and how results are stored.
#pragma once

#include "operators/clifford/clifford.cuh"
#include "operators/clifford/storage.cuh"
#include "primitives/async_copy.cuh"
#include "primitives/launch.h"

namespace operators::clifford {

using namespace primitives;

// A block has `threads` threads, of which each row that it has at a time takes `per_row`: whole
// warps. A row that is too long for one block is shared by the `blocks` blocks of a cluster, with
// `share` features each.
struct RowsOnChip {
  int threads, per_row, blocks, share;
  __host__ __device__ int rows() const { return threads / per_row; }
  __host__ __device__ int groups(const Layer& layer) const {
    return (layer.batch - 1) / rows() + 1;
  }
};

// Threads of a block. Each can have 128 registers if there are 512, and 255 if there are 256.
template <typename A>
inline constexpr int kThreads = A::kBlades <= 16 ? 512 : 256;

// Which row of its block a thread has, and which W features. With kVector these are neighbours,
// moved as one vector, and all rows start at a multiple of its size. Otherwise they are 32 apart:
// neighbouring threads have neighbouring features, and a warp moves 128 bytes that lie side by
// side, wherever the row starts.
template <int W, bool kVector>
struct Place {
  static constexpr int kStep = kVector ? 1 : 32;
  int row, blocks;      // the thread's row in its block; how many blocks share a row
  int start, features;  // the block has `features` of the row's features, from `start` on
  int first, count;     // the thread's first feature, from `start` on; how many it has

  __device__ Place(const RowsOnChip& shape, const Layer& layer)
      : row(threadIdx.x / shape.per_row),
        blocks(kVector ? 1 : shape.blocks),
        start(kVector ? 0 : blockIdx.x % blocks * shape.share),
        features(kVector ? layer.features : min(shape.share, layer.features - start)),
        first(first_of(threadIdx.x % shape.per_row)),
        count(first >= features ? 0
              : kVector         ? W
                                : min(W, (features - first - 1) / kStep + 1)) {}

  // Thread t of a row has the features first_of(t), first_of(t) + kStep and so on, counted from
  // `start`. A feature belongs to thread thread_of(feature), and is number number_of(feature) of
  // its features.
  __device__ static int first_of(int t) { return t / kStep * kStep * W + t % kStep; }
  __device__ static int thread_of(int feature) {
    return feature / (kStep * W) * kStep + feature % kStep;
  }
  __device__ static int number_of(int feature) { return feature / kStep % W; }

  // These move the thread's features of one blade, of which `inside` exist. `from` and `to` point
  // to the first of them. fetch() starts the copies to shared memory.
  __device__ __forceinline__ void fetch(float* to, const float* from, int inside) const {
    if constexpr (kVector) {
      copy_async<sizeof(Pack<W>)>(to, from, inside > 0);
    } else {
#pragma unroll
      for (int e = 0; e < W; ++e) copy_async<sizeof(float)>(to + e, from + e * kStep, e < inside);
    }
  }
  // Asks the L2 cache to fetch them from memory.
  __device__ __forceinline__ void prefetch(const float* from, int inside) const {
#pragma unroll
    for (int e = 0; e < (kVector ? 1 : W); ++e) {
      if (e < inside) prefetch_to_cache(from + e * kStep);
    }
  }
  template <typename T>
  __device__ __forceinline__ Pack<W> load(const T* from, int inside) const {
    Pack<W> result = {};
    if constexpr (kVector) {
      if (inside > 0) result = unpacked(*reinterpret_cast<const Stored<T, W>*>(from));
    } else {
#pragma unroll
      for (int e = 0; e < W; ++e) result.v[e] = e < inside ? to_float(from[e * kStep]) : 0;
    }
    return result;
  }
  template <typename T>
  __device__ __forceinline__ void store(T* to, const Pack<W>& pack, int inside) const {
    if constexpr (kVector) {
      if (inside > 0) *reinterpret_cast<Stored<T, W>*>(to) = packed<T>(pack);
    } else {
#pragma unroll
      for (int e = 0; e < W; ++e) {
        if (e < inside) to[e * kStep] = rounded_to<T>(pack.v[e]);
      }
    }
  }
};

// The shared memory of a block: the weights of a row's features, those of one thread side by side;
// and for each thread of the block kPlanes packs of its next row, which it fills, reads and refills
// alone. So a thread reads all of its weights, or packs, at constant offsets from one address.
// (Addresses that depend on a stride would each take a register.) From one thread to the next these
// are an odd number of packs, so that neighbouring threads read from different banks.
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

  // Starts the copies of all weights, a float at a time, since neighbours do not stay neighbours.
  // Beyond the row's end there are zeros, so threads without a feature multiply zeros.
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
  // Starts the copies of a thread's part of a tensor, to its packs number first, first + 1 and so
  // on.
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

// Writes a thread's z to memory, divided by its row's rms if the layer has a norm.
template <typename A, int W, bool kVector, typename T>
__device__ __forceinline__ void store_normed(const Multivectors<A, W>& z,
                                             const FeatureSums<A::kGrades>& sums,
                                             const Layer& layer, T* to,
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

// Computes dx and dy of a thread's multivectors, writes them to memory, and adds to dw. All threads
// of a warp call this together.
template <typename A, int W, bool kVector, typename Weight, typename T>
__device__ __forceinline__ void store_gradients(const Multivectors<A, W>& left,
                                                const Multivectors<A, W>& right,
                                                const Multivectors<A, W>& dP, const Pack<W>& dg,
                                                const Gates<W>& gates, const Weight& weight,
                                                Pack<W>* dw, T* dx, T* dy, const Layer& layer,
                                                const Place<W, kVector>& place, int inside) {
  const Pack<W> dx_through_gate = through_gate(dg, left.blade[0], gates.y, layer);
  const Pack<W> dy_through_gate = through_gate(dg, right.blade[0], gates.x, layer);
  const size_t plane = layer.plane();
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
  __syncwarp();  // without it the compiler would keep all weights in registers
  gradients<Of::y>(left, right, dP, weight, give_y, take_w, give_w);
}

// Writes a thread's sums for dw to memory. Each row of a block has partial sums of its own there.
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

// How rows are divided if a thread has W features: a block has as many rows as its threads suffice
// for, or several blocks share a row.
template <typename A, int W>
RowsOnChip rows_on_chip(const Layer& layer) {
  const int blocks = ceil_div(layer.features, kThreads<A> * W);
  const int share = ceil_div(layer.features, blocks), per_row = ceil_div(share, 32 * W) * 32;
  return {kThreads<A> / per_row * per_row, per_row, blocks, share};
}

// Whether kVector may be true: all rows start at a multiple of `width` elements, and each has one
// block.
template <typename A, int W>
bool whole_packs(const Layer& layer, int width) {
  return layer.features % width == 0 && rows_on_chip<A, W>(layer).blocks == 1;
}

}  // namespace operators::clifford
