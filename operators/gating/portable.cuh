// The gated layer for any shape on compute capability 8.0 and newer, by mma.sync: lesson 6's
// *resident weights*, and lesson 3's *double buffering* with two right factors.
//
// Where x has many rows and the weights fit into shared memory, memory is the limit. So blocks stay
// and keep the weights, as in the lesson, and one thing is changed: a warp has tiles of x of its
// own, and its own ring of stages for them. So no warp waits for another one after the weights have
// come. While one waits for its tile, others multiply, and others compute sigmoids. Where the
// weights are so few that registers hold them, they stay there (in_registers.cuh).
//
// Else the layer is a product by W1 and W2 side by side. Gate and value of an element are in one
// thread, as on Hopper: of a warp's columns in a tile the first half are of W1, the others the same
// columns of W2 (operators/product/portable/mma_tiles.cuh).
#pragma once

#include <algorithm>
#include <climits>
#include <string>
#include <vector>

#include "operators/gating/portable/in_registers.cuh"
#include "operators/gating/resident.cuh"
#include "operators/product/portable/half.cuh"

namespace operators::gating {

using namespace operators::product;

/// Makes a sigmoid of the gates in the left half of a warp's columns, the values in the right one.
template <int kRows16, int kCols8>
__device__ __forceinline__ void make_sigmoids(Gate gate, float (&sum)[kRows16][kCols8][4]) {
  if (gate == Gate::sigmoid) return;
  with_gate(gate, [&]<Gate kGate>() {
#pragma unroll
    for (int i = 0; i < kRows16; ++i) {
#pragma unroll
      for (int j = 0; j < kCols8 / 2; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) make_sigmoid<kGate>(sum[i][j][e], sum[i][j + kCols8 / 2][e]);
      }
    }
  });
}

/// The epilogue of a product by both weights. kTwo: of two products, whose values may have the
/// gate's function, too.
template <typename T, bool kTwo = false>
struct MmaGate {
  MmaResults<T> results;
  const T *b1, *b2;
  Gate gate;
  bool gated_values = false;

  template <int kRows16, int kCols8>
  __device__ __forceinline__ void operator()(float (&sum)[kRows16][kCols8][4], int row,
                                             int col) const {
    constexpr int kOwn = kCols8 / 2;
    float2 gate_bias[kOwn] = {}, value_bias[kOwn] = {};
    if (b1 != nullptr) load(gate_bias, b1, col);
    if (b2 != nullptr) load(value_bias, b2, col);
    if (gate != Gate::sigmoid || (kTwo && gated_values)) {
      add_biases(sum, gate_bias, value_bias);
      if constexpr (kTwo) {
        if (gated_values) gate_values(sum);
      }
      make_sigmoids(gate, sum);
    }
    results.template store<16 * kRows16, 8 * kOwn>(row, col, [&](int i, int j) {
      const float2 own = pair_of(sum, i, j), value = pair_of(sum, i, j + kOwn);
      return pack2<T>(gated(own.x + gate_bias[j].x, value.x + value_bias[j].x),
                      gated(own.y + gate_bias[j].y, value.y + value_bias[j].y));
    });
  }

 private:
  /// Columns outside are never stored: they take the last bias.
  template <int kOwn>
  __device__ void load(float2 (&to)[kOwn], const T* from, int col) const {
    const int last = results.cols - 1;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const int at = col + 8 * j + static_cast<int>(threadIdx.x) % 4 * 2;
      to[j] = make_float2(static_cast<float>(from[min(at, last)]),
                          static_cast<float>(from[min(at + 1, last)]));
    }
  }
  template <int kRows16, int kCols8>
  __device__ __forceinline__ void gate_values(float (&sum)[kRows16][kCols8][4]) const {
    with_gate(gate, [&]<Gate kGate>() {
#pragma unroll
      for (int i = 0; i < kRows16; ++i) {
#pragma unroll
        for (int j = kCols8 / 2; j < kCols8; ++j) {
#pragma unroll
          for (float& value : sum[i][j]) value = gate_of<kGate>(value);
        }
      }
    });
  }
  /// Adds the biases, of which nothing is left then.
  template <int kRows16, int kOwn>
  __device__ __forceinline__ static void add_biases(float (&sum)[kRows16][2 * kOwn][4],
                                                    float2 (&gate_bias)[kOwn],
                                                    float2 (&value_bias)[kOwn]) {
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
#pragma unroll
      for (int i = 0; i < kRows16; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sum[i][j][e] += e % 2 == 0 ? gate_bias[j].x : gate_bias[j].y;
          sum[i][j + kOwn][e] += e % 2 == 0 ? value_bias[j].x : value_bias[j].y;
        }
      }
      gate_bias[j] = value_bias[j] = {};
    }
  }
};

