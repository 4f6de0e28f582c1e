// C = A B for any shape, in fp16 or bf16 with fp32 sums: on Hopper lesson 3's last kernel with
// tiles that suit the shape; on other GPUs operators/product/portable/half.cuh.
//
//     A (rows x depth), B (depth x cols), C (rows x cols): T, row-major; dense, or with rows that
//     are a multiple of 8 elements apart. Or C is fp32, as the sums are, and dense.
//
// Lesson 3's kernel has one size of tile and needs aligned rows. Where it is slow, or impossible:
//   - At N = 1024 there are 32 tiles for 132 multiprocessors. Of 64 x 128 there are 128. And the
//     time until the first data come counts: a block asks for its first stage before its cluster
//     has met.
//   - At N = 4104 there are 289 pairs of 128 x 256: four rounds of 66, and a fifth for 25. There
//     are 264 pairs of 176 x 192, four full rounds. wgmma takes any multiple of 8 columns,
//     but B comes in boxes of 64, and rows of A only 64 at a time. So the product is transposed
//     (TransposedTiles): C^T = B^T A^T has 64 columns of B on the left, and on the right as many
//     rows of A as suit N.
//   - At 2222 x 104 there are 70 tiles of 64 x 64. Of 64 columns by 56 rows there are 80, and
//     blocks of a cluster share B. A stage of such a tile is small: 14 of them may be on their way
//     at the same time.
//   - At N = 1800 every other row begins in the middle of a sector of 32 bytes, and copies are
//     slow. Four tiles in a cluster, two by two, fetch a third less than two do.
//   - Where no size fits, the tiles of the last two rounds are divided along k, so that clusters
//     have equally many steps. Then a tile may belong to several clusters. Each of them but the
//     last to finish leaves its sum in memory. The last one adds these sums to its own.
//   - At 512 x 512 with a depth of 16384 there are 16 tiles of 128 x 128. So the steps of each are
//     cut into slices, for the blocks of a cluster or for several clusters (sliced.cuh).
//   - At 135 x 480 with a depth of 11824 the last cluster of a tile would add up many sums alone.
//     So each slice leaves its sums in memory, and a second launch adds them up. What bounds the
//     product is what it reads from the L2 cache. So tiles have 64 columns and up to 200 rows: four
//     blocks side by side fetch each row of A once for all of them. Up to 144 rows a block fetches
//     whole tiles of a factor, and the blocks take turns (InTurn).
//   - With few rows the time is that of reading B. Each element of B is wanted once, so the L2
//     cache is told not to keep it (OneRow). It then keeps what others have written there; to write
//     that to memory would take a part of this product's time.
//   - Where rows are not aligned to 16 bytes, the copy engine cannot follow them. One kernel copies
//     A and B into rows that are: N^2 bytes against N^3 operations. C leaves without its help.
//   - Where A has few rows, to copy B takes longer than to multiply it: 28 us of 43 at 85 x 4484
//     with a depth of 3576. If its rows begin at even elements, threads of the product's own blocks
//     copy it, each block the tiles that it multiplies (layouts/gathered.cuh). So it is with A
//     where B has few columns.
// product() of operators/product/product.cuh is lesson 3's kernel for all of these.
#pragma once

#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#include "operators/product/layouts/gathered.cuh"
#include "operators/product/plan.cuh"
#include "operators/product/portable/half.cuh"
#include "operators/product/store_sums.cuh"

namespace operators::product {

/// The ways to compute the product of A and B, of a shape that is at least 1 x 1 x 1. T: half or
/// __nv_bfloat16. On Hopper those of product.cuh; on other GPUs from compute capability 8.0 on
/// those of mma_tiles.cuh. C must not overlap A or B. Out, the type of C: T; or float, for which
/// there are fewer tiles.
template <typename T, typename Out = T>
class HalfProduct {
 public:
  HalfProduct(const Caller& caller, const Memory<T>& A, const Memory<T>& B, const Memory<Out>& C,
              ProductShape shape, RowStrides strides = {})
      : A_(caller.workspace, A, shape.rows, shape.depth, strides.a),
        B_(caller.workspace, B, shape.depth, shape.cols, strides.b),
        C_(C),
        c_stride_(strides.c),
        exchange_(caller.workspace),
        shape_(shape),
        caller_(caller) {}

