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
  bool normed, gated = true;
  float density = gated ? 0.39894228f : 0;  ///< of the normal distribution at 0: the gate's slope
  float inverse_features = 1.0f / static_cast<float>(features);
  __host__ __device__ size_t plane() const { return static_cast<size_t>(batch) * features; }
};

/// The tensors of a layer, and what backward adds to them. T is the type of storage, and D that of
/// dw. Kernels read w in fp32. An empty dw is not wanted.
template <typename T>
struct TensorsOf {
  Layer layer;
  Memory<T> x, y;
  Memory<float> w;
  Memory<T> out;
  Workspace workspace;
  cudaStream_t stream = nullptr;
  bool alone = true;  ///< see Caller
  double bytes() const { return x.bytes() + y.bytes() + w.bytes() + out.bytes(); }
};
template <typename T, typename D>
struct GradientsOf {
  Memory<T> d_out, dx, dy;
  Memory<D> dw;
  double bytes() const { return d_out.bytes() + dx.bytes() + dy.bytes() + dw.bytes(); }
};
using CliffordTensors = TensorsOf<float>;
using CliffordGradients = GradientsOf<float, float>;

}  // namespace operators::clifford
