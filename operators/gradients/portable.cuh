// How the portable kernels of lesson 8's gradient features (associated.cuh) are launched, on
// compute capability 8.0 and newer: for the same shapes as those of Hopper (features.cuh).
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "operators/caller.h"
#include "operators/estimate.h"
#include "operators/gradients/associated.cuh"
#include "operators/gradients/held.cuh"
#include "operators/gradients/small_products.cuh"

namespace operators::gradients {

/// A pass of a shape that is at least 1 x 8 x 8, with E and W multiples of 8. `operands` says, at
/// each launch, where inputs and outputs are.
template <Pass kPass>
class PortableFeatures {
 public:
  PortableFeatures(const Caller& caller, std::function<GradientsOperands()> operands,
                   GradientsShape shape)
      : caller_(caller), operands_(std::move(operands)), shape_(shape) {
    allow_small_products();
    // The wide tiles need GPUs where a block may have 163 KB of shared memory, and so do four
    // stages of HeldBackward. Single is for those where it may have 99 KB.
    if constexpr (kPass == Pass::forward) {
      using Held = HeldForward<3>;
      using Wide = PortableForward<64, 32, 3>;
      using Lean = PortableForward<64, 32, 2, false>;
      using Narrow = PortableForward<32, 16, 2>;
      if (holds<Held>()) {
        plan_forward<Held>();
      } else if (suits<Lean>() && !twice<Wide>()) {
        plan_forward<Lean>();
      } else {
        suits<Wide>() ? plan_forward<Wide>() : plan_forward<Narrow>();
      }
    } else {
      using Held = HeldBackward<4>;
      using HeldSmall = HeldBackward<3>;
      using Wide = PortableBackward<128, 64, 64, 32, 16, 2>;
      using Narrow = PortableBackward<128, 32, 32, 16, 16, 2>;
      using Deep = PortableBackward<256, 32, 32, 16, 16, 2>;
      using Single = PortableBackward<256, 32, 32, 16, 16, 1>;
      if (shape.E > Narrow::kMaxE) {
        fits<Deep>() ? plan_backward<Deep>() : plan_backward<Single>();
      } else if (holds<HeldSmall>()) {
        holds<Held>() ? plan_backward<Held>() : plan_backward<HeldSmall>();
      } else {
        suits<Wide>() ? plan_backward<Wide>() : plan_backward<Narrow>();
      }
    }
  }

  /// One way; or none, if E is too large.
  const std::vector<Way>& ways() const { return ways_; }

 private:
  template <class Tiles>
  bool fits() const {
    return Tiles::shared_bytes(shape_.E) <= most_shared_bytes();
  }
  /// Whether two blocks fit on a multiprocessor, which has 1 KB more than a block may have, and
  /// takes as much of each.
  template <class Tiles>
  bool twice() const {
    return 2 * (Tiles::shared_bytes(shape_.E) + 1024) <= most_shared_bytes() + 1024;
  }
  /// Whether registers hold all rows of the right factors, and would not be half empty; and there
  /// are several tiles for each block, which loads them first.
  template <class Tiles>
  bool holds() const {
    const int64_t tiles =
        int64_t{blocks_for(shape_.V, Tiles::BV)} * blocks_for(shape_.W, Tiles::BN);
    return shape_.E > Tiles::kMaxE / 2 && shape_.E <= Tiles::kMaxE && fits<Tiles>() &&
           tiles >= int64_t{4} * multiprocessors();
  }
  /// Whether wide tiles fit, and are enough for a block on each multiprocessor.
  template <class Tiles>
  bool suits() const {
    const int64_t blocks =
        int64_t{blocks_for(shape_.V, Tiles::BV)} * blocks_for(shape_.W, Tiles::BN);
    return fits<Tiles>() && blocks >= multiprocessors();
  }

  template <class Tiles>
  static AnyKernel kernel_of() {
    if constexpr (kPass == Pass::forward) {
      if constexpr (Tiles::kHeld) {
        return held_features<Tiles>;
      } else {
        return associated_features<Tiles>;
      }
    } else {
      if constexpr (Tiles::kHeld) {
        return held_backward<Tiles>;
      } else {
        return accumulate_backward<Tiles>;
      }
    }
  }

