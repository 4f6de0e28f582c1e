// The gradients of the gated layer of two inputs whose forward has kept slopes, on Hopper:
//
//     dS = d_out * s_slopes,  dV = d_out * v_slopes                          element by element
//     dx = dS W1^T,  dy = dV W2^T,  dW1 = x^T dS,  dW2 = y^T dV,  db1, db2: column sums of dS, dV
//
// dS and dV are never in memory. All four products have one of them as a factor. Its tile comes as
// two tiles, of d_out and of the slopes. A warp multiplies their elements on the way to the
// registers from which wgmma reads a left factor. So each product reads one matrix (M, H) more. But
// there is no kernel before the products, which would read three such matrices and write two.
//
// One kernel computes dx and dy, and another one dW1 and dW2. Where weights are so small that a
// block can hold them all, one kernel computes all four products (SmallGradients), and reads
// everything once.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include "operators/gating/backward.cuh"
#include "operators/gating/two_inputs.cuh"
#include "operators/product/transpose.cuh"

namespace operators::gating {

// ---- Backward: what both kernels have in common -------------------------------------------------

/// The products of two pairs of neighbours, rounded to T; and their sums.
template <typename T>
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  using Pair = std::conditional_t<std::is_same_v<T, half>, __half2, __nv_bfloat162>;
  const Pair x = reinterpret_cast<const Pair&>(a), y = reinterpret_cast<const Pair&>(b);
#ifdef CUDA_CPU
  return pack2<T>(static_cast<float>(x.x) * static_cast<float>(y.x),
                  static_cast<float>(x.y) * static_cast<float>(y.y));
#else
  const Pair product = __hmul2(x, y);
  return reinterpret_cast<const uint32_t&>(product);
#endif
}
template <typename T>
__device__ __forceinline__ float sum_of_pair(uint32_t of) {
  const auto& pair = reinterpret_cast<const Neighbours<T, 2>&>(of);
  return static_cast<float>(pair.values[0]) + static_cast<float>(pair.values[1]);
}

/// A left factor that is the product of two others, element by element, rounded to T.
template <typename T>
__device__ __forceinline__ LeftFragments<T> multiplied(LeftFragments<T> a,
                                                       const LeftFragments<T>& b) {
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a.slices[slice][i] = multiply_pairs<T>(a.slices[slice][i], b.slices[slice][i]);
    }
  }
  return a;
}

/// The sums of the two rows of dS^T of which a thread has fragments, for the gradient of a bias.
template <typename T>
struct RowSums {
  bool wanted;
  float of[2] = {};

  __device__ explicit RowSums(bool are_wanted) : wanted(are_wanted) {}
  __device__ __forceinline__ void add(const LeftFragments<T>& fragments) {
    if (!wanted) return;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int i = 0; i < 4; ++i) of[i % 2] += sum_of_pair<T>(fragments.slices[slice][i]);
    }
  }
  /// Four neighbouring lanes have the same rows. to: those of the warpgroup's 64 rows.
  __device__ void leave(float* to) const {
    if (!wanted) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float whole = of[i];
      whole += __shfl_xor_sync(~0u, whole, 1);
      whole += __shfl_xor_sync(~0u, whole, 2);
      if (threadIdx.x % 4 == 0) to[Sum<8>::row(2 * i)] = whole;
    }
  }
};

/// Where the rows of the two inputs are in a matrix that has those of both below each other: those
/// of y begin at a multiple of the rows that a cluster has at a time.
struct Halves {
  int begin;  ///< of the second half

  template <class Tile>
  static Halves of(int64_t rows) {
    constexpr int kRows = Schedule<Tile>::kRows;
    return {static_cast<int>(ceil_div(rows, int64_t{kRows}) * kRows)};
  }
  __device__ int half(int row) const { return row >= begin; }
  __device__ int within(int row) const { return row >= begin ? row - begin : row; }
};

// ---- Backward: the gradients of x and y ---------------------------------------------------------

