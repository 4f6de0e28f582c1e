// The gradients of the gated layer out = sigmoid(s) * v with s = x W1 + b1, v = x W2 + b2, by
// products of operators/product and one kernel between them:
//
//     dS = d_out * v * sigmoid(s) * (1 - sigmoid(s)),  dV = d_out * sigmoid(s)
//     dx = [dS | dV] [W1 | W2]^T,  dW1 = x^T dS,  dW2 = x^T dV,  db1, db2: column sums of dS, dV
//
// x W1 and x W2 are computed again, side by side, and dS and dV take their place. They are rounded
// to fp16, as factors of the next products are; the column sums are of what was not rounded. dW1
// and dW2 are two products of transposed factors, or, where many rows meet few weights, one kernel
// that reads x and [dS | dV] as they lie (weight_gradients.cuh).
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "operators/estimate.h"
#include "operators/gating/resident.cuh"
#include "operators/gating/weight_gradients.cuh"
#include "operators/product/shape.h"
#include "operators/product/transpose.cuh"

namespace operators::gating {

inline constexpr int kGateCols = 64, kGateRows = 8;  ///< columns of a block; rows at a time

/// What the kernel between the products works on: [s | v] and then [dS | dV], whose halves have
/// `half_cols` columns, a multiple of 8 that is at least `hidden`.
struct GateGradients {
  half* sums;
  const half *b1, *b2, *d_out;
  int64_t d_out_stride, rows, slice;  ///< rows of a block
  int hidden, half_cols;
  float* partials;  ///< (slices, 2, half_cols): column sums of dS and dV
};

/// A thread has two neighbouring columns of every kGateRows-th row of its slice. What `hidden` does
/// not fill becomes 0: it is a factor, too.
__global__ void __launch_bounds__(kGateCols / 2 * kGateRows)
    gate_gradients(const GateGradients in) {
  __shared__ float4 sums[kGateRows][kGateCols / 2];
  const int col = static_cast<int>(blockIdx.x) * kGateCols + 2 * static_cast<int>(threadIdx.x);
  const int64_t first = blockIdx.y * in.slice, end = min(in.rows, first + in.slice);
  float4 sum = {};
  if (col < in.half_cols) {
    const bool inside[2] = {col < in.hidden, col + 1 < in.hidden};
    const auto at = [&](const half* from, int e) {
      return inside[e] ? __half2float(from[col + e]) : 0.0f;
    };
    const float b1[2] = {at(in.b1, 0), at(in.b1, 1)}, b2[2] = {at(in.b2, 0), at(in.b2, 1)};
    for (int64_t row = first + threadIdx.y; row < end; row += kGateRows) {
      half2* const s_at = reinterpret_cast<half2*>(in.sums + row * 2 * in.half_cols + col);
      half2* const v_at = s_at + in.half_cols / 2;
      const float2 s = __half22float2(*s_at), v = __half22float2(*v_at);
      float d_s[2], d_v[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float d = at(in.d_out + row * in.d_out_stride, e);
        const float gate = 1 / (1 + __expf(-((e == 0 ? s.x : s.y) + b1[e])));
        d_v[e] = inside[e] ? d * gate : 0;
        d_s[e] = inside[e] ? d_v[e] * (1 - gate) * ((e == 0 ? v.x : v.y) + b2[e]) : 0;
      }
      *s_at = __floats2half2_rn(d_s[0], d_s[1]);
      *v_at = __floats2half2_rn(d_v[0], d_v[1]);
      sum.x += d_s[0], sum.y += d_s[1], sum.z += d_v[0], sum.w += d_v[1];
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || col >= in.half_cols) return;
  for (int i = 1; i < kGateRows; ++i) {
    const float4 other = sums[i][threadIdx.x];
    sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
  }
  float* const to = in.partials + int64_t{blockIdx.y} * 2 * in.half_cols + col;
  *reinterpret_cast<float2*>(to) = make_float2(sum.x, sum.y);
  *reinterpret_cast<float2*>(to + in.half_cols) = make_float2(sum.z, sum.w);
}

/// db1 and db2: the sums of all slices, in their order. A thread has a column, blockIdx.y says of
/// which.
__global__ void add_bias_gradients(const float* partials, int slices, int half_cols, int hidden,
                                   half* d_b1, half* d_b2) {
  const int col = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (col >= hidden) return;
  float sum = 0;
  for (int slice = 0; slice < slices; ++slice) {
    sum += partials[(int64_t{slice} * 2 + blockIdx.y) * half_cols + col];
  }
  (blockIdx.y == 0 ? d_b1 : d_b2)[col] = __float2half_rn(sum);
}

/// What backward reads and writes besides the layer's x, W1, b1, W2 and b2: dense, but rows of
/// d_out are as far apart as those of out.
struct GatingGradients {
  Memory<half> d_out, d_x, d_W1, d_b1, d_W2, d_b2;
};

/// The ways to compute a product in fp16: those of product::HalfProduct, which are many kernels, so
/// that a program has them once.
using HalfWays = std::function<std::vector<Way>(const Workspace&, const Memory<half>&,
                                                const Memory<half>&, const Memory<half>&,
                                                product::ProductShape, product::RowStrides)>;

class GatedLayerBackward {
 public:
  GatedLayerBackward(const Workspace& workspace, const GatingMemory& of, const GatingGradients& d,
                     const GatingShape& shape, const HalfWays& multiply) {
    const int64_t M = shape.rows, K = shape.channels, H = shape.hidden;
    const int64_t pitch = up_to_8(H), rows = up_to_8(M), channels = up_to_8(K);
    const auto sums =
        workspace.any<half>(static_cast<size_t>(M * 2 * pitch));  // [s | v], [dS | dV]
    const auto x_t = workspace.any<half>(static_cast<size_t>(K * rows));
    const auto W_t = workspace.any<half>(static_cast<size_t>(2 * pitch * channels));
    const unsigned columns = primitives::blocks_for(pitch, kGateCols);
    const int64_t fill = std::max<int64_t>(1, 4 * primitives::multiprocessors() / columns);
    const int64_t slice =
        primitives::ceil_div(M, std::min(fill, primitives::ceil_div(M, int64_t{64})));
    const unsigned slices = primitives::blocks_for(M, slice);
    const auto partials = workspace.any<float>(slices * static_cast<size_t>(2 * pitch));
    const auto second = [pitch](const Memory<half>& half_of) {
      return Memory<half>([half_of, pitch] { return half_of.data() + pitch; },
                          half_of.size() - static_cast<size_t>(pitch));
    };
    using product::Strided;
    const auto shape_of = [](int64_t m, int64_t n, int64_t k) {
      return product::ProductShape{static_cast<int>(m), static_cast<int>(n), static_cast<int>(k)};
    };
    const auto product_of = [&](const Memory<half>& a, const Memory<half>& b, const Memory<half>& c,
                                product::ProductShape shape, product::RowStrides strides) -> Step {
      const std::vector<Way> ways = multiply(workspace, a, b, c, shape, strides);
      const auto best = std::min_element(
          ways.begin(), ways.end(),
          [](const Way& one, const Way& other) { return one.microseconds < other.microseconds; });
      if (best == ways.end()) return {};
      return {best->microseconds, best->launch, best->shared_bytes};
    };
    const std::vector<Step> steps = {
        product_of(of.x, of.W1, sums, shape_of(M, H, K), {of.x_stride, 0, 2 * pitch}),
        product_of(of.x, of.W2, second(sums), shape_of(M, H, K), {of.x_stride, 0, 2 * pitch}),
        {0,
         [=, stream = workspace.stream, out_stride = of.out_stride] {
           const GateGradients in{sums,
                                  of.b1,
                                  of.b2,
                                  d.d_out,
                                  out_stride ? out_stride : H,
                                  M,
                                  slice,
                                  static_cast<int>(H),
                                  static_cast<int>(pitch),
                                  partials};
           gate_gradients<<<dim3(columns, slices), dim3(kGateCols / 2, kGateRows), 0, stream>>>(in);
           add_bias_gradients<<<dim3(primitives::blocks_for(H, 128), 2), 128, 0, stream>>>(
               partials.data(), static_cast<int>(slices), static_cast<int>(pitch),
               static_cast<int>(H), d.d_b1.data(), d.d_b2.data());
           using Factor = Strided<const half>;
           product::launch_transpose<half>(Factor{of.W1, K, H, H}, {W_t, pitch, channels, channels},
                                           stream);
           product::launch_transpose<half>(
               Factor{of.W2, K, H, H}, {W_t.data() + pitch * channels, pitch, channels, channels},
               stream);
         }},
        product_of(sums, W_t, d.d_x, shape_of(M, K, 2 * pitch),
                   {0, channels == K ? 0 : channels, 0}),
    };
    const double gates = static_cast<double>(M * pitch) * 10 / memory_rate();
    const auto offer = [&](const char* name, const std::vector<Step>& of_weights) {
      std::vector<Step> all = steps;
      all.insert(all.end(), of_weights.begin(), of_weights.end());
      double microseconds = 2 * kFirstLaunch + gates;
      int shared_bytes = 0;
      for (const Step& step : all) {
        if (!step.launch) return;
        microseconds += step.microseconds;
        shared_bytes = std::max(shared_bytes, step.shared_bytes);
      }
      ways_.push_back({name, microseconds,
                       [all] {
                         for (const Step& step : all) step.launch();
                       },
                       shared_bytes});
    };
    const int64_t x_stride = of.x_stride ? of.x_stride : K;
    const double read_x = static_cast<double>(M * K) * sizeof(half) / memory_rate();
    offer("five products and their gates between them",
          {{2 * read_x + kFirstLaunch,
            [=, stream = workspace.stream] {
              product::launch_transpose<half>({of.x, M, K, x_stride}, {x_t, K, rows, rows}, stream);
            }},
           product_of(x_t, sums, d.d_W1, shape_of(K, H, M), {rows == M ? 0 : rows, 2 * pitch, 0}),
           product_of(x_t, second(sums), d.d_W2, shape_of(K, H, M),
                      {rows == M ? 0 : rows, 2 * pitch, 0})});
    if (K % 8 != 0) return;  // else pieces of 16 bytes end where rows end
    const WeightPlan plan(M, K, 2 * pitch);
    const auto of_slices = workspace.any<float>(plan.slices * static_cast<size_t>(K * 2 * pitch));
    // mma.sync reaches about 3e8 operations in a microsecond.
    const double operations = 4.0 * static_cast<double>(K) * static_cast<double>(pitch * M);
    const double once = static_cast<double>(plan.slices) * static_cast<double>(K * pitch) * 16;
    offer("three products and their gates, weights from slices of the rows",
          {{2 * kFirstLaunch + std::max(operations / 3e8, read_x) + once / memory_rate(),
            [=, stream = workspace.stream] {
              const WeightProduct in{of.x,
                                     sums,
                                     x_stride,
                                     M,
                                     plan.slice,
                                     static_cast<int>(K),
                                     static_cast<int>(2 * pitch),
                                     of_slices};
              primitives::allow_shared_bytes(weight_product, WeightTile::kSharedBytes);
              weight_product<<<dim3(plan.tiles, plan.slices), WeightTile::kThreads,
                               WeightTile::kSharedBytes, stream>>>(in);
              add_weight_gradients<<<primitives::blocks_for(K * 2 * pitch, kAddingCols),
                                     dim3(kAddingCols, kAddingRows), 0, stream>>>(
                  of_slices.data(), static_cast<int>(plan.slices), static_cast<int>(K),
                  static_cast<int>(pitch), static_cast<int>(H), d.d_W1.data(), d.d_W2.data());
            },
            WeightTile::kSharedBytes}});
  }

  /// None where a product has none.
  const std::vector<Way>& ways() const { return ways_; }

 private:
  struct Step {
    double microseconds = 0;
    std::function<void()> launch;
    int shared_bytes = 0;
  };

  static int64_t up_to_8(int64_t count) { return (count + 7) / 8 * 8; }

  std::vector<Way> ways_;
};

}  // namespace operators::gating
