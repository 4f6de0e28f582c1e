// How long a product on Hopper should take in tiles of one size. What a step of a tile costs is
// counted from the tile, in clock cycles of the device's own clock; the factors were fitted to
// 99,000 times of 3,450 shapes drawn at random, in fp16, TF32 and 3xTF32, each computed in all ways,
// on an H200. Of these shapes half were kept back, and gave the same errors.
#pragma once

#include <algorithm>
#include <cmath>

#include "operators/estimate.h"

namespace operators::product {

/// A product in tiles. A line is 128 bytes, and a step a line of k.
struct TiledCost {
  double multiply;       ///< cycles of a step in which tensor cores multiply
  double shared_lines;   ///< that a step moves into shared memory and, by wgmma, out of it
  double fetched_lines;  ///< that a block asks the L2 cache for in a step
  double finish;         ///< cycles from a tile's sums to its results
  double steps;          ///< of a tile
  double rounds;       ///< tiles that a cluster has, one after another; less than 1: a part of one
  int cluster_blocks;  ///< that share what they copy
  int slices = 1;      ///< of a tile, for the blocks of a cluster
  double blocks;       ///< that work at the same time, each on a multiprocessor of its own
  double multiprocessors;
  double memory_bytes;  ///< that go from and to memory in all
};

/// Blocks that share copies wait for each other, and all that ask the L2 cache for it. Steps and
/// memory work at the same time; where both need about equally long neither is always busy.
inline double microseconds(const TiledCost& cost) {
  const double asking = std::max(0.017, cost.blocks / cost.multiprocessors);
  const double step =
      (0.80 * cost.multiply + 0.104 * cost.shared_lines + 1.15 * cost.fetched_lines * asking) *
      (1 + 0.031 * std::log2(cost.cluster_blocks));
  const double tiles = cost.rounds * cost.steps / cost.slices * std::max(330.0, step) +
                       std::max(1.0, cost.rounds) * cost.finish / cost.slices;
  const double time = tiles / cycles(), memory = cost.memory_bytes / memory_rate();
  const double in_cluster = cost.slices > 1 ? 0.84 + 0.4 * std::log2(cost.slices) : 0;
  return 3.76 + std::pow(std::pow(time, 1.6) + std::pow(memory, 1.6), 1 / 1.6) + in_cluster;
}

/// Cycles until the sums of a tile of so many elements have become results. In fp16 the copy engine
/// stores them. Rows of C that are not aligned to 16 bytes are stored in narrow pieces.
inline double finish_cycles(double elements, int element_bytes, bool aligned) {
  return elements * ((element_bytes == 2 ? 1 / 14.7 : 1 / 6.0) + (aligned ? 0 : 1 / 7.3));
}

/// How long it takes, once a tile's pieces have been multiplied, until their sums are one: a piece
/// has `part` elements for each thread. Who comes last reads one piece after another, which the L2
/// cache holds.
inline double handover_microseconds(double pieces, int part, bool in_cluster) {
  return (in_cluster ? 1.9 : 2.56) + 0.0063 * part * pieces;
}

/// Rows are copied first: until these bytes have been read and written.
inline double copy_microseconds(double bytes) {
  return bytes > 0 ? 0.85 + 1.5 * bytes / memory_rate() : 0;
}

/// Of the bytes of a factor that is read once more while another part of k is, so many come from
/// memory: clusters that share tiles (stream-K) are nowhere at the same k.
inline constexpr double kReadAgain = 0.3;

/// Bytes that go to memory because others need their room in the L2 cache: what kernels before have
/// written there. A product that reads `bytes` makes room for them, up to half of the cache. If it
/// reads them once (OneRow), they take less room.
inline double displaced_bytes(double bytes, bool once) {
  return std::min(bytes, 28e6) * 0.87 * (once ? 0.6 : 1);
}

}  // namespace operators::product
