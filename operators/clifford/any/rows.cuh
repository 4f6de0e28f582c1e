// The layer for every algebra of up to five basis vectors and every type of storage, on any GPU:
// what the fast kernels of one algebra and one type (streamed.cuh, on_chip.cuh) leave over. There
// is one kernel for each number n of basis vectors. The signature comes in as a metric, and the
// type of storage, the gate and the weights are switches that are the same for all threads.
//
// A thread owns W neighbouring features of a row, which it loads and stores by one access for each
// blade: W is what registers hold, 4 for up to 8 blades forward. The row belongs to `per_row`
// threads, a power of two, and so a block has several short rows. Forward, a row that its threads
// have in one step stays in registers while its squares are added up; a longer one is read twice,
// the second time from the L2 cache.
#pragma once

#include <cuda_runtime.h>

#include "operators/clifford/any/metric.cuh"
#include "operators/clifford/clifford.cuh"
#include "operators/clifford/storage.cuh"

namespace operators::clifford {

inline constexpr int kAnyThreads = 256;  // of a block

// Features of a thread: of each tensor it has 32 numbers at most forward, and 16 backward, but all
// blades of a feature.
template <int n>
inline constexpr int kAnyWidth = n <= 3   ? 4
                                 : n == 4 ? 2
                                          : 1;
template <int n>
inline constexpr int kAnyBackwardWidth = n <= 2   ? 4
                                         : n == 3 ? 2
                                                  : 1;

/// What the kernels know beside the tensors. Weights are prepared (triples of Cl<n, 0, 0>,
/// weight_stride) in fp32.
struct AnyLayer {
  Layer layer;
  Metric metric;
  Storage storage;  ///< of x, y, out and their gradients
  int per_row;      ///< threads of a row: a power of two, at most kAnyThreads
  int weight_stride;
  __host__ __device__ int rows() const { return kAnyThreads / per_row; }  // of a block, at a time
  __host__ __device__ int groups() const { return (layer.batch - 1) / rows() + 1; }
};

// The W features of a thread from f on, of which `inside` exist.
template <typename A, int W>
struct AnyPlace {
  const AnyLayer& of;
  size_t at;  // of the first one in a plane
  int inside;
  bool whole;  // all rows start at a multiple of W features

  __device__ AnyPlace(const AnyLayer& of, int row, int f)
      : of(of),
        at(static_cast<size_t>(row) * of.layer.features + f),
        inside(row < of.layer.batch ? max(0, min(W, of.layer.features - f)) : 0),
        whole(of.layer.features % W == 0) {}

