// How long a product of product.cuh should take on Hopper: what a tile's step costs, what its
// results cost, and what clusters that share a tile have to hand over. The costs were fitted to
// shapes drawn at random, each computed in all ways, on an H200.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>

#include "operators/estimate.h"
#include "operators/product/shape.h"
#include "primitives/launch.h"

namespace operators::product {

using primitives::multiprocessors;

/// What a block of a tile does in a step, and with its results. A line is 128 bytes.
struct TileWork {
  int rows, cols, stack, side;  ///< of a tile; how many tiles a cluster has below and beside others
  bool transposed, read_once;   ///< TransposedTiles; OneRow
  int consumers;
  double multiplied;    ///< rows x columns that tensor cores multiply in a step, by one line of k
  double shared_lines;  ///< that a step moves into shared memory and, by wgmma, out of it
  double fetched_a, fetched_b;  ///< lines that a block asks the L2 cache for in a step
  double gathering = 0;         ///< cycles in which threads copy a step's tile of a factor
};

/// How tiles are divided among clusters.
struct Division {
  int clusters;               ///< at the same time
  double rounds;              ///< tiles that a cluster has; less than 1 if it has a slice of one
  double finished = 1;        ///< how many tiles' results it stores
  double shared = 0;          ///< of the rounds, those of tiles that are shared in unequal parts
  double pieces = 1;          ///< of a shared tile, that are added up through memory
  int slices_of_cluster = 1;  ///< of a tile, that a cluster adds up in its blocks (SlicedProduct)
};

/// The matrices of a product, whose rows are so many bytes apart: of A and B once they are aligned.
struct ProductMatrices {
  ProductShape shape;
  int element_bytes;
  int64_t pitch_a, pitch_b, pitch_c;
};

/// What a tile's step costs, against what its rows and columns say: a factor that is left after the
/// fit, and that we cannot explain. A tile that is not in the table costs as much as they say.
struct StepFactor {
  int rows, cols;
  bool transposed;
  int stack, side;
  double factor;
};

/// Costs of products with elements of one type. Cycles are those of a multiprocessor.
struct ProductCosts {
  double start = 0;                   ///< microseconds until the first data and after the last
  double multiply = 0;                ///< cycles for 32 rows x columns of a step
  double between = 0;                 ///< cycles between two steps
  double shared_bytes = 0;            ///< of a cycle: shared memory moves them
  double l2_bytes = 0;                ///< the same: the L2 cache delivers them, if all blocks ask
  double least_asking = 0;            ///< the part of the L2 cache's load that few blocks have
  double least_cycles = 0;            ///< of a step
  double off_line = 0;                ///< a fetched line, if rows begin inside a line
  double off_sector = 0;              ///< the same, if they begin inside a sector of 32 bytes
  double store = 0, store_alone = 0;  ///< cycles for an element; for one of a consumer
  double narrow = 0, narrowest = 0;   ///< the same where rows of C are not aligned; and odd
  double narrow_transposed = 0;       ///< cycles for an element more, if the tile is transposed
  double tile = 0;                    ///< cycles between two tiles
  double burst = 0;  ///< cycles for (elements of a tile)^2 / 2^15: all blocks store at the same
                     ///< time, and larger tiles leave fewer pauses
  double narrow_burst = 0;                       ///< the same more, where rows of C are not aligned
  double read = 0, write = 0, write_narrow = 0;  ///< of a byte's time at the memory's rate
  double handover = 0;                           ///< microseconds of a shared tile
  double piece = 0, piece_element = 0;           ///< of each piece; and of each element of a thread
  double partial = 0;       ///< microseconds for 2^10 elements of each multiprocessor
  double shared_steps = 0;  ///< of a step, where clusters are at different places along k
  double shared_reads = 0;  ///< of what these clusters fetch, how much comes from memory
  double in_cluster = 0;    ///< microseconds for each doubling of slices of a cluster
  double sent = 0;          ///< of each element that a thread sends to the cluster's other slices
  double pair = 0, four = 0, eight = 0;  ///< microseconds until a cluster of so many blocks has met
  double copies = 0, copy = 0;  ///< microseconds of align_rows; and of a copied byte's time
  double gather = 0;            ///< microseconds more where threads copy a factor (GatheredProduct)
  double gather_four = 0, gather_eight = 0;  ///< cycles for a line of it, by so many bytes a thread
  double once = 0;                           ///< microseconds that OneRow saves
};

/// Of products in 2-byte elements.
inline constexpr ProductCosts kHalfCosts = {.start = 2.3,
                                            .multiply = 0.928,
                                            .between = 0.828,
                                            .shared_bytes = 254,
                                            .l2_bytes = 53.3,
                                            .least_asking = 0.0671,
                                            .least_cycles = 237,
                                            .off_line = 1.08,
                                            .off_sector = 1.59,
                                            .store = 0.0605,
                                            .store_alone = 0.00105,
                                            .narrow = 0.0331,
                                            .narrowest = 0.0649,
                                            .narrow_transposed = 0.0289,
                                            .tile = 206,
                                            .burst = 0.000482,
                                            .narrow_burst = 0.0202,
                                            .read = 0.7,
                                            .write = 0.866,
                                            .write_narrow = 0.834,
                                            .handover = 0.575,
                                            .piece = 0.00623,
                                            .piece_element = 0.0106,
                                            .partial = 0.13,
                                            .shared_steps = 1.01,
                                            .shared_reads = 0.15,
                                            .in_cluster = 0.174,
                                            .sent = 0.0401,
                                            .pair = 0.52,
                                            .four = 0.483,
                                            .eight = 0.614,
                                            .copies = 1.11,
                                            .copy = 1.31,
                                            .gather = 1.02,
                                            .gather_four = 7.04,
                                            .gather_eight = 6.6,
                                            .once = 0.0025};
inline constexpr StepFactor kHalfSteps[] = {
    {32, 128, true, 1, 1, 1.201},   {48, 64, true, 2, 1, 0.891},    {56, 64, true, 4, 1, 0.873},
    {64, 64, false, 1, 1, 0.923},   {64, 128, false, 1, 1, 1.010},  {64, 128, false, 2, 1, 0.961},
    {64, 128, false, 4, 1, 0.928},  {64, 192, false, 4, 1, 0.944},  {64, 192, false, 4, 2, 1.046},
    {72, 64, true, 1, 4, 0.980},    {72, 128, true, 2, 4, 1.109},   {80, 128, true, 2, 1, 1.053},
    {80, 128, true, 4, 2, 1.090},   {88, 64, true, 1, 4, 0.960},    {88, 128, true, 4, 1, 1.070},
    {96, 128, true, 2, 2, 1.040},   {96, 192, true, 2, 1, 0.958},   {104, 64, true, 1, 4, 0.945},
    {104, 128, true, 4, 2, 1.036},  {112, 128, true, 4, 2, 1.002},  {112, 192, true, 2, 1, 0.962},
    {120, 128, true, 2, 1, 0.978},  {128, 128, false, 2, 2, 1.028}, {128, 128, true, 2, 1, 0.956},
    {128, 128, true, 4, 2, 1.000},  {128, 144, false, 4, 2, 1.089}, {128, 160, false, 2, 1, 1.000},
    {128, 160, false, 4, 1, 0.994}, {128, 192, false, 2, 1, 0.962}, {128, 256, false, 2, 1, 1.020},
    {136, 128, true, 1, 2, 0.969},  {136, 128, true, 1, 4, 0.973},  {144, 128, true, 2, 2, 1.019},
    {152, 256, true, 1, 2, 1.009},  {160, 192, true, 2, 1, 0.983},  {160, 256, true, 2, 1, 1.054},
    {168, 128, true, 1, 2, 0.960},  {168, 128, true, 2, 1, 0.939},  {176, 128, true, 1, 4, 0.976},
    {176, 192, true, 2, 1, 0.994},  {184, 128, true, 1, 2, 0.978},  {192, 192, false, 1, 2, 1.001},
    {208, 128, true, 1, 2, 0.981},  {232, 128, true, 1, 2, 0.982},  {240, 128, true, 1, 2, 0.986},
    {256, 128, true, 1, 2, 1.011}};

/// Of products in TF32.
inline constexpr ProductCosts kTf32Costs = {.start = 3.6,
                                            .multiply = 0.834,
                                            .shared_bytes = 214,
                                            .l2_bytes = 48.3,
                                            .least_asking = 0.265,
                                            .least_cycles = 309,
                                            .off_line = 1.04,
                                            .off_sector = 1.48,
                                            .store = 0.103,
                                            .store_alone = 0.0291,
                                            .narrow = 0.0129,
                                            .narrowest = 0.0861,
                                            .tile = 243,
                                            .burst = 0.128,
                                            .narrow_burst = 0.0917,
                                            .read = 0.51,
                                            .write = 0.796,
                                            .write_narrow = 0.892,
                                            .handover = 2.24,
                                            .piece = 0.203,
                                            .piece_element = 0.0116,
                                            .partial = 0.0938,
                                            .shared_steps = 1.38,
                                            .in_cluster = 0.976,
                                            .pair = 0.646,
                                            .eight = 1.39,
                                            .copies = 0.689,
                                            .copy = 1.3,
                                            .once = 1.15};
inline constexpr StepFactor kTf32Steps[] = {
    {128, 128, false, 1, 1, 1.068}, {128, 128, false, 2, 1, 1.026}, {128, 192, false, 1, 1, 0.970},
    {128, 192, false, 2, 1, 0.997}, {128, 256, false, 1, 1, 1.003}, {128, 256, false, 2, 1, 1.030},
    {128, 32, false, 1, 1, 0.971},  {128, 64, false, 1, 1, 1.052},  {128, 96, false, 1, 1, 1.051}};

/// Of products in 3xTF32.
inline constexpr ProductCosts kSplitTf32Costs = {.start = 3.09,
                                                 .multiply = 1.21,
                                                 .between = 8.1,
                                                 .shared_bytes = 297,
                                                 .l2_bytes = 55.1,
                                                 .least_asking = 0.533,
                                                 .least_cycles = 687,
                                                 .off_line = 1.31,
                                                 .off_sector = 0.989,
                                                 .store = 0.113,
                                                 .store_alone = 0.0832,
                                                 .narrow = 0.0236,
                                                 .narrowest = 0.24,
                                                 .tile = 334,
                                                 .narrow_burst = 0.104,
                                                 .read = 0.445,
                                                 .write = 1.44,
                                                 .write_narrow = 1.37,
                                                 .handover = 2.21,
                                                 .piece = 0.301,
                                                 .piece_element = 0.0096,
                                                 .partial = 0.0794,
                                                 .shared_steps = 0.989,
                                                 .shared_reads = 0.324,
                                                 .in_cluster = 1.13,
                                                 .pair = 0.202,
                                                 .four = 0.0089,
                                                 .eight = 1.36,
                                                 .copies = 0.907,
                                                 .copy = 1.31,
                                                 .once = 0.482};
inline constexpr StepFactor kSplitTf32Steps[] = {{128, 128, false, 1, 1, 0.969},
                                                 {128, 128, false, 2, 1, 1.040},
                                                 {128, 32, false, 1, 1, 0.983},
                                                 {128, 64, false, 1, 1, 0.982}};

template <size_t kCount>
constexpr double step_factor(const TileWork& tile, const StepFactor (&all)[kCount]) {
  const StepFactor* found = std::find_if(all, all + kCount, [&](const StepFactor& each) {
    return each.rows == tile.rows && each.cols == tile.cols && each.stack == tile.stack &&
           each.side == tile.side && each.transposed == tile.transposed;
  });
  return found == all + kCount ? 1 : found->factor;
}

/// Cycles of works that are done at the same time. As each waits for the others now and then, that
/// is more than the longest of them.
inline double together(double a, double b, double c, double d, double e) {
  return std::cbrt(a * a * a + b * b * b + c * c * c + d * d * d + e * e * e);
}

/// Microseconds from the sums of a tile's pieces to their sum; 0 for whole tiles. The cluster that
/// comes last reads one piece after another.
inline double handover_microseconds(const ProductCosts& cost, const TileWork& tile,
                                    const Division& division) {
  if (division.pieces <= 1) return 0;
  const double elements = 1.0 * tile.rows * tile.cols,
               of_thread = elements / division.slices_of_cluster / tile.consumers / 128;
  return cost.handover + (cost.piece + cost.piece_element * of_thread) * division.pieces +
         cost.partial * elements / 1024 * division.clusters * tile.stack * tile.side /
             multiprocessors();
}

/// Bytes that clusters fetch which share tiles in unequal parts, and so are nowhere at the same k.
inline double fetched_by_sharers(const TileWork& tile, int element_bytes, int depth,
                                 const Division& division) {
  return division.shared * division.clusters *
         (1.0 * tile.rows * tile.stack + 1.0 * tile.cols * tile.side) * depth * element_bytes;
}

/// Microseconds of a product of these tiles, whose rows are aligned.
inline double product_microseconds(const ProductCosts& cost, const TileWork& tile, double factor,
                                   const ProductMatrices& of, const Division& division) {
  const ProductShape& shape = of.shape;
  const auto line = [&](int64_t bytes) {
    return bytes % 128 == 0 ? 1 : bytes % 32 == 0 ? cost.off_line : cost.off_sector;
  };
  const int blocks = tile.stack * tile.side;
  const double asking = std::min(1.0, 1.0 * division.clusters * blocks / multiprocessors());
  const double step =
      factor * together(tile.multiplied / 32 * cost.multiply + cost.between,
                        tile.shared_lines * kLineBytes / cost.shared_bytes,
                        (line(of.pitch_a) * tile.fetched_a + line(of.pitch_b) * tile.fetched_b) *
                            kLineBytes / cost.l2_bytes * std::max(cost.least_asking, asking),
                        cost.least_cycles, tile.gathering);
  const int per_line = static_cast<int>(kLineBytes) / of.element_bytes;
  const double steps = (shape.depth + per_line - 1) / per_line;

  // Slices of a cluster each store a part of the tile.
  const double elements = 1.0 * tile.rows * tile.cols / division.slices_of_cluster;
  const bool narrow = of.pitch_c % 16 != 0, odd = of.pitch_c / of.element_bytes % 2 != 0;
  const double unaligned = !narrow ? 0 : odd ? cost.narrowest : cost.narrow;
  const double store =
      elements * (cost.store + (narrow && tile.transposed ? cost.narrow_transposed : 0)) +
      elements / tile.consumers * (cost.store_alone + unaligned) + cost.tile +
      elements * elements / (1 << 15) *
          (cost.burst + (narrow ? (odd ? 2 : 1) * cost.narrow_burst : 0));
  const double busy =
      ((division.rounds + division.shared * (cost.shared_steps - 1)) * steps * step +
       division.finished * store) /
      cycles();

  const double memory =
      (of.element_bytes *
           (cost.read * (1.0 * shape.rows * shape.depth + 1.0 * shape.depth * shape.cols) +
            (cost.write + (narrow ? cost.write_narrow : 0)) * shape.rows * shape.cols) +
       cost.shared_reads * fetched_by_sharers(tile, of.element_bytes, shape.depth, division)) /
      memory_rate();

  double more = cost.start - (tile.read_once ? cost.once : 0);
  const int of_cluster = blocks * division.slices_of_cluster;
  more += of_cluster >= 8   ? cost.eight
          : of_cluster >= 4 ? cost.four
          : of_cluster >= 2 ? cost.pair
                            : 0;
  const double others = 1 - 1.0 / division.slices_of_cluster;  // how much of a sum is for others
  more += cost.in_cluster * std::log2(division.slices_of_cluster) +
          cost.sent * tile.rows * tile.cols / tile.consumers / 128 * others +
          handover_microseconds(cost, tile, division);
  constexpr double kOverlap = 1.7;  // between a sum (1) and the longer one (infinity)
  return more + std::pow(std::pow(busy, kOverlap) + std::pow(memory, kOverlap), 1 / kOverlap);
}

/// Microseconds until so many elements have been copied into aligned rows.
inline double copies_microseconds(const ProductCosts& cost, int element_bytes, double elements) {
  return elements > 0 ? cost.copies + cost.copy * 2 * element_bytes * elements / memory_rate() : 0;
}

/// How long a product should take with tiles that are so divided.
using Estimate = std::function<double(const Division&)>;

/// That of product_microseconds(), and so many microseconds more.
inline Estimate estimate_of(const ProductCosts& cost, const TileWork& tile, double factor,
                            const ProductMatrices& of, double more = 0) {
  return [&cost, tile, factor, of, more](const Division& division) {
    return product_microseconds(cost, tile, factor, of, division) + more;
  };
}

}  // namespace operators::product
