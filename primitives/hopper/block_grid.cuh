// How the blocks of a cluster divide what they copy, and whom they tell that a stage is empty.
//
// Blocks of a cluster need the same tiles. So each block copies a share of such a tile, and the
// copy arrives in the shared memory of all blocks that need it. Two questions follow: who copies
// what, and who has to be told that a stage has been read? load() answers the first one, told() and
// tell() the second.
//
// For example, two blocks have tiles of C = A B that lie one below the other (BlockGrid<2, 1>). In
// each step a block needs a tile of A of its own, and both need the same tile of B. That is 64 x
// 256 numbers of fp16, in four boxes of 64 columns:
//
//                  block 0                       block 1
//     load of A    its tile, for itself          its tile, for itself
//     load of B    boxes 0 and 1, to both        boxes 2 and 3, to both
//     tell         tells blocks 0 and 1          tells blocks 0 and 1
//
// Block 0 copies into the stages of both blocks. So it may fill a stage again only when both blocks
// have read it. That is why both are told.
#pragma once

#include "primitives/hopper/hopper.cuh"
#include "primitives/hopper/tiles.cuh"

namespace primitives {

/// How kSharers blocks divide the copies of a tile of the right factor (B in the example above),
/// row-major and of kCols columns. If its boxes can be divided equally, each block fetches some
/// whole boxes, all rows of them. Otherwise each block fetches some rows of every box. For example,
/// two blocks share a tile of fp16. With 256 columns it has four boxes of 64 x 64, and each block
/// fetches two of them. With 192 columns it has three boxes, and each block fetches 32 rows of
/// each.
template <typename T, int kCols, int kSharers>
struct RightShare {
  static constexpr int kAllBoxes = RightTile<T, kCols>::kBoxes;
  static constexpr bool kWhole = kAllBoxes % kSharers == 0;
  static constexpr int kBoxes = kWhole ? kAllBoxes / kSharers : kAllBoxes;
  static constexpr int kRows = kWhole ? kLine<T> : kLine<T> / kSharers;
};

/// The same for a right tile whose columns are contiguous. It comes in boxes of kCols columns, a
/// multiple of 8. If the columns can be divided equally, there is one box for each block. Otherwise
/// boxes have 32 columns, and the blocks take them in turn: of 128 columns that three blocks share,
/// block 0 fetches boxes 0 and 3, block 1 fetches box 1, and block 2 fetches box 2.
template <int kAllCols, int kSharers>
struct ColumnShare {
  static constexpr bool kEqual = kAllCols % (8 * kSharers) == 0;
  static constexpr int kCols = kEqual ? kAllCols / kSharers : 32;
  static constexpr int kBoxes = kAllCols / kCols;
  static_assert(kAllCols % kCols == 0);
};

/// Where a box of a right tile comes from: of which matrix it is, and its first column there.
struct BoxSource {
  const CUtensorMap* map;
  int col;
};

#if HOPPER_CODE

/// The blocks of a cluster own tiles of a product that lie beside each other. kStack of them lie
/// one below the other and need the same tile of the right factor. kSide of them lie side by side
/// and need the same tile of the left factor. Each block fetches a share of what it has in common
/// with others, for all of them. BlockGrid<1, 1> is a block alone.
///
/// For example, in BlockGrid<2, 2> the ranks of the blocks lie so:
///
///     0  2
///     1  3
///
/// Take block 1. It shares the right factor with block 0: it fetches the second half of that tile,
/// for blocks 0 and 1. It shares the left factor with block 3: it fetches the first half of that
/// tile, for blocks 1 and 3. When it has read a stage it tells blocks 0, 1 and 3, which have copied
/// parts of this stage.
///
/// `rank` is this block's number in its cluster. `stack` and `side` are its row and its column in
/// such a picture, 1 and 0 for block 1. `cluster` is the number of this cluster, and `clusters` is
/// how many there are.
///
/// A cluster may have kGrids such pictures, which share nothing that is copied: the ranks of the
/// second one follow those of the first. Then rank, stack and side are those in the own picture,
/// `cluster` and `clusters` count pictures, and `first` is the rank in the cluster of the own
/// picture's first block.
///
/// With kInTurn blocks do not divide each tile of a factor, but fetch whole tiles in turn: that of
/// stage s is fetched by the block number s % sharers of those that share it. So a copy is larger,
/// and of the others only those are told that a stage has been read who fill it. For small tiles
/// with many stages that is up to a fifth faster. (With few stages some blocks would fetch more
/// than others.) In BlockGrid<2, 2> stage 1 is filled with tiles of the left factor by blocks 2 and
/// 3, whose column is 1, and with those of the right factor by blocks 1 and 3, whose row is 1. So
/// block 0 tells itself and blocks 1 and 2 when it has read stage 1.
template <int kStack, int kSide, int kGrids = 1, bool kInTurn = false>
struct BlockGrid {
  static constexpr int kBlocks = kStack * kSide;
  static constexpr int kPeers = kStack + kSide - 1;  ///< who share with a block, and itself
  const int first = kBlocks == 1 || kGrids == 1 ? 0 : cluster_rank() / kBlocks * kBlocks;
  const int rank = kBlocks == 1 ? 0 : cluster_rank() - first;
  const int stack = kSide == 1 ? rank : rank % kStack, side = kSide == 1 ? 0 : rank / kStack;
  const int cluster = blockIdx.x / kBlocks, clusters = gridDim.x / kBlocks;