inline constexpr int kPanelCols = 64;  ///< columns of out that a warp computes at a time

/// What a launch of resident_mma works on. Rows of x are a multiple of 8 elements apart.
template <typename T>
struct ResidentMma {
  LayerOperands<T> in;
  int64_t x_stride, out_stride;
  int depth;   ///< K, up to a multiple of 64
  int panels;  ///< of a block
};

/// kWarps warps, each with tiles of kRows rows of x and kStages stages for them.
template <int kRowsOfTile, int kWarpsOfBlock, int kStagesOfWarp>
struct ResidentTile {
  static constexpr int kRows = kRowsOfTile, kWarps = kWarpsOfBlock, kStages = kStagesOfWarp;
  static constexpr int kThreads = 32 * kWarps;

  /// Elements of a panel of weights, W1's and W2's columns side by side.
  __host__ __device__ static constexpr int64_t panel(int64_t depth) {
    return depth * 2 * kPanelCols;
  }
  /// Biases, weights and stages.
  static int64_t shared_bytes(int64_t depth, int64_t panels) {
    const int64_t halves = panels * panel(depth) + kWarps * kStages * kRows * depth;
    return 2 * halves + panels * 2 * kPanelCols * static_cast<int64_t>(sizeof(float));
  }
};

/// A block keeps `panels` panels of both weights, from column blockIdx.y * panels * 64 of out on. A
/// warp takes tiles of kRows rows, as many warps apart as the grid has in x. For each panel it has
/// kRows x 64 gates and as many values in registers.
///
/// A stage lies as swizzle() says, but how long its rows are is known at run time only.
template <class Tile, typename T>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    resident_mma(const __grid_constant__ ResidentMma<T> of) {
  constexpr int kRows = Tile::kRows, kStages = Tile::kStages, kWidth = 2 * kPanelCols;
  extern __shared__ __align__(128) char resident_shared[];
  const LayerOperands<T>& in = of.in;
  const int depth = of.depth, col0 = static_cast<int>(blockIdx.y) * of.panels * kPanelCols;
  T* const W = reinterpret_cast<T*>(resident_shared);
  T* const all_stages = W + of.panels * Tile::panel(depth);
  float* const biases =
      reinterpret_cast<float*>(all_stages + int64_t{Tile::kWarps} * kStages * kRows * depth);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  T* const stages = all_stages + int64_t{warp} * kStages * kRows * depth;

  const int tiles = (in.M + kRows - 1) / kRows, stride = gridDim.x * Tile::kWarps;
  const auto copy = [&](int64_t tile, T* stage) {
    // Four rows of 64 columns at a time. Four rows further on, bit 2 of the row differs, and so
    // does bit 5 of where a piece lies.
    const int row = lane / 8, col = lane % 8 * 8;
    const int rows = static_cast<int>(min(in.M - tile * kRows, int64_t{kRows})) - row;
    for (int c = 0; c < depth && tile < tiles; c += 64) {
      const int there = min(max(in.K - c - col, 0), 8);
      const T* from = in.x + (tile * kRows + row) * of.x_stride + c + col;
      T* const to = stage + row * depth + c;
#pragma unroll
      for (int r = 0; r < kRows; r += 4, from += 4 * of.x_stride) {
        T* const piece = to + r * depth + (col ^ 8 * row ^ 8 * (r % 8));
        if (in.K % 8 == 0) {
          copy_async<16>(piece, from, r < rows && there > 0);
        } else {
          copy_async_part(piece, from, r < rows ? 2 * there : 0);
        }
      }
    }
    copy_async_commit();
  };
  const int first = static_cast<int>(blockIdx.x) * Tile::kWarps + warp;

  // Weights and biases, once, together with the first tile. What is outside becomes 0.
  for (int i = threadIdx.x * 8; i < of.panels * depth * kWidth; i += Tile::kThreads * 8) {
    const int panel = i / (depth * kWidth), k = i / kWidth % depth, c = i % kWidth;
    const int col = col0 + panel * kPanelCols + c % kPanelCols;
    copy_weights<8, kWidth>(W + panel * Tile::panel(depth), in, c < kPanelCols, k, c, col);
  }
  for (int s = 0; s < kStages - 1; ++s)
    copy(first + int64_t{s} * stride, stages + s * kRows * depth);
  for (int i = threadIdx.x; i < of.panels * kWidth; i += Tile::kThreads) {
    const int col = col0 + i / kWidth * kPanelCols + i % kPanelCols;
    biases[i] = bias_at(in, i % kWidth < kPanelCols, col);
  }
  copy_async_wait<kStages - 2>();
  __syncthreads();

  const MmaResults<T> out{in.out, of.out_stride, in.M, in.H};
  const int a_row = lane % 16, a_col = lane / 16 * 8 ^ 8 * (a_row % 8);
  int stage = 0, next = kStages - 1;  // that is multiplied, and that is filled
  for (int tile = first; tile < tiles; tile += stride) {
    copy_async_wait<kStages - 2>();
    __syncwarp();  // all lanes' copies are there, and all have read the stage that is filled next
    copy(tile + int64_t{kStages - 1} * stride, stages + next * kRows * depth);
    T* const x = stages + stage * kRows * depth;
    stage = stage + 1 == kStages ? 0 : stage + 1;
    next = next + 1 == kStages ? 0 : next + 1;
    for (int panel = 0; panel < of.panels; ++panel) {
      float sum[kRows / 16][kWidth / 8][4];
      start_at_biases(sum, biases + panel * kWidth);
      const T* const weights = W + panel * Tile::panel(depth);
#pragma unroll 2
      for (int k = 0; k < depth; k += 16) {
        unsigned a[kRows / 16][4];
#pragma unroll
        for (int i = 0; i < kRows / 16; ++i) {
          ldmatrix_x4(a[i], x + (16 * i + a_row) * depth + (a_col ^ k));
        }
#pragma unroll
        for (int half_of = 0; half_of < 2; ++half_of) {
          unsigned b[kWidth / 32][4];
          load_right<kWidth>(b, weights, k, half_of * kPanelCols);
#pragma unroll
          for (int i = 0; i < kRows / 16; ++i) {
#pragma unroll
            for (int j = 0; j < kPanelCols / 8; ++j) {
              mma_m16n8k16<T>(sum[i][half_of * kPanelCols / 8 + j], a[i], b[j / 2][j % 2 * 2],
                              b[j / 2][j % 2 * 2 + 1]);
            }
          }
        }
      }
      make_sigmoids(in.gate, sum);
      constexpr int kOwn = kPanelCols / 8;
      out.template store<kRows, kPanelCols>(
          tile * kRows, col0 + panel * kPanelCols, [&](int i, int j) {
            const float2 gate = pair_of(sum, i, j), value = pair_of(sum, i, j + kOwn);
            return pack2<T>(gated(gate.x, value.x), gated(gate.y, value.y));
          });
    }
  }
}

