// The gated layer of operators/gating, as the library exports it.

#include "operators/gating/layer.cuh"
#include "operators/library/call.h"

namespace {

using namespace operators::library;
using operators::gating::GatedLayer, operators::gating::GatingMemory;
using operators::gating::GatingShape;

/// Refuses a description that no GPU, or not this one, can compute.
GatingShape shape_of(const fk_gating* gating) {
  check_description("gating", gating, sizeof *gating);
  if (gating->type != FK_FLOAT16) {
    throw Refusal{FK_BAD_ARGUMENT, "gating: type is " + std::to_string(gating->type) +
                                       "; the gated layer has FK_FLOAT16 alone"};
  }
  constexpr int64_t kMost = INT32_MAX - 1023;  // where a tile ends is an int, too
  constexpr int64_t kMostHidden = (1 << 21) - 1024;
  check_sizes({{"rows", gating->rows, kMost},
               {"inputs", gating->inputs, kMost},
               {"hidden", gating->hidden, kMostHidden}});
  check_hopper("the gated layer");
  return {gating->rows, gating->inputs, gating->hidden};
}

}  // namespace

extern "C" int fk_gating_workspace(const fk_gating* gating, size_t* bytes) {
  return guarded([=] {
    const GatingShape shape = shape_of(gating);
    if (!bytes) throw Refusal{FK_BAD_ARGUMENT, "bytes is NULL"};
    const auto none = memory<half>(nullptr, 0);
    *bytes = workspace_bytes([=](const operators::Workspace& workspace) {
      return GatedLayer(workspace, {none, none, none, none, none, none}, shape).ways();
    });
  });
}

extern "C" int fk_gating_forward(const fk_gating* gating, const void* x, const void* w1,
                                 const void* w2, const void* b1, const void* b2, void* out,
                                 void* workspace, size_t workspace_bytes,
                                 struct CUstream_st* stream) {
  return guarded([=] {
    const GatingShape shape = shape_of(gating);
    const int64_t of_x = shape.rows * shape.channels, of_w = shape.channels * shape.hidden;
    const int64_t of_out = shape.rows * shape.hidden;
    const auto argument = [](const char* name, const void* data, int64_t count, bool written) {
      return Argument{name, data, static_cast<size_t>(count) * sizeof(half), 16, written};
    };
    const GatingMemory operands{memory<half>(x, of_x),          memory<half>(w1, of_w),
                                memory<half>(b1, shape.hidden), memory<half>(w2, of_w),
                                memory<half>(b2, shape.hidden), memory<half>(out, of_out)};
    launch(
        [=](const operators::Workspace& memory_of) {
          return GatedLayer(memory_of, operands, shape).ways();
        },
        {argument("x", x, of_x, false), argument("w1", w1, of_w, false),
         argument("w2", w2, of_w, false), argument("b1", b1, shape.hidden, false),
         argument("b2", b2, shape.hidden, false), argument("out", out, of_out, true)},
        workspace, workspace_bytes, stream);
  });
}