  /// All threads of all blocks call this after prepare() of a pipeline, and wait here for each
  /// other.
  __device__ static void meet() {
    if constexpr (kBlocks > 1) {
      cluster_meet();
    } else {
      __syncthreads();
    }
  }

  /// What one thread has to tell: it tells block `rank` that stage s has been read, for each s with
  /// (s & mask) == bits.
  struct Told {
    int rank, mask, bits;
  };
  /// Whom this thread of a warpgroup tells. The kPeers blocks that copy parts of stages to this
  /// block, this block among them, have to be told. Each of the first kPeers threads tells one
  /// block: the first kStack threads those in this block's column of the picture, and the others
  /// the other blocks in its row. In block 1 of BlockGrid<2, 2> threads 0, 1 and 2 tell blocks 0, 1
  /// and 3. With kInTurn other blocks are told only of the stages that they fill.
  __device__ Told told() const {
    // s % kStack and s % kSide are bits of s.
    static_assert(!kInTurn || ((kStack & (kStack - 1)) == 0 && (kSide & (kSide - 1)) == 0));
    const int thread = threadIdx.x % 128;
    if (thread < kStack) {
      const int mask = kInTurn && thread != stack ? kStack - 1 : 0;
      return {first + thread + kStack * side, mask, thread & mask};
    }
    if (thread < kPeers) {
      const int other = thread - kStack, column = other < side ? other : other + 1;
      const int mask = kInTurn ? kSide - 1 : 0;
      return {first + stack + kStack * column, mask, column & mask};
    }
    return {0, 0, 1};  // tells nobody: s & 0 is never 1
  }
  /// All threads of a warpgroup call this, each with its own told(), when they have read stage
  /// number `stage`. The stage's barrier is empty[stage].
  __device__ static void tell(const Told& whom, Barrier* empty, int stage) {
    if ((stage & whom.mask) != whom.bits) return;
    if constexpr (kBlocks == 1) {
      barrier_arrive(&empty[stage]);
    } else {
      barrier_arrive(&empty[stage], whom.rank);
    }
  }
  /// The same for a barrier that is alone.
  __device__ void release(Barrier& empty) const requires(!kInTurn) { tell(told(), &empty, 0); }
  /// How many blocks tell this one that they have read that stage.
  __device__ int readers(int stage) const requires kInTurn {
    return 1 + (stage % kSide == side ? kSide - 1 : 0) + (stage % kStack == stack ? kStack - 1 : 0);
  }

