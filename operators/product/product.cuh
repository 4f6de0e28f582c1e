// Products for Hopper: out = epilogue(A B), the one at which lesson 3 arrives. The kernel product()
// is a pipeline of stages between a thread that copies and warpgroups that multiply. It takes a
// Work, which has a Tile.
//
// The Tile says what a block multiplies at a time: which rows and columns, in which stages, by how
// many warpgroups, and how the blocks of a cluster share what they copy. The Work says which
// matrices are multiplied and what happens to the result. A cluster takes pieces, one after
// another: some steps along k of a tile of the result.
//
//     Copies copies(work, grid)
//         For the thread that copies, the steps of all pieces: copies.next() goes on to the next
//         one, or is false after the last; copies.load(stage, arrived) starts its copies, and
//         load<true> those of this block alone; copies.end() is called at the end. copies.bytes()
//         says how many bytes a step brings into this block's stage, also from other blocks. If a
//         Work has no such function, a step fills the whole stage.
//     Results results(work, shared, grid, consumer)
//         For a warpgroup that multiplies: results.next() goes on to the next piece, or is false
//         after the last; multiply(sum, reader) takes its steps, store(sum) is the epilogue, or
//         hands the sum to another cluster, and end() is called at the end.
//     Sum, Shared, kProducerRegisters, kConsumerRegisters
//         What a warpgroup adds up, what a block has in shared memory, and the registers that a
//         thread has (0: as many as at the start).
//     kFetchesFirst
//         A block's first stage is ordered before its cluster has met, by load<true>.
//     prepare(shared)
//         If there is one: prepares barriers of its own, in the thread that prepares the pipeline.
//     help(shared, grid)
//         If there is one: what the three warps beside the thread that copies do.
//     kHelpers
//         If there is one: how many of these warps fill a part of each stage, and arrive at its
//         barrier `full`.
//
// MatrixProduct, below, is the Work of a plain product, with an epilogue for its results.
// operators/product/plan.cuh makes plans of its tiles, and estimate.h says how long each should
// take.
#pragma once

#include <limits>
#include <numeric>
#include <string>

#include "operators/product/shape.h"
#include "primitives/check.h"
#include "primitives/early_launch.cuh"
#include "primitives/hopper/pipeline.cuh"
#include "primitives/spin.cuh"

