// How long attention should take with each tile. The costs were fitted to shapes drawn at random,
// each computed in all ways, on an H200.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "operators/estimate.h"

namespace operators::attention {

/// What a tile of so many rows and keys costs a multiprocessor, in cycles: a step, which is a tile
/// of keys, and a piece of work beside its steps, where all its blocks are busy.
struct TileCost {
  int rows, keys, width;
  int by_wgmma;  ///< blocks of a multiprocessor; 0: the tile is multiplied by mma.sync
  double step, piece;
  int blocks = by_wgmma;  ///< of a multiprocessor
};

inline constexpr TileCost kTileCosts[] = {
    {192, 128, 64, 1, 2000, 4600},   {192, 64, 64, 1, 1180, 2590},
    {64, 128, 64, 1, 1280, 2510},    {64, 128, 64, 2, 1510, 3900},
    {64, 64, 64, 2, 954, 2350},      {64, 64, 64, 3, 1240, 2950},
    {128, 128, 128, 1, 2130, 4450},  {128, 64, 128, 1, 1280, 2860},
    {64, 128, 128, 1, 1590, 1990},   {64, 64, 128, 2, 1350, 3150},
    {128, 64, 256, 1, 2300, 4290},   {64, 64, 256, 1, 1590, 3380},
    {128, 64, 64, 0, 3480, 4990, 2}, {128, 64, 128, 0, 3210, 3590, 1},
    {64, 32, 256, 0, 1850, 1700, 1},
};

/// Those of the tile; if it is not there, of another one with the same width.
constexpr const TileCost& cost_of(int rows, int keys, int width, int by_wgmma) {
  const TileCost* like = kTileCosts;
  for (const TileCost& each : kTileCosts) {
    if (each.width != width || each.by_wgmma != by_wgmma) continue;
    like = &each;
    if (each.rows == rows && each.keys == keys) break;
  }
  return *like;
}

inline constexpr double kFirstPiece = 4.25;  ///< microseconds: the first loads, the last stores
inline constexpr double kMaskCycles = 700;   ///< of a piece that the causal mask cuts
inline constexpr double kUnevenEnd = 0.1;    ///< of the longest piece: until the last block ends
inline constexpr double kLastRound = 0.5;    ///< and of what the last round lacks, in short pieces
inline constexpr double kPartsInRounds = 1.25;  ///< times as long take parts with a mask, in rounds
inline constexpr double kAlone = 0.5;           ///< of its time a block saves with none beside it
inline constexpr double kBytesOfOne = 22;  ///< from memory, that a multiprocessor gets in a cycle
inline constexpr double kMerge = 3, kMergePart = 0.02;  ///< microseconds; of each part
inline constexpr double kMergeTraffic = 1.8;  ///< that partial results are written and read

// ---- Gradients, on Hopper -----------------------------------------------------------------------

// Microseconds; fitted to shapes drawn at random on an H200.
inline constexpr double kBackwardStep = 2.4, kBackwardStep64 = 2.6;  ///< of a tile of queries
inline constexpr double kBackwardItem = 4;     ///< of an item beside its steps
inline constexpr double kBackwardAdded = 2;    ///< until the sums of splits are added up
inline constexpr double kBackwardSplit = 0.3;  ///< and of each split
inline constexpr double kBackwardRate = 2e6;   ///< bytes of these sums in a microsecond
inline constexpr double kBackwardRun = 1.07;   ///< times as long takes a step of a run
inline constexpr int64_t kMostSplits = 32;

/// What the tiles of keys of the gradients are.
struct BackwardTiles {
  int64_t tiles, places;     ///< of all sequences; how many the device has at a time
  int64_t count;             ///< of steps of the longest
  double steps, mean_steps;  ///< the same, where some may be half ones; of all in the mean
  double step;               ///< microseconds of one
  double bytes;              ///< that a split of a tile leaves
};

/// The first `plain` tiles are an item each, and the others `splits` each. Or, with a run, each
/// place has so many steps of all tiles, one after the other, and a tile is divided among `splits`
/// places at most.
struct BackwardDivision {
  int64_t plain = 0, splits = 1, run = 0;
};

/// How long they should take.
inline double microseconds(const BackwardTiles& of, const BackwardDivision& by) {
  const double splits = static_cast<double>(by.splits), places = static_cast<double>(of.places);
  const double divided = static_cast<double>(of.tiles - by.plain), all = divided * splits;
  const double whole = kBackwardItem + of.step * of.steps;
  if (by.run > 0) {
    // A block has the end of one tile and the beginning of the next.
    const double of_block = of.step * of.steps * divided / places * kBackwardRun;
    return 2 * kBackwardItem + of_block + kBackwardAdded + kBackwardSplit * splits +
           std::min(all, divided + places) * of.bytes / kBackwardRate;
  }
  const double longest =
      kBackwardItem + of.step * (by.splits == 1 ? of.steps : std::ceil(of.steps / splits));
  const double mean = kBackwardItem + of.step * of.mean_steps / splits;
  const double added =
      by.splits == 1 ? 0
                     : kBackwardAdded + kBackwardSplit * splits + all * of.bytes / kBackwardRate;
  // Equal items come in rounds; of others the shorter ones fill the gaps.
  const double last = of.mean_steps == of.steps || all <= places
                          ? std::ceil(all / places) * longest
                          : std::max(longest, all / places * mean + longest / 3);
  return static_cast<double>(by.plain / of.places) * whole + last + added;
}

/// How the tiles should be divided: not at all, unless that saves a few per cent; or all; or, where
/// they are equal, those that do not make a whole round, even if that saves less: few sums have to
/// be added up then. Or, if `runs` may be, in runs, where there are fewer tiles than places.
inline BackwardDivision divide(const BackwardTiles& of, bool runs) {
  BackwardDivision best;
  const double undivided = microseconds(of, best);
  double least = undivided;
  const auto most = std::min(kMostSplits, static_cast<int64_t>(of.steps));
  const int64_t whole_rounds = of.mean_steps == of.steps ? of.tiles / of.places * of.places : 0;
  for (const int64_t plain : {int64_t{0}, whole_rounds}) {
    for (int64_t splits = 2; splits <= most && plain < of.tiles; ++splits) {
      const BackwardDivision by = {plain, splits};
      const double took = microseconds(of, by);
      if (took < std::min(least, (plain > 0 ? 0.985 : 0.97) * undivided)) best = by, least = took;
    }
  }
  if (!runs || of.tiles >= of.places || of.tiles * of.count > 1 << 30) return best;
  const int64_t run = (of.tiles * of.count + of.places - 1) / of.places;
  const BackwardDivision by = {0, (of.count + run - 2) / run + 1, run};
  return by.splits <= kMostSplits && microseconds(of, by) < std::min(least, 0.97 * undivided)
             ? by
             : best;
}

/// Where a block has all keys of a head, up to so many: microseconds of a tile of 64 queries, and
/// of a head beside these.
struct ShortKeys {
  int64_t keys;
  double step, head;
};
inline constexpr std::array<ShortKeys, 3> kShortKeys = {
    ShortKeys{128, 2.5, 0.5}, {192, 2.15, 3.9}, {256, 3.5, 4}};
inline constexpr double kShortFirst = 3.5;  ///< until the first head has come, and after the last
// Of launches that are not needed then: microseconds, and bytes that they move in a microsecond.
// For each number of dQ they read d_out and out, and write dQ; if it is added up in memory, there
// are zeros, the additions of two tiles of keys, and one more load.
inline constexpr double kBackwardAround = 10, kAroundRate = 5e6, kWholeBytes = 10, kSumBytes = 26;

/// How long that should take with so many heads of K and V.
inline double microseconds(const ShortKeys& of, int64_t heads, int64_t places, double steps) {
  const auto rounds = static_cast<double>((heads + places - 1) / places);
  return kShortFirst + rounds * (of.head + of.step * steps);
}

}  // namespace operators::attention
