// C = A B in true fp32, for any shape, on any GPU: lesson 2's last kernel, with tiles and a
// division of the work that suit the shape.
//
//     A (rows x depth), B (depth x cols), C (rows x cols): fp32, row-major
//
// Where lesson 2's kernel is slow, and what helps there:
//
//   - Tiles that do not fill the last round. For 3000 x 3000 elements there are 24 x 12 tiles of
//     128 x 256: 132 multiprocessors compute 264 of them in two rounds, and in a third one 24 work
//     and 108 wait. So the steps of the last tiles are put in a line, and each block gets an equal
//     range of it, which may begin or end in the middle of a tile:
//
//         block 0 |--- tile 0 ---|-- tile 1, first steps
//         block 1                   tile 1, last steps --|--- tile 2 ---|-- tile 3 ...
//
//     Blocks that share a tile leave their sums in memory. Whoever is the last one adds them,
//     always in the same order, and stores the tile. No block waits for another one: this is also
//     right where other launches share the device. Who is the last one, a number for each tile
//     says, which has to be 0 before. A launch of its own writes these zeros. The blocks that
//     multiply do not wait for it until they have sums to leave.
//   - Large tiles. 4097 rows need a 33rd row of tiles for one row of C. With 128 x 256 that costs
//     as much as 128 rows. And only one block with such a tile fits on a multiprocessor, but two
//     with 64 x 128: one multiplies while the other waits at a barrier.
//   - Few tiles, and a long k. Of 96 x 243 elements there are 8 tiles of 64 x 64: there a tile gets
//     as many blocks as there is room for, each a range of k. Up to eight blocks may be a cluster:
//     then their sums do not go through memory (meeting.cuh).
//   - Small tiles. 512 x 512 elements are only 32 tiles of 64 x 128, but 64 of 64 x 64. There each
//     of 256 threads would own 4 x 4 elements, with twice the reads for a multiply-add. So a thread
//     owns 8 x 8 elements, and 64 threads are enough. A block has four such groups, called slices:
//     each multiplies a quarter of the k of every step, and at the end they add up their sums
//     through shared memory.
//   - Rows that are not aligned to 16 bytes. For a large product, another kernel first copies B
//     into rows that are, and C leaves through shared memory, so that a warp stores 32 neighbours.
//     For a small one that launch would take longer than it saves, and B is copied by single
//     floats. A always is, since it is transposed on the way.
//   - Short sums. Small blocks, of which a multiprocessor has many, compute them (blocks.cuh).
//
// What all of them do in a step says steps.cuh. An estimate says which way should be the fastest
// (see Way).
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "operators/caller.h"
#include "operators/estimate.h"
#include "operators/product/fp32/blocks.cuh"
#include "operators/product/fp32/lanes.cuh"
#include "operators/product/fp32/steps.cuh"
#include "operators/product/shape.h"
#include "primitives/early_launch.cuh"
#include "primitives/launch.h"
#include "primitives/row_parts.cuh"

namespace operators::product {

using namespace primitives;
using operators::Caller, operators::Memory, operators::Way, operators::way_id, operators::Ways;

inline constexpr int kFp32Threads = 256;  ///< of a block, whatever its tile

/// A block's tile has BM x BN elements of C, of which a thread owns TM x TN, and a step BK of k.
/// kStages pairs of tiles of A and B are in shared memory.
template <int BM_, int BN_, int BK_, int TM_, int TN_, int kStages_, int kSlices_, int kResident_,
          bool kAligned_, int kGroups_>
struct Fp32Tile {
  static constexpr int BM = BM_, BN = BN_, BK = BK_, TM = TM_, TN = TN_, kStages = kStages_;
  static constexpr int kSlices = kSlices_;      ///< groups of threads that divide each step's k
  static constexpr int kResident = kResident_;  ///< blocks for which a multiprocessor has registers
  static constexpr bool kAligned = kAligned_;   ///< B, or its copy, has rows aligned to 16 bytes
  static constexpr int kGroups = kGroups_;      ///< of a thread's copies of a step
  static constexpr int kThreads = kFp32Threads;
  static constexpr int kThreadsX = BN / TN, kThreadsY = BM / TM;
  static constexpr int kSliceThreads = kThreadsX * kThreadsY;
  static_assert(kSlices * kSliceThreads == kFp32Threads);
  /// In shared memory are kStages times a tile of A, transposed, and one of B.
  static constexpr int kStrideA = BM + 4, kTileA = BK * kStrideA, kTileB = BK * BN;
  static constexpr int kTiles = kStages * (kTileA + kTileB);
  /// Where the warps turn results into rows: beside the tiles; or in their place,
  /// behind the largest of what slices give each other (add_slices).
  static constexpr int kWarps = kFp32Threads / 32, kSliceWarps = kSliceThreads / 32;
  using Meeting = Fp32Meeting<kWarps, TM * TN / kSlices / 4>;
  static constexpr int kRowsAt =
      kSlices == 1 ? kTiles : std::max(TM * TN / 2 * kFp32Threads, Meeting::kFloats);
  using Lanes = Fp32Lanes<8>;
  /// Behind it are the barriers of a cluster.
  static constexpr int kShared = std::max(kTiles, kRowsAt + kWarps * Lanes::kFloats);
  static constexpr int kSharedBytes = kShared * static_cast<int>(sizeof(float)) + 16;

