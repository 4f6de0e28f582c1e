// softmax(x W) of operators/softmax, as the library exports it, and its logits alone.

#include <algorithm>

#include "operators/library/call.h"
#include "operators/library/products.h"
#include "operators/library/softmax/layer.h"
#include "operators/softmax/backward.cuh"
#include "operators/softmax/softmax_product.cuh"

namespace {

using namespace operators::library;
using namespace operators::softmax;
using operators::Way;

/// The layer with the call's arguments x, w and probs, of a description that has been checked. Of
/// few rows or columns the CUDA cores are as fast as memory; else tensor cores multiply, where the
/// device has Hopper's.
Operator layer(const fk_softmax& of) {
  return [=](const operators::Workspace& workspace, const Operands& operands) {
    const SoftmaxShape shape{of.rows, of.inputs, of.classes};
    const SoftmaxProduct product(workspace, operands.memory<float>(0, of.rows * of.inputs),
                                 operands.memory<float>(1, of.inputs * of.classes),
                                 operands.memory<float>(2, of.rows * of.classes), shape);
    const bool few = of.rows <= kMostFewRows || of.classes <= kFewColumns;
    SoftmaxProduct::Ways ways = product.ways(few || !is_hopper() ? Math::fp32 : Math::split);
    ways.fused.insert(ways.fused.end(), ways.unfused.begin(), ways.unfused.end());
    return ways.fused;
  };
}

/// A call's arguments are d_probs, x, w, probs, d_x, d_w.
Operator backward(const fk_softmax& of) {
  return [=](const operators::Workspace& workspace, const Operands& at) {
    const int64_t x = of.rows * of.inputs, w = of.inputs * of.classes, probs = of.rows * of.classes;
    return softmax_gradients(
        workspace,
        {at.memory<float>(0, probs), at.memory<float>(1, x), at.memory<float>(2, w),
         at.memory<float>(3, probs), at.memory<float>(4, x), at.memory<float>(5, w)},
        {of.rows, of.inputs, of.classes}, fp32_product_steps);
  };
}

Task forward_task(const fk_softmax& of) {
  check_layer(of, kMostSoftmax);
  return {layer(of),
          {argument("x", of.rows, of.inputs), argument("w", of.inputs, of.classes),
           argument("probs", of.rows, of.classes, true)}};
}

Task backward_task(const fk_softmax& of) {
  check_layer(of, kMostLayerGradients);
  return {
      backward(of),
      {argument("d_probs", of.rows, of.classes), argument("x", of.rows, of.inputs),
       argument("w", of.inputs, of.classes), argument("probs", of.rows, of.classes),
       argument("d_x", of.rows, of.inputs, true), argument("d_w", of.inputs, of.classes, true)}};
}

}  // namespace

std::vector<LogitsWay> operators::library::fp32_logits_way(
    const Workspace& workspace, const Memory<float>& x, const Memory<float>& W,
    const Memory<float>& logits, const SoftmaxShape& shape, bool parts_wanted) {
  std::vector<LogitsWay> ways;
  if (is_hopper()) ways = split_logits_ways(workspace, x, W, logits, shape, parts_wanted);
  const product::ProductShape sizes = {static_cast<int>(shape.rows),
                                       static_cast<int>(shape.classes),
                                       static_cast<int>(shape.inputs)};
  const auto none = workspace.any<float2>(1);
  for (const Way& way : fp32_product_ways(workspace, x, W, logits, sizes)) {
    ways.push_back({way, 1, 0, logits, none});
  }
  if (ways.empty()) return {};
  return {*std::min_element(ways.begin(), ways.end(), [](const LogitsWay& a, const LogitsWay& b) {
    return a.way.microseconds < b.way.microseconds;
  })};
}

std::vector<Way> operators::library::fp32_product_steps(
    const Workspace& workspace, const Memory<float>& a, const Memory<float>& b,
    const Memory<float>& c, product::ProductShape shape, product::RowStrides) {
  const auto found =
      fp32_logits_way(workspace, a, b, c, {shape.rows, shape.depth, shape.cols}, false);
  if (found.empty()) return {};
  return whole_product(found[0], c, int64_t{shape.rows} * shape.cols, workspace.stream);
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
