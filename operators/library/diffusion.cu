// The spatial diffusion of operators/diffusion, as the library exports it.

#include "operators/diffusion/fused.cuh"
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
void check(const fk_diffusion* of) {
  check_description("diffusion", of, sizeof *of);
  check_type("diffusion", of->type, {FK_BFLOAT16});
  check_sizes({{"meshes", of->meshes, kMostMeshes},
               {"vertices", of->vertices, kMost},
               {"eigen", of->eigen, kMostEigen},
               {"width", of->width, kMostWidth}});
  check_multiple("eigen", of->eigen, 8);
  check_multiple("width", of->width, 8);
  if (of->meshes * of->vertices > kMost) {
    throw Refusal{FK_BAD_SHAPE, "meshes * vertices is more than 2^30"};
  }
  check_hopper("the diffusion");
}

/// What both passes read.
DiffusionOperands operands_of(const fk_diffusion& of, const void* values, const void* basis,
                              const void* mass, const void* evalues, const void* times) {
  DiffusionOperands operands = {};
  operands.values = static_cast<const bf16*>(values);
  operands.basis = static_cast<const bf16*>(basis);
  operands.mass = static_cast<const bf16*>(mass);
  operands.evalues = static_cast<const bf16*>(evalues);
  operands.times = static_cast<const bf16*>(times);
  operands.V = of.vertices;
  operands.E = static_cast<int>(of.eigen);
  operands.W = static_cast<int>(of.width);
  return operands;
}

/// A pass with its operands, those of a description that has been checked.
template <Pass kPass>
Operator pass_of(const fk_diffusion& of, const DiffusionOperands& operands) {
  return [=](const operators::Workspace& workspace) {
    return FusedDiffusion<kPass>(
               workspace, [=] { return operands; }, shape_of(of))
        .ways();
  };
}

template <Pass kPass>
int query(const fk_diffusion* diffusion, size_t* bytes) {
  return guarded([=] {
    check(diffusion);
    if (!bytes) throw Refusal{FK_BAD_ARGUMENT, "bytes is NULL"};
    *bytes = workspace_bytes(pass_of<kPass>(*diffusion, {}));
  });
}

Argument argument(const char* name, const void* data, int64_t count, bool written = false) {
  return {name, data, static_cast<size_t>(count) * sizeof(bf16), 16, written};
}

}  // namespace

extern "C" int fk_diffusion_workspace(const fk_diffusion* diffusion, size_t* bytes) {
  return query<Pass::forward>(diffusion, bytes);
}

extern "C" int fk_diffusion_backward_workspace(const fk_diffusion* diffusion, size_t* bytes) {
  return query<Pass::backward>(diffusion, bytes);
}

extern "C" int fk_diffusion_forward(const fk_diffusion* diffusion, const void* x, const void* basis,
                                    const void* mass, const void* evalues, const void* times,
                                    void* spectral, void* out, void* workspace,
                                    size_t workspace_bytes, struct CUstream_st* stream) {
  return guarded([=] {
    check(diffusion);
    const DiffusionShape shape = shape_of(*diffusion);
    DiffusionOperands operands = operands_of(*diffusion, x, basis, mass, evalues, times);
    operands.spectrum = static_cast<bf16*>(spectral);
    operands.result = static_cast<bf16*>(out);
    launch(pass_of<Pass::forward>(*diffusion, operands),
           {argument("x", x, shape.vertex_values()),
            argument("basis", basis, shape.vertices() * shape.E),
            argument("mass", mass, shape.vertices()),
            argument("evalues", evalues, shape.meshes * shape.E), argument("times", times, shape.W),
            argument("spectral", spectral, shape.spectrum_values(), true),
            argument("out", out, shape.vertex_values(), true)},
           workspace, workspace_bytes, stream);
  });
}

extern "C" int fk_diffusion_backward(const fk_diffusion* diffusion, const void* d_out,
                                     const void* d_spectral, const void* basis, const void* mass,
                                     const void* evalues, const void* times, const void* spectral,
                                     void* d_x, void* d_times, void* workspace,
                                     size_t workspace_bytes, struct CUstream_st* stream) {
  return guarded([=] {
    check(diffusion);
    const DiffusionShape shape = shape_of(*diffusion);
    DiffusionOperands operands = operands_of(*diffusion, d_out, basis, mass, evalues, times);
    operands.d_spectral = static_cast<const bf16*>(d_spectral);
    operands.spectral = static_cast<const bf16*>(spectral);
    operands.spectrum = const_cast<bf16*>(operands.spectral);  // a map is made of it; not written
    operands.result = static_cast<bf16*>(d_x);
    operands.d_times = static_cast<bf16*>(d_times);
    launch(pass_of<Pass::backward>(*diffusion, operands),
           {argument("d_out", d_out, shape.vertex_values()),
            argument("d_spectral", d_spectral, shape.spectrum_values()),
            argument("basis", basis, shape.vertices() * shape.E),
            argument("mass", mass, shape.vertices()),
            argument("evalues", evalues, shape.meshes * shape.E), argument("times", times, shape.W),
            argument("spectral", spectral, shape.spectrum_values()),
            argument("d_x", d_x, shape.vertex_values(), true),
            argument("d_times", d_times, shape.W, true)},
           workspace, workspace_bytes, stream);
  });
}
