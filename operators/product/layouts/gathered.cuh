// C = A B in fp16 or bf16 on Hopper where the rows of one factor are not aligned to 16 bytes, but
// begin at even elements. The copy engine cannot fetch such rows. To copy them into aligned rows
// first would read each element, write it, and read it again. Where the other factor has few rows
// or columns, that takes longer than the product. So here threads fetch this factor.
//
// Rows that begin at even elements are aligned to 4 bytes. cp.async copies 4 bytes at a time, or 8
// where rows begin at multiples of 8 bytes. The thread that orders the copy engine's copies has a
// warp, and the other three warps of its warpgroup are helpers: they put the factor's elements
// where the copy engine would. So the tiles, and what consumers do with a full stage, are those of
// product.cuh. A helper has the copies of up to 6 steps under way before it waits for the oldest.
#pragma once

#include <cstdint>

#include "operators/product/plan.cuh"
#include "primitives/async_copy.cuh"

namespace operators::product {

/// Which factor threads copy.
enum class Gathers { left, right };

/// The tile Base, for clusters of one block. Threads copy factor kOf, and the copy engine the other
/// one.
template <class Base, Gathers kOf>
struct GatheredTile : Base {
  static_assert(Base::kBlocks == 1);
  static constexpr bool kLoads = true;
  static constexpr Gathers kGathers = kOf;
  static constexpr bool kLeft = kOf == Gathers::left;
  struct Stage : Base::Stage {
    static constexpr int kLoaded = kLeft ? sizeof(Base::Stage::b) : sizeof(Base::Stage::a);
  };
#if HOPPER_CODE
  template <bool kAlone, class Grid, class Work, class Place>
  __device__ static void load(Stage& stage, const Grid& grid, const Work& work, const Place& at,
                              int k, Barrier* arrived) {
    if constexpr (kLeft) {
      grid.template load<kAlone>(stage.b, &work.B.maps[0], at.col, k, arrived);
    } else {
      grid.template load<kAlone>(stage.a, &work.A.maps[0], at.row, k, arrived);
    }
  }
#endif
};

/// A row-major matrix (rows, cols) of 2-byte elements, which begins at a multiple of 4 bytes. Its
/// rows are `stride` elements apart. `cols` and `stride` are even; they are multiples of 4 where
/// pieces of 8 bytes are copied.
template <typename T>
struct GatheredRows {
  const T* data;
  int64_t stride;
  int rows, cols;

  __host__ __device__ bool by_eight_bytes() const {
    return stride % 4 == 0 && reinterpret_cast<uintptr_t>(data) % 8 == 0;
  }
};

/// Estimates such a product's microseconds: see tile_estimate(). Strides are in elements: of the
/// factor that threads copy, of the other one, whose rows are aligned, and of C. `more`: further
/// microseconds. A row of a tile begins anywhere in a line: that costs 0.7 of a line more (fitted).
template <class Tile>
Estimate gathered_estimate(const ProductShape& shape, int64_t stride, int64_t stride_other,
                           int64_t stride_c, double more) {
  constexpr int kBytes = sizeof(typename Tile::Element), kBoxes = Tile::Share::kAllBoxes;
  constexpr double kLines =
      (Tile::kLeft ? Tile::BM : kStepK * kBoxes) + 0.7 * (Tile::kLeft ? Tile::BM : kStepK);
  TileWork work = work_of_tile<Tile>();
  (Tile::kLeft ? work.fetched_a : work.fetched_b) = 0;
  work.gathering = kLines * (stride % 4 == 0 ? kHalfCosts.gather_eight : kHalfCosts.gather_four);
  return estimate_of(
      kHalfCosts, work, factors_of(work, kHalfTiles),
      {shape, kBytes, kBytes * stride_other, kBytes * stride_other, kBytes * stride_c},
      kHalfCosts.gather + more);
}

/// The Work of such a product. kGrids: how many slices of a tile a cluster has (SlicedProduct).
template <class Tile_, class Epilogue, int kGrids = 1>
struct GatheredProduct : MatrixProduct<Tile_, Epilogue, kGrids> {
  using Whole = MatrixProduct<Tile_, Epilogue, kGrids>;
  using Tile = Tile_;
  using T = typename Tile::Element;
  using Stage = typename Tile::Stage;
  using Shared = typename Whole::Shared;
  static constexpr int kProducerRegisters = Tile::kConsumers == 1 ? 0 : 56;
  static constexpr int kConsumerRegisters = Tile::kConsumers == 1 ? 0 : 224;
  static_assert(Tile::kConsumers <= 2);
  static constexpr bool kFetchesFirst = false;
  static constexpr int kHelpers = 3;  ///< warps, which each arrive once a stage
  GatheredRows<T> from;

#if HOPPER_CODE
  using Grid = typename Whole::Grid;