namespace operators::product {

using namespace primitives;

/// Shared memory that a block may have for stages and results, beside barriers.
inline constexpr int kSharedRoom = (227 << 10) - 1024;

/// Tiles of C of 2-byte elements T, kRows by kColumns, one a block at a time. The blocks of a
/// cluster own kStackedTiles tiles below each other by kSideTiles next to each other (BlockGrid).
/// kOutBoxes boxes of 64 columns are room for results of each consumer on their way out.
template <typename T, int kRows, int kColumns, int kStackedTiles, int kSideTiles, int kOutBoxes>
struct TileShape {
  using Element = T;
  static constexpr int BM = kRows, BN = kColumns, kStack = kStackedTiles, kSide = kSideTiles;
  static constexpr int kOut = kOutBoxes, kBlocks = kStack * kSide;
  using Share = RightShare<T, BN, kStack>;  // of a tile of B, what a block fetches
  static constexpr int kRowsA = BM / kSide, kRowsB = Share::kRows;  // of the boxes that it fetches
  static_assert(BM % 8 == 0 && BM % kSide == 0);
  struct Stage {
    LeftTile<T, BM> a;
    RightTile<T, BN> b;
  };
};

/// A block's warpgroups: a producer and kCount consumers.
template <int kCount>
struct Warpgroups {
  static constexpr int kConsumers = kCount, kThreads = 128 * (1 + kConsumers);
};

/// Each consumer multiplies 64 of 64, 128 or 192 rows; of columns it takes any multiple of 16.
template <typename T, int kRows, int kColumns, int kStackedTiles, int kSideTiles, int kOutBoxes>
struct Tiles : TileShape<T, kRows, kColumns, kStackedTiles, kSideTiles, kOutBoxes>,
               Warpgroups<kRows / 64> {
  static constexpr int kOutRows = 64;
  static constexpr int kLinesRead = Warpgroups<kRows / 64>::kConsumers * (64 + kColumns);  // a step
  using TileSum = Sum<kColumns>;

  __host__ __device__ static constexpr int row_of(int consumer) { return 64 * consumer; }
  __host__ __device__ static constexpr int col_of(int) { return 0; }
#if HOPPER_CODE
  template <class Stage>
  __device__ static void start_product(TileSum& sum, const Stage& stage, int consumer, bool add) {
    sum.start_product(stage.a.rows(row_of(consumer)), stage.b, add);
  }
#endif
};

/// The same transposed (TransposedSum), by 64, 128, 192 or 256 columns, which the consumers divide.
/// The number of rows is a multiple of 8, and at most 256. A consumer's sum must fit into its
/// registers. Shared memory has room for at least 40 rows of each consumer's results, by 64 columns
/// (or for all), and for as many stages as fit beside it. What the stages leave is room for
/// results, too.
template <typename T, int kRows, int kColumns, int kStackedTiles, int kSideTiles>
struct TransposedTiles : TileShape<T, kRows, kColumns, kStackedTiles, kSideTiles, 2>,
                         Warpgroups<kColumns % 128 == 0 ? 2 : kColumns / 64> {
  static constexpr int kBoxes = kColumns / kBoxCols;
  static constexpr int kConsumers = TransposedTiles::Warpgroups::kConsumers;
  static constexpr int kSumBoxes = kBoxes / kConsumers;
  static constexpr int kLinesRead = kBoxes * (64 + kRows);  // by wgmma, a step
  static_assert(kColumns % kBoxCols == 0 && kRows >= 16 && kRows <= 256);
  static constexpr int kStage = kRows + kColumns;  // lines of 128 bytes
  static constexpr int kLeast = kConsumers * (kRows < 40 ? kRows : 40);
  /// What `stages` stages leave of so many lines is two boxes for each consumer, of at most most()
  /// rows. Results leave in as few strips as possible, of rows() rows each: a strip waits until the
  /// second one before it has left its box.
  struct Room {
    int lines, stages;
    constexpr int most() const { return (lines - stages * kStage) / kConsumers / 16 * 8; }
    constexpr int strips() const { return (kRows + most() - 1) / most(); }
    constexpr int rows() const { return (kRows + 8 * strips() - 1) / (8 * strips()) * 8; }
    /// The barriers behind the stages, and the counts behind the results, take 8 lines each, for
    /// both parts are multiples of 1024 bytes (ProductShared).
    constexpr bool fits() const {
      return (stages * kStage + 7) / 8 * 8 + 8 + 2 * kConsumers * rows() + 8 <=
             (kSharedRoom + 1024) / 128;
    }
  };
  static constexpr Room room() {
    constexpr int kLines = kSharedRoom / 128, kStages = (kLines - kLeast) / kStage;
    constexpr Room kAll = {kLines, kStages};
    return kAll.fits() ? kAll : Room{kLines - 8, kStages - 1};
  }
  static constexpr int kOutRows = room().rows();
  using TileSum = TransposedSum<kRows, kSumBoxes>;

  __host__ __device__ static constexpr int row_of(int) { return 0; }
  __host__ __device__ static constexpr int col_of(int consumer) {
    return kBoxCols * kSumBoxes * consumer;
  }
#if HOPPER_CODE
  template <class Stage>
  __device__ static void start_product(TileSum& sum, const Stage& stage, int consumer, bool add) {
    sum.start_product(stage.a.rows(0), stage.b, kSumBoxes * consumer, add);
  }
#endif
};

/// The same tiles for a C that is one row of tiles. Then each element of B is read once, and the L2
/// cache is told that nobody needs it a second time: so what others have left there stays.
template <class Tile>
struct OneRow : Tile {
  using Many = Tile;
};
template <class Tile>
inline constexpr bool kIsOneRow = requires {
  typename Tile::Many;
};

/// The same tiles, where the blocks of a cluster fetch whole tiles of a factor in turn (BlockGrid).
template <class Tile>
struct InTurn : Tile {
  static constexpr bool kInTurn = true;
  static constexpr int kRowsA = Tile::BM, kRowsB = kStepK;
};
template <class Tile>
inline constexpr bool kIsInTurn = requires {
  Tile::kInTurn;
};

/// A factor, described to the copy engine. As a right one it may be kCount matrices of as many
/// columns, side by side: each has the same share of a tile's columns.
template <int kCount = 1>
struct Factor {
  CUtensorMap maps[kCount];
};

/// What a block has in shared memory: as many stages as fit beside the room for results.
template <class Tile>
struct ProductShared {
  using OutBox = Box<typename Tile::Element, Tile::kOutRows>;
  static constexpr int kOutBytes = Tile::kConsumers * Tile::kOut * sizeof(OutBox);
  static constexpr int kStages = (kSharedRoom - kOutBytes) / sizeof(typename Tile::Stage);
  Pipeline<typename Tile::Stage, kStages> pipeline;
  OutBox out[Tile::kConsumers][Tile::kOut];
  unsigned ended[Tile::kConsumers];  ///< see Handover
};

#if HOPPER_CODE
// dividend / divisor, 0 to 2^20 by 1 to 2^20. Approximately, and still exactly: the half keeps
// quotients further from the next whole number than __fdividef errs. That is 6 instructions instead
// of 30, which count at the start, where each is fetched from memory.
__device__ inline int quotient(int dividend, int divisor) {
  return static_cast<int>(__fdividef(dividend + 0.5f, static_cast<float>(divisor)));
}
#endif

/// What a cluster does at a time: steps `begin` to `end` - 1 of the tile number `tile`.
struct Piece {
  int tile, begin, end;
};

/// The clusters that share a tile: those from `first` to `last`. The tile is the number `tile` of
/// those that are shared. Where its first cluster has had a piece of another tile, too, that is in
/// memory at the place of the cluster itself, and this piece `moved` places further.
struct Sharers {
  int tile, first, last, moved;

