// The spatial diffusion of operators/diffusion, as the library exports it.

#include "operators/diffusion/fused.cuh"
#include "operators/diffusion/portable.cuh"
#include "operators/library/call.h"
#include "operators/library/meshes.h"

namespace {

using namespace operators::library;
using namespace operators::diffusion;
using bf16 = __nv_bfloat16;

DiffusionShape shape_of(const fk_diffusion& of) {
  return {of.vertices, of.eigen, of.width, of.meshes};
}

/// Refuses a description that no GPU, or not this one, can compute.
MeshSizes checked(const fk_diffusion& of, bool ragged) {
  return checked_meshes("diffusion", "the diffusion",
                        {of.type, of.meshes, of.vertices, of.eigen, of.width, ragged});
}

/// A call's arguments: x, basis, mass, evalues, times, spectral, out; backward d_out, d_spectral,
/// basis, mass, evalues, times, spectral, d_x, d_times.
template <Pass kPass>
DiffusionOperands operands_of(const fk_diffusion& of, const Operands& at) {
  DiffusionOperands operands = {};
  int place = 0;
  const auto next = [&](auto*& to) { to = at.at<bf16>(place++); };
  next(operands.values);
  if (kPass == Pass::backward) next(operands.d_spectral);
  next(operands.basis), next(operands.mass), next(operands.evalues), next(operands.times);
  next(operands.spectrum);
  if (kPass == Pass::backward) operands.spectral = operands.spectrum;  // not written
  next(operands.result);
  if (kPass == Pass::backward) next(operands.d_times);
  operands.V = of.vertices;
  operands.E = static_cast<int>(of.eigen);
  operands.W = static_cast<int>(of.width);
  return operands;
}

/// A pass of a description that has been checked.
template <Pass kPass>
Operator pass_of(const fk_diffusion& of, const MeshSizes& sizes) {
  return [=](const operators::Caller& caller, const Operands& at) {
    const auto operands = [=] { return operands_of<kPass>(of, at); };
    std::vector<common::Way> ways;
    const bool is_for_tiles =
        sizes.is_bfloat16_of_eights() && of.eigen <= kMostEigen && of.width <= kMostWidth;
    if (is_for_tiles && primitives::is_hopper()) {
      ways = FusedDiffusion<kPass>(caller, operands, shape_of(of)).ways();
    }
    if (is_for_tiles && ways.empty()) {
      ways = PortableDiffusion<kPass>(caller, operands, shape_of(of)).ways();
    }
    return ways.empty() ? any_diffusion(kPass, caller, at, sizes) : ways;
  };
}

template <bool kRagged>
Task forward_task(const fk_diffusion& of) {
  const MeshSizes sizes = checked(of, kRagged);
  return sizes.task(
      pass_of<Pass::forward>(of, sizes),
      {sizes.argument("x", sizes.vertex_values()),
       sizes.argument("basis", sizes.vertices * sizes.eigen),
       sizes.argument("mass", sizes.vertices),
       sizes.argument("evalues", sizes.meshes * sizes.eigen), sizes.argument("times", sizes.width),
       sizes.argument("spectral", sizes.spectrum_values(), true),
       sizes.argument("out", sizes.vertex_values(), true)});
}

template <bool kRagged>
Task backward_task(const fk_diffusion& of) {
  const MeshSizes sizes = checked(of, kRagged);
  return sizes.task(
      pass_of<Pass::backward>(of, sizes),
      {sizes.argument("d_out", sizes.vertex_values()),
       sizes.argument("d_spectral", sizes.spectrum_values()),
       sizes.argument("basis", sizes.vertices * sizes.eigen),
       sizes.argument("mass", sizes.vertices),
       sizes.argument("evalues", sizes.meshes * sizes.eigen), sizes.argument("times", sizes.width),
       sizes.argument("spectral", sizes.spectrum_values()),
       sizes.argument("d_x", sizes.vertex_values(), true),
       sizes.argument("d_times", sizes.width, true)});
}

}  // namespace

const Function operators::library::diffusion_forward =
    function_of<fk_diffusion, forward_task<false>>("diffusion");
const Function operators::library::diffusion_backward =
    function_of<fk_diffusion, backward_task<false>>("diffusion");
const Function operators::library::diffusion_ragged_forward =
    function_of<fk_diffusion, forward_task<true>>("diffusion");
const Function operators::library::diffusion_ragged_backward =
    function_of<fk_diffusion, backward_task<true>>("diffusion");

extern "C" int fk_diffusion_workspace(const fk_diffusion* diffusion, size_t* bytes) {
  return query(diffusion_forward, diffusion, bytes);
}

extern "C" int fk_diffusion_backward_workspace(const fk_diffusion* diffusion, size_t* bytes) {
  return query(diffusion_backward, diffusion, bytes);
}

extern "C" int fk_diffusion_forward(const fk_diffusion* diffusion, const void* x, const void* basis,
                                    const void* mass, const void* evalues, const void* times,
                                    void* spectral, void* out, void* workspace,
                                    size_t workspace_bytes, struct CUstream_st* stream) {
  return call(diffusion_forward, diffusion, {x, basis, mass, evalues, times, spectral, out},
              workspace, workspace_bytes, stream);
}

extern "C" int fk_diffusion_backward(const fk_diffusion* diffusion, const void* d_out,
                                     const void* d_spectral, const void* basis, const void* mass,
                                     const void* evalues, const void* times, const void* spectral,
                                     void* d_x, void* d_times, void* workspace,
                                     size_t workspace_bytes, struct CUstream_st* stream) {
  return call(diffusion_backward, diffusion,
              {d_out, d_spectral, basis, mass, evalues, times, spectral, d_x, d_times}, workspace,
              workspace_bytes, stream);
}

extern "C" int fk_diffusion_ragged_workspace(const fk_diffusion* diffusion, size_t* bytes) {
  return query(diffusion_ragged_forward, diffusion, bytes);
}

extern "C" int fk_diffusion_ragged_backward_workspace(const fk_diffusion* diffusion,
                                                      size_t* bytes) {
  return query(diffusion_ragged_backward, diffusion, bytes);
}

extern "C" int fk_diffusion_ragged_forward(const fk_diffusion* diffusion, const void* x,
                                           const void* basis, const void* mass, const void* evalues,
                                           const void* times, const void* offsets, void* spectral,
                                           void* out, void* workspace, size_t workspace_bytes,
                                           struct CUstream_st* stream) {
  return call(diffusion_ragged_forward, diffusion,
              {x, basis, mass, evalues, times, offsets, spectral, out}, workspace, workspace_bytes,
              stream);
}

extern "C" int fk_diffusion_ragged_backward(const fk_diffusion* diffusion, const void* d_out,
                                            const void* d_spectral, const void* basis,
                                            const void* mass, const void* evalues,
                                            const void* times, const void* spectral,
                                            const void* offsets, void* d_x, void* d_times,
                                            void* workspace, size_t workspace_bytes,
                                            struct CUstream_st* stream) {
  return call(diffusion_ragged_backward, diffusion,
              {d_out, d_spectral, basis, mass, evalues, times, spectral, offsets, d_x, d_times},
              workspace, workspace_bytes, stream);
}
