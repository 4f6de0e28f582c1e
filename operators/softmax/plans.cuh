// How long lesson 9's kernels for Hopper should take, in microseconds: what ranks the ways to
// compute a row, of which the first ones are tried. Fitted on an H200. And the plans of fused
// exchange.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "operators/softmax/exchange.cuh"
#include "operators/softmax/layer.cuh"

namespace operators::softmax {

using namespace primitives;

/// Of a launch that copies rows: 23 GB/s for each multiprocessor.
inline double copy_microseconds(const Layer& layer, int rows, int cols) {
  return 1 + 8.0 * rows * cols / (23e3 * layer.sms);
}

/// Fused cluster, whose clusters of `splits` blocks have tiles of `rows` x `classes`, and take
/// `depth` inputs at a time; `at_once` of them run at a time. Of such a chunk a block loads 50 KB a
/// microsecond if it is alone, 32 KB if each multiprocessor has one (`busy` = 1); then it
/// multiplies. (46 shapes: 10 % rms.)
inline double cluster_microseconds(const Layer& layer, int splits, int rows, int classes, int depth,
                                   int64_t at_once) {
  const int64_t tiles = blocks_for(layer.C, classes), clusters = tiles * blocks_for(layer.B, rows);
  const double busy = 1.0 * std::min(clusters, at_once) * splits / layer.sms;
  const double loaded = 4e-3 * depth * (std::min(rows, layer.B) + std::min(classes, layer.C));
  const double chunk = (layer.C % 2 == 0 ? 1 : 1.12) * (0.23 + loaded * (0.02 + 0.011 * busy));
  const double chunks = blocks_for(clusters, at_once) * blocks_for(layer.D, splits * depth);
  return 1.4 + 0.9 * std::min(1.0, busy) + chunks * chunk +
         (tiles > 1 ? 1.5 + 1.1e-5 * layer.shape.logits() : 0) +
         (layer.x_stride % 4 != 0 ? copy_microseconds(layer, layer.B, layer.D) : 0);
}

// Microseconds that these blocks should take: `active` run at a time (`most` could), `rounds` times
// one after another, each with one of `slices` slices of a strip's steps along D. Fitted to 700
// measurements on an H200, 12 % off (rms). A step takes its products or its copies, whichever is
// longer. Products: 1.73 ns for each row of the tile and 80 more (only a fit, for 64 to 256 rows).
// Copies from L2: 69 GB/s for each block if all run, more if fewer do. 128 bytes of a row count
// once if they are one line of the cache, 1.13 times on two lines, 1.7 times on five sectors of 32
// bytes; twice where rows of x start anywhere, 2.2 times for such a W, whose boxes are wider than
// the tile. Memory: 28 GB/s for each block; few blocks get more each, but less in all.
template <class Tile>
struct TransposedTime {
  int B, D, C, shift;  // see RowsOfX

  double operator()(double rounds, double active, double most, int slices) const {
    constexpr int kDepth = kLine<float>, kColumns = Tile::kColumns;
    constexpr double kWide = kColumns / 128.0;
    const auto lines = [](int n) { return (n + 3) % 32 < 4 ? 1 : (n + 3) % 8 < 4 ? 1.13 : 1.7; };
    const double products = 1.73e-3 * (Tile::kRows + 80) * kWide * (Tile::kHighLow ? 3.4 : 1);
    const double rows = std::min(1.0 * Tile::kRows, std::ceil(1.0 * B / (1 << shift)));
    const double pieces = rows / Tile::kPeers * (shift > 0 ? 2 : lines(D)) +
                          (Tile::kAligned ? std::min(kColumns, C) * lines(C) : 2.2 * kColumns);
    const double copies = 4 * kDepth * pieces * std::pow(active / most, 0.78) / 69e3;
    const double steps = std::ceil(std::ceil(1.0 * D / kDepth) / slices);
    const double memory = 4.0 * D * (1.0 * B + C) / (28e3 * (0.7 * most + 0.3 * active));
    const double store = (Tile::kAligned ? 0.0178 : 0.0198) * Tile::kRows * kWide;  // epilogue
    return 0.5 + rounds * store + std::max(rounds * steps * std::max(products, copies), memory);
  }
};

/// Fused exchange with one size of tiles, of which `all` blocks run at a time. The more blocks wait
/// for one another, the longer. Half fused, 8 bytes more per logit and slice move, at 26 GB/s for
/// each multiprocessor, and the softmax is another kernel (2.05 us, and some for each further
/// slice); of more than 1024 columns it has a block a row, which takes time if rows are many.
template <class Tile>
struct ExchangeTime {
  const Layer& layer;
  int64_t all, tiles, strips;
  TransposedTime<Tile> time;
  double copies;