  __host__ __device__ int place(int cluster) const {
    return cluster == first ? cluster + moved : cluster;
  }
};

/// How many rows and columns of C a cluster has at a time, and how much of k a step has.
struct ClusterTile {
  int rows, cols, step;

  constexpr int64_t tiles_of(const ProductShape& of) const {
    return ((int64_t{of.rows} + rows - 1) / rows) * ((int64_t{of.cols} + cols - 1) / cols);
  }
};

/// Which tiles a cluster takes, and in which order. Clusters take whole tiles in turn, for `rounds`
/// rounds; what is left, `shared` tiles, is divided into ranges of equally many steps, one for each
/// cluster (stream-K). Of more tiles than clusters at least as many are shared as there are
/// clusters, so that two clusters at most have pieces of a tile: one ends with its first steps, and
/// the next one began with the rest of it. Of fewer tiles than clusters all are shared. Where there
/// are `slices` times as many clusters as tiles each has one of the equal slices of a tile
/// (split-K).
struct Timetable {
  /// As many as quotient() divides.
  static constexpr int64_t kMostTiles = 1 << 20;
  ProductShape shape;
  int tile_rows, tile_cols, tiles, steps, clusters, rounds, shared;

  /// With more than kMostTiles an Error. Tiles are not shared where a cluster could not work out
  /// its steps in 32 bits, or where `split` is false, or where no steps would be saved.
  constexpr Timetable(const ClusterTile& tile, const ProductShape& of, int cluster_count,
                      bool split)
      : shape(of),
        tile_rows((shape.rows + tile.rows - 1) / tile.rows),
        tile_cols((shape.cols + tile.cols - 1) / tile.cols),
        tiles(tile_rows * tile_cols),
        steps((shape.depth + tile.step - 1) / tile.step),
        clusters(cluster_count),
        rounds((tiles + clusters - 1) / clusters),
        shared(0) {
    if (tile.tiles_of(of) > kMostTiles) {
      throw Error("a product of " + std::to_string(of.rows) + " rows and " +
                  std::to_string(of.cols) + " columns has " + std::to_string(tile.tiles_of(of)) +
                  " tiles, and " + std::to_string(kMostTiles) + " can be counted");
    }
    const int whole = tiles < clusters ? 0 : tiles / clusters - 1;  // rounds, if the rest is shared
    const int64_t rest = tiles - int64_t{whole} * clusters;
    if (split && tiles % clusters != 0 && rest * steps >= clusters &&
        rest * steps * clusters <= std::numeric_limits<int>::max()) {
      rounds = whole;
      shared = static_cast<int>(rest);
    }
  }

  /// How many different steps of a tile there are at which a cluster's range begins.
  constexpr int places() const { return clusters / std::gcd(shared, clusters); }
  /// Of the shared steps, the first one of a cluster's range.
  __host__ __device__ int first_step(int cluster) const {
    return shared * steps * cluster / clusters;
  }
  /// Whose range has this step: the first cluster with (cluster + 1) / clusters of all steps beyond
  /// it.
  __host__ __device__ int cluster_of(int step) const {
    const unsigned all = shared * steps;
    return static_cast<int>((static_cast<unsigned>(step + 1) * clusters + all - 1) / all) - 1;
  }
  __host__ __device__ Sharers sharers(int tile) const {
    const int of_shared = tile - rounds * clusters, begin = of_shared * steps;
    const int first = cluster_of(begin), last = cluster_of(begin + steps - 1);
    return {of_shared, first, last, first_step(first) < begin ? clusters : 0};
  }
};

/// The same for a Tile, and where in C its tiles are.
template <class Tile>
struct Schedule : Timetable {
  static constexpr int kRows = Tile::BM * Tile::kStack, kCols = Tile::BN * Tile::kSide;
  static constexpr int kGroup = 2048 / kRows;
  static constexpr ClusterTile kTile = {kRows, kCols, kLine<typename Tile::Element>};

  constexpr Schedule(const ProductShape& of, int cluster_count, bool split)
      : Timetable(kTile, of, cluster_count, split) {}

#if HOPPER_CODE
  struct Place {
    int row, col;
  };
  /// Where the tile of block (stack, side) starts in the cluster's tile number `tile`: tiles go in
  /// groups of rows of tiles, column by column, so that those of one time form about a square of
  /// C; every other group from the right.
  __device__ Place place(int tile, int stack, int side) const {
    const int group = quotient(tile, kGroup * tile_cols);
    const int within = tile - group * kGroup * tile_cols;
    const int rows = min(kGroup, tile_rows - group * kGroup), column = quotient(within, rows);
    return {(group * kGroup + within - column * rows) * kRows + stack * Tile::BM,
            (group % 2 == 0 ? column : tile_cols - 1 - column) * kCols + side * Tile::BN};
  }

  /// The pieces of a cluster, one after the other.
  struct Pieces {
    const Schedule& schedule;
    int cluster, round = 0, next = 0, last = 0;  // of the shared steps

