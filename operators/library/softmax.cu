// softmax(x W) of operators/softmax, as the library exports it.

#include "operators/library/call.h"
#include "operators/softmax/softmax_product.cuh"

namespace {

using namespace operators::library;
using namespace operators::softmax;

/// Refuses a description that no GPU can compute.
void check(const fk_softmax* of) {
  check_description("softmax", of, sizeof *of);
  check_type("softmax", of->type, {FK_FLOAT32});
  check_sizes({{"rows", of->rows, 1 << 30},
               {"inputs", of->inputs, 1 << 30},
               {"classes", of->classes, kMostClasses}});
}

/// The layer with the call's arguments x, w and probs, of a description that has been checked. Of
/// few rows or columns the CUDA cores are as fast as memory; else tensor cores multiply, where the
/// device has Hopper's.
PlannedOperator layer(const fk_softmax& of) {
  return [=](const operators::Workspace& workspace, const Operands& operands) {
    const SoftmaxShape shape{of.rows, of.inputs, of.classes};
    const SoftmaxProduct product(workspace, operands.memory<float>(0, of.rows * of.inputs),
                                 operands.memory<float>(1, of.inputs * of.classes),
                                 operands.memory<float>(2, of.rows * of.classes), shape);
    const bool few = of.rows <= kMostFewRows || of.classes <= kFewColumns;
    SoftmaxProduct::Ways ways = product.ways(few || !is_hopper() ? Math::fp32 : Math::split);
    ways.fused.insert(ways.fused.end(), ways.unfused.begin(), ways.unfused.end());
    return ways.fused;
  };
}

}  // namespace

extern "C" int fk_softmax_workspace(const fk_softmax* softmax, size_t* bytes) {
  return guarded([=] {
    check(softmax);
    if (!bytes) throw Refusal{FK_BAD_ARGUMENT, "bytes is NULL"};
    *bytes = workspace_bytes(layer(*softmax));
  });
}

extern "C" int fk_softmax_forward(const fk_softmax* softmax, const void* x, const void* w,
                                  void* probs, void* workspace, size_t workspace_bytes,
                                  struct CUstream_st* stream) {
  return guarded([&] {
    auto& plan = plan_of("softmax", softmax, check, layer, stream);
    const auto argument = [](const char* name, const void* data, int64_t rows, int64_t cols,
                             bool written) {
      return Argument{name, data, static_cast<size_t>(rows * cols) * sizeof(float), 16, written};
    };
    const Argument arguments[] = {argument("x", x, softmax->rows, softmax->inputs, false),
                                  argument("w", w, softmax->inputs, softmax->classes, false),
                                  argument("probs", probs, softmax->rows, softmax->classes, true)};
    launch(plan, arguments, workspace, workspace_bytes);
  });
}
