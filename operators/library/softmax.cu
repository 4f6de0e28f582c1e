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
void check(const fk_softmax& of) {
  check_type("softmax", of.type, {FK_FLOAT32});
  check_sizes({{"rows", of.rows, 1 << 30},
               {"inputs", of.inputs, 1 << 30},
               {"classes", of.classes, kMostClasses}});
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
void check_backward(const fk_softmax& of) {
  check(of);
  check_sizes({{"rows", of.rows, 1 << 24},
               {"inputs", of.inputs, 1 << 26},
               {"classes", of.classes, 1 << 24}});
}

/// So many threads a row is worth: a warp of short ones, and of long ones so many that the rows
/// under way at a time fit into a cache.
constexpr int kShortRow = 512, kLongRow = 4096;
int threads_of_row(int64_t classes) {
  return classes <= kShortRow ? 32 : classes <= kLongRow ? 256 : 1024;
}
constexpr int rows_of_block(int row_threads) { return row_threads == 32 ? 8 : 1; }

/// The gradients of logits, g = p (d_p - sum of d_p p over a row). A row is kThreads threads', a
/// warp's or a block's, which read it twice, the second time from a cache.
template <int kThreads>
__global__ void __launch_bounds__(kThreads == 32 ? 256 : kThreads)
    logit_gradients(const float* probs, const float* d_probs, float* g, int rows, int classes) {
  constexpr int kRows = kThreads == 32 ? 8 : 1;
  const int64_t at = int64_t{blockIdx.x} * kRows + threadIdx.x / kThreads;
  if (at >= rows) return;
  const int first = threadIdx.x % kThreads;
  const int64_t row = at * classes;
  float sum = 0;
#pragma unroll 4
  for (int c = first; c < classes; c += kThreads) sum += probs[row + c] * d_probs[row + c];
  sum = lanes_sum<32>(sum);
  if constexpr (kThreads > 32) {
    __shared__ float warps[kThreads / 32];
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (const float of_warp : warps) sum += of_warp;
  }
#pragma unroll 4
  for (int c = first; c < classes; c += kThreads) {
    g[row + c] = probs[row + c] * (d_probs[row + c] - sum);
  }
}

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
  return operators::kNextLaunch + 4 * numbers / operators::memory_rate();
}

bool sooner(const LogitsWay& a, const LogitsWay& b) {
  return a.way.microseconds < b.way.microseconds;
}

/// The way that should be the fastest to compute logits = x W, fp32 or as accurate: on tensor
/// cores, where the device has Hopper's, or on CUDA cores. None if the shape is too large. One that
/// has no parts of rows says that it has 0.
std::vector<LogitsWay> logits_way(const operators::Workspace& workspace,
                                  const operators::Memory<float>& x,
                                  const operators::Memory<float>& W,
                                  const operators::Memory<float>& logits, const SoftmaxShape& shape,
                                  bool parts_wanted) {
  std::vector<LogitsWay> ways;
  if (is_hopper()) ways = split_logits_ways(workspace, x, W, logits, shape, parts_wanted);
  const operators::product::ProductShape sizes = {static_cast<int>(shape.rows),
                                                  static_cast<int>(shape.classes),
                                                  static_cast<int>(shape.inputs)};
  const auto none = workspace.any<float2>(1);
  for (const Way& way : fp32_product_ways(workspace, x, W, logits, sizes)) {
    ways.push_back({way, 1, 0, logits, none});
  }
  if (ways.empty()) return {};
  return {*std::min_element(ways.begin(), ways.end(), sooner)};
}

/// sum = the sum of `slices` matrices of `count` elements, one behind another. A thread has an
/// element, and the loads of eight slices are under way at a time.
constexpr int kAddThreads = 256;
__global__ void __launch_bounds__(kAddThreads)
    add_slices(const float* sliced, float* sum, int64_t count, int slices) {
  const int64_t at = int64_t{blockIdx.x} * kAddThreads + threadIdx.x;
  if (at >= count) return;
  float v = sliced[at];
#pragma unroll 8
  for (int slice = 1; slice < slices; ++slice) v += sliced[slice * count + at];
  sum[at] = v;
}

