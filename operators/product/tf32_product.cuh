// C = A B of fp32 matrices on tensor cores, for any shape: in TF32, or nearly as exact as in fp32,
// each factor as the sum of two numbers in TF32 and so in three products (3xTF32).
//
//     A (rows x depth), B (depth x cols), C (rows x cols): fp32, row-major; dense, or with rows
//     that are a multiple of 4 elements apart
//
// On Hopper it is lesson 3's last product, transposed: C^T = B^T A^T. For in TF32 wgmma takes a
// factor from shared memory only if that is contiguous along k. Rows of A are. B goes through
// registers, as the left factor of the transposed product (TransposedLeftTile). The copy engine
// rounds both on the way, or else the warps beside the thread that copies split A into two tiles,
// and those that multiply split B. Where C has few tiles the product comes in slices (sliced.cuh),
// and where A has few rows B is read once (OneRow). Where rows are not aligned to 16 bytes a kernel
// first copies them into rows that are; or, where rows or columns are few, mma.sync multiplies them
// as they lie (shifted.cuh). In 3xTF32 that way is for aligned rows, too, since there it is faster
// where there is little to multiply. On other GPUs the product is that of portable/tf32.cuh.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "operators/product/plan.cuh"
#include "operators/product/portable/tf32.cuh"
#include "operators/product/shifted.cuh"
#include "operators/product/split_tf32.cuh"
#include "operators/product/tf32.cuh"

namespace operators::product {

using namespace primitives;

/// A block has kRows rows by kCols columns of C, of which each consumer multiplies 64, and a
/// cluster kBesides such tiles beside each other, which share what they copy of A. (Of C^T they
/// are below each other: BM, BN and the place of a tile in a Schedule are those of C^T.)
template <Math kMath, int kRows, int kBesides, int kCols = 128>
struct PlainTf32Tile : Tf32Tile<kRows, kBesides, true, kCols / 64> {
  using Base = Tf32Tile<kRows, kBesides, true, kCols / 64>;
  static constexpr bool kSplit = kMath == Math::split;
  struct Stage {
    ColumnTile<float, kRows> a[kSplit ? 2 : 1];  // and, in 3xTF32, what it lacks
    typename Base::Left b;
  };
  static constexpr int kStages = std::min<int>(8, kSharedRoom / sizeof(Stage));
  struct Shared {
    Pipeline<Stage, kStages> pipeline;
    Barrier split_done[kStages];                ///< of 3xTF32: a stage's rows of A have been split
    unsigned ended[PlainTf32Tile::kConsumers];  ///< see Handover
  };
};

/// The Work of such a product. Its results leave without the copy engine, 8 bytes at a time where
/// c_stride is even: neighbours of a column of C^T.
///
/// Where a box lies outside of a matrix the copy engine writes zeros, and that takes longer than to
/// fetch as many bytes. So at the border of C no box is fetched that lies outside as a whole, and
/// the last rows of A come in a box of their own (A_rest). There the stage keeps old numbers: those
/// of an earlier step, or in the first lap any. They are multiplied, too, but only for elements
/// outside of C, which never reach C.
template <class Tile_>
struct Tf32MatrixProduct {
  using Tile = Tile_;
  using Stage = typename Tile::Stage;
  using Shared = typename Tile::Shared;
  using Sum = typename Tile::TileSum;
  static constexpr int kProducerRegisters = Tile::kConsumers == 1 ? 0 : Tile::kSplit ? 56 : 24;
  static constexpr int kConsumerRegisters = Tile::kConsumers == 1   ? 0
                                            : Tile::kConsumers == 3 ? 160
                                            : Tile::kSplit          ? 224
                                                                    : 240;
  static constexpr bool kFetchesFirst = true;
  CUtensorMap A, A_rest, B;
  int rest;  ///< rows of a box of A_rest
  float* C;
  int64_t c_stride;
  Schedule<Tile> schedule;  ///< of C^T
  Exchange exchange;
  int64_t apart = 0;  ///< from the product of a slice to the next; 0: there is one C