/// The ways to compute the layer, by both kinds of kernels.
template <typename T>
class PortableGatedLayer {
 public:
  PortableGatedLayer(const Caller& caller, const GatingMemory<T>& memory, const GatingShape& shape)
      : caller_(caller), memory_(memory), shape_(shape) {
    Ways ways(caller.search);
    offer_held<HeldTile<128, 4>>(ways);
    offer<ResidentTile<32, 8, 3>>(ways), offer<ResidentTile<32, 8, 2>>(ways);
    offer<ResidentTile<16, 8, 2>>(ways), offer<ResidentTile<16, 4, 2>>(ways);
    ways_ = ways.found();
    for (Way& way : product_ways()) ways_.push_back(std::move(way));
  }

  std::vector<Way> ways() const { return ways_; }

 private:
  int64_t x_stride() const { return memory_.x_stride ? memory_.x_stride : shape_.channels; }
  int64_t out_stride() const { return memory_.out_stride ? memory_.out_stride : shape_.hidden; }

  std::vector<Way> product_ways() {
    using Launch = MmaLaunch<T, 2, MmaGate<T>>;
    const AlignedRows<T> x(caller_.workspace, memory_.x, shape_.rows, shape_.channels,
                           memory_.x_stride);
    const AlignedRows<T> W1(caller_.workspace, memory_.W1, shape_.channels, shape_.hidden);
    const AlignedRows<T> W2(caller_.workspace, memory_.W2, shape_.channels, shape_.hidden);
    const auto make = [=, memory = memory_, out_stride = out_stride()] {
      const int rows = x.rows, hidden = W1.cols;
      return Launch{{{x.job(), W1.job(), W2.job()}},
                    {x.data(), {W1.data(), W2.data()}, x.stride, W1.stride, rows, hidden, x.cols},
                    {{memory.out, out_stride, rows, hidden}, memory.b1, memory.b2, memory.gate}};
    };
    return MmaWays<T, 2, MmaGate<T>>(caller_, {x.rows, W1.cols, x.cols},
                                     bytes_copied(x) + bytes_copied(W1) + bytes_copied(W2), make)
        .template ways<MmaTile<256, 128, 64, 4, 2, 3, 1>, MmaTile<128, 128, 64, 2, 2, 3, 2>,
                       MmaTile<128, 128, 32, 2, 2, 3, 2>, MmaTile<64, 128, 32, 1, 2, 4, 4>>();
  }

