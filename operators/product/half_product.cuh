// C = A B for any shape, on Hopper, in fp16 or bf16 with fp32 sums: lesson 3's last kernel with
// tiles that suit the shape.
//
//     A (rows x depth), B (depth x cols), C (rows x cols): T, row-major; dense, or with rows that
//     are a multiple of 8 elements apart
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
//   - At N = 1800 every other row begins in the middle of a sector of 32 bytes, and copies are
//     slow. Four tiles in a cluster, two by two, fetch a third less than two do.
//   - Where no size fits, the tiles of the last two rounds are divided along k, so that clusters
//     have equally many steps. One that begins inside a tile hands its sum to one that ends there.
//   - At 512 x 512 with a depth of 16384 there are 16 tiles of 128 x 128. Each of them is several
//     clusters', which have a slice of its steps (sliced.cuh).
//   - Where rows are not aligned to 16 bytes, the copy engine cannot follow them. One kernel copies
//     A and B into rows that are: N^2 bytes against N^3 operations. C leaves without its help.
// product() of operators/product/product.cuh is lesson 3's kernel for all of these.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "operators/product/plan.cuh"

namespace operators::product {

/// The ways to compute the product of A and B, of a shape that is at least 1 x 1 x 1. T: half or
/// __nv_bfloat16. No way where there is no Hopper GPU to run them. C must not overlap A or B.
template <typename T>
class HalfProduct {
 public:
  HalfProduct(const Workspace& workspace, const Memory<T>& A, const Memory<T>& B,
              const Memory<T>& C, ProductShape shape, RowStrides strides = {})
      : A_(workspace, A, shape.rows, shape.depth, strides.a),
        B_(workspace, B, shape.depth, shape.cols, strides.b),
        C_(C),
        c_stride_(strides.c),
        exchange_(workspace),
        shape_(shape),
        workspace_(workspace) {}

  std::vector<Way> ways() const {
    std::vector<Way> all = Choice::template ways<StoreRounded<T>>(
        workspace_, shape_, A_.stride, B_.stride,
        [self = *this]<class Tile>(const ProductPlan& plan) { self.template launch<Tile>(plan); },
        c_stride_ != 0);
    add_slices<Tiles<T, 64, 64, 1, 1, 1>>(all);
    add_slices<Tiles<T, 64, 128, 1, 1, 2>>(all);
    add_slices<Tiles<T, 128, 128, 1, 1, 2>>(all);
    add_slices<Tiles<T, 128, 256, 2, 1, 2>>(all);
    return all;
  }

 private:
  // Rows, columns, how many tiles of a cluster are below and how many beside each other (in Tiles
  // also boxes for results). 100 tiles were measured at 55 sizes from 256 to 8192; 30 of these lose
  // the least. Of 15 more, tried at 20 sizes from 600 to 2560, two were worth adding.
  using Choice =
      TileChoice<Tiles<T, 128, 256, 2, 1, 2>, Tiles<T, 128, 192, 2, 1, 3>,
                 Tiles<T, 192, 192, 1, 2, 1>, Tiles<T, 128, 144, 4, 2, 1>,
                 Tiles<T, 64, 192, 4, 2, 3>, Tiles<T, 64, 128, 1, 1, 2>, Tiles<T, 64, 128, 2, 1, 2>,
                 Tiles<T, 64, 128, 4, 1, 2>, Tiles<T, 64, 64, 1, 1, 1>, Tiles<T, 64, 64, 2, 4, 1>,
                 TransposedTiles<T, 160, 256, 2, 1>, TransposedTiles<T, 152, 256, 1, 2>,
                 TransposedTiles<T, 288, 128, 1, 2>, TransposedTiles<T, 256, 128, 1, 2>,
                 TransposedTiles<T, 240, 128, 1, 2>, TransposedTiles<T, 232, 128, 1, 2>,
                 TransposedTiles<T, 200, 128, 1, 2>, TransposedTiles<T, 208, 192, 1, 2>,
                 TransposedTiles<T, 184, 192, 1, 2>, TransposedTiles<T, 176, 192, 2, 1>,
                 TransposedTiles<T, 160, 192, 2, 1>, TransposedTiles<T, 160, 192, 2, 2>,
                 TransposedTiles<T, 152, 192, 1, 2>, TransposedTiles<T, 144, 192, 2, 2>,
                 TransposedTiles<T, 96, 192, 2, 1>, TransposedTiles<T, 144, 128, 2, 2>,
                 TransposedTiles<T, 128, 128, 2, 1>, TransposedTiles<T, 112, 128, 2, 1>,
                 TransposedTiles<T, 112, 128, 4, 2>, TransposedTiles<T, 104, 128, 4, 2>,
                 TransposedTiles<T, 72, 128, 2, 4>, TransposedTiles<T, 96, 64, 2, 4>>;

