// The gradient features of lesson 8: their sizes, and what a pass reads and writes. The formulas of
// both passes are at the top of 8_spatial_gradients.cu.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "operators/operands.h"

namespace operators::gradients {

using operators::Pass;

struct GradientsShape {
  int64_t V, E, W;  ///< vertices, coefficients of a feature, features; each below 2^31

  int64_t vertex_values() const { return V * W; }
  int64_t tangent_values() const { return V * E; }
  int64_t coefficients() const { return E * W; }
  int64_t weights() const { return W * W; }
};

/// What a pass reads and writes, for a kernel: row-major, dense, on the device. What only the other
/// pass has is null.
struct GradientsOperands {
  const __nv_bfloat16 *Gr, *Gi;  ///< (V, E)
  const __nv_bfloat16* x;        ///< (E, W)
  const __nv_bfloat16 *Lr, *Li;  ///< (W, W)
  const __nv_bfloat16* d_out;    ///< (V, W); backward
  __nv_bfloat16* out;            ///< (V, W); forward
  __nv_bfloat16* d_x;            ///< (E, W); backward
  __nv_bfloat16 *d_Lr, *d_Li;    ///< (W, W); backward
  int64_t V;
  int E, W;
};

}  // namespace operators::gradients