  /// Rows of a box of A_rest, for `rows` rows of A: those of the last tile, or where blocks share
  /// it an equal part for each, a multiple of 8. 0: no tile is cut.
  static constexpr int rest_of(int rows) {
    const int left = rows % Tile::BN;
    return Tile::kStack == 1 ? left : 8 * ceil_div(left, 8 * Tile::kStack);
  }

#if HOPPER_CODE
  using Grid = BlockGrid<Tile::kStack, Tile::kSide>;
  static constexpr int kSplitting = 96;  // threads

  __device__ void prepare(Shared& shared) const {
    if constexpr (Tile::kSplit) {
      for (Barrier& barrier : shared.split_done) barrier_init(&barrier, kSplitting);
    }
  }

  class Copies {
   public:
    __device__ Copies(const Tf32MatrixProduct& of, const Grid& blocks)
        : work(of), grid(blocks), pieces(of.schedule, blocks.cluster) {}
    __device__ bool next() {
      k += Tile::kDepth;
      if (left == 0) {
        Piece piece;
        if (!pieces.get(piece)) return false;
        at = work.schedule.place(piece.tile, grid.stack, grid.side);
        left = piece.end - piece.begin, k = piece.begin * Tile::kDepth;
        cut();
      }
      --left;
      return true;
    }
    __device__ int bytes() const { return is_cut ? cut_bytes : bytes_of(kShare, kBoxes); }
    template <bool kAlone = false>
    __device__ void load(Stage& stage, Barrier* arrived) const {
      is_cut ? load_rows<kAlone, true>(stage, arrived) : load_rows<kAlone, false>(stage, arrived);
    }
    __device__ void end() const {}

   private:
    static constexpr int kBoxRows = TransposedLeftTile<Tile::BM>::kBoxRows;
    static constexpr int kBoxes = Tile::BM / kBoxRows, kShare = Tile::BN / Tile::kStack;
    static_assert(kShare % 8 == 0);

    __device__ static constexpr int bytes_of(int share, int boxes) {
      return (Tile::kStack * share + Tile::kDepth * boxes) * static_cast<int>(kLineBytes);
    }
    /// At a new tile: what of it there is to fetch. (nvcc 13.0 compiles `min(kBoxes, max(0, boxes))
    /// == kBoxes` wrongly. So is_cut comes before cut_boxes is cut.)
    __device__ void cut() {
      const ProductShape& of = work.schedule.shape;  // C^T's
      rows_cut = at.col + Tile::BN > of.cols;
      cut_share = rows_cut ? work.rest : kShare;
      cut_boxes = ceil_div(of.rows - at.row, kBoxRows);
      is_cut = rows_cut || cut_boxes < kBoxes;
      if (cut_boxes > kBoxes) cut_boxes = kBoxes;
      if (cut_boxes < 0) cut_boxes = 0;
      cut_bytes = bytes_of(cut_share, cut_boxes);
    }
    /// kCut: a part of the tile lies outside of a matrix. For whole tiles the number of copies is
    /// known at compile time, and the thread need not branch.
    template <bool kAlone, bool kCut>
    __device__ void load_rows(Stage& stage, Barrier* arrived) const {
      const CUtensorMap* const a = kCut && rows_cut ? &work.A_rest : &work.A;
      const int share = kCut ? cut_share : kShare, boxes = kCut ? cut_boxes : kBoxes;
#pragma unroll
      for (int i = 0; i < (kAlone ? Tile::kStack : 1); ++i) {
        const int first = (kAlone ? i : grid.stack) * share;
        if constexpr (kAlone || Tile::kStack == 1) {
          tensor_load(stage.a[0].row(first), a, at.col + first, k, arrived);
        } else {
          tensor_load_multicast(stage.a[0].row(first), a, at.col + first, k, arrived, grid.below());
        }
      }
#pragma unroll
      for (int i = 0; i < kBoxes; ++i) {
        if (i >= boxes) break;
        if constexpr (kIsOneRow<Tile>) {
          tensor_load(stage.b.boxes[i].row(0), &work.B, k, at.row + kBoxRows * i, arrived,
                      evict_first());
        } else {
          tensor_load(stage.b.boxes[i].row(0), &work.B, k, at.row + kBoxRows * i, arrived);
        }
      }
    }