  /// The grid: groups of columns by slices of V. There are as many slices as fill the GPU, but no
  /// more than tiles.
  template <class Tiles>
  dim3 grid_of(AnyKernel kernel, int bytes) const {
    allow_shared_bytes(kernel, bytes);
    const int64_t columns = blocks_for(shape_.W, Tiles::BN);
    const int64_t fit = resident_blocks(kernel, Tiles::kThreads, bytes) / columns;
    const int64_t slices = std::clamp<int64_t>(fit, 1, blocks_for(shape_.V, Tiles::BV));
    return dim3(static_cast<unsigned>(columns), static_cast<unsigned>(slices));
  }

  template <class Tiles>
  void plan_forward() {
    if (!fits<Tiles>()) return;
    const int bytes = static_cast<int>(Tiles::shared_bytes(shape_.E));
    const dim3 grid = grid_of<Tiles>(kernel_of<Tiles>(), bytes);
    const auto M = caller_.workspace.template any<bf16>(2 * shape_.coefficients());
    add_way<Tiles>(grid, 12, bytes, [=, shape = shape_, at = operands_, stream = caller_.stream] {
      const GradientsOperands in = at();
      associate<<<small_blocks(shape.E, shape.W, 2), kSmallThreads, kSmallBytes, stream>>>(
          in, M, dense(shape));
      if constexpr (Tiles::kHeld) {
        held_features<Tiles><<<grid, Tiles::kThreads, bytes, stream>>>(in, M);
      } else {
        associated_features<Tiles><<<grid, Tiles::kThreads, bytes, stream>>>(in, M);
      }
    });
  }

  template <class Tiles>
  void plan_backward() {
    if (!fits<Tiles>() || shape_.E > Tiles::kMaxE) return;
    const int bytes = static_cast<int>(Tiles::shared_bytes(shape_.E));
    const dim3 grid = grid_of<Tiles>(kernel_of<Tiles>(), bytes);
    const int64_t count = shape_.coefficients();
    const auto M = caller_.workspace.template any<bf16>(2 * count);
    const auto partials = caller_.workspace.template any<float>(grid.y * 3 * count);
    const auto dM = caller_.workspace.template any<bf16>(2 * count);
    const auto D = caller_.workspace.template any<float>(count);
    add_way<Tiles>(grid, 24, bytes, [=, shape = shape_, at = operands_, stream = caller_.stream] {
      const GradientsOperands in = at();
      associate<<<small_blocks(shape.E, shape.W, 2), kSmallThreads, kSmallBytes, stream>>>(
          in, M, dense(shape));
      if constexpr (Tiles::kHeld) {
        held_backward<Tiles><<<grid, Tiles::kThreads, bytes, stream>>>(in, M, partials);
      } else {
        accumulate_backward<Tiles><<<grid, Tiles::kThreads, bytes, stream>>>(in, M, partials);
      }
      launch_rest(stream, in, partials, static_cast<int>(grid.y), dM, D);
    });
  }

  /// `operations`: for each vertex, coefficient and feature. They are counted at half of Hopper's
  /// rate.
  template <class Tiles, typename Launch>
  void add_way(dim3 grid, int operations, int bytes, const Launch& launch) {
    const double all = static_cast<double>(operations) * static_cast<double>(shape_.V) *
                       static_cast<double>(shape_.coefficients());
    ways_.push_back({"associated, by mma.sync: " + std::to_string(grid.x * grid.y) +
                         " blocks of tiles of " + std::to_string(Tiles::BV) + " x " +
                         std::to_string(Tiles::BN) + "; stages: " + std::to_string(Tiles::kStages),
                     2 * kFirstLaunch + all / (2048 * cycles() * multiprocessors()), launch,
                     std::max(bytes, kSmallBytes)});
  }

  Caller caller_;
  std::function<GradientsOperands()> operands_;
  GradientsShape shape_;
  std::vector<Way> ways_;
};

}  // namespace operators::gradients
