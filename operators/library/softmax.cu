// softmax(x W) of operators/softmax, as the library exports it.

#include <algorithm>

#include "operators/estimate.h"
#include "operators/library/call.h"
#include "operators/library/products.h"
#include "operators/product/transpose.cuh"
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

/// The same of backward, whose products have rows and classes in other places.
void check_backward(const fk_softmax* of) {
  check(of);
  check_sizes({{"rows", of->rows, 1 << 24},
               {"inputs", of->inputs, 1 << 26},
               {"classes", of->classes, 1 << 24}});
}

/// The gradients of logits, g = p (d_p - sum of d_p p over a row). A block has a row, which it
/// reads twice, the second time from a cache.
constexpr int kGradientThreads = 256;
__global__ void __launch_bounds__(kGradientThreads)
    logit_gradients(const float* probs, const float* d_probs, float* g, int classes) {
  __shared__ float warps[kGradientThreads / 32];
  const size_t row = static_cast<size_t>(blockIdx.x) * classes;
  float sum = 0;
  for (int c = threadIdx.x; c < classes; c += kGradientThreads) {
    sum += probs[row + c] * d_probs[row + c];
  }
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (const float of_warp : warps) sum += of_warp;
  for (int c = threadIdx.x; c < classes; c += kGradientThreads) {
    g[row + c] = probs[row + c] * (d_probs[row + c] - sum);
  }
}

struct Gradients {
  const void *d_probs = nullptr, *x = nullptr, *w = nullptr, *probs = nullptr;
  void *d_x = nullptr, *d_w = nullptr;
};

/// d_x = g w^T and d_w = x^T g, two products, whose transposed factors are made first.
Operator backward(const fk_softmax& of, const Gradients& at) {
  return [=](const operators::Workspace& workspace) {
    using operators::product::launch_transpose, operators::product::Strided;
    const int64_t B = of.rows, D = of.inputs, C = of.classes;
    const auto g = workspace.any<float>(static_cast<size_t>(B * C));
    const auto x_t = workspace.any<float>(static_cast<size_t>(D * B));
    const auto w_t = workspace.any<float>(static_cast<size_t>(C * D));
    const auto prepare = [=, stream = workspace.stream] {
      using Factor = Strided<const float>;
      logit_gradients<<<static_cast<unsigned>(B), kGradientThreads, 0, stream>>>(
          static_cast<const float*>(at.probs), static_cast<const float*>(at.d_probs), g.data(),
          static_cast<int>(C));
      launch_transpose<float>(Factor{static_cast<const float*>(at.x), B, D, D}, {x_t, D, B, B},
                              stream);
      launch_transpose<float>(Factor{static_cast<const float*>(at.w), D, C, C}, {w_t, C, D, D},
                              stream);
    };
    const auto shape_of = [](int64_t m, int64_t n, int64_t k) {
      return operators::product::ProductShape{static_cast<int>(m), static_cast<int>(n),
                                              static_cast<int>(k)};
    };
    std::vector<operators::Way> steps;
    for (const std::vector<operators::Way>& ways :
         {fp32_product_ways(workspace, g, w_t, memory<float>(at.d_x, B * D), shape_of(B, D, C)),
          fp32_product_ways(workspace, x_t, g, memory<float>(at.d_w, D * C), shape_of(D, C, B))}) {
      const auto best = std::min_element(ways.begin(), ways.end(),
                                         [](const operators::Way& a, const operators::Way& b) {
                                           return a.microseconds < b.microseconds;
                                         });
      if (best == ways.end()) return std::vector<operators::Way>();
      steps.push_back(*best);
    }
    const double moved = 4.0 * static_cast<double>(3 * B * C + 2 * D * (B + C));
    const double microseconds = steps[0].microseconds + steps[1].microseconds +
                                operators::kFirstLaunch + moved / operators::kMemoryBytes;
    return std::vector<operators::Way>{{"gradients of logits, and two products", microseconds,
                                        [=] {
                                          prepare();
                                          for (const operators::Way& step : steps) step.launch();
                                        },
                                        std::max(steps[0].shared_bytes, steps[1].shared_bytes)}};
  };
}

}  // namespace

extern "C" int fk_softmax_backward_workspace(const fk_softmax* softmax, size_t* bytes) {
  return guarded([=] {
    check_backward(softmax);
    if (!bytes) throw Refusal{FK_BAD_ARGUMENT, "bytes is NULL"};
    *bytes = workspace_bytes(backward(*softmax, {}));
  });
}

extern "C" int fk_softmax_backward(const fk_softmax* softmax, const void* d_probs, const void* x,
                                   const void* w, const void* probs, void* d_x, void* d_w,
                                   void* workspace, size_t workspace_bytes,
                                   struct CUstream_st* stream) {
  return guarded([=] {
    check_backward(softmax);
    const auto [size, type, rows, inputs, classes] = *softmax;
    const auto argument = [](const char* name, const void* data, int64_t of_rows, int64_t cols,
                             bool written) {
      return Argument{name, data, static_cast<size_t>(of_rows * cols) * sizeof(float), 16, written};
    };
    launch(
        backward(*softmax, {d_probs, x, w, probs, d_x, d_w}),
        {argument("d_probs", d_probs, rows, classes, false), argument("x", x, rows, inputs, false),
         argument("w", w, inputs, classes, false), argument("probs", probs, rows, classes, false),
         argument("d_x", d_x, rows, inputs, true), argument("d_w", d_w, inputs, classes, true)},
        workspace, workspace_bytes, stream);
  });
}

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