  /// Which slice this thread belongs to, and where it stands among the others of that; or would
  /// stand if it were of that warp.
  static __device__ int slice(int warp = threadIdx.x / 32) {
    return kSlices == 1 ? 0 : warp / kSliceWarps;
  }
  static __device__ int x(int warp = threadIdx.x / 32) {
    return warp % kSliceWarps % (kThreadsX / 8) * 8 + Lanes::x();
  }
  static __device__ int y(int warp = threadIdx.x / 32) {
    return warp % kSliceWarps / (kThreadsX / 8) * 4 + Lanes::y();
  }
};

/// Stores four neighbours of row `own` of those that are left to a thread of that warp.
template <class Tile, bool kAligned>
__device__ void store_fp32_four(float* tiles, float4 four, int warp, int own, int j,
                                const Fp32Operands& to, int row0, int col0) {
  const int i = own + Tile::TM / Tile::kSlices * Tile::slice(warp);
  float* const of_warp = tiles + Tile::kRowsAt + threadIdx.x / 32 * Tile::Lanes::kFloats;
  Tile::Lanes::template store<kAligned, Tile::kAligned>(
      of_warp, four, to, row0 + i / 4 * 4 * Tile::kThreadsY + i % 4, Tile::y(warp),
      col0 + j * Tile::kThreadsX, Tile::x(warp));
}

/// Stores a thread's sums. Of a tile with several slices only kOwn of the TM rows are left to the
/// thread. kAligned: C's rows are aligned to 16 bytes. (Tile::kAligned says so of B's.) Then each
/// thread stores four neighbours at once. Else, if B has been copied, the lanes of a warp exchange
/// what they have, and store 32 neighbours of a row. Where nothing is copied, products are small,
/// and threads store what they have, one by one.
template <class Tile, bool kAligned, int kOwn>
__device__ void store_fp32_sums(float* tiles, const float (&sum)[kOwn][Tile::TN],
                                const Fp32Operands& to, int row0, int col0) {
#pragma unroll
  for (int own = 0; own < kOwn; ++own) {
#pragma unroll
    for (int j = 0; j < Tile::TN; j += 4) {
      store_fp32_four<Tile, kAligned>(tiles, *reinterpret_cast<const float4*>(&sum[own][j]),
                                      threadIdx.x / 32, own, j, to, row0, col0);
    }
  }
}

/// What a block does at a time: of tile number `tile` the steps from `begin` up to, not including,
/// `end`. The blocks from number `first` to `last` do the tile's steps, in this order.
struct Fp32Piece {
  int tile, begin, end, first, last;
};

/// What costs a multiprocessor cycles: fitted to shapes drawn at random, on an H200.
struct Fp32Costs {
  static constexpr double kMultiply = 0.874;     ///< of what 128 multiply-adds a cycle take
  static constexpr double kNarrowCopy = 1.75;    ///< of a warp's copy, of 4 bytes a thread
  static constexpr double kCopy = 4.03;          ///< the same of 16
  static constexpr double kStep = 102;           ///< of each step
  static constexpr double kAtOnce = 848;         ///< the same where all its copies start together
  static constexpr double kAlone = 59.9;         ///< more, where no other block works meanwhile
  static constexpr double kTile = 1088;          ///< of each tile, or two of clusters
  static constexpr double kStored = 0.169;       ///< of a number of C
  static constexpr double kNarrowStore = 0.642;  ///< more, where it is stored one by one
  static constexpr double kShared = 0.239;       ///< of a number of a tile that is shared in memory
  static constexpr double kPiece = 0.0277;       ///< the same for each piece
  static constexpr double kMeet = 2153;          ///< of a cluster
  static constexpr double kSent = 0.272;         ///< of a number that is sent to another block
  static constexpr double kLaunch = 1.95;        ///< microseconds
  static constexpr double kHandover = 5.57;      ///< of shared tiles, and of writing zeros for it
  static constexpr double kCopyB = 3.1;          ///< of the launch that copies B
  static constexpr double kCopied = 1.57;        ///< of what its bytes take at the memory's rate
};

/// Which block does what. If the number of tiles is a multiple of that of blocks, no tile is
/// shared. Else each block first takes whole tiles, while tiles for two more rounds are left:
/// blocks at work together then read neighbouring tiles at the same k. The steps of the other tiles
/// form a line, one tile after the other. Each block gets one range of the line, and all ranges are
/// equally long. A piece is the part of a range that is inside of one tile. Or the blocks of a
/// cluster have equal ranges of one tile, and no block has a second one.
template <class Tile>
struct Fp32Timetable {
  int cols;                 ///< tiles beside each other
  int steps;                ///< of a tile
  int whole;                ///< so many tiles are not shared, those with the lowest numbers
  int blocks, each, rest;   ///< a block has `each` steps of the line, the first `rest` one more
  int ranges = 1;           ///< that a tile has, if these are of a cluster
  double microseconds = 0;  ///< that this should take

