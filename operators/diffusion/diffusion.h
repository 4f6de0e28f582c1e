// The spatial diffusion of lesson 7: its sizes, and what a pass reads and writes. The formulas of
// both passes are at the top of 7_diffusion_fused.cu.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "operators/operands.h"

namespace operators::diffusion {

using operators::Pass;

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

/// e^(-evalue time). The error of __expf(x) is at most 2 + 1.2 |x| units in the last place of fp32
/// (CUDA Programming Guide, "Intrinsic Functions"); what the result multiplies is rounded to bf16.
__device__ inline float damping(float evalue, float time) { return __expf(-evalue * time); }

}  // namespace operators::diffusion
