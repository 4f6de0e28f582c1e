// The gradient features of operators/gradients, as the library exports them.

#include "operators/gradients/features.cuh"
#include "operators/gradients/portable.cuh"
#include "operators/library/call.h"
#include "operators/library/meshes.h"

namespace {

using namespace operators::library;
using namespace operators::gradients;

GradientsShape shape_of(const fk_gradients& of) { return {of.vertices, of.eigen, of.width}; }

/// Refuses a description that no GPU, or not this one, can compute. 0 meshes are one, as callers
/// that know of none mean it.
MeshSizes checked(const fk_gradients& of, bool ragged) {
  const int64_t meshes = of.meshes == 0 ? 1 : of.meshes;
  return checked_meshes("gradients", "the gradient features",
                        {of.type, meshes, of.vertices, of.eigen, of.width, ragged});
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
Operator pass_of(const fk_gradients& of, const MeshSizes& sizes) {
  return [=](const operators::Caller& caller, const Operands& at) {
    const auto operands = [=] { return operands_of<kPass>(of, at); };
    std::vector<common::Way> ways;
    const bool is_for_tiles =
        sizes.is_bfloat16_of_eights() && sizes.meshes == 1 && of.eigen <= kMostEigen;
    if (is_for_tiles && primitives::is_hopper()) {
      ways = GradientFeatures<kPass>(caller, operands, shape_of(of)).ways();
    }
    if (is_for_tiles && ways.empty()) {
      ways = PortableFeatures<kPass>(caller, operands, shape_of(of)).ways();
    }
    return ways.empty() ? any_features(kPass, caller, at, sizes) : ways;
  };
}

template <bool kRagged>
Task forward_task(const fk_gradients& of) {
  const MeshSizes sizes = checked(of, kRagged);
  const int64_t tangents = sizes.vertices * sizes.eigen, weights = sizes.width * sizes.width;
  return sizes.task(
      pass_of<Pass::forward>(of, sizes),
      {sizes.argument("x", sizes.spectrum_values()), sizes.argument("gr", tangents),
       sizes.argument("gi", tangents), sizes.argument("lr", weights), sizes.argument("li", weights),
       sizes.argument("out", sizes.vertex_values(), true)});
}

template <bool kRagged>
Task backward_task(const fk_gradients& of) {
  const MeshSizes sizes = checked(of, kRagged);
  const int64_t tangents = sizes.vertices * sizes.eigen, weights = sizes.width * sizes.width;
  return sizes.task(
      pass_of<Pass::backward>(of, sizes),
      {sizes.argument("d_out", sizes.vertex_values()), sizes.argument("x", sizes.spectrum_values()),
       sizes.argument("gr", tangents), sizes.argument("gi", tangents),
       sizes.argument("lr", weights), sizes.argument("li", weights),
       sizes.argument("d_x", sizes.spectrum_values(), true), sizes.argument("d_lr", weights, true),
       sizes.argument("d_li", weights, true)});
}

}  // namespace

const Function operators::library::gradients_forward =
    function_of<fk_gradients, forward_task<false>>("gradients");
const Function operators::library::gradients_backward =
    function_of<fk_gradients, backward_task<false>>("gradients");
const Function operators::library::gradients_ragged_forward =
    function_of<fk_gradients, forward_task<true>>("gradients");
const Function operators::library::gradients_ragged_backward =
    function_of<fk_gradients, backward_task<true>>("gradients");

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

extern "C" int fk_gradients_ragged_workspace(const fk_gradients* gradients, size_t* bytes) {
  return query(gradients_ragged_forward, gradients, bytes);
}

extern "C" int fk_gradients_ragged_backward_workspace(const fk_gradients* gradients,
                                                      size_t* bytes) {
  return query(gradients_ragged_backward, gradients, bytes);
}

extern "C" int fk_gradients_ragged_forward(const fk_gradients* gradients, const void* x,
                                           const void* gr, const void* gi, const void* lr,
                                           const void* li, const void* offsets, void* out,
                                           void* workspace, size_t workspace_bytes,
                                           struct CUstream_st* stream) {
  return call(gradients_ragged_forward, gradients, {x, gr, gi, lr, li, offsets, out}, workspace,
              workspace_bytes, stream);
}

extern "C" int fk_gradients_ragged_backward(const fk_gradients* gradients, const void* d_out,
                                            const void* x, const void* gr, const void* gi,
                                            const void* lr, const void* li, const void* offsets,
                                            void* d_x, void* d_lr, void* d_li, void* workspace,
                                            size_t workspace_bytes, struct CUstream_st* stream) {
  return call(gradients_ragged_backward, gradients,
              {d_out, x, gr, gi, lr, li, offsets, d_x, d_lr, d_li}, workspace, workspace_bytes,
              stream);
}