/// Tiles of dx and dy. A stage has 64 hidden columns of d_out and of the slopes, and as many rows
/// of a weight's transpose.
template <typename T, int kRows, int kColumns, int kOutBoxes>
struct InputTiles : Tiles<T, kRows, kColumns, 2, 1, kOutBoxes> {
  struct Stage {
    LeftTile<T, kRows> d_out, slope;
    RightTile<T, kColumns> weights;
  };
};

/// The Work: [dx; dy] = [dS; dV] times W1^T or W2^T, in whole tiles. A has d_out, B the transposed
/// weights.
template <class Tile_, typename T>
struct InputGradients : MatrixProduct<Tile_, StoreRounded<T>> {
  using Whole = MatrixProduct<Tile_, StoreRounded<T>>;
  using Tile = Tile_;
  using typename Whole::Shared, typename Whole::Stage, typename Whole::Sum;
  Factor<2> weights, slopes, results;
  Halves halves;

#if HOPPER_CODE
  using typename Whole::Grid;

  class Copies : public Whole::Copies {
   public:
    __device__ Copies(const InputGradients& of, const Grid& blocks)
        : Whole::Copies(of, blocks), all(of) {}
    template <bool kAlone = false>
    __device__ void load(Stage& stage, Barrier* arrived) const {
      const int half = all.halves.half(this->at.row), row = all.halves.within(this->at.row);
      const int k = this->k;
      this->grid.template load<kAlone>(stage.d_out, &all.A.maps[0], row, k, arrived);
      this->grid.template load<kAlone>(stage.slope, &all.slopes.maps[half], row, k, arrived);
      this->grid.template load<kAlone>(stage.weights, &all.weights.maps[half], this->at.col, k,
                                       arrived);
    }

   private:
    const InputGradients& all;
  };

  class Results : public Whole::Results {
   public:
    __device__ Results(const InputGradients& of, Shared& memory, const Grid& blocks, int number)
        : Whole::Results(of, memory, blocks, number), all(of) {}
    template <class Reader>
    __device__ void multiply(Sum& sum, Reader& reader) const {
      reader.template take_ahead<LeftFragments<T>>(
          all.schedule.steps,
          [&](LeftFragments<T>& to, const Stage& stage) {
            const int row = Tile::row_of(this->consumer);
            to = multiplied(stage.d_out.load_fragments(row), stage.slope.load_fragments(row));
          },
          [&](const LeftFragments<T>& left, const Stage& stage, bool add) {
            sum.start_product(left, stage.weights, add);
          });
      this->out.wait();  // while the last products are on their way
    }
    __device__ void store(const Sum& sum) const {
      const auto at = all.schedule.place(this->piece.tile, this->grid.stack, this->grid.side);
      const CUtensorMap* const map = &all.results.maps[all.halves.half(at.row)];
      const int row = all.halves.within(at.row) + Tile::row_of(this->consumer);
#pragma unroll
      for (int i = 0; i < Tile::BN / kBoxCols; ++i) {
        auto& box = this->out.boxes[i % Tile::kOut];
        if (i >= Tile::kOut) this->out.template wait<Tile::kOut - 1>();
        sum.store(box, kBoxCols * i, [&](int e) { return sum.elements[e]; });
        shared_fence();
        this->out.meet();
        if (warp_of_block() % 4 == 0 && elect_one()) {
          tensor_store(map, row, at.col + kBoxCols * i, box.elements);
          tensor_store_commit();
        }
      }
    }

   private:
    const InputGradients& all;
  };
#endif
};

// ---- Backward: the gradients of the weights -----------------------------------------------------

/// Tiles of dW1^T and dW2^T. A stage has 64 rows of d_out and of the slopes, as many of x or y, and
/// of the hidden columns 64 for each consumer.
template <typename T, int kRows, int kColumns, int kSideTiles>
struct WeightTiles : Tiles<T, kRows, kColumns, 2, kSideTiles, 1> {
  struct Stage {
    LeftTile<T, kStepK> d_out[kRows / kBoxCols], slope[kRows / kBoxCols];
    RightTile<T, kColumns> x;
  };
};

