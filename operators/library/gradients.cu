// The gradient features of operators/gradients, as the library exports them.

#include "operators/gradients/features.cuh"
#include "operators/gradients/portable.cuh"
#include "operators/library/call.h"

namespace {

using namespace operators::library;
using namespace operators::gradients;

constexpr int64_t kMost = 1 << 30, kMostWidth = 1 << 15;

GradientsShape shape_of(const fk_gradients& of) { return {of.vertices, of.eigen, of.width}; }

/// Refuses a description that no GPU, or not this one, can compute.
void check(const fk_gradients& of) {
  check_type("gradients", of.type, {FK_BFLOAT16});
  check_sizes({{"vertices", of.vertices, kMost},
               {"eigen", of.eigen, kMostEigen},
               {"width", of.width, kMostWidth}});
  check_multiple("eigen", of.eigen, 8);
  check_multiple("width", of.width, 8);
  check_capability("the gradient features", 80);
}

/// A call's arguments: x, gr, gi, lr, li, out; backward d_out, x, gr, gi, lr, li, d_x, d_lr, d_li.
template <Pass kPass>
GradientsOperands operands_of(const fk_gradients& of, const Operands& at) {
  GradientsOperands operands = {};
  int place = 0;
  const auto next = [&](auto*& to) { to = at.at<bf16>(place++); };
  if (kPass == Pass::backward) next(operands.d_out);
  next(operands.x), next(operands.Gr), next(operands.Gi), next(operands.Lr), next(operands.Li);
  if (kPass == Pass::forward) next(operands.out);
  if (kPass == Pass::backward) next(operands.d_x), next(operands.d_Lr), next(operands.d_Li);
  operands.V = of.vertices;
  operands.E = static_cast<int>(of.eigen);
  operands.W = static_cast<int>(of.width);
  return operands;
}

/// A pass of a description that has been checked.
template <Pass kPass>
Operator pass_of(const fk_gradients& of) {
  return [=](const operators::Caller& caller, const Operands& at) {
    const auto operands = [=] { return operands_of<kPass>(of, at); };
    if (primitives::is_hopper()) {
      auto ways = GradientFeatures<kPass>(caller, operands, shape_of(of)).ways();
      if (!ways.empty()) return ways;
    }
    return PortableFeatures<kPass>(caller, operands, shape_of(of)).ways();
  };
}

Argument argument(const char* name, int64_t count, bool written = false) {
  return {name, static_cast<size_t>(count) * sizeof(bf16), written};
}

Task forward_task(const fk_gradients& of) {
  check(of);
  const auto shape = shape_of(of);
  return {pass_of<Pass::forward>(of),
          {argument("x", shape.coefficients()), argument("gr", shape.tangent_values()),
           argument("gi", shape.tangent_values()), argument("lr", shape.weights()),
           argument("li", shape.weights()), argument("out", shape.vertex_values(), true)}};
}

Task backward_task(const fk_gradients& of) {
  check(of);
  const auto shape = shape_of(of);
  return {pass_of<Pass::backward>(of),
          {argument("d_out", shape.vertex_values()), argument("x", shape.coefficients()),
           argument("gr", shape.tangent_values()), argument("gi", shape.tangent_values()),
           argument("lr", shape.weights()), argument("li", shape.weights()),
           argument("d_x", shape.coefficients(), true), argument("d_lr", shape.weights(), true),
           argument("d_li", shape.weights(), true)}};
}

}  // namespace

const Function operators::library::gradients_forward =
    function_of<fk_gradients, forward_task>("gradients");
const Function operators::library::gradients_backward =
    function_of<fk_gradients, backward_task>("gradients");

extern "C" int fk_gradients_workspace(const fk_gradients* gradients, size_t* bytes) {
  return query(gradients_forward, gradients, bytes);
}

extern "C" int fk_gradients_backward_workspace(const fk_gradients* gradients, size_t* bytes) {
  return query(gradients_backward, gradients, bytes);
}

extern "C" int fk_gradients_forward(const fk_gradients* gradients, const void* x, const void* gr,
                                    const void* gi, const void* lr, const void* li, void* out,
                                    void* workspace, size_t workspace_bytes,
                                    struct CUstream_st* stream) {
  return call(gradients_forward, gradients, {x, gr, gi, lr, li, out}, workspace, workspace_bytes,
              stream);
}

extern "C" int fk_gradients_backward(const fk_gradients* gradients, const void* d_out,
                                     const void* x, const void* gr, const void* gi, const void* lr,
                                     const void* li, void* d_x, void* d_lr, void* d_li,
                                     void* workspace, size_t workspace_bytes,
                                     struct CUstream_st* stream) {
  return call(gradients_backward, gradients, {d_out, x, gr, gi, lr, li, d_x, d_lr, d_li}, workspace,
              workspace_bytes, stream);
}
