// The gated layer of two inputs that keeps what its gradients need, on Hopper:
//
//     out = gate(s) * value(v),  s = x W1 + b1,  v = y W2 + b2, with value(v) = v or gate(v)
//     s_slopes = gate'(s) * value(v),  v_slopes = gate(s) * value'(v)    (M, H), of the type of out
//
// Backward multiplies d_out by these slopes (kept_backward.cuh), element by element. Forward has s
// and v in registers, and writes two tensors more. Without them backward would compute both
// products again, a third of its multiplications.
//
// A tile has three times as many results as in two_inputs.cuh, and their gates take twice as long.
// So that tensor cores have work meanwhile, a tile's gates, functions of x W1, are computed while
// its y W2 is added up, and its results leave while x W1 of the next tile is added up.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "operators/gating/two_inputs.cuh"
#include "operators/gating/unfused.cuh"

namespace operators::gating {

// ---- Forward ------------------------------------------------------------------------------------

/// Tiles of out as PairTiles has them. A consumer's sum has a third part beside gates and values:
/// the slopes.
template <typename T, int kRows, int kColumns, int kOutBoxes>
struct KeptTiles : PairTiles<T, kRows, kColumns, 2, 1, kOutBoxes> {
  using TileSum = Sum<3 * kColumns>;
};

#if HOPPER_CODE
/// A thread's results of a tile in pairs, as Sum::store() has them: of out, s_slopes and v_slopes.
template <typename T, int kCols>
struct PackedResults {
  uint32_t pairs[3][kCols / 4];

  __device__ __forceinline__ void pack(const Sum<3 * kCols>& sum) {
    constexpr int kParts[] = {1, 2, 0};
#pragma unroll
    for (int part = 0; part < 3; ++part) {
      const float* const from = sum.elements + kParts[part] * kCols / 2;
#pragma unroll
      for (int i = 0; i < kCols / 4; ++i) {
        pairs[part][i] = pack2<T>(from[2 * i], from[2 * i + 1]);
      }
    }
  }
  /// Puts 64 columns of a part, from kFirst on, into a box.
  template <int kPart, int kFirst>
  __device__ __forceinline__ void store(Box<T, 64>& box) const {
    const int thread = threadIdx.x % 128;
    const int row = thread / 32 * 16 + thread % 16, piece = thread % 32 / 16;
#pragma unroll
    for (int c = 0; c < kBoxCols; c += 16) {
      const uint32_t* const own = pairs[kPart] + (kFirst + c) / 4;
      const uint32_t registers[4] = {own[0], own[1], own[2], own[3]};
      store_matrices(&box.elements[swizzled(row, c / 8 + piece)], registers);
    }
  }
};
#endif

/// Where the three results of an element go.
template <typename T>
struct StoreKept {
  static constexpr int kRightFactors = 2;
  CUtensorMap maps[3];  ///< of out, s_slopes and v_slopes
  const T *b1, *b2;     ///< may be null
  int cols;
  Gate gate;
  bool gated_values;

#if HOPPER_CODE
  /// Of the bias of one of the inputs those of two neighbouring columns.
  __device__ float2 bias(const T* of, int col) const {
    if (of == nullptr) return {};
    return make_float2(static_cast<float>(of[min(col, cols - 1)]),
                       static_cast<float>(of[min(col + 1, cols - 1)]));
  }

  /// What is done with a thread's sums of gates while those of values grow: elements kFirst to
  /// kFirst + kCount - 1 become gate(s), and the third part their slopes.
  template <int kFirst, int kCount, int kAll>
  __device__ __forceinline__ void gates(Sum<kAll>& sum, int col) const {
    with_gate(gate, [&]<Gate kGate>() {
#pragma unroll
      for (int i = kFirst; i < kFirst + kCount; i += 4) {
        const float2 more = bias(b1, col + Sum<kAll>::col(i));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const GateAt at = gate_nearly_at<kGate>(sum.elements[i + e] + (e % 2 ? more.y : more.x));
          sum.elements[i + e] = at.value;
          sum.elements[kAll / 3 + i + e] = at.slope;
        }
      }
    });
  }

  /// The rest, when the values' sums are complete: all results of a tile, rounded.
  template <int kAll>
  __device__ __forceinline__ void finish(Sum<kAll>& sum, int col,
                                         PackedResults<T, kAll / 3>& to) const {
    gated_values ? with_gate(gate, [&]<Gate kGate>() { finish_with<kGate>(sum, col); })
                 : finish_with<Gate::none>(sum, col);
    to.pack(sum);
  }