    __device__ Pieces(const Schedule& of, int number) : schedule(of), cluster(number) {
      if (of.shared > 0) {
        next = of.first_step(number);
        last = of.first_step(number + 1);
      }
    }
    __device__ bool get(Piece& piece) {
      if (round < schedule.rounds) {
        piece = {cluster + round++ * schedule.clusters, 0, schedule.steps};
        return piece.tile < schedule.tiles;
      }
      if (next >= last) return false;
      const int tile = next / schedule.steps, begin = next - tile * schedule.steps;
      const int end = min(schedule.steps, begin + last - next);
      next += end - begin;
      piece = {schedule.rounds * schedule.clusters + tile, begin, end};
      return true;
    }
  };
#endif
};

#if HOPPER_CODE
/// Clusters keep in step: they count their paces, of kSteps steps each, in one number for all. Who
/// is more than one pace ahead of the mean waits, but not for long: it only saves reads, and the
/// others may not have got a multiprocessor yet.
struct Pace {
  static constexpr int kSteps = 16, kPatience = 256;  // kPatience: how often to look
  unsigned* total;
  unsigned clusters, mine = 0;

  __device__ void next() {
    const GridCount counter(*total);
    counter.fetch_add(1, cuda::memory_order_relaxed);
    // Without the pause the compiler takes the loop away: nothing comes of it but time.
#pragma unroll 1
    for (int look = 0; look < kPatience; ++look) {
      if (counter.load(cuda::memory_order_relaxed) >= mine * clusters) break;
      __nanosleep(20);
    }
    ++mine;
  }

  // Nobody shall wait for this cluster any more: it counts as having made `most` paces. The last
  // one leaves a 0 for the next launch.
  __device__ void end(unsigned most) {
    const GridCount counter(*total);
    const unsigned rest = most - mine;
    if (counter.fetch_add(rest, cuda::memory_order_relaxed) + rest == most * clusters) {
      counter.store(0, cuda::memory_order_relaxed);
    }
  }
};

/// Boxes in which a consumer's results leave.
template <typename T, int kBoxes, int kRows = 64>
struct Outbox {
  Box<T, kRows> (&boxes)[kBoxes];
  int consumer;

  __device__ void meet() const { named_barrier(1 + consumer, 128); }
  /// Waits until all boxes but the kNewest last ones to leave may be written. Threads that copied a
  /// box themselves (StoreRounded) have done so when they meet.
  template <int kNewest = 0>
  __device__ void wait() const {
    if (warp_of_block() % 4 == 0 && elect_one()) tensor_store_wait_read<kNewest>();
    meet();
  }
};
#endif

/// The epilogue of a plain product: rounds it to T.
template <typename T>
struct StoreRounded {
  static constexpr int kRightFactors = 1;
  CUtensorMap map;  ///< of C, boxes of Tile::kOutRows rows; only if `aligned`
  T* data;
  int rows, cols;
  bool aligned;  ///< C's rows to 16 bytes

#if HOPPER_CODE
  template <int kCols, int kBoxes>
  __device__ void operator()(const Sum<kCols>& sum, int row, int col,
                             const Outbox<T, kBoxes>& out) const {
    store<kCols>(row, col, out, [&](Box<T, 64>& to, int first) {
      sum.store(to, first, [&](int i) { return sum.elements[i]; });
    });
  }

  /// The same transposed. The last box may repeat some rows of the one before it.
  template <int kRows, int kCount, int kBoxes, int kBoxRows>
  __device__ void operator()(const TransposedSum<kRows, kCount>& sum, int row, int col,
                             const Outbox<T, kBoxes, kBoxRows>& out) const {
    constexpr int kStrips = (kRows + kBoxRows - 1) / kBoxRows;
    send<kStrips * kCount>(out, [&](auto& box, int i) {
      const int first = min(i % kStrips * kBoxRows, kRows - kBoxRows), j = i / kStrips;
      sum.store(box, first, j);
      return Place{row + first, col + kBoxCols * j, kBoxCols};
    });
  }

  /// A warpgroup's results, 64 rows and kCols columns, go to (row, col) of C. fill(box, c) puts
  /// those of 64 columns, from the c-th on, into a box.
  template <int kCols, int kBoxes, typename Fill>
  __device__ void store(int row, int col, const Outbox<T, kBoxes>& out, Fill fill) const {
    send<RightTile<T, kCols>::kBoxes>(out, [&](auto& box, int i) {
      fill(box, kBoxCols * i);
      return Place{row, col + kBoxCols * i, min(kBoxCols, kCols - kBoxCols * i)};
    });
  }

 private:
  struct Place {  // in C
    int row, col, count;
  };
  /// kAll boxes leave one after another. A box is filled while those before it are on their way:
  /// fill(box, i) puts the i-th results into it, and says where in C they belong, `count` columns.
  template <int kAll, int kBoxes, int kRows, typename Fill>
  __device__ void send(const Outbox<T, kBoxes, kRows>& out, Fill fill) const {
#pragma unroll
    for (int i = 0; i < kAll; ++i) {
      auto& box = out.boxes[i % kBoxes];
      if (i >= kBoxes) out.template wait<kBoxes - 1>();
      const Place to = fill(box, i);
      shared_fence();
      out.meet();
      if (!aligned || to.count < kBoxCols) {
        copy(box, to.row, to.col, to.count);
      } else if (warp_of_block() % 4 == 0 && elect_one()) {
        tensor_store(&map, to.row, to.col, box.elements);
        tensor_store_commit();
      }
    }
  }

