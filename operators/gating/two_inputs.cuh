// The gated layer whose gates and values have an input each:
//
//     out = gate(x W1 + b1) * (y W2 + b2)     or, where values have the gate's function, too,
//     out = gate(x W1 + b1) * gate(y W2 + b2)
//
//     x (M, K), W1 (K, H), y (M, L), W2 (L, H), out (M, H): fp16 or bf16; else as in layer.cuh
//
// The left factor of gates is another one than that of values, and the sums may have different
// lengths. So a tile of x [W1 W2] as in layer.cuh there is not. Instead a tile of out is two
// products, one after the other: first the steps of x W1, then those of y W2, each into half of a
// thread's registers. All steps are in one pipeline: while the last of x are multiplied, the first
// of y are on their way. Gate and value of an element are in one thread again, and the epilogue is
// that of layer.cuh. A step reads a tile of x and one of a single weight, as a product alone does:
// what is saved is that two results leave, and come back.
#pragma once

#include <climits>
#include <memory>
#include <string>
#include <vector>

#include "operators/gating/layer.cuh"

namespace operators::gating {

/// What both kernels read and write. Rows that are not aligned are copied before.
template <typename T>
struct PairOperands {
  Caller caller;
  GatingMemory<T> memory;
  AlignedRows<T> x, y, W1, W2;
  bool gated_values;

  PairOperands(const Caller& by, const GatingMemory<T>& of, const ValueInput<T>& value,
               const GatingShape& shape)
      : caller(by),
        memory(of),
        x(by.workspace, of.x, shape.rows, shape.channels, of.x_stride),
        y(by.workspace, value.y, shape.rows, value.channels, value.stride),
        W1(by.workspace, of.W1, shape.channels, shape.hidden),
        W2(by.workspace, of.W2, value.channels, shape.hidden),
        gated_values(value.gated) {}

  /// Launches the kernel that copies, if there is something to copy. Returns whether.
  bool align() const {
    return launch_align_rows<T, 4>({x.job(), y.job(), W1.job(), W2.job()}, caller.stream);
  }
  /// Microseconds of that.
  double aligning() const {
    const double bytes = bytes_copied(x) + bytes_copied(y) + bytes_copied(W1) + bytes_copied(W2);
    return bytes > 0 ? kNextLaunch + 2 * bytes / memory_rate() : 0;
  }
};

// ---- Hopper -------------------------------------------------------------------------------------

/// Tiles of out, kRows by kColumns, of which each consumer has 64 rows: gates and values of all
/// columns. A stage has 64 of the depth of one of the two products.
template <typename T, int kRows, int kColumns, int kStackedTiles, int kSideTiles, int kOutBoxes>
struct PairTiles : TileShape<T, kRows, kColumns, kStackedTiles, kSideTiles, kOutBoxes>,
                   Warpgroups<kRows / 64> {
  static constexpr int kOutRows = 64;
  static constexpr int kLinesRead = Warpgroups<kRows / 64>::kConsumers * (64 + kColumns);  // a step
  using TileSum = Sum<2 * kColumns>;

  __host__ __device__ static constexpr int row_of(int consumer) { return 64 * consumer; }
  __host__ __device__ static constexpr int col_of(int) { return 0; }
};

/// The epilogue: a sum has the gates of a tile in the left half of its columns, the values in the
/// right one.
template <typename T>
struct StorePair : StoreGated<T, false> {
  bool gated_values;

#if HOPPER_CODE
  template <int kCols, int kBoxes>
  __device__ void operator()(Sum<kCols>& sum, int row, int col,
                             const Outbox<T, kBoxes>& box) const {
    this->out.template store<kCols / 2>(row, col, box, [&](Box<T, 64>& to, int first) {
      typename StoreGated<T, false>::Biases biases(*this, col + first);
      if (gated_values) biases.gate_values(this->gate, sum, first);
      if (this->gate != Gate::sigmoid) biases.make_sigmoids(this->gate, sum, first);
      biases.store(sum, first, to);
    });
  }
#endif
};

/// The Work of both products (see product.cuh). Of the depth the first `gate_steps` steps are x
/// W1's, the others y W2's; each ends with zeros.
template <class Tile_, class Epilogue>
struct PairProduct : MatrixProduct<Tile_, Epilogue> {
  using Whole = MatrixProduct<Tile_, Epilogue>;
  using Tile = Tile_;
  using typename Whole::Shared, typename Whole::Stage, typename Whole::Sum;
  Factor<> Y;
  int gate_steps;

#if HOPPER_CODE
  using typename Whole::Grid;