  static int64_t tiles_of(const ProductShape& shape) {
    return static_cast<int64_t>(ceil_div(shape.rows, Tile::BM)) * ceil_div(shape.cols, Tile::BN);
  }
  static int steps_of(const ProductShape& shape) { return ceil_div(shape.depth, Tile::BK); }

  Fp32Timetable(const ProductShape& shape, int sms, int block_count)
      : cols(ceil_div(shape.cols, Tile::BN)), steps(steps_of(shape)), blocks(block_count) {
    const int tiles = static_cast<int>(tiles_of(shape));
    whole = tiles % blocks == 0 ? tiles : std::max(0, tiles / blocks - 1) * blocks;
    const int line = (tiles - whole) * steps;
    each = line / blocks, rest = line % blocks;

    // No range reaches from one tile into the next. (If one does, a tile may have a piece more.)
    const bool even = blocks % tiles == 0 && steps % (blocks / tiles) == 0;
    const int pieces = std::min(ceil_div(blocks, tiles) + !even, steps);
    const int crowd = ceil_div(blocks, sms);  // blocks that share a multiprocessor
    using Costs = Fp32Costs;
    double work = std::ceil(1.0 * tiles * steps / blocks) * cycles_of_step(crowd) +
                  ceil_div(tiles, blocks) * crowd * (Costs::kTile + kNumbers * stored(shape));
    if (shares_tiles()) work += crowd * kNumbers * (Costs::kShared + pieces * Costs::kPiece);
    microseconds = microseconds_of(shape, work) + (shares_tiles() ? Costs::kHandover : 0);
  }

  /// Each tile has a cluster of so many blocks.
  static Fp32Timetable of_clusters(const ProductShape& shape, int sms, int ranges) {
    using Costs = Fp32Costs;
    const auto tiles = static_cast<int>(tiles_of(shape));
    Fp32Timetable plan(shape, sms, tiles);
    plan.ranges = ranges;
    plan.blocks = tiles * ranges;
    const int resident = resident_fp32_blocks<Tile>();
    const int64_t blocks = fp32_crowd(tiles, ranges, resident);
    const int left = static_cast<int>(blocks % resident);
    const auto rounds = static_cast<double>(blocks / resident);
    const double work =
        ceil_div(plan.steps, ranges) *
            (rounds * cycles_of_step(resident) + (left > 0 ? cycles_of_step(left) : 0)) +
        static_cast<double>(blocks) *
            (Costs::kTile / 2 + kNumbers * (stored(shape) / ranges + Costs::kSent)) +
        (rounds + (left > 0 ? 1 : 0)) * Costs::kMeet;
    plan.microseconds = microseconds_of(shape, work);
    return plan;
  }

