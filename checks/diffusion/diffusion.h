// The spatial diffusion of lesson 7: its inputs and results, its reference in fp64, how far a
// kernel may be from that, and the unfused kernels of a framework. The formulas of both passes are
// at the top of 7_diffusion_fused.cu.
#pragma once

#include <cuda_bf16.h>

#include <functional>
#include <optional>
#include <vector>

#include "checks/gradient_check.h"
#include "common/lesson.h"

struct DiffusionShape {
  int64_t V, E, W;     ///< vertices, eigenvectors, features; each below 2^31
  int64_t meshes = 1;  ///< of this shape, in a batch; meshes * V is below 2^31

  int64_t vertices() const { return meshes * V; }
  int64_t vertex_values() const { return vertices() * W; }
  int64_t spectrum_values() const { return meshes * E * W; }
};

/// What a pass reads and writes, for a kernel: row-major, dense, on the device. What only the other
/// pass has is null. In a batch all but times and d_times, which the meshes share, begin with the
/// number of the mesh: values (meshes, V, W).
struct DiffusionOperands {
  const __nv_bfloat16* values;      ///< (V, W): x; backward dOut
  const __nv_bfloat16* basis;       ///< (V, E)
  const __nv_bfloat16* mass;        ///< (V)
  const __nv_bfloat16* evalues;     ///< (E)
  const __nv_bfloat16* times;       ///< (W)
  const __nv_bfloat16* d_spectral;  ///< (E, W); backward
  const __nv_bfloat16* spectral;    ///< (E, W), what forward has saved; backward
  __nv_bfloat16* spectrum;  ///< (E, W): spectral; backward exp(-evalues times) * s, a temporary
  __nv_bfloat16* result;    ///< (V, W): out; backward dX
  __nv_bfloat16* d_times;   ///< (W); backward
  int64_t V;
  int E, W;
};

/// e^(-evalue time). __expf is off by 2 or 3 units in the last place of fp32 here, where the
/// exponent is between -2 and 0; what it multiplies is rounded to bf16.
__device__ inline float damping(float evalue, float time) { return __expf(-evalue * time); }

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
