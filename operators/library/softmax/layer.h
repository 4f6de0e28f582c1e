// What the functions of a layer softmax(x w) have in common: their description, fk_softmax.
#pragma once

#include "operators/library/call.h"
#include "operators/softmax/softmax.h"

namespace operators::library {

/// The most of each size: of the layer alone; and where rows and classes are in other places of
/// further products, too.
struct MostOfLayer {
  int64_t rows, inputs, classes;
};
inline constexpr MostOfLayer kMostSoftmax = {1 << 30, 1 << 30, softmax::kMostClasses};
inline constexpr MostOfLayer kMostLayerGradients = {1 << 24, 1 << 26, 1 << 24};

/// Refuses a description that no GPU can compute.
inline void check_layer(const fk_softmax& of, const MostOfLayer& most) {
  check_type("softmax", of.type, {FK_FLOAT32});
  check_sizes({{"rows", of.rows, most.rows},
               {"inputs", of.inputs, most.inputs},
               {"classes", of.classes, most.classes}});
}

/// An operand of rows of fp32.
inline Argument argument(const char* name, int64_t rows, int64_t cols, bool written = false) {
  return {name, static_cast<size_t>(rows * cols) * sizeof(float), written};
}

}  // namespace operators::library
