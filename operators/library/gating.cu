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
void check(const fk_gating& gating) {
  check_type("gating", gating.type, {FK_FLOAT16});
  check_sizes({{"rows", gating.rows, 1 << 30},
               {"inputs", gating.inputs, 1 << 30},
               {"hidden", gating.hidden, (1 << 21) - 1024}});
  check_stride("x_stride", gating.x_stride, gating.inputs, sizeof(half));
  check_stride("out_stride", gating.out_stride, gating.hidden, sizeof(half));
  check_capability("the gated layer", 80);
}

/// The same of backward, where inputs are columns of a product.
void check_backward(const fk_gating& gating) {
  check(gating);
  check_sizes({{"inputs", gating.inputs, 1 << 26}});
}

/// A stride as the layer takes it: 0 where rows are dense.
int64_t or_zero(int64_t stride, int64_t cols) { return stride == cols ? 0 : stride; }

/// The layer of a description that has been checked. Its operands are the call's arguments: x, w1,
/// w2, b1, b2, out.
Operator layer(const fk_gating& gating) {
  return [=](const operators::Workspace& workspace, const Operands& at) {
    const int64_t of_w = gating.inputs * gating.hidden, rows = gating.rows;
    const GatingMemory operands{
        at.memory<half>(0, rows * gating.inputs), at.memory<half>(1, of_w),
        at.memory<half>(3, gating.hidden),        at.memory<half>(2, of_w),
        at.memory<half>(4, gating.hidden),        at.memory<half>(5, rows * gating.hidden),
        or_zero(gating.x_stride, gating.inputs),  or_zero(gating.out_stride, gating.hidden)};
    return GatedLayer(workspace, operands, {rows, gating.inputs, gating.hidden}).ways();
  };
}

/// Its gradients. The operands are d_out, x, w1, w2, b1, b2, d_x, d_w1, d_w2, d_b1, d_b2.
Operator backward(const fk_gating& gating) {
  return [=](const operators::Workspace& workspace, const Operands& at) {
    const int64_t of_w = gating.inputs * gating.hidden, rows = gating.rows;
    const int64_t of_x = rows * gating.inputs, of_out = rows * gating.hidden;
    const GatingMemory operands{at.memory<half>(1, of_x),
                                at.memory<half>(2, of_w),
                                at.memory<half>(4, gating.hidden),
                                at.memory<half>(3, of_w),
                                at.memory<half>(5, gating.hidden),
                                at.memory<half>(0, of_out),
                                or_zero(gating.x_stride, gating.inputs),
                                or_zero(gating.out_stride, gating.hidden)};
    const GatingGradients d{at.memory<half>(0, of_out), at.memory<half>(6, of_x),
                            at.memory<half>(7, of_w),   at.memory<half>(9, gating.hidden),
                            at.memory<half>(8, of_w),   at.memory<half>(10, gating.hidden)};
    return GatedLayerBackward(workspace, operands, d, {rows, gating.inputs, gating.hidden},
                              half_product_ways)
        .ways();
  };
}

/// Rows that may be apart.
Argument rows_of(const char* name, int64_t rows, int64_t cols, int64_t stride, bool written) {
  const int64_t count = extent(rows, cols, or_dense(stride, cols));
  return {name, static_cast<size_t>(count) * sizeof(half), written};
}

Task forward_task(const fk_gating& gating) {
  check(gating);
  const auto [size, type, rows, inputs, hidden, x_stride, out_stride] = gating;
  return {layer(gating),
          {rows_of("x", rows, inputs, x_stride, false), rows_of("w1", inputs, hidden, 0, false),
           rows_of("w2", inputs, hidden, 0, false), rows_of("b1", 1, hidden, 0, false),
           rows_of("b2", 1, hidden, 0, false), rows_of("out", rows, hidden, out_stride, true)}};
}

Task backward_task(const fk_gating& gating) {
  check_backward(gating);
  const auto [size, type, rows, inputs, hidden, x_stride, out_stride] = gating;
  return {backward(gating),
          {rows_of("d_out", rows, hidden, out_stride, false),
           rows_of("x", rows, inputs, x_stride, false), rows_of("w1", inputs, hidden, 0, false),
           rows_of("w2", inputs, hidden, 0, false), rows_of("b1", 1, hidden, 0, false),
           rows_of("b2", 1, hidden, 0, false), rows_of("d_x", rows, inputs, 0, true),
           rows_of("d_w1", inputs, hidden, 0, true), rows_of("d_w2", inputs, hidden, 0, true),
           rows_of("d_b1", 1, hidden, 0, true), rows_of("d_b2", 1, hidden, 0, true)}};
}

}  // namespace

const Function operators::library::gating_forward = function_of<fk_gating, forward_task>("gating");
const Function operators::library::gating_backward =
    function_of<fk_gating, backward_task>("gating");

extern "C" int fk_gating_workspace(const fk_gating* gating, size_t* bytes) {
  return query(gating_forward, gating, bytes);
}

extern "C" int fk_gating_backward_workspace(const fk_gating* gating, size_t* bytes) {
  return query(gating_backward, gating, bytes);
}

extern "C" int fk_gating_forward(const fk_gating* gating, const void* x, const void* w1,
                                 const void* w2, const void* b1, const void* b2, void* out,
                                 void* workspace, size_t workspace_bytes,
                                 struct CUstream_st* stream) {
  return call(gating_forward, gating, {x, w1, w2, b1, b2, out}, workspace, workspace_bytes, stream);
}

extern "C" int fk_gating_backward(const fk_gating* gating, const void* d_out, const void* x,
                                  const void* w1, const void* w2, const void* b1, const void* b2,
                                  void* d_x, void* d_w1, void* d_w2, void* d_b1, void* d_b2,
                                  void* workspace, size_t workspace_bytes,
                                  struct CUstream_st* stream) {
  return call(gating_backward, gating, {d_out, x, w1, w2, b1, b2, d_x, d_w1, d_w2, d_b1, d_b2},
              workspace, workspace_bytes, stream);
}
