// The plans of *cluster* and *exchange*, the operator's kernels for Hopper, and how long each
// should take (operators/estimate.h). The plans are ranked by that, and the first ones are tried.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "operators/estimate.h"
#include "operators/softmax/hopper/exchange.cuh"
#include "operators/softmax/layer.cuh"
#include "operators/softmax/logits.cuh"

namespace operators::softmax {

using namespace primitives;

/// How long a launch takes that copies a matrix into aligned rows.
inline double copy_microseconds(int rows, int cols) {
  return 1.3 + 1.15 * 8.0 * rows * cols / memory_rate();
}

/// What *cluster* costs a multiprocessor in 3xTF32, in clock cycles: a chunk of inputs, and what
/// comes after the chunks. If a multiprocessor has several blocks, each takes `share` of the time
/// that it takes alone, since it works while others wait. (TF32 has another estimate.)
struct ClusterCost {
  int rows, classes;
  double chunk, finish, share;
};
inline constexpr ClusterCost kClusterCosts[] = {
    {16, 64, 1530, 1440, 0.68}, {16, 128, 2840, 960, 0.76}, {64, 64, 2675, 3760, 0.47},
    {64, 128, 4130, 650, 1},    {80, 64, 5220, 4320, 1},    {80, 128, 7460, 3320, 1}};

/// The cycles of a cluster of `cost` with all of its chunks.
inline double cluster_cycles(const Layer& layer, const ClusterCost& cost, double chunks) {
  const bool parts = layer.C > cost.classes && leaves_parts(layer);
  const double of_row = 18.0 * std::min(layer.C, cost.classes) / 64 + (parts ? 8 : 0);
  return chunks * cost.chunk + cost.finish + cost.rows * of_row;
}

/// How long *cluster* should take. Its clusters of `splits` blocks have tiles of `rows` x
/// `classes`, and take `depth` inputs at a time. `at_once` of them run at a time, one block or more
/// on each multiprocessor. If a row has several tiles, there are two launches.
///
/// In TF32 a chunk of inputs comes from the L2 cache while nothing is computed, so each chunk has
/// its latency. All threads load at once, so a launch takes less than kFirstLaunch.
inline double cluster_microseconds(const Layer& layer, bool split, int splits, int rows,
                                   int classes, int depth, int64_t at_once) {
  const int64_t tiles = blocks_for(layer.C, classes), clusters = tiles * blocks_for(layer.B, rows);
  const double chunks = blocks_for(layer.D, splits * depth);
  const double others = (tiles > 1 ? layer.softmax_microseconds() + 0.3 : 0) +
                        (layer.x_stride % 4 != 0 ? copy_microseconds(layer.B, layer.D) : 0);
  if (split) {
    const auto is_it = [=](const ClusterCost& cost) {
      return cost.rows == rows && cost.classes == classes;
    };
    const ClusterCost& cost = *std::ranges::find_if(kClusterCosts, is_it);
    const int64_t of_each = ceil_div(at_once * splits, int64_t{layer.sms});  // blocks on each
    const int64_t blocks = ceil_div(clusters, std::max<int64_t>(1, at_once / of_each));
    return 1.9 + others +
           std::max(1.0, cost.share * static_cast<double>(blocks)) *
               cluster_cycles(layer, cost, chunks) / cycles();
  }
  const Cost chunk = {.rows = 1.0 * rows,
                      .cols = 1.0 * classes,
                      .shared_lines = 0,
                      .fetched_lines = depth / 32.0 * (std::min(rows, layer.B) + classes),
                      .blocks = 1.0 * std::min(clusters, at_once) * splits,
                      .multiprocessors = 1.0 * layer.sms};
  return 2.7 + others + blocks_for(clusters, at_once) * chunks * (0.35 + step_microseconds(chunk));
}

/// What a tile of *exchange* costs in 3xTF32, in clock cycles: a step, which is 32 inputs, and what
/// comes after the steps. In TF32 both are counted (Cost).
struct SplitTileCost {
  int rows;
  double step, finish;
};
inline constexpr SplitTileCost kSplitTileCosts[] = {
    {32, 810, 1200}, {64, 1260, 2440}, {128, 2000, 5170}};

/// What a plan for *exchange* has to know of a Tile.
struct ExchangeTileFacts {
  int rows, columns, peers;
  bool aligned, high_low;
};

/// How long *exchange* should take with tiles of one size, if `all` of its blocks run at a time.
struct ExchangeTime {
  const Layer& layer;
  ExchangeTileFacts tile;
  int64_t all, tiles, strips;
  int shift;  ///< see RowsOfX
  double copies;

