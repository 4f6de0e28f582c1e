// The best that libraries allow for the gated layer: a row of lessons 5 and 6.
#pragma once

#include "primitives/launch.h"
#include "primitives/neighbours.cuh"
#include "problems/gating/gating.h"
#include "problems/product/library_product.h"

namespace problems {

using namespace common;
using namespace operators::gating;
using namespace primitives;

/// out (rows, hidden) = sigmoid(both[:, :hidden]) * both[:, hidden:], both (rows, 2 hidden): what
/// is left to do after the library's product. A thread owns kWidth consecutive elements of out;
/// hidden is a multiple of kWidth.
template <int kWidth>
__global__ void gate_halves(const half* both, half* out, size_t count, int hidden) {
  using Pack = Neighbours<half, kWidth>;
  const size_t i = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kWidth;
  if (i >= count) return;
  const half* gate_at = both + i / hidden * 2 * hidden + i % hidden;
  const Pack gate = *reinterpret_cast<const Pack*>(gate_at);
  const Pack value = *reinterpret_cast<const Pack*>(gate_at + hidden);
  Pack result;
  for (int j = 0; j < kWidth; ++j) {
    const float sigmoid = 1 / (1 + __expf(-__half2float(gate.values[j])));
    result.values[j] = __float2half_rn(sigmoid * __half2float(value.values[j]));
  }
  *reinterpret_cast<Pack*>(out + i) = result;
}

/// out = gate_halves(x [W1 W2] + [b1 b2]). The product is the fastest that cuBLASLt has with the
/// biases in its epilogue. Lives as long as the lesson runs.
class LibraryGate {
 public:
  explicit LibraryGate(const GatingProblem& layer)
      : layer_(layer),
        weights_(layer.problem.workspace<half>(2 * layer.W1.size())),
        biases_(layer.problem.workspace<half>(2 * layer.b1.size())),
        both_(layer.problem.output<half>(2 * layer.out.size())),
        product_(layer.problem, {layer.shape.rows, 2 * layer.shape.hidden, layer.shape.channels},
                 CUDA_R_16F, CUBLAS_COMPUTE_32F, true) {}
  LibraryGate(const LibraryGate&) = delete;
  LibraryGate& operator=(const LibraryGate&) = delete;

  /// Adds its row, which rounds both sums and the result.
  Kernel& add() {
    Kernel& row = layer_.problem.kernel("cuBLASLt + one kernel", Role::library, [this] { run(); });
    row.hooks.before = [this] { prepare(); };
    row.checks = {{layer_.out.storage(), layer_.expected.storage(), layer_.tolerance(3)}};
    return row;
  }
  /// Of device memory, for its own weights and the product.
  double bytes() const { return weights_.bytes() + biases_.bytes() + both_.bytes(); }

 private:
  /// What a model does once, when it is loaded, and this row before it is verified: the weights,
  /// which are constants, are put side by side, and the first call of product_ finds the fastest.
  /// That leaves a right result in both_, which becomes NaN again: a row that did not compute it
  /// would show.
  void prepare() {
    const size_t width = layer_.b1.size() * sizeof(half);
    const auto place = [&](half* to, const half* from, size_t rows) {
      CUDA_CHECK(cudaMemcpy2D(to, 2 * width, from, width, width, rows, cudaMemcpyDeviceToDevice));
    };
    place(weights_, layer_.W1, layer_.shape.channels);
    place(weights_ + layer_.shape.hidden, layer_.W2, layer_.shape.channels);
    place(biases_, layer_.b1, 1);
    place(biases_ + layer_.shape.hidden, layer_.b2, 1);
    product_(layer_.x, weights_, both_, biases_);
    CUDA_CHECK(cudaMemsetAsync(both_, 0xff, both_.size() * sizeof(half)));
  }
  void run() {
    product_(layer_.x, weights_, both_, biases_);
    layer_.shape.hidden % 8 == 0 ? gate<8>() : gate<1>();
  }
  template <int kWidth>
  void gate() const {
    const size_t count = layer_.out.size();
    constexpr unsigned kThreads = 256;
    gate_halves<kWidth><<<blocks_for(count, kWidth * kThreads), kThreads>>>(
        both_, layer_.out, count, static_cast<int>(layer_.shape.hidden));
  }

  const GatingProblem& layer_;
  Buffer<half> weights_, biases_, both_;  // (K, 2H), (2H), (M, 2H)
  LibraryProduct product_;
};

}  // namespace problems
