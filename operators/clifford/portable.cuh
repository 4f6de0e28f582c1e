// How lesson 10's layer is launched on any GPU, for rows of any length: by the kernels of
// on_chip.cuh, or by those of rows_twice.cuh where a block has no room for a row.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "operators/caller.h"
#include "operators/clifford/on_chip.cuh"
#include "operators/clifford/rows_twice.cuh"
#include "operators/estimate.h"

namespace operators::clifford {

// W features per thread: as many as the registers hold.
template <typename A>
constexpr int kOnChipWidth = A::kBlades <= 8 ? 2 : 1;

/// How rows are divided: a block has as many rows at a time as its threads and its shared memory
/// allow, but no more than the same number of rounds needs. No threads: it has no room for one.
/// bytes_of(shape) is the shared memory that a shape needs.
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

/// The most shared memory that a launch may ask for. The kernel itself declares that of the rows'
/// sums.
template <typename Sums>
int shared_bytes_beside() {
  return most_shared_bytes() - static_cast<int>(2 * kMaxWarps * sizeof(Sums));
}

/// An estimate: how long a pass takes. `passes` tensors of 4 A::kBlades plane() bytes each go from
/// or to memory.
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
    forward_on_chip<A, W, kVector><<<blocks, shape.threads, bytes, of.stream>>>(
        of.x, of.y, of.w, of.out, of.layer, shape, stages);
  };
  return {{"row on chip: blocks of " + std::to_string(shape.threads) +
               " threads, stages: " + std::to_string(stages),
           portable_microseconds<A>(of.layer, 3), launch, bytes}};
}

/// The one way: the row on chip with two stages, or with one, or the row read twice where a block
/// has no room for it. kVector only where every row starts at a multiple of a pack's size.
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
    forward_twice<A>
        <<<of.layer.batch, kTwiceThreads, 0, of.stream>>>(of.x, of.y, of.w, of.out, of.layer);
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
    backward_on_chip<A, W, kVector, kStaged><<<blocks, shape.threads, bytes, of.stream>>>(
        of.x, of.y, of.w, d.d_out, d.dx, d.dy, partials, of.layer, shape);
    add_up_weights<A>(d, partials, of.layer, of.stream);
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
      gradient_sums<A><<<of.layer.batch, kTwiceThreads, 0, of.stream>>>(of.x, of.y, of.w, d.d_out,
                                                                        sums, of.layer);
    }
    gradients_of_strip<A><<<strip_blocks(of.layer), kStripFeatures, 0, of.stream>>>(
        of.x, of.y, of.w, d.d_out, sums, d.dx, d.dy, partials, of.layer);
    add_up_weights<A>(d, partials, of.layer, of.stream);
  };
  return {
      {"row read twice", portable_microseconds<A>(of.layer, of.layer.normed ? 8 : 5), launch, 0}};
}

}  // namespace operators::clifford
