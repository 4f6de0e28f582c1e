// How long a product of product.cuh should take on Hopper: what a tile's step costs, what its
// results cost, and what clusters that share a tile have to hand over. Costs and the factors of
// tiles were fitted to products of sizes drawn at random, each computed in all ways on an H200:
// 5,400 products in 16 bits, 2,800 in TF32. What the fit makes small is not the error of the
// estimates. It is how much longer the way with the least estimate takes than the fastest one.
// results/costs/fit.py makes these costs and factors anew, all but `start`, from times that were
// measured on any such GPU. Those of 3xTF32 are of an older fit, which it does not repeat.
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
  int rows, cols;              ///< of a block's tile
  int stack, side;             ///< a cluster has `stack` tiles below and `side` beside each other
  bool transposed, read_once;  ///< TransposedTiles; OneRow
  int consumers;
  double multiplied;    ///< elements of C that a step multiplies, each by a line of k (in 3xTF32
                        ///< three times)
  double shared_lines;  ///< that a step moves into shared memory and, by wgmma, out of it
  double fetched_a, fetched_b;        ///< lines that a block asks the L2 cache for in a step
  double gathering = 0;               ///< cycles in which threads copy a step's tile of a factor
  double copied = 1.0 * rows * cols;  ///< elements that storing counts, if C is not aligned: of 2
                                      ///< bytes whole boxes, also if they overlap or are not full
};

/// How tiles are divided among clusters.
struct Division {
  int clusters;               ///< that work at the same time; of a SlicedProduct, its slices
  double rounds;              ///< tiles that a cluster has; less than 1 if it has a slice of one
  double finished = 1;        ///< how many tiles' results it stores
  double shared = 0;          ///< how many of `rounds` are of tiles shared in unequal parts
  double places = 1;          ///< different k at which clusters are that share such tiles
  double pieces = 1;          ///< of a shared tile, that are added up through memory
  int slices_of_cluster = 1;  ///< of a tile, that a cluster adds up in its blocks (SlicedProduct)
};

/// The matrices of a product. A pitch is how many bytes the rows of a matrix are apart: those of A
/// and B after align_rows, if that copies them.
struct ProductMatrices {
  ProductShape shape;
  int element_bytes;
  int64_t pitch_a, pitch_b, pitch_c;
};

/// By how much the estimate of a tile is corrected. The factors come from the same fit as the
/// costs. All are 1 for tiles that are not in the table.
struct TileFactors {
  int rows, cols;
  bool transposed;
  int stack, side;
  double step;            ///< of a step
  double store = 1;       ///< of what the tile's results cost
  double unaligned = 1;   ///< further factor of that, where rows of C are no multiples of 16 bytes
  bool gathered = false;  ///< threads copy a factor (GatheredProduct)
};

inline constexpr TileFactors kAsTheCostsSay = {0, 0, false, 0, 0, 1};