  /// The copy engine fills stages one after the other (`true`), as the helpers do, and not in turn.
  class Copies : public Whole::Copies {
   public:
    __device__ Copies(const GatheredProduct& of, const Grid& blocks)
        : Whole::Copies(of, blocks, true) {}
  };

  /// What the helpers do. The copies of kAhead steps are under way while those of the next one are
  /// started. (A consumer keeps a stage until the next one is full. So helpers may hold kStages - 1
  /// stages: kAhead whose copies are under way, and the one whose copies they start.)
  __device__ void help(Shared& shared, const Grid& grid) const {
    constexpr int kAhead = Shared::kStages < 8 ? Shared::kStages - 2 : 6;
    static_assert(kAhead > 0);
    auto& pipeline = shared.pipeline;
    typename Schedule<Tile>::Pieces pieces(this->schedule, grid.cluster);
    Ring ring{Shared::kStages}, oldest{Shared::kStages};
    const bool wide = from.by_eight_bytes();
    int under_way = 0;
    const auto arrive = [&] {
      shared_fence();
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(&pipeline.full[oldest.stage]);
      oldest.advance();
      --under_way;
    };
    for (Piece piece; pieces.get(piece);) {
      const auto at = this->schedule.place(piece.tile, grid.stack, grid.side);
      for (int step = piece.begin; step < piece.end; ++step) {
        barrier_wait(&pipeline.empty[ring.stage], ring.parity ^ 1);
        Stage& stage = pipeline.stage(ring.stage);
        const int k = step * kStepK;
        if constexpr (Tile::kLeft) {
          gather<1, Tile::BM>(&stage.a, at.row, k, wide);
        } else {
          gather<Tile::Share::kAllBoxes, kStepK>(stage.b.boxes, k, at.col, wide);
        }
        copy_async_commit();
        ring.advance();
        if (++under_way > kAhead) {
          copy_async_wait<kAhead>();
          arrive();
        }
      }
    }
    copy_async_wait<0>();
    while (under_way > 0) arrive();
  }

 private:
  /// Starts the copies of kBoxes boxes beside each other, of kRows rows each, which begin at (row,
  /// col) of the matrix. What is outside of it becomes zero.
  template <int kBoxes, int kRows, class BoxType>
  __device__ void gather(BoxType* boxes, int row, int col, bool wide) const {
    wide ? gather_by<4, kBoxes, kRows>(boxes, row, col)
         : gather_by<2, kBoxes, kRows>(boxes, row, col);
  }
  /// kWidth elements a thread. A warp has 8 rows of a box at a time, one or two of them with each
  /// instruction. Piece p (16 bytes) of row r lies at piece p ^ r of this row, as swizzled() says.
  /// The address of piece p of row 0 is a multiple of 1024, plus 16 p. So an exclusive or with
  /// 128 r + 16 r makes it the address of piece p of row r.
  template <int kWidth, int kBoxes, int kRows, class BoxType>
  __device__ void gather_by(BoxType* boxes, int row, int col) const {
    constexpr int kAcross = kBoxCols / kWidth, kDown = 32 / kAcross, kEights = kRows / 8;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int x = lane % kAcross * kWidth, y = lane / kAcross;
    const int place = (2 * x) ^ (144 * y);
    const int64_t down = kDown * from.stride;
    for (int i = static_cast<int>(threadIdx.x) / 32 - 1; i < kBoxes * kEights; i += kHelpers) {
      const int box = i / kEights, first = 8 * (i % kEights);
      char* const to = reinterpret_cast<char*>(boxes[box].row(first));
      const int at_col = col + kBoxCols * box + x, left = from.rows - row - first - y;
      const T* source = from.data + (row + first + y) * from.stride + at_col;
      const int inside = at_col < from.cols ? left : 0;
#pragma unroll
      for (int r = 0; r < 8; r += kDown, source += down) {
        copy_async<2 * kWidth>(to + (place ^ (144 * r)), source, r < inside);
      }
    }
  }
#endif
};

}  // namespace operators::product
