// Meshes whose vertices lie one after another in one tensor, each with as many as it has.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "primitives/launch.h"

namespace operators::meshes {

/// Mesh m has the vertices from offsets[m] to offsets[m + 1] - 1; or, without offsets, `each` of
/// them. Offsets are on the device, so that the host knows only how many vertices there are in all.
/// Whatever they are, no vertex is outside of these.
///
/// A block works on up to `length` vertices of one mesh: on those that the mesh has of a chunk. The
/// chunks are the vertices of all meshes, cut at multiples of `length`. What mesh m has of chunk c
/// is slot number c + m. No two pairs have the same number: from one to the next, in the order of
/// the vertices, either c grows by one or m does. So there are fewer slots than chunks and meshes
/// together, and a block finds its mesh by its number, however the meshes divide the vertices.
struct Meshes {
  const int* offsets;
  int count, vertices, each;

  __host__ __device__ int64_t slots(int length) const {
    return (static_cast<int64_t>(vertices) - 1) / length + count;
  }

  __device__ int begin(int mesh) const {
    if (!offsets) return mesh * each;
    return min(max(offsets[mesh], 0), vertices);
  }

  struct Slot {
    int mesh, begin, end;  ///< its vertices; none if end <= begin
  };
  /// The mesh is the last one that has no slot behind this one.
  __device__ Slot slot(int number, int length) const {
    int mesh = 0;
    for (int beyond = count; beyond - mesh > 1;) {
      const int middle = mesh + (beyond - mesh) / 2;
      (begin(middle) / length + middle <= number ? mesh : beyond) = middle;
    }
    const int64_t chunk = static_cast<int64_t>(number - mesh) * length;
    const int64_t from = max(static_cast<int64_t>(begin(mesh)), chunk);
    const int64_t to = min(static_cast<int64_t>(begin(mesh + 1)), chunk + length);
    return {mesh, static_cast<int>(from), static_cast<int>(max(from, to))};
  }

  struct Slots {
    int first, count;
  };
  /// Those of a mesh.
  __device__ Slots slots_of(int mesh, int length) const {
    const int from = begin(mesh), to = begin(mesh + 1);
    const int first = from / length;
    return {first + mesh, to > from ? (to - 1) / length - first + 1 : 0};
  }
};

}  // namespace operators::meshes