  ExchangeTime(const Layer& layer, const ExchangeTileFacts& tile, bool copies_x, bool copies_W,
               int64_t all)
      : layer(layer),
        tile(tile),
        all(all),
        tiles(tile.peers * blocks_for(layer.C, tile.peers * tile.columns)),
        shift(copies_x ? 0 : RowsOfX::shift_of(layer.x_stride)),
        copies((copies_x ? copy_microseconds(layer.B, layer.D) : 0) +
               (copies_W ? copy_microseconds(layer.D, layer.C) : 0)) {
    strips = RowsOfX::strips(layer.B, tile.rows, shift);
  }

  /// The time if D is cut into `slices` slices, and `blocks` blocks run at a time, in so many
  /// rounds. `logits` says how often logits go from or to memory. wgmma reads the rows of x once
  /// for each 64 columns; W goes from shared memory to registers.
  double time(double rounds, double blocks, int slices, double logits, double more) const {
    const int rows = std::min(tile.rows, ((layer.B - 1) >> shift) + 1);
    const double of_x = shift > 0 ? kFetchedOffSectors : fetched_for_a_line(4 * layer.D);
    const double of_W = tile.aligned ? fetched_for_a_line(4 * layer.C) : kFetchedOffSectors;
    return copies +
           operators::microseconds(
               {.rounds = rounds,
                .steps = std::ceil(std::ceil(layer.D / 32.0) / slices),
                .rows = 1.0 * tile.rows,
                .cols = 1.0 * tile.columns,
                .shared_lines = tile.rows + 2.0 * tile.columns + tile.columns / 64 * tile.rows,
                .fetched_lines = of_x * rows / tile.peers + of_W * tile.columns,
                .blocks = blocks,
                .multiprocessors = 1.0 * layer.sms,
                .memory_bytes =
                    4.0 * layer.D * (1.0 * layer.B + layer.C) + 4.0 * logits * layer.shape.logits(),
                .more = more});
  }

  /// The same in 3xTF32, where the logits of each slice go to memory. Rows of an odd length take
  /// longer, as they are written number by number. A part of the time in which the inputs come from
  /// memory is not hidden.
  double split_time(double rounds, int slices, bool parts) const {
    const auto is_it = [&](const SplitTileCost& cost) { return cost.rows == tile.rows; };
    const SplitTileCost& cost = *std::ranges::find_if(kSplitTileCosts, is_it);
    const double steps = ceil_div(ceil_div(layer.D, kLine<float>), slices);
    const double finish =
        cost.finish * (layer.C % 2 != 0 ? 1.55 : 1) + (parts ? 26.0 * tile.rows : 0);
    const double inputs = 4.0 * layer.D * (1.0 * layer.B + layer.C);
    return 6.2 + copies +
           rounds * (steps * (cost.step + 160 * (tile.peers - 1)) + finish) / cycles() +
           0.31 * inputs / memory_rate() + slices * layer.logits_microseconds();
  }

  /// Of one launch. A row's blocks wait for one another, which is counted for each round. The
  /// blocks of one cluster hardly wait.
  double fused(int64_t strips_at_once) const {
    const double rounds = blocks_for(strips, strips_at_once);
    if (tile.high_low) {
      return split_time(rounds, 1, false) + (tiles == tile.peers ? 0 : 3 * rounds);
    }
    const double blocks = 1.0 * tiles * persistent(strips, strips_at_once);
    return time(rounds, blocks, 1, 1, tiles == 1 ? 0 : 3 * rounds);
  }

  /// The time of two launches. The second one, the softmax, reads the logits of all slices.
  double two_kernels(int slices) const { return of_product(slices) + of_softmax(slices); }

  /// The logits alone. With slices, the launch that adds them up takes as long as a softmax would.
  double of_logits(int slices) const {
    return of_product(slices) + (slices == 1 ? 0 : of_softmax(slices));
  }

  double of_product(int slices) const {
    const double units = 1.0 * strips * tiles * slices, rounds = std::ceil(units / all);
    if (tile.high_low) {
      return split_time(rounds, slices, slices == 1 && leaves_parts(layer));
    }
    return time(rounds, units / rounds, slices, 0, 0);
  }
  double of_softmax(int slices) const {
    if (tile.high_low) return layer.softmax_microseconds(slices);
    return kNextLaunch + 4 * (slices + 1) * layer.shape.logits() / memory_rate();
  }