  /// Sends box number kBox of a tile that begins at (row, col): of each 64 columns first those of
  /// out, then those of both slopes.
  template <int kBox, int kCols, int kBoxes>
  __device__ __forceinline__ void send(const PackedResults<T, kCols>& results, int row, int col,
                                       const Outbox<T, kBoxes>& box) const {
    constexpr int kPart = kBox % 3, kFirst = kBox / 3 * kBoxCols;
    auto& to = box.boxes[kBox % kBoxes];
    static_assert(kCols / kBoxCols * 3 % kBoxes == 0);  // boxes take turns, from tile to tile, too
    box.template wait<kBoxes - 1>();
    results.template store<kPart, kFirst>(to);
    shared_fence();
    box.meet();
    if (warp_of_block() % 4 == 0 && elect_one()) {
      tensor_store(&maps[kPart], row, col + kFirst, to.elements);
      tensor_store_commit();
    }
  }

 private:
  /// A thread's values become those of out, its gates v_slopes, and their slopes s_slopes.
  template <Gate kValueGate, int kAll>
  __device__ __forceinline__ void finish_with(Sum<kAll>& sum, int col) const {
    constexpr int kPart = kAll / 6;
#pragma unroll
    for (int i = 0; i < kPart; i += 4) {
      const float2 more = bias(b2, col + Sum<kAll>::col(i));
#pragma unroll
      for (int e = i; e < i + 4; ++e) {
        float &own = sum.elements[e], &value = sum.elements[kPart + e];
        const GateAt at = gate_nearly_at<kValueGate>(value + (e % 2 ? more.y : more.x));
        value = own * at.value;
        sum.elements[2 * kPart + e] *= at.value;
        own *= at.slope;
      }
    }
  }
#endif
};

/// The Work: a pair of products (PairProduct) in whole tiles. While the sums of values grow, a
/// consumer makes gates and slopes of those that are complete, a quarter of them a step. And while
/// those of the next tile's gates grow, the results leave, a box a step.
template <class Tile_, typename T>
struct KeptProduct : PairProduct<Tile_, StoreKept<T>> {
  using Tile = Tile_;
  using Whole = MatrixProduct<Tile_, StoreKept<T>>;
  using typename Whole::Shared, typename Whole::Stage, typename Whole::Sum;

#if HOPPER_CODE
  using typename Whole::Grid;

  class Results : public Whole::Results {
   public:
    __device__ Results(const KeptProduct& of, Shared& memory, const Grid& blocks, int number)
        : Whole::Results(of, memory, blocks, number), gate_steps(of.gate_steps) {}
    template <class Reader>
    __device__ void multiply(Sum& sum, Reader& reader) {
      const int steps = this->work.schedule.steps;
      // Sums begin as zeros, since ptxas must not find anything else between products.
#pragma unroll
      for (int i = 0; i < 2 * Sum::size() / 3; ++i) sum.elements[i] = 0;
      for (int step = 0; step < gate_steps; ++step) {
        multiply_part<0>(sum, reader);
        if (full) send_number(step);
      }
      for (int box = gate_steps; full && box < kResultBoxes; ++box) send_number(box);
      wgmma_wait<0>();
      const auto at =
          this->work.schedule.place(this->piece.tile, this->grid.stack, this->grid.side);
      row = at.row + Tile::row_of(this->consumer), col = at.col;
      constexpr int kPart = Sum::size() / 3, kParts = 4, kEach = kPart / kParts;
      const auto gates = [&]<int kAt>() {
        this->work.epilogue.template gates<kAt * kEach, kEach>(sum, col);
      };
      int step = gate_steps;
      if (steps - gate_steps >= kParts) {
        [&]<int... kAt>(std::integer_sequence<int, kAt...>) {
          ((multiply_part<1>(sum, reader), gates.template operator()<kAt>()), ...);
        }
        (std::make_integer_sequence<int, kParts>());
        for (step += kParts; step < steps; ++step) multiply_part<1>(sum, reader);
      } else {
        for (; step < steps; ++step) multiply_part<1>(sum, reader);
        wgmma_wait<0>();
        [&]<int... kAt>(std::integer_sequence<int, kAt...>) {
          (gates.template operator()<kAt>(), ...);
        }
        (std::make_integer_sequence<int, kParts>());
      }
    }
    __device__ void store(Sum& sum) {
      this->work.epilogue.finish(sum, col, results);
      full = true;
    }
    __device__ void end() {
      for (int box = 0; full && box < kResultBoxes; ++box) send_number(box);
      this->out.wait();
    }