  /// The warpgroup copies `count` columns of a box to C, kWidth elements a thread at a time. A
  /// thread stays in the same columns. Before it stores it loads up to 8 packs. All passes have
  /// equally many loads, so that the last one has hardly any in vain.
  template <int kWidth, int kRows>
  __device__ void copy(const Box<T, kRows>& box, int row, int col, int count) const {
    constexpr int kPieces = kBoxCols / kWidth, kStep = 128 / kPieces;
    constexpr int kLoads = (kRows + kStep - 1) / kStep, kTimes = (kLoads + 7) / 8;
    constexpr int kAtOnce = (kLoads + kTimes - 1) / kTimes;
    using Pack = Neighbours<T, kWidth>;
    const int own = threadIdx.x % 128 / kPieces, c = threadIdx.x % kPieces * kWidth;
    if (c >= count || col + c >= cols) return;
    T* to = data + static_cast<int64_t>(row + own) * cols + col + c;
    for (int first = own; first < min(kRows, rows - row); first += kAtOnce * kStep) {
      Pack packs[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int r = min(first + i * kStep, kRows - 1);
        packs[i] = *reinterpret_cast<const Pack*>(&box.elements[swizzled(r, c / 8) + c % 8]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i, to += kStep * cols) {
        const int r = first + i * kStep;
        if (r < kRows && row + r < rows) *reinterpret_cast<Pack*>(to) = packs[i];
      }
    }
  }
  template <int kRows>
  __device__ void copy(const Box<T, kRows>& box, int row, int col, int count) const {
    if (cols % 8 == 0) return copy<8>(box, row, col, count);
    cols % 2 == 0 ? copy<2>(box, row, col, count) : copy<1>(box, row, col, count);
  }
#endif
};

/// What clusters tell each other. *pace and ended[] are 0 before the first launch and after every
/// launch. Of tiles that are shared each of a cluster's consumers has an element of ended[] for
/// each tile, and one of partial[] for each place of a piece (Sharers).
struct Exchange {
  unsigned* pace;   ///< null: clusters do not keep in step
  unsigned* ended;  ///< how many pieces of a tile are in memory
  float* partial;   ///< what a consumer has of a tile: 128 threads' elements
};

#if HOPPER_CODE
/// A consumer's sum in memory: a thread's elements in fours, and beside each four those of the
/// other threads. The same thread of another consumer reads them.
template <class TileSum>
__device__ void leave_sum(const TileSum& sum, float4* to) {
#pragma unroll
  for (int i = 0; i < TileSum::size() / 4; ++i) {
    __stcg(to + 128 * i, make_float4(sum.element(4 * i), sum.element(4 * i + 1),
                                     sum.element(4 * i + 2), sum.element(4 * i + 3)));
  }
}
template <class TileSum>
__device__ void add_sum(TileSum& sum, const float4* from) {
#pragma unroll
  for (int i = 0; i < TileSum::size() / 4; ++i) {
    const float4 four = __ldcg(from + 128 * i);
    sum.element(4 * i) += four.x;
    sum.element(4 * i + 1) += four.y;
    sum.element(4 * i + 2) += four.z;
    sum.element(4 * i + 3) += four.w;
  }
}

/// A tile that several clusters share is finished by the one that comes last: it adds up what the
/// others have left in memory. So nobody waits for another cluster, and this is also right where
/// other launches share the device. Sums are added in the order of the clusters, so that each
/// launch gives the same bits; of two numbers the order does not matter. A consumer takes over from
/// those at the same place in other clusters, and each of its threads from the same thread.
struct Handover {
  const Exchange& exchange;
  int consumer, own, consumers;  ///< of the block; of the cluster, and how many it has
  unsigned& before;              ///< in shared memory, of this consumer

  /// Returns whether the cluster came last: then `sum` is the sum of the whole tile.
  template <class TileSum>
  __device__ bool complete(TileSum& sum, const Sharers& of, int cluster) const {
    constexpr int kFours = TileSum::size() / 4;
    const unsigned others = of.last - of.first;
    const GridCount ended(exchange.ended[of.tile * consumers + own]);
    const auto elements = [&](int piece) {
      return reinterpret_cast<float4*>(exchange.partial) +
             size_t{kFours * 128} * (of.place(piece) * consumers + own) + threadIdx.x % 128;
    };
    const int other = cluster == of.first ? of.last : of.first;
    if (others == 1) {  // who finds the other piece there need not leave its own
      if (count([&] { return ended.load(cuda::memory_order_acquire); }) == 1) {
        if (threadIdx.x % 128 == 0) ended.store(0, cuda::memory_order_relaxed);
        add_sum(sum, elements(other));
        return true;
      }
    }
    leave_sum(sum, elements(cluster));
    if (count([&] { return ended.fetch_add(1, cuda::memory_order_acq_rel); }) != others) {
      return false;
    }
    if (threadIdx.x % 128 == 0) ended.store(0, cuda::memory_order_relaxed);
    if (others == 1) {
      add_sum(sum, elements(other));
    } else {
#pragma unroll
      for (int i = 0; i < 4 * kFours; ++i) sum.element(i) = 0;
        // Some 32 loads of a thread are under way at a time.
#pragma unroll(kFours <= 8 ? 4 : kFours <= 16 ? 2 : 1)
      for (int piece = of.first; piece <= of.last; ++piece) add_sum(sum, elements(piece));
    }
    return true;
  }

