// The layer of lesson 10: its sizes and its tensors. What it computes is at the top of
// problems/clifford/clifford.h.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "operators/operands.h"

namespace operators::clifford {

using operators::Memory, operators::Workspace;

/// What every kernel knows of the layer. Blade k of feature f in row n of a tensor is element
/// k plane() + n features + f.
struct Layer {
  int batch, features;
  bool normed;
  float inverse_features = 1.0f / static_cast<float>(features);
  __host__ __device__ size_t plane() const { return static_cast<size_t>(batch) * features; }
};

/// The tensors of a layer, and what backward adds to them.
struct CliffordTensors {
  Layer layer;
  Memory<float> x, y, w, out;
  Workspace workspace;
  double bytes() const { return x.bytes() + y.bytes() + w.bytes() + out.bytes(); }
};
struct CliffordGradients {
  Memory<float> d_out, dx, dy, dw;
  double bytes() const { return d_out.bytes() + dx.bytes() + dy.bytes() + dw.bytes(); }
};

}  // namespace operators::clifford
