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
// Hopper's products read transposed factors of 2 bytes as they lie, too; for others x is transposed
// once for both. In fp32 x^T [dS | dV] is one product, which is taken apart.
//
// Where values have an input y of their own, dS and dV lie below each other, not side by side, and
// each input has products of its own:
//
//     dx = dS W1^T,  dy = dV W2^T,  dW1 = x^T dS,  dW2 = y^T dV
//
// Each transposed factor is of one product then, and that product's business.
//
// Where x has few columns and there are few hidden ones, one kernel does all of this but the last
// sums (backward_on_chip.cuh).
//
// (If values have the gate's function, too, dS = d_out * gate(v) * slope at s, and dV likewise.)
#pragma once

#include <algorithm>
#include <climits>
#include <optional>
#include <utility>
#include <vector>

#include "operators/estimate.h"
#include "operators/gating/portable/backward_on_chip.cuh"
#include "operators/gating/resident.cuh"
#include "operators/gating/unfused.cuh"
#include "operators/gating/weight_gradients.cuh"
#include "operators/product/shape.h"
#include "operators/product/transpose.cuh"

namespace operators::gating {

/// What the kernel between the products works on: s and v, as they were before the biases, with
/// rows `stride` apart, and dS and dV, with rows `d_stride` apart. These have `half_cols` columns,
/// a multiple of 8 that is at least `hidden`. In types of 2 bytes s and v are where dS and dV are
/// to be.
template <typename T>
struct GateGradients {
  const T *s, *v;
  int64_t stride;
  T *d_s, *d_v;
  int64_t d_stride;
  const T *b1, *b2, *d_out;
  int64_t d_out_stride, rows, slice;  ///< rows of a block
  int hidden, half_cols;
  Gate gate;
  bool gated_values;  ///< v has the gate's function, too; only where there are two inputs
  bool kept;          ///< s and v are what KeptSlopes has; only where there are two inputs
  float* partials;    ///< (slices, 2, half_cols): column sums of dS and dV
};

/// A thread has kWidth neighbouring columns of every so many-th row of its slice. What `hidden`
/// does not fill becomes 0: it is a factor, too. kAligned: there is nothing to fill, and neighbours
/// are one load.
template <typename T, int kWidth, bool kAligned>
__global__ void __launch_bounds__(kGateThreads) gate_gradients(const GateGradients<T> in) {
  using Pack = Neighbours<T, kWidth>;
  constexpr int kAcross = kGateCols / kWidth, kRows = kGateThreads / kAcross;
  __shared__ float sums[kRows][2][kGateCols];
  const int x = static_cast<int>(threadIdx.x) % kAcross * kWidth;
  const int y = static_cast<int>(threadIdx.x) / kAcross;
  const int col = static_cast<int>(blockIdx.x) * kGateCols + x;
  const int64_t first = blockIdx.y * in.slice, end = min(in.rows, first + in.slice);
  float sum_s[kWidth] = {}, sum_v[kWidth] = {};
  if (col < in.half_cols) {
    const auto load = [&](const T* row) {
      Pack pack = {};
      if constexpr (kAligned) {
        pack = *reinterpret_cast<const Pack*>(row + col);
      } else {
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          if (col + e < in.hidden) pack.values[e] = row[col + e];
        }
      }
      return pack;
    };
    const auto bias = [&](const T* from, int e) {
      return from != nullptr && col + e < in.hidden ? static_cast<float>(from[col + e]) : 0.0f;
    };
    float b1[kWidth], b2[kWidth];
#pragma unroll
    for (int e = 0; e < kWidth; ++e) b1[e] = bias(in.b1, e), b2[e] = bias(in.b2, e);
    // Two rows are loaded before the first one is stored: s and v may lie where dS and dV go to, so
    // the compiler would not exchange them.
    const auto each_row = [&](const auto& slopes) {
      for (int64_t row = first + y; row < end; row += 2 * kRows) {
        Pack s[2], v[2], d[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int64_t own = row + i * kRows < end ? row + i * kRows : row;  // nobody else's
          s[i] = load(in.s + own * in.stride), v[i] = load(in.v + own * in.stride);
          d[i] = load(in.d_out + own * in.d_out_stride);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (row + i * kRows >= end) break;
          Pack d_s, d_v;
#pragma unroll
          for (int e = 0; e < kWidth; ++e) {
            const float2 to = slopes(static_cast<float>(s[i].values[e]),
                                     static_cast<float>(v[i].values[e]), b1[e], b2[e]);
            const bool inside = kAligned || col + e < in.hidden;
            const float own = static_cast<float>(d[i].values[e]);
            const float of_s = inside ? own * to.x : 0, of_v = inside ? own * to.y : 0;
            d_s.values[e] = static_cast<T>(of_s), d_v.values[e] = static_cast<T>(of_v);
            sum_s[e] += of_s, sum_v[e] += of_v;
          }
          const int64_t at = (row + i * kRows) * in.d_stride + col;
          *reinterpret_cast<Pack*>(in.d_s + at) = d_s;
          *reinterpret_cast<Pack*>(in.d_v + at) = d_v;
        }
      }
    };
    if (in.kept) {
      each_row([](float s, float v, float, float) { return make_float2(s, v); });
    } else {
      with_gate(in.gate, [&]<Gate kGate>() {
        each_row([&](float s, float v, float of_gates, float of_values) {
          const GateAt gate = gate_at<T, kGate>(s + of_gates);
          GateAt value = {v + of_values, 1};
          if (in.gated_values) value = gate_at<T, kGate>(value.value);
          return make_float2(gate.slope * value.value, gate.value * value.slope);
        });
      });
    }
  }
#pragma unroll
  for (int e = 0; e < kWidth; ++e) sums[y][0][x + e] = sum_s[e], sums[y][1][x + e] = sum_v[e];
  __syncthreads();
  const int own = static_cast<int>(threadIdx.x), at = own % kGateCols;
  if (own >= 2 * kGateCols || static_cast<int>(blockIdx.x) * kGateCols + at >= in.half_cols) return;
  float sum = 0;
  for (int i = 0; i < kRows; ++i) sum += sums[i][own / kGateCols][at];
  in.partials[(int64_t{blockIdx.y} * 2 + own / kGateCols) * in.half_cols + blockIdx.x * kGateCols +
              at] = sum;
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
  std::optional<Memory<T>> d_y = {};  ///< of a second input
};

