// The layer of lesson 10 on any GPU: how its portable kernels are launched. For the same rows as
// Hopper's way takes (operators/clifford/layer.cuh), and longer ones.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "operators/clifford/on_chip.cuh"
#include "operators/clifford/rows_twice.cuh"
#include "operators/estimate.h"

namespace operators::clifford {

// W features per thread: as many as the registers hold.
template <typename A>
constexpr int kOnChipWidth = A::kBlades <= 8 ? 2 : 1;

/// As many rows at a time as a block has threads and shared memory for; but no more than are needed
/// to be done in as many rounds. No threads: a block has no room for a row.
template <typename A, int W, typename BytesOf>
RowsOnChip rows_in(int shared_bytes, const Layer& layer, BytesOf bytes_of) {
  RowsOnChip shape = rows_on_chip<A, W>(layer);
  if (shape.blocks > 1) return {};
  const auto fits = [&] { return bytes_of(shape) <= static_cast<size_t>(shared_bytes); };
  while (shape.threads > 0 && !fits()) shape.threads -= shape.per_row;
  if (shape.threads == 0) return shape;
  const int rounds = ceil_div(shape.groups(layer), multiprocessors());
  shape.threads = ceil_div(layer.batch, rounds * multiprocessors()) * shape.per_row;
  return shape;
}

/// What a block may ask for beside the sums of rows, which its kernel declares itself.
template <typename Sums>
int shared_bytes_beside() {
  return most_shared_bytes() - static_cast<int>(2 * kMaxWarps * sizeof(Sums));
}

/// `passes`: how often the tensors go from or to memory, each 4 A::kBlades plane() bytes.
template <typename A>
double portable_microseconds(const Layer& layer, double passes) {
  return kFirstLaunch +
         4.0 * passes * A::kBlades * static_cast<double>(layer.plane()) / (0.7 * memory_rate());
}

inline int blocks_that_stay(AnyKernel kernel, const RowsOnChip& shape, int bytes,
                            const Layer& layer) {
  allow_shared_bytes(kernel, bytes);
  return std::min(shape.groups(layer), resident_blocks(kernel, shape.threads, bytes));
}

/// The way with so many stages; none, where a block has no room for them.
template <typename A, int W, bool kVector>
std::vector<Way> forward_way_on_chip(const CliffordTensors& of, int stages) {
  using Stages = ForwardStages<A, W, kVector>;
  const RowsOnChip shape =
      rows_in<A, W>(shared_bytes_beside<FeatureSums<A::kGrades>>(), of.layer,
                    [&](const RowsOnChip& rows) { return Stages::bytes(rows, stages); });
  if (shape.threads == 0) return {};
  const auto kernel = forward_on_chip<A, W, kVector>;
  const int bytes = static_cast<int>(Stages::bytes(shape, stages));
  const int blocks = blocks_that_stay(kernel, shape, bytes, of.layer);
  const auto launch = [=] {
    forward_on_chip<A, W, kVector><<<blocks, shape.threads, bytes, of.workspace.stream>>>(
        of.x, of.y, of.w, of.out, of.layer, shape, stages);
  };
  return {{"row on chip: blocks of " + std::to_string(shape.threads) +
               " threads, stages: " + std::to_string(stages),
           portable_microseconds<A>(of.layer, 3), launch, bytes}};
}

/// One way: the row on chip, or, where a block has no room for it, read twice. Whole packs only
/// where every row starts at a multiple of their size.
template <typename A, int W = kOnChipWidth<A>, bool kVector = (W > 1)>
std::vector<Way> portable_forward(const CliffordTensors& of) {
  if constexpr (kVector) {
    if (!whole_packs<A, W>(of.layer, W)) return portable_forward<A, W, false>(of);
  }
  for (int stages = kMostStages; stages > 0; --stages) {
    const std::vector<Way> ways = forward_way_on_chip<A, W, kVector>(of, stages);
    if (!ways.empty()) return ways;
  }
  const auto launch = [=] {
    forward_twice<A><<<of.layer.batch, kTwiceThreads, 0, of.workspace.stream>>>(of.x, of.y, of.w,
                                                                                of.out, of.layer);
  };
  return {
      {"row read twice", portable_microseconds<A>(of.layer, of.layer.normed ? 4 : 3), launch, 0}};
}

/// The way with kStaged tensors on chip; none, where a block has no room for them.
template <typename A, int W, bool kVector, int kStaged>
std::vector<Way> backward_way_on_chip(const CliffordTensors& of, const CliffordGradients& d) {
  using OnChip = OnChipMemory<A, W, kVector, kStaged * A::kBlades>;
  const RowsOnChip shape =
      rows_in<A, W>(shared_bytes_beside<GradientSums<A>>(), of.layer,
                    [](const RowsOnChip& rows) { return OnChip::bytes(rows); });
  if (shape.threads == 0) return {};
  const auto kernel = backward_on_chip<A, W, kVector, kStaged>;
  const int bytes = static_cast<int>(OnChip::bytes(shape));
  const int blocks = blocks_that_stay(kernel, shape, bytes, of.layer);
  const auto partials =
      of.workspace.any<float>(static_cast<size_t>(blocks) * shape.rows() * of.w.size());
  const auto launch = [=] {
    backward_on_chip<A, W, kVector, kStaged><<<blocks, shape.threads, bytes, of.workspace.stream>>>(
        of.x, of.y, of.w, d.d_out, d.dx, d.dy, partials, of.layer, shape);
    add_up_weights<A>(d, partials, of.layer, of.workspace.stream);
  };
  return {{"row on chip: blocks of " + std::to_string(shape.threads) +
               " threads, staged: " + std::to_string(kStaged),
           portable_microseconds<A>(of.layer, 5), launch, bytes}};
}

template <typename A, int W = kOnChipWidth<A>, bool kVector = (W > 1)>
std::vector<Way> portable_backward(const CliffordTensors& of, const CliffordGradients& d) {
  if constexpr (kVector) {
    if (!whole_packs<A, W>(of.layer, W)) return portable_backward<A, W, false>(of, d);
  }
  std::vector<Way> ways = backward_way_on_chip<A, W, kVector, 2>(of, d);
  if (ways.empty()) ways = backward_way_on_chip<A, W, kVector, 0>(of, d);
  if (!ways.empty()) return ways;
  const auto sums = of.workspace.any<GradientSums<A>>(of.layer.normed ? of.layer.batch : 1);
  const auto partials = of.workspace.any<float>(strips(of.layer) * of.w.size());
  const auto launch = [=] {
    if (of.layer.normed) {
      gradient_sums<A><<<of.layer.batch, kTwiceThreads, 0, of.workspace.stream>>>(
          of.x, of.y, of.w, d.d_out, sums, of.layer);
    }
    gradients_of_strip<A><<<strip_blocks(of.layer), kStripFeatures, 0, of.workspace.stream>>>(
        of.x, of.y, of.w, d.d_out, sums, d.dx, d.dy, partials, of.layer);
    add_up_weights<A>(d, partials, of.layer, of.workspace.stream);
  };
  return {
      {"row read twice", portable_microseconds<A>(of.layer, of.layer.normed ? 8 : 5), launch, 0}};
}

}  // namespace operators::clifford
