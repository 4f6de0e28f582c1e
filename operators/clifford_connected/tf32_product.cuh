// What the products of the fully connected layer on Hopper have in common. Their factors lie in
// memory (operators/product/tf32.cuh). A tile of a result is a sum of products of several pairs of
// matrices, and clusters take the tiles in rounds. TilesInTurn is the Work of such a product
// (operators/product/product.cuh). A Task says what is multiplied, and for what:
//
//     Tile                  a Tf32Tile
//     turns                 which tiles the clusters take
//     place(tile, rank)     where a tile is, `at`. Of at.pairs pairs of matrices the steps
//                           at.begin to at.end - 1 are multiplied, 32 of k each
//     load(copy, at, i, k)  calls copy.left(row, k) and copy.right(col, k): where pair i is
//     store(sum, at, row)   takes 64 rows of the result, from `row` of the tile on
//     kHelped               whether three warps of each block do something beside the product
//
// Some Tasks have more:
//
//     help(warp, warps)     if kHelped: what these warps do
//     wait(at, step)        if kHelped: waits until what a step needs is there
//     kWaits                blocks wait for one another
//     group(tile)           the same number for tiles that wait for one another at their end
//     kStoreSteps           to store a tile takes about as long as so many steps
#pragma once

#include <algorithm>
#include <vector>

#include "operators/clifford/tensors.h"
#include "operators/product/tf32.cuh"
#include "primitives/early_launch.cuh"
#include "primitives/mma.cuh"
#include "primitives/spin.cuh"

namespace operators::clifford_connected {

using namespace primitives;
using namespace clifford;

__device__ inline float rounded_to_tf32(float value) { return __uint_as_float(to_tf32(value)); }

/// Counters in memory. Threads that have written something add to one, and those that read it wait
/// until the counter is high enough.
struct Progress {
  unsigned* done;  ///< the counters
  int before = 0;  ///< the first so many counters are of what is there before the launch

  /// One thread calls this, after a barrier of all threads that have written.
  __device__ void add(int counter, unsigned count = 1) const {
    GridCount(done[counter]).fetch_add(count, cuda::memory_order_release);
  }
  __device__ void wait(int counter, unsigned count) const {
    if (counter < before) return;
    wait_for_count(GridCount(done[counter]), count,
                   "planes, or sums for the norm, that other blocks make");
  }
};

/// Clusters take tiles in rounds, in each round one tile a cluster. Every other round goes from the
/// last cluster to the first one. So if the longest tiles come first, a cluster with one of the
/// longest in a round has one of the shortest in the next. Clusters of a launch beyond `clusters`
/// have none.
struct Turns {
  int tiles, clusters;
  int rounds() const { return ceil_div(tiles, clusters); }
  /// The cluster's tile in this round; if it has none, a number from `tiles` on.
  __host__ __device__ int tile(int round, int cluster) const {
    if (cluster >= clusters) return tiles;
    return round * clusters + (round % 2 == 0 ? cluster : clusters - 1 - cluster);
  }
#if HOPPER_CODE
  /// The tiles of a cluster, one after another.
  struct Own {
    const Turns& turns;
    int cluster, round = 0, tile = 0;

    __device__ bool next() {
      tile = turns.tile(round++, cluster);
      return tile < turns.tiles;
    }
  };
#endif
  /// How many steps it takes until the last cluster is done, if tile i has steps(i). Tiles of a
  /// round that have the same group(i) wait for one another at their end. They are counted as if
  /// they were always neighbours.
  template <typename Steps, typename Group>
  int64_t most(Steps steps, Group group) const {
    std::vector<int64_t> sums(static_cast<size_t>(clusters));
    for (int round = 0; round < rounds(); ++round) {
      const int end = std::min(tiles, (round + 1) * clusters);
      const auto sum = [&](int tile) -> int64_t& {
        const int at = tile - round * clusters;
        return sums[static_cast<size_t>(round % 2 == 0 ? at : clusters - 1 - at)];
      };
      for (int first = round * clusters, next; first < end; first = next) {
        int64_t last = 0;
        for (next = first; next < end && group(next) == group(first); ++next) {
          last = std::max(last, sum(next) + steps(next));
        }
        for (int tile = first; tile < next; ++tile) sum(tile) = last;
      }
    }
    return *std::max_element(sums.begin(), sums.end());
  }
};

/// Where column `col` of a result stands among the rows of the right factor. Of each 16 columns of
/// a sum wgmma gives a thread four, such as columns 0, 1, 8 and 9. In this order a thread's four
/// are four neighbouring columns of the result, 16 bytes.
__host__ __device__ constexpr int place_of_column(int col) {
  return col / 16 * 16 + col % 4 / 2 * 8 + col % 16 / 4 * 2 + col % 2;
}

#if HOPPER_CODE
/// Stores a warpgroup's sum to (row0, col0) of a row-major matrix (rows, cols), `stride` elements a
/// row, or adds it to what is there. A thread has four neighbours of each 16 columns.
template <class Tile>
__device__ __forceinline__ void store_sum(const typename Tile::TileSum& sum, float* to, int row0,
                                          int col0, int rows, int cols, int stride, bool add) {
  const bool fours = stride % 4 == 0 && cols % 4 == 0;
#pragma unroll
  for (int i = 0; i < sum.size(); i += 8) {
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const int row = row0 + Tile::sum_row(2 * below);
      const int col = col0 + 2 * i + threadIdx.x % 4 * 4;
      if (row >= rows || col >= cols) continue;
      float* const at = to + static_cast<size_t>(row) * stride + col;
      const float* const sums = sum.elements + i + 2 * below;
      float4 value = make_float4(sums[0], sums[1], sums[4], sums[5]);
      if (fours) {
        if (add) {
          const float4 old = *reinterpret_cast<const float4*>(at);
          value.x += old.x, value.y += old.y, value.z += old.z, value.w += old.w;
        }
        *reinterpret_cast<float4*>(at) = value;
      } else {
        at[0] = add ? at[0] + value.x : value.x;
        if (col + 1 < cols) at[1] = add ? at[1] + value.y : value.y;
        if (col + 2 < cols) at[2] = add ? at[2] + value.z : value.z;
        if (col + 3 < cols) at[3] = add ? at[3] + value.w : value.w;
      }
    }
  }
}
#endif

