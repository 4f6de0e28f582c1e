// The gated layer in fp32: two products of operators/product, however these multiply, and a kernel
// that makes out of their results. So x is read twice, and both sums go to memory and come back:
// nothing is fused here. What this costs beside a fused kernel is 16 bytes for each element of out.
//
// With two inputs the layer may keep what its gradients need. In fp32 this is done here, too, and
// in other types where kept.cuh has no kernel: then both sums are rounded to the type in between.
#pragma once

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "operators/estimate.h"
#include "operators/gating/gate.cuh"
#include "operators/gating/gating.h"
#include "operators/gating/resident.cuh"
#include "operators/product/shape.h"

namespace operators::gating {

/// The ways to compute a product, of which each is many kernels, so that a program has them once.
template <typename T>
using ProductWays =
    std::function<std::vector<Way>(const Caller&, const Memory<T>&, const Memory<T>&,
                                   const Memory<T>&, product::ProductShape, product::RowStrides)>;

/// The same where one factor lies transposed: the left one if `of_a`, as (depth, rows), else the
/// right one, as (cols, depth). Strides are those of rows in memory, and never 0.
template <typename T>
using TurnedProductWays = std::function<std::vector<Way>(
    const Caller&, const Memory<T>&, const Memory<T>&, const Memory<T>&, product::ProductShape,
    product::RowStrides, bool of_a)>;

/// The way that should be the fastest; one without a launch if there is none.
inline Way best_of(const std::vector<Way>& ways) {
  const Way* const best = common::fastest(ways);
  return best ? *best : Way();
}
/// That of a product.
template <typename T>
Way best_product(const Caller& caller, const ProductWays<T>& multiply, const Memory<T>& a,
                 const Memory<T>& b, const Memory<T>& c, product::ProductShape shape,
                 product::RowStrides strides = {}) {
  return best_of(multiply(caller.of_step(), a, b, c, shape, strides));
}

inline constexpr int kGateCols = 64, kGateThreads = 256;  ///< columns of a block

/// How rows are divided among the blocks of a kernel of gates.
struct GateSlices {
  unsigned columns, count;
  int64_t rows;  ///< of a block

  GateSlices(int64_t all_rows, int64_t cols) {
    using primitives::ceil_div;
    columns = primitives::blocks_for(cols, kGateCols);
    const int64_t fill = std::max<int64_t>(1, 4 * primitives::multiprocessors() / columns);
    rows = ceil_div(all_rows, std::min(fill, ceil_div(all_rows, int64_t{64})));
    count = primitives::blocks_for(all_rows, rows);
  }
  dim3 blocks() const { return dim3(columns, count); }
};

/// What forward of two inputs may keep for its gradients: dS = d_out * s_slopes and dV = d_out *
/// v_slopes, element by element. (rows, hidden) each, dense.
template <typename T>
struct KeptSlopes {
  Memory<T> s_slopes, v_slopes;
};

/// What apply_gates works on: s and v (rows, hidden), dense. Slopes that are kept take their
/// places.
template <typename T>
struct GatesToApply {
  const T *s, *v, *b1, *b2;
  T *out, *s_slopes, *v_slopes;     ///< of slopes: null where they are not kept
  int64_t out_stride, rows, slice;  ///< rows of a block
  int hidden;
  Gate gate;
  bool gated_values;  ///< v + b2 has the gate's function, too
};

/// out = gate(s + b1) * (v + b2). A block has 64 columns of its slice, and a thread one of them in
/// every fourth row, so that a warp reads and writes whole lines.
template <typename T>
__global__ void __launch_bounds__(kGateThreads) apply_gates(const GatesToApply<T> in) {
  const int col = static_cast<int>(blockIdx.x) * kGateCols + static_cast<int>(threadIdx.x);
  if (col >= in.hidden) return;
  const int64_t first = blockIdx.y * in.slice, end = min(in.rows, first + in.slice);
  const float b1 = in.b1 != nullptr ? static_cast<float>(in.b1[col]) : 0;
  const float b2 = in.b2 != nullptr ? static_cast<float>(in.b2[col]) : 0;
  with_gate(in.gate, [&]<Gate kGate>() {
    for (int64_t row = first + threadIdx.y; row < end; row += blockDim.y) {
      const int64_t at = row * in.hidden + col;
      const GateAt gate = gate_at<T, kGate>(static_cast<float>(in.s[at]) + b1);
      GateAt value = {static_cast<float>(in.v[at]) + b2, 1};
      if (in.gated_values) value = gate_at<T, kGate>(value.value);
      in.out[row * in.out_stride + col] = static_cast<T>(gate.value * value.value);
      if (in.s_slopes == nullptr) continue;
      in.s_slopes[at] = static_cast<T>(gate.slope * value.value);
      in.v_slopes[at] = static_cast<T>(gate.value * value.slope);
    }
  });
}

/// The layer's one way, or none where a product has none. Rows of x are as far apart as `multiply`
/// can read them.
template <typename T>
std::vector<Way> unfused_layer(const Caller& caller, const GatingMemory<T>& of,
                               const GatingShape& shape, const ProductWays<T>& multiply,
                               const std::optional<ValueInput<T>>& value = {},
                               const std::optional<KeptSlopes<T>>& kept = {}) {
  const auto count = static_cast<size_t>(shape.rows * shape.hidden);
  const auto s = kept ? kept->s_slopes : caller.workspace.any<T>(count);
  const auto v = kept ? kept->v_slopes : caller.workspace.any<T>(count);
  const auto product_of = [&](const Memory<T>& left, int64_t depth, int64_t stride,
                              const Memory<T>& weights, const Memory<T>& sums) {
    const product::ProductShape sizes{static_cast<int>(shape.rows), static_cast<int>(shape.hidden),
                                      static_cast<int>(depth)};
    return best_product(caller, multiply, left, weights, sums, sizes, {stride, 0, 0});
  };
  const Way gates = product_of(of.x, shape.channels, of.x_stride, of.W1, s);
  const Way values = value ? product_of(value->y, value->channels, value->stride, of.W2, v)
                           : product_of(of.x, shape.channels, of.x_stride, of.W2, v);
  if (!gates.launch || !values.launch) return {};
  const auto apply = [=, stream = caller.stream] {
    const GateSlices slices(shape.rows, shape.hidden);
    const GatesToApply<T> in{s,
                             v,
                             of.b1,
                             of.b2,
                             of.out,
                             kept ? kept->s_slopes.data() : nullptr,
                             kept ? kept->v_slopes.data() : nullptr,
                             of.out_stride != 0 ? of.out_stride : shape.hidden,
                             shape.rows,
                             slices.rows,
                             static_cast<int>(shape.hidden),
                             of.gate,
                             value && value->gated};
    apply_gates<T><<<slices.blocks(), dim3(kGateCols, kGateThreads / kGateCols), 0, stream>>>(in);
  };
  const double moving =
      kFirstLaunch + (kept ? 5 : 3) * sizeof(T) * static_cast<double>(count) / memory_rate();
  return {in_turn({"two products and their gates after them; " + gates.name},
                  {gates, values, {"", moving, apply}})};
}

}  // namespace operators::gating