    const Tf32MatrixProduct& work;
    const Grid& grid;
    typename Schedule<Tile>::Pieces pieces;
    int left = 0, k = 0;
    typename Schedule<Tile>::Place at;
    bool is_cut = false, rows_cut = false;
    int cut_share = 0, cut_boxes = 0, cut_bytes = 0;  ///< rows of A of each block; boxes; of both
  };

  /// Splits A, all of a stage: in whatever order it lies there.
  __device__ void help(Shared& shared, const Grid& grid) const requires Tile::kSplit {
    constexpr int kElements = Tile::BN * Tile::kDepth;
    typename Schedule<Tile>::Pieces pieces(schedule, grid.cluster);
    Reader reader(shared.pipeline, grid);
    for (Piece piece; pieces.get(piece);) {
      for (int step = piece.begin; step < piece.end; ++step) {
        Stage& stage = reader.wait();
        split_all(stage.a[0].elements, stage.a[1].elements, kElements, threadIdx.x - 32,
                  kSplitting);
        shared_fence();
        reader.done_with(shared.split_done);
        reader.next();
      }
    }
  }

  class Results {
   public:
    __device__ Results(const Tf32MatrixProduct& of, Shared& memory, const Grid& blocks, int number)
        : work(of),
          shared(memory),
          grid(blocks),
          consumer(number),
          pieces(of.schedule, blocks.cluster) {}
    __device__ bool next() { return pieces.get(piece); }

    template <class Reader>
    __device__ void multiply(Sum& sum, Reader& reader) const {
      if constexpr (Tile::kSplit) sum = {};
      const auto load = [&](LeftFragments<float>& b, const Stage& stage) {
        b = stage.b.load_fragments(Tile::row_of(consumer));
      };
      const auto start = [&](const LeftFragments<float>& b, const Stage& stage, bool add) {
        if constexpr (Tile::kSplit) {
          reader.wait_for(shared.split_done);
          add_split(sum, b, stage.a[0], stage.a[1]);
        } else {
          sum.start_product(b, stage.a[0].columns(), add);
        }
      };
      reader.template take_ahead<LeftFragments<float>>(piece.end - piece.begin, load, start);
    }

    __device__ void store(Sum& sum) const {
      if (work.apart == 0 && (piece.begin > 0 || piece.end < work.schedule.steps)) {
        const Handover handover{work.exchange, consumer, grid.rank * Tile::kConsumers + consumer,
                                Tile::kBlocks * Tile::kConsumers, shared.ended[consumer]};
        if (!handover.complete(sum, work.schedule.sharers(piece.tile), grid.cluster)) return;
      }
      finish(sum, piece.tile);
    }
    /// The epilogue of a tile, for the whole sum, or for its columns from `first` on.
    template <class Part>
    __device__ void finish(Part& sum, int tile, int first = 0) const {
      const auto at = work.schedule.place(tile, grid.stack, grid.side);
      const int col = at.row + Tile::row_of(consumer) + Tile::sum_row(0);
      const int row = at.col + first + Part::col(0), rows = work.schedule.shape.cols - row;
      const int left = work.schedule.shape.rows - col;
      const int slice =
          work.apart == 0 ? 0 : grid.cluster % (work.schedule.clusters / work.schedule.tiles);
      float* to = work.C + slice * work.apart + row * work.c_stride + col;
      const bool even = work.c_stride % 2 == 0;
      const int odd_lane = threadIdx.x % 2;
      // Rows that are an odd number of elements apart leave 4 bytes at a time. A lane and its
      // neighbour have the same two columns, of rows that are 2 apart. Each takes one of the
      // columns, of both rows: so lanes that write to the same row have columns without gaps.
      const auto put = [&](int further, float* at, float first, float second) {
        if (even) {
          if (further >= rows) return;
          if (left >= 2) {
            *reinterpret_cast<float2*>(at) = {first, second};
          } else if (left == 1) {
            *at = first;
          }
        } else {
          const float other = __shfl_xor_sync(~0U, odd_lane ? first : second, 1);
          if (left <= odd_lane) return;
          further -= 2 * odd_lane;
          at += odd_lane - 2 * odd_lane * work.c_stride;
          if (further < rows) at[0] = odd_lane ? other : first;
          if (further + 2 < rows) at[2 * work.c_stride] = odd_lane ? second : other;
        }
      };
#pragma unroll
      for (int i = 0; i < Part::size(); i += 4, to += 8 * work.c_stride) {
        put(2 * i, to, sum.element(i), sum.element(i + 2));
        put(2 * i + 1, to + work.c_stride, sum.element(i + 1), sum.element(i + 3));
      }
    }
    __device__ void end() const {}

