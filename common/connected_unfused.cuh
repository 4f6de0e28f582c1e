// The baseline of the fully connected product: as a framework runs it. Gates, a kernel that writes
// the planes of all products of pairs, a product of the library's for each grade triple, which adds
// to its grade of the result, the norms; and backward, which has the planes' gradients in their
// place.
#pragma once

#include "common/clifford_unfused.cuh"
#include "common/connected.cuh"

/// The planes P of x' and y': one thread a multivector.
template <typename A>
__global__ void multiply_pairs(const float* x, const float* y, float* planes, Layer layer) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const size_t plane = layer.plane();
  if (at >= plane) return;
  const Multivectors<A, 1> left = load<A>(x + at, plane), right = load<A>(y + at, plane);
  unroll<0, A::kTriples>([&](auto t) {
    constexpr int c = A::triple(t).result, first = Planes<A>::first(t) - A::first(c);
    unroll<A::first(c), A::first(c + 1)>([&](auto k) {
      planes[(first + k) * plane + at] = sum_terms<A, Of::result, t, k>(left, right).v[0];
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
  unroll<0, A::kTriples>([&](auto t) {
    constexpr auto grades = A::triple(t);
    constexpr int start = A::first(grades.result), first = Planes<A>::first(t);
    Multivectors<A, 1> part;
    unroll<start, A::first(grades.result + 1)>(
        [&](auto k) { part.blade[k].v[0] = d[(first + k - start) * plane + at]; });
    unroll<A::first(grades.x), A::first(grades.x + 1)>(
        [&](auto i) { add(d_left.blade[i], sum_terms<A, Of::x, t, i>(part, right)); });
    unroll<A::first(grades.y), A::first(grades.y + 1)>(
        [&](auto j) { add(d_right.blade[j], sum_terms<A, Of::y, t, j>(part, left)); });
  });
  unroll<0, A::kBlades>([&](auto i) {
    dx[i * plane + at] = d_left.blade[i].v[0];
    dy[i * plane + at] = d_right.blade[i].v[0];
  });
}

/// c (m, n) = a b + beta c in TF32, row-major; a is stored as (m, k), or transposed, b as (k, n),
/// or transposed.
inline void library_product(cublasHandle_t blas, const float* a, Transposed a_is, const float* b,
                            Transposed b_is, float beta, float* c, int m, int n, int k) {
  const float one = 1;
  CUBLAS_CHECK(cublasGemmEx(blas, b_is ? CUBLAS_OP_T : CUBLAS_OP_N,
                            a_is ? CUBLAS_OP_T : CUBLAS_OP_N, n, m, k, &one, b, CUDA_R_32F,
                            b_is ? k : n, a, CUDA_R_32F, a_is ? m : k, &beta, c, CUDA_R_32F, n,
                            CUBLAS_COMPUTE_32F_FAST_TF32, CUBLAS_GEMM_DEFAULT));
}

template <typename A>
struct UnfusedConnected {
  UnfusedConnected(const CliffordTensors& tensors, std::shared_ptr<Cublas> handle)
      : of(tensors),
        blas(std::move(handle)),
        x(of.problem.output<float>(of.x.size())),
        y(of.problem.output<float>(of.y.size())),
        planes(of.problem.output<float>(Planes<A>::kCount * of.layer.plane())),
        z(of.layer.normed ? of.problem.output<float>(of.out.size()) : of.out),
        inverses(of.problem.output<float>(static_cast<size_t>(of.layer.batch) * A::kGrades)) {}

  double bytes() const {
    return x.bytes() + y.bytes() + planes.bytes() +
           (of.layer.normed ? z.bytes() + inverses.bytes() : 0);
  }
  // Of the host's own tables: functions that the kernels call are the compiler's to evaluate.
  static int first_blade(int c) { return A::kTables.first[c]; }
  static int blades_of_grade(int c) { return A::kTables.first[c + 1] - A::kTables.first[c]; }
  static int result(int t) { return A::kTables.triple[t].result; }
  /// Where triple t's planes, weights and results start, and the rows of its product.
  size_t planes_of(int t) const {
    int before = 0;
    for (int i = 0; i < t; ++i) before += blades_of_grade(result(i));
    return before * of.layer.plane();
  }
  size_t weights_of(int t) const { return t * (of.w.size() / A::kTriples); }
  size_t results_of(int t) const { return first_blade(result(t)) * of.layer.plane(); }
  int rows_of(int t) const { return blades_of_grade(result(t)) * of.layer.batch; }

  void forward() const {
    const Layer& layer = of.layer;
    const int blocks = blocks_of(layer.plane(), 256);
    apply_gate<A><<<blocks, 256>>>(of.x, x, layer);
    apply_gate<A><<<blocks, 256>>>(of.y, y, layer);
    multiply_pairs<A><<<blocks, 256>>>(x, y, planes, layer);
    bool started[A::kGrades] = {};
    for (int t = 0; t < A::kTriples; ++t) {
      bool& adds = started[result(t)];
      library_product(*blas, planes + planes_of(t), kPlain, of.w + weights_of(t), kPlain,
                      adds ? 1 : 0, z + results_of(t), rows_of(t), layer.features, layer.features);
      adds = true;
    }
    for (int c = 0; layer.normed && c < A::kGrades; ++c) {
      const size_t start = first_blade(c) * layer.plane();
      normalize_grade<<<layer.batch, 256>>>(z + start, of.out + start,
                                            inverses + static_cast<size_t>(c) * layer.batch,
                                            blades_of_grade(c), layer);
    }
  }

  CliffordTensors of;
  std::shared_ptr<Cublas> blas;
  Buffer<float> x, y, planes, z, inverses;
};

template <typename A>
struct UnfusedConnectedBackward {
  UnfusedConnectedBackward(const CliffordTensors& of, const CliffordGradients& gradients,
                           std::shared_ptr<Cublas> handle)
      : forward(of, std::move(handle)),
        d(gradients),
        dz(of.layer.normed ? of.problem.output<float>(of.out.size()) : d.d_out) {}

  double bytes() const { return forward.bytes() + (forward.of.layer.normed ? dz.bytes() : 0); }

  void forward_and_backward() const {
    forward.forward();
    const UnfusedConnected<A>& f = forward;
    const Layer& layer = f.of.layer;
    for (int c = 0; layer.normed && c < A::kGrades; ++c) {
      const size_t start = f.first_blade(c) * layer.plane();
      normalize_grade_gradient<<<layer.batch, 256>>>(
          f.z + start, d.d_out + start, f.inverses + static_cast<size_t>(c) * layer.batch,
          dz + start, f.blades_of_grade(c), layer);
    }
    for (int t = 0; t < A::kTriples; ++t) {
      library_product(*f.blas, f.planes + f.planes_of(t), kTransposed, dz + f.results_of(t), kPlain,
                      0, d.dw + f.weights_of(t), layer.features, layer.features, f.rows_of(t));
      library_product(*f.blas, dz + f.results_of(t), kPlain, f.of.w + f.weights_of(t), kTransposed,
                      0, f.planes + f.planes_of(t), f.rows_of(t), layer.features, layer.features);
    }
    const int blocks = blocks_of(layer.plane(), 256);
    multiply_pairs_gradient<A><<<blocks, 256>>>(f.x, f.y, f.planes, d.dx, d.dy, layer);
    apply_gate_gradient<A><<<blocks, 256>>>(f.of.x, d.dx, layer);
    apply_gate_gradient<A><<<blocks, 256>>>(f.of.y, d.dy, layer);
  }

  UnfusedConnected<A> forward;
  CliffordGradients d;
  Buffer<float> dz;
};