/// The Work: [dW1 dW2]^T = [dS dV]^T times x or y, both halves below each other. Clusters divide
/// the rows of x among them, `slices` for each tile, and leave their sums in memory, as
/// add_weight_slices() reads them. With bias_partials the sums of the rows of dS^T and dV^T, too.
template <class Tile_, typename T>
struct WeightGradients {
  using Tile = Tile_;
  using Stage = typename Tile::Stage;
  using Sum = typename Tile::TileSum;
  using Shared = ProductShared<Tile>;
  static constexpr int kConsumers = Tile::kConsumers;
  static constexpr int kProducerRegisters = kConsumers == 1 ? 0 : 24;
  static constexpr int kConsumerRegisters = kConsumers == 1 ? 0 : 240;
  static constexpr bool kFetchesFirst = true;
  Factor<> d_out;
  Factor<2> slopes, inputs;
  Halves halves;
  int steps, tile_cols, tiles, slices;
  float* partials;       ///< (slices, tiles, blocks of a cluster, consumers, a thread's sums)
  float* bias_partials;  ///< (slices, rows of all tiles), or null

#if HOPPER_CODE
  using Grid = BlockGrid<Tile::kStack, Tile::kSide>;

  /// Where a block's tile begins, and which steps are its slice.
  struct Place {
    int tile, slice, row, col, begin, end;

    __device__ Place(const WeightGradients& of, const Grid& grid)
        : tile(grid.cluster % of.tiles),
          slice(grid.cluster / of.tiles),
          row((tile / of.tile_cols * Tile::kStack + grid.stack) * Tile::BM),
          col((tile % of.tile_cols * Tile::kSide + grid.side) * Tile::BN),
          begin(static_cast<int>(int64_t{of.steps} * slice / of.slices)),
          end(static_cast<int>(int64_t{of.steps} * (slice + 1) / of.slices)) {}
  };

  class Copies {
   public:
    __device__ Copies(const WeightGradients& of, const Grid& blocks)
        : all(of), grid(blocks), at(of, blocks), step(at.begin - 1) {}
    __device__ bool next() { return ++step < at.end; }
    template <bool kAlone = false>
    __device__ void load(Stage& stage, Barrier* arrived) const {
      const int half = all.halves.half(at.row), row = all.halves.within(at.row), k = kStepK * step;
      // Blocks beside each other have the same hidden columns: each fetches some boxes for both.
#pragma unroll
      for (int i = 0; i < Tile::BM / kBoxCols; ++i) {
        if (!kAlone && i % Tile::kSide != grid.side) continue;
        const auto fetch = [&](T* to, const CUtensorMap* map) {
          if constexpr (kAlone || Tile::kSide == 1) {
            tensor_load(to, map, k, row + kBoxCols * i, arrived);
          } else {
            tensor_load_multicast(to, map, k, row + kBoxCols * i, arrived, grid.beside());
          }
        };
        fetch(stage.d_out[i].row(0), &all.d_out.maps[0]);
        fetch(stage.slope[i].row(0), &all.slopes.maps[half]);
      }
      grid.template load<kAlone>(stage.x, &all.inputs.maps[half], at.col, k, arrived);
    }
    __device__ void end() const {}

   private:
    const WeightGradients& all;
    const Grid& grid;
    const Place at;
    int step;
  };

  class Results {
   public:
    __device__ Results(const WeightGradients& of, Shared&, const Grid& blocks, int number)
        : all(of),
          grid(blocks),
          at(of, blocks),
          consumer(number),
          rows(of.bias_partials != nullptr && at.col == 0) {}
    __device__ bool next() {
      const bool first = !done;
      done = true;
      return first;
    }
    template <class Reader>
    __device__ void multiply(Sum& sum, Reader& reader) {
      reader.template take_ahead<LeftFragments<T>>(
          at.end - at.begin,
          [&](LeftFragments<T>& to, const Stage& stage) {
            to = multiplied(stage.d_out[consumer].load_transposed_fragments(),
                            stage.slope[consumer].load_transposed_fragments());
            rows.add(to);
          },
          [&](const LeftFragments<T>& left, const Stage& stage, bool add) {
            sum.start_product(left, stage.x, add);
          });
    }
    __device__ void store(const Sum& sum) const {
      constexpr int kFours = Sum::size() / 4;
      const int64_t block = (int64_t{at.slice} * all.tiles + at.tile) * Tile::kBlocks + grid.rank;
      leave_sum(sum, reinterpret_cast<float4*>(all.partials) +
                         (block * kConsumers + consumer) * kFours * 128 + threadIdx.x % 128);
      rows.leave(all.bias_partials + int64_t{at.slice} * 2 * all.halves.begin + at.row +
                 Tile::row_of(consumer));
    }
    __device__ void end() const {}