  std::vector<Way> ways() {
    if (!is_hopper()) return portable_half_ways<T>(caller_, A_, B_, C_, c_stride_, shape_);
    Ways ways(caller_.search);
    const auto self = std::make_shared<const HalfProduct>(*this);
    using Choice = std::conditional_t<kSums, FewTiles, ManyTiles>;
    offer<Choice>(ways, self);
    if constexpr (kSums) {
      offer_slices<Tiles<T, 64, 128, 1, 1, 2>, 4>(ways, self);
    } else {
      offer<NarrowTiles>(ways, self);
      offer_slices<Tiles<T, 128, 128, 2, 2, 2>, 2>(ways, self);
      offer_slices<Tiles<T, 64, 192, 4, 1, 2>, 2>(ways, self);
      offer_slices<Tiles<T, 64, 128, 4, 1, 2>, 2>(ways, self);
      offer_slices<Tiles<T, 64, 64, 1, 1, 1>, 8>(ways, self);
      offer_slices<OneRow<Tiles<T, 64, 64, 1, 1, 1>>, 4>(ways, self);
      offer_added(ways, self, NarrowTiles());
      offer_gathered<Gathers::left>(ways, self);
      offer_gathered<Gathers::right>(ways, self);
    }
    exchange_.allocate(caller_.workspace);
    std::vector<Way> found = ways.found();
    // A very large product has more tiles than a Timetable can count. Then no way is found. With
    // sums in fp32 the portable kernels compute it.
    if constexpr (kSums) {
      if (found.empty()) {
        return portable_half_ways<T>(caller_, A_, B_, C_, c_stride_, shape_);
      }
    }
    return found;
  }

  /// A way with whole tiles, or tiles that clusters share.
  template <class Tile>
  void launch(const ProductPlan& plan) const {
    launch(work<Tile>(Schedule<Tile>(shape_, plan.clusters, plan.shares),
                      exchange_.template in_step<T>(shape_, plan.shares)));
  }

 private:
  // The arguments are rows, columns, how many tiles of a cluster lie below each other, and how many
  // beside each other; the last one of Tiles is how many boxes hold results. These tiles were
  // chosen among 81 as those that lose the least together, at shapes of all sizes. The ones of
  // OneRow are for few rows.
  using ManyTiles =
      TileChoice<Tiles<T, 192, 192, 1, 2, 1>, Tiles<T, 192, 128, 1, 2, 1>,
                 Tiles<T, 128, 256, 2, 1, 2>, Tiles<T, 128, 192, 2, 1, 3>,
                 Tiles<T, 128, 160, 2, 1, 2>, Tiles<T, 128, 144, 4, 2, 1>,
                 Tiles<T, 64, 192, 4, 1, 2>, Tiles<T, 64, 128, 1, 1, 2>, Tiles<T, 64, 128, 2, 1, 2>,
                 Tiles<T, 64, 128, 4, 1, 2>, Tiles<T, 64, 96, 4, 1, 2>, Tiles<T, 64, 64, 1, 1, 1>,
                 TransposedTiles<T, 96, 256, 1, 2>, TransposedTiles<T, 200, 192, 2, 1>,
                 TransposedTiles<T, 176, 192, 2, 1>, TransposedTiles<T, 160, 192, 1, 2>,
                 TransposedTiles<T, 160, 192, 2, 1>, TransposedTiles<T, 112, 192, 2, 1>,
                 TransposedTiles<T, 96, 192, 2, 1>, TransposedTiles<T, 72, 192, 4, 1>,
                 TransposedTiles<T, 56, 192, 2, 1>, TransposedTiles<T, 256, 128, 1, 2>,
                 TransposedTiles<T, 240, 128, 1, 2>, TransposedTiles<T, 232, 128, 1, 2>,
                 TransposedTiles<T, 208, 128, 1, 2>, TransposedTiles<T, 192, 128, 2, 1>,
                 TransposedTiles<T, 184, 128, 1, 2>, TransposedTiles<T, 168, 128, 1, 2>,
                 TransposedTiles<T, 168, 128, 2, 1>, TransposedTiles<T, 152, 128, 1, 2>,
                 TransposedTiles<T, 144, 128, 2, 1>, TransposedTiles<T, 144, 128, 2, 2>,
                 TransposedTiles<T, 136, 128, 1, 2>, TransposedTiles<T, 136, 128, 2, 4>,
                 TransposedTiles<T, 128, 128, 2, 1>, TransposedTiles<T, 128, 128, 4, 2>,
                 TransposedTiles<T, 120, 128, 2, 1>, TransposedTiles<T, 112, 128, 2, 1>,
                 TransposedTiles<T, 112, 128, 4, 2>, TransposedTiles<T, 96, 128, 2, 2>,
                 TransposedTiles<T, 88, 128, 4, 1>, TransposedTiles<T, 80, 128, 2, 1>,
                 TransposedTiles<T, 104, 64, 2, 1>, TransposedTiles<T, 56, 64, 4, 1>,
                 TransposedTiles<T, 48, 64, 2, 1>, OneRow<Tiles<T, 64, 128, 2, 1, 2>>,
                 OneRow<TransposedTiles<T, 32, 128, 1, 1>>>;

