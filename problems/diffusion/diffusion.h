// The spatial diffusion of lesson 7: its inputs and results, its reference in fp64, how far a
// kernel may be from that, and the unfused kernels of a framework. The formulas of both passes are
// at the top of 7_diffusion_fused.cu.
#pragma once

#include <cuda_bf16.h>

#include <functional>
#include <optional>
#include <vector>

#include "common/lesson.h"
#include "operators/diffusion/diffusion.h"
#include "problems/gradient_check.h"

namespace problems {

using namespace common;
using namespace operators::diffusion;

/// One table of lesson 7: a pass, with random inputs.
struct DiffusionProblem {
  DiffusionProblem(Lesson& lesson, cublasHandle_t blas, Pass pass, DiffusionShape shape);

  DiffusionOperands operands() const;

  /// Device memory of inputs and outputs, in bytes.
  double ends() const;

  /// For a kernel in which one fp32 accumulator of the tensor cores adds up `chain` vertices, and
  /// that rounds to bf16 these many times: up to the sum over the vertices (backward up to s, which
  /// is for dTimes), up to what the second product takes, those before included, and from there to
  /// the result.
  std::vector<Check> checks(int64_t chain, int sum_roundings, int spectrum_roundings,
                            int result_roundings) const;

  Pass pass;
  DiffusionShape shape;
  cublasHandle_t blas;
  Problem& problem;
  Buffer<__nv_bfloat16> values, basis, mass, evalues, times, spectrum, result;
  std::optional<Buffer<__nv_bfloat16>> d_spectral, spectral, d_times;  ///< backward
  Buffer<double> expected_result;                                      ///< of `result`
  Buffer<double> expected_small;  ///< of `spectrum`; backward of `d_times`
  /// Backward: how far the reference was from finite differences; called when it is known.
  std::function<void(double)> report_difference;
};

/// Adds the row *unfused*: the pass as a framework launches it, in kernels of the library and
/// elementwise ones, whose results all go through memory.
void add_unfused(DiffusionProblem& problem);

}  // namespace problems
