// How the portable kernels of lesson 7's spatial diffusion (split_k.cuh) are launched, on compute
// capability 8.0 and newer: for the same shapes as those of Hopper (fused.cuh).
#pragma once

#include <algorithm>
#include <climits>
#include <functional>
#include <string>
#include <vector>

#include "operators/caller.h"
#include "operators/diffusion/split_k.cuh"
#include "operators/estimate.h"

namespace operators::diffusion {

/// A pass of a shape that is at least 1 x 8 x 8, with E and W multiples of 8. `operands` says, at
/// each launch, where inputs and outputs are.
template <Pass kPass>
class PortableDiffusion {
 public:
  /// In project_slices, large tiles read less, and forward multiply the basis by the masses less
  /// often. Of small tiles there are more, so fewer slices fill the GPU, and less has to be written
  /// and added up. Large tiles are taken if a slice has enough steps of theirs. Up to 128 rows of
  /// the spectrum can be held in registers.
  PortableDiffusion(const Caller& caller, std::function<DiffusionOperands()> operands,
                    DiffusionShape shape)
      : caller_(caller), operands_(std::move(operands)), shape_(shape) {
    using Large = ProjectTile<128, 128, 2, 2, 2, 2>;
    using Small = ProjectTile<64, 64, 2, 2, 3, 4>;
    using Held = HeldTile<128, 64, 4, 2>;
    using Narrow = ExpandTile<32, 64, 1, 2, 2>;
    const bool held = shape.E <= Held::kE && shape.V <= INT_MAX - Held::kV;
    const int64_t least_steps = kPass == Pass::forward ? 12 : 16;
    if (blocks_for(shape.V, Large::kV) > least_steps * slices_of<Large>()) {
      held ? plan<Large, Held>() : plan<Large, Narrow>();
    } else {
      held ? plan<Small, Held>() : plan<Small, Narrow>();
    }
  }

  /// One way; or none, if E is too large.
  const std::vector<Way>& ways() const { return ways_; }

 private:
  template <class Project>
  int64_t tiles_of() const {
    return int64_t{blocks_for(shape_.E, Project::kE)} * blocks_for(shape_.W, Project::kW);
  }
  /// How many slices the vertices are divided into: as many as it takes for the blocks of all
  /// meshes to fill all multiprocessors, but no slice without a step.
  template <class Project>
  int64_t slices_of() const {
    const int64_t fill = Project::kBlocks * multiprocessors();
    return std::clamp<int64_t>(fill / (tiles_of<Project>() * shape_.meshes), 1,
                               blocks_for(shape_.V, Project::kV));
  }

  template <class Expand>
  static AnyKernel kernel_of() {
    if constexpr (Expand::kHeld) {
      return expand_held<kPass, Expand>;
    } else {
      return expand_spectrum<kPass, Expand>;
    }
  }

  template <class Project, class Expand>
  void plan() {
    const auto [V, E, W, meshes] = shape_;
    const int expand_bytes = static_cast<int>(Expand::shared_bytes(E));
    if (expand_bytes > most_shared_bytes()) return;
    const int64_t slices = slices_of<Project>();
    const auto z = static_cast<unsigned>(meshes);
    const dim3 first(static_cast<unsigned>(tiles_of<Project>()), static_cast<unsigned>(slices), z);
    const dim3 second(blocks_for(W, 32), blocks_for(E, kSumRows), z);
    const unsigned columns = blocks_for(W, Expand::kW);
    allow_shared_bytes(project_slices<kPass, Project>, Project::kSharedBytes);
    const AnyKernel expand = kernel_of<Expand>();
    allow_shared_bytes(expand, expand_bytes);
    const int64_t fit =
        resident_blocks(expand, Expand::kThreads, expand_bytes) / (columns * meshes);
    const dim3 last(static_cast<unsigned>(std::clamp<int64_t>(fit, 1, blocks_for(V, Expand::kV))),
                    columns, z);
    const bool backward = kPass == Pass::backward;
    const int time_rows = backward ? static_cast<int>(second.y * z) : 0;
    const auto sums = caller_.workspace.template any<float>(slices * shape_.spectrum_values());
    const auto spectrum =
        caller_.workspace.template any<__nv_bfloat16>(backward ? shape_.spectrum_values() : 1);
    const auto time_sums =
        caller_.workspace.template any<float>(std::max<int64_t>(1, time_rows * W));
    const auto launch = [=, at = operands_, stream = caller_.stream] {
      DiffusionOperands in = at();
      if (backward) in.spectrum = spectrum;
      project_slices<kPass, Project>
          <<<first, Project::kThreads, Project::kSharedBytes, stream>>>(in, sums);
      add_spectra<kPass><<<second, 32 * kSumRows * kRowWarps, 0, stream>>>(
          in, sums, static_cast<int>(first.y), time_sums);
      if constexpr (Expand::kHeld) {
        expand_held<kPass, Expand>
            <<<last, Expand::kThreads, expand_bytes, stream>>>(in, time_sums, time_rows);
      } else {
        expand_spectrum<kPass, Expand>
            <<<last, Expand::kThreads, expand_bytes, stream>>>(in, time_sums, time_rows);
      }
    };
    const double bytes = 2.0 * static_cast<double>(shape_.vertices() * (2 * W + 2 * E));
    ways_.push_back({"split-K, by mma.sync: tiles of " + std::to_string(Project::kE) + " x " +
                         std::to_string(Project::kW) + ", slices: " + std::to_string(slices) +
                         ", columns: " + std::to_string(Expand::kW),
                     3 * kFirstLaunch + bytes / (0.8 * memory_rate()), launch,
                     std::max(Project::kSharedBytes, expand_bytes)});
  }

  Caller caller_;
  std::function<DiffusionOperands()> operands_;
  DiffusionShape shape_;
  std::vector<Way> ways_;
};

}  // namespace operators::diffusion