template <typename T>
class GatedLayerBackward {
 public:
  GatedLayerBackward(const Caller& caller, const GatingMemory<T>& of, const GatingGradients<T>& d,
                     const GatingShape& shape, const ProductWays<T>& multiply,
                     const TurnedProductWays<T>& multiply_turned,
                     const std::optional<ValueInput<T>>& value = {},
                     const std::optional<KeptSlopes<T>>& kept = {})
      : caller_(caller),
        of_(of),
        d_(d),
        gated_values_(value && value->gated),
        M(shape.rows),
        H(shape.hidden),
        stride(value ? pitch : 2 * pitch) {
    if constexpr (kHalves) {
      // Where there is room for it, nothing else moves as little.
      if (!value && (offer_on_chip<OnChipTile<128, 16, 2>>(shape.channels) ||
                     offer_on_chip<OnChipTile<64, 8, 2>>(shape.channels))) {
        return;
      }
    }
    const auto product_of = [&](const Memory<T>& a, const Memory<T>& b, const Memory<T>& c,
                                int64_t m, int64_t n, int64_t k, product::RowStrides strides) {
      return best_product(caller, multiply, a, b, c,
                          {static_cast<int>(m), static_cast<int>(n), static_cast<int>(k)}, strides);
    };
    const auto turned_of = [&](const Memory<T>& a, const Memory<T>& b, const Memory<T>& c,
                               int64_t m, int64_t n, int64_t k, product::RowStrides strides,
                               bool of_a) {
      return best_of(multiply_turned(
          caller.of_step(), a, b, c,
          {static_cast<int>(m), static_cast<int>(n), static_cast<int>(k)}, strides, of_a));
    };
    const Memory<T> d_s = any(M * 2 * pitch), d_v = behind(d_s, value ? M * pitch : pitch);
    const Memory<T> s = kept ? kept->s_slopes : kHalves ? d_s : any(M * H);
    const Memory<T> v = kept ? kept->v_slopes : kHalves ? d_v : any(M * H);
    const Input x = input(of.x, shape.channels, of.x_stride, d_s, d.d_x);
    std::vector<Input> inputs = {x};
    if (value) inputs.push_back(input(value->y, value->channels, value->stride, d_v, *d.d_y));
    const Input& y = inputs.back();                  // the same one, where there is no other
    const int64_t W_t_stride = aligned(x.channels);  // of [W1 | W2]^T
    const Memory<T> W_t = any(value ? 0 : stride * W_t_stride);

    std::vector<Way> steps;
    if (!kept) {
      const int64_t apart = kHalves ? stride : 0;
      steps = {product_of(x.x, of.W1, s, M, H, x.channels, {of.x_stride, 0, apart}),
               product_of(y.x, of.W2, v, M, H, y.channels,
                          {value ? value->stride : of.x_stride, 0, apart})};
    }
    steps.push_back(gates(s, v, d_s, d_v, kept.has_value()));
    if (!value) steps.push_back(turn_weights(x.channels, W_t, W_t_stride));
    std::vector<Way> by_products, from_slices;
    const Memory<T> W[2] = {of.W1, of.W2}, d_W[2] = {d.d_W1, d.d_W2};
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Input& in = inputs[i];
      const int64_t K = in.channels, rows = aligned(M);
      if constexpr (kHalves) from_slices.push_back(weights_from_slices(in, d_W[i], d_W[1]));
      if (value) {
        steps.push_back(turned_of(in.d, W[i], in.d_x, M, K, H, {stride, H, K}, false));
      } else {
        steps.push_back(product_of(in.d, W_t, in.d_x, M, K, stride, {0, dense(W_t_stride, K), 0}));
      }
      if (value || (kHalves && primitives::is_hopper())) {
        const product::RowStrides strides{in.stride, stride, H};
        by_products.push_back(turned_of(in.x, in.d, d_W[i], K, H, M, strides, true));
        if (!value) {
          const Memory<T> d_v = behind(in.d, pitch);
          by_products.push_back(turned_of(in.x, d_v, d_W[1], K, H, M, strides, true));
        }
        continue;
      }
      const Memory<T> x_t = any(K * rows);
      by_products.push_back({"", (kHalves ? 5 : 2) * in.read() + kFirstLaunch, [=, *this] {
                               product::launch_transpose<T>({in.x, M, K, in.stride},
                                                            {x_t, K, rows, rows}, caller_.stream);
                             }});
      if constexpr (kHalves) {
        const product::RowStrides strides{dense(rows, M), stride, 0};
        by_products.push_back(product_of(x_t, in.d, d_W[0], K, H, M, strides));
        by_products.push_back(product_of(x_t, behind(in.d, pitch), d_W[1], K, H, M, strides));
      } else {
        const Memory<float> both = any(K * stride);
        by_products.push_back(product_of(x_t, in.d, both, K, stride, M, {}));
        by_products.push_back({"",
                               kFirstLaunch + 8 * static_cast<double>(K * stride) / memory_rate(),
                               [=, *this] { add_weights(both.data(), 1, K, d_W[0], d_W[1]); }});
      }
    }
    const char* const by_products_name = kept      ? "four products after their slopes"
                                         : value   ? "six products and their gates between them"
                                         : kHalves ? "five products and their gates between them"
                                                   : "four products and their gates between them";
    offer(Weights::by_products, by_products_name, steps, by_products);
    // Pieces of 16 bytes have to end where rows end.
    const bool in_pieces =
        std::ranges::all_of(inputs, [](const Input& in) { return in.channels % 8 == 0; });
    if (kHalves && in_pieces) {
      offer(Weights::from_slices,
            kept    ? "two products after their slopes, weights from slices of the rows"
            : value ? "four products and their gates, weights from slices of the rows"
                    : "three products and their gates, weights from slices of the rows",
            steps, from_slices);
    }
  }

  /// None where a product has none.
  const std::vector<Way>& ways() const { return ways_; }

 private:
  static constexpr bool kHalves = sizeof(T) == 2;
  /// How their gradients are computed.
  enum class Weights : int64_t { by_products, from_slices, on_chip };
  /// What rows of 2-byte elements are a multiple of, so that no product copies them; for fp32 all
  /// is dense, as FK_FLOAT32's products want it.
  static constexpr int64_t kAligned = kHalves ? 8 : 1;

  /// An input (M, channels), and what belongs to it: d, which is [dS | dV], or one of them; its
  /// gradient.
  struct Input {
    Memory<T> x;
    int64_t channels, stride, rows;
    Memory<T> d, d_x;

    double read() const {  // microseconds
      return static_cast<double>(rows * channels) * sizeof(T) / memory_rate();
    }
  };
  Input input(const Memory<T>& x, int64_t channels, int64_t row_stride, const Memory<T>& d,
              const Memory<T>& d_x) const {
    return {x, channels, row_stride != 0 ? row_stride : channels, M, d, d_x};
  }

  Memory<T> any(int64_t count) const {
    return caller_.workspace.template any<T>(static_cast<size_t>(count));
  }
  static int64_t aligned(int64_t count) { return (count + kAligned - 1) / kAligned * kAligned; }
  static int64_t dense(int64_t stride, int64_t cols) { return stride == cols ? 0 : stride; }
  /// What lies so many elements further on.
  static Memory<T> behind(const Memory<T>& of, int64_t by) {
    return Memory<T>([of, by] { return of.data() + by; }, of.size() - static_cast<size_t>(by));
  }

  /// From s and v, or from what is `kept`, to dS and dV.
  Way gates(const Memory<T>& s, const Memory<T>& v, const Memory<T>& d_s, const Memory<T>& d_v,
            bool kept) const {
    const GateSlices slices(M, pitch);
    const auto partials =
        caller_.workspace.template any<float>(slices.count * static_cast<size_t>(2 * pitch));
    const auto launch = [=, *this] {
      const cudaStream_t stream = caller_.stream;
      const GateGradients<T> in{s,
                                v,
                                kHalves && !kept ? stride : H,
                                d_s,
                                d_v,
                                stride,
                                of_.b1,
                                of_.b2,
                                d_.d_out,
                                of_.out_stride != 0 ? of_.out_stride : H,
                                M,
                                slices.rows,
                                static_cast<int>(H),
                                static_cast<int>(pitch),
                                of_.gate,
                                gated_values_,
                                kept,
                                partials};
      constexpr int kWidth = 16 / sizeof(T);
      if (H % 8 == 0) {
        gate_gradients<T, kWidth, true><<<slices.blocks(), kGateThreads, 0, stream>>>(in);
      } else {
        gate_gradients<T, 2, false><<<slices.blocks(), kGateThreads, 0, stream>>>(in);
      }
      add_bias_gradients<T><<<dim3(primitives::blocks_for(H, 128), 2), 128, 0, stream>>>(
          partials.data(), static_cast<int>(slices.count), static_cast<int>(pitch),
          static_cast<int>(H), d_.d_b1.data(), d_.d_b2.data());
    };
    return {"", 2 * kFirstLaunch + static_cast<double>(M * pitch) * 5 * sizeof(T) / memory_rate(),
            launch};
  }

  /// [W1 | W2]^T, where what fills rows up to `pitch` is 0.
  Way turn_weights(int64_t channels, const Memory<T>& to, int64_t to_stride) const {
    const auto launch = [=, *this] {
      using Factor = product::Strided<const T>;
      const auto turn = [&](const Memory<T>& W, const Memory<T>& at) {
        product::launch_transpose<T>(Factor{W, channels, H, H}, {at, pitch, to_stride, to_stride},
                                     caller_.stream);
      };
      turn(of_.W1, to);
      turn(of_.W2, behind(to, pitch * to_stride));
    };
    return {"", 2 * kNextLaunch, launch};
  }

  /// dW1 and dW2 by one kernel, which reads x and [dS | dV] once; or one of them. A step without a
  /// launch where a grid cannot have so many blocks.
  Way weights_from_slices(const Input& of, const Memory<T>& d_W1, const Memory<T>& d_W2) const {
    const int64_t K = of.channels;
    const WeightPlan plan(M, K, stride);
    if (!plan.fits()) return {};
    const auto of_slices =
        caller_.workspace.template any<float>(plan.slices * static_cast<size_t>(K * stride));
    // mma.sync reaches about 4e8 operations in a microsecond.
    const double operations = 2.0 * static_cast<double>(K) * static_cast<double>(stride * M);
    const double once = static_cast<double>(plan.slices) * static_cast<double>(K * stride) * 8;
    const auto launch = [=, *this] {
      const WeightProduct<T> in{
          of.x,     of.d, of.stride, M, plan.slice, static_cast<int>(K), static_cast<int>(stride),
          of_slices};
      primitives::allow_shared_bytes(weight_product<T>, WeightTile::kSharedBytes);
      const dim3 blocks(static_cast<unsigned>(plan.tiles), plan.slices);
      weight_product<T>
          <<<blocks, WeightTile::kThreads, WeightTile::kSharedBytes, caller_.stream>>>(in);
      add_weights(of_slices.data(), static_cast<int>(plan.slices), K, d_W1, d_W2);
    };
    return {"", 2 * kFirstLaunch + std::max(operations / 4e8, of.read()) + once / memory_rate(),
            launch, WeightTile::kSharedBytes};
  }
  /// db1 and db2 of partial sums, as add_weights() has those of a single channel.
  void add_biases(const float* partials, int slices) const {
    add_weight_gradients<T><<<primitives::blocks_for(2 * pitch, kAddingCols),
                              dim3(kAddingCols, kAddingRows), 0, caller_.stream>>>(
        partials, slices, 1, static_cast<int>(2 * pitch), static_cast<int>(pitch),
        static_cast<int>(H), d_.d_b1.data(), d_.d_b2.data());
  }
  void add_weights(const float* partials, int slices, int64_t channels, const Memory<T>& d_W1,
                   const Memory<T>& d_W2) const {
    add_weight_gradients<T><<<primitives::blocks_for(channels * stride, kAddingCols),
                              dim3(kAddingCols, kAddingRows), 0, caller_.stream>>>(
        partials, slices, static_cast<int>(channels), static_cast<int>(stride),
        static_cast<int>(pitch), static_cast<int>(H), d_W1.data(), d_W2.data());
  }

  /// By one kernel, and those that add up what its blocks have found. Whether there is room.
  template <class Tile>
  bool offer_on_chip(int64_t K) {
    const int64_t x_stride = of_.x_stride != 0 ? of_.x_stride : K;
    const int64_t out_stride = of_.out_stride != 0 ? of_.out_stride : H;
    if (K > Tile::kDepth || H > Tile::kHidden || M > INT_MAX - Tile::kRows || x_stride % 8 != 0 ||
        out_stride % 8 != 0 || Tile::kSharedBytes > primitives::most_shared_bytes()) {
      return false;
    }
    const int64_t tiles = primitives::ceil_div(M, int64_t{Tile::kRows});
    const int64_t blocks = std::min<int64_t>(tiles, primitives::multiprocessors());
    const auto weights =
        caller_.workspace.template any<float>(static_cast<size_t>(blocks * K * stride));
    const auto biases = caller_.workspace.template any<float>(static_cast<size_t>(blocks * stride));
    const auto launch = [=, *this] {
      const BackwardOnChip<T> of{
          of_.operands({M, K, H}), d_.d_out, d_.d_x, x_stride, out_stride, weights, biases,
          static_cast<int>(pitch)};
      primitives::allow_shared_bytes(backward_on_chip<Tile, T>, Tile::kSharedBytes);
      backward_on_chip<Tile, T>
          <<<static_cast<unsigned>(blocks), Tile::kThreads, Tile::kSharedBytes, caller_.stream>>>(
              of);
      add_weights(weights.data(), static_cast<int>(blocks), K, d_.d_W1, d_.d_W2);
      add_biases(biases, static_cast<int>(blocks));
    };
    // A tile takes 100 cycles for each of its rows.
    const double of_block = 100.0 * Tile::kRows * static_cast<double>(ceil_div(tiles, blocks));
    ways_.push_back({"one kernel for all but the sums over its blocks",
                     3 * kFirstLaunch + of_block / cycles(), launch, Tile::kSharedBytes,
                     way_id({static_cast<int64_t>(Weights::on_chip)})});
    return true;
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
  bool gated_values_;
  int64_t M, H;
  int64_t pitch = (H + 7) / 8 * 8;  ///< columns of dS, and of dV
  int64_t stride;                   ///< from a row of dS or dV to the next: of both, or of one
  std::vector<Way> ways_;
};

}  // namespace operators::gating
