// The cross-entropy of operators/cross_entropy, as the library exports it.

#include "operators/cross_entropy/gradients.cuh"
#include "operators/cross_entropy/losses.cuh"
#include "operators/library/call.h"
#include "operators/library/products.h"
#include "operators/library/softmax/layer.h"

namespace {

using namespace operators::library;
using namespace operators::cross_entropy;

LabelMemory labels_at(const fk_softmax& of, const Operands& at, int place) {
  return {at.memory<char>(place, 0), of.label_type == FK_LABEL_INT32};
}

/// A call's arguments are x, w, labels, losses, logits, log_sums.
Operator losses(const fk_softmax& of) {
  return [=](const operators::Caller& caller, const Operands& at) {
    const int64_t B = of.rows, D = of.inputs, C = of.classes;
    const CrossEntropy memory = {labels_at(of, at, 2), at.memory<float>(3, B),
                                 at.memory<float>(4, B * C), at.memory<float>(5, B)};
    return with_type(of, [&]<typename T>() {
      std::vector<operators::Way> ways;
      for (const auto& product : logits_ways(caller, at.memory<T>(0, B * D), at.memory<T>(1, D * C),
                                             memory.logits, {B, D, C}, true)) {
        ways.push_back(cross_entropy(caller, memory, {B, D, C}, product));
      }
      return ways;
    });
  };
}

/// A call's arguments are d_losses, x, w, labels, logits, log_sums, d_x, d_w.
Operator backward(const fk_softmax& of) {
  return [=](const operators::Caller& caller, const Operands& at) {
    const int64_t B = of.rows, D = of.inputs, C = of.classes;
    return with_type(of, [&]<typename T>() {
      return cross_entropy_gradients<T>(
          caller,
          {at.memory<float>(0, B), at.memory<T>(1, B * D), at.memory<T>(2, D * C),
           labels_at(of, at, 3), at.memory<float>(4, B * C), at.memory<float>(5, B),
           at.memory<T>(6, B * D), at.memory<T>(7, D * C)},
          {B, D, C}, steps_of<T>());
    });
  };
}

void check(const fk_softmax& of) {
  check_layer(of, kMostLayerGradients);
  if (of.label_type == FK_LABEL_INT64 || of.label_type == FK_LABEL_INT32) return;
  throw Refusal{FK_BAD_ARGUMENT, "softmax: label_type is " + std::to_string(of.label_type) +
                                     "; it has to be FK_LABEL_INT64 or FK_LABEL_INT32"};
}

Argument labels_of(const fk_softmax& of) {
  const size_t each = of.label_type == FK_LABEL_INT32 ? sizeof(int32_t) : sizeof(int64_t);
  return {"labels", static_cast<size_t>(of.rows) * each};
}

Task losses_task(const fk_softmax& of) {
  check(of);
  return {losses(of),
          {of_type(of, "x", of.rows, of.inputs), of_type(of, "w", of.inputs, of.classes),
           labels_of(of), of_fp32("losses", of.rows, 1, true),
           of_fp32("logits", of.rows, of.classes, true), of_fp32("log_sums", of.rows, 1, true)}};
}

Task backward_task(const fk_softmax& of) {
  check(of);
  return {backward(of),
          {of_fp32("d_losses", of.rows, 1), of_type(of, "x", of.rows, of.inputs),
           of_type(of, "w", of.inputs, of.classes), labels_of(of),
           of_fp32("logits", of.rows, of.classes), of_fp32("log_sums", of.rows, 1),
           of_type(of, "d_x", of.rows, of.inputs, true),
           of_type(of, "d_w", of.inputs, of.classes, true)}};
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
