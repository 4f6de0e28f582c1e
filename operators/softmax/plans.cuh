// How long lesson 9's kernels for Hopper should take, in microseconds: what ranks the ways to
// compute a row, of which the first ones are tried. Fitted on an H200.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "operators/softmax/layer.cuh"
#include "operators/softmax/transposed_product.cuh"

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

/// Fused exchange with one size of tiles, of which `all` blocks run at a time. The more blocks wait
/// for one another, the longer. Half fused, 8 bytes more per logit and slice move, at 26 GB/s for
/// each multiprocessor, and the softmax is another kernel (2.05 us, and some for each further
/// slice); of more than 1024 columns it has a block a row, which takes time if rows are many.
template <class Shared>
struct ExchangeTime {
  const Layer& layer;
  int64_t all, tiles, strips;
  TransposedTime<Shared> time;
  double copies;

  ExchangeTime(const Layer& layer, bool copies_x, bool copies_W, int64_t all)
      : layer(layer),
        all(all),
        tiles(Shared::kPeers * blocks_for(layer.C, Shared::kPeers * Shared::kColumns)),
        time{layer.B, layer.D, layer.C, copies_x ? 0 : RowsOfX::shift_of(layer.x_stride)},
        copies((copies_x ? copy_microseconds(layer, layer.B, layer.D) : 0) +
               (copies_W ? copy_microseconds(layer, layer.D, layer.C) : 0)) {
    strips = RowsOfX::strips<Shared::kRows>(layer.B, time.shift);
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

}  // namespace operators::softmax