   private:
    const WeightGradients& all;
    const Grid& grid;
    const Place at;
    const int consumer;
    bool done = false;
    RowSums<T> rows;
  };
#endif
};

// ---- Backward: all gradients at once ------------------------------------------------------------

/// Of at most 64 hidden columns and 128 channels. A stage has 64 rows of all that is read.
template <typename T>
struct SmallTile : TileShape<T, 64, 128, 1, 1, 1>, Warpgroups<2> {
  static constexpr int kOutRows = 64;
  using TileSum = Sum<128>;
  struct Stage {
    LeftTile<T, kStepK> d_out, slopes[2];
    RightTile<T, 128> inputs[2];
  };
};

/// The Work where weights are so few that a block holds them all, and the sums of dW1 and dW2 as
/// well. One consumer has x, the other one y. Of 64 rows after 64 it multiplies dS by W1^T, and
/// dS^T by x: so everything is read once. Blocks leave the sums of dW1^T and dW2^T in memory, as
/// WeightGradients does, each those of a slice.
template <typename T>
struct SmallGradients {
  using Tile = SmallTile<T>;
  using Stage = typename Tile::Stage;
  using Sum = typename Tile::TileSum;
  struct Shared : ProductShared<Tile> {
    RightTile<T, 128> weights[2];  ///< W1^T and W2^T
  };
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr bool kFetchesFirst = true;
  Factor<> d_out;
  Factor<2> slopes, inputs, results;
  const T* weights[2];  ///< (channels, hidden)
  int channels[2], hidden, tiles;
  float* partials;       ///< (blocks, 2, a thread's sums)
  float* bias_partials;  ///< (blocks, 2, 64), or null

#if HOPPER_CODE
  using Grid = BlockGrid<1, 1>;

  class Copies {
   public:
    __device__ Copies(const SmallGradients& of, const Grid& blocks)
        : all(of), grid(blocks), tile(blocks.cluster - blocks.clusters) {}
    __device__ bool next() { return (tile += grid.clusters) < all.tiles; }
    template <bool kAlone = false>
    __device__ void load(Stage& stage, Barrier* arrived) const {
      const int row = kStepK * tile;
      tensor_load(stage.d_out.row(0), &all.d_out.maps[0], row, 0, arrived);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        tensor_load(stage.slopes[i].row(0), &all.slopes.maps[i], row, 0, arrived);
        grid.template load<kAlone>(stage.inputs[i], &all.inputs.maps[i], 0, row, arrived);
      }
    }
    __device__ void end() const {}