  /// Who is sent a copy, as bits: bit i stands for rank i. beside() are the blocks in this block's
  /// row of the picture, which share a tile of the left factor. below() are those in its column,
  /// which share a tile of the right factor. This block is among both. In BlockGrid<2, 2>, for rank
  /// 1, beside() is 0b1010, ranks 1 and 3, and below() is 0b0011, ranks 0 and 1.
  ///
  /// In the code kAll has the bits of the picture's top row, one for each column, and kTwo has
  /// those of its first two columns.
  __device__ uint16_t beside() const {
    static_assert(kSide <= 2 || kSide == 4);
    constexpr unsigned kTwo = 1 | 1 << kStack;
    constexpr unsigned kAll = kSide == 1 ? 1 : kSide == 2 ? kTwo : kTwo | kTwo << 2 * kStack;
    return static_cast<uint16_t>(kAll << stack << first);
  }
  __device__ uint16_t below() const {
    return static_cast<uint16_t>(((1 << kStack) - 1) << kStack * side << first);
  }

  /// Starts the copies of this block's share of a tile of the left factor. The tile begins at (row,
  /// k) of the matrix. Each block's share is `share` rows, as many as a box of the map has: those
  /// of the first block come first. They go to all blocks of beside(), and their bytes count at the
  /// barrier `arrived` of each. With kAlone the block fetches all shares, for itself alone.
  template <bool kAlone = false, typename T, int kRows>
  __device__ void load(LeftTile<T, kRows>& to, const CUtensorMap* map, int row, int k,
                       Barrier* arrived, int share = kRows / kSide) const {
    static_assert(kRows % kSide == 0);
#pragma unroll
    for (int i = 0; i < (kAlone ? kSide : 1); ++i) {
      const int first = (kAlone ? i : side) * share;
      if constexpr (kAlone || kSide == 1) {
        tensor_load(to.row(first), map, row + first, k, arrived);
      } else {
        tensor_load_multicast(to.row(first), map, row + first, k, arrived, beside());
      }
    }
  }

  /// The same in turn.
  template <bool kAlone = false, typename T, int kRows>
  __device__ void load(LeftTile<T, kRows>& to, const CUtensorMap* map, int row, int k,
                       Barrier* arrived, int stage) const requires kInTurn {
    if constexpr (kAlone || kSide == 1) {
      tensor_load(to.row(0), map, row, k, arrived);
    } else if (stage % kSide == side) {
      tensor_load_multicast(to.row(0), map, row, k, arrived, beside());
    }
  }

  /// The same where memory has the left factor transposed. Nobody shares it.
  template <bool kAlone = false, int kRows>
  __device__ void load(TransposedLeftTile<kRows>& to, const CUtensorMap* map, int row, int k,
                       Barrier* arrived) const {
    constexpr int kBoxRows = TransposedLeftTile<kRows>::kBoxRows;
    static_assert(kSide == 1);
#pragma unroll
    for (int i = 0; i < kRows / kBoxRows; ++i) {
      tensor_load(to.boxes[i].row(0), map, k, row + kBoxRows * i, arrived);
    }
  }

  /// The same for a tile of a row-major right factor, which begins at (k, col). The share goes to
  /// all blocks of below(). RightShare says which share that is.
  template <bool kAlone = false, typename T, int kCols>
  __device__ void load(RightTile<T, kCols>& to, const CUtensorMap* map, int col, int k,
                       Barrier* arrived) const {
    load<kAlone>(
        to,
        [&](int box) {
          return BoxSource{map, col + kLine<T> * box};
        },
        k, arrived);
  }