  // For few rows or columns, and a long k. These tiles may also come in slices that finish_slices
  // adds up. The blocks side by side in a cluster share rows of A. In a cluster of 4 x 2 blocks,
  // those above each other share a tile of B, too.
  using NarrowTiles =
      TileChoice<TransposedTiles<T, 200, 64, 1, 4>, TransposedTiles<T, 160, 64, 1, 4>,
                 InTurn<TransposedTiles<T, 144, 64, 1, 4>>,
                 InTurn<TransposedTiles<T, 120, 64, 1, 4>>,
                 InTurn<TransposedTiles<T, 96, 64, 1, 4>>, InTurn<TransposedTiles<T, 96, 64, 4, 2>>,
                 InTurn<TransposedTiles<T, 88, 64, 1, 4>>>;

  // The tiles for sums in fp32 are few, since each is one more kernel to compile. They are for
  // large shapes, for small ones, and for few rows.
  using FewTiles =
      TileChoice<Tiles<T, 128, 256, 2, 1, 2>, Tiles<T, 128, 192, 2, 1, 3>,
                 TransposedTiles<T, 176, 192, 2, 1>, TransposedTiles<T, 128, 128, 2, 1>,
                 Tiles<T, 64, 128, 1, 1, 2>, Tiles<T, 64, 64, 1, 1, 1>,
                 OneRow<TransposedTiles<T, 32, 128, 1, 1>>, OneRow<Tiles<T, 64, 128, 2, 1, 2>>>;

  static constexpr bool kSums = !std::is_same_v<T, Out>;
  using Epilogue = std::conditional_t<kSums, StoreSums<T>, StoreRoundedOrSlices<T>>;

  /// How far the rows of C are apart, in elements of T.
  int64_t c_rows() const {
    return (c_stride_ != 0 ? c_stride_ : shape_.cols) * int64_t{sizeof(Out) / sizeof(T)};
  }

  /// Microseconds until these factors have been copied.
  double copies(bool of_a, bool of_b) const {
    return copies_microseconds(kHalfCosts, sizeof(T),
                               (of_a ? 1.0 * shape_.rows * shape_.depth : 0) +
                                   (of_b ? 1.0 * shape_.depth * shape_.cols : 0));
  }

  template <class Tile, int kGrids>
  using Whole = MatrixProduct<Tile, Epilogue, kGrids>;

  template <class Tile>
  Epilogue epilogue() const {
    if constexpr (kSums) {
      return {{C_, shape_.rows, shape_.cols}};
    } else {
      return {rounded_to<T>(C_, shape_.rows, shape_.cols, Tile::kOutRows, c_stride_)};
    }
  }

  template <class Tile, int kGrids = 1>
  Whole<Tile, kGrids> work(const Schedule<Tile>& schedule, const Exchange& exchange) const {
    static_assert(sizeof(ProductShared<Tile>) <= 227 << 10, "no block would fit");
    // If no tile reaches outside, the kernel need not look: rest < 0.
    const bool inside =
        shape_.rows % Schedule<Tile>::kRows == 0 && shape_.cols % Schedule<Tile>::kCols == 0;
    const int rest = inside ? -1 : Whole<Tile, kGrids>::rest_of(shape_.rows);
    const CUtensorMap boxes = A_.map(Tile::kRowsA);
    return {{{boxes}},
            {{B_.map(Tile::kRowsB)}},
            epilogue<Tile>(),
            schedule,
            exchange,
            rest > 0 ? A_.map(rest) : boxes,
            rest};
  }