/// The steps of the product c = a b: slices of the depth are added up.
std::vector<Way> product_steps(const operators::Workspace& workspace,
                               const operators::Memory<float>& a, const operators::Memory<float>& b,
                               const operators::Memory<float>& c, const SoftmaxShape& shape) {
  const auto found = logits_way(workspace, a, b, c, shape, false);
  if (found.empty()) return {};
  if (found[0].slices == 1) return {found[0].way};
  const auto& [way, slices, parts, sliced, memory] = found[0];
  const int64_t count = shape.rows * shape.classes;
  return {way,
          {"", 0,  // which the first step's time has
           [=, slices = slices, sliced = sliced, stream = workspace.stream] {
             add_slices<<<static_cast<unsigned>(blocks_for(count, kAddThreads)), kAddThreads, 0,
                          stream>>>(sliced, c, count, slices);
           },
           0}};
}

/// to = from^T, of a matrix (rows, cols).
Way transposition(const operators::Workspace& workspace, const operators::Memory<float>& from,
                  const operators::Memory<float>& to, int64_t rows, int64_t cols) {
  return {"", microseconds_to_move(2.0 * static_cast<double>(rows * cols)),
          [=, stream = workspace.stream] {
            operators::product::launch_transpose<float>({from, rows, cols, cols},
                                                        {to, cols, rows, rows}, stream);
          },
          0};
}

/// d_x = g w^T and d_w = x^T g, two products, whose transposed factors are made first; or, where x
/// and g have fewer elements than w, d_x^T = w g^T. `make_g` writes g (rows, classes). None if a
/// product is too large.
std::vector<Way> layer_gradients(const operators::Workspace& workspace, const fk_softmax& of,
                                 const operators::Memory<float>& x,
                                 const operators::Memory<float>& w,
                                 const operators::Memory<float>& d_x,
                                 const operators::Memory<float>& d_w,
                                 const operators::Memory<float>& g, const Way& make_g) {
  const int64_t B = of.rows, D = of.inputs, C = of.classes;
  const auto matrix = [&](int64_t rows, int64_t cols) {
    return workspace.any<float>(static_cast<size_t>(rows * cols));
  };
  const auto x_t = matrix(D, B);
  std::vector<Way> steps = {make_g, transposition(workspace, x, x_t, B, D)};
  std::string name = "gradients of logits";
  const auto multiply = [&](const operators::Memory<float>& a, const operators::Memory<float>& b,
                            const operators::Memory<float>& c, const SoftmaxShape& shape) {
    const auto product = product_steps(workspace, a, b, c, shape);
    if (!product.empty()) name += ", then " + product[0].name;
    steps.insert(steps.end(), product.begin(), product.end());
    return !product.empty();
  };
  const auto moves = [](int64_t elements) {
    return microseconds_to_move(2.0 * static_cast<double>(elements));
  };
  if (moves(B * C) + moves(B * D) < moves(D * C)) {
    const auto g_t = matrix(C, B), d_x_t = matrix(D, B);
    steps.push_back(transposition(workspace, g, g_t, B, C));
    if (!multiply(w, g_t, d_x_t, {D, C, B})) return {};
    steps.push_back(transposition(workspace, d_x_t, d_x, D, B));
  } else {
    const auto w_t = matrix(C, D);
    steps.push_back(transposition(workspace, w, w_t, D, C));
    if (!multiply(g, w_t, d_x, {B, C, D})) return {};
  }
  if (!multiply(x_t, g, d_w, {D, B, C})) return {};
  return {in_turn(name, steps)};
}