   private:
    const SmallGradients& all;
    const Grid& grid;
    int tile;
  };

  class Results {
   public:
    __device__ Results(const SmallGradients& of, Shared& memory, const Grid& blocks, int number)
        : all(of),
          shared(memory),
          grid(blocks),
          consumer(number),
          out{memory.out[number], number},
          rows(of.bias_partials != nullptr) {}
    __device__ bool next() {
      const bool first = !done;
      done = true;
      return first;
    }
    template <class Reader>
    __device__ void multiply(Sum& of_weights, Reader& reader) {
      load_weights();
      for (int tile = grid.cluster; tile < all.tiles; tile += grid.clusters) {
        const Stage& stage = reader.wait();
        const LeftTile<T, kStepK>& slopes = stage.slopes[consumer];
        const LeftFragments<T> d =
            multiplied(stage.d_out.load_fragments(), slopes.load_fragments());
        const LeftFragments<T> turned =
            multiplied(stage.d_out.load_transposed_fragments(), slopes.load_transposed_fragments());
        rows.add(turned);
        Sum of_input;
        of_input.start_product(d, shared.weights[consumer], false);
        reader.take([&](const Stage& same, bool add) {
          of_weights.start_product(turned, same.inputs[consumer], add);
        });
        wgmma_wait<0>();
        store_input(of_input, kStepK * tile);
      }
    }
    __device__ void store(const Sum& of_weights) const {
      const int64_t block = 2 * grid.cluster + consumer;
      leave_sum(of_weights, reinterpret_cast<float4*>(all.partials) +
                                block * Sum::size() / 4 * 128 + threadIdx.x % 128);
      rows.leave(all.bias_partials + 64 * block);
    }
    __device__ void end() const { out.wait(); }

   private:
    /// The consumer's weights, transposed; what they do not fill becomes 0.
    __device__ void load_weights() const {
      const T* const from = all.weights[consumer];
      for (int i = threadIdx.x % 128; i < 64 * 128; i += 128) {
        const int h = i % 64, k = i / 64;
        const bool inside = h < all.hidden && k < all.channels[consumer];
        shared.weights[consumer].boxes[k / 64].elements[swizzled(h, k % 64 / 8) + k % 8] =
            inside ? from[k * all.hidden + h] : T();
      }
      shared_fence();
      out.meet();
    }
    __device__ void store_input(const Sum& sum, int row) const {
      auto& box = out.boxes[0];
#pragma unroll
      for (int col = 0; col < 128; col += kBoxCols) {
        out.wait();
        sum.store(box, col, [&](int i) { return sum.elements[i]; });
        shared_fence();
        out.meet();
        if (warp_of_block() % 4 == 0 && elect_one()) {
          tensor_store(&all.results.maps[consumer], row, col, box.elements);
          tensor_store_commit();
        }
      }
    }

    const SmallGradients& all;
    Shared& shared;
    const Grid& grid;
    const int consumer;
    const Outbox<T, 1, 64> out;
    bool done = false;
    RowSums<T> rows;
  };
#endif
};

// ---- Backward: the slices of the weights' gradients, and all together ---------------------------

/// Where the slices' sums go.
template <typename T>
struct WeightSlices {
  const float *partials, *bias_partials;
  int slices, tile_cols, begin_of_second;
  int hidden, channels[2];
  T *d_W[2], *d_b[2];  ///< of a bias that there is not: null
  int64_t fours;       ///< of a slice: groups of four sums
};

inline constexpr int kSliceThreads = 256;

/// dW1 and dW2, and the gradients of the biases. A block has some groups of four sums beside each
/// other, blockDim.x of them. Of each, blockDim.y threads add up every so many-th slice, and one of
/// them what these have found: always in the same order. A cluster had kStack by kSide tiles of 64
/// kConsumers rows and kColumns columns.
template <typename T, int kColumns, int kConsumers, int kStack, int kSide>
__global__ void __launch_bounds__(kSliceThreads) add_weight_slices(const WeightSlices<T> in) {
  __shared__ float4 found[kSliceThreads];
  const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const bool is_bias = at >= in.fours;  // of the row [db1 db2]: four columns each
  const int64_t own = is_bias ? at - in.fours : at;
  const bool inside = !is_bias || (in.bias_partials != nullptr && 2 * own < in.begin_of_second);
  const auto* const from =
      reinterpret_cast<const float4*>(is_bias ? in.bias_partials : in.partials) + own;
  const int64_t stride = is_bias ? in.begin_of_second / 2 : in.fours;
  float4 sum = {};
  if (inside) {
#pragma unroll 8
    for (int slice = threadIdx.y; slice < in.slices; slice += blockDim.y) {
      const float4 four = from[slice * stride];
      sum.x += four.x, sum.y += four.y, sum.z += four.z, sum.w += four.w;
    }
  }
  found[threadIdx.y * blockDim.x + threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || !inside) return;
  for (unsigned i = 1; i < blockDim.y; ++i) {
    const float4 other = found[i * blockDim.x + threadIdx.x];
    sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
  }
  if (is_bias) {
    const int half = 4 * own >= in.begin_of_second;
    const int col = static_cast<int>(4 * own) - half * in.begin_of_second;
    T* const to = half == 0 ? in.d_b[0] : in.d_b[1];
    if (to == nullptr) return;
    if (col < in.hidden) to[col] = static_cast<T>(sum.x);
    if (col + 1 < in.hidden) to[col + 1] = static_cast<T>(sum.y);
    if (col + 2 < in.hidden) to[col + 2] = static_cast<T>(sum.z);
    if (col + 3 < in.hidden) to[col + 3] = static_cast<T>(sum.w);
    return;
  }
  // Where these four are: see leave_sum() and Sum.
  constexpr int kFours = kColumns / 8;
  const int thread = static_cast<int>(own % 128), i = static_cast<int>(own / 128 % kFours);
  const int warpgroup = static_cast<int>(own / 128 / kFours);  // of all tiles
  const int block = warpgroup / kConsumers, tile = block / (kStack * kSide);
  const int row =
      ((tile / in.tile_cols * kStack + block % kStack) * kConsumers + warpgroup % kConsumers) * 64 +
      thread / 32 * 16 + thread % 32 / 4;
  const int col =
      (tile % in.tile_cols * kSide + block / kStack % kSide) * kColumns + 8 * i + thread % 4 * 2;
  const int half = row >= in.begin_of_second, h = row - half * in.begin_of_second;
  T* const to = half == 0 ? in.d_W[0] : in.d_W[1];
  const int channels = half == 0 ? in.channels[0] : in.channels[1];
  const auto put = [&](int below, int beside, float value) {
    if (h + below < in.hidden && col + beside < channels) {
      to[int64_t{col + beside} * in.hidden + h + below] = static_cast<T>(value);
    }
  };
  put(0, 0, sum.x), put(0, 1, sum.y), put(8, 0, sum.z), put(8, 1, sum.w);
}