  /// With the two numbers of blocks that should be the best: where each tile gets the same number
  /// of them, and where each multiprocessor does. At most `capacity` run at the same time.
  /// And with clusters of each number of blocks, if there are clusters.
  static std::vector<Fp32Timetable> plans(const ProductShape& shape, int sms, int capacity,
                                          bool clusters) {
    const int64_t tiles = tiles_of(shape), steps = steps_of(shape);
    if (tiles * steps > INT_MAX - capacity) return {};
    const int64_t most_blocks = std::min<int64_t>(capacity, tiles * steps);
    std::vector<Fp32Timetable> plans;
    const auto add_best = [&](int64_t unit) {
      std::optional<Fp32Timetable> best;
      for (int64_t count = unit; count <= most_blocks; count += unit) {
        const Fp32Timetable plan(shape, sms, static_cast<int>(count));
        if (!best || plan.microseconds < best->microseconds) best = plan;
      }
      if (best) plans.push_back(*best);
    };
    add_best(tiles);
    if (sms % tiles != 0) add_best(sms);
    if (!clusters || Tile::kSlices == 1 || tiles * kMostFp32Ranges > INT_MAX) return plans;
    const auto most = std::min<int64_t>({kMostFp32Ranges, sms, steps});
    for (int ranges = 2; ranges <= most; ++ranges) {
      plans.push_back(of_clusters(shape, sms, ranges));
    }
    return plans;
  }

  /// Through memory.
  bool shares_tiles() const { return each > 0; }

  /// Where on the line the range of block number `block` begins, and that of the block before it
  /// ends.
  __device__ int start(int block) const { return block * each + min(block, rest); }

  /// Which block has the step at this place of the line.
  __device__ int block_at(int place) const {
    const int longer = rest * (each + 1);  // steps of the blocks that have one more
    return place < longer ? place / (each + 1) : rest + (place - longer) / each;
  }

  /// What block number `block` does after i other pieces. Nothing: begin = end.
  __device__ Fp32Piece piece(int block, int i) const {
    if (ranges > 1) {
      const int rank = block % ranges;
      const auto start = [&](int of) {
        return static_cast<int>(static_cast<int64_t>(steps) * of / ranges);
      };
      return i > 0 ? Fp32Piece{}
                   : Fp32Piece{block / ranges, start(rank), start(rank + 1), block, block};
    }
    const int tile = block + i * blocks;
    if (tile < whole) return {tile, 0, steps, block, block};
    const int from = start(block), to = start(block + 1);
    const int of_line = from / steps + i - whole / blocks, place = of_line * steps;
    const int begin = max(from - place, 0), end = min(to - place, steps);
    if (begin >= end) return {};
    return {whole + of_line, begin, end, block_at(place), block_at(place + steps - 1)};
  }

  /// The first row (y) and column (x) of a tile.
  __device__ int2 place(int tile) const { return {tile % cols * Tile::BN, tile / cols * Tile::BM}; }

 private:
  static constexpr double kNumbers = Tile::BM * Tile::BN;

  /// Of a step of all blocks of a multiprocessor.
  static double cycles_of_step(int crowd) {
    using Costs = Fp32Costs;
    constexpr double kNarrow = Tile::BM + (Tile::kAligned ? 0 : Tile::BN),
                     kWide = Tile::kAligned ? Tile::BN / 4.0 : 0;
    constexpr double kBusy = Costs::kMultiply * kNumbers * Tile::BK / 128 +
                             (Costs::kNarrowCopy * kNarrow + Costs::kCopy * kWide) * Tile::BK / 32 +
                             (Tile::kGroups > 1 ? Costs::kStep : Costs::kAtOnce);
    return std::max(kBusy + (Tile::kResident > 1 ? Costs::kAlone : 0), crowd * kBusy);
  }
  /// Of a number of C.
  static double stored(const ProductShape& shape) {
    const bool one_by_one = shape.cols % 4 != 0 && !Tile::kAligned;
    return Fp32Costs::kStored + (one_by_one ? Fp32Costs::kNarrowStore : 0);
  }
  static double microseconds_of(const ProductShape& shape, double work) {
    return Fp32Costs::kLaunch + std::max(work / cycles(), fp32_microseconds_to_read(shape));
  }
};

/// How the sums of a tile's pieces come together. A range has at most two pieces that are not whole
/// tiles: the end of one tile, and the beginning of another. So each block has room for the sums of
/// two in memory. A thread finds those of the thread with the same number, 16 bytes at a time.
template <int kBlockFloats>
struct Fp32Handover {
  float* sums;
  unsigned* arrived;  ///< for each block, of the tile that begins there: see is_last_block()
  /// The kernel before this one does nothing but write zeros into `arrived`. So it is waited for
  /// only here, and meanwhile blocks multiply.
  bool waits = false;

  static size_t floats(int blocks) { return size_t{2 * kBlockFloats} * blocks; }