  template <class Tile>
  using Whole = MatrixProduct<Tile, StoreRounded<T>>;

  template <class Tile>
  Whole<Tile> work(const Schedule<Tile>& schedule, const Exchange& exchange) const {
    return {{{A_.map(Tile::kRowsA)}},
            {{B_.map(Tile::kRowsB)}},
            rounded_to<T>(C_, shape_.rows, shape_.cols, Tile::kOutRows, c_stride_),
            schedule,
            exchange};
  }

  template <class Tile>
  void launch(const ProductPlan& plan) const {
    launch(work<Tile>(Schedule<Tile>(shape_, plan.clusters, plan.split),
                      exchange_.template exchange<T>(shape_, plan.split)),
           plan.clusters);
  }

  template <class Work>
  void launch(const Work& work, int clusters) const {
    constexpr size_t kBytes = sizeof(typename Work::Shared);
    using Tile = typename Work::Tile;
    if (A_.copied || B_.copied) {
      const RowCopies<T, 2> copies{A_.job(), B_.job()};
      align_rows<T, 2><<<copies.blocks(), copies.threads(), 0, workspace_.stream>>>(copies);
    }
    allow_shared_bytes(product<Work>, kBytes);
    product<Work><<<clusters * Tile::kBlocks, Tile::kThreads, kBytes, workspace_.stream>>>(work);
  }

  /// The way in slices, if there is one with these tiles, and, where one is wanted, it should be
  /// faster than all before it.
  template <class Tile>
  void add_slices(std::vector<Way>& all) const {
    using Work = SlicedProduct<Tile, StoreRounded<T>>;
    for (const SlicedPlan& plan :
         plan_slices<Tile, StoreRounded<T>>(shape_, A_.stride, B_.stride)) {
      const std::string name = name_of_tile<Tile>() + "; slices: " + std::to_string(plan.slices);
      const bool wanted = workspace_.all_ways || workspace_.only == name ||
                          std::all_of(all.begin(), all.end(), [&](const Way& way) {
                            return plan.microseconds < way.microseconds;
                          });
      if (!wanted) continue;
      const int64_t consumers = int64_t{plan.tiles} * Tile::kBlocks * Tile::kConsumers;
      const auto ended = workspace_.template zeros<unsigned>(consumers);
      const auto partial =
          workspace_.template any<float>(consumers * plan.slices * 128 * Tile::TileSum::size());
      const auto run = [=, self = *this] {
        const auto schedule = Schedule<Tile>::sliced(self.shape_, plan.slices);
        const Work sliced{self.template work<Tile>(schedule, {}), {partial, ended}, plan.slices};
        self.launch(sliced, plan.tiles * plan.slices);
      };
      all.push_back(
          {name, plan.microseconds, run, static_cast<int>(sizeof(typename Work::Shared))});
    }
  }

  AlignedRows<T> A_, B_;
  Memory<T> C_;
  int64_t c_stride_;
  ExchangeMemory exchange_;
  ProductShape shape_;
  Workspace workspace_;
};

}  // namespace operators::product
