// How long attention should take with each tile. The costs were fitted to shapes drawn at random,
// each computed in all ways, on an H200.
#pragma once

#include <algorithm>
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
inline constexpr double kUnevenEnd = 0.3;    ///< of the longest piece: until the last block ends
inline constexpr double kAlone = 0.5;        ///< of its time a block saves with none beside it
inline constexpr double kBytesOfOne = 22;    ///< from memory, that a multiprocessor gets in a cycle
inline constexpr double kMerge = 3, kMergePart = 0.02;  ///< microseconds; of each part
inline constexpr double kMergeTraffic = 1.8;  ///< that partial results are written and read

// ---- Gradients, on Hopper -----------------------------------------------------------------------

inline constexpr double kBackwardStep = 2.4;    ///< microseconds of a tile of queries
inline constexpr double kBackwardItem = 4;      ///< and of an item beside its steps
inline constexpr double kBackwardAdded = 2;     ///< until the sums of splits are added up
inline constexpr double kBackwardRate = 1.5e6;  ///< bytes of these in a microsecond
inline constexpr int64_t kMostSplits = 16;

/// What the items of the gradients are, before they are divided.
struct BackwardItems {
  double items, steps, mean_steps;  ///< steps of the longest, and of all in the mean
  double places;                    ///< items that the device has at a time
  double bytes;                     ///< that a split of an item leaves
};

/// How long they should take if each is divided among so many.
inline double microseconds(const BackwardItems& of, int64_t splits) {
  const double parts = static_cast<double>(splits), all = of.items * parts;
  const double longest = kBackwardItem + kBackwardStep * std::ceil(of.steps / parts);
  const double mean = kBackwardItem + kBackwardStep * of.mean_steps / parts;
  const double added = splits == 1 ? 0 : kBackwardAdded + all * of.bytes / kBackwardRate;
  if (all <= of.places) return longest + added;
  // Equal items come in rounds; of others the shorter ones fill the gaps.
  if (of.mean_steps == of.steps) return added + std::ceil(all / of.places) * longest;
  return added + std::max(longest, all / of.places * mean + longest / 3);
}

/// Among how many the steps of an item should be divided: more than one only if that saves a
/// tenth.
inline int64_t backward_splits(const BackwardItems& of) {
  int64_t best = 1;
  double least = 0.9 * microseconds(of, 1);
  const auto most = std::min(kMostSplits, static_cast<int64_t>(of.steps));
  for (int64_t splits = 2; splits <= most; ++splits) {
    const double took = microseconds(of, splits);
    if (took < least) best = splits, least = took;
  }
  return best;
}

}  // namespace operators::attention