  class Copies : public Whole::Copies {
   public:
    __device__ Copies(const PairProduct& of, const Grid& blocks)
        : Whole::Copies(of, blocks, true), pair(of) {}
    template <bool kAlone = false>
    __device__ void load(Stage& stage, Barrier* arrived) const {
      const int turn = kStepK * pair.gate_steps;
      const bool of_gates = this->k < turn;
      const int k = of_gates ? this->k : this->k - turn;
      this->grid.template load<kAlone>(stage.a, of_gates ? &pair.A.maps[0] : &pair.Y.maps[0],
                                       this->at.row, k, arrived);
      this->grid.template load<kAlone>(stage.b, &pair.B.maps[of_gates ? 0 : 1], this->at.col, k,
                                       arrived);
    }

   private:
    const PairProduct& pair;
  };

  class Results : public Whole::Results {
   public:
    __device__ Results(const PairProduct& of, Shared& memory, const Grid& blocks, int number)
        : Whole::Results(of, memory, blocks, number), gate_steps(of.gate_steps) {}
    template <class Reader>
    __device__ void multiply(Sum& sum, Reader& reader) const {
      const Piece& piece = this->piece;
      const int turn = min(max(piece.begin, gate_steps), piece.end);
      if (turn == piece.begin) clear<0>(sum);  // a half without any steps
      if (turn == piece.end) clear<1>(sum);
      multiply_half<0>(sum, reader, piece.begin, turn);
      wgmma_wait<0>();  // else ptxas cannot tell the halves' products apart
      multiply_half<1>(sum, reader, turn, piece.end);
      this->out.wait();  // while the last products are on their way
    }

   private:
    template <int kHalf>
    __device__ __forceinline__ static auto& half_of(Sum& sum) {
      return columns_of<kHalf * Sum::size() / 2, Sum::size() / 2>(sum.elements);
    }
    template <int kHalf>
    __device__ __forceinline__ static void clear(Sum& sum) {
#pragma unroll
      for (float& element : half_of<kHalf>(sum)) element = 0;
    }
    /// The steps of a piece that belong to one half of a sum.
    template <int kHalf, class Reader>
    __device__ __forceinline__ void multiply_half(Sum& sum, Reader& reader, int begin,
                                                  int end) const {
      for (int step = begin; step < end; ++step) {
        reader.take([&](const Stage& stage, bool) {
          wgmma_fence();
#pragma unroll
          for (int slice = 0; slice < kSlices; ++slice) {
            multiply_slice(half_of<kHalf>(sum), stage.a.rows(Tile::row_of(this->consumer)), stage.b,
                           slice, step > begin || slice > 0);
          }
          wgmma_commit();
        });
      }
    }

    const int gate_steps;
  };
#endif
};

/// What a step and the end of a tile of gates and values cost a multiprocessor: see
/// kGatedTileCosts, from which these are taken. Here a step has one weight's columns, and the end
/// twice as many.
constexpr GatedTileCost cost_of_pair(int rows, int cols) {
  const double step = rows * cols == 128 * 128 ? 570 : 375;
  return {rows, cols, step, cost_of_tile(rows, 2 * cols).finish};
}

/// The ways to compute both products in one kernel on Hopper.
template <typename T>
class GatedPair {
 public:
  explicit GatedPair(const PairOperands<T>& of)
      : of_(of),
        exchange_(of.caller.workspace),
        gate_steps_(ceil_div(of.x.cols, kStepK)),
        shape_{of.x.rows, of.W1.cols, kStepK * (gate_steps_ + ceil_div(of.y.cols, kStepK))} {}

  std::vector<Way> ways() {
    Ways ways(of_.caller.search);
    const auto self = std::make_shared<const GatedPair>(*this);
    offer<PairTiles<T, 128, 128, 2, 1, 2>>(ways, self);
    offer<PairTiles<T, 128, 64, 2, 1, 1>>(ways, self);
    offer<PairTiles<T, 64, 128, 2, 1, 1>>(ways, self);
    exchange_.allocate(of_.caller.workspace);
    std::vector<Way> found = ways.found();
    for (Way& way : found) way.microseconds += of_.aligning();
    return found;
  }