/// Costs of products with elements of one type. Cycles are those of a multiprocessor.
struct ProductCosts {
  double start = 0;  ///< microseconds until the first data and after the last. All ways have it, so
                     ///< it counts only where one product is compared with several.
  double multiply = 0;      ///< cycles for 32 elements of a tile, in a step
  double between = 0;       ///< cycles between two steps
  double shared_bytes = 0;  ///< that shared memory moves in a cycle
  double l2_bytes = 0;  ///< that the L2 cache delivers to a multiprocessor in a cycle, if all ask
  double sent_to_each = 0;  ///< the part of a shared line's cost that multicast does not save
  double least_asking =
      0;  ///< blocks / multiprocessors scales the L2 cache's time: its least value
  double least_cycles = 0;  ///< of a step
  double off_line = 0;      ///< factor of a fetched line's cost, if rows begin inside a line
  double off_sector = 0;    ///< the same, if they begin inside a sector of 32 bytes
  double store = 0, store_alone = 0;  ///< cycles for an element; for one of a consumer
  double narrow = 0, narrowest = 0;   ///< cycles more for one of a consumer: where rows of C are no
                                      ///< multiples of 16 bytes long; of an odd number of elements
  double store_three = 0;             ///< further cycles for an element, with three consumers
  double narrow_transposed = 0;       ///< cycles for an element more, if the tile is transposed
  double tile = 0;                    ///< cycles between two tiles
  double tile_shared = 0;  ///< the same more, in a cluster whose blocks share what they copy
  double burst = 0;  ///< cycles for (elements of a tile)^2 / 2^15: all blocks store at the same
                     ///< time, and larger tiles leave fewer pauses
  double narrow_burst = 0;  ///< the same more, where rows of C are not aligned
  double read = 0, write = 0, write_narrow = 0,
         write_sector = 0;              ///< factors of a byte's time at memory_rate(): of A and B;
                                        ///< of C; of C more, where not aligned; or where rows
                                        ///< begin inside a sector of 32 bytes
  double handover = 0;                  ///< microseconds of a shared tile
  double piece = 0, piece_element = 0;  ///< microseconds of each piece; and for each element of a
                                        ///< thread
  double partial = 0;                   ///< microseconds for 2^10 elements of each multiprocessor
  double shared_steps = 0;  ///< factor of a step, where clusters are at different places along k
  double shared_reads = 0;  ///< of what these clusters fetch, the part that comes from memory
  double place_reads = 0;   ///< part of the time of fetched_by_places() that is added
  double in_cluster = 0;    ///< microseconds for each doubling of slices of a cluster
  double sent = 0;          ///< microseconds for each element that a thread sends to other slices
  double pair = 0, four = 0, eight = 0;  ///< microseconds until a cluster of so many blocks has met
  double copies = 0, copy = 0;  ///< microseconds of align_rows; and factor of its bytes' time
  double gather = 0;            ///< microseconds more where threads copy a factor (GatheredProduct)
  double gather_four = 0, gather_eight = 0;  ///< cycles for a line of it, by so many bytes a thread
  double once = 0;                           ///< microseconds that OneRow saves
  double added = 0, added_bytes = 0;  ///< microseconds of finish_slices; and factor of its bytes'
                                      ///< time
};

/// Of products in 2-byte elements.
inline constexpr ProductCosts kHalfCosts = {.start = 1.62,
                                            .multiply = 1.24,
                                            .between = 0.818,
                                            .shared_bytes = 459,
                                            .l2_bytes = 74.8,
                                            .least_asking = 0.0671,
                                            .least_cycles = 332,
                                            .off_line = 1.03,
                                            .off_sector = 1.86,
                                            .store = 0.107,
                                            .store_alone = 0.00105,
                                            .narrow = 0.0808,
                                            .narrowest = 0.144,
                                            .narrow_transposed = 0.0107,
                                            .tile = 198,
                                            .burst = 0.000495,
                                            .narrow_burst = 0.0173,
                                            .read = 0.354,
                                            .write = 0.357,
                                            .write_narrow = 0.609,
                                            .write_sector = 0.433,
                                            .handover = 0.365,
                                            .piece = 0.00649,
                                            .piece_element = 0.0129,
                                            .partial = 0.276,
                                            .shared_steps = 1.19,
                                            .shared_reads = 0.0997,
                                            .in_cluster = 0.137,
                                            .sent = 0.02,
                                            .pair = 0.478,
                                            .four = 0.352,
                                            .eight = 0.396,
                                            .copies = 1.06,
                                            .copy = 0.982,
                                            .gather = 0.831,
                                            .gather_four = 7.5,
                                            .gather_eight = 7.02,
                                            .once = 0.0025,
                                            .added = 2.78,
                                            .added_bytes = 0.56};
