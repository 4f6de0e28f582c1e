// The gated layer of lessons 5 and 6 as a problem: its inputs, and its reference in fp64.
//
//     out = sigmoid(x W1 + b1) * (x W2 + b2)
//     x (M, K), W1 and W2 (K, H), b1 and b2 (H), out (M, H): fp16, row-major, dense
#pragma once

#include "common/lesson.h"
#include "common/numerics.h"
#include "operators/gating/gating.h"

namespace problems {

using namespace common;
using namespace operators::gating;

/// Every result on the way to `out`.
enum class GatingStep { x_w1, plus_b1, sigmoid, x_w2, plus_b2, out };

/// Rows of the layer problem. Where the sizes are the CPU's there are fewer to an N: with 1024 of
/// them the square problem of an N that takes seconds would be smaller than a tile.
inline int64_t layer_rows(const Lesson& lesson) {
  return (lesson.small() ? 32 : 1024) * lesson.n();
}

/// A problem with the layer's inputs, its output, and the output's reference.
struct GatingProblem {
  /// `roundings`: see tolerance(); the most that a kernel of this problem needs. With `hard` gates
  /// go from -200 to 200: e to the power of most of them is infinite in fp32, or 0.
  GatingProblem(Lesson& lesson, cublasHandle_t blas, const char* name, GatingShape shape,
                int roundings, bool hard = false);

  GatingOperands operands() const;
  /// Fills `expected` with a step's result in fp64: products by cuBLAS, a few rows at a time.
  void compute_reference(GatingStep step) const;
  void find_uncancelled() const;
  /// Device memory that compute_reference allocates while it runs.
  double scratch_bytes() const;
  /// Bound on the relative Frobenius error of `out` when `roundings` results on the way to it,
  /// itself included, are rounded to fp16. A relative rounding error of any
  /// intermediate result changes `out` by about the same relative amount or less, so each rounding
  /// counts like one of the output.
  double tolerance(int roundings) const;

  GatingShape shape;
  cublasHandle_t blas;
  Problem& problem;
  Buffer<half> x, W1, b1, W2, b2, out;
  Buffer<double> expected;
  /// Of `expected`, where there are few results: see bound_of().
  std::shared_ptr<double> uncancelled = std::make_shared<double>(0);
};

}  // namespace problems