/// A call's arguments are d_probs, x, w, probs, d_x, d_w.
Operator backward(const fk_softmax& of) {
  return [=](const operators::Workspace& workspace, const Operands& at) {
    const int64_t B = of.rows, D = of.inputs, C = of.classes;
    const auto g = workspace.any<float>(static_cast<size_t>(B * C));
    const int threads = threads_of_row(C), of_block = rows_of_block(threads);
    const auto kernel = threads == 32    ? logit_gradients<32>
                        : threads == 256 ? logit_gradients<256>
                                         : logit_gradients<1024>;
    const auto blocks = static_cast<unsigned>(blocks_for(B, of_block));
    const Way make_g = {"", microseconds_to_move(3.0 * static_cast<double>(B * C)),
                        [=, stream = workspace.stream] {
                          kernel<<<blocks, of_block * threads, 0, stream>>>(
                              at.at<float>(3), at.at<float>(0), g, static_cast<int>(B),
                              static_cast<int>(C));
                        },
                        0};
    return layer_gradients(workspace, of, at.memory<float>(1, B * D), at.memory<float>(2, D * C),
                           at.memory<float>(4, B * D), at.memory<float>(5, D * C), g, make_g);
  };
}

/// A row's loss: the logarithm of the sum of exponentials less the label's logit. Both are taken
/// relative to the largest logit: where logits are large, fp32 has no digits left for the logarithm
/// once the maximum has been added to it.
struct Losses {
  const int64_t* labels;
  float *losses, *log_sums;
  int classes;

  __device__ bool is_class(int row) const { return labels[row] >= 0 && labels[row] < classes; }
  __device__ static float loss(const MaxSum& row, float logit) {
    return logf(row.sum) - (logit - row.largest);
  }
};

/// The losses of rows with logits. kLanes lanes, 1 or 32, have a row, of whose parts there are
/// `count` maxima and sums.
constexpr int kLossThreads = 128, kFewParts = 8;
template <int kLanes>
__global__ void __launch_bounds__(kLossThreads)
    losses_of_parts(const float* logits, const float2* parts, Losses of, int rows, int count) {
  const int row = (blockIdx.x * kLossThreads + static_cast<int>(threadIdx.x)) / kLanes;
  if (row >= rows) return;
  const int64_t label = of.labels[row];
  const bool is_class = of.is_class(row);
  const float logit = is_class ? logits[int64_t{row} * of.classes + label] : 0;
  MaxSum part = {minus_infinity(), 0};
  for (int i = threadIdx.x % kLanes; i < count; i += kLanes) {
    const float2 other = parts[static_cast<size_t>(row) * count + i];
    part = merge(part, {other.x, other.y});
  }
  if constexpr (kLanes == 32) part = warp_merge(part);
  if (threadIdx.x % kLanes != 0) return;
  of.log_sums[row] = part.largest + logf(part.sum);
  of.losses[row] = is_class ? Losses::loss(part, logit) : 0;
}

/// The losses of rows of at most kThreads * kValues logits, each the sum of `slices` partial ones.
/// A block has a row, and keeps it in registers. It writes the logits: where there is one slice,
/// what it has read.
template <int kThreads, int kValues>
__global__ void __launch_bounds__(kThreads)
    losses_of_slices(const float* sliced, float* logits, Losses of, int slices) {
  const int64_t start = int64_t{blockIdx.x} * of.classes;
  const int64_t slice_size = int64_t{gridDim.x} * of.classes;
  float v[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int c = threadIdx.x + i * kThreads;
    v[i] = c < of.classes ? sliced[start + c] : minus_infinity();
  }
#pragma unroll 4
  for (int slice = 1; slice < slices; ++slice) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int c = threadIdx.x + i * kThreads;
      if (c < of.classes) v[i] += sliced[slice * slice_size + start + c];
    }
  }
  MaxSum row = {minus_infinity(), 0};
#pragma unroll
  for (int i = 0; i < kValues; ++i) row.largest = fmaxf(row.largest, v[i]);
