// What the functions of a layer softmax(x w) have in common: their description, fk_softmax.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "operators/library/call.h"
#include "operators/library/products.h"
#include "operators/softmax/layer_gradients.cuh"

namespace operators::library {

/// The most of each size: of the layer alone; and where rows and classes are in other places of
/// further products, too.
struct MostOfLayer {
  int64_t rows, inputs, classes;
};
inline constexpr MostOfLayer kMostSoftmax = {1 << 30, 1 << 30, softmax::kMostClasses};
inline constexpr MostOfLayer kMostLayerGradients = {1 << 24, 1 << 26, 1 << 24};

/// Refuses a description that no GPU, or not this one, can compute.
inline void check_layer(const fk_softmax& of, const MostOfLayer& most) {
  check_type("softmax", of.type, {FK_FLOAT16, FK_BFLOAT16, FK_FLOAT32});
  check_sizes({{"rows", of.rows, most.rows},
               {"inputs", of.inputs, most.inputs},
               {"classes", of.classes, most.classes}});
  if (of.type != FK_FLOAT32) check_capability("softmax in fp16 or bf16", 80);
}

/// visit.operator()<T>(), where T is the type of the layer's elements.
template <typename Visit>
auto with_type(const fk_softmax& of, Visit visit) {
  if (of.type == FK_FLOAT16) return visit.template operator()<half>();
  if (of.type == FK_BFLOAT16) return visit.template operator()<__nv_bfloat16>();
  return visit.template operator()<float>();
}

/// product_steps() of T.
template <typename T>
softmax::ProductSteps<T> steps_of() {
  return [](const auto&... arguments) { return product_steps(arguments...); };
}

/// An operand of rows of the layer's type, or of fp32.
inline Argument of_type(const fk_softmax& of, const char* name, int64_t rows, int64_t cols,
                        bool written = false) {
  const size_t element = of.type == FK_FLOAT32 ? sizeof(float) : sizeof(half);
  return {name, static_cast<size_t>(rows * cols) * element, written};
}
inline Argument of_fp32(const char* name, int64_t rows, int64_t cols, bool written = false) {
  return {name, static_cast<size_t>(rows * cols) * sizeof(float), written};
}

}  // namespace operators::library
