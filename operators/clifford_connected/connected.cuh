// What the kernels of the fully connected layer share (bonus_clifford_fully_connected.cu): the
// order of its planes, gates, and weights in TF32.
#pragma once

#include "operators/clifford/algebra.cuh"
#include "operators/clifford/clifford.cuh"
#include "operators/clifford/tensors.h"
#include "operators/clifford_connected/tf32_product.cuh"
#include "primitives/early_launch.cuh"
#include "primitives/launch.h"

namespace operators::clifford_connected {

using namespace primitives;
using namespace clifford;

/// Triple t has a plane P_t,k (batch, features) for each blade k of its result's grade. In w the
/// triples are ordered by the grade of x. Here they are ordered by the grade of their results, and
/// a *slot* is a triple's number in this order. Planes are numbered by slot, then by blade.
template <typename A>
struct Order {
  int triple_of[A::kTriples] = {};  ///< the triple that has this slot
  /// The first slot, plane and blade of each grade of the result; at the end how many there are.
  int slot[A::kGrades + 1] = {}, plane[A::kGrades + 1] = {}, blade[A::kGrades + 1] = {};

  constexpr Order() {
    for (int c = 0; c < A::kGrades; ++c) {
      slot[c + 1] = slot[c];
      blade[c + 1] = A::kTables.first[c + 1];
      for (int t = 0; t < A::kTriples; ++t) {
        if (A::kTables.triple[t].result == c) triple_of[slot[c + 1]++] = t;
      }
      plane[c + 1] = plane[c] + (slot[c + 1] - slot[c]) * (blade[c + 1] - blade[c]);
    }
  }
  /// How many slots and blades a grade has.
  __host__ __device__ int slots(int c) const { return slot[c + 1] - slot[c]; }
  __host__ __device__ int blades(int c) const { return blade[c + 1] - blade[c]; }
  /// The grade of slot, plane or blade `number`. `first` is the array slot, plane or blade.
  __host__ __device__ static int grade_of(const int (&first)[A::kGrades + 1], int number) {
    int c = 0;
    while (number >= first[c + 1]) ++c;
    return c;
  }

  /// For the compiler: how many triples have a result of this grade, and the i-th of them.
  __host__ __device__ static constexpr int triples(int grade) {
    int sum = 0;
    for (int t = 0; t < A::kTriples; ++t) sum += A::triple(t).result == grade;
    return sum;
  }
  __host__ __device__ static constexpr int triple(int grade, int i) {
    for (int t = 0; t < A::kTriples; ++t) {
      if (A::triple(t).result == grade && i-- == 0) return t;
    }
    return -1;
  }
};
template <typename A, int grade>
inline constexpr int kFirstPlane = Order<A>().plane[grade];
template <typename A>
inline constexpr int kPlanes = kFirstPlane<A, A::kGrades>;
static_assert(kPlanes<Cl<3, 0, 0>> == 44 && kPlanes<Cl<2, 0, 0>> == 14);

/// x becomes gate(x_0) gate(y_0) x, where x_0 is the scalar. Each term of a plane has one factor of
/// x and one of y, so this x and y make the planes of x' and y'.
template <typename A, int W>
__device__ __forceinline__ void apply_gates(Multivectors<A, W>& x, const Multivectors<A, W>& y) {
  const Pack<W> factor = Gates<W>(x.blade[0], y.blade[0]).product();
  unroll<0, A::kBlades>([&](auto i) {
#pragma unroll
    for (int e = 0; e < W; ++e) x.blade[i].v[e] *= factor.v[e];
  });
}

// W neighbouring features of all blades, of row n and from feature f on; zeros where there is no
// such row or feature.
template <typename A, int W>
__device__ __forceinline__ Multivectors<A, W> load_neighbours(const float* from, int n, int f,
                                                              const Layer& layer) {
  Multivectors<A, W> result = {};
  if (n >= layer.batch || f >= layer.features) return result;
  const float* at = from + static_cast<size_t>(n) * layer.features + f;
  if (layer.features % W == 0) {
    unroll<0, A::kBlades>([&](auto k) {
      result.blade[k] = *reinterpret_cast<const Pack<W>*>(at + k * layer.plane());
    });
  } else {
    unroll<0, A::kBlades>([&](auto k) {
#pragma unroll
      for (int e = 0; e < W; ++e) {
        if (f + e < layer.features) result.blade[k].v[e] = at[k * layer.plane() + e];
      }
    });
  }
  return result;
}

// Stores a pack, rounded to TF32.
template <int W>
__device__ __forceinline__ void store_rounded(float* to, Pack<W> pack) {
#pragma unroll
  for (int e = 0; e < W; ++e) pack.v[e] = rounded_to_tf32(pack.v[e]);
  *reinterpret_cast<Pack<W>*>(to) = pack;
}

/// The weights in TF32, each matrix with zeros up to `stride` rows and columns. A thread copies an
/// element.
__global__ void round_weights(const float* w, float* to, int features, int stride) {
  const int col = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
  if (col >= stride) return;
  const size_t t = blockIdx.z;
  const bool inside = row < features && col < features;
  to[(t * stride + row) * stride + col] =
      inside ? rounded_to_tf32(w[(t * features + row) * features + col]) : 0;
}

/// dw is the sum of `count` partial sums, in their order. A thread has four neighbouring elements.
__global__ void sum_weight_gradients(const float* partials, float* dw, int count, size_t size) {
  const size_t first = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
  wait_for_previous_kernel();
  if (size % 4 == 0) {
    if (first >= size) return;
    Pack<4> sum = empty_sum<4>();
    for (int i = 0; i < count; ++i) {
      const auto partial = *reinterpret_cast<const Pack<4>*>(partials + i * size + first);
#pragma unroll
      for (int e = 0; e < 4; ++e) sum.v[e] += partial.v[e];
    }
    *reinterpret_cast<Pack<4>*>(dw + first) = sum;
  } else {
    for (size_t at = first; at < first + 4 && at < size; ++at) {
      float sum = 0;
      for (int i = 0; i < count; ++i) sum += partials[i * size + at];
      dw[at] = sum;
    }
  }
}

// Where several blocks or clusters have shared the batch, dw is the sum of their partial sums.
inline void add_partials(const CliffordGradients& d, const Memory<float>& partials, int splits,
                         cudaStream_t stream = nullptr) {
  if (splits == 1) return;
  launch_clusters_on(stream, sum_weight_gradients, 1, true, blocks_for(d.dw.size(), 4 * 256), 256,
                     0, static_cast<const float*>(partials), d.dw.data(), splits, d.dw.size());
}

}  // namespace operators::clifford_connected
