// The gated layer for any shape: what a program calls, and lesson 6's last row.
//
//     out = gate(x W1 + b1) * (x W2 + b2)
//     x (M, K), W1 and W2 (K, H), b1 and b2 (H) or none, out (M, H): fp16 or bf16, row-major; fp32
//     sums. Rows of x and out may be a multiple of 8 elements apart; all else is dense. The gate is
//     a sigmoid as in the lesson, or one of gate.cuh. (In fp32: unfused.cuh.)
//
// On Hopper: where the weights fit on chip, they stay there, and x streams by
// (operators/gating/resident.cuh). Otherwise the layer is lesson 3's product for any shape
// (operators/product/product.cuh) with two right factors and the gate as its epilogue. On other
// GPUs: operators/gating/portable.cuh.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "operators/gating/portable.cuh"
#include "operators/gating/resident.cuh"
#include "operators/product/plan.cuh"

namespace operators::gating {

using namespace operators::product;

/// What a tile of x [W1 W2] costs a multiprocessor, in clock cycles: a step, which is 64 inputs,
/// and what comes after the steps: the gates, and their way out. Fitted to shapes drawn at random,
/// each computed with all tiles, on an H200.
struct GatedTileCost {
  int rows, cols;
  double step, finish;
};
inline constexpr GatedTileCost kGatedTileCosts[] = {
    {128, 256, 1000, 3690}, {192, 128, 810, 2480}, {128, 128, 570, 2050}, {64, 128, 375, 1660}};
/// What shared tiles cost, fitted together with these.
inline constexpr ProductCosts kGatedSharing = {.handover = 1.65,
                                               .piece = 0.179,
                                               .piece_element = 0.0152,
                                               .partial = 0.108,
                                               .shared_reads = 0.363};

constexpr GatedTileCost cost_of_tile(int rows, int cols) {
  for (const GatedTileCost& cost : kGatedTileCosts) {
    if (cost.rows == rows && cost.cols == cols) return cost;
  }
  return {rows, cols, rows * cols / 32.0, rows * cols / 8.0};
}

/// Microseconds of a layer whose tiles have `steps` steps, each step and each end of a tile with
/// this `cost`. `shape` is that of the products: of x [W1 W2], or for two inputs of out, with the
/// depth of both. out has `results` elements. Of what goes from and to memory two fifths are not
/// hidden.
template <class Tile, typename T>
double gated_microseconds(const GatedTileCost& cost, double steps, const ProductShape& shape,
                          double results, const Division& division) {
  constexpr TileWork kWork = work_of_tile<Tile>();
  const double bytes =
      sizeof(T) * (1.0 * shape.rows * shape.depth + 1.0 * shape.depth * shape.cols + results) +
      kGatedSharing.shared_reads * fetched_by_sharers(kWork, sizeof(T), shape.depth, division);
  return 3.7 + (division.rounds * steps * cost.step + division.finished * cost.finish) / cycles() +
         0.4 * bytes / memory_rate() + handover_microseconds(kGatedSharing, kWork, division);
}

/// The epilogue of a product by W1 and W2 side by side: half of a tile's columns are of W1, half of
/// W2. So where a tile has 256 columns, a consumer's sum of 64 x 256 is two sums of 64 x 128, gate
/// and value of an element in one thread.
///
/// kPlain: the gate is a sigmoid, and there are both biases. What other layers need would take that
/// one some per cent of its time.
template <typename T, bool kPlain>
struct StoreGated {
  static constexpr int kRightFactors = 2;
  StoreRounded<T> out;
  const T *b1, *b2;  ///< a layer without one has a row of weights here, whose numbers are dropped
  bool has_b1, has_b2;
  Gate gate;

  /// How long the layer should take with tiles that are so divided. `shape` is of x [W1 W2].
  template <class Tile>
  static double microseconds(const ProductShape& shape, const Division& division) {
    return gated_microseconds<Tile, T>(cost_of_tile(Tile::BM, Tile::BN),
                                       ceil_div(shape.depth, static_cast<int>(kLine<T>)), shape,
                                       0.5 * shape.rows * shape.cols, division);
  }

#if HOPPER_CODE
  /// The biases of 64 columns of out, from col0 on. A thread keeps those of its columns, two
  /// neighbours in each group of 8 (see Sum::col). Columns beyond H are never stored; they take the
  /// last bias, so that no load depends on a condition, and all of them are on their way at once.
  struct Biases {
    float2 b1[8], b2[8];