  template <class Work>
  void launch(const Work& work) const {
    launch_product(work, A_, B_, caller_.stream);
  }

  /// The ways with whole tiles, or tiles that clusters share.
  template <class Choice>
  void offer(Ways& ways, const std::shared_ptr<const HalfProduct>& self) {
    Choice::template offer<Epilogue>(ways, exchange_, shape_, A_.stride, B_.stride, c_rows(), self,
                                     c_stride_ != 0, copies(A_.copied, B_.copied));
  }

  /// The way in slices, of which a cluster has kOfCluster beside each other (SlicedProduct).
  template <class Tile, int kOfCluster>
  void offer_slices(Ways& ways, const std::shared_ptr<const HalfProduct>& self) {
    using Work = SlicedProduct<Whole<Tile, kOfCluster>, kOfCluster>;
    constexpr bool kInBoxes = Tile::BN / kOfCluster % kBoxCols == 0;  // of a block's columns
    if (!suits<Tile>(shape_) || (c_stride_ != 0 && !kInBoxes)) return;
    const LaunchOf<HalfProduct, SlicedPlan> launch = {
        self, [](const HalfProduct& of, const SlicedPlan& plan) {
          const Schedule<Tile> schedule(of.shape_, plan.tiles * plan.slices, true);
          const Exchange exchange = of.exchange_.exchange(plan.clusters > 1);
          of.launch(Work{of.template work<Tile, kOfCluster>(schedule, exchange), plan.clusters});
        }};
    product::offer_slices(
        ways, exchange_, facts_of<Work>(), shape_,
        tile_estimate<Tile>(shape_, A_.stride, B_.stride, c_rows(), copies(A_.copied, B_.copied)),
        launch);
  }

  /// How far apart, in elements, the rows of the sums are that slices leave for finish_slices.
  int64_t stride_apart() const { return int64_t{4} * ceil_div(shape_.cols, 4); }

  /// The ways in slices of one cluster each, which finish_slices adds up.
  template <class... Tile>
  void offer_added(Ways& ways, const std::shared_ptr<const HalfProduct>& self,
                   TileChoice<Tile...>) {
    (offer_added<Tile>(ways, self), ...);
  }
  template <class Tile>
  void offer_added(Ways& ways, const std::shared_ptr<const HalfProduct>& self) {
    const LaunchOf<HalfProduct, AddedPlan> launch = {
        self,
        [](const HalfProduct& of, const AddedPlan& plan) { of.template launch_added<Tile>(plan); }};
    product::offer_added(ways, exchange_, facts_of<Whole<Tile, 1>>(), shape_,
                         tile_estimate<Tile>(shape_, A_.stride, B_.stride,
                                             int64_t{sizeof(float) / sizeof(T)} * stride_apart(),
                                             copies(A_.copied, B_.copied)),
                         kHalfCosts, shape_.rows * stride_apart(), launch);
  }
  template <class Tile>
  void launch_added(const AddedPlan& plan) const {
    const int64_t stride = stride_apart(), apart = shape_.rows * stride;
    float* const sums = exchange_.partial();
    auto work = this->work<Tile>(Schedule<Tile>(shape_, plan.clusters(), true), {});
    work.epilogue.sums = {{sums, shape_.rows, static_cast<int>(stride)}};
    work.epilogue.apart = apart;
    launch(work);
    launch_finish_slices(
        SlicesToAdd<T>{sums, plan.slices, apart, stride, C_,
                       c_stride_ != 0 ? c_stride_ : shape_.cols, shape_.rows, shape_.cols},
        caller_.stream);
  }