#pragma unroll
  for (int i = 0; i < kValues; ++i) row.sum += expf(v[i] - base_of(row.largest));
  row = warp_merge(row);
  if constexpr (kThreads > 32) row = block_merge<kThreads / 32>(row);
  const int64_t label = of.labels[blockIdx.x];
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int c = threadIdx.x + i * kThreads;
    if (c < of.classes) logits[start + c] = v[i];
    if (c < of.classes && c == label) of.losses[blockIdx.x] = Losses::loss(row, v[i]);
  }
  if (threadIdx.x != 0) return;
  of.log_sums[blockIdx.x] = row.largest + logf(row.sum);
  if (!of.is_class(blockIdx.x)) of.losses[blockIdx.x] = 0;
}

/// The largest logit of a row, and the sum of exponentials relative to it, as all kThreads threads
/// of the row find it together.
template <int kThreads>
__device__ MaxSum max_sum_of_row(const float* logits, int classes) {
  MaxSum row = {minus_infinity(), 0};
  for (int c = static_cast<int>(threadIdx.x) % kThreads; c < classes; c += kThreads) {
    row = merge(row, {logits[c], 1});
  }
  row = warp_merge(row);
  if constexpr (kThreads > 32) row = block_merge<kThreads / 32>(row);
  return row;
}

/// The gradients of logits: g = d_loss (exp(logit - log_sum), less 1 at the label), and 0 where the
/// label is no class. kThreads threads have 8 * kThreads columns of a row; all loads of a thread
/// are under way at a time. The grid's y are the parts of a row.
///
/// A log_sum has been rounded, by up to 2^-24 of its size, and that becomes a factor of all of the
/// row's exponentials. Up to kExactLogSum it is as good as one of fp32's own roundings of a sum.
/// Beyond it, which logits of a network that learns do not reach, every part of the row finds its
/// maximum and its sum once more.
constexpr int kGradientThreads = 256, kGradientsEach = 8;
constexpr float kExactLogSum = 32;
template <int kThreads>
__global__ void __launch_bounds__(kGradientThreads)
    loss_gradients(const float* logits, const float* log_sums, const int64_t* labels,
                   const float* d_losses, float* g, int rows, int classes) {
  const int64_t at = int64_t{blockIdx.x} * (kGradientThreads / kThreads) + threadIdx.x / kThreads;
  if (at >= rows) return;
  const int64_t row = at * classes;
  const int first =
      blockIdx.y * kThreads * kGradientsEach + static_cast<int>(threadIdx.x) % kThreads;
  float v[kGradientsEach];
#pragma unroll
  for (int i = 0; i < kGradientsEach; ++i) {
    const int c = first + i * kThreads;
    if (c < classes) v[i] = logits[row + c];
  }
  const float log_sum = log_sums[at], d_loss = d_losses[at];
  float base = 0, log_of_sum = log_sum;  // relative to the base
  if (fabsf(log_sum) > kExactLogSum && !isinf(log_sum)) {
    const MaxSum all = max_sum_of_row<kThreads>(logits + row, classes);
    base = all.largest;
    log_of_sum = logf(all.sum);
  }
  const int64_t label = labels[at];
  const bool is_class = label >= 0 && label < classes;
#pragma unroll
  for (int i = 0; i < kGradientsEach; ++i) {
    const int c = first + i * kThreads;
    if (c < classes) {
      const float p = expf(v[i] - base - log_of_sum);
      g[row + c] = is_class ? d_loss * (p - (c == label ? 1.0F : 0.0F)) : 0;
    }
  }
}

