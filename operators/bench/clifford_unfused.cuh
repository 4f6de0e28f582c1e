// The fully connected product as a framework runs it, by cuBLAS: what the benchmark of
// operators/clifford_connected compares with.
#pragma once

#include <memory>
#include <utility>

#include "common/lesson.h"
#include "common/numerics.h"
#include "operators/clifford/unfused.cuh"
#include "operators/clifford_connected/connected.cuh"

namespace operators::clifford_connected {

using namespace common;

// Gates; a kernel that writes the planes of all products of pairs, of one grade of the result side
// by side, so that one product of the library's, with the weights of that grade below each other,
// makes the sum over its triples; the norms. And backward, which has the planes' gradients in their
// place.

/// Where the planes of a multivector are: of grade c of the result a matrix with a row for each of
/// its blades and each row of the batch, in which the grade's triples are next to each other.
/// visit(t, c, first blade's place, elements from blade to blade) for each triple.
template <typename A, typename Visit>
__device__ __forceinline__ void for_planes(size_t at, const Layer& layer, Visit visit) {
  const size_t n = at / layer.features, f = at % layer.features;
  unroll<0, A::kGrades>([&](auto c) {
    constexpr int kTriples = Order<A>::triples(c), kFirst = kFirstPlane<A, c>;
    unroll<0, kTriples>([&](auto i) {
      visit(Constant<Order<A>::triple(c, i)>(), c,
            kFirst * layer.plane() + (n * kTriples + i) * layer.features + f,
            kTriples * layer.plane());
    });
  });
}

/// The planes P of x' and y': one thread a multivector.
template <typename A>
__global__ void multiply_pairs(const float* x, const float* y, float* planes, Layer layer) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const size_t plane = layer.plane();
  if (at >= plane) return;
  const Multivectors<A, 1> left = load<A>(x + at, plane), right = load<A>(y + at, plane);
  for_planes<A>(at, layer, [&](auto t, auto c, size_t place, size_t pitch) {
    unroll<A::first(c), A::first(c + 1)>([&](auto k) {
      planes[place] = sum_terms<A, Of::result, t, k>(left, right).v[0];
      place += pitch;
    });
  });
}

/// dx' and dy' from the planes' gradients d: dx'_i = sum of sign y'_j d_t,k, and dy' likewise.
template <typename A>
__global__ void multiply_pairs_gradient(const float* x, const float* y, const float* d, float* dx,
                                        float* dy, Layer layer) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const size_t plane = layer.plane();
  if (at >= plane) return;
  const Multivectors<A, 1> left = load<A>(x + at, plane), right = load<A>(y + at, plane);
  Multivectors<A, 1> d_left = {}, d_right = {};
  for_planes<A>(at, layer, [&](auto t, auto c, size_t place, size_t pitch) {
    constexpr auto grades = A::triple(t);
    Multivectors<A, 1> d_planes;
    unroll<A::first(c), A::first(c + 1)>([&](auto k) {
      d_planes.blade[k].v[0] = d[place];
      place += pitch;
    });
    unroll<A::first(grades.x), A::first(grades.x + 1)>(
        [&](auto i) { add(d_left.blade[i], sum_terms<A, Of::x, t, i>(d_planes, right)); });
    unroll<A::first(grades.y), A::first(grades.y + 1)>(
        [&](auto j) { add(d_right.blade[j], sum_terms<A, Of::y, t, j>(d_planes, left)); });
  });
  unroll<0, A::kBlades>([&](auto i) {
    dx[i * plane + at] = d_left.blade[i].v[0];
    dy[i * plane + at] = d_right.blade[i].v[0];
  });
}

/// Matrices of `size` elements, of triples, to the order of Order, or from it: a row of blocks
/// each.
template <typename A>
__global__ void order_weights(const float* from, float* to, size_t size, bool back,
                              const __grid_constant__ Order<A> order) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const size_t triple = order.triple_of[blockIdx.y] * size, slot = blockIdx.y * size;
  if (at < size) to[(back ? triple : slot) + at] = from[(back ? slot : triple) + at];
}

/// c (m, n) = a b in TF32, row-major; a is stored as (m, k), or transposed, b as (k, n),
/// or transposed.
inline void library_product(cublasHandle_t blas, const float* a, Transposed a_is, const float* b,
                            Transposed b_is, float* c, int m, int n, int k) {
  const float one = 1, zero = 0;
  CUBLAS_CHECK(cublasGemmEx(blas, b_is ? CUBLAS_OP_T : CUBLAS_OP_N,
                            a_is ? CUBLAS_OP_T : CUBLAS_OP_N, n, m, k, &one, b, CUDA_R_32F,
                            b_is ? k : n, a, CUDA_R_32F, a_is ? m : k, &zero, c, CUDA_R_32F, n,
                            CUBLAS_COMPUTE_32F_FAST_TF32, CUBLAS_GEMM_DEFAULT));
}