  /// Returns whether the sums are now those of the whole tile: if all other pieces had come before.
  template <int kRows, int kCols>
  __device__ bool add_up(float (&sum)[kRows][kCols], const Fp32Piece& piece) const {
    float4* to = room(blockIdx.x, piece.first);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kCols; j += 4, to += kFp32Threads) {
        __stcg(to, make_float4(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]));
      }
    }
    if (waits) wait_for_previous_kernel();
    if (!is_last_block(arrived + piece.first, piece.last - piece.first + 1)) return false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kCols; ++j) sum[i][j] = 0;
    }
    for (int block = piece.first; block <= piece.last; ++block) {
      const float4* from = room(block, piece.first);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kCols; j += 4, from += kFp32Threads) {
          const float4 more = __ldcg(from);
          sum[i][j] += more.x;
          sum[i][j + 1] += more.y;
          sum[i][j + 2] += more.z;
          sum[i][j + 3] += more.w;
        }
      }
    }
    return true;
  }

 private:
  __device__ float4* room(int block, int first) const {
    const int piece = 2 * block + (block == first ? 1 : 0);
    return reinterpret_cast<float4*>(sums + size_t{kBlockFloats} * piece) + threadIdx.x;
  }
};

/// Adds up the sums of the slices of a block. Threads kApart apart have sums of the same elements
/// of C: one gives the upper half of its rows to the other, and gets the lower half of that one's.
/// Then those half as far apart do so with what they have left. finish() gets the TM / kSlices rows
/// that remain a thread's own.
template <int kSlices, int kApart, int TM, int TN, class Finish>
__device__ void add_slices(float* shared, float (&sum)[TM][TN], Finish finish) {
  if constexpr (kSlices == 1) {
    finish(sum);
  } else {
    const bool upper = threadIdx.x / kApart % 2 == 1;
    float own[TM / 2][TN];
    float4* at = reinterpret_cast<float4*>(shared);
    __syncthreads();  // All have read the last tiles, or the last halves.
#pragma unroll
    for (int i = 0; i < TM / 2; ++i) {
#pragma unroll
      for (int j = 0; j < TN; j += 4) {
        float give[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          give[e] = upper ? sum[i][j + e] : sum[i + TM / 2][j + e];
          own[i][j + e] = upper ? sum[i + TM / 2][j + e] : sum[i][j + e];
        }
        at[(i * TN + j) / 4 * kFp32Threads + threadIdx.x] =
            make_float4(give[0], give[1], give[2], give[3]);
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TM / 2; ++i) {
#pragma unroll
      for (int j = 0; j < TN; j += 4) {
        const float4 more = at[(i * TN + j) / 4 * kFp32Threads + (threadIdx.x ^ kApart)];
        own[i][j] += more.x;
        own[i][j + 1] += more.y;
        own[i][j + 2] += more.z;
        own[i][j + 3] += more.w;
      }
    }
    add_slices<kSlices / 2, kApart / 2>(shared, own, finish);
  }
}

/// The piece of the tile at `place`. Not inlined: the compiler then finds registers for it as if it
/// were alone.
template <class Tile, bool kAligned>
__device__ __noinline__ void multiply_fp32_piece(float* tiles, Fp32Operands of,
                                                 Fp32Handover<Tile::BM * Tile::BN> handover,
                                                 typename Tile::Meeting meeting, int2 place,
                                                 Fp32Piece piece) {
  const auto finish = [&](auto& sum) {
#if CLUSTER_CODE
    if constexpr (Tile::kSlices > 1) {
      if (meeting.ranges > 1) {
        meeting.add_up(sum, [&](int warp, int number, float4 four) {
          store_fp32_four<Tile, kAligned>(tiles, four, warp, number / (Tile::TN / 4),
                                          number % (Tile::TN / 4) * 4, of, place.y, place.x);
        });
        return;
      }
    }
#endif
    if (piece.first < piece.last && !handover.add_up(sum, piece)) return;
    store_fp32_sums<Tile, kAligned>(tiles, sum, of, place.y, place.x);
  };
  float sum[Tile::TM][Tile::TN] = {};
  add_fp32_steps<Tile, Tile::kAligned>(tiles, of, place.y, place.x, piece.begin, piece.end, sum);
  add_slices<Tile::kSlices, kFp32Threads / 2>(tiles, sum, finish);
}

/// A block does its pieces, one after the other. Sums stay in registers, and only those of a shared
/// tile go through memory. Ranges are equally long, so all blocks end at about the same time.
template <class Tile, bool kAligned>
__global__ void __launch_bounds__(kFp32Threads, Tile::kResident)
    fp32_product(Fp32Operands of, Fp32Timetable<Tile> timetable,
                 Fp32Handover<Tile::BM * Tile::BN> handover) {
  extern __shared__ __align__(16) float fp32_tiles[];
  const typename Tile::Meeting meeting = {
      fp32_tiles, reinterpret_cast<Barrier*>(fp32_tiles + Tile::kShared),
      static_cast<int>(blockIdx.x) % timetable.ranges, timetable.ranges};
#if CLUSTER_CODE
  if (Tile::kSlices > 1 && timetable.ranges > 1) meeting.set_up();
#endif
  if (!handover.waits) wait_for_previous_kernel();
  for (int i = 0;; ++i) {
    const Fp32Piece piece = timetable.piece(blockIdx.x, i);
    if (piece.begin == piece.end) {
      // A block without a shared tile has not waited. Unless all kernels do, the next one could
      // begin before those have ended that came before this one.
      if (handover.waits) wait_for_previous_kernel();
      return;
    }
    const int2 place = timetable.place(piece.tile);
    __syncthreads();  // All have read the last tiles of the piece before.
    multiply_fp32_piece<Tile, kAligned>(fp32_tiles, of, handover, meeting, place, piece);
  }
}

/// Copies B into rows that are `pitch` apart and aligned. Block (x, y) copies kThreads columns,
/// from number y kThreads on, of kRows rows: a thread has the loads of all these rows under way
/// together. The blocks of the first columns also write `count` zeros.
template <int kThreads, int kRows>
__global__ void __launch_bounds__(kThreads)
    align_fp32_rows(const float* __restrict__ from, float* __restrict__ to, int rows, int cols,
                    int from_pitch, int pitch, unsigned* zeros, int count) {
  const int row0 = static_cast<int>(blockIdx.x) * kRows, left = rows - row0;
  from += static_cast<size_t>(row0) * from_pitch;
  to += static_cast<size_t>(row0) * pitch;
  const int across = static_cast<int>(gridDim.y) * kThreads;
  for (int col = static_cast<int>(blockIdx.y) * kThreads + threadIdx.x; col < cols; col += across) {
    float values[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      values[i] = i < left ? from[static_cast<size_t>(i) * from_pitch + col] : 0;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (i < left) to[static_cast<size_t>(i) * pitch + col] = values[i];
    }
  }
  if (blockIdx.y > 0) return;
  const int all = static_cast<int>(gridDim.x) * kThreads;
  for (int i = static_cast<int>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += all) {
    zeros[i] = 0;
  }
}

/// Writes zeros. The next kernel need not wait for them before it starts.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) write_fp32_zeros(unsigned* to, int count) {
  start_next_kernel();
  const int i = static_cast<int>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) to[i] = 0;
}

