// What every kernel of the fully connected product knows when it is compiled: the planes of each
// grade triple, and how the triples are divided among blocks. Matrices of weights in TF32.
#pragma once

#include "common/algebra.cuh"
#include "common/clifford.cuh"
#include "common/mma.cuh"

/// Triple t makes a plane P_t,k (batch, features) for each blade k of its result's grade; planes
/// are numbered by triple, then by blade.
template <typename A>
struct Planes {
  __host__ __device__ static constexpr int result(int t) { return A::triple(t).result; }
  __host__ __device__ static constexpr int count(int t) { return A::blades_of(result(t)); }
  __host__ __device__ static constexpr int first(int t) {
    int sum = 0;
    for (int before = 0; before < t; ++before) sum += count(before);
    return sum;
  }
  static constexpr int kCount = first(A::kTriples);
};
static_assert(Planes<Cl<3, 0, 0>>::kCount == 44 && Planes<Cl<2, 0, 0>>::kCount == 14);

/// A block works on four blades of the result: in 2-D these are all, in 3-D grades 0 and 1, or 2
/// and 3. In either algebra 10 triples lead to them. In a Part triples are in the order of their
/// results' grades.
template <typename A, int part>
struct Part {
  static_assert(A::kBlades % 4 == 0);
  static constexpr int kFirstBlade = 4 * part, kBlades = 4;
  static constexpr int kFirstGrade = A::grade(kFirstBlade);
  static constexpr int kEndGrade = A::grade(kFirstBlade + kBlades - 1) + 1;
  static_assert(A::first(kFirstGrade) == kFirstBlade && A::first(kEndGrade) == kFirstBlade + 4);

  /// How many triples have a result of this grade; the i-th of them.
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
  /// The part's triples before those of a grade, and its planes before those of the i-th of them.
  __host__ __device__ static constexpr int before(int grade) {
    int sum = 0;
    for (int c = kFirstGrade; c < grade; ++c) sum += triples(c);
    return sum;
  }
  __host__ __device__ static constexpr int plane(int grade, int i) {
    int sum = i * A::blades_of(grade);
    for (int c = kFirstGrade; c < grade; ++c) sum += triples(c) * A::blades_of(c);
    return sum;
  }
  static constexpr int kTriples = before(kEndGrade);
  static constexpr int kPlanes = plane(kEndGrade - 1, triples(kEndGrade - 1));

  /// visit(grade, i) with constants, for each of the part's triples.
  template <typename Visit>
  __device__ __forceinline__ static void for_triples(Visit visit) {
    unroll<kFirstGrade, kEndGrade>(
        [&](auto c) { unroll<0, triples(c)>([&](auto i) { visit(c, i); }); });
  }
};
template <typename A>
inline constexpr int kParts = A::kBlades / 4;

/// x becomes gate(x_0) gate(y_0) x: then x y is x' y'.
template <typename A, int W>
__device__ __forceinline__ void apply_gates(Multivectors<A, W>& x, const Multivectors<A, W>& y) {
  const Pack<W> factor = Gates<W>(x.blade[0], y.blade[0]).product();
  unroll<0, A::kBlades>([&](auto i) {
#pragma unroll
    for (int e = 0; e < W; ++e) x.blade[i].v[e] *= factor.v[e];
  });
}

__device__ inline float rounded_to_tf32(float value) { return __uint_as_float(to_tf32(value)); }

/// Matrices of weights, TF32, with `stride` rows and columns, a multiple of 64 that is at least
/// `features`; what is beyond these is 0. A thread copies an element.
__global__ void round_weights(const float* w, float* to, int features, int stride) {
  const int col = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
  if (col >= stride) return;
  const size_t t = blockIdx.z;
  const bool inside = row < features && col < features;
  to[(t * stride + row) * stride + col] =
      inside ? rounded_to_tf32(w[(t * features + row) * features + col]) : 0;
}

/// out = z / rms(z) for each grade, in place; keeps 1 / rms (grades, batch) for backward. A block a
/// row, which it reads twice, the second time from a cache.
template <typename A>
__global__ void normalize_rows(float* out, float* inverses, Layer layer) {
  __shared__ Sums<A::kGrades> partials[kMaxWarps];
  const size_t row = static_cast<size_t>(blockIdx.x) * layer.features, plane = layer.plane();
  Sums<A::kGrades> squares = {};
  for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
    add_squares(load<A>(out + row + f, plane), squares);
  }
  add_up_row(squares, partials, blockDim.x / 32);
  unroll<0, A::kGrades>([&](auto c) {
    const float r = inverse_rms(squares.value[c], layer);
    if (threadIdx.x == 0) inverses[static_cast<size_t>(c) * layer.batch + blockIdx.x] = r;
    squares.value[c] = r;
  });
  for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
    unroll<0, A::kBlades>([&](auto k) { out[k * plane + row + f] *= squares.value[A::grade(k)]; });
  }
}

/// dz of rows `first` and on, one a block, in TF32, to rows of `stride` elements: with out = r z,
/// dz = r d_out - r out mean(d_out out). `pitch` elements from blade to blade. Zeros beyond the
/// features, and in rows beyond the batch.
template <typename A>
__global__ void result_gradients(const float* out, const float* d_out, const float* inverses,
                                 float* dz, int first, int stride, size_t pitch, Layer layer) {
  __shared__ Sums<A::kGrades> partials[kMaxWarps];
  const int n = first + blockIdx.x;
  const size_t row = static_cast<size_t>(n) * layer.features, plane = layer.plane();
  Sums<A::kGrades> r = {}, products = {};
  if (n < layer.batch && layer.normed) {
    for (int f = threadIdx.x; f < layer.features; f += blockDim.x) {
      unroll<0, A::kBlades>([&](auto k) {
        products.value[A::grade(k)] += out[k * plane + row + f] * d_out[k * plane + row + f];
      });
    }
    unroll<0, A::kGrades>(
        [&](auto c) { r.value[c] = inverses[static_cast<size_t>(c) * layer.batch + n]; });
  }
  add_up_row(products, partials, blockDim.x / 32);
  for (int f = threadIdx.x; f < stride; f += blockDim.x) {
    const bool inside = n < layer.batch && f < layer.features;
    unroll<0, A::kBlades>([&](auto k) {
      constexpr int c = A::grade(k);
      float value = inside ? d_out[k * plane + row + f] : 0;
      if (inside && layer.normed) {
        const float mean = products.value[c] * layer.inverse_features;
        value = r.value[c] * (value - out[k * plane + row + f] * mean);
      }
      dz[k * pitch + static_cast<size_t>(blockIdx.x) * stride + f] = rounded_to_tf32(value);
    });
  }
}

/// dw = the sum of `count` partial sums, in their order; a thread an element.
__global__ void sum_weight_gradients(const float* partials, float* dw, int count, size_t size) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= size) return;
  float sum = 0;
  for (int i = 0; i < count; ++i) sum += partials[i * size + at];
  dw[at] = sum;
}
