// The diffusion and the gradient features for any meshes, of meshes.cu: in every type, of any size.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "operators/library/call.h"
#include "operators/operands.h"

namespace operators::library {

/// The sizes of a description, and whether there are offsets. `vertices`: of all meshes.
struct MeshSizes {
  int type;
  int64_t meshes, vertices, eigen, width;
  bool ragged;

  int64_t vertex_values() const { return vertices * width; }
  int64_t spectrum_values() const { return meshes * eigen * width; }
  bool is_bfloat16_of_eights() const {
    return type == FK_BFLOAT16 && !ragged && eigen % 8 == 0 && width % 8 == 0;
  }

  /// An operand in the description's type, and the offsets.
  Argument argument(const char* name, int64_t count, bool written = false) const {
    const size_t bytes = type == FK_FLOAT16 || type == FK_BFLOAT16 ? 2 : 4;
    return {name, static_cast<size_t>(count) * bytes, written};
  }
  /// The offsets, if there are any, stand between what is read and what is written.
  Task task(Operator make, std::vector<Argument> arguments) const {
    if (ragged) {
      const auto place = std::find_if(arguments.begin(), arguments.end(),
                                      [](const Argument& each) { return each.written; });
      arguments.insert(place, {"offsets", static_cast<size_t>(meshes + 1) * sizeof(int32_t)});
    }
    return {std::move(make), std::move(arguments)};
  }
};

/// Refuses sizes that no GPU, or not this one, can compute. `vertices`: of each mesh, or, if they
/// are ragged, of all. name: of the description; words: of the operator.
inline MeshSizes checked_meshes(const char* name, const char* words, MeshSizes of) {
  constexpr int64_t kMost = 1 << 30, kMostMeshes = 65535, kMostWidth = 1 << 15;
  check_type(name, of.type, {FK_FLOAT16, FK_BFLOAT16, FK_FLOAT32, FK_TF32, FK_TF32X3});
  check_sizes({{"meshes", of.meshes, kMostMeshes},
               {"vertices", of.vertices, kMost},
               {"eigen", of.eigen, kMostWidth},
               {"width", of.width, kMostWidth}});
  if (!of.ragged) of.vertices *= of.meshes;
  if (of.vertices > kMost) throw Refusal{FK_BAD_SHAPE, "meshes * vertices is more than 2^30"};
  if (of.meshes * of.eigen > kMost) {
    throw Refusal{FK_BAD_SHAPE, "meshes * eigen is more than 2^30"};
  }
  if (of.type != FK_FLOAT32) check_capability(words, 80);
  return of;
}

/// The ways to compute a pass for operands in the order of the function's arguments.
std::vector<Way> any_diffusion(Pass pass, const Caller& caller, const Operands& at,
                               const MeshSizes& sizes);
std::vector<Way> any_features(Pass pass, const Caller& caller, const Operands& at,
                              const MeshSizes& sizes);

}  // namespace operators::library