 private:
  /// What one thread is told, after all threads of the consumer have come here.
  template <typename Ask>
  __device__ unsigned count(Ask ask) const {
    named_barrier(1 + consumer, 128);
    if (threadIdx.x % 128 == 0) before = ask();
    named_barrier(1 + consumer, 128);
    return before;
  }
};

#endif

/// The Work of a plain product: C = epilogue(A B). A cluster of the launch has kGrids of the Tile's
/// clusters (SlicedProduct).
template <class Tile_, class Epilogue, int kGrids = 1>
struct MatrixProduct {
  using Tile = Tile_;
  using Stage = typename Tile::Stage;
  using Sum = typename Tile::TileSum;
  using Shared = ProductShared<Tile>;
  static constexpr int kConsumers = Tile::kConsumers, kRightFactors = Epilogue::kRightFactors;
  static constexpr int kGridsOfCluster = kGrids;
  static constexpr int kProducerRegisters = kConsumers == 1 ? 0 : 24;
  static constexpr int kConsumerRegisters = kConsumers == 1 ? 0 : kConsumers == 2 ? 240 : 160;
  static constexpr bool kFetchesFirst = true;
  Factor<> A;
  Factor<kRightFactors> B;
  Epilogue epilogue;
  Schedule<Tile> schedule;
  Exchange exchange;
  /// What the copy engine does not fetch. Where a box lies outside of a matrix the engine writes
  /// zeros, and that takes longer than to fetch as many bytes. So a tile that reaches below A takes
  /// boxes of A_rest, which have `rest` rows, one box from each block that shares the tile. If rest
  /// is 0, such a tile has no row of A, and no box comes (with InTurn a whole one does). Boxes of B
  /// without a column do not come (with InTurn the first one does). There the stage keeps old
  /// numbers: those of an earlier step, or in the first lap any. They are multiplied, too, but only
  /// for elements outside of C, which never reach C. rest < 0: all boxes come.
  CUtensorMap A_rest = {};
  int rest = -1;

  /// The rows of a box of A_rest, for a matrix A of so many rows.
  static constexpr int rest_of(int rows) {
    return ceil_div(rows % Tile::BM, Tile::BM / Tile::kRowsA);
  }

#if HOPPER_CODE
  using Grid = BlockGrid<Tile::kStack, Tile::kSide, kGrids, kIsInTurn<Tile>>;

  /// Every other piece of a cluster is walked from the end of k to its beginning: what the tile
  /// before it ended with is still in the L2 cache. (Not so if steps have to be `in_order`.) One
  /// block of each cluster keeps in step (Pace).
  class Copies {
   public:
    __device__ Copies(const MatrixProduct& of, const Grid& blocks, bool in_order = false)
        : work(of),
          grid(blocks),
          turns(!in_order),
          pieces(of.schedule, blocks.cluster),
          pace{of.exchange.pace, static_cast<unsigned>(blocks.clusters)},
          in_step(of.exchange.pace != nullptr && blocks.rank == 0) {}
    __device__ bool next() {
      k += by;
      if (left == 0) {
        Piece piece;
        if (!pieces.get(piece)) return false;
        left = piece.end - piece.begin;
        k = (backward ? piece.end - 1 : piece.begin) * kStepK;
        by = backward ? -kStepK : kStepK;
        backward = turns && !backward;
        at = work.schedule.place(piece.tile, grid.stack, grid.side);
        if (kRightFactors == 1 && work.rest >= 0) cut();
      }
      --left;
      if constexpr (kIsInTurn<Tile>) turn = turn + 1 == Shared::kStages ? 0 : turn + 1;
      if (in_step && ++done % Pace::kSteps == 0) pace.next();
      return true;
    }
    /// How many bytes a step brings into this block's stage, from all blocks that send to it.
    __device__ int bytes() const { return is_cut ? cut_bytes : loaded_bytes<Stage>(); }
    /// Of several right factors side by side in a tile each has the same share of its columns.
    template <bool kAlone = false>
    __device__ void load(Stage& stage, Barrier* arrived) const {
      if constexpr (requires { Tile::kLoads; }) {
        return Tile::template load<kAlone>(stage, grid, work, at, k, arrived);
      } else {
        is_cut ? load_rows<kAlone, true>(stage, arrived) : load_rows<kAlone, false>(stage, arrived);
      }
    }
    /// kCut: a part of the tile lies outside of a matrix. For whole tiles the number of copies is
    /// known at compile time, and the thread need not branch.
    template <bool kAlone, bool kCut>
    __device__ void load_rows(Stage& stage, Barrier* arrived) const {
      const CUtensorMap* const a = kCut && rows_cut ? &work.A_rest : &work.A.maps[0];
      const int share = kCut ? cut_share : Tile::kRowsA;
      const int boxes = kCut ? cut_boxes : Tile::Share::kAllBoxes;
      constexpr int kBoxes = Tile::Share::kAllBoxes / kRightFactors;
      static_assert(kRightFactors == 1 || Tile::BN % (kBoxCols * kRightFactors) == 0);
      if (share > 0) {
        if constexpr (kIsInTurn<Tile>) {
          grid.template load<kAlone>(stage.a, a, at.row, k, arrived, turn);
        } else {
          grid.template load<kAlone>(stage.a, a, at.row, k, arrived, share);
        }
      }
      const auto source = [&](int box) {
        return BoxSource{&work.B.maps[kRightFactors == 1 ? 0 : box / kBoxes],
                         kRightFactors == 1 ? at.col + kBoxCols * box
                                            : at.col / kRightFactors + kBoxCols * (box % kBoxes)};
      };
      if constexpr (kIsInTurn<Tile>) {
        grid.template load<kAlone>(stage.b, source, k, arrived, boxes, turn);
      } else if constexpr (kIsOneRow<Tile>) {
        grid.template load<kAlone>(stage.b, source, k, arrived, boxes, evict_first());
      } else {
        grid.template load<kAlone>(stage.b, source, k, arrived, boxes);
      }
    }
    __device__ void end() {
      const Schedule<Tile>& all = work.schedule;
      const int rounds = (all.tiles + all.clusters - 1) / all.clusters;
      if (in_step) pace.end(rounds * all.steps / Pace::kSteps);
    }

