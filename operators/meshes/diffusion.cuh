// The spatial diffusion of lesson 7 in every type, of any size, and of meshes that differ in
// theirs: two products and what stands between them. How that is faster for shapes of many meshes
// is in operators/diffusion.
//
//     project           values to the spectrum, in slots
//     finish_spectrum   the sum of the slots, damped
//     expand            the spectrum to the result
//     add_rows          backward: d_times
#pragma once

#include <algorithm>
#include <climits>
#include <functional>
#include <string>
#include <vector>

#include "operators/caller.h"
#include "operators/estimate.h"
#include "operators/meshes/products.cuh"
#include "operators/operands.h"

namespace operators::meshes {

/// How many meshes there are of how many vertices in all, and which sizes a vertex has.
struct MeshesShape {
  int64_t meshes, vertices, E, W;
  bool ragged;  ///< whether there are offsets

  int64_t vertex_values() const { return vertices * W; }
  int64_t spectrum_values() const { return meshes * E * W; }
  Meshes of(const int* offsets) const {
    return {offsets, static_cast<int>(meshes), static_cast<int>(vertices),
            static_cast<int>(vertices / meshes)};
  }
  /// Rows of spectra, as if they were the vertices of a single mesh.
  Meshes rows_of_spectra() const {
    const int rows = static_cast<int>(meshes * E);
    return {nullptr, 1, rows, rows};
  }
};

/// The vertices of a slot of a sum over vertices, so that `tiles` of each slot fill the GPU.
inline int slot_length(int64_t vertices, int64_t tiles, int meshes) {
  const int64_t chunks =
      std::clamp<int64_t>(3 * multiprocessors() / tiles - meshes + 1, 1, 1 << 16);
  const int64_t length = std::max<int64_t>(64, ceil_div(vertices, chunks));
  return static_cast<int>(ceil_div(length, int64_t{32}) * 32);
}
/// How many warps add up the slots of an element.
inline int sum_ranks(const Meshes& meshes, int length) {
  return meshes.slots(length) >= int64_t{8} * meshes.count ? kSumWarps : 1;
}
inline int64_t tiles_of(int64_t rows, int64_t cols) {
  return ceil_div(rows, int64_t{kTile}) * ceil_div(cols, int64_t{kTile});
}
/// The blocks of a grid's first dimension; more than it may have make a shape too large.
inline bool is_a_grid(int64_t blocks) { return blocks <= INT_MAX; }

/// Launches a kernel of those that wait first of all for the one before.
template <typename... Parameters, typename... Arguments>
void launch_next(cudaStream_t stream, void (*kernel)(Parameters...), Blocks blocks, int threads,
                 const Arguments&... arguments) {
  launch_clusters_on(stream, kernel, 1, true, blocks, static_cast<unsigned>(threads), 0,
                     arguments...);
}

template <class Kind>
void launch_project(cudaStream_t stream, const Projection<typename Kind::T>& in, int results) {
  const int64_t blocks = tiles_of(in.E, in.W) * in.meshes.slots(in.length);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(results));
  launch_next(stream, project<Kind>, grid, kThreads, in);
}
template <class Kind>
void launch_expand(cudaStream_t stream, const Expansion<typename Kind::T>& in, int results) {
  const int64_t blocks = ceil_div(in.cols, kTile) * in.meshes.slots(kTile);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(results));
  launch_next(stream, expand<Kind>, grid, kThreads, in);
}

/// What a pass of the diffusion reads and writes; what only the other pass has is null.
template <typename T>
struct DiffusionTensors {
  const T *values, *basis, *mass, *evalues, *times;
  const T *d_spectral, *spectral;  ///< backward
  T *spectrum, *result, *d_times;  ///< spectrum: what is expanded; backward a temporary
  const int* offsets;
};

