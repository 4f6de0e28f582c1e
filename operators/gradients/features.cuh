// How the gradient features of lesson 8 are launched on Hopper, forward and backward, for any V and
// W, and E up to 256.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "operators/caller.h"
#include "operators/device_facts.h"
#include "operators/estimate.h"
#include "operators/gradients/backward.cuh"
#include "operators/gradients/forward.cuh"
#include "operators/gradients/small_products.cuh"

namespace operators::gradients {

/// There are blocks for up to kMostSteps steps of 64 coefficients, and clusters of up to
/// kMostBlocks blocks.
inline constexpr unsigned kMostSteps = 4, kMostBlocks = 2;
inline constexpr int64_t kMostEigen = kMostSteps * kStepK;
inline constexpr int kForwardThreads = 384, kBackwardThreads = 512;

/// A pass of a shape that is at least 1 x 8 x 8, with E and W multiples of 8. `operands` says, at
/// each launch, where inputs and outputs are.
template <Pass kPass>
class GradientFeatures {
 public:
  GradientFeatures(const Caller& caller, std::function<GradientsOperands()> operands,
                   GradientsShape shape)
      : operands_(std::move(operands)), shape_(shape) {
    if (shape.E > kMostEigen) return;
    allow_small_products();
    const unsigned steps = blocks_for(shape.E, kStepK);
    if constexpr (kPass == Pass::forward) {
      steps == 1   ? plan_forward<1>(caller)
      : steps == 2 ? plan_forward<2>(caller)
      : steps == 3 ? plan_forward<3>(caller)
                   : plan_forward<4>(caller);
    } else {
      // With 32 columns a block there are half as many slices of V, so half as many partial sums to
      // add up at the end. But each tile is fetched for fewer columns.
      const bool wide = shape.W > 32 && (steps == 1 || shape.V >= int64_t{256} * multiprocessors());
      steps == 1   ? wide ? plan_backward<1, 64>(caller) : plan_backward<1, 32>(caller)
        : steps == 2 ? wide ? plan_backward<2, 64>(caller) : plan_backward<2, 32>(caller)
        : steps == 3 ? plan_backward<3, 32>(caller)
                   : plan_backward<4, 32>(caller);
    }
  }

  /// One way; or none, if E is too large, or the device has no room for a cluster.
  const std::vector<Way>& ways() const { return ways_; }
  /// Backward: how many vertices a cluster adds up, at most, before its sum is added to those of
  /// others.
  int64_t vertices_of_a_cluster() const { return vertices_of_a_cluster_; }
  double workspace_bytes() const { return workspace_bytes_; }

 private:
  /// The grid, for `cols` columns a block. x: the blocks of a cluster, y: slices of V, z: clusters
  /// along W. There are as many clusters as the device holds, or fewer if these need no more
  /// rounds. y is 0 where no cluster fits. The device is asked once for each number of blocks in a
  /// cluster.
  template <typename Shared, auto kKernel, int kThreads>
  dim3 clusters_for(int cols) const {
    const unsigned groups = blocks_for(shape_.W, cols);
    const unsigned slabs = blocks_for(groups, kMostBlocks);
    const unsigned blocks = blocks_for(groups, slabs);
    const int clusters =
        blocks == 1 ? fit<Shared, kKernel, kThreads, 1>() : fit<Shared, kKernel, kThreads, 2>();
    if (clusters == 0) return dim3(blocks, 0, slabs);
    const int64_t of_a_slab = std::max<int64_t>(1, clusters / static_cast<int64_t>(slabs));
    return dim3(blocks, persistent(blocks_for(shape_.V, 64), of_a_slab), slabs);
  }
  template <typename Shared, auto kKernel, int kThreads, unsigned kBlocks>
  static int fit() {
    static_assert(kBlocks <= kMostBlocks);
    constexpr int kBytes = sizeof(Shared);
    allow_shared_bytes(kKernel, kBytes);  // each time: the device may have been reset since
    return fact_of_device([] { return clusters_that_fit(kKernel, kBlocks, kThreads, kBytes); });
  }

  /// M has M1, M2 and, forward, -M2.
  static GradientMaps maps_of(const GradientsOperands& in, const bf16* M, const bf16* vertices) {
    const int64_t count = static_cast<int64_t>(in.E) * in.W;
    return {.Gr = tensor_map<bf16>(in.Gr, in.V, in.E, 64),
            .Gi = tensor_map<bf16>(in.Gi, in.V, in.E, 64),
            .minus_M2 = tensor_map<bf16>(M + 2 * count, in.E, in.W, 64),
            .M1 = tensor_map<bf16>(M, in.E, in.W, 64),
            .M2 = tensor_map<bf16>(M + count, in.E, in.W, 64),
            .x = tensor_map<bf16>(in.x, in.E, in.W, 64),
            .vertices = tensor_map<bf16>(vertices, in.V, in.W, 64)};
  }

