// The gated layer of operators/gating, as the library exports it.

#include "operators/gating/backward.cuh"
#include "operators/gating/layer.cuh"
#include "operators/library/call.h"
#include "operators/library/products.h"

namespace {

using namespace operators::library;
using operators::gating::GatedLayer, operators::gating::GatedLayerBackward;
using operators::gating::GatingGradients, operators::gating::GatingMemory;

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

/// The same of backward, where inputs are columns of a product.
void check_backward(const fk_gating* gating) {
  check(gating);
  check_sizes({{"inputs", gating->inputs, 1 << 26}});
}

/// The operands of a description that has been checked.
GatingMemory operands_of(const fk_gating& gating, const void* x, const void* w1, const void* w2,
                         const void* b1, const void* b2, void* out) {
  const int64_t of_w = gating.inputs * gating.hidden, rows = gating.rows;
  const auto stride = [](int64_t own, int64_t cols) { return own == cols ? 0 : own; };
  return {memory<half>(x, rows * gating.inputs),  memory<half>(w1, of_w),
          memory<half>(b1, gating.hidden),        memory<half>(w2, of_w),
          memory<half>(b2, gating.hidden),        memory<half>(out, rows * gating.hidden),
          stride(gating.x_stride, gating.inputs), stride(gating.out_stride, gating.hidden)};
}

/// The layer with its operands.
Operator layer(const fk_gating& gating, const GatingMemory& operands) {
  return [=](const operators::Workspace& workspace) {
    return GatedLayer(workspace, operands, {gating.rows, gating.inputs, gating.hidden}).ways();
  };
}

/// What backward writes, and d_out, all NULL in a query.
struct Gradients {
  const void* d_out = nullptr;
  void *d_x = nullptr, *d_w1 = nullptr, *d_w2 = nullptr, *d_b1 = nullptr, *d_b2 = nullptr;
};

/// Its gradients.
Operator backward(const fk_gating& gating, const GatingMemory& operands, const Gradients& at) {
  return [=](const operators::Workspace& workspace) {
    const int64_t of_w = gating.inputs * gating.hidden, rows = gating.rows;
    const GatingGradients d{memory<half>(at.d_out, rows * gating.hidden),
                            memory<half>(at.d_x, rows * gating.inputs),
                            memory<half>(at.d_w1, of_w),
                            memory<half>(at.d_b1, gating.hidden),
                            memory<half>(at.d_w2, of_w),
                            memory<half>(at.d_b2, gating.hidden)};
    return GatedLayerBackward(workspace, operands, d, {rows, gating.inputs, gating.hidden},
                              half_product_ways)
        .ways();
  };
}

/// What a call reads or writes of rows that may be apart.
Argument rows_of(const char* name, const void* data, int64_t rows, int64_t cols, int64_t stride,
                 bool written) {
  const int64_t count = extent(rows, cols, or_dense(stride, cols));
  return {name, data, static_cast<size_t>(count) * sizeof(half), 16, written};
}

}  // namespace

extern "C" int fk_gating_workspace(const fk_gating* gating, size_t* bytes) {
  return guarded([=] {
    check(gating);
    if (!bytes) throw Refusal{FK_BAD_ARGUMENT, "bytes is NULL"};
    *bytes = workspace_bytes(
        layer(*gating, operands_of(*gating, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr)));
  });
}

extern "C" int fk_gating_backward_workspace(const fk_gating* gating, size_t* bytes) {
  return guarded([=] {
    check_backward(gating);
    if (!bytes) throw Refusal{FK_BAD_ARGUMENT, "bytes is NULL"};
    *bytes = workspace_bytes(backward(
        *gating, operands_of(*gating, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr), {}));
  });
}

extern "C" int fk_gating_forward(const fk_gating* gating, const void* x, const void* w1,
                                 const void* w2, const void* b1, const void* b2, void* out,
                                 void* workspace, size_t workspace_bytes,
                                 struct CUstream_st* stream) {
  return guarded([=] {
    check(gating);
    const auto [size, type, rows, inputs, hidden, x_stride, out_stride] = *gating;
    launch(
        layer(*gating, operands_of(*gating, x, w1, w2, b1, b2, out)),
        {rows_of("x", x, rows, inputs, x_stride, false),
         rows_of("w1", w1, inputs, hidden, 0, false), rows_of("w2", w2, inputs, hidden, 0, false),
         rows_of("b1", b1, 1, hidden, 0, false), rows_of("b2", b2, 1, hidden, 0, false),
         rows_of("out", out, rows, hidden, out_stride, true)},
        workspace, workspace_bytes, stream);
  });
}

extern "C" int fk_gating_backward(const fk_gating* gating, const void* d_out, const void* x,
                                  const void* w1, const void* w2, const void* b1, const void* b2,
                                  void* d_x, void* d_w1, void* d_w2, void* d_b1, void* d_b2,
                                  void* workspace, size_t workspace_bytes,
                                  struct CUstream_st* stream) {
  return guarded([=] {
    check_backward(gating);
    const auto [size, type, rows, inputs, hidden, x_stride, out_stride] = *gating;
    launch(
        backward(*gating, operands_of(*gating, x, w1, w2, b1, b2, nullptr),
                 {d_out, d_x, d_w1, d_w2, d_b1, d_b2}),
        {rows_of("d_out", d_out, rows, hidden, out_stride, false),
         rows_of("x", x, rows, inputs, x_stride, false),
         rows_of("w1", w1, inputs, hidden, 0, false), rows_of("w2", w2, inputs, hidden, 0, false),
         rows_of("b1", b1, 1, hidden, 0, false), rows_of("b2", b2, 1, hidden, 0, false),
         rows_of("d_x", d_x, rows, inputs, 0, true), rows_of("d_w1", d_w1, inputs, hidden, 0, true),
         rows_of("d_w2", d_w2, inputs, hidden, 0, true), rows_of("d_b1", d_b1, 1, hidden, 0, true),
         rows_of("d_b2", d_b2, 1, hidden, 0, true)},
        workspace, workspace_bytes, stream);
  });
}
