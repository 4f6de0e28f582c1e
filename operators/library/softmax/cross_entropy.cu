// The cross-entropy of operators/cross_entropy, as the library exports it.

#include "operators/cross_entropy/gradients.cuh"
#include "operators/cross_entropy/losses.cuh"
#include "operators/library/call.h"
#include "operators/library/products.h"
#include "operators/library/softmax/layer.h"

namespace {

using namespace operators::library;
using namespace operators::cross_entropy;

/// A call's arguments are x, w, labels, losses, logits, log_sums.
Operator losses(const fk_softmax& of) {
  return [=](const operators::Workspace& workspace, const Operands& at) {
    const int64_t B = of.rows, D = of.inputs, C = of.classes;
    const CrossEntropy memory = {at.memory<int64_t>(2, B), at.memory<float>(3, B),
                                 at.memory<float>(4, B * C), at.memory<float>(5, B)};
    const auto product =
        fp32_logits_way(workspace, at.memory<float>(0, B * D), at.memory<float>(1, D * C),
                        memory.logits, {B, D, C}, true);
    if (product.empty()) return std::vector<operators::Way>();
    return cross_entropy(workspace, memory, {B, D, C}, product[0]);
  };
}

/// A call's arguments are d_losses, x, w, labels, logits, log_sums, d_x, d_w.
Operator backward(const fk_softmax& of) {
  return [=](const operators::Workspace& workspace, const Operands& at) {
    const int64_t B = of.rows, D = of.inputs, C = of.classes;
    return cross_entropy_gradients(
        workspace,
        {at.memory<float>(0, B), at.memory<float>(1, B * D), at.memory<float>(2, D * C),
         at.memory<int64_t>(3, B), at.memory<float>(4, B * C), at.memory<float>(5, B),
         at.memory<float>(6, B * D), at.memory<float>(7, D * C)},
        {B, D, C}, fp32_product_steps);
  };
}

Argument labels_of(int64_t rows) { return {"labels", static_cast<size_t>(rows) * sizeof(int64_t)}; }

Task losses_task(const fk_softmax& of) {
  check_layer(of, kMostLayerGradients);
  return {losses(of),
          {argument("x", of.rows, of.inputs), argument("w", of.inputs, of.classes),
           labels_of(of.rows), argument("losses", of.rows, 1, true),
           argument("logits", of.rows, of.classes, true), argument("log_sums", of.rows, 1, true)}};
}

Task backward_task(const fk_softmax& of) {
  check_layer(of, kMostLayerGradients);
  return {
      backward(of),
      {argument("d_losses", of.rows, 1), argument("x", of.rows, of.inputs),
       argument("w", of.inputs, of.classes), labels_of(of.rows),
       argument("logits", of.rows, of.classes), argument("log_sums", of.rows, 1),
       argument("d_x", of.rows, of.inputs, true), argument("d_w", of.inputs, of.classes, true)}};
}

}  // namespace

const Function operators::library::cross_entropy_forward =
    function_of<fk_softmax, losses_task>("softmax");
const Function operators::library::cross_entropy_backward =
    function_of<fk_softmax, backward_task>("softmax");

extern "C" int fk_cross_entropy_workspace(const fk_softmax* softmax, size_t* bytes) {
  return query(cross_entropy_forward, softmax, bytes);
}

extern "C" int fk_cross_entropy_backward_workspace(const fk_softmax* softmax, size_t* bytes) {
  return query(cross_entropy_backward, softmax, bytes);
}

extern "C" int fk_cross_entropy_forward(const fk_softmax* softmax, const void* x, const void* w,
                                        const void* labels, void* losses, void* logits,
                                        void* log_sums, void* workspace, size_t workspace_bytes,
                                        struct CUstream_st* stream) {
  return call(cross_entropy_forward, softmax, {x, w, labels, losses, logits, log_sums}, workspace,
              workspace_bytes, stream);
}

extern "C" int fk_cross_entropy_backward(const fk_softmax* softmax, const void* d_losses,
                                         const void* x, const void* w, const void* labels,
                                         const void* logits, const void* log_sums, void* d_x,
                                         void* d_w, void* workspace, size_t workspace_bytes,
                                         struct CUstream_st* stream) {
  return call(cross_entropy_backward, softmax, {d_losses, x, w, labels, logits, log_sums, d_x, d_w},
              workspace, workspace_bytes, stream);
}