inline constexpr TileFactors kHalfTiles[] = {{32, 128, true, 1, 1, 1.18, 1.019, 1.014},
                                             {48, 64, true, 2, 1, 0.983, 0.96, 0.943},
                                             {56, 64, true, 4, 1, 0.956, 0.986, 0.972},
                                             {56, 192, true, 2, 1, 1.263, 1.068, 1.055},
                                             {64, 64, false, 1, 1, 1.263, 1.001, 1.041},
                                             {64, 96, false, 4, 1, 0.995, 1.045, 1.005},
                                             {64, 128, false, 1, 1, 1.191, 1.21, 1.052},
                                             {64, 128, false, 2, 1, 1.037, 1.036, 1.058},
                                             {64, 128, false, 4, 1, 0.929, 1.04, 0.848},
                                             {64, 192, false, 4, 1, 0.982, 1.213, 0.926},
                                             {72, 192, true, 4, 1, 0.963, 1.135, 1.077},
                                             {80, 128, true, 2, 1, 1.029, 1.123, 1.125},
                                             {88, 64, true, 1, 4, 0.922, 1.016, 1.143},
                                             {88, 128, true, 4, 1, 0.925, 1.357, 1.244},
                                             {96, 64, true, 1, 4, 0.921, 0.879, 0.83},
                                             {96, 64, true, 4, 2, 0.915, 0.884, 0.942},
                                             {96, 128, true, 2, 2, 0.861, 1.105, 1.001},
                                             {96, 192, true, 2, 1, 0.907, 1.016, 0.988},
                                             {96, 256, true, 1, 2, 0.991, 0.916, 0.874},
                                             {104, 64, true, 2, 1, 1.042, 0.973, 1.072},
                                             {112, 128, true, 2, 1, 0.936, 1.004, 1.03},
                                             {112, 128, true, 4, 2, 0.895, 1.027, 1.052},
                                             {112, 192, true, 2, 1, 0.881, 1.099, 1.194},
                                             {120, 64, true, 1, 4, 0.921, 1.002, 1.066},
                                             {120, 128, true, 2, 1, 0.921, 1.076, 0.997},
                                             {128, 128, false, 2, 2, 0.945, 1.557, 1.142},
                                             {128, 128, true, 2, 1, 0.939, 0.992, 1.045},
                                             {128, 128, true, 4, 2, 0.9, 0.969, 1.076},
                                             {128, 144, false, 4, 2, 0.985, 1.147, 1.054},
                                             {128, 160, false, 2, 1, 0.955, 1.288, 1.039},
                                             {128, 192, false, 2, 1, 0.893, 0.992, 1.001},
                                             {128, 256, false, 2, 1, 0.973, 1.015, 1.037},
                                             {136, 128, true, 1, 2, 0.912, 1.179, 0.996},
                                             {136, 128, true, 2, 4, 0.891, 1.072, 1.036},
                                             {144, 64, true, 1, 4, 0.944, 1.036, 0.801},
                                             {144, 128, true, 2, 1, 0.938, 1.177, 1.141},
                                             {144, 128, true, 2, 2, 0.928, 1.159, 1.131},
                                             {152, 128, true, 1, 2, 0.898, 0.976, 0.995},
                                             {160, 64, true, 1, 4, 0.872, 1.03, 1.164},
                                             {160, 192, true, 1, 2, 0.926, 0.9, 0.849},
                                             {160, 192, true, 2, 1, 0.899, 0.869, 0.94},
                                             {168, 128, true, 1, 2, 0.883, 1.059, 0.918},
                                             {168, 128, true, 2, 1, 0.912, 0.921, 1},
                                             {176, 192, true, 2, 1, 0.905, 0.991, 0.927},
                                             {184, 128, true, 1, 2, 0.874, 1.152, 0.982},
                                             {192, 128, false, 1, 2, 0.92, 0.915, 1.042},
                                             {192, 128, true, 2, 1, 0.918, 1.045, 0.997},
                                             {192, 192, false, 1, 2, 0.924, 0.87, 1.069},
                                             {200, 64, true, 1, 4, 0.93, 1.084, 1.147},
                                             {200, 192, true, 2, 1, 0.93, 0.951, 1.027},
                                             {208, 128, true, 1, 2, 0.887, 0.748, 1.354},
                                             {232, 128, true, 1, 2, 0.879, 0.891, 1.12},
                                             {240, 128, true, 1, 2, 0.907, 0.796, 1.079},
                                             {256, 128, true, 1, 2, 0.908, 0.934, 0.877},
                                             {64, 128, false, 1, 1, 0.895, 1.057, 1.149, true},
                                             {96, 128, true, 1, 1, 0.917, 0.954, 0.954, true},
                                             {128, 64, false, 1, 1, 1.079, 0.952, 0.952, true}};

