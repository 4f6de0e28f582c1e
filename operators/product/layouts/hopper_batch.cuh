// A batch of products in fp16 or bf16 on Hopper, C = A B for each, one of whose factors may lie
// transposed. Matrices of a batch that lie below each other are one tall matrix. So this is one
// product with the rows of all results, by the tiles of half_product.cuh and hopper.cuh. A tile
// belongs to one of the products. In product number n the right factor begins n matrices further
// on, and so does a left factor that lies transposed.
//
// A step of k must not reach into the next matrix, nor a cluster's tile into the next product. So
// this takes a depth that is a multiple of 64, and rows that are a multiple of 256. For others
// there is batch.cuh.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "operators/product/layouts/hopper.cuh"
#include "operators/product/layouts/layouts.cuh"

namespace operators::product {

/// How a batch lies: both factors row by row; the right one transposed; or the left one.
enum class Lies { in_rows, along, across };

template <typename T, Lies kLies>
using BatchTiles =
    std::conditional_t<kLies == Lies::in_rows, Tiles<T, 128, 256, 2, 1, 2>,
                       std::conditional_t<kLies == Lies::along, AlongTiles<T, 128, 256, 2, 2>,
                                          AcrossTiles<T, 128, 256, 2, 2>>>;

/// The Work: a product of all rows, where each has its own right factor.
template <typename T, Lies kLies>
struct BatchProduct : MatrixProduct<BatchTiles<T, kLies>, StoreRounded<T>> {
  using Tile = BatchTiles<T, kLies>;
  using Whole = MatrixProduct<Tile, StoreRounded<T>>;
  using typename Whole::Stage;
  ProductShape of_one;

#if HOPPER_CODE
  using typename Whole::Grid;

  class Copies : public Whole::Copies {
   public:
    __device__ Copies(const BatchProduct& of, const Grid& blocks)
        : Whole::Copies(of, blocks), all(of) {}
    template <bool kAlone = false>
    __device__ void load(Stage& stage, Barrier* arrived) const {
      const CUtensorMap *const A = &all.A.maps[0], *const B = &all.B.maps[0];
      const int number = this->at.row / all.of_one.rows, k = this->k;
      const int of_all = k + number * all.of_one.depth;  // k, where matrices lie below each other
      if constexpr (kLies == Lies::across) {
        const int row = this->at.row - number * all.of_one.rows;
#pragma unroll
        for (int box = 0; box < Tile::BM / kBoxCols; ++box) {
          tensor_load(stage.a.boxes[box].row(0), A, of_all, row + kBoxCols * box, arrived);
        }
      } else {
        this->grid.template load<kAlone>(stage.a, A, this->at.row, k, arrived);
      }
      if constexpr (kLies == Lies::along) {
        this->grid.template load<kAlone>(stage.b, B, this->at.col + number * all.of_one.cols, k,
                                         arrived);
      } else {
        this->grid.template load<kAlone>(stage.b, B, this->at.col, of_all, arrived);
      }
    }

   private:
    const BatchProduct& all;
  };
#endif
};

/// The ways to compute a batch that lies so.
template <typename T, Lies kLies>
class HopperBatch {
 public:
  HopperBatch(const Caller& caller, const Matrices<T>& a, const Matrices<T>& b,
              const Matrices<T>& c, int64_t batch)
      : A_(below(caller, a, batch)),
        B_(below(caller, b, batch)),
        C_(c),
        of_one_{static_cast<int>(c.rows), static_cast<int>(c.cols), static_cast<int>(a.cols)},
        shape_{static_cast<int>(batch * c.rows), of_one_.cols, of_one_.depth},
        exchange_(caller.workspace),
        caller_(caller) {}

  /// Whether this computes it.
  static bool suits(const Matrices<T>& a, const Matrices<T>& b, const Matrices<T>& c,
                    int64_t batch) {
    const auto are_below = [](const Matrices<T>& of) {
      return of.between == of.rows_in_memory() * of.stride && of.stride % 8 == 0;
    };
    const int64_t most = int64_t{1} << 30;
    return c.rows % Schedule<Tile>::kRows == 0 && a.cols % kStepK == 0 && are_below(a) &&
           are_below(b) && are_below(c) && batch * c.rows <= most && batch * a.cols <= most &&
           batch * c.cols <= most;
  }

  std::vector<Way> ways() {
    Ways ways(caller_.search);
    const auto self = std::make_shared<const HopperBatch>(*this);
    WorkFacts facts = facts_of<BatchProduct<T, kLies>>();
    facts.stages = ProductShared<Tile>::kStages;
    const LaunchOf<HopperBatch, ProductPlan> launch = {
        self, [](const HopperBatch& of, const ProductPlan& plan) { of.launch(plan); }};
    offer_plans(ways, exchange_, facts, shape_,
                tile_estimate<Tile>(shape_, A_.stride, B_.stride, C_.stride), launch);
    exchange_.allocate(caller_.workspace);
    return ways.found();
  }

 private:
  using Tile = BatchTiles<T, kLies>;

  static AlignedRows<T> below(const Caller& caller, const Matrices<T>& of, int64_t batch) {
    return {caller.workspace, of.data, batch * of.rows_in_memory(), of.cols_in_memory(), of.stride};
  }

  void launch(const ProductPlan& plan) const {
    constexpr bool kAlong = kLies == Lies::along, kAcross = kLies == Lies::across;
    const BatchProduct<T, kLies> work{
        {{{A_.map(kAcross ? kStepK : Tile::kRowsA)}},
         {{B_.map(kAlong ? ColumnShare<Tile::BN, Tile::kStack>::kCols : Tile::kRowsB)}},
         rounded_to<T>(C_.data, shape_.rows, shape_.cols, Tile::kOutRows, C_.stride),
         Schedule<Tile>(shape_, plan.clusters, plan.shares),
         exchange_.exchange(plan.shares)},
        of_one_};
    launch_product(work, A_, B_, caller_.stream);
  }

  AlignedRows<T> A_, B_;
  Matrices<T> C_;
  ProductShape of_one_, shape_;
  ExchangeMemory exchange_;
  Caller caller_;
};

}  // namespace operators::product