  /// `associate` starts when all kernels before it have ended. So hopper_features, which is
  /// launched early, may read Gr, Gi and x before `associate` has ended; it waits for M1 and M2.
  template <int kSteps>
  void plan_forward(const Caller& caller) {
    using Shared = HopperForward<kSteps>;
    constexpr int kBytes = sizeof(Shared);
    const auto [V, E, W] = shape_;
    const auto grid_for = [this](int groups) {
      return clusters_for<Shared, hopper_features<kSteps>, kForwardThreads>(64 * groups);
    };
    // With two groups of columns Gr and Gi are read less often. With one there is less to load
    // before the start, which is better as long as a consumer has no more than one tile.
    const bool one_group = W <= 64 || blocks_for(V, 64) <= 2 * grid_for(1).y;
    const int groups = one_group ? 1 : Shared::kGroups;
    const dim3 blocks = grid_for(groups);
    if (blocks.y == 0) return;
    const auto M = caller.workspace.any<bf16>(3 * shape_.coefficients());
    workspace_bytes_ = M.bytes();
    const auto launch = [=, shape = shape_, at = operands_, stream = caller.stream] {
      const GradientsOperands in = at();
      const GradientMaps maps = maps_of(in, M, in.out);
      associate<<<small_blocks(shape.E, shape.W, 3), kSmallThreads, kSmallBytes, stream>>>(
          in, M, dense(shape));
      launch_clusters_on(stream, hopper_features<kSteps>, blocks.x, true, blocks, kForwardThreads,
                         kBytes, maps, static_cast<int>(in.V), in.E, groups);
    };
    add_way(64 * groups, blocks, 12, launch, kBytes);
  }

  template <int kSteps, int kCols>
  void plan_backward(const Caller& caller) {
    using Shared = HopperBackward<kSteps, kCols>;
    constexpr int kBytes = sizeof(Shared);
    const auto [V, E, W] = shape_;
    const dim3 blocks =
        clusters_for<Shared, hopper_accumulate_backward<kSteps, kCols>, kBackwardThreads>(kCols);
    if (blocks.y == 0) return;
    // M is [M1 | M2], 32 columns of either in turn.
    const int cols = static_cast<int>(blocks_for(W, 32)) * 32;
    const Layout layout = {.matrix = 32, .row = 2 * cols, .group = 64, .cols = cols};
    const int64_t count = shape_.coefficients();
    const auto M = caller.workspace.any<bf16>(std::max(3 * count, E * 2 * cols));
    const auto partials = caller.workspace.any<float>(blocks.y * 3 * count);
    const auto dM = caller.workspace.any<bf16>(2 * count);
    const auto D = caller.workspace.any<float>(count);
    workspace_bytes_ = M.bytes() + partials.bytes() + dM.bytes() + D.bytes();
    vertices_of_a_cluster_ = 64 * ceil_div(ceil_div(V, 64), int64_t{blocks.y});
    const auto launch = [=, shape = shape_, at = operands_, stream = caller.stream] {
      const GradientsOperands in = at();
      GradientMaps maps = maps_of(in, M, in.d_out);
      maps.M1 = tensor_map<bf16>(M, in.E, layout.row, 64);
      associate<<<small_blocks(shape.E, shape.W, 2), kSmallThreads, kSmallBytes, stream>>>(in, M,
                                                                                           layout);
      launch_clusters_on(stream, hopper_accumulate_backward<kSteps, kCols>, blocks.x, true, blocks,
                         kBackwardThreads, kBytes, maps, in.d_out, partials.data(),
                         static_cast<int>(in.V), in.E, in.W);
      launch_rest(stream, in, partials, static_cast<int>(blocks.y), dM, D);
    };
    add_way(kCols, blocks, 24, launch, kBytes);
  }

  /// `operations`: for each vertex, coefficient and feature.
  template <typename Launch>
  void add_way(int cols, dim3 blocks, int operations, const Launch& launch, int shared_bytes) {
    const double all = static_cast<double>(operations) * static_cast<double>(shape_.V) *
                       static_cast<double>(shape_.coefficients());
    ways_.push_back({"blocks of 64 x " + std::to_string(cols) + "; clusters: " +
                         std::to_string(blocks.y * blocks.z) + " of " + std::to_string(blocks.x),
                     2 * kFirstLaunch + all / (4096 * cycles() * multiprocessors()), launch,
                     shared_bytes});
  }

  std::function<GradientsOperands()> operands_;
  GradientsShape shape_;
  std::vector<Way> ways_;
  int64_t vertices_of_a_cluster_ = 0;
  double workspace_bytes_ = 0;
};

}  // namespace operators::gradients