/// Of products in TF32.
inline constexpr ProductCosts kTf32Costs = {.start = 2.35,
                                            .multiply = 0.827,
                                            .shared_bytes = 306,
                                            .l2_bytes = 66.9,
                                            .sent_to_each = 0.0243,
                                            .least_asking = 0.992,
                                            .least_cycles = 220,
                                            .off_line = 1.31,
                                            .off_sector = 1.84,
                                            .store = 0.124,
                                            .store_alone = 0.00744,
                                            .narrow = 0.00725,
                                            .narrowest = 0.00436,
                                            .store_three = 0.0314,
                                            .tile = 864,
                                            .tile_shared = 293,
                                            .burst = 0.105,
                                            .narrow_burst = 0.00432,
                                            .read = 0.584,
                                            .write = 0.675,
                                            .write_narrow = 0.125,
                                            .handover = 0.846,
                                            .piece_element = 0.0144,
                                            .partial = 0.141,
                                            .shared_steps = 1.19,
                                            .place_reads = 0.235,
                                            .in_cluster = 0.0137,
                                            .sent = 0.0218,
                                            .pair = 0.197,
                                            .copies = 0.939,
                                            .copy = 1.17,
                                            .once = 0.315,
                                            .added = 2.63,
                                            .added_bytes = 1.16};
inline constexpr TileFactors kTf32Tiles[] = {
    {64, 64, false, 1, 1, 0.922, 0.854, 0.878},   {64, 96, false, 1, 1, 0.922, 0.887, 0.93},
    {64, 128, false, 1, 1, 1.004, 0.995, 1.002},  {128, 32, false, 1, 1, 1.014, 1.006, 0.962},
    {128, 64, false, 1, 1, 1.054, 1.05, 0.962},   {128, 96, false, 1, 1, 1.008, 1.134, 0.957},
    {128, 128, false, 1, 1, 0.997, 1.099, 0.893}, {128, 128, false, 2, 1, 1.054, 1.258, 1.093},
    {128, 192, false, 1, 1, 0.967, 0.983, 0.965}, {128, 192, false, 2, 1, 0.965, 1.075, 1.049},
    {128, 256, false, 1, 1, 1.009, 0.948, 1.105}, {128, 256, false, 2, 1, 0.974, 1.196, 1.124},
    {192, 96, false, 1, 1, 1.039, 1.006, 1.09}};

/// Of products in 3xTF32.
inline constexpr ProductCosts kSplitTf32Costs = {.start = 1.83,
                                                 .multiply = 1.05,
                                                 .between = 22.9,
                                                 .shared_bytes = 408,
                                                 .l2_bytes = 53,
                                                 .sent_to_each = 0.0774,
                                                 .least_asking = 0.155,
                                                 .least_cycles = 718,
                                                 .off_line = 1.27,
                                                 .off_sector = 1.82,
                                                 .store = 0.224,
                                                 .store_alone = 0.097,
                                                 .narrow = 0.0429,
                                                 .narrowest = 0.056,
                                                 .tile = 56,
                                                 .narrow_burst = 0.0148,
                                                 .read = 0.27,
                                                 .write = 0.341,
                                                 .write_narrow = 1.04,
                                                 .handover = 3.15,
                                                 .piece_element = 0.00606,
                                                 .partial = 0.128,
                                                 .shared_steps = 1.03,
                                                 .in_cluster = 0.22,
                                                 .sent = 0.0481,
                                                 .pair = 0.0696,
                                                 .copies = 1.46,
                                                 .copy = 1.33,
                                                 .once = 0.241,
                                                 .added = 2.78,
                                                 .added_bytes = 0.717};

