#include <algorithm>

#include "problems/clifford/connected.h"
#include "problems/clifford/fp64.cuh"

namespace problems {

namespace {

using fp64::blocks, fp64::direction, fp64::gate, fp64::gate_slope, fp64::kThreads, fp64::OnDevice;
using Term = CliffordReference::Term;
constexpr int kMaxResults = 16;  // blades of a grade

/// One thread a (row, feature): the planes of one triple, whose results start at blade `first`.
__global__ void planes_kernel(const float* x, const float* y, double* planes, const Term* terms,
                              int term_count, int first, int results, size_t plane, double x_step,
                              double y_step, bool squares) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= plane) return;
  const auto moved = [&](const float* from, size_t i, double step) {
    return static_cast<double>(from[i]) + step * direction(i);
  };
  double sums[kMaxResults] = {};
  for (int n = 0; n < term_count; ++n) {
    const Term term = terms[n];
    const double product = term.sign * moved(x, term.left * plane + at, x_step) *
                           moved(y, term.right * plane + at, y_step);
    sums[term.result - first] += squares ? product * product : product;
  }
  double gates = gate(moved(x, at, x_step)) * gate(moved(y, at, y_step));
  if (squares) gates *= gates;
  for (int k = 0; k < results; ++k) planes[k * plane + at] = gates * sums[k];
}

__global__ void weights_kernel(const float* w, double* out, size_t first, size_t count, double step,
                               bool squares) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= count) return;
  const double weight = static_cast<double>(w[first + at]) + step * direction(first + at);
  out[at] = squares ? weight * weight : weight;
}

/// One thread a (row, feature): adds a triple's part to the gradients of x' and y'.
__global__ void add_gradients_kernel(const float* x, const float* y, const double* d,
                                     const Term* terms, int term_count, int first, size_t plane,
                                     double* dx, double* dy) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= plane) return;
  const double left_gate = gate(x[at]), right_gate = gate(y[at]);
  for (int n = 0; n < term_count; ++n) {
    const Term term = terms[n];
    const double value = term.sign * d[(term.result - first) * plane + at];
    dx[term.left * plane + at] +=
        value * right_gate * static_cast<double>(y[term.right * plane + at]);
    dy[term.right * plane + at] +=
        value * left_gate * static_cast<double>(x[term.left * plane + at]);
  }
}

/// One thread a (row, feature): from the gradient of x' = x gate(x_0), in place, that of x.
__global__ void gate_gradient_kernel(const float* x, double* dx, int blades, size_t plane) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= plane) return;
  double d_gate = 0;
  for (int i = 0; i < blades; ++i)
    d_gate += dx[i * plane + at] * static_cast<double>(x[i * plane + at]);
  for (int i = 0; i < blades; ++i) dx[i * plane + at] *= gate(x[at]);
  dx[at] += d_gate * gate_slope(x[at]);
}

}  // namespace

ConnectedReference::ConnectedReference(const CliffordShape& shape, const std::vector<Term>& terms,
                                       std::vector<std::pair<int, int>> results)
    : shape_(shape), terms_(terms), results_(std::move(results)) {}

size_t ConnectedReference::planes() const {
  int most = 0;
  for (const auto& [first, count] : results_) most = std::max(most, count);
  return static_cast<size_t>(most) * shape_.plane();
}

double ConnectedReference::scratch_bytes() const {
  return 8 * (static_cast<double>(planes()) + 2 * static_cast<double>(weights())) + 0x1p20;
}

std::vector<Term> ConnectedReference::terms_of(int triple) const {
  std::vector<Term> result;
  for (const Term& term : terms_) {
    if (term.triple == triple) result.push_back(term);
  }
  return result;
}

void ConnectedReference::product(const float* x, const float* y, const float* w, double x_step,
                                 double y_step, double w_step, bool squares, double* z) const {
  const Cublas blas;
  const size_t plane = shape_.plane();
  Scratch<double> P(planes()), w64(weights());
  std::vector<bool> started(shape_.blades());
  for (size_t t = 0; t < results_.size(); ++t) {
    const auto [first, count] = results_[t];
    const std::vector<Term> own = terms_of(static_cast<int>(t));
    const OnDevice<Term> terms(own);
    planes_kernel<<<blocks(plane), kThreads>>>(x, y, P, terms, static_cast<int>(own.size()), first,
                                               count, plane, x_step, y_step, squares);
    weights_kernel<<<blocks(weights()), kThreads>>>(w, w64, t * weights(), weights(), w_step,
                                                    squares);
    CUDA_CHECK(cudaGetLastError());
    product_fp64(blas, 1, P, kPlain, w64, kPlain, started[first] ? 1 : 0, z + first * plane,
                 static_cast<int64_t>(count) * shape_.batch, shape_.features, shape_.features);
    started[first] = true;
  }
  CUDA_CHECK(cudaStreamSynchronize(cudaStreamPerThread));
}

void ConnectedReference::gradients(const float* x, const float* y, const float* w, const double* dz,
                                   double* dx, double* dy, double* dw) const {
  const Cublas blas;
  const size_t plane = shape_.plane();
  Scratch<double> P(planes()), w64(weights());
  const size_t bytes = shape_.elements() * sizeof(double);
  CUDA_CHECK(cudaMemsetAsync(dx, 0, bytes, cudaStreamPerThread));
  CUDA_CHECK(cudaMemsetAsync(dy, 0, bytes, cudaStreamPerThread));
  for (size_t t = 0; t < results_.size(); ++t) {
    const auto [first, count] = results_[t];
    const int64_t rows = static_cast<int64_t>(count) * shape_.batch, features = shape_.features;
    const std::vector<Term> own = terms_of(static_cast<int>(t));
    const OnDevice<Term> terms(own);
    const int term_count = static_cast<int>(own.size());
    planes_kernel<<<blocks(plane), kThreads>>>(x, y, P, terms, term_count, first, count, plane, 0.0,
                                               0.0, false);
    weights_kernel<<<blocks(weights()), kThreads>>>(w, w64, t * weights(), weights(), 0.0, false);
    CUDA_CHECK(cudaGetLastError());
    product_fp64(blas, 1, P, kTransposed, dz + first * plane, kPlain, 0, dw + t * weights(),
                 features, features, rows);
    product_fp64(blas, 1, dz + first * plane, kPlain, w64, kTransposed, 0, P, rows, features,
                 features);
    add_gradients_kernel<<<blocks(plane), kThreads>>>(x, y, P, terms, term_count, first, plane, dx,
                                                      dy);
    CUDA_CHECK(cudaGetLastError());
  }
  gate_gradient_kernel<<<blocks(plane), kThreads>>>(x, dx, shape_.blades(), plane);
  gate_gradient_kernel<<<blocks(plane), kThreads>>>(y, dy, shape_.blades(), plane);
  CUDA_CHECK(cudaGetLastError());
  CUDA_CHECK(cudaStreamSynchronize(cudaStreamPerThread));
}

}  // namespace problems