   private:
    const Tf32MatrixProduct& work;
    Shared& shared;
    const Grid& grid;
    const int consumer;
    typename Schedule<Tile>::Pieces pieces;
    Piece piece;
  };
#endif
};

/// The ways to compute the product of A and B, of a shape that is at least 1 x 1 x 1, on a GPU of
/// compute capability 8.0 or newer. C must not overlap A or B.
template <Math kMath>
class Tf32Product {
 public:
  Tf32Product(const Caller& caller, const Memory<float>& A, const Memory<float>& B,
              const Memory<float>& C, ProductShape shape, RowStrides strides = {})
      : A_(caller.workspace, A, shape.rows, shape.depth, strides.a),
        B_(caller.workspace, B, shape.depth, shape.cols, strides.b),
        C_(C),
        c_stride_(strides.c != 0 ? strides.c : shape.cols),
        shape_(shape),
        caller_(caller) {}

  std::vector<Way> ways() {
    Ways ways(caller_.search);
    const PortableTf32<kMath> portable = {{A_.from, A_.own_stride()},
                                          {B_.from, B_.own_stride()},
                                          {C_, c_stride_},
                                          shape_,
                                          caller_.stream};
    portable.offer(ways);
    if (is_hopper()) {
      const auto self = std::make_shared<const Tf32Product>(*this);
      // Rows of C, and how many tiles of 128 columns a cluster has.
      if constexpr (kMath == Math::tf32) {
        offer<256, 1>(ways, self), offer<256, 2>(ways, self), offer<192, 1>(ways, self),
            offer<192, 2>(ways, self);
        offer<96, 1>(ways, self);
      }
      offer<128, 1>(ways, self), offer<128, 2>(ways, self), offer<64, 1>(ways, self),
          offer<32, 1>(ways, self);
      offer<32, 1, true>(ways, self), offer<64, 1, true>(ways, self);
      offer_slices<128, 2>(ways, self);
      offer_slices<32, 2, true>(ways, self), offer_slices<64, 4, true>(ways, self);
      if constexpr (kMath == Math::tf32) {
        offer_slices<128, 4>(ways, self);
        offer_added<256>(ways, self), offer_added<192>(ways, self), offer_added<96>(ways, self);
        // Tiles of 192 columns, for three consumers, and of 64, for one. (96 x 192 in slices of a
        // cluster spills 8 bytes a thread in its epilogue, and is still the fastest way for some
        // shapes.)
        offer<96, 1, false, 192>(ways, self), offer_added<96, 192>(ways, self);
        offer_slices<96, 2, false, 192>(ways, self), offer_slices<64, 2, false, 64>(ways, self),
            offer_slices<64, 4, false, 64>(ways, self), offer_slices<64, 8, false, 64>(ways, self),
            offer_slices<96, 4, false, 64>(ways, self), offer_slices<128, 4, false, 64>(ways, self);
      }
      offer_added<128>(ways, self), offer_added<64>(ways, self), offer_added<32>(ways, self);
      if (kSplit || A_.copied || B_.copied) {
        const ShiftedWays shifted = {A_.from,         B_.from,   C_,     A_.own_stride(),
                                     B_.own_stride(), c_stride_, shape_, caller_.stream};
        shifted.offer<ShiftedTile<kMath, 32, 128, 1, 4, 4, 2>>(ways, sums_);
        if constexpr (kMath == Math::tf32) {
          shifted.offer<ShiftedTile<kMath, 96, 128, 3, 2, 3, 2>>(ways, sums_);
          shifted.offer<ShiftedTile<kMath, 128, 96, 2, 3, 3, 2>>(ways, sums_);
        }
      }
    } else {
      offer_tf32_tiles<kMath>(ways, sums_, caller_, A_, B_, C_, c_stride_, shape_);
    }
    sums_.allocate(caller_.workspace);
    return ways.found();
  }

