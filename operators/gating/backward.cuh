// The gradients of the gated layer out = gate(s) * v with s = x W1 + b1, v = x W2 + b2, by products
// of operators/product and one kernel between them:
//
//     dS = d_out * v * slope of the gate at s,  dV = d_out * gate(s)
//     dx = [dS | dV] [W1 | W2]^T,  dW1 = x^T dS,  dW2 = x^T dV,  db1, db2: column sums of dS, dV
//
// x W1 and x W2 are computed again. In fp16 and bf16 they lie side by side, and dS and dV take
// their place. They are rounded to that type, as factors of the next products are; the column sums
// are of what was not rounded. dW1 and dW2 are two products of transposed factors, or, where many
// rows meet few weights, one kernel that reads x and [dS | dV] as they lie (weight_gradients.cuh).
// In fp32 x^T [dS | dV] is one product, which is taken apart.
#pragma once

#include <algorithm>
#include <vector>

#include "operators/estimate.h"
#include "operators/gating/resident.cuh"
#include "operators/gating/unfused.cuh"
#include "operators/gating/weight_gradients.cuh"
#include "operators/product/shape.h"
#include "operators/product/transpose.cuh"

namespace operators::gating {

/// What the kernel between the products works on: s and v, as they were before the biases, with
/// rows `stride` apart, and [dS | dV], whose halves have `half_cols` columns, an even number that
/// is at least `hidden`. In types of 2 bytes [s | v] is where [dS | dV] is to be.
template <typename T>
struct GateGradients {
  const T *s, *v;
  int64_t stride;
  T* d;
  const T *b1, *b2, *d_out;
  int64_t d_out_stride, rows, slice;  ///< rows of a block
  int hidden, half_cols;
  Gate gate;
  float* partials;  ///< (slices, 2, half_cols): column sums of dS and dV
};

/// A thread has two neighbouring columns of every kGateRows-th row of its slice. What `hidden` does
/// not fill becomes 0: it is a factor, too.
template <typename T>
__global__ void __launch_bounds__(kGateCols / 2 * kGateRows, 4)
    gate_gradients(const GateGradients<T> in) {
  __shared__ float4 sums[kGateRows][kGateCols / 2];
  const int col = static_cast<int>(blockIdx.x) * kGateCols + 2 * static_cast<int>(threadIdx.x);
  const int64_t first = blockIdx.y * in.slice, end = min(in.rows, first + in.slice);
  float4 sum = {};
  if (col < in.half_cols) {
    const bool inside[2] = {col < in.hidden, col + 1 < in.hidden};
    const auto at = [&](const T* from, int e) {
      return inside[e] && from != nullptr ? static_cast<float>(from[col + e]) : 0.0f;
    };
    const auto two = [&](const T* row) {
      if constexpr (sizeof(T) == 2) {
        const auto pair = *reinterpret_cast<const Neighbours<T, 2>*>(row + col);
        return make_float2(static_cast<float>(pair.values[0]), static_cast<float>(pair.values[1]));
      } else {  // rows may start anywhere
        return make_float2(at(row, 0), at(row, 1));
      }
    };
    const float b1[2] = {at(in.b1, 0), at(in.b1, 1)}, b2[2] = {at(in.b2, 0), at(in.b2, 1)};
    // So many rows at once as the registers of 4 blocks have room for.
    with_gate(in.gate, [&]<Gate kGate>() {
#pragma unroll kGate == Gate::sigmoid ? 2 : 1
      for (int64_t row = first + threadIdx.y; row < end; row += kGateRows) {
        const float2 s = two(in.s + row * in.stride), v = two(in.v + row * in.stride);
        T* const to = in.d + row * 2 * in.half_cols + col;
        float d_s[2], d_v[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float d = at(in.d_out + row * in.d_out_stride, e);
          const GateAt gate = gate_at<T, kGate>((e == 0 ? s.x : s.y) + b1[e]);
          d_v[e] = inside[e] ? d * gate.value : 0;
          d_s[e] = inside[e] ? d * gate.slope * ((e == 0 ? v.x : v.y) + b2[e]) : 0;
        }
        using Pair = Neighbours<T, 2>;
        *reinterpret_cast<Pair*>(to) = {static_cast<T>(d_s[0]), static_cast<T>(d_s[1])};
        *reinterpret_cast<Pair*>(to + in.half_cols) = {static_cast<T>(d_v[0]),
                                                       static_cast<T>(d_v[1])};
        sum.x += d_s[0], sum.y += d_s[1], sum.z += d_v[0], sum.w += d_v[1];
      }
    });
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
/// which. Where one is nullptr it is not wanted.
template <typename T>
__global__ void add_bias_gradients(const float* partials, int slices, int half_cols, int hidden,
                                   T* d_b1, T* d_b2) {
  T* const to = blockIdx.y == 0 ? d_b1 : d_b2;
  const int col = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (col >= hidden || to == nullptr) return;
  float sum = 0;
  for (int slice = 0; slice < slices; ++slice) {
    sum += partials[(int64_t{slice} * 2 + blockIdx.y) * half_cols + col];
  }
  to[col] = static_cast<T>(sum);
}

/// What backward reads and writes besides the layer's x, W1, b1, W2 and b2: dense, but rows of
/// d_out are as far apart as those of out.
template <typename T>
struct GatingGradients {
  Memory<T> d_out, d_x, d_W1, d_b1, d_W2, d_b2;
};

template <typename T>
class GatedLayerBackward {
 public:
  GatedLayerBackward(const Caller& caller, const GatingMemory<T>& of, const GatingGradients<T>& d,
                     const GatingShape& shape, const ProductWays<T>& multiply)
      : caller_(caller), of_(of), d_(d), M(shape.rows), K(shape.channels), H(shape.hidden) {
    const auto product_of = [&](const Memory<T>& a, const Memory<T>& b, const Memory<T>& c,
                                int64_t m, int64_t n, int64_t k, product::RowStrides strides) {
      return best_product(caller, multiply, a, b, c,
                          {static_cast<int>(m), static_cast<int>(n), static_cast<int>(k)}, strides);
    };
    const auto any = [&](int64_t count) {
      return caller.workspace.any<T>(static_cast<size_t>(count));
    };
    const int64_t rows = aligned(M), channels = aligned(K);  // of transposed matrices
    const Memory<T> sums = any(M * 2 * pitch);               // [s | v] and [dS | dV]
    const Memory<T> x_t = any(K * rows), W_t = any(2 * pitch * channels);
    const Memory<T> s = kHalves ? sums : any(M * H), v = kHalves ? second(sums) : any(M * H);
    const int64_t stride = kHalves ? 2 * pitch : 0;
    const std::vector<Way> steps = {
        product_of(of.x, of.W1, s, M, H, K, {of.x_stride, 0, stride}),
        product_of(of.x, of.W2, v, M, H, K, {of.x_stride, 0, stride}),
        gates(s, v, sums, W_t, channels),
        product_of(sums, W_t, d.d_x, M, K, 2 * pitch, {0, dense(channels, K), 0}),
    };
    const Way transposed = {"", 2 * read_x() + kFirstLaunch, [=, *this] {
                              product::launch_transpose<T>({of_.x, M, K, x_stride()},
                                                           {x_t, K, rows, rows}, caller_.stream);
                            }};
    if constexpr (kHalves) {
      const product::RowStrides strides{dense(rows, M), 2 * pitch, 0};
      offer(Weights::by_products, "five products and their gates between them", steps,
            {transposed, product_of(x_t, sums, d.d_W1, K, H, M, strides),
             product_of(x_t, second(sums), d.d_W2, K, H, M, strides)});
      if (K % 8 != 0) return;  // else pieces of 16 bytes end where rows end
      offer(Weights::from_slices, "three products and their gates, weights from slices of the rows",
            steps, {weights_from_slices(sums)});
    } else {
      const Memory<float> both = any(K * 2 * pitch);
      offer(Weights::by_products, "four products and their gates between them", steps,
            {transposed,
             product_of(x_t, sums, both, K, 2 * pitch, M, {}),
             {"", kFirstLaunch + 16 * static_cast<double>(K * pitch) / memory_rate(),
              [=, *this] { add_weights(both.data(), 1); }}});
    }
  }

  /// None where a product has none.
  const std::vector<Way>& ways() const { return ways_; }

 private:
  static constexpr bool kHalves = sizeof(T) == 2;
  enum class Weights : int64_t { by_products, from_slices };  ///< how their gradients are computed
  /// What rows of 2-byte elements are a multiple of, so that no product copies them; for fp32 all
  /// is dense, as FK_FLOAT32's products want it.
  static constexpr int64_t kAligned = kHalves ? 8 : 1;

  static int64_t aligned(int64_t count) { return (count + kAligned - 1) / kAligned * kAligned; }
  static int64_t dense(int64_t stride, int64_t cols) { return stride == cols ? 0 : stride; }
  int64_t x_stride() const { return of_.x_stride != 0 ? of_.x_stride : K; }
  double read_x() const { return static_cast<double>(M * K) * sizeof(T) / memory_rate(); }
  /// The right half of rows with two.
  Memory<T> second(const Memory<T>& half_of) const {
    return Memory<T>([half_of, by = pitch] { return half_of.data() + by; },
                     half_of.size() - static_cast<size_t>(pitch));
  }

  /// From s and v to [dS | dV], and what the next product takes of the weights.
  Way gates(const Memory<T>& s, const Memory<T>& v, const Memory<T>& sums, const Memory<T>& W_t,
            int64_t channels) const {
    const GateSlices slices(M, pitch);
    const auto partials =
        caller_.workspace.any<float>(slices.count * static_cast<size_t>(2 * pitch));
    const auto launch = [=, *this] {
      const cudaStream_t stream = caller_.stream;
      const GateGradients<T> in{s,
                                v,
                                kHalves ? 2 * pitch : H,
                                sums,
                                of_.b1,
                                of_.b2,
                                d_.d_out,
                                of_.out_stride != 0 ? of_.out_stride : H,
                                M,
                                slices.rows,
                                static_cast<int>(H),
                                static_cast<int>(pitch),
                                of_.gate,
                                partials};
      gate_gradients<T><<<slices.blocks(), dim3(kGateCols / 2, kGateRows), 0, stream>>>(in);
      add_bias_gradients<T><<<dim3(primitives::blocks_for(H, 128), 2), 128, 0, stream>>>(
          partials.data(), static_cast<int>(slices.count), static_cast<int>(pitch),
          static_cast<int>(H), d_.d_b1.data(), d_.d_b2.data());
      using Factor = product::Strided<const T>;
      product::launch_transpose<T>(Factor{of_.W1, K, H, H}, {W_t, pitch, channels, channels},
                                   stream);
      product::launch_transpose<T>(Factor{of_.W2, K, H, H},
                                   {W_t.data() + pitch * channels, pitch, channels, channels},
                                   stream);
    };
    return {"", 2 * kFirstLaunch + static_cast<double>(M * pitch) * 5 * sizeof(T) / memory_rate(),
            launch};
  }

  /// dW1 and dW2 by one kernel, which reads x and [dS | dV] once.
  Way weights_from_slices(const Memory<T>& sums) const {
    const WeightPlan plan(M, K, 2 * pitch);
    const auto of_slices =
        caller_.workspace.any<float>(plan.slices * static_cast<size_t>(K * 2 * pitch));
    // mma.sync reaches about 3e8 operations in a microsecond.
    const double operations = 4.0 * static_cast<double>(K) * static_cast<double>(pitch * M);
    const double once = static_cast<double>(plan.slices) * static_cast<double>(K * pitch) * 16;
    const auto launch = [=, *this] {
      const WeightProduct<T> in{of_.x,
                                sums,
                                x_stride(),
                                M,
                                plan.slice,
                                static_cast<int>(K),
                                static_cast<int>(2 * pitch),
                                of_slices};
      primitives::allow_shared_bytes(weight_product<T>, WeightTile::kSharedBytes);
      weight_product<T><<<dim3(plan.tiles, plan.slices), WeightTile::kThreads,
                          WeightTile::kSharedBytes, caller_.stream>>>(in);
      add_weights(of_slices.data(), static_cast<int>(plan.slices));
    };
    return {"", 2 * kFirstLaunch + std::max(operations / 3e8, read_x()) + once / memory_rate(),
            launch, WeightTile::kSharedBytes};
  }
  void add_weights(const float* partials, int slices) const {
    add_weight_gradients<T>
        <<<primitives::blocks_for(K * 2 * pitch, kAddingCols), dim3(kAddingCols, kAddingRows), 0,
           caller_.stream>>>(partials, slices, static_cast<int>(K), static_cast<int>(pitch),
                             static_cast<int>(H), d_.d_W1.data(), d_.d_W2.data());
  }

  void offer(Weights weights, const char* name, std::vector<Way> steps,
             const std::vector<Way>& last) {
    steps.insert(steps.end(), last.begin(), last.end());
    if (std::ranges::any_of(steps, [](const Way& step) { return !step.launch; })) return;
    ways_.push_back(in_turn({.name = name, .id = way_id({static_cast<int64_t>(weights)})}, steps));
  }

  Caller caller_;
  GatingMemory<T> of_;
  GatingGradients<T> d_;
  int64_t M, K, H;
  int64_t pitch = (H + 7) / 8 * 8;  ///< columns of dS, and of dV
  std::vector<Way> ways_;
};

}  // namespace operators::gating