/// Damps the sums over slots, and leaves the spectrum that is expanded. Backward d_spectral is
/// added before, and `terms` (meshes, E, W) get what d_times adds up.
template <typename T, bool kBackward>
__global__ void __launch_bounds__(32 * kSumWarps)
    finish_spectrum(SlotSums sums, DiffusionTensors<T> in, int W, float* terms) {
  wait_for_previous_kernel();
  start_next_kernel();
  sums.each([&](int64_t element, float sum) {
    const float evalue = static_cast<float>(in.evalues[element / W]);
    const float time = static_cast<float>(in.times[element % W]);
    if constexpr (kBackward) {
      sum += static_cast<float>(in.d_spectral[element]);
      terms[element] = evalue * sum * static_cast<float>(in.spectral[element]);
    }
    in.spectrum[element] = static_cast<T>(expf(-evalue * time) * sum);
  });
}

/// A pass. `tensors` says, at each launch, where inputs and outputs are. One way, or none, if there
/// are too many tiles for a launch.
template <class Kind, bool kBackward>
std::vector<Way> diffusion_ways(
    const Caller& caller, const MeshesShape& shape,
    const std::function<DiffusionTensors<typename Kind::T>()>& tensors) {
  using T = typename Kind::T;
  const Meshes meshes = shape.of(nullptr);
  const int64_t tiles = tiles_of(shape.E, shape.W);
  const int length = slot_length(shape.vertices, tiles, meshes.count);
  const int64_t slots = meshes.slots(length), spectrum_values = shape.spectrum_values();
  if (!is_a_grid(tiles * slots) ||
      !is_a_grid(ceil_div(shape.W, int64_t{kTile}) * meshes.slots(kTile))) {
    return {};
  }
  const auto partials = caller.workspace.any<float>(static_cast<size_t>(slots * shape.E * shape.W));
  const auto spectrum =
      caller.workspace.any<T>(static_cast<size_t>(kBackward ? spectrum_values : 1));
  const auto terms =
      caller.workspace.any<float>(static_cast<size_t>(kBackward ? spectrum_values : 1));
  const int64_t rows = shape.meshes * shape.E;
  const auto row_parts = static_cast<unsigned>(std::clamp<int64_t>(rows / 1024, 1, 256));
  const auto parts =
      caller.workspace.any<float>(static_cast<size_t>(kBackward ? row_parts * shape.W : 1));
  const auto launch = [=, stream = caller.stream] {
    DiffusionTensors<T> in = tensors();
    if (kBackward) in.spectrum = spectrum;
    const Meshes own = shape.of(in.offsets);
    const int E = static_cast<int>(shape.E), W = static_cast<int>(shape.W);
    launch_project<Kind>(stream,
                         {.factors = {{in.basis, in.values}},
                          .mass = kBackward ? nullptr : in.mass,
                          .meshes = own,
                          .length = length,
                          .E = E,
                          .W = W,
                          .partials = partials},
                         1);
    const SlotSums sums = {partials, own, length, shape.E * shape.W, sum_ranks(own, length)};
    launch_next(stream, finish_spectrum<T, kBackward>, sums.blocks(), 32 * kSumWarps, sums, in, W,
                terms.data());
    launch_expand<Kind>(stream,
                        {.factors = {{in.basis, in.spectrum}},
                         .to = {in.result},
                         .mass = kBackward ? in.mass : nullptr,
                         .meshes = own,
                         .depth = E,
                         .cols = W},
                        1);
    if constexpr (kBackward) {
      const unsigned columns = blocks_for(W, 32);
      launch_next(stream, add_rows<T>, dim3(columns, row_parts), 1024, terms.data(), rows, W,
                  parts.data(), in.d_times);
      if (row_parts > 1) {
        launch_next(stream, add_rows<T>, dim3(columns, 1), 1024, parts.data(), int64_t{row_parts},
                    W, static_cast<float*>(nullptr), in.d_times);
      }
    }
  };
  const double bytes = static_cast<double>(sizeof(T)) *
                       (2.0 * shape.vertex_values() + 2.0 * shape.vertices * shape.E);
  return {{"for any meshes: slots of " + std::to_string(length) + " vertices",
           3 * kFirstLaunch + bytes / (0.5 * memory_rate()), launch, 0}};
}

}  // namespace operators::meshes