  ExchangeTime(const Layer& layer, bool copies_x, bool copies_W, int64_t all)
      : layer(layer),
        all(all),
        tiles(Tile::kPeers * blocks_for(layer.C, Tile::kPeers * Tile::kColumns)),
        time{layer.B, layer.D, layer.C, copies_x ? 0 : RowsOfX::shift_of(layer.x_stride)},
        copies((copies_x ? copy_microseconds(layer, layer.B, layer.D) : 0) +
               (copies_W ? copy_microseconds(layer, layer.D, layer.C) : 0)) {
    strips = RowsOfX::strips<Tile::kRows>(layer.B, time.shift);
  }

  double fused(int64_t strips_at_once) const {
    const double rounds = blocks_for(strips, strips_at_once);
    const double active = 1.0 * tiles * persistent(strips, strips_at_once);
    return copies + time(rounds, active, all, 1) + rounds * (tiles == 1 ? 1 : 2.7 + 0.115 * tiles);
  }

  double two_kernels(int slices) const {
    const int C = layer.C;
    const bool in_registers = C <= kLongestInRegisters;
    const double units = 1.0 * strips * tiles * slices, rounds = std::ceil(units / all);
    const double logits = 8 * layer.shape.logits() / (26e3 * all);
    const double moved = slices == 1 ? logits : logits * (in_registers ? slices : slices + 1);
    const double least = C > 1024 && in_registers ? 0.3 * layer.B / all : 0;
    const double slice = C <= 1024 ? 0.05 : C <= 4096 ? 0.4 : C % 4 == 0 ? 0.7 : 3;
    return copies + time(rounds, units / rounds, all, slices) + 2.05 + std::max(moved, least) +
           (slices - 1) * slice;
  }

  /// The numbers of slices, 1 to `most`, that should take the least time: up to three.
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

// Exchange with strips of kRows rows; at most `clusters` clusters run at a time. `slices` = 0: the
// blocks of a strip wait for one another. Else half fused, with so many slices of D.
template <class Tile>
Product make_exchange(const Layer& layer, int clusters, int slices) {
  constexpr int kRows = Tile::kRows, kPeers = Tile::kPeers;
  constexpr int kBytes = sizeof(typename Tile::Shared);
  constexpr bool kRounds = Tile::kMath == Math::tf32;  // the copy engine does
  const bool fused = slices == 0;
  const int tiles = static_cast<int>(kPeers * blocks_for(layer.C, kPeers * Tile::kColumns));
  const int strips = RowsOfX::strips<kRows>(layer.B, RowsOfX::shift_of(layer.x_stride));
  const int waiting_grid = fused ? tiles * persistent(strips, kPeers * clusters / tiles) : 0;
  const int free_grid = kPeers * persistent(int64_t{strips} * tiles / kPeers, clusters);
  const int64_t posts = fused && tiles > 1 ? int64_t{strips} * tiles * kRows : 1;
  const auto posted = layer.workspace.zeros<Posted>(posts);
  const auto turns = layer.workspace.zeros<unsigned>(int64_t{strips} * tiles);
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
    launch_early(kernel, dim3(grid, of_D), Tile::kThreads, kBytes, work);
  };
  if (fused) return product_of("exchange", kernel, kBytes, launch);
  return half_fused(layer, "exchange", kernel, kBytes, slices, tiles, launch);
}

// Plans with one size of tiles: fused, and half fused, with the numbers of slices that should take
// the least time, up to three. (Blocks that wait for one another need a GPU without other work.)
template <class Tile>
void plan_exchange(const Layer& layer, bool copies_x, std::vector<Plan>& plans) {
  constexpr int kRows = Tile::kRows, kColumns = Tile::kColumns, kPeers = Tile::kPeers;
  constexpr int kBytes = sizeof(typename Tile::Shared);
  const auto kernel = product::product<ExchangedSoftmax<Tile>>;
  allow_shared_bytes(kernel, kBytes);
  const int clusters = clusters_that_fit(kernel, kPeers, Tile::kThreads, kBytes);
  if (clusters == 0 || layer.C <= (kPeers - 1) * kColumns) return;  // none fits, or one has no tile
  const bool copies_W = Tile::kAligned && layer.C % 4 != 0;
  const ExchangeTime<Tile> time(layer, copies_x, copies_W, kPeers * clusters);
  const auto add = [&](double microseconds, int slices, const std::string& how) {
    const auto make = [=](const Layer& aligned) {
      return make_exchange<Tile>(aligned, clusters, slices);
    };
    const std::string tiles = text_of_tiles(kRows, kColumns, kPeers, copies_x);
    plans.push_back({{microseconds, time.two_kernels(1), tiles, how}, copies_x, copies_W, make});
  };
  if (time.tiles <= time.all) add(time.fused(time.all / time.tiles), 0, "");
  for (const int slices : time.likely_slices(layer.most_slices(4 * kLine<float>))) {
    add(time.two_kernels(slices), slices, "; half fused; slices: " + std::to_string(slices));
  }
}

// The plans with all tiles (rows, columns, blocks in a cluster), with x as it lies or copied; the
// fastest first.
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

}  // namespace operators::softmax