   protected:
    const MatrixProduct& work;
    const Grid& grid;
    int k = 0;
    typename Schedule<Tile>::Place at;

   private:
    /// At a new tile: what of it there is to fetch. Where blocks fill stages in turn, each block
    /// brings at least one box, if only of zeros. Otherwise a stage would be full for a reader that
    /// needs nothing of this block. That reader could arrive twice at this block's barrier `empty`,
    /// for this lap and for the next, before a slower reader has arrived once.
    __device__ void cut() {
      constexpr bool kSomething = kIsInTurn<Tile>;
      constexpr int kBoxes = Tile::Share::kAllBoxes;
      const int rows = work.schedule.shape.rows - at.row;
      rows_cut = rows < Tile::BM && !(kSomething && work.rest == 0);
      cut_share = !rows_cut ? Tile::kRowsA : rows > 0 || kSomething ? work.rest : 0;
      cut_boxes = ceil_div(work.schedule.shape.cols - at.col, kBoxCols);
      if (kSomething && cut_boxes < 1) cut_boxes = 1;
      is_cut = rows_cut || cut_boxes < kBoxes;
      int lines = Tile::BM / Tile::kRowsA * cut_share;
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) lines += box < cut_boxes ? kStepK : 0;
      cut_bytes = lines * kLine<typename Tile::Element> * sizeof(typename Tile::Element);
    }

    bool is_cut = false, rows_cut = false;
    int cut_share = 0, cut_boxes = 0, cut_bytes = 0;  ///< rows of A of each block; boxes; of both
    const bool turns;
    typename Schedule<Tile>::Pieces pieces;
    Pace pace;
    const bool in_step;
    bool backward = false;
    int left = 0, by = 0, done = 0;
    int turn = -1;  // the stage that is filled, if it is InTurn
  };

  /// Of clusters that share a tile the one that comes last runs the epilogue.
  class Results {
   public:
    __device__ Results(const MatrixProduct& of, Shared& memory, const Grid& blocks, int number)
        : work(of),
          shared(memory),
          grid(blocks),
          consumer(number),
          pieces(of.schedule, blocks.cluster),
          out{memory.out[number], number} {}
    __device__ bool next() { return pieces.get(piece); }
    template <class Reader>
    __device__ void multiply(Sum& sum, Reader& reader) const {
      reader.take_steps(piece.end - piece.begin, [&](const Stage& stage, bool add) {
        Tile::start_product(sum, stage, consumer, add);
      });
      out.wait();  // while the last products are on their way
    }
    __device__ void store(Sum& sum) const {
      if constexpr (Tile::kConsumers == 1 && requires { work.epilogue.apart; }) {
        if (work.epilogue.apart > 0) return leave_slice(sum);
      }
      if (piece.begin > 0 || piece.end < work.schedule.steps) {
        const Handover handover{work.exchange, consumer, grid.rank * kConsumers + consumer,
                                Tile::kBlocks * kConsumers, shared.ended[consumer]};
        if (!handover.complete(sum, work.schedule.sharers(piece.tile), grid.cluster)) return;
      }
      finish(sum, piece.tile);
    }
    /// The epilogue of a tile, for the whole sum, or for its columns from `col` on.
    template <class Part>
    __device__ void finish(Part& sum, int tile, int col = 0) const {
      const auto at = work.schedule.place(tile, grid.stack, grid.side);
      work.epilogue(sum, at.row + Tile::row_of(consumer), at.col + Tile::col_of(consumer) + col,
                    out);
    }
    __device__ void end() const { out.wait(); }

