// The gradient features of lesson 8: their inputs and results, their reference in fp64, how far a
// kernel may be from that, and the unfused kernels of a framework. The formulas of both passes are
// at the top of 8_spatial_gradients.cu.
#pragma once

#include <cuda_bf16.h>

#include <functional>
#include <vector>

#include "common/lesson.h"
#include "operators/gradients/gradients.h"
#include "problems/gradient_check.h"

namespace problems {

using namespace common;
using namespace operators::gradients;

/// One table of lesson 8: a pass, with random inputs.
struct GradientsProblem {
  /// `steep`: backward, |tanh(u)| of one vertex is near 1, and it weighs in the gradients.
  GradientsProblem(Lesson& lesson, cublasHandle_t blas, Pass pass, GradientsShape shape,
                   bool steep = false);

  GradientsOperands operands() const;

  /// Device memory of inputs and outputs, in bytes.
  double ends() const;

  /// For a kernel that rounds to bf16 `roundings_of_u` times on the way to u. Backward: and
  /// `roundings` times from there to a gradient, and in which one fp32 accumulator of the tensor
  /// cores adds up `chain` vertices.
  std::vector<Check> checks(int roundings_of_u, int roundings = 0, int64_t chain = 0) const;

  Pass pass;
  GradientsShape shape;
  bool steep;
  cublasHandle_t blas;
  Problem& problem;
  Buffer<__nv_bfloat16> Gr, Gi, x, Lr, Li;
  Buffer<__nv_bfloat16> vertices;                ///< out; backward dOut
  std::vector<Buffer<__nv_bfloat16>> gradients;  ///< backward: of x, Lr, Li
  std::vector<Buffer<__nv_bfloat16>> saved;      ///< backward, for "unfused": xr, xi, ar, ai, out
  std::vector<Buffer<double>> expected;          ///< of out; backward of `gradients`
  /// Backward: how far the reference was from finite differences; called when it is known.
  std::function<void(double)> report_difference;
};

/// What a backward pass that adds up `slices` partial sums leaves from kernel to kernel. M has room
/// for M1 and M2, or for `matrices` of their size.
struct GradientsTemporaries {
  GradientsTemporaries(GradientsProblem& table, int matrices, unsigned slices);
  double bytes() const { return M.bytes() + partials.bytes() + dM.bytes() + D.bytes(); }

  int slices;
  int64_t count;                ///< of the elements of M1
  Buffer<__nv_bfloat16> M, dM;  ///< (matrices, E, W); dM1 and dM2 (2, E, W)
  Buffer<float> partials, D;    ///< (slices, 3, E, W): of dM1, dM2, D; (E, W)
};

/// Adds the row *unfused*: the pass as a framework launches it, in kernels of the library and
/// elementwise ones, whose results all go through memory.
void add_unfused(GradientsProblem& problem);

}  // namespace problems