/// The losses of labels. A call's arguments are x, w, labels, losses, logits, log_sums.
Operator losses(const fk_softmax& of) {
  return [=](const operators::Workspace& workspace, const Operands& at) {
    const int64_t B = of.rows, D = of.inputs, C = of.classes;
    const auto logits = at.memory<float>(4, B * C);
    const auto found = logits_way(workspace, at.memory<float>(0, B * D), at.memory<float>(1, D * C),
                                  logits, {B, D, C}, true);
    if (found.empty()) return std::vector<Way>();
    const LogitsWay& product = found[0];
    const bool has_parts = product.slices == 1 && product.count > 0, is_long = C > kPartColumns;
    const int count = has_parts ? product.count : static_cast<int>(blocks_for(C, kPartColumns));
    const auto parts = has_parts ? product.parts : workspace.any<float2>(is_long ? B * count : 1);
    const auto launch = [=, slices = product.slices, stream = workspace.stream,
                         sliced = product.slices > 1 ? product.sliced : logits] {
      const Losses result = {at.at<int64_t>(2), at.at<float>(3), at.at<float>(5),
                             static_cast<int>(C)};
      const auto rows = static_cast<unsigned>(B);
      if (!has_parts && !is_long) {
        const bool is_short = C <= 128;
        const auto kernel = is_short
                                ? losses_of_slices<32, 4>
                                : losses_of_slices<kSoftmaxThreads, kPartColumns / kSoftmaxThreads>;
        kernel<<<rows, is_short ? 32 : kSoftmaxThreads, 0, stream>>>(sliced, logits, result,
                                                                     slices);
        return;
      }
      if (!has_parts) {
        sum_row_parts<kSoftmaxThreads><<<dim3(rows, count), kSoftmaxThreads, 0, stream>>>(
            sliced, logits, parts, result.classes, slices);
      }
      const int lanes = count <= kFewParts ? 1 : 32;
      const auto kernel = lanes == 1 ? losses_of_parts<1> : losses_of_parts<32>;
      kernel<<<static_cast<unsigned>(blocks_for(B, kLossThreads / lanes)), kLossThreads, 0,
               stream>>>(logits, parts, result, static_cast<int>(B), count);
    };
    const double read =
        has_parts ? 2.0 * static_cast<double>(B) * count : static_cast<double>(B * C);
    return std::vector<Way>{
        in_turn(product.way.name, {product.way, {"", microseconds_to_move(read), launch, 0}})};
  };
}

/// Their gradients. A call's arguments are d_losses, x, w, labels, logits, log_sums, d_x, d_w.
Operator losses_backward(const fk_softmax& of) {
  return [=](const operators::Workspace& workspace, const Operands& at) {
    const int64_t B = of.rows, D = of.inputs, C = of.classes;
    const auto g = workspace.any<float>(static_cast<size_t>(B * C));
    const int threads = C <= kShortRow ? 32 : kGradientThreads;
    const auto kernel = threads == 32 ? loss_gradients<32> : loss_gradients<kGradientThreads>;
    const dim3 grid(static_cast<unsigned>(blocks_for(B, kGradientThreads / threads)),
                    static_cast<unsigned>(blocks_for(C, threads * kGradientsEach)));
    const Way make_g = {"", microseconds_to_move(2.0 * static_cast<double>(B * C)),
                        [=, stream = workspace.stream] {
                          kernel<<<grid, kGradientThreads, 0, stream>>>(
                              at.at<float>(4), at.at<float>(5), at.at<int64_t>(3), at.at<float>(0),
                              g, static_cast<int>(B), static_cast<int>(C));
                        },
                        0};
    return layer_gradients(workspace, of, at.memory<float>(1, B * D), at.memory<float>(2, D * C),
                           at.memory<float>(6, B * D), at.memory<float>(7, D * C), g, make_g);
  };
}

Argument argument(const char* name, int64_t rows, int64_t cols, bool written = false) {
  return {name, static_cast<size_t>(rows * cols) * sizeof(float), written};
}

Argument labels_of(int64_t rows) { return {"labels", static_cast<size_t>(rows) * sizeof(int64_t)}; }

Task forward_task(const fk_softmax& of) {
  check(of);
  const auto [size, type, rows, inputs, classes] = of;
  return {layer(of),
          {argument("x", rows, inputs), argument("w", inputs, classes),
           argument("probs", rows, classes, true)}};
}