template <size_t kCount>
constexpr TileFactors factors_of(const TileWork& tile, const TileFactors (&all)[kCount]) {
  const TileFactors* found = std::find_if(all, all + kCount, [&](const TileFactors& each) {
    return each.rows == tile.rows && each.cols == tile.cols && each.stack == tile.stack &&
           each.side == tile.side && each.transposed == tile.transposed &&
           each.gathered == (tile.gathering > 0);
  });
  return found == all + kCount ? kAsTheCostsSay : *found;
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

/// Bytes that clusters fetch which share tiles in unequal parts, if none of them finds another's
/// lines in the L2 cache.
inline double fetched_by_sharers(const TileWork& tile, int element_bytes, int depth,
                                 const Division& division) {
  return division.shared * division.clusters *
         (1.0 * tile.rows * tile.stack + 1.0 * tile.cols * tile.side) * depth * element_bytes;
}

/// The same if clusters at one place along k have tiles that form nearly a square of C, and these
/// clusters together fetch each line once. For tiles of C^T the shape is C^T's.
inline double fetched_by_places(const TileWork& tile, const ProductMatrices& of,
                                const Division& division) {
  const double rows = 1.0 * tile.rows * tile.stack, cols = 1.0 * tile.cols * tile.side;
  const double area = division.clusters / division.places * rows * cols;
  const double high = std::min(std::max(std::sqrt(area), rows), 1.0 * of.shape.rows);
  const double wide = std::min(std::max(area / high, cols), 1.0 * of.shape.cols);
  return division.shared * division.places * (std::min(area / wide, 1.0 * of.shape.rows) + wide) *
         of.shape.depth * of.element_bytes;
}

/// Microseconds of a product with such tiles. The rows of A and B are aligned to 16 bytes; those of
/// C need not be. What align_rows takes is not counted.
inline double product_microseconds(const ProductCosts& cost, const TileWork& tile,
                                   const TileFactors& factors, const ProductMatrices& of,
                                   const Division& division) {
  const ProductShape& shape = of.shape;
  const auto line = [&](int64_t bytes) {
    return bytes % 128 == 0 ? 1 : bytes % 32 == 0 ? cost.off_line : cost.off_sector;
  };
  const int blocks = tile.stack * tile.side;
  const double asking = std::min(1.0, 1.0 * division.clusters * blocks / multiprocessors());
  const double step =
      factors.step *
      together(tile.multiplied / 32 * cost.multiply + cost.between,
               tile.shared_lines * kLineBytes / cost.shared_bytes,
               (line(of.pitch_a) * tile.fetched_a + line(of.pitch_b) * tile.fetched_b) *
                   kLineBytes / cost.l2_bytes * std::max(cost.least_asking, asking),
               cost.least_cycles, tile.gathering);
  const int per_line = static_cast<int>(kLineBytes) / of.element_bytes;
  const double steps = (shape.depth + per_line - 1) / per_line;

  // Slices of a cluster each store a part of the tile.
  const double elements = 1.0 * tile.rows * tile.cols / division.slices_of_cluster;
  const double copied = tile.copied / division.slices_of_cluster;
  const bool narrow = of.pitch_c % 16 != 0, odd = of.pitch_c / of.element_bytes % 2 != 0;
  const double unaligned = !narrow ? 0 : odd ? cost.narrowest : cost.narrow;
  const double store = factors.store * (narrow ? factors.unaligned : 1) *
                       (elements * (cost.store + (tile.consumers == 3 ? cost.store_three : 0)) +
                        (narrow && tile.transposed ? copied * cost.narrow_transposed : 0) +
                        (elements * cost.store_alone + copied * unaligned) / tile.consumers +
                        cost.tile + (blocks > 1 ? cost.tile_shared : 0) +
                        elements * elements / (1 << 15) *
                            (cost.burst + (narrow ? (odd ? 2 : 1) * cost.narrow_burst : 0)));
  const double busy =
      ((division.rounds + division.shared * (cost.shared_steps - 1)) * steps * step +
       division.finished * store) /
      cycles();

  const double memory =
      (of.element_bytes *
           (cost.read * (1.0 * shape.rows * shape.depth + 1.0 * shape.depth * shape.cols) +
            (cost.write + (narrow                 ? cost.write_narrow
                           : of.pitch_c % 32 != 0 ? cost.write_sector
                                                  : 0)) *
                shape.rows * shape.cols) +
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
          cost.place_reads * fetched_by_places(tile, of, division) / memory_rate() +
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
inline Estimate estimate_of(const ProductCosts& cost, const TileWork& tile,
                            const TileFactors& factors, const ProductMatrices& of,
                            double more = 0) {
  return [&cost, tile, factors, of, more](const Division& division) {
    return product_microseconds(cost, tile, factors, of, division) + more;
  };
}

}  // namespace operators::product