  template <class Tile, int kGrids = 1>
  GatheredProduct<Tile, Epilogue, kGrids> gathered_work(const Schedule<Tile>& schedule,
                                                        const Exchange& exchange) const {
    GatheredProduct<Tile, Epilogue, kGrids> work = {{{}, {}, epilogue<Tile>(), schedule, exchange},
                                                    {}};
    const AlignedRows<T>& gathered = Tile::kLeft ? A_ : B_;
    work.from = {gathered.from, gathered.cols, gathered.rows, gathered.cols};
    if constexpr (Tile::kLeft) {
      work.B = {{B_.map(Tile::kRowsB)}};
    } else {
      work.A = {{A_.map(Tile::kRowsA)}};
    }
    return work;
  }
  template <class Work>
  void launch_gathered(const Work& work) const {
    const AlignedRows<T>& copied = Work::Tile::kLeft ? B_ : A_;
    launch_product(work, RowCopies<T, 2>{copied.job(), {}}, caller_.stream);
  }

  /// The ways in which threads copy a factor from where it lies.
  template <Gathers kOf>
  void offer_gathered(Ways& ways, const std::shared_ptr<const HalfProduct>& self) {
    const AlignedRows<T>& factor = kOf == Gathers::left ? A_ : B_;
    if (!factor.copied || factor.cols % 2 != 0) return;
    if constexpr (kOf == Gathers::left) {
      offer_gathered<GatheredTile<Tiles<T, 64, 128, 1, 1, 2>, kOf>, 1>(ways, self);
      offer_gathered<GatheredTile<Tiles<T, 64, 128, 1, 1, 2>, kOf>, 4>(ways, self);
    } else {
      offer_gathered<GatheredTile<Tiles<T, 128, 64, 1, 1, 2>, kOf>, 1>(ways, self);
      offer_gathered<GatheredTile<TransposedTiles<T, 96, 128, 1, 1>, kOf>, 1>(ways, self);
      offer_gathered<GatheredTile<Tiles<T, 128, 64, 1, 1, 2>, kOf>, 4>(ways, self);
    }
  }
  template <class Tile, int kOfCluster>
  void offer_gathered(Ways& ways, const std::shared_ptr<const HalfProduct>& self) {
    using Whole = GatheredProduct<Tile, Epilogue, kOfCluster>;
    constexpr bool kLeft = Tile::kLeft;
    constexpr bool kInBoxes = Tile::BN / kOfCluster % kBoxCols == 0;  // of a block's columns
    if (c_stride_ != 0 && !kInBoxes) return;
    const Estimate estimate =
        gathered_estimate<Tile>(shape_, (kLeft ? A_ : B_).cols, (kLeft ? B_ : A_).stride, c_rows(),
                                copies(!kLeft && A_.copied, kLeft && B_.copied));
    const auto named = [&](WorkFacts facts) {
      facts.before = kLeft ? "A by threads; " : "B by threads; ";
      facts.stages = ProductShared<Tile>::kStages;
      facts.gathers = kLeft ? 1 : 2;
      return facts;
    };
    if constexpr (kOfCluster == 1) {
      const LaunchOf<HalfProduct, ProductPlan> launch = {
          self, [](const HalfProduct& of, const ProductPlan& plan) {
            of.launch_gathered(of.template gathered_work<Tile>(
                Schedule<Tile>(of.shape_, plan.clusters, plan.shares),
                of.exchange_.exchange(plan.shares)));
          }};
      offer_plans(ways, exchange_, named(facts_of<Whole>()), shape_, estimate, launch);
    } else {
      using Work = SlicedProduct<Whole, kOfCluster>;
      const LaunchOf<HalfProduct, SlicedPlan> launch = {
          self, [](const HalfProduct& of, const SlicedPlan& plan) {
            const Schedule<Tile> schedule(of.shape_, plan.tiles * plan.slices, true);
            const Exchange exchange = of.exchange_.exchange(plan.clusters > 1);
            of.launch_gathered(Work{of.template gathered_work<Tile, kOfCluster>(schedule, exchange),
                                    plan.clusters});
          }};
      product::offer_slices(ways, exchange_, named(facts_of<Work>()), shape_, estimate, launch);
    }
  }

  AlignedRows<T> A_, B_;
  Memory<Out> C_;
  int64_t c_stride_;
  ExchangeMemory exchange_;
  ProductShape shape_;
  Caller caller_;
};

}  // namespace operators::product