  /// With as many warps in a team as all columns need, or more where there is no room for the
  /// stages of so many teams.
  template <class Tile>
  void offer_held(Ways& ways) const {
    if (x_stride() % 8 != 0 || shape_.channels > Tile::kDepth ||
        shape_.rows > INT_MAX - Tile::kRows) {
      return;
    }
    int team = 2;  // of one warp there would be more teams than barriers
    while (team < Tile::kWarps &&
           (team * Tile::kOwn < shape_.hidden || Tile::shared_bytes(team) > most_shared_bytes())) {
      team *= 2;
    }
    const int bytes = Tile::shared_bytes(team);
    if (team * Tile::kOwn < shape_.hidden || bytes > most_shared_bytes()) return;
    // All warps of a multiprocessor together take so many cycles for a tile each.
    constexpr double kCycles = 100.0 * Tile::kRows;
    const double tiles = std::ceil(1.0 * static_cast<double>(shape_.rows) / Tile::kRows);
    const double of_team = std::ceil(tiles * team / (Tile::kWarps * multiprocessors()));
    const double time =
        kFirstLaunch + 2 +
        std::max(of_team * kCycles / cycles(), 1.1 * shape_.bytes() / memory_rate());
    ways.offer(time, way_id({Tile::kRows, Tile::kStages, team}), [&] {
      const std::string name =
          "mma.sync, weights in registers; warps of a team: " + std::to_string(team);
      return Way{name, time, [self = *this, team] { self.template launch_held<Tile>(team); },
                 bytes};
    });
  }
  template <class Tile>
  void launch_held(int team) const {
    const int bytes = Tile::shared_bytes(team);
    allow_shared_bytes(held_mma<Tile, T>, bytes);
    const int64_t needed = ceil_div(shape_.rows, int64_t{Tile::kRows} * (Tile::kWarps / team));
    const HeldMma<T> of{memory_.operands(shape_), x_stride(), out_stride(), team};
    held_mma<Tile, T><<<static_cast<unsigned>(std::min<int64_t>(multiprocessors(), needed)),
                        Tile::kThreads, bytes, caller_.stream>>>(of);
  }