    __device__ Biases(const StoreGated& of, int col0) {
      of.out.cols % 2 == 0 ? load<true>(of, col0) : load<false>(of, col0);
    }
    /// kPairs: H is even, and two neighbours are one load.
    template <bool kPairs>
    __device__ void load(const StoreGated& of, int col0) {
      const int H = of.out.cols;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int col = min(col0 + Sum<64>::col(4 * j), (H - 1) / 2 * 2);
        const float2 one = two<kPairs>(of.b1, col, H), other = two<kPairs>(of.b2, col, H);
        b1[j] = kPlain || of.has_b1 ? one : float2{};
        b2[j] = kPlain || of.has_b2 ? other : float2{};
      }
    }
    template <bool kPairs>
    __device__ static float2 two(const T* from, int col, int H) {
      Neighbours<T, 2> two;
      if constexpr (kPairs) {
        two = *reinterpret_cast<const Neighbours<T, 2>*>(from + col);
      } else {
        two = {from[col], from[min(col + 1, H - 1)]};
      }
      return make_float2(static_cast<float>(two.values[0]), static_cast<float>(two.values[1]));
    }
    /// A sum has the gates in the left half of its columns, the values in the right. Adds the
    /// biases to those of 64 columns, from `first` on, and makes a sigmoid of them. Then there are
    /// none left to add.
    template <int kAll>
    __device__ __forceinline__ void make_sigmoids(Gate gate, Sum<kAll>& sum, int first) {
      with_gate(gate, [&]<Gate kGate>() {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          float &own = sum.elements[first / 2 + i], &value = sum.elements[kAll / 4 + first / 2 + i];
          own += i % 2 == 0 ? b1[i / 4].x : b1[i / 4].y;
          value += i % 2 == 0 ? b2[i / 4].x : b2[i / 4].y;
          make_sigmoid<kGate>(own, value);
        }
      });
#pragma unroll
      for (int j = 0; j < 8; ++j) b1[j] = b2[j] = {};
    }
    /// Of those 64 columns makes the values what the gate makes of them, with their biases.
    template <int kAll>
    __device__ __forceinline__ void gate_values(Gate gate, Sum<kAll>& sum, int first) {
      with_gate(gate, [&]<Gate kGate>() {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          float& value = sum.elements[kAll / 4 + first / 2 + i];
          value = gate_of<kGate>(value + (i % 2 == 0 ? b2[i / 4].x : b2[i / 4].y));
        }
      });
#pragma unroll
      for (int j = 0; j < 8; ++j) b2[j] = {};
    }
    /// Puts the results of 64 columns, from `first` on, into a box.
    template <int kAll>
    __device__ void store(const Sum<kAll>& sum, int first, Box<T, 64>& to) const {
      sum.store(to, first, [&](int i) {
        const float2 gate_bias = b1[i % 32 / 4], value_bias = b2[i % 32 / 4];
        return gated(sum.elements[i] + (i % 2 == 0 ? gate_bias.x : gate_bias.y),
                     sum.elements[kAll / 4 + i] + (i % 2 == 0 ? value_bias.x : value_bias.y));
      });
    }
  };

  template <int kCols, int kBoxes>
  __device__ void operator()(Sum<kCols>& sum, int row, int col,
                             const Outbox<T, kBoxes>& box) const {
    out.template store<kCols / 2>(row, col / 2, box, [&](Box<T, 64>& to, int first) {
      Biases biases(*this, col / 2 + first);
      if constexpr (!kPlain) {
        if (gate != Gate::sigmoid) biases.make_sigmoids(gate, sum, first);
      }
      biases.store(sum, first, to);
    });
  }
#endif
};

/// The ways to compute the layer as a product, for K and H of any size. Rows that are not aligned
/// to 16 bytes are copied first, as in lesson 3.
template <typename T>
class GatedProduct {
 public:
  GatedProduct(const Caller& caller, const GatingMemory<T>& memory, const GatingShape& shape)
      : memory_(memory),
        x_(caller.workspace, memory.x, shape.rows, shape.channels, memory.x_stride),
        W1_(caller.workspace, memory.W1, shape.channels, shape.hidden),
        W2_(caller.workspace, memory.W2, shape.channels, shape.hidden),
        exchange_(caller.workspace),
        shape_{x_.rows, 2 * W1_.cols, x_.cols},
        caller_(caller) {}

