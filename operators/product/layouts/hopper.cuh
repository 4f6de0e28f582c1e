// C = A B in fp16 or bf16 on Hopper where one factor lies transposed, without a copy of it. wgmma
// reads elements of 2 bytes from shared memory either way, and the copy engine brings boxes of
// either matrix. So only the stages differ from those of half_product.cuh:
//
//     B lies as (cols, depth)    a box of B is columns of C, 64 of k each, as one of A is rows
//     A lies as (depth, rows)    a box of A is 64 of k, 64 rows of C each, as one of B is columns
//
// These are the products of a layer's gradients: d_x = d W^T and d_W = x^T d. Each tile is a kernel
// more to compile, so there are three, for large results, for small ones, and between.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "operators/product/plan.cuh"
#include "operators/product/shape.h"

namespace operators::product {

/// Tiles whose right factor is contiguous along k.
template <typename T, int kRows, int kColumns, int kStackedTiles, int kOutBoxes>
struct AlongTiles : Tiles<T, kRows, kColumns, kStackedTiles, 1, kOutBoxes> {
  static constexpr bool kLoads = true;
  static constexpr int kBoxA = kRows, kBoxB = ColumnShare<kColumns, kStackedTiles>::kCols;
  struct Stage {
    LeftTile<T, kRows> a;
    ColumnTile<T, kColumns> b;
  };
#if HOPPER_CODE
  template <bool kAlone, class Grid, class Work, class Place>
  __device__ static void load(Stage& stage, const Grid& grid, const Work& work, const Place& at,
                              int k, Barrier* arrived) {
    grid.template load<kAlone>(stage.a, &work.A.maps[0], at.row, k, arrived);
    grid.template load<kAlone>(stage.b, &work.B.maps[0], at.col, k, arrived);
  }
  __device__ static void start_product(typename AlongTiles::TileSum& sum, const Stage& stage,
                                       int consumer, bool add) {
    sum.start_product(stage.a.rows(AlongTiles::row_of(consumer)), stage.b.columns(), add);
  }
#endif
};

/// Tiles whose left factor is contiguous across k: each consumer's 64 rows are a box. Nobody shares
/// it.
template <typename T, int kRows, int kColumns, int kStackedTiles, int kOutBoxes>
struct AcrossTiles : Tiles<T, kRows, kColumns, kStackedTiles, 1, kOutBoxes> {
  static constexpr bool kLoads = true;
  static constexpr int kBoxA = kStepK, kBoxB = AcrossTiles::kRowsB;
  struct Stage {
    RightTile<T, kRows> a;
    RightTile<T, kColumns> b;
  };
#if HOPPER_CODE
  template <bool kAlone, class Grid, class Work, class Place>
  __device__ static void load(Stage& stage, const Grid& grid, const Work& work, const Place& at,
                              int k, Barrier* arrived) {
#pragma unroll
    for (int box = 0; box < kRows / kBoxCols; ++box) {
      tensor_load(stage.a.boxes[box].row(0), &work.A.maps[0], k, at.row + kBoxCols * box, arrived);
    }
    grid.template load<kAlone>(stage.b, &work.B.maps[0], at.col, k, arrived);
  }
  __device__ static void start_product(typename AcrossTiles::TileSum& sum, const Stage& stage,
                                       int consumer, bool add) {
    sum.start_product(stage.a.boxes[consumer].across_k(), stage.b, add);
  }
#endif
};

/// The epilogue: it adds a bias, of which each thread reads those of its columns, and rounds once.
template <typename T>
struct StoreBiased : StoreRounded<T> {
  const T* bias;  ///< may be null

#if HOPPER_CODE
  template <int kCols, int kBoxes>
  __device__ void operator()(Sum<kCols>& sum, int row, int col,
                             const Outbox<T, kBoxes>& out) const {
    if (bias != nullptr) {
#pragma unroll
      for (int i = 0; i < kCols / 2; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {  // of two rows the same column
          const int at = col + Sum<kCols>::col(i + e);
          const float more = at < this->cols ? static_cast<float>(bias[at]) : 0;
          sum.elements[i + e] += more, sum.elements[i + e + 2] += more;
        }
      }
    }
    StoreRounded<T>::operator()(sum, row, col, out);
  }
#endif
};

/// The ways to compute C = A B + bias, where kAcross says that A lies as (depth, rows), and else B
/// lies as (cols, depth). Strides are those of rows in memory.
template <typename T, bool kAcross>
class TurnedProduct {
 public:
  TurnedProduct(const Caller& caller, const Memory<T>& A, const Memory<T>& B, const Memory<T>& C,
                ProductShape shape, RowStrides strides, std::optional<Memory<T>> bias)
      : A_(caller.workspace, A, kAcross ? shape.depth : shape.rows,
           kAcross ? shape.rows : shape.depth, strides.a),
        B_(caller.workspace, B, kAcross ? shape.depth : shape.cols,
           kAcross ? shape.cols : shape.depth, strides.b),
        C_(C),
        bias_(std::move(bias)),
        c_stride_(strides.c),
        exchange_(caller.workspace),
        shape_(shape),
        caller_(caller) {}

  std::vector<Way> ways() {
    Ways ways(caller_.search);
    const auto self = std::make_shared<const TurnedProduct>(*this);
    if constexpr (kAcross) {
      offer<AcrossTiles<T, 128, 256, 2, 2>, AcrossTiles<T, 128, 128, 1, 2>,
            AcrossTiles<T, 64, 128, 1, 2>>(ways, self);
    } else {
      offer<AlongTiles<T, 128, 256, 2, 2>, AlongTiles<T, 128, 128, 1, 2>,
            AlongTiles<T, 64, 128, 1, 2>>(ways, self);
    }
    exchange_.allocate(caller_.workspace);
    return ways.found();
  }

  template <class Tile>
  void launch(const ProductPlan& plan) const {
    const MatrixProduct<Tile, StoreBiased<T>> work{
        {{A_.map(Tile::kBoxA)}},
        {{B_.map(Tile::kBoxB)}},
        {rounded_to<T>(C_, shape_.rows, shape_.cols, Tile::kOutRows, c_stride_),
         bias_ ? bias_->data() : nullptr},
        Schedule<Tile>(shape_, plan.clusters, plan.shares),
        exchange_.template in_step<T>(shape_, plan.shares)};
    launch_product(work, A_, B_, caller_.stream);
  }

 private:
  template <class... Tile>
  void offer(Ways& ways, const std::shared_ptr<const TurnedProduct>& self) {
    TileChoice<Tile...>::template offer<StoreBiased<T>>(
        ways, exchange_, shape_, A_.stride, B_.stride, c_stride_ != 0 ? c_stride_ : shape_.cols,
        self, c_stride_ != 0);
  }

  AlignedRows<T> A_, B_;
  Memory<T> C_;
  std::optional<Memory<T>> bias_;
  int64_t c_stride_;
  ExchangeMemory exchange_;
  ProductShape shape_;
  Caller caller_;
};

}  // namespace operators::product