 private:
  template <class Tile>
  void offer(Ways& ways, const std::shared_ptr<const GatedPair>& self) {
    WorkFacts facts = facts_of<PairProduct<Tile, StorePair<T>>>();
    facts.stages = ProductShared<Tile>::kStages;
    facts.before = "two inputs; ";
    const LaunchOf<GatedPair, ProductPlan> launch = {
        self, [](const GatedPair& of, const ProductPlan& plan) { of.launch<Tile>(plan); }};
    offer_plans(
        ways, exchange_, facts, shape_,
        [shape = shape_](const Division& division) {
          return gated_microseconds<Tile, T>(cost_of_pair(Tile::BM, Tile::BN),
                                             1.0 * shape.depth / kStepK, shape,
                                             1.0 * shape.rows * shape.cols, division);
        },
        launch);
  }

  template <class Tile>
  void launch(const ProductPlan& plan) const {
    using Work = PairProduct<Tile, StorePair<T>>;
    constexpr size_t kBytes = sizeof(ProductShared<Tile>);
    const GatingMemory<T>& memory = of_.memory;
    const T *b1 = memory.b1, *b2 = memory.b2, *weights = memory.W1;
    Exchange exchange = exchange_.exchange(plan.shares);
    const Work work{
        {{{of_.x.map(Tile::kRowsA)}},
         {{of_.W1.map(Tile::kRowsB), of_.W2.map(Tile::kRowsB)}},
         {{rounded_to<T>(memory.out, of_.x.rows, of_.W1.cols, 64, memory.out_stride),
           b1 ? b1 : weights, b2 ? b2 : weights, b1 != nullptr, b2 != nullptr, memory.gate},
          of_.gated_values},
         Schedule<Tile>(shape_, plan.clusters, plan.shares),
         exchange},
        {{of_.y.map(Tile::kRowsA)}},
        gate_steps_};
    const bool early = of_.align() || work.exchange.ended;  // after copies, or zeros
    allow_shared_bytes(operators::product::product<Work>, kBytes);
    launch_clusters_on(of_.caller.stream, operators::product::product<Work>, 1, early,
                       plan.clusters * Tile::kBlocks, Tile::kThreads, kBytes, work);
  }

  PairOperands<T> of_;
  ExchangeMemory exchange_;
  int gate_steps_;
  ProductShape shape_;  // of out, with the steps of both products
};

// ---- Other GPUs ---------------------------------------------------------------------------------

/// Some columns of a warp's sums, from number kFirst of their eights on.
template <int kFirst, int kRows16, int kCols8>
struct ColumnsOf {
  float (&sum)[kRows16][kCols8][4];
  __device__ __forceinline__ float (*operator[](int row) const)[4] { return sum[row] + kFirst; }
};

/// The copies of a tile of out: first those of x W1, then those of y W2.
template <class Tile, typename T>
class PairCopies {
 public:
  __device__ PairCopies(const MmaFactors<T, 1>& gates, const MmaFactors<T, 1>& values, int row0,
                        int col0)
      : then(values), row0(row0), col0(col0) {
    copies.begin(gates, row0, col0, 0, gates.depth);
  }
  template <int kPart, int kParts>
  __device__ __forceinline__ void start(T* stage) {
    copies.template start<kPart, kParts>(stage);
    if (kPart + 1 < kParts || !copies.done() || !of_gates) return;
    of_gates = false;
    copies.begin(then, row0, col0, 0, then.depth);
  }

