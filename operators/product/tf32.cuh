// Tiles in TF32 for the product of product.cuh, of factors that are rounded already, or that the
// copy engine rounds on the way. wgmma takes such a factor from shared memory only if it is
// contiguous along k. The right one always is here. A left one that is not, a *transposed* one,
// goes through registers.
#pragma once

#include <type_traits>

#include "operators/product/product.cuh"

namespace operators::product {

/// A block has 64 rows for each of its kCount consumers, by kColumns columns, and a cluster
/// kStackedTiles such tiles below each other. Memory has the left factor as (rows, k), or as
/// (k, rows) if it is transposed, and the right one as (columns, k).
template <int kColumns, int kStackedTiles, bool kTransposedLeft = false, int kCount = 2>
struct Tf32Tile : Warpgroups<kCount> {
  using Element = float;
  using Transposed = Tf32Tile<kColumns, kStackedTiles, true, kCount>;
  static constexpr bool kTransposed = kTransposedLeft;
  static constexpr int BM = 64 * kCount, BN = kColumns, kStack = kStackedTiles, kSide = 1;
  static constexpr int kBlocks = kStack * kSide, kDepth = kLine<float>;  // of a step
  using Left = std::conditional_t<kTransposed, TransposedLeftTile<BM>, LeftTile<float, BM>>;
  using TileSum = Sum<BN>;
  struct Stage {
    Left a;
    ColumnTile<float, BN> b;
  };
  /// What a block has in shared memory: as many stages as fit.
  struct Shared {
    static constexpr int kStages = kSharedRoom / sizeof(Stage);
    Pipeline<Stage, kStages> pipeline;
  };
  /// Of the boxes that the copy engine moves.
  static constexpr int kRowsA = kTransposed ? kDepth : BM, kRowsB = BN / kStack;

  __host__ __device__ static constexpr int row_of(int consumer) { return 64 * consumer; }
  /// The row, of a consumer's 64, of element i of a thread's sum.
  __device__ static int sum_row(int i) {
    if constexpr (kTransposed) {
      return Left::row(i);
    } else {
      return TileSum::row(i);
    }
  }
#if HOPPER_CODE
  /// A consumer takes `steps` steps.
  template <class Reader>
  __device__ __forceinline__ static void multiply(TileSum& sum, Reader& reader, int steps,
                                                  int consumer) {
    const int row = row_of(consumer);
    if constexpr (kTransposed) {
      using Fragments = LeftFragments<float>;
      reader.template take_ahead<Fragments>(
          steps, [&](Fragments& to, const Stage& stage) { to = stage.a.load_fragments(row); },
          [&](const Fragments& left, const Stage& stage, bool add) {
            sum.start_product(left, stage.b.columns(), add);
          });
    } else {
      for (int step = 0; step < steps; ++step) {
        reader.take([&](const Stage& stage, bool add) {
          sum.start_product(stage.a.rows(row), stage.b.columns(), add);
        });
      }
    }
  }
#endif
};

}  // namespace operators::product