/// What every launch needs.
struct Fp32Launches {
  Memory<float> A, B, C;
  ProductShape shape;
  RowStrides strides;  ///< of dense rows, too
  int pitch;           ///< of the copy of B
  cudaStream_t stream;
  /// What some ways need: the copy of B, and a Fp32Handover, of which the largest is allocated.
  struct Needed {
    std::optional<Memory<float>> copy, sums;
    std::optional<Memory<unsigned>> arrived;
  };
  std::shared_ptr<Needed> needed = std::make_shared<Needed>();

  Fp32Operands operands(bool copied) const {
    return {A,
            copied ? needed->copy->data() : B.data(),
            C,
            shape,
            static_cast<int>(strides.a),
            copied ? pitch : static_cast<int>(strides.b),
            static_cast<int>(strides.c)};
  }

  void align_b(unsigned* zeros, int count) const {
    constexpr int kRows = 8;  // of B, that a block copies
    const dim3 blocks(blocks_for(shape.depth, kRows),
                      std::min(blocks_for(shape.cols, kFp32Threads), 1U << 15));
    align_fp32_rows<kFp32Threads, kRows>
        <<<blocks, kFp32Threads, 0, stream>>>(B, *needed->copy, shape.depth, shape.cols,
                                              static_cast<int>(strides.b), pitch, zeros, count);
  }

  template <class Tile, bool kAlignedB, bool kAlignedC>
  void launch_blocks(int blocks, int ranges) const {
    constexpr bool kCopied = kAlignedB && !kAlignedC;
    if (kCopied) align_b(nullptr, 0);
    launch_clusters_on(stream, fp32_block_product<Tile, kAlignedB, kAlignedC>, ranges, !kCopied,
                       blocks, Tile::kThreads, Tile::kSharedBytes, operands(kCopied), ranges);
  }