Task backward_task(const fk_softmax& of) {
  check_backward(of);
  const auto [size, type, rows, inputs, classes] = of;
  return {backward(of),
          {argument("d_probs", rows, classes), argument("x", rows, inputs),
           argument("w", inputs, classes), argument("probs", rows, classes),
           argument("d_x", rows, inputs, true), argument("d_w", inputs, classes, true)}};
}

Task losses_task(const fk_softmax& of) {
  check_backward(of);
  const auto [size, type, rows, inputs, classes] = of;
  return {losses(of),
          {argument("x", rows, inputs), argument("w", inputs, classes), labels_of(rows),
           argument("losses", rows, 1, true), argument("logits", rows, classes, true),
           argument("log_sums", rows, 1, true)}};
}

Task losses_backward_task(const fk_softmax& of) {
  check_backward(of);
  const auto [size, type, rows, inputs, classes] = of;
  return {
      losses_backward(of),
      {argument("d_losses", rows, 1), argument("x", rows, inputs), argument("w", inputs, classes),
       labels_of(rows), argument("logits", rows, classes), argument("log_sums", rows, 1),
       argument("d_x", rows, inputs, true), argument("d_w", inputs, classes, true)}};
}

}  // namespace

const Function operators::library::softmax_forward =
    function_of<fk_softmax, forward_task>("softmax");
const Function operators::library::softmax_backward =
    function_of<fk_softmax, backward_task>("softmax");
const Function operators::library::cross_entropy_forward =
    function_of<fk_softmax, losses_task>("softmax");
const Function operators::library::cross_entropy_backward =
    function_of<fk_softmax, losses_backward_task>("softmax");

extern "C" int fk_softmax_workspace(const fk_softmax* softmax, size_t* bytes) {
  return query(softmax_forward, softmax, bytes);
}

extern "C" int fk_softmax_backward_workspace(const fk_softmax* softmax, size_t* bytes) {
  return query(softmax_backward, softmax, bytes);
}

extern "C" int fk_cross_entropy_workspace(const fk_softmax* softmax, size_t* bytes) {
  return query(cross_entropy_forward, softmax, bytes);
}

extern "C" int fk_cross_entropy_backward_workspace(const fk_softmax* softmax, size_t* bytes) {
  return query(cross_entropy_backward, softmax, bytes);
}

extern "C" int fk_softmax_forward(const fk_softmax* softmax, const void* x, const void* w,
                                  void* probs, void* workspace, size_t workspace_bytes,
                                  struct CUstream_st* stream) {
  return call(softmax_forward, softmax, {x, w, probs}, workspace, workspace_bytes, stream);
}

extern "C" int fk_softmax_backward(const fk_softmax* softmax, const void* d_probs, const void* x,
                                   const void* w, const void* probs, void* d_x, void* d_w,
                                   void* workspace, size_t workspace_bytes,
                                   struct CUstream_st* stream) {
  return call(softmax_backward, softmax, {d_probs, x, w, probs, d_x, d_w}, workspace,
              workspace_bytes, stream);
}

extern "C" int fk_cross_entropy_forward(const fk_softmax* softmax, const void* x, const void* w,
                                        const void* labels, void* losses, void* logits,
                                        void* log_sums, void* workspace, size_t workspace_bytes,
                                        struct CUstream_st* stream) {
  return call(cross_entropy_forward, softmax, {x, w, labels, losses, logits, log_sums}, workspace,
              workspace_bytes, stream);
}

extern "C" int fk_cross_entropy_backward(const fk_softmax* softmax, const void* d_losses,
                                         const void* x, const void* w, const void* labels,
                                         const void* logits, const void* log_sums, void* d_x,
                                         void* d_w, void* workspace, size_t workspace_bytes,
                                         struct CUstream_st* stream) {
  return call(cross_entropy_backward, softmax, {d_losses, x, w, labels, logits, log_sums, d_x, d_w},
              workspace, workspace_bytes, stream);
}