template <typename A>
struct UnfusedConnected {
  UnfusedConnected(const CliffordTensors& tensors, std::shared_ptr<Cublas> handle)
      : of(tensors),
        blas(std::move(handle)),
        x(of.workspace.any<float>(of.x.size())),
        y(of.workspace.any<float>(of.y.size())),
        planes(of.workspace.any<float>(kPlanes<A> * of.layer.plane())),
        weights(of.workspace.any<float>(of.w.size())),
        z(of.layer.normed ? of.workspace.any<float>(of.out.size()) : of.out),
        inverses(of.workspace.any<float>(static_cast<size_t>(of.layer.batch) * A::kGrades)) {}

  double bytes() const {
    return x.bytes() + y.bytes() + planes.bytes() + weights.bytes() +
           (of.layer.normed ? z.bytes() + inverses.bytes() : 0);
  }
  /// Of the product of grade c: where the planes, weights and results start, the rows of the planes
  /// and of the weights.
  size_t planes_of(int c) const { return order.plane[c] * of.layer.plane(); }
  size_t weights_of(int c) const { return order.slot[c] * matrix(); }
  size_t results_of(int c) const { return order.blade[c] * of.layer.plane(); }
  int rows_of(int c) const { return blades_of(c) * of.layer.batch; }
  int depth_of(int c) const { return (order.slot[c + 1] - order.slot[c]) * of.layer.features; }
  int blades_of(int c) const { return order.blade[c + 1] - order.blade[c]; }
  size_t matrix() const { return of.w.size() / A::kTriples; }

  void order_matrices(const float* from, float* to, bool back) const {
    const dim3 blocks(blocks_for(matrix(), 256), A::kTriples);
    order_weights<A><<<blocks, 256>>>(from, to, matrix(), back, order);
  }
  void forward() const {
    const Layer& layer = of.layer;
    const int blocks = blocks_for(layer.plane(), 256);
    apply_gate<A><<<blocks, 256>>>(of.x, x, layer);
    apply_gate<A><<<blocks, 256>>>(of.y, y, layer);
    multiply_pairs<A><<<blocks, 256>>>(x, y, planes, layer);
    order_matrices(of.w, weights, false);
    for (int c = 0; c < A::kGrades; ++c) {
      library_product(*blas, planes + planes_of(c), kPlain, weights + weights_of(c), kPlain,
                      z + results_of(c), rows_of(c), layer.features, depth_of(c));
    }
    for (int c = 0; layer.normed && c < A::kGrades; ++c) {
      normalize_grade<<<layer.batch, 256>>>(z + results_of(c), of.out + results_of(c),
                                            inverses + static_cast<size_t>(c) * layer.batch,
                                            blades_of(c), layer);
    }
  }

  CliffordTensors of;
  std::shared_ptr<Cublas> blas;
  Order<A> order = {};
  Memory<float> x, y, planes, weights, z, inverses;
};

template <typename A>
struct UnfusedConnectedBackward {
  UnfusedConnectedBackward(const CliffordTensors& of, const CliffordGradients& gradients,
                           std::shared_ptr<Cublas> handle)
      : forward(of, std::move(handle)),
        d(gradients),
        dz(of.layer.normed ? of.workspace.any<float>(of.out.size()) : d.d_out),
        dw(of.workspace.any<float>(of.w.size())) {}

  double bytes() const {
    return forward.bytes() + dw.bytes() + (forward.of.layer.normed ? dz.bytes() : 0);
  }

  void forward_and_backward() const {
    forward.forward();
    const UnfusedConnected<A>& f = forward;
    const Layer& layer = f.of.layer;
    for (int c = 0; layer.normed && c < A::kGrades; ++c) {
      const size_t start = f.results_of(c);
      normalize_grade_gradient<<<layer.batch, 256>>>(
          f.z + start, d.d_out + start, f.inverses + static_cast<size_t>(c) * layer.batch,
          dz + start, f.blades_of(c), layer);
    }
    for (int c = 0; c < A::kGrades; ++c) {
      library_product(*f.blas, f.planes + f.planes_of(c), kTransposed, dz + f.results_of(c), kPlain,
                      dw + f.weights_of(c), f.depth_of(c), layer.features, f.rows_of(c));
      library_product(*f.blas, dz + f.results_of(c), kPlain, f.weights + f.weights_of(c),
                      kTransposed, f.planes + f.planes_of(c), f.rows_of(c), f.depth_of(c),
                      layer.features);
    }
    f.order_matrices(dw, d.dw, true);
    const int blocks = blocks_for(layer.plane(), 256);
    multiply_pairs_gradient<A><<<blocks, 256>>>(f.x, f.y, f.planes, d.dx, d.dy, layer);
    apply_gate_gradient<A><<<blocks, 256>>>(f.of.x, d.dx, layer);
    apply_gate_gradient<A><<<blocks, 256>>>(f.of.y, d.dy, layer);
  }

  UnfusedConnected<A> forward;
  CliffordGradients d;
  Memory<float> dz, dw;
};

}  // namespace operators::clifford_connected