  /// The numbers of slices, at most `most`, that should take the least time: three of them, or
  /// fewer.
  std::vector<int> likely_slices(int most) const {
    std::vector<std::pair<double, int>> each;
    for (int slices = 1; slices <= most; ++slices) each.push_back({two_kernels(slices), slices});
    std::sort(each.begin(), each.end());
    std::vector<int> likely;
    for (const auto& [microseconds, slices] : each) {
      if (likely.size() < 3) likely.push_back(slices);
    }
    return likely;
  }
};

// Makes *exchange* with strips of kRows rows, where at most `clusters` clusters run at a time. With
// 0 `slices` the blocks of a strip wait for one another, in one launch. Otherwise there are two
// launches, with so many slices of D.
template <class Tile>
Product make_exchange(const Layer& layer, int clusters, int slices) {
  constexpr int kRows = Tile::kRows, kPeers = Tile::kPeers;
  constexpr int kBytes = sizeof(typename Tile::Shared);
  constexpr bool kRounds = Tile::kMath == Math::tf32;  // the copy engine rounds
  const bool fused = slices == 0;
  const int tiles = static_cast<int>(kPeers * blocks_for(layer.C, kPeers * Tile::kColumns));
  const int strips = RowsOfX::strips(layer.B, kRows, RowsOfX::shift_of(layer.x_stride));
  const int waiting_grid = fused ? tiles * persistent(strips, kPeers * clusters / tiles) : 0;
  const int free_grid = kPeers * persistent(int64_t{strips} * tiles / kPeers, clusters);
  const int64_t posts = fused && tiles > 1 ? int64_t{strips} * tiles * kRows : 1;
  const auto posted = layer.caller.workspace.zeros<Posted>(posts);
  const auto turns = layer.caller.workspace.zeros<unsigned>(int64_t{strips} * tiles);
  const auto kernel = product::product<ExchangedSoftmax<Tile>>;
  const auto launch = [=](Results results, int of_D = 1) {
    const bool softmax = results.epilogue == Epilogue::softmax;
    const Places places = {strips, tiles, softmax ? 1 : 2048 / kRows};
    const int grid = softmax ? waiting_grid : of_D > 1 ? strips * tiles : free_grid;
    const ExchangedSoftmax<Tile> work = {
        .x = RowsOfX(layer.x, layer.B, layer.D, layer.x_stride, Tile::kBoxRows, kRounds),
        .W = maps_of<Tile>(layer.W, layer.D, layer.C, kRounds, layer.W_stride),
        .C = layer.C,
        .places = places,
        .exchange = {posted, turns},
        .output = results};
    layer.launch(kernel, dim3(grid, of_D), Tile::kThreads, kBytes, work);
  };
  if (fused) return product_of(Kernels::exchange, kernel, kBytes, launch);
  return half_fused(layer, Kernels::exchange, kernel, kBytes, slices, tiles, launch);
}

// Adds the plans with tiles of one size: one launch, and two launches with those numbers of slices
// that should take the least time, up to three. At most `clusters` clusters run at a time. Blocks
// of several clusters that wait for one another need a GPU on which nothing else runs.
inline void add_exchange_plans(const Layer& layer, const ExchangeTileFacts& tile, int clusters,
                               Product (*make)(const Layer&, int clusters, int slices),
                               bool copies_x, std::vector<Plan>& plans) {
  // No cluster fits, or a block of each would have no tile.
  if (clusters == 0 || layer.C <= (tile.peers - 1) * tile.columns) return;
  const bool copies_W = tile.aligned && layer.C % 4 != 0;
  const ExchangeTime time(layer, tile, copies_x, copies_W, tile.peers * clusters);
  const auto add = [&](double microseconds, int slices, const std::string& how) {
    const std::string tiles = text_of_tiles(tile.rows, tile.columns, tile.peers, copies_x);
    const WayId id = way_id({tile.rows, tile.columns, tile.peers, copies_x});
    plans.push_back({{microseconds, time.two_kernels(1), id, slices, tiles, how},
                     copies_x,
                     copies_W,
                     [=](const Layer& aligned) { return make(aligned, clusters, slices); },
                     slices > 0 ? time.of_logits(slices) : INFINITY});
  };
  const bool may_wait = layer.caller.alone || time.tiles == tile.peers;  // only within a cluster
  if (time.tiles <= time.all && may_wait) add(time.fused(time.all / time.tiles), 0, "");
  for (const int slices : time.likely_slices(layer.most_slices(4 * kLine<float>))) {
    add(time.two_kernels(slices), slices, "; half fused; slices: " + std::to_string(slices));
  }
}
template <class Tile>
void plan_exchange(const Layer& layer, bool copies_x, std::vector<Plan>& plans) {
  constexpr int kBytes = sizeof(typename Tile::Shared);
  const AnyKernel kernel = product::product<ExchangedSoftmax<Tile>>;
  allow_shared_bytes(kernel, kBytes);
  add_exchange_plans(layer,
                     {Tile::kRows, Tile::kColumns, Tile::kPeers, Tile::kAligned, Tile::kHighLow},
                     clusters_that_fit(kernel, Tile::kPeers, Tile::kThreads, kBytes),
                     make_exchange<Tile>, copies_x, plans);
}

// The plans with tiles of all sizes (rows, columns, blocks in a cluster), and with x as it lies or
// copied. The fastest come first.
template <Math kMath, bool kAligned>
std::vector<Plan> plan_exchange(const Layer& layer) {
  std::vector<Plan> plans;
  for (int copies_x = 0; copies_x <= (layer.x_stride % 4 != 0); ++copies_x) {
    const auto add = [&]<int kRows, int kColumns, int... kPeers>() {
      (plan_exchange<ExchangeTile<kMath, kRows, kColumns, kPeers, kAligned>>(layer, copies_x,
                                                                             plans),
       ...);
    };
    add.template operator()<32, 128, 1, 2>();
    add.template operator()<64, 128, 1>();
    add.template operator()<128, 128, 1, 2, 3>();
    if constexpr (kMath == Math::tf32) {  // 3xTF32: a thread has the sums of a step, too
      add.template operator()<96, 128, 1, 3>();
      add.template operator()<192, 128, 1, 3>();
      add.template operator()<256, 128, 1, 2>();
      add.template operator()<64, 192, 1, 2>();
      add.template operator()<128, 192, 2>();
      add.template operator()<160, 192, 2>();
    }
  }
  std::stable_sort(plans.begin(), plans.end());
  return plans;
}

// Whether rows and columns fit: a tile may end behind the last row, and that number is an int, too;
// a grid's y, at most 65535, counts the tiles of a row.
inline bool fits_tiles(const Layer& layer) {
  return layer.shape.rows <= INT32_MAX - 1024 && layer.C <= 65535 * 128;
}

// The ways with exchange's tiles, as accurate as fp32, for Hopper: all, or only the one that should
// be the fastest. There are none if the shape is too large for them.
inline std::vector<LogitsWay> split_logits_ways(const Caller& caller, const Memory<float>& x,
                                                const Memory<float>& W, const Memory<float>& logits,
                                                const SoftmaxShape& shape, bool parts_wanted) {
  Layer layer = {caller, shape, x, W, logits};
  layer.slices_at_most = layer.sms;
  if (!fits_tiles(layer)) return {};
  std::vector<Plan> plans = plan_exchange<Math::split, true>(layer);
  std::erase_if(plans, [](const Plan& plan) { return plan.expected.slices == 0; });
  for (Plan& plan : plans) plan.expected.microseconds = plan.of_logits;
  plans = plans_to_try(plans, caller.search.all);
  const std::vector<Product> products = products_of(layer, plans);
  int64_t partial = 1, parts = 1;
  for (const Product& product : products) {
    const int slices = product.expected.slices;
    if (slices > 1) partial = std::max(partial, slices * shape.rows * shape.classes);
    if (slices == 1 && parts_wanted) parts = std::max(parts, shape.rows * product.parts);
  }
  const auto sliced = caller.workspace.any<float>(partial);
  const auto memory = caller.workspace.any<float2>(parts);
  std::vector<LogitsWay> ways;
  for (const Product& product : products) {
    const Expected& expected = product.expected;
    const int slices = expected.slices;
    const Epilogue epilogue = slices == 1 && parts_wanted ? Epilogue::parts : Epilogue::logits;
    const auto out = slices > 1 ? sliced : logits;
    ways.push_back({{expected.tiles + expected.how, expected.microseconds,
                     [=, launch = product.launch_alone] {
                       launch({.epilogue = epilogue, .out = out, .parts = memory});
                     },
                     product.shared_bytes, way_id({static_cast<int64_t>(expected.tile), slices})},
                    slices,
                    product.parts,
                    sliced,
                    memory});
  }
  return ways;
}

}  // namespace operators::softmax