  /// With one block for all columns, or as few side by side as have room.
  template <class Tile>
  void offer(Ways& ways) const {
    if (x_stride() % 8 != 0) return;  // else pieces of 16 bytes begin where rows begin
    const int64_t depth = ceil_div(shape_.channels, int64_t{64}) * 64;
    const int64_t panels = ceil_div(shape_.hidden, int64_t{kPanelCols});
    for (int64_t beside = 1; beside <= std::min<int64_t>(panels, 4); ++beside) {
      const int64_t own = ceil_div(panels, beside);
      const int64_t bytes = Tile::shared_bytes(depth, own);
      if (bytes > most_shared_bytes()) continue;
      const double time = microseconds<Tile>(depth, own, beside);
      const WayId id = way_id({Tile::kRows, Tile::kWarps, Tile::kStages, beside});
      ways.offer(time, id, [&] {
        const std::string name = "mma.sync, resident; rows: " + std::to_string(Tile::kRows) +
                                 "; warps: " + std::to_string(Tile::kWarps) +
                                 "; stages: " + std::to_string(Tile::kStages) +
                                 "; blocks beside: " + std::to_string(beside);
        return Way{name, time,
                   [self = *this, depth, own, beside, bytes] {
                     self.template launch<Tile>(depth, own, beside, bytes);
                   },
                   static_cast<int>(bytes)};
      });
      return;
    }
  }

  template <class Tile>
  void launch(int64_t depth, int64_t own, int64_t beside, int64_t bytes) const {
    allow_shared_bytes(resident_mma<Tile, T>, static_cast<int>(bytes));
    const int64_t fit = std::max<int64_t>(
        1, resident_blocks(resident_mma<Tile, T>, Tile::kThreads, bytes) / beside);
    const int64_t needed = ceil_div(shape_.rows, int64_t{Tile::kRows} * Tile::kWarps);
    const ResidentMma<T> of{memory_.operands(shape_), x_stride(), out_stride(),
                            static_cast<int>(depth), static_cast<int>(own)};
    resident_mma<Tile, T>
        <<<dim3(static_cast<unsigned>(std::min(fit, needed)), static_cast<unsigned>(beside)),
           Tile::kThreads, bytes, caller_.stream>>>(of);
  }

  /// An estimate that is not fitted to measurements. Of each 16 of the depth a warp loads the
  /// weights of a panel once for its rows, so that few rows ask much of shared memory.
  template <class Tile>
  double microseconds(int64_t depth, int64_t own, int64_t beside) const {
    constexpr double kRate = (Tile::kRows == 32 ? 500 : 310) * (Tile::kWarps == 8 ? 1 : 0.6);
    const double sms = multiprocessors();
    const double tiles = std::ceil(1.0 * static_cast<double>(shape_.rows) / Tile::kRows);
    const double warps = std::floor(sms / static_cast<double>(beside)) * Tile::kWarps;
    const double of_warp = std::ceil(tiles / std::max(1.0, warps));
    const double tile = 1.0 * Tile::kRows * 2 * kPanelCols * static_cast<double>(own * depth);
    const double weights = 4.0 * kPanelCols * static_cast<double>(own * depth);  // bytes of a block
    const double cycles_of_all = of_warp * Tile::kWarps * tile / kRate + weights / 16 + 2000;
    return kFirstLaunch + std::max(cycles_of_all / cycles(), 1.1 * shape_.bytes() / memory_rate());
  }

  Caller caller_;
  GatingMemory<T> memory_;
  GatingShape shape_;
  std::vector<Way> ways_;
};

}  // namespace operators::gating