/// What backward reads and writes, where all rows are aligned to 16 bytes, and how it is launched.
/// Where there are more than 256 channels a cluster has tiles of weights side by side, which share
/// d_out and the slopes.
template <typename T>
class KeptBackward {
 public:
  KeptBackward(const Caller& caller, const GatingMemory<T>& of, const ValueInput<T>& value,
               const KeptSlopes<T>& kept, const GatingGradients<T>& d, const GatingShape& shape)
      : stream_(caller.stream),
        memory_(of),
        d_(d),
        M(shape.rows),
        H(shape.hidden),
        channels_{shape.channels, value.channels},
        d_out_(caller.workspace, d.d_out, M, H, of.out_stride),
        slopes_{{caller.workspace, kept.s_slopes, M, H}, {caller.workspace, kept.v_slopes, M, H}},
        inputs_{{caller.workspace, of.x, M, shape.channels, of.x_stride},
                {caller.workspace, value.y, M, value.channels, value.stride}},
        turned_{caller.workspace.template any<T>(shape.channels * H),
                caller.workspace.template any<T>(value.channels * H)} {
    sums_ = caller.workspace.template any<float>(is_small()  ? floats_of_small()
                                                 : is_wide() ? floats<2>()
                                                             : floats<1>());
  }

  /// Whether that suits the layer: no rows have to be copied, tiles can be counted, and the weights
  /// have so few tiles that it pays to divide the rows.
  static bool suits(const GatingShape& shape, int64_t value_channels) {
    const int64_t channels = std::max(shape.channels, value_channels);
    const auto tiles = [](int64_t rows, int64_t cols) {
      return ceil_div(2 * rows + 256, int64_t{256}) * ceil_div(cols, int64_t{128});
    };
    return (shape.channels | value_channels | shape.hidden) % 8 == 0 &&
           shape.rows <= int64_t{1} << 29 && tiles(shape.rows, channels) <= Timetable::kMostTiles &&
           tiles(shape.hidden, channels) <= multiprocessors() / 2;
  }

  void launch() const {
    if (is_small()) return small_gradients();
    turn(memory_.W1, 0);
    turn(memory_.W2, 1);
    input_gradients();
    is_wide() ? weight_gradients<WeightTile<2>>() : weight_gradients<WeightTile<1>>();
  }

 private:
  using InputTile = InputTiles<T, 128, 256, 2>;
  template <int kSide>
  using WeightTile = WeightTiles<T, 128, 256, kSide>;

