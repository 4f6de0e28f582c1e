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
void check(const fk_gradients* of) {
  check_description("gradients", of, sizeof *of);
  check_type("gradients", of->type, {FK_BFLOAT16});
  check_sizes({{"vertices", of->vertices, kMost},
               {"eigen", of->eigen, kMostEigen},
               {"width", of->width, kMostWidth}});
  check_multiple("eigen", of->eigen, 8);
  check_multiple("width", of->width, 8);
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
  return [=](const operators::Workspace& workspace, const Operands& at) {
    const auto operands = [=] { return operands_of<kPass>(of, at); };
    if (primitives::is_hopper()) {
      auto ways = GradientFeatures<kPass>(workspace, operands, shape_of(of)).ways();
      if (!ways.empty()) return ways;
    }
    return PortableFeatures<kPass>(workspace, operands, shape_of(of)).ways();
  };
}

template <Pass kPass>
int query(const fk_gradients* gradients, size_t* bytes) {
  return guarded([=] {
    check(gradients);
    if (!bytes) throw Refusal{FK_BAD_ARGUMENT, "bytes is NULL"};
    *bytes = workspace_bytes(pass_of<kPass>(*gradients));
  });
}

Argument argument(const char* name, const void* data, int64_t count, bool written = false) {
  return {name, data, static_cast<size_t>(count) * sizeof(bf16), 16, written};
}

}  // namespace

extern "C" int fk_gradients_workspace(const fk_gradients* gradients, size_t* bytes) {
  return query<Pass::forward>(gradients, bytes);
}

extern "C" int fk_gradients_backward_workspace(const fk_gradients* gradients, size_t* bytes) {
  return query<Pass::backward>(gradients, bytes);
}

extern "C" int fk_gradients_forward(const fk_gradients* gradients, const void* x, const void* gr,
                                    const void* gi, const void* lr, const void* li, void* out,
                                    void* workspace, size_t workspace_bytes,
                                    struct CUstream_st* stream) {
  return guarded([&] {
    Plan& plan = plan_of("gradients", gradients, check, pass_of<Pass::forward>, stream);
    const GradientsShape shape = shape_of(*gradients);
    const Argument arguments[] = {
        argument("x", x, shape.coefficients()),
        argument("gr", gr, shape.tangent_values()),
        argument("gi", gi, shape.tangent_values()),
        argument("lr", lr, shape.weights()),
        argument("li", li, shape.weights()),
        argument("out", out, shape.vertex_values(), true),
    };
    launch(plan, arguments, workspace, workspace_bytes);
  });
}

extern "C" int fk_gradients_backward(const fk_gradients* gradients, const void* d_out,
                                     const void* x, const void* gr, const void* gi, const void* lr,
                                     const void* li, void* d_x, void* d_lr, void* d_li,
                                     void* workspace, size_t workspace_bytes,
                                     struct CUstream_st* stream) {
  return guarded([&] {
    Plan& plan = plan_of("gradients", gradients, check, pass_of<Pass::backward>, stream, 1);
    const GradientsShape shape = shape_of(*gradients);
    const Argument arguments[] = {
        argument("d_out", d_out, shape.vertex_values()),
        argument("x", x, shape.coefficients()),
        argument("gr", gr, shape.tangent_values()),
        argument("gi", gi, shape.tangent_values()),
        argument("lr", lr, shape.weights()),
        argument("li", li, shape.weights()),
        argument("d_x", d_x, shape.coefficients(), true),
        argument("d_lr", d_lr, shape.weights(), true),
        argument("d_li", d_li, shape.weights(), true),
    };
    launch(plan, arguments, workspace, workspace_bytes);
  });
}