   private:
    /// Of the clusters that share a tile in equal slices, the n-th one has the n-th slice.
    __device__ void leave_slice(const Sum& sum) const {
      const Schedule<Tile>& all = work.schedule;
      auto store = work.epilogue.sums;
      store.to.data += grid.cluster % (all.clusters / all.tiles) * work.epilogue.apart;
      const auto at = all.place(piece.tile, grid.stack, grid.side);
      store(sum, at.row + Tile::row_of(consumer), at.col + Tile::col_of(consumer), out);
    }

   protected:
    const MatrixProduct& work;
    Shared& shared;
    const Grid& grid;
    const int consumer;
    typename Schedule<Tile>::Pieces pieces;
    const Outbox<typename Tile::Element, Tile::kOut, Tile::kOutRows> out;
    Piece piece;
  };
#endif
};

/// The blocks of a cluster: those of a Tile, or as many as the Work says.
template <class Work>
constexpr int cluster_blocks() {
  if constexpr (requires { Work::kClusterBlocks; }) return Work::kClusterBlocks;
  return Work::Tile::kBlocks;
}
template <class Work>
inline constexpr int kClusterBlocks = cluster_blocks<Work>();

/// Warps that fill a part of each stage, beside the thread that copies.
template <class Work>
constexpr int filling_warps() {
  if constexpr (requires { Work::kHelpers; }) return Work::kHelpers;
  return 0;
}
template <class Work>
inline constexpr int kFillingWarps = filling_warps<Work>();

#if HOPPER_CODE
/// How many bytes a step brings into this block's stage.
template <class Stage, class Copies>
__device__ int bytes_of(const Copies& copies) {
  if constexpr (requires { copies.bytes(); }) return copies.bytes();
  return loaded_bytes<Stage>();
}
#endif

/// Launched with kClusterBlocks<Work> blocks for each cluster. One thread of a block orders copies,
/// and Tile::kConsumers warpgroups multiply.
template <class Work>
__global__ void HOPPER_CLUSTER(kClusterBlocks<Work>) __launch_bounds__(Work::Tile::kThreads, 1)
    product(const __grid_constant__ Work work) {
#if HOPPER_CODE
  using Tile = typename Work::Tile;
  using Stage = typename Tile::Stage;
  extern __shared__ __align__(1024) char bytes[];
  auto& shared = *reinterpret_cast<typename Work::Shared*>(bytes);
  const typename Work::Grid grid;
  const int warp = warp_of_block();
  if (Work::kFetchesFirst && warp == 0 && elect_one()) {
    prepare_first(shared.pipeline);
    wait_for_previous_kernel();  // it may have made copies of A and B
    if constexpr (Work::kFetchesFirst) {
      typename Work::Copies copies(work, grid);
      if (copies.next()) {
        put_first(shared.pipeline, bytes_of<Stage>(copies), [&](Stage& stage, Barrier* arrived) {
          copies.template load<true>(stage, arrived);
        });
      }
    }
  } else if (warp == 1 && elect_one()) {
    if constexpr (requires { work.prepare(shared); }) work.prepare(shared);
    if constexpr (kIsInTurn<Tile>) {
      prepare_in_turn<Work::kFetchesFirst>(shared.pipeline, grid, Tile::kConsumers);
    } else {
      prepare<Work::kFetchesFirst>(shared.pipeline, Tile::kConsumers * grid.kPeers,
                                   1 + kFillingWarps<Work>);
    }
  }
  grid.meet();
  if constexpr (!Work::kFetchesFirst) wait_for_previous_kernel();

  if (warp < 4) {
    if constexpr (Work::kProducerRegisters > 0) registers_shrink_to<Work::kProducerRegisters>();
    if (warp == 0) {
      if (!elect_one()) return;
      Writer writer(shared.pipeline, Work::kFetchesFirst);
      typename Work::Copies copies(work, grid);  // from the first step on: put() knows it is filled
      while (copies.next()) {
        writer.put(bytes_of<Stage>(copies),
                   [&](Stage& stage, Barrier* arrived) { copies.load(stage, arrived); });
      }
      if constexpr (Tile::kBlocks > 1) writer.finish();
      copies.end();
    } else if constexpr (requires { work.help(shared, grid); }) {
      work.help(shared, grid);
    }
  } else {
    if constexpr (Work::kConsumerRegisters > 0) registers_grow_to<Work::kConsumerRegisters>();
    Reader reader(shared.pipeline, grid);
    typename Work::Results results(work, shared, grid, warp / 4 - 1);
    while (results.next()) {
      typename Work::Sum sum;
      results.multiply(sum, reader);
      reader.finish();
      results.store(sum);
    }
    results.end();
  }
#endif
}

}  // namespace operators::product