   private:
    static constexpr int kResultBoxes = 3 * Tile::BN / kBoxCols;

    /// A box of the tile before. In each case it is known which registers are meant.
    template <int kBox = 0>
    __device__ __forceinline__ void send_number(int box) const {
      if constexpr (kBox < kResultBoxes) {
        if (box == kBox) {
          this->work.epilogue.template send<kBox>(results, row, col, this->out);
        } else {
          send_number<kBox + 1>(box);
        }
      }
    }

    /// A step, for one of the sum's parts.
    template <int kPart, class Reader>
    __device__ __forceinline__ void multiply_part(Sum& sum, Reader& reader) const {
      constexpr int kCount = Sum::size() / 3;
      reader.take([&](const Stage& stage, bool) {
        wgmma_fence();
#pragma unroll
        for (int slice = 0; slice < kSlices; ++slice) {
          multiply_slice(columns_of<kPart * kCount, kCount>(sum.elements),
                         stage.a.rows(Tile::row_of(this->consumer)), stage.b, slice, true);
        }
        wgmma_commit();
      });
    }

    const int gate_steps;
    bool full = false;  ///< there are results of a tile that begins at (row, col)
    int row = 0, col = 0;
    PackedResults<T, Tile::BN> results;
  };
#endif
};

/// Launches forward with whole tiles of kRows x kColumns.
template <class Tile, typename T>
void launch_kept(const PairOperands<T>& of, const KeptSlopes<T>& kept) {
  using Work = KeptProduct<Tile, T>;
  constexpr size_t kBytes = sizeof(ProductShared<Tile>);
  const GatingMemory<T>& memory = of.memory;
  const int rows = of.x.rows, hidden = of.W1.cols, gate_steps = ceil_div(of.x.cols, kStepK);
  const ProductShape shape{rows, hidden, kStepK * (gate_steps + ceil_div(of.y.cols, kStepK))};
  const int64_t tiles = Schedule<Tile>::kTile.tiles_of(shape);
  const int clusters = static_cast<int>(persistent(tiles, clusters_that_fit_once<Work>()));
  const auto to = [&](const Memory<T>& result, int64_t stride) {
    return tensor_map<T>(result.data(), rows, hidden, 64, false, stride);
  };
  const Work work{
      {{{{of.x.map(Tile::kRowsA)}},
        {{of.W1.map(Tile::kRowsB), of.W2.map(Tile::kRowsB)}},
        {{to(memory.out, memory.out_stride), to(kept.s_slopes, 0), to(kept.v_slopes, 0)},
         memory.b1,
         memory.b2,
         hidden,
         memory.gate,
         of.gated_values},
        Schedule<Tile>(shape, clusters, false),
        {}},
       {{of.y.map(Tile::kRowsA)}},
       gate_steps}};
  const bool early = of.align();
  allow_shared_bytes(operators::product::product<Work>, kBytes);
  launch_clusters_on(of.caller.stream, operators::product::product<Work>, 1, early,
                     clusters * Tile::kBlocks, Tile::kThreads, kBytes, work);
}

/// Forward's one way; none on other GPUs, where the copy engine cannot store rows, and where there
/// are more tiles than can be counted.
template <typename T>
std::vector<Way> kept_pair(const Caller& caller, const GatingMemory<T>& memory,
                           const ValueInput<T>& value, const KeptSlopes<T>& kept,
                           const GatingShape& shape) {
  using Wide = KeptTiles<T, 128, 128, 3>;
  using Narrow = KeptTiles<T, 128, 64, 3>;
  const bool narrow = shape.hidden <= Narrow::BN;
  const ProductShape out{static_cast<int>(shape.rows), static_cast<int>(shape.hidden), kStepK};
  const bool counts = Schedule<Narrow>::kTile.tiles_of(out) <= Timetable::kMostTiles;
  if (!is_hopper() || !counts || shape.hidden % 8 != 0) return {};
  const PairOperands<T> of(caller, memory, value, shape);
  return {{narrow ? "two inputs, slopes kept; tile 128 x 64"
                  : "two inputs, slopes kept; tile 128 x 128",
           0, [=] { narrow ? launch_kept<Narrow>(of, kept) : launch_kept<Wide>(of, kept); },
           sizeof(ProductShared<Wide>)}};
}

}  // namespace operators::gating