  std::vector<Way> ways() {
    using Choice = TileChoice<Tiles<T, 128, 256, 2, 1, 2>, Tiles<T, 192, 128, 2, 1, 1>,
                              Tiles<T, 128, 128, 2, 1, 1>, Tiles<T, 64, 128, 2, 1, 1>>;
    Ways ways(caller_.search);
    Choice::template offer<StoreGated<T, true>>(
        ways, exchange_, shape_, x_.stride, W1_.stride,
        memory_.out_stride != 0 ? memory_.out_stride : W1_.cols,
        std::make_shared<const GatedProduct>(*this));
    exchange_.allocate(caller_.workspace);
    std::vector<Way> found = ways.found();
    for (Way& way : found) way.microseconds += copying();
    return found;
  }

  /// A way of these.
  template <class Tile>
  void launch(const ProductPlan& plan) const {
    const bool plain = memory_.gate == Gate::sigmoid && memory_.b1.data() && memory_.b2.data();
    plain ? launch<Tile, true>(plan) : launch<Tile, false>(plan);
  }

 private:
  template <class Tile, bool kPlain>
  void launch(const ProductPlan& plan) const {
    using Work = MatrixProduct<Tile, StoreGated<T, kPlain>>;
    constexpr size_t kBytes = sizeof(ProductShared<Tile>);
    const T *b1 = memory_.b1, *b2 = memory_.b2, *weights = memory_.W1;
    const Work work{
        {{x_.map(Tile::kRowsA)}},
        {{W1_.map(Tile::kRowsB), W2_.map(Tile::kRowsB)}},
        {rounded_to<T>(memory_.out, x_.rows, W1_.cols, 64, memory_.out_stride), b1 ? b1 : weights,
         b2 ? b2 : weights, b1 != nullptr, b2 != nullptr, memory_.gate},
        Schedule<Tile>(shape_, plan.clusters, plan.shares),
        exchange_.template in_step<T>(shape_, plan.shares)};
    const bool copied = launch_align_rows<T, 3>({x_.job(), W1_.job(), W2_.job()}, caller_.stream);
    const bool early = copied || work.exchange.ended;  // after copies, or zeros
    allow_shared_bytes(operators::product::product<Work>, kBytes);
    launch_clusters_on(caller_.stream, operators::product::product<Work>, 1, early,
                       plan.clusters * Tile::kBlocks, Tile::kThreads, kBytes, work);
  }

  /// Microseconds until all rows are aligned.
  double copying() const {
    double bytes = 0;
    for (const auto* matrix : {&x_, &W1_, &W2_}) {
      if (matrix->copied) bytes += 2 * sizeof(T) * 1.0 * matrix->rows * matrix->stride;
    }
    return bytes > 0 ? kNextLaunch + bytes / memory_rate() : 0;
  }

  GatingMemory<T> memory_;
  AlignedRows<T> x_, W1_, W2_;
  ExchangeMemory exchange_;
  ProductShape shape_;  // of x [W1 W2]
  Caller caller_;
};

/// The ways to compute the layer, of a shape that is at least 1 x 1 x 1, on Hopper or on another
/// GPU from compute capability 8.0 on. No way where there are too many tiles to count. out must
/// not overlap its inputs.
template <typename T>
std::vector<Way> gated_layer(const Caller& caller, const GatingMemory<T>& memory,
                             const GatingShape& shape) {
  if (!is_hopper()) return PortableGatedLayer<T>(caller, memory, shape).ways();
  if (memory.x_stride != 0 || memory.out_stride != 0) {
    return GatedProduct<T>(caller, memory, shape).ways();
  }
  const ResidentLayer<T> resident(caller, memory, shape);
  std::vector<Way> ways = resident.ways();
  // One block holds all weights, and there are tiles for all blocks: nothing could move less.
  const bool busy = shape.rows >= int64_t{64} * multiprocessors();
  if (resident.whole() && busy) return ways;
  const std::vector<Way> product = GatedProduct<T>(caller, memory, shape).ways();
  ways.insert(ways.end(), product.begin(), product.end());
  return ways;
}

}  // namespace operators::gating