/// The Work of a Task. A launch has Tile::kBlocks blocks for each cluster of `turns`, or more
/// blocks, which only help. Tiles may wait for helpers, and at their end for other tiles of the
/// same round. Helpers wait for nobody, and a cluster has at most one tile of a round. So nobody
/// waits forever if all blocks run at the same time: a launch has at most as many as the device
/// holds.
template <class Task>
struct TilesInTurn {
  using Tile = typename Task::Tile;
  using Stage = typename Tile::Stage;
  using Sum = typename Tile::TileSum;
  using Shared = typename Tile::Shared;
  static constexpr int kProducerRegisters = Task::kHelped ? 152 : 24;
  static constexpr int kConsumerRegisters = Task::kHelped ? 176 : 240;
  static constexpr bool kFetchesFirst = false;
  CUtensorMap left, right;
  Task task;

#if HOPPER_CODE
  using Grid = BlockGrid<Tile::kStack, Tile::kSide>;

  /// Starts the copies of a step. Row and column are those of the whole factor, in which the
  /// matrices of all pairs lie one after another. Of a Tf32Factor of several matrices, the row is
  /// that of the matrix number `matrix`.
  struct Copy {
    const TilesInTurn& work;
    const Grid& grid;
    Stage& stage;
    Barrier* arrived;

    __device__ void left(int row, int k) const { grid.load(stage.a, &work.left, row, k, arrived); }
    __device__ void left(int matrix, int row, int k) const {
      if constexpr (Tile::kTransposed) {
#pragma unroll
        for (int i = 0; i < Tile::BM / Tile::kRowsA; ++i) {
          tensor_load(stage.a.boxes[i].row(0), &work.left, matrix, k, row + i * Tile::kRowsA,
                      arrived, evict_normal());
        }
      } else {
        tensor_load(stage.a.row(0), &work.left, matrix, row, k, arrived, evict_normal());
      }
    }
    __device__ void right(int col, int k) const {
      grid.load(stage.b, &work.right, col, k, arrived);
    }
  };

  /// At each step along k the stages of all pairs come, one after another.
  class Copies {
   public:
    __device__ Copies(const TilesInTurn& of, const Grid& blocks)
        : work(of), grid(blocks), tiles{of.task.turns, blocks.cluster} {}
    __device__ bool next() {
      if (++pair < at.pairs) return true;
      pair = 0;
      if (++step >= at.end) {
        if (!tiles.next()) return false;
        at = work.task.place(tiles.tile, grid.rank);
        step = at.begin;
      }
      if constexpr (Task::kHelped) work.task.wait(at, step);
      return true;
    }
    __device__ void load(Stage& stage, Barrier* arrived) const {
      work.task.load(Copy{work, grid, stage, arrived}, at, pair, step * Tile::kDepth);
    }
    __device__ void end() const {}

   private:
    const TilesInTurn& work;
    const Grid& grid;
    Turns::Own tiles;
    typename Task::Place at = {};
    int step = 0, pair = 0;
  };

  class Results {
   public:
    __device__ Results(const TilesInTurn& of, Shared&, const Grid& blocks, int number)
        : work(of), grid(blocks), consumer(number), tiles{of.task.turns, blocks.cluster} {}
    __device__ bool next() {
      if (!tiles.next()) return false;
      at = work.task.place(tiles.tile, grid.rank);
      return true;
    }
    template <class Reader>
    __device__ void multiply(Sum& sum, Reader& reader) const {
      Tile::multiply(sum, reader, (at.end - at.begin) * at.pairs, consumer);
    }
    __device__ void store(Sum& sum) const { work.task.store(sum, at, Tile::row_of(consumer)); }
    __device__ void end() const {}