  template <class Tile, bool kAligned>
  void launch(const Fp32Timetable<Tile>& plan) const {
    constexpr bool kCopied = Tile::kAligned && !kAligned;
    const bool shares = plan.shares_tiles();
    Fp32Handover<Tile::BM * Tile::BN> handover{};
    if (shares) handover = {needed->sums->data(), needed->arrived->data(), !kCopied};
    const int zeros = shares ? plan.blocks : 0;
    if (kCopied) {
      align_b(handover.arrived, zeros);
    } else if (shares) {
      write_fp32_zeros<kFp32Threads>
          <<<blocks_for(zeros, kFp32Threads), kFp32Threads, 0, stream>>>(handover.arrived, zeros);
    }
    const Fp32Operands of = operands(kCopied);
    // Not early among the blocks of the launch that copies B: these would find places on few
    // multiprocessors, two or three on each.
    launch_clusters_on(stream, fp32_product<Tile, kAligned>, plan.ranges, !kCopied, plan.blocks,
                       kFp32Threads, Tile::kSharedBytes, of, plan, handover);
  }
};

/// The ways to compute the product of A and B. Sizes are at least 1, A and B may not overlap C. No
/// way with tiles of which C has so many that their steps cannot be counted in 31 bits, or that
/// need more shared memory than a block of this device can have.
class Fp32Product {
 public:
  Fp32Product(const Caller& caller, Memory<float> A, Memory<float> B, Memory<float> C,
              ProductShape shape, RowStrides strides = {})
      : aligned_(shape.cols % 4 == 0),
        launches_{
            std::move(A),
            std::move(B),
            std::move(C),
            shape,
            {strides.a != 0 ? strides.a : shape.depth, strides.b != 0 ? strides.b : shape.cols,
             strides.c != 0 ? strides.c : shape.cols},
            ceil_div(shape.cols, 32) * 32,
            caller.stream},
        ways_(caller.search) {
    aligned_ ? offer_all<true>() : offer_all<false>();
    Fp32Launches::Needed& needed = *launches_.needed;
    if (copied_) needed.copy = caller.workspace.any<float>(size_t(shape.depth) * launches_.pitch);
    if (floats_ == 0) return;
    needed.sums = caller.workspace.any<float>(floats_);
    needed.arrived = caller.workspace.any<unsigned>(blocks_);
  }

  std::vector<Way> ways() const { return ways_.found(); }

 private:
  template <bool kAligned>
  void offer_all() {
    offer<Fp32Tile<128, 256, 16, 8, 16, 3, 1, 1, true, 1>, kAligned>();
    offer<Fp32Tile<64, 128, 32, 8, 8, 4, 2, 2, true, 3>, kAligned>();
    offer<Fp32Tile<64, 64, 32, 8, 8, 3, 4, 2, true, 2>, kAligned>();
    if (!kAligned) offer<Fp32Tile<64, 128, 32, 8, 8, 4, 2, 2, kAligned, 6>, kAligned>();
    offer<Fp32Tile<32, 64, 64, 8, 8, 3, 8, 2, kAligned, 4>, kAligned>();
    offer<Fp32Tile<32, 32, 64, 8, 4, 3, 8, 3, kAligned, 4>, kAligned>();
    offer_blocks<Fp32Block<32, 64, 16, 4, 4, 8, 4>, kAligned, kAligned>();
    offer_blocks<Fp32Block<64, 64, 16, 4, 3, 5, 4>, kAligned, kAligned>();
    offer_blocks<Fp32Block<64, 128, 16, 8, 3, 4, 4>, kAligned, kAligned>();
    if (!kAligned) offer_blocks<Fp32Block<64, 128, 16, 8, 3, 4, 4>, true, false>();
    offer_blocks<Fp32Block<128, 32, 16, 4, 3, 4, 4>, kAligned, kAligned>();
  }

