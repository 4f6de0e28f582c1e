// softmax(x W) of operators/softmax and its cross-entropy, as the library exports them.

#include <algorithm>

#include "operators/estimate.h"
#include "operators/library/call.h"
#include "operators/library/products.h"
#include "operators/product/transpose.cuh"
#include "operators/softmax/softmax_product.cuh"

namespace {

using namespace operators::library;
using namespace operators::softmax;
using operators::Way;

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
Operator layer(const fk_softmax& of) {
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
/// reads twice, the second time from a cache: of long rows few enough are under way at a time.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    logit_gradients(const float* probs, const float* d_probs, float* g, int classes) {
  __shared__ float warps[kThreads / 32];
  const size_t row = static_cast<size_t>(blockIdx.x) * classes;
  float sum = 0;
#pragma unroll 4
  for (int c = threadIdx.x; c < classes; c += kThreads) sum += probs[row + c] * d_probs[row + c];
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(kAllLanes, sum, other);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (const float of_warp : warps) sum += of_warp;
#pragma unroll 4
  for (int c = threadIdx.x; c < classes; c += kThreads) {
    g[row + c] = probs[row + c] * (d_probs[row + c] - sum);
  }
}
constexpr int kGradientThreads = 256, kLongRowThreads = 1024, kLongRow = 4096;

/// The steps of an operator, one after another, as one way.
Way in_turn(const std::string& name, const std::vector<Way>& steps) {
  Way all = {name, 0,
             [steps] {
               for (const Way& step : steps) step.launch();
             },
             0};
  for (const Way& step : steps) {
    all.microseconds += step.microseconds;
    all.shared_bytes = std::max(all.shared_bytes, step.shared_bytes);
  }
  return all;
}

/// A launch that does nothing but move so many numbers of fp32 from or to memory.
double microseconds_to_move(double numbers) {
  return operators::kNextLaunch + 4 * numbers / operators::kMemoryBytes;
}

bool sooner(const LogitsWay& a, const LogitsWay& b) {
  return a.way.microseconds < b.way.microseconds;
}

/// The way that should be the fastest to compute logits = x W, fp32 or as accurate: on tensor
/// cores, where the device has Hopper's, or on CUDA cores. With parts, if they are wanted. None if
/// the shape is too large.
std::vector<LogitsWay> logits_way(const operators::Workspace& workspace,
                                  const operators::Memory<float>& x,
                                  const operators::Memory<float>& W,
                                  const operators::Memory<float>& logits, const SoftmaxShape& shape,
                                  bool parts_wanted) {
  std::vector<LogitsWay> ways;
  if (is_hopper()) ways = split_logits_ways(workspace, x, W, logits, shape, parts_wanted);
  const int rows = static_cast<int>(shape.rows), classes = static_cast<int>(shape.classes);
  const int count = static_cast<int>(blocks_for(classes, kPartColumns));
  const auto parts = workspace.any<float2>(parts_wanted ? shape.rows * count : 1);
  const Way sums = {"", microseconds_to_move(static_cast<double>(shape.logits())),
                    [=, stream = workspace.stream] {
                      sum_row_parts<kSoftmaxThreads>
                          <<<dim3(rows, count), kSoftmaxThreads, 0, stream>>>(logits, logits, parts,
                                                                              classes, 1);
                    },
                    0};
  for (const Way& way : fp32_product_ways(workspace, x, W, logits,
                                          {rows, classes, static_cast<int>(shape.inputs)})) {
    ways.push_back({parts_wanted ? in_turn(way.name, {way, sums}) : way, parts, count});
  }
  if (ways.empty()) return {};
  return {*std::min_element(ways.begin(), ways.end(), sooner)};
}

/// d_x = g w^T and d_w = x^T g, two products, whose transposed factors are made first. `make_g`
/// writes g (rows, classes). None if a product is too large.
std::vector<Way> layer_gradients(const operators::Workspace& workspace, const fk_softmax& of,
                                 const operators::Memory<float>& x,
                                 const operators::Memory<float>& w,
                                 const operators::Memory<float>& d_x,
                                 const operators::Memory<float>& d_w,
                                 const operators::Memory<float>& g, const Way& make_g) {
  using operators::product::launch_transpose, operators::product::Strided;
  using Factor = Strided<const float>;
  const int64_t B = of.rows, D = of.inputs, C = of.classes;
  const auto x_t = workspace.any<float>(static_cast<size_t>(D * B));
  const auto w_t = workspace.any<float>(static_cast<size_t>(C * D));
  const Way transposed = {"", microseconds_to_move(2.0 * static_cast<double>(D * (B + C))),
                          [=, stream = workspace.stream] {
                            launch_transpose<float>(Factor{x, B, D, D}, {x_t, D, B, B}, stream);
                            launch_transpose<float>(Factor{w, D, C, C}, {w_t, C, D, D}, stream);
                          },
                          0};
  const auto of_x = logits_way(workspace, g, w_t, d_x, {B, C, D}, false);
  const auto of_w = logits_way(workspace, x_t, g, d_w, {D, B, C}, false);
  if (of_x.empty() || of_w.empty()) return {};
  return {in_turn("gradients of logits; d_x: " + of_x[0].way.name + "; d_w: " + of_w[0].way.name,
                  {make_g, transposed, of_x[0].way, of_w[0].way})};
}

/// A call's arguments are d_probs, x, w, probs, d_x, d_w.
Operator backward(const fk_softmax& of) {
  return [=](const operators::Workspace& workspace, const Operands& at) {
    const int64_t B = of.rows, D = of.inputs, C = of.classes;
    const auto g = workspace.any<float>(static_cast<size_t>(B * C));
    const bool is_long = C > kLongRow;
    const auto kernel =
        is_long ? logit_gradients<kLongRowThreads> : logit_gradients<kGradientThreads>;
    const int threads = is_long ? kLongRowThreads : kGradientThreads;
    const Way make_g = {"", microseconds_to_move(3.0 * static_cast<double>(B * C)),
                        [=, stream = workspace.stream] {
                          kernel<<<static_cast<unsigned>(B), threads, 0, stream>>>(
                              at.at<float>(3), at.at<float>(0), g, static_cast<int>(C));
                        },
                        0};
    return layer_gradients(workspace, of, at.memory<float>(1, B * D), at.memory<float>(2, D * C),
                           at.memory<float>(4, B * D), at.memory<float>(5, D * C), g, make_g);
  };
}

/// Of each row the logarithm of the sum of its logits' exponentials, and its loss: this less the
/// logit of its label, or 0 where the label is no class. A warp has a row, of whose parts there are
/// `count` maxima and sums.
constexpr int kLossThreads = 128;
__global__ void __launch_bounds__(kLossThreads)
    row_losses(const float* logits, const float2* parts, const int64_t* labels, float* losses,
               float* log_sums, int rows, int classes, int count) {
  const int row = blockIdx.x * (kLossThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  if (row >= rows) return;
  MaxSum part = {minus_infinity(), 0};
  for (int i = threadIdx.x % 32; i < count; i += 32) {
    const float2 other = parts[static_cast<size_t>(row) * count + i];
    part = merge(part, {other.x, other.y});
  }
  part = warp_merge(part);
  if (threadIdx.x % 32 != 0) return;
  const float log_sum = part.largest + logf(part.sum);
  const int64_t label = labels[row];
  const bool is_class = label >= 0 && label < classes;
  log_sums[row] = log_sum;
  losses[row] = is_class ? log_sum - logits[static_cast<size_t>(row) * classes + label] : 0;
}

/// The gradients of logits: g = d_loss (exp(logit - log_sum), less 1 at the label), and 0 where the
/// label is no class. A block has kGradientColumns columns of row blockIdx.x; of a thread's numbers
/// all loads are under way at a time.
constexpr int kGradientsEach = 8, kGradientColumns = kGradientThreads * kGradientsEach;
__global__ void __launch_bounds__(kGradientThreads)
    loss_gradients(const float* logits, const float* log_sums, const int64_t* labels,
                   const float* d_losses, float* g, int classes) {
  const size_t row = static_cast<size_t>(blockIdx.x) * classes;
  const int first = blockIdx.y * kGradientColumns + static_cast<int>(threadIdx.x);
  float v[kGradientsEach];
#pragma unroll
  for (int i = 0; i < kGradientsEach; ++i) {
    const int c = first + i * kGradientThreads;
    if (c < classes) v[i] = logits[row + c];
  }
  const float log_sum = log_sums[blockIdx.x], d_loss = d_losses[blockIdx.x];
  const int64_t label = labels[blockIdx.x];
  const bool is_class = label >= 0 && label < classes;
#pragma unroll
  for (int i = 0; i < kGradientsEach; ++i) {
    const int c = first + i * kGradientThreads;
    if (c < classes) {
      g[row + c] = is_class ? d_loss * (expf(v[i] - log_sum) - (c == label ? 1.0F : 0.0F)) : 0;
    }
  }
}

/// The losses of labels. A call's arguments are x, w, labels, losses, logits, log_sums.
Operator losses(const fk_softmax& of) {
  return [=](const operators::Workspace& workspace, const Operands& at) {
    const int64_t B = of.rows, D = of.inputs, C = of.classes;
    const auto found = logits_way(workspace, at.memory<float>(0, B * D), at.memory<float>(1, D * C),
                                  at.memory<float>(4, B * C), {B, D, C}, true);
    if (found.empty()) return std::vector<Way>();
    const auto& [product, parts, count] = found[0];
    const Way of_rows = {"", microseconds_to_move(2.0 * static_cast<double>(B) * count),
                         [=, parts = parts, count = count, stream = workspace.stream] {
                           row_losses<<<static_cast<unsigned>(blocks_for(B, kLossThreads / 32)),
                                        kLossThreads, 0, stream>>>(
                               at.at<float>(4), parts, at.at<int64_t>(2), at.at<float>(3),
                               at.at<float>(5), static_cast<int>(B), static_cast<int>(C), count);
                         },
                         0};
    return std::vector<Way>{in_turn(product.name, {product, of_rows})};
  };
}

/// Their gradients. A call's arguments are d_losses, x, w, labels, logits, log_sums, d_x, d_w.
Operator losses_backward(const fk_softmax& of) {
  return [=](const operators::Workspace& workspace, const Operands& at) {
    const int64_t B = of.rows, D = of.inputs, C = of.classes;
    const auto g = workspace.any<float>(static_cast<size_t>(B * C));
    const dim3 grid(static_cast<unsigned>(B), blocks_for(C, kGradientColumns));
    const Way make_g = {"", microseconds_to_move(2.0 * static_cast<double>(B * C)),
                        [=, stream = workspace.stream] {
                          loss_gradients<<<grid, kGradientThreads, 0, stream>>>(
                              at.at<float>(4), at.at<float>(5), at.at<int64_t>(3), at.at<float>(0),
                              g, static_cast<int>(C));
                        },
                        0};
    return layer_gradients(workspace, of, at.memory<float>(1, B * D), at.memory<float>(2, D * C),
                           at.memory<float>(6, B * D), at.memory<float>(7, D * C), g, make_g);
  };
}

Argument argument(const char* name, const void* data, int64_t rows, int64_t cols,
                  bool written = false) {
  return {name, data, static_cast<size_t>(rows * cols) * sizeof(float), 16, written};
}

Argument labels_of(const void* labels, int64_t rows) {
  return {"labels", labels, static_cast<size_t>(rows) * sizeof(int64_t)};
}

}  // namespace

extern "C" int fk_softmax_backward_workspace(const fk_softmax* softmax, size_t* bytes) {
  return guarded([=] {
    check_backward(softmax);
    if (!bytes) throw Refusal{FK_BAD_ARGUMENT, "bytes is NULL"};
    *bytes = workspace_bytes(backward(*softmax));
  });
}

extern "C" int fk_softmax_backward(const fk_softmax* softmax, const void* d_probs, const void* x,
                                   const void* w, const void* probs, void* d_x, void* d_w,
                                   void* workspace, size_t workspace_bytes,
                                   struct CUstream_st* stream) {
  return guarded([&] {
    auto& plan = plan_of("softmax", softmax, check_backward, backward, stream, 1);
    const auto [size, type, rows, inputs, classes] = *softmax;
    const Argument arguments[] = {
        argument("d_probs", d_probs, rows, classes), argument("x", x, rows, inputs),
        argument("w", w, inputs, classes),           argument("probs", probs, rows, classes),
        argument("d_x", d_x, rows, inputs, true),    argument("d_w", d_w, inputs, classes, true)};
    launch(plan, arguments, workspace, workspace_bytes);
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
    const auto [size, type, rows, inputs, classes] = *softmax;
    const Argument arguments[] = {argument("x", x, rows, inputs), argument("w", w, inputs, classes),
                                  argument("probs", probs, rows, classes, true)};
    launch(plan, arguments, workspace, workspace_bytes);
  });
}

extern "C" int fk_cross_entropy_workspace(const fk_softmax* softmax, size_t* bytes) {
  return guarded([=] {
    check_backward(softmax);
    if (!bytes) throw Refusal{FK_BAD_ARGUMENT, "bytes is NULL"};
    *bytes = workspace_bytes(losses(*softmax));
  });
}

extern "C" int fk_cross_entropy_forward(const fk_softmax* softmax, const void* x, const void* w,
                                        const void* labels, void* losses_out, void* logits,
                                        void* log_sums, void* workspace, size_t workspace_bytes,
                                        struct CUstream_st* stream) {
  return guarded([&] {
    auto& plan = plan_of("softmax", softmax, check_backward, losses, stream, 2);
    const auto [size, type, rows, inputs, classes] = *softmax;
    const Argument arguments[] = {
        argument("x", x, rows, inputs),
        argument("w", w, inputs, classes),
        labels_of(labels, rows),
        argument("losses", losses_out, rows, 1, true),
        argument("logits", logits, rows, classes, true),
        argument("log_sums", log_sums, rows, 1, true),
    };
    launch(plan, arguments, workspace, workspace_bytes);
  });
}

extern "C" int fk_cross_entropy_backward_workspace(const fk_softmax* softmax, size_t* bytes) {
  return guarded([=] {
    check_backward(softmax);
    if (!bytes) throw Refusal{FK_BAD_ARGUMENT, "bytes is NULL"};
    *bytes = workspace_bytes(losses_backward(*softmax));
  });
}

extern "C" int fk_cross_entropy_backward(const fk_softmax* softmax, const void* d_losses,
                                         const void* x, const void* w, const void* labels,
                                         const void* logits, const void* log_sums, void* d_x,
                                         void* d_w, void* workspace, size_t workspace_bytes,
                                         struct CUstream_st* stream) {
  return guarded([&] {
    auto& plan = plan_of("softmax", softmax, check_backward, losses_backward, stream, 3);
    const auto [size, type, rows, inputs, classes] = *softmax;
    const Argument arguments[] = {
        argument("d_losses", d_losses, rows, 1),   argument("x", x, rows, inputs),
        argument("w", w, inputs, classes),         labels_of(labels, rows),
        argument("logits", logits, rows, classes), argument("log_sums", log_sums, rows, 1),
        argument("d_x", d_x, rows, inputs, true),  argument("d_w", d_w, inputs, classes, true)};
    launch(plan, arguments, workspace, workspace_bytes);
  });
}