   private:
    const TilesInTurn& work;
    const Grid& grid;
    const int consumer;
    Turns::Own tiles;
    typename Task::Place at;
  };

  __device__ void help(Shared&, const Grid&) const requires Task::kHelped {
    task.help(blockIdx.x * 3 + warp_of_block() - 1, gridDim.x * 3);
  }
#endif
};

/// Large tiles are those of two blocks with 256 columns, small ones those of one block with 128.
using LargeTile = product::Tf32Tile<256, 2>;
using SmallTile = product::Tf32Tile<128, 1>;
struct TilePlan {
  bool large;
  int clusters;   ///< that the device holds
  double cycles;  ///< of the cluster that has the most to do
};

/// The tile that should take fewer cycles. make(tile, clusters) makes the Task; `clusters`: how
/// many the device holds. A step of a large tile takes the tensor cores 1024 cycles, one of a small
/// tile 512. But in both a block fetches 32 KB for a step, and for a small one that takes longer
/// than 512 cycles: how long is an estimate. So small tiles are better only where large ones leave
/// multiprocessors without work.
template <typename Make>
TilePlan plan_tiles(Make make) {
  const auto plan = [&](auto tile, double cycles) {
    using Tile = decltype(tile);
    using Task = decltype(make(tile, 1));
    constexpr int kBytes = sizeof(typename Tile::Shared);
    const auto kernel = product::product<TilesInTurn<Task>>;
    allow_shared_bytes(kernel, kBytes);
    const int clusters = resident_clusters(kernel, Tile::kBlocks, Tile::kThreads, kBytes);
    const Task task = make(tile, clusters);
    const auto steps = [&](int number) {
      const auto at = task.place(number, 0);
      const int64_t count = int64_t{at.end - at.begin} * at.pairs;
      if constexpr (requires { Task::kStoreSteps; }) return count + Task::kStoreSteps;
      return count;
    };
    const auto group = [&](int number) {
      if constexpr (requires { task.group(number); }) return task.group(number);
      return number;
    };
    const auto most = static_cast<double>(task.turns.most(steps, group));
    return TilePlan{Tile::kBlocks > 1, clusters, cycles * most};
  };
  const TilePlan large = plan(LargeTile(), 1024), small = plan(SmallTile(), 620);
  return large.cycles <= small.cycles ? large : small;
}

/// Where tiles of a result of so many bytes are few, clusters share the sum of one. How many should
/// share it, at most `most`; `plan`, that of one, becomes theirs. plan_of(splits) plans that many.
/// Each leaves a partial sum, and these are written and read again: so they have to save a tenth.
template <typename PlanOf>
int best_splits(TilePlan& plan, int most, double bytes, PlanOf plan_of) {
  constexpr double kBytesPerCycle = 2280;  // an estimate of what memory moves
  double least = 0.9 * plan.cycles;
  int best = 1;
  for (const int splits : {2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32}) {
    const double partials = 2 * splits * bytes / kBytesPerCycle;
    if (splits > most || partials >= least) break;
    const TilePlan with = plan_of(splits);
    const double cycles = with.cycles + partials;
    if (cycles < least) least = cycles, plan = with, best = splits;
  }
  return best;
}

/// visit(tile) with the tile of a plan.
template <typename Visit>
auto with_tile(const TilePlan& plan, Visit visit) {
  return plan.large ? visit(LargeTile()) : visit(SmallTile());
}

/// A factor in memory: (rows, cols), row-major, in TF32, or in fp32 if the copy engine rounds it on
/// the way. Or it is several such matrices in fp32, which it rounds always.
struct Tf32Factor {
  const float* data;
  int64_t rows, cols, matrices = 1;
  bool rounds = false;
};

/// Launches the product with the tile of the plan. Blocks may wait for one another: where a launch
/// is not alone they start together, and the launch fails if the device has no room for all.
template <typename Make>
void multiply_tf32(const CliffordTensors& of, const Tf32Factor& a, const Tf32Factor& b,
                   const TilePlan& plan, Make make) {
  with_tile(plan, [&](auto size) {
    using Task = decltype(make(size, 1));
    using Work = TilesInTurn<Task>;
    using Tile = typename Work::Tile;
    const Task task = make(size, plan.clusters);
    const int clusters = Task::kHelped ? plan.clusters : task.turns.clusters;
    const Work work{a.matrices == 1
                        ? tensor_map<float>(a.data, a.rows, a.cols, Tile::kRowsA, a.rounds)
                        : batch_map<float>(a.data, a.matrices, a.rows, a.cols, Tile::kRowsA, true),
                    tensor_map<float>(b.data, b.rows, b.cols, Tile::kRowsB, b.rounds), task};
    constexpr bool kWaits = requires { Task::kWaits; };
    const Start start = kWaits && !of.alone ? Start::together : Start::early;
    launch_clusters_on(of.stream, product::product<Work>, 1, start,
                       Tile::kBlocks * static_cast<unsigned>(clusters), Tile::kThreads,
                       sizeof(typename Tile::Shared), work);
  });
}

}  // namespace operators::clifford_connected