 private:
  const MmaFactors<T, 1>& then;
  const int row0, col0;
  bool of_gates = true;
  MmaCopies<Tile, T, 1> copies;
};

/// A block has a tile of out: first the gates' sums, then the values', with the tiles of
/// mma_tiles.cuh for each. finish() is MmaGate.
template <class Tile, typename T>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    mma_pair(const __grid_constant__ MmaFactors<T, 1> gates,
             const __grid_constant__ MmaFactors<T, 1> values,
             const __grid_constant__ MmaGate<T, true> finish) {
  constexpr int kOwn = Tile::WN / 8;
  extern __shared__ __align__(128) char mma_stages[];
  const MmaSlices whole = {1, (gates.depth + Tile::BK - 1) / Tile::BK, 0, nullptr, nullptr};
  const auto item = MmaItems<Tile, T, 1>::place(gates, whole, static_cast<int>(blockIdx.x));
  PairCopies<Tile, T> copies(gates, values, item.row0, item.col0);
  MmaPipeline<Tile, T> pipeline(reinterpret_cast<T*>(mma_stages), copies);
  float sum[Tile::WM / 16][2 * kOwn][4] = {};
  const auto multiply = [&](const MmaFactors<T, 1>& of, auto half_of) {
    pipeline.multiply(copies, (of.depth + Tile::BK - 1) / Tile::BK, half_of);
  };
  multiply(gates, ColumnsOf<0, Tile::WM / 16, 2 * kOwn>{sum});
  multiply(values, ColumnsOf<kOwn, Tile::WM / 16, 2 * kOwn>{sum});
  const int warp = threadIdx.x / 32;
  finish(sum, item.row0 + warp / Tile::kWarpsN * Tile::WM,
         item.col0 + warp % Tile::kWarpsN * Tile::WN);
  copy_async_wait<0>();  // zeros that nobody reads
}

/// The ways to compute the layer of two inputs by mma_pair.
template <typename T>
class PortableGatedPair {
 public:
  explicit PortableGatedPair(const PairOperands<T>& of) : of_(of) {}

  std::vector<Way> ways() const {
    Ways ways(of_.caller.search);
    offer<MmaTile<128, 128, 64, 2, 4, 3, 1>>(ways, 850);
    offer<MmaTile<64, 64, 64, 2, 2, 3, 3>>(ways, 600);
    return ways.found();
  }

 private:
  /// rate: so many multiply-adds of a multiprocessor are counted in a cycle.
  template <class Tile>
  void offer(Ways& ways, double rate) const {
    const AlignedRows<T>&x = of_.x, &y = of_.y;
    const int hidden = of_.W1.cols;
    const int64_t tiles = int64_t{ceil_div(x.rows, Tile::BM)} * ceil_div(hidden, Tile::BN);
    if (Tile::kSharedBytes > most_shared_bytes() || tiles > INT_MAX / 64) return;
    const double steps = ceil_div(x.cols, Tile::BK) + ceil_div(y.cols, Tile::BK);
    const double rounds = std::ceil(static_cast<double>(tiles) / multiprocessors());
    const double moved = sizeof(T) * 1.0 * x.rows * (1.0 * x.cols + y.cols + hidden);
    const double time =
        kFirstLaunch + of_.aligning() +
        std::max(rounds * (steps * Tile::BM * Tile::BN * Tile::BK / rate + 4000) / cycles(),
                 moved / memory_rate());
    const WayId id = way_id({static_cast<int64_t>(Divided::by_mma_sync), Tile::BM, Tile::BN});
    ways.offer(time, id, [&] {
      const std::string name = "two inputs; mma.sync; tile " + std::to_string(Tile::BM) + " x " +
                               std::to_string(Tile::BN) + " x " + std::to_string(Tile::BK);
      return Way{
          name, time,
          [self = *this, tiles] { self.template launch<Tile>(static_cast<unsigned>(tiles)); },
          Tile::kSharedBytes};
    });
  }

  template <class Tile>
  void launch(unsigned tiles) const {
    of_.align();
    const auto factors = [](const AlignedRows<T>& left, const AlignedRows<T>& right) {
      return MmaFactors<T, 1>{left.data(), {right.data()}, left.stride, right.stride,
                              left.rows,   right.cols,     left.cols};
    };
    const GatingMemory<T>& memory = of_.memory;
    const int rows = of_.x.rows, hidden = of_.W1.cols;
    const MmaGate<T, true> finish{
        {memory.out, memory.out_stride != 0 ? memory.out_stride : hidden, rows, hidden},
        memory.b1,
        memory.b2,
        memory.gate,
        of_.gated_values};
    allow_shared_bytes(mma_pair<Tile, T>, Tile::kSharedBytes);
    mma_pair<Tile, T><<<tiles, Tile::kThreads, Tile::kSharedBytes, of_.caller.stream>>>(
        factors(of_.x, of_.W1), factors(of_.y, of_.W2), finish);
  }

  PairOperands<T> of_;
};

/// The ways to compute the layer of two inputs; see gated_layer().
template <typename T>
std::vector<Way> gated_pair(const Caller& caller, const GatingMemory<T>& memory,
                            const ValueInput<T>& value, const GatingShape& shape) {
  const PairOperands<T> of(caller, memory, value, shape);
  return is_hopper() ? GatedPair<T>(of).ways() : PortableGatedPair<T>(of).ways();
}

}  // namespace operators::gating
