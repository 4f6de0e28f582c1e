// The spatial diffusion of operators/diffusion, as the library exports it.

#include "operators/diffusion/fused.cuh"
#include "operators/diffusion/portable.cuh"
#include "operators/library/call.h"

namespace {

using namespace operators::library;
using namespace operators::diffusion;
using bf16 = __nv_bfloat16;

constexpr int64_t kMost = 1 << 30, kMostMeshes = 65535;

DiffusionShape shape_of(const fk_diffusion& of) {
  return {of.vertices, of.eigen, of.width, of.meshes};
}

/// Refuses a description that no GPU, or not this one, can compute.
void check(const fk_diffusion& of) {
  check_type("diffusion", of.type, {FK_BFLOAT16});
  check_sizes({{"meshes", of.meshes, kMostMeshes},
               {"vertices", of.vertices, kMost},
               {"eigen", of.eigen, kMostEigen},
               {"width", of.width, kMostWidth}});
  check_multiple("eigen", of.eigen, 8);
  check_multiple("width", of.width, 8);
  if (of.meshes * of.vertices > kMost) {
    throw Refusal{FK_BAD_SHAPE, "meshes * vertices is more than 2^30"};
  }
  check_capability("the diffusion", 80);
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
Operator pass_of(const fk_diffusion& of) {
  return [=](const operators::Caller& caller, const Operands& at) {
    const auto operands = [=] { return operands_of<kPass>(of, at); };
    if (primitives::is_hopper()) {
      auto ways = FusedDiffusion<kPass>(caller, operands, shape_of(of)).ways();
      if (!ways.empty()) return ways;
    }
    return PortableDiffusion<kPass>(caller, operands, shape_of(of)).ways();
  };
}

Argument argument(const char* name, int64_t count, bool written = false) {
  return {name, static_cast<size_t>(count) * sizeof(bf16), written};
}

Task forward_task(const fk_diffusion& of) {
  check(of);
  const auto shape = shape_of(of);
  return {pass_of<Pass::forward>(of),
          {argument("x", shape.vertex_values()), argument("basis", shape.vertices() * shape.E),
           argument("mass", shape.vertices()), argument("evalues", shape.meshes * shape.E),
           argument("times", shape.W), argument("spectral", shape.spectrum_values(), true),
           argument("out", shape.vertex_values(), true)}};
}

Task backward_task(const fk_diffusion& of) {
  check(of);
  const auto shape = shape_of(of);
  return {
      pass_of<Pass::backward>(of),
      {argument("d_out", shape.vertex_values()), argument("d_spectral", shape.spectrum_values()),
       argument("basis", shape.vertices() * shape.E), argument("mass", shape.vertices()),
       argument("evalues", shape.meshes * shape.E), argument("times", shape.W),
       argument("spectral", shape.spectrum_values()), argument("d_x", shape.vertex_values(), true),
       argument("d_times", shape.W, true)}};
}

}  // namespace

const Function operators::library::diffusion_forward =
    function_of<fk_diffusion, forward_task>("diffusion");
const Function operators::library::diffusion_backward =
    function_of<fk_diffusion, backward_task>("diffusion");

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
