// The gated layer of operators/gating, as the library exports it.

#include "operators/gating/layer.cuh"
#include "operators/library/call.h"

namespace {

using namespace operators::library;
using operators::gating::GatedLayer, operators::gating::GatingMemory;

/// Refuses a description that no GPU, or not this one, can compute.
void check(const fk_gating* gating) {
  check_description("gating", gating, sizeof *gating);
  check_type("gating", gating->type, {FK_FLOAT16});
  check_sizes({{"rows", gating->rows, 1 << 30},
               {"inputs", gating->inputs, 1 << 30},
               {"hidden", gating->hidden, (1 << 21) - 1024}});
  check_stride("x_stride", gating->x_stride, gating->inputs, sizeof(half));
  check_stride("out_stride", gating->out_stride, gating->hidden, sizeof(half));
  check_hopper("the gated layer");
}

/// The layer of a description that has been checked. Its operands are the call's arguments: x, w1,
/// w2, b1, b2, out.
PlannedOperator layer(const fk_gating& gating) {
  return [=](const operators::Workspace& workspace, const Operands& at) {
    const int64_t of_w = gating.inputs * gating.hidden, rows = gating.rows;
    const auto stride = [](int64_t own, int64_t cols) { return own == cols ? 0 : own; };
    const GatingMemory operands{
        at.memory<half>(0, rows * gating.inputs), at.memory<half>(1, of_w),
        at.memory<half>(3, gating.hidden),        at.memory<half>(2, of_w),
        at.memory<half>(4, gating.hidden),        at.memory<half>(5, rows * gating.hidden),
        stride(gating.x_stride, gating.inputs),   stride(gating.out_stride, gating.hidden)};
    return GatedLayer(workspace, operands, {rows, gating.inputs, gating.hidden}).ways();
  };
}

}  // namespace

extern "C" int fk_gating_workspace(const fk_gating* gating, size_t* bytes) {
  return guarded([=] {
    check(gating);
    if (!bytes) throw Refusal{FK_BAD_ARGUMENT, "bytes is NULL"};
    *bytes = workspace_bytes(layer(*gating));
  });
}

extern "C" int fk_gating_forward(const fk_gating* gating, const void* x, const void* w1,
                                 const void* w2, const void* b1, const void* b2, void* out,
                                 void* workspace, size_t workspace_bytes,
                                 struct CUstream_st* stream) {
  return guarded([&] {
    Plan& plan = plan_of("gating", gating, check, layer, stream);
    const int64_t inputs = gating->inputs, hidden = gating->hidden;
    const auto argument = [](const char* name, const void* data, int64_t count, bool written) {
      return Argument{name, data, static_cast<size_t>(count) * sizeof(half), 16, written};
    };
    const int64_t of_x = extent(gating->rows, inputs, or_dense(gating->x_stride, inputs));
    const int64_t of_out = extent(gating->rows, hidden, or_dense(gating->out_stride, hidden));
    const Argument arguments[] = {
        argument("x", x, of_x, false),
        argument("w1", w1, inputs * hidden, false),
        argument("w2", w2, inputs * hidden, false),
        argument("b1", b1, hidden, false),
        argument("b2", b2, hidden, false),
        argument("out", out, of_out, true),
    };
    launch(plan, arguments, workspace, workspace_bytes);
  });
}
