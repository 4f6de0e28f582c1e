// softmax(x W) of operators/softmax, as the library exports it, and its logits alone.

#include <algorithm>
#include <type_traits>

#include "operators/library/call.h"
#include "operators/library/products.h"
#include "operators/library/softmax/layer.h"
#include "operators/softmax/backward.cuh"
#include "operators/softmax/half.cuh"
#include "operators/softmax/softmax_product.cuh"

namespace {

using namespace operators::library;
using namespace operators::softmax;
using operators::Way;

/// The layer with the call's arguments x, w and probs, of a description that has been checked. Of
/// few rows or columns the CUDA cores are as fast as memory; else tensor cores multiply, where the
/// device has Hopper's.
std::vector<Way> fp32_layer(const operators::Caller& caller, const Operands& operands,
                            const SoftmaxShape& shape) {
  const SoftmaxProduct product(caller, operands.memory<float>(0, shape.rows * shape.inputs),
                               operands.memory<float>(1, shape.inputs * shape.classes),
                               operands.memory<float>(2, shape.rows * shape.classes), shape);
  const bool few = shape.rows <= kMostFewRows || shape.classes <= kFewColumns;
  Kind ways = product.ways(few || !is_hopper() ? Math::fp32 : Math::split);
  ways.fused.insert(ways.fused.end(), ways.unfused.begin(), ways.unfused.end());
  return ways.fused;
}

/// The same in 2 bytes, with the logits in the workspace.
template <typename T>
std::vector<Way> half_layer(const operators::Caller& caller, const Operands& operands,
                            const SoftmaxShape& shape) {
  const auto logits = caller.workspace.any<float>(static_cast<size_t>(shape.rows * shape.classes));
  const auto products =
      logits_ways(caller, operands.memory<T>(0, shape.rows * shape.inputs),
                  operands.memory<T>(1, shape.inputs * shape.classes), logits, shape, false);
  return softmax_of<T>(caller, products, logits, operands.memory<T>(2, shape.rows * shape.classes),
                       shape);
}

Operator layer(const fk_softmax& of) {
  return [=](const operators::Caller& caller, const Operands& operands) {
    const SoftmaxShape shape{of.rows, of.inputs, of.classes};
    return with_type(of, [&]<typename T>() {
      if constexpr (std::is_same_v<T, float>) return fp32_layer(caller, operands, shape);
      if constexpr (sizeof(T) == 2) return half_layer<T>(caller, operands, shape);
    });
  };
}

/// A call's arguments are d_probs, x, w, probs, d_x, d_w.
Operator backward(const fk_softmax& of) {
  return [=](const operators::Caller& caller, const Operands& at) {
    const int64_t x = of.rows * of.inputs, w = of.inputs * of.classes, probs = of.rows * of.classes;
    return with_type(of, [&]<typename T>() {
      return softmax_gradients<T>(caller,
                                  {at.memory<T>(0, probs), at.memory<T>(1, x), at.memory<T>(2, w),
                                   at.memory<T>(3, probs), at.memory<T>(4, x), at.memory<T>(5, w)},
                                  {of.rows, of.inputs, of.classes}, steps_of<T>());
    });
  };
}

void check(const fk_softmax& of, const MostOfLayer& most) {
  check_layer(of, most);
  if (of.label_type == 0) return;
  throw Refusal{FK_BAD_ARGUMENT, "softmax: label_type is " + std::to_string(of.label_type) +
                                     "; it has to be 0, as there are no labels"};
}

Task forward_task(const fk_softmax& of) {
  check(of, kMostSoftmax);
  return {layer(of),
          {of_type(of, "x", of.rows, of.inputs), of_type(of, "w", of.inputs, of.classes),
           of_type(of, "probs", of.rows, of.classes, true)}};
}

Task backward_task(const fk_softmax& of) {
  check(of, kMostLayerGradients);
  return {backward(of),
          {of_type(of, "d_probs", of.rows, of.classes), of_type(of, "x", of.rows, of.inputs),
           of_type(of, "w", of.inputs, of.classes), of_type(of, "probs", of.rows, of.classes),
           of_type(of, "d_x", of.rows, of.inputs, true),
           of_type(of, "d_w", of.inputs, of.classes, true)}};
}

}  // namespace

std::vector<LogitsWay> operators::library::logits_ways(const Caller& caller, const Memory<float>& x,
                                                       const Memory<float>& W,
                                                       const Memory<float>& logits,
                                                       const SoftmaxShape& shape,
                                                       bool parts_wanted) {
  std::vector<LogitsWay> ways;
  if (is_hopper()) ways = split_logits_ways(caller, x, W, logits, shape, parts_wanted);
  const product::ProductShape sizes = {static_cast<int>(shape.rows),
                                       static_cast<int>(shape.classes),
                                       static_cast<int>(shape.inputs)};
  const auto none = caller.workspace.any<float2>(1);
  for (const Way& way : fp32_product_ways(caller, x, W, logits, sizes, {})) {
    ways.push_back({way, 1, 0, logits, none});
  }
  if (ways.empty()) return {};
  return {*common::fastest(ways)};
}

std::vector<Way> operators::library::product_steps(const Caller& caller, const Memory<float>& a,
                                                   const Memory<float>& b, const Memory<float>& c,
                                                   product::ProductShape shape,
                                                   product::RowStrides) {
  const auto found = logits_ways(caller, a, b, c, {shape.rows, shape.depth, shape.cols}, false);
  if (found.empty()) return {};
  return whole_product(found[0], c, int64_t{shape.rows} * shape.cols, caller.stream);
}

const Function operators::library::softmax_forward =
    function_of<fk_softmax, forward_task>("softmax");
const Function operators::library::softmax_backward =
    function_of<fk_softmax, backward_task>("softmax");

extern "C" int fk_softmax_workspace(const fk_softmax* softmax, size_t* bytes) {
  return query(softmax_forward, softmax, bytes);
}

extern "C" int fk_softmax_backward_workspace(const fk_softmax* softmax, size_t* bytes) {
  return query(softmax_backward, softmax, bytes);
}

extern "C" int fk_softmax_forward(const fk_softmax* softmax, const void* x, const void* w,
                                  void* probs, void* workspace, size_t workspace_bytes,
                                  struct CUstream_st* stream) {
  return call(softmax_forward, softmax, {x, w, probs}, workspace, workspace_bytes, stream);
}

extern "C" int fk_softmax_backward(const fk_softmax* softmax, const void* d_probs, const void* x,
                                   const void* w, const void* probs, void* d_x, void* d_w,
                                   void* workspace, size_t workspace_bytes,
                                   struct CUstream_st* stream) {
  return call(softmax_backward, softmax, {d_probs, x, w, probs, d_x, d_w}, workspace,
              workspace_bytes, stream);
}