  int64_t most_channels() const { return std::max(channels_[0], channels_[1]); }
  bool is_wide() const { return most_channels() > InputTile::BN; }
  bool is_small() const { return most_channels() <= SmallTile<T>::BN && H <= SmallTile<T>::BM; }

  void turn(const Memory<T>& W, int i) const {
    product::launch_transpose<T>({W, channels_[i], H, H},
                                 {turned_[i], H, channels_[i], channels_[i]}, stream_);
  }
  CUtensorMap turned_map(int i) const {
    return tensor_map<T>(turned_[i].data(), static_cast<int>(H), static_cast<int>(channels_[i]),
                         InputTile::kRowsB, false, 0, Reads::often);
  }

  CUtensorMap result_map(const Memory<T>& of, int i) const {
    return tensor_map<T>(of.data(), static_cast<int>(M), static_cast<int>(channels_[i]), 64, false,
                         0);
  }

  void input_gradients() const {
    using Tile = InputTile;
    using Work = InputGradients<Tile, T>;
    constexpr size_t kBytes = sizeof(ProductShared<Tile>);
    const Halves halves = Halves::of<Tile>(M);
    const ProductShape shape{2 * halves.begin, static_cast<int>(most_channels()),
                             static_cast<int>(H)};
    const int64_t tiles = Schedule<Tile>::kTile.tiles_of(shape);
    const int clusters = static_cast<int>(persistent(tiles, clusters_that_fit_once<Work>()));
    const Work work{
        {{{d_out_.map(Tile::kRowsA)}}, {}, {}, Schedule<Tile>(shape, clusters, false), {}},
        {{turned_map(0), turned_map(1)}},
        {{slopes_[0].map(Tile::kRowsA), slopes_[1].map(Tile::kRowsA)}},
        {{result_map(d_.d_x, 0), result_map(*d_.d_y, 1)}},
        halves};
    allow_shared_bytes(operators::product::product<Work>, kBytes);
    launch_clusters_on(stream_, operators::product::product<Work>, 1, false,
                       clusters * Tile::kBlocks, Tile::kThreads, kBytes, work);
  }

  /// How dW1 and dW2 are divided into tiles and slices.
  template <class Tile>
  struct WeightPlan {
    Halves halves;
    int steps, tile_cols, tiles, slices;

    explicit WeightPlan(const KeptBackward& of)
        : halves(Halves::of<Tile>(of.H)),
          steps(static_cast<int>(ceil_div(of.M, int64_t{kStepK}))),
          tile_cols(static_cast<int>(ceil_div(of.most_channels(), int64_t{Schedule<Tile>::kCols}))),
          tiles(2 * halves.begin / Schedule<Tile>::kRows * tile_cols),
          slices(std::clamp(clusters_that_fit_once<WeightGradients<Tile, T>>() / tiles, 1,
                            ceil_div(steps, kLeastSteps))) {}
    int64_t fours() const {
      return int64_t{tiles} * Schedule<Tile>::kRows * Schedule<Tile>::kCols / 4;
    }
  };
  template <int kSide>
  size_t floats() const {
    const WeightPlan<WeightTile<kSide>> plan(*this);
    return plan.slices * static_cast<size_t>(4 * plan.fours() + 2 * plan.halves.begin);
  }
  /// Behind the slices of the weights' sums those of the biases'; null where there is no bias.
  float* of_biases(int64_t floats_of_weights) const {
    const bool wanted = d_.d_b1.data() != nullptr || d_.d_b2.data() != nullptr;
    return wanted ? sums_->data() + floats_of_weights : nullptr;
  }

  template <class Tile>
  void weight_gradients() const {
    using Work = WeightGradients<Tile, T>;
    constexpr size_t kBytes = sizeof(ProductShared<Tile>);
    const WeightPlan<Tile> plan(*this);
    float* const biases = of_biases(plan.slices * 4 * plan.fours());
    const Work work{{{d_out_.map(kStepK)}},
                    {{slopes_[0].map(kStepK), slopes_[1].map(kStepK)}},
                    {{inputs_[0].map(Tile::kRowsB), inputs_[1].map(Tile::kRowsB)}},
                    plan.halves,
                    plan.steps,
                    plan.tile_cols,
                    plan.tiles,
                    plan.slices,
                    sums_->data(),
                    biases};
    allow_shared_bytes(operators::product::product<Work>, kBytes);
    launch_clusters_on(stream_, operators::product::product<Work>, 1, false,
                       plan.tiles * plan.slices * Tile::kBlocks, Tile::kThreads, kBytes, work);
    add_slices<Tile::BN, Tile::kConsumers, Tile::kStack, Tile::kSide>(
        {biases, plan.slices, plan.tile_cols, plan.halves.begin, plan.fours()});
  }