  /// The same if the boxes of the tile come from several matrices: source(box) says where each box
  /// comes from.
  template <bool kAlone = false, typename T, int kCols, typename Source>
  __device__ void load(RightTile<T, kCols>& to, Source source, int k, Barrier* arrived) const {
    load<kAlone>(to, source, k, arrived, RightTile<T, kCols>::kBoxes);
  }
  /// The same, but only the first `boxes` boxes are fetched, and none if that is not positive.
  /// There may be a policy for the L2 cache (copies.cuh).
  template <bool kAlone = false, typename T, int kCols, typename Source, typename... Policy>
  __device__ void load(RightTile<T, kCols>& to, Source source, int k, Barrier* arrived, int boxes,
                       Policy... policy) const {
    using Share = RightShare<T, kCols, kStack>;
    constexpr int kBoxes = kAlone ? Share::kAllBoxes : Share::kBoxes;
    constexpr int kLoads = kAlone ? kLine<T> / Share::kRows : 1;
#pragma unroll
    for (int i = 0; i < kBoxes * kLoads; ++i) {
      const int box = i / kLoads + (!kAlone && Share::kWhole ? stack * kBoxes : 0);
      const int first = (kAlone ? i % kLoads : Share::kWhole ? 0 : stack) * Share::kRows;
      if (box >= boxes) break;
      const BoxSource from = source(box);
      if constexpr (kAlone || kStack == 1) {
        tensor_load(to.boxes[box].row(first), from.map, k + first, from.col, arrived, policy...);
      } else {
        tensor_load_multicast(to.boxes[box].row(first), from.map, k + first, from.col, arrived,
                              below(), policy...);
      }
    }
  }

  /// The same in turn.
  template <bool kAlone = false, typename T, int kCols, typename Source>
  __device__ void load(RightTile<T, kCols>& to, Source source, int k, Barrier* arrived, int boxes,
                       int stage) const requires kInTurn {
    constexpr int kBoxes = RightTile<T, kCols>::kBoxes;
    if (!kAlone && stage % kStack != stack) return;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      if (box >= boxes) break;
      const BoxSource from = source(box);
      if constexpr (kAlone || kStack == 1) {
        tensor_load(to.boxes[box].row(0), from.map, k, from.col, arrived);
      } else {
        tensor_load_multicast(to.boxes[box].row(0), from.map, k, from.col, arrived, below());
      }
    }
  }

  /// The same for a right factor whose columns are contiguous: its column `col` is row `col` of the
  /// matrix in memory. ColumnShare says which share that is.
  template <bool kAlone = false, typename T, int kCols>
  __device__ void load(ColumnTile<T, kCols>& to, const CUtensorMap* map, int col, int k,
                       Barrier* arrived) const {
    using Share = ColumnShare<kCols, kStack>;
    constexpr int kLoads = kAlone ? Share::kBoxes : (Share::kBoxes + kStack - 1) / kStack;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int box = kAlone ? i : i * kStack + stack, first = box * Share::kCols;
      if (!kAlone && !Share::kEqual && box >= Share::kBoxes) break;
      if constexpr (kAlone || kStack == 1) {
        tensor_load(to.row(first), map, col + first, k, arrived);
      } else {
        tensor_load_multicast(to.row(first), map, col + first, k, arrived, below());
      }
    }
  }
};

/// A cluster whose blocks all read what each of them fetches. Its blocks are a row of the grid, and
/// how many they are is known only at run time. With five blocks all() is 0b11111, and in release()
/// threads 0 to 4 tell one block each. kBy says who calls release(): a warpgroup, or each of its
/// warps.
enum class Releases { warpgroup, warp };
template <Releases kBy = Releases::warpgroup>
struct BlockRow {
  const int rank = blockIdx.x, blocks = gridDim.x;

  __device__ static void meet() { cluster_meet(); }
  __device__ uint16_t all() const { return static_cast<uint16_t>((1 << blocks) - 1); }
  __device__ void release(Barrier& empty) const {
    const int thread = threadIdx.x % (kBy == Releases::warp ? 32 : 128);
    if (thread < blocks) barrier_arrive(&empty, thread);
  }
};

#endif  // HOPPER_CODE

}  // namespace primitives