  /// A block for each tile or, where tiles are few, a cluster. B's rows are aligned to 16 bytes
  /// like C's, or because it is copied before.
  template <class Tile, bool kAlignedB, bool kAlignedC>
  void offer_blocks() {
    constexpr bool kCopied = kAlignedB && !kAlignedC;
    const auto kernel = fp32_block_product<Tile, kAlignedB, kAlignedC>;
    const ProductShape& shape = launches_.shape;
    allow_shared_bytes(kernel, Tile::kSharedBytes);
    if (Tile::kSharedBytes > most_shared_bytes()) return;
    const int64_t tiles = int64_t{ceil_div(shape.rows, Tile::BM)} * ceil_div(shape.cols, Tile::BN);
    const int most =
        !has_clusters(kernel)
            ? 1
            : std::min({kMostFp32Ranges, multiprocessors(), ceil_div(shape.depth, Tile::BK)});
    for (int ranges = 1; ranges <= most; ++ranges) {
      if (tiles * ranges > INT_MAX) return;
      const double microseconds =
          fp32_block_microseconds<Tile, kAlignedB, kAlignedC>(shape, ranges);
      const WayId id = way_id({Tile::BM, Tile::BN, Tile::TM, Tile::TN, ranges, kCopied});
      const bool wanted = ways_.offer(microseconds, id, [&] {
        return Way{name_of_blocks<Tile>(ranges, kCopied), microseconds,
                   [of = launches_, ranges, blocks = static_cast<int>(tiles * ranges)] {
                     of.template launch_blocks<Tile, kAlignedB, kAlignedC>(blocks, ranges);
                   },
                   Tile::kSharedBytes};
      });
      if (!wanted) continue;
      copied_ = ways_.most(copied_, kCopied);
      blocks_ = ways_.most(blocks_, size_t{0});  // It hands nothing over through memory.
      floats_ = ways_.most(floats_, size_t{0});
    }
  }

  /// "tile 64 x 64; of a thread: 8 x 4; blocks of a tile: 2"
  template <class Tile>
  static std::string name_of_blocks(int ranges, bool copied) {
    return "tile " + std::to_string(Tile::BM) + " x " + std::to_string(Tile::BN) +
           "; of a thread: " + std::to_string(Tile::TM) + " x " + std::to_string(Tile::TN) +
           (ranges > 1 ? "; blocks of a tile: " + std::to_string(ranges) : "") +
           (copied ? "; B copied" : "");
  }

  template <class Tile, bool kAligned>
  void offer() {
    constexpr bool kCopied = Tile::kAligned && !kAligned;
    const auto kernel = fp32_product<Tile, kAligned>;
    const ProductShape& shape = launches_.shape;
    allow_shared_bytes(kernel, Tile::kSharedBytes);
    if (Tile::kSharedBytes > most_shared_bytes()) return;
    const int sms = multiprocessors();
    const int capacity = resident_fp32_blocks<Tile>() * sms;
    for (const auto& plan :
         Fp32Timetable<Tile>::plans(shape, sms, capacity, has_clusters(kernel))) {
      const double microseconds =
          plan.microseconds + (kCopied
                                   ? Fp32Costs::kCopyB + Fp32Costs::kCopied * 8.0 * shape.depth *
                                                             shape.cols / memory_rate()
                                   : 0);
      const WayId id = way_id({Tile::BM, Tile::BN, Tile::kSlices, plan.blocks, plan.shares_tiles(),
                               plan.ranges, kCopied});
      const bool wanted = ways_.offer(microseconds, id, [&] {
        return Way{name_of<Tile>(plan, kCopied), microseconds,
                   [of = launches_, plan] { of.template launch<Tile, kAligned>(plan); },
                   Tile::kSharedBytes};
      });
      if (!wanted) continue;
      copied_ = ways_.most(copied_, kCopied);
      const size_t blocks = plan.shares_tiles() ? plan.blocks : 0;
      const size_t floats = Fp32Handover<Tile::BM * Tile::BN>::floats(static_cast<int>(blocks));
      blocks_ = ways_.most(blocks_, blocks);
      floats_ = ways_.most(floats_, floats);
    }
  }

  /// "tile 64 x 128; slices: 2; blocks: 264; tiles shared; B copied"
  template <class Tile>
  static std::string name_of(const Fp32Timetable<Tile>& plan, bool copied) {
    return "tile " + std::to_string(Tile::BM) + " x " + std::to_string(Tile::BN) +
           "; slices: " + std::to_string(Tile::kSlices) +
           (plan.ranges > 1 ? "; blocks of a tile: " + std::to_string(plan.ranges)
                            : "; blocks: " + std::to_string(plan.blocks)) +
           (plan.shares_tiles() ? "; tiles shared" : "") + (copied ? "; B copied" : "");
  }

  bool aligned_;  // rows of B and C, to 16 bytes
  Fp32Launches launches_;
  bool copied_ = false;
  size_t blocks_ = 0, floats_ = 0;  // of tiles that are shared
  Ways ways_;
};

}  // namespace operators::product