  int blocks_of_small() const {
    return static_cast<int>(std::min<int64_t>(ceil_div(M, int64_t{kStepK}), multiprocessors()));
  }
  static constexpr int64_t kSmallSums = 2 * 64 * 128;  ///< of a block
  size_t floats_of_small() const { return blocks_of_small() * size_t{kSmallSums + 2 * 64}; }

  void small_gradients() const {
    using Work = SmallGradients<T>;
    constexpr size_t kBytes = sizeof(typename Work::Shared);
    const int blocks = blocks_of_small();
    float* const biases = of_biases(blocks * kSmallSums);
    const Work work{{{d_out_.map(kStepK)}},
                    {{slopes_[0].map(kStepK), slopes_[1].map(kStepK)}},
                    {{inputs_[0].map(kStepK), inputs_[1].map(kStepK)}},
                    {{result_map(d_.d_x, 0), result_map(*d_.d_y, 1)}},
                    {memory_.W1, memory_.W2},
                    {static_cast<int>(channels_[0]), static_cast<int>(channels_[1])},
                    static_cast<int>(H),
                    static_cast<int>(ceil_div(M, int64_t{kStepK})),
                    sums_->data(),
                    biases};
    allow_shared_bytes(operators::product::product<Work>, kBytes);
    launch_clusters_on(stream_, operators::product::product<Work>, 1, false, blocks,
                       SmallTile<T>::kThreads, kBytes, work);
    add_slices<128, 1, 1, 1>({biases, blocks, 1, 64, kSmallSums / 4});
  }

  struct Slices {
    const float* biases;
    int count, tile_cols, begin_of_second;
    int64_t fours;
  };
  template <int kColumns, int kConsumers, int kStack, int kSideTiles>
  void add_slices(const Slices& of) const {
    const WeightSlices<T> slices{sums_->data(),
                                 of.biases,
                                 of.count,
                                 of.tile_cols,
                                 of.begin_of_second,
                                 static_cast<int>(H),
                                 {static_cast<int>(channels_[0]), static_cast<int>(channels_[1])},
                                 {d_.d_W1, d_.d_W2},
                                 {d_.d_b1, d_.d_b2},
                                 of.fours};
    const int64_t threads = of.fours + (of.biases != nullptr ? of.begin_of_second / 2 : 0);
    const int across = of.count > 16 ? 32 : kSliceThreads;  // of many slices eight at a time
    add_weight_slices<T, kColumns, kConsumers, kStack, kSideTiles>
        <<<blocks_for(threads, across), dim3(across, kSliceThreads / across), 0, stream_>>>(slices);
  }

  cudaStream_t stream_;
  GatingMemory<T> memory_;
  GatingGradients<T> d_;
  int64_t M, H, channels_[2];
  AlignedRows<T> d_out_, slopes_[2], inputs_[2];
  Memory<T> turned_[2];
  std::optional<Memory<float>> sums_;
};

/// Backward's one way; none where it does not suit.
template <typename T>
std::vector<Way> kept_gradients(const Caller& caller, const GatingMemory<T>& memory,
                                const ValueInput<T>& value, const KeptSlopes<T>& kept,
                                const GatingGradients<T>& d, const GatingShape& shape) {
  if (!is_hopper() || !KeptBackward<T>::suits(shape, value.channels)) return {};
  const auto of = std::make_shared<const KeptBackward<T>>(caller, memory, value, kept, d, shape);
  return {{"four products by slopes that are kept", 0, [of] { of->launch(); },
           sizeof(ProductShared<InputTiles<T, 128, 256, 2>>)}};
}

}  // namespace operators::gating