 private:
  static constexpr bool kSplit = kMath == Math::split;

  ProductShape transposed() const { return {shape_.cols, shape_.rows, shape_.depth}; }

  bool suits(int rows_of_tile, bool one_row) const {
    return !one_row || suits_one_row(shape_.rows, rows_of_tile, 4.0 * shape_.cols * shape_.depth);
  }

  template <class Tile, bool kOneRow>
  using With = std::conditional_t<kOneRow, OneRow<Tile>, Tile>;

  template <int kRows, int kBesides, bool kOneRow = false, int kCols = 128>
  void offer(Ways& ways, const std::shared_ptr<const Tf32Product>& self) {
    using Tile = With<PlainTf32Tile<kMath, kRows, kBesides, kCols>, kOneRow>;
    if (!suits(kRows, kOneRow)) return;
    const LaunchOf<Tf32Product, ProductPlan> launch = {
        self, [](const Tf32Product& of, const ProductPlan& plan) {
          of.launch(
              of.template work<Tile>({of.transposed(), plan.clusters, plan.shares}, plan.shares));
        }};
    offer_plans(ways, sums_, facts_of_tf32<Tf32MatrixProduct<Tile>>(), transposed(),
                estimate<Tile>(c_stride_), launch, copies());
  }
  std::string copies() const {
    return std::string(A_.copied ? "; A copied" : "") + (B_.copied ? "; B copied" : "");
  }

  /// How far rows are apart of the products that slices leave for finish_slices.
  int64_t stride_apart() const { return int64_t{4} * ceil_div(shape_.cols, 4); }

  /// The way in slices of one cluster each, as many as should be the fastest, with finish_slices.
  template <int kRows, int kCols = 128>
  void offer_added(Ways& ways, const std::shared_ptr<const Tf32Product>& self) {
    using Tile = PlainTf32Tile<kMath, kRows, 1, kCols>;
    const LaunchOf<Tf32Product, AddedPlan> launch = {
        self,
        [](const Tf32Product& of, const AddedPlan& plan) { of.template launch_added<Tile>(plan); }};
    product::offer_added(ways, sums_, facts_of_tf32<Tf32MatrixProduct<Tile>>(), transposed(),
                         estimate<Tile>(stride_apart()), costs(), shape_.rows * stride_apart(),
                         launch, copies());
  }

  template <class Tile>
  void launch_added(const AddedPlan& plan) const {
    auto work = this->work<Tile>({transposed(), plan.clusters(), true}, false);
    const SlicesToAdd<float> add = {sums_.partial(), plan.slices, shape_.rows * stride_apart(),
                                    stride_apart(),  C_,          c_stride_,
                                    shape_.rows,     shape_.cols};
    work.C = sums_.partial(), work.c_stride = add.stride, work.apart = add.apart;
    launch(work);
    launch_finish_slices(add, caller_.stream);
  }