  // Zeros where there is no feature. All loads are on their way before the first value is
  // converted.
  __device__ __forceinline__ Multivectors<A, W> load(const void* tensor) const {
    return with_type(of.storage, [&]<typename T>(const T*) {
      const T* const from = static_cast<const T*>(tensor) + at;
      const size_t plane = of.layer.plane();
      Stored<T, W> raw[A::kBlades] = {};
      if (whole && inside > 0) {
        unroll<0, A::kBlades>(
            [&](auto k) { raw[k] = *reinterpret_cast<const Stored<T, W>*>(from + k * plane); });
      } else if (inside > 0) {
#pragma unroll
        for (int e = 0; e < W; ++e) {
          if (e >= inside) continue;
          unroll<0, A::kBlades>([&](auto k) { raw[k].v[e] = from[k * plane + e]; });
        }
      }
      Multivectors<A, W> result;
      unroll<0, A::kBlades>([&](auto k) { result.blade[k] = unpacked(raw[k]); });
      return result;
    });
  }
  __device__ __forceinline__ void store(void* tensor, const Multivectors<A, W>& values) const {
    with_type(of.storage, [&]<typename T>(const T*) {
      T* const to = static_cast<T*>(tensor) + at;
      const size_t plane = of.layer.plane();
      if (whole && inside > 0) {
        unroll<0, A::kBlades>([&](auto k) {
          *reinterpret_cast<Stored<T, W>*>(to + k * plane) = packed<T, W>(values.blade[k]);
        });
      } else if (inside > 0) {
#pragma unroll
        for (int e = 0; e < W; ++e) {
          if (e >= inside) continue;
          unroll<0, A::kBlades>(
              [&](auto k) { to[k * plane + e] = rounded_to<T>(values.blade[k].v[e]); });
        }
      }
    });
  }
};

// The weights of a thread's features, loaded when they are needed, from the L1 cache. Without
// weights (null) all are 1.
template <int W>
struct AnyWeights {
  const float* from;  // of the first feature
  int stride;
  __device__ AnyWeights(const float* w, const AnyLayer& of, int f)
      : from(w == nullptr ? nullptr : w + f), stride(of.weight_stride) {}
  template <typename Index>
  __device__ __forceinline__ Pack<W> operator()(Index t) const {
    Pack<W> result;
#pragma unroll
    for (int e = 0; e < W; ++e) result.v[e] = 1;
    if (from != nullptr) result = *reinterpret_cast<const Pack<W>*>(from + t * stride);
    return result;
  }
};

// Adds up the sums of a row's `per_row` threads. All threads of the block call this.
template <int kCount>
__device__ __forceinline__ void add_up_threads(FeatureSums<kCount>& sums,
                                               FeatureSums<kCount>* partials, int per_row) {
  if (per_row <= 32) {
    add_up_lanes(sums, per_row);
  } else {
    add_up_row(sums, partials, per_row / 32);
  }
}

// out. A block owns rows() rows.
template <int n>
__global__ void __launch_bounds__(kAnyThreads, 2)
    forward_any(const void* x, const void* y, const float* w, void* out, AnyLayer of) {
  using A = Cl<n, 0, 0>;
  constexpr int W = kAnyWidth<n>;
  __shared__ FeatureSums<A::kGrades> partials[kAnyThreads / 32];
  const Layer& layer = of.layer;
  const int row = blockIdx.x * of.rows() + threadIdx.x / of.per_row;
  const int first = threadIdx.x % of.per_row * W, step = of.per_row * W;
  const bool stays = layer.normed && layer.features <= step;  // in registers
  FeatureSums<A::kGrades> sums = {};
  Multivectors<A, W> z = {};
  for (int walk = layer.normed ? 1 : 2; walk <= 2; ++walk) {
    for (int f = first; f < layer.features; f += step) {
      const AnyPlace<A, W> place(of, row, f);
      if (walk == 1 || !stays) {
        const Multivectors<A, W> left = place.load(x), right = place.load(y);
        z = weighted_by_metric<Of::result>(left, right, AnyWeights<W>(w, of, f), of.metric,
                                           [](auto, auto, const Pack<W>&) {});
        multiply_by(z, Gates<W>(left.blade[0], right.blade[0], layer.gated).product());
      }
      if (walk == 1) {
        add_squares(z, sums);
        continue;
      }
      Multivectors<A, W> normed = z;
      if (layer.normed) divide_by_rms(normed, sums, layer);
      place.store(out, normed);
    }
    if (walk == 1) add_up_threads(sums, partials, of.per_row);
  }
}

// of_rows (batch): the sums that the gradients of each row need, for rows that a block does not
// have in one step. A block owns rows() rows.
template <int n>
__global__ void __launch_bounds__(kAnyThreads)
    gradient_sums_any(const void* d_out, const void* x, const void* y, const float* w,
                      GradientSums<Cl<n, 0, 0>>* of_rows, AnyLayer of) {
  using A = Cl<n, 0, 0>;
  constexpr int W = kAnyBackwardWidth<n>;
  __shared__ GradientSums<A> partials[kAnyThreads / 32];
  const int row = blockIdx.x * of.rows() + threadIdx.x / of.per_row;
  GradientSums<A> sums = {};
  for (int f = threadIdx.x % of.per_row * W; f < of.layer.features; f += of.per_row * W) {
    const AnyPlace<A, W> place(of, row, f);
    const Multivectors<A, W> left = place.load(x), right = place.load(y);
    const Multivectors<A, W> P = weighted_by_metric<Of::result>(
        left, right, AnyWeights<W>(w, of, f), of.metric, [](auto, auto, const Pack<W>&) {});
    const Pack<W> g = Gates<W>(left.blade[0], right.blade[0], of.layer.gated).product();
    add_gradient_sums(P, g, place.load(d_out), sums);
  }
  add_up_threads(sums, partials, of.per_row);
  if (threadIdx.x % of.per_row == 0 && row < of.layer.batch) of_rows[row] = sums;
}

// dx, dy and partial sums of dw. A thread owns the same W features in all rows that its block takes
// one group after the other, so that their sums for dw stay in registers until the end. A row that
// is too long for a block is cut into `chunks` chunks, each of another block; then the sums of the
// row come from of_rows, which is null otherwise. dw_partials (groups at a time, rows, triples,
// features) is null if nobody wants dw.
template <int n>
__global__ void __launch_bounds__(kAnyThreads)
    backward_any(const void* d_out, const void* x, const void* y, const float* w,
                 const GradientSums<Cl<n, 0, 0>>* of_rows, void* dx, void* dy, float* dw_partials,
                 int chunks, AnyLayer of) {
  using A = Cl<n, 0, 0>;
  constexpr int W = kAnyBackwardWidth<n>;
  __shared__ GradientSums<A> partials[2][kAnyThreads / 32];
  const Layer& layer = of.layer;
  const int own = threadIdx.x / of.per_row, step = gridDim.x / chunks;
  const int f = (blockIdx.x % chunks * of.per_row + threadIdx.x % of.per_row) * W;
  // A thread beyond the row's end has no features, and reads the first weights.
  const AnyWeights<W> weights(w, of, f < layer.features ? f : 0);
  Pack<W> dw[A::kTriples] = {};
  int turn = 0;
  for (int group = blockIdx.x / chunks; group < of.groups(); group += step, turn ^= 1) {
    const int row = group * of.rows() + own;
    const AnyPlace<A, W> place(of, row, f);
    const Multivectors<A, W> left = place.load(x), right = place.load(y), d = place.load(d_out);
    const Multivectors<A, W> P = weighted_by_metric<Of::result>(left, right, weights, of.metric,
                                                                [](auto, auto, const Pack<W>&) {});
    const Gates<W> gates(left.blade[0], right.blade[0], layer.gated);
    GradientSums<A> sums = {};
    if (of_rows != nullptr) {
      if (row < layer.batch) sums = of_rows[row];
    } else if (layer.normed) {
      add_gradient_sums(P, gates.product(), d, sums);
      add_up_threads(sums, partials[turn], of.per_row);
    }
    Pack<W> dg;
    const Multivectors<A, W> dP = gradient_of_product(P, gates.product(), d, sums, layer, dg);
    Multivectors<A, W> result = weighted_by_metric<Of::x>(
        dP, right, weights, of.metric, [&](auto t, auto blade, const Pack<W>& terms) {
          add_product(dw[t], left.blade[blade], terms);
        });
    add(result.blade[0], through_gate(dg, left.blade[0], gates.y, layer));
    place.store(dx, result);
    result =
        weighted_by_metric<Of::y>(dP, left, weights, of.metric, [](auto, auto, const Pack<W>&) {});
    add(result.blade[0], through_gate(dg, right.blade[0], gates.x, layer));
    place.store(dy, result);
  }
  if (dw_partials == nullptr || f >= layer.features) return;
  const size_t partial = static_cast<size_t>(blockIdx.x / chunks) * of.rows() + own;
  float* const to = dw_partials + partial * of.metric.triples * layer.features + f;
  unroll<0, A::kTriples>([&](auto t) {
    const int place = of.metric.place[t];
#pragma unroll
    for (int e = 0; e < W; ++e) {
      if (place >= 0 && f + e < layer.features) {
        to[static_cast<size_t>(place) * layer.features + e] = dw[t].v[e];
      }
    }
  });
}

// The weights as the kernels above read them: prepared (triples of Cl<n, 0, 0>, stride) from w
// (features, triples of the algebra), zeros where the algebra has no such triple and beyond the
// features. A thread writes one. Neighbours read w far apart, but it is small.
static __global__ void __launch_bounds__(kAnyThreads)
    prepare_weights(const void* w, Storage storage, float* prepared, int count, AnyLayer of) {
  const int at = blockIdx.x * kAnyThreads + threadIdx.x;
  if (at >= count) return;
  const int place = of.metric.place[at / of.weight_stride], f = at % of.weight_stride;
  float value = 0;
  if (place >= 0 && f < of.layer.features) {
    const size_t from = static_cast<size_t>(f) * of.metric.triples + place;
    value = with_type(
        storage, [&]<typename T>(const T*) { return to_float(static_cast<const T*>(w)[from]); });
  }
  prepared[at] = value;
}

}  // namespace operators::clifford