  /// The way in slices, of which a cluster has kOfCluster beside each other (SlicedProduct).
  template <int kRows, int kOfCluster, bool kOneRow = false, int kCols = 128>
  void offer_slices(Ways& ways, const std::shared_ptr<const Tf32Product>& self) {
    using Tile = With<PlainTf32Tile<kMath, kRows, 1, kCols>, kOneRow>;
    if (!suits(kRows, kOneRow)) return;
    using Work = SlicedProduct<Tf32MatrixProduct<Tile>, kOfCluster>;
    const LaunchOf<Tf32Product, SlicedPlan> launch = {
        self, [](const Tf32Product& of, const SlicedPlan& plan) {
          const Schedule<Tile> schedule(of.transposed(), plan.tiles * plan.slices, true);
          of.launch(Work{of.work(schedule, plan.clusters > 1), plan.clusters});
        }};
    product::offer_slices(ways, sums_, facts_of_tf32<Work>(), transposed(),
                          estimate<Tile>(c_stride_), launch);
  }

  /// The tile is one of C^T; its name says rows and columns of C.
  template <class Work>
  static WorkFacts facts_of_tf32() {
    WorkFacts facts = facts_of<Work>();
    std::swap(facts.rows, facts.cols);
    std::swap(facts.stack, facts.side);
    facts.before = kSplit ? "3xTF32; " : "TF32; ";
    facts.stages = Work::Tile::kStages;
    return facts;
  }

  static constexpr const ProductCosts& costs() { return kSplit ? kSplitTf32Costs : kTf32Costs; }

  /// In 3xTF32 three products read A, which has been written by the copy engine, read, and written
  /// once more as two tiles. Between two steps a consumer splits B and adds up, which counts as so
  /// many further rows.
  template <class Tile>
  Estimate estimate(int64_t c_stride) const {
    constexpr int kCols = Tile::BM, kRows = Tile::BN, kProducts = kSplit ? 3 : 1;
    constexpr double kBetween = kSplit ? 96 : 0;
    constexpr const ProductCosts& kCosts = costs();
    // No more is fetched than there is.
    const int rows = std::min(kRows, shape_.rows),
              cols = std::min(kCols, 32 * ceil_div(shape_.cols, 32));
    const TileWork tile = {
        .rows = kCols,  // of C^T
        .cols = kRows,
        .stack = Tile::kStack,
        .side = Tile::kSide,
        .transposed = false,
        .read_once = kIsOneRow<Tile>,
        .consumers = Tile::kConsumers,
        .multiplied = (1.0 * kProducts * kRows + kBetween) * kCols,
        .shared_lines =
            2.0 * kCols + kRows * (kSplit ? 4.0 : 1.0) + 1.0 * kProducts * Tile::kConsumers * kRows,
        .fetched_a = rows * (kCosts.sent_to_each + (1 - kCosts.sent_to_each) / Tile::kStack),
        .fetched_b = 1.0 * cols};
    double copied = 0;
    if (A_.copied) copied += 1.0 * shape_.rows * shape_.depth;
    if (B_.copied) copied += 1.0 * shape_.depth * shape_.cols;
    const TileFactors factors = kSplit ? kAsTheCostsSay : factors_of(tile, kTf32Tiles);
    return estimate_of(kCosts, tile, factors,
                       {transposed(), 4, 4 * A_.stride, 4 * B_.stride, 4 * c_stride},
                       copies_microseconds(kCosts, 4, copied));
  }

  /// `shares`: sums go through memory.
  template <class Tile>
  Tf32MatrixProduct<Tile> work(const Schedule<Tile>& schedule, bool shares) const {
    using Share = ColumnShare<Tile::BN, Tile::kStack>;
    const int rest = Tf32MatrixProduct<Tile>::rest_of(shape_.rows);
    const CUtensorMap last = A_.map(rest > 0 ? rest : Share::kCols, !kSplit);
    return {rest > 0 && shape_.rows >= Tile::BN ? A_.map(Share::kCols, !kSplit) : last,
            last,
            B_.map(Tile::kRowsA, !kSplit),
            rest,
            C_,
            c_stride_,
            schedule,
            sums_.exchange(shares)};
  }

  template <class Work>
  void launch(const Work& work) const {
    launch_product(work, A_, B_, caller_.stream);
  }

  AlignedRows<float> A_, B_;
  Memory<float> C_;
  int64_t c_stride_;
  SharedSums sums_;
  ProductShape shape_;
  Caller caller_;
};

}  // namespace operators::product
