// A layer of softmax(x W) as its kernels see it: its memory, what becomes of a product's sums, and
// how products become plans, of which some are tried.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "operators/caller.h"
#include "operators/estimate.h"
#include "operators/product/layouts/aligned_rows.cuh"
#include "operators/softmax/rows.cuh"
#include "primitives/early_launch.cuh"
#include "primitives/launch.h"

namespace operators::softmax {

using namespace primitives;
using operators::Caller, operators::Memory;

// Split-K over blocks cuts D into at most kMostSlices slices. All slices together leave at most
// kMostSliced floats.
constexpr int kMostSlices = 16;
constexpr int64_t kMostSliced = 16 << 20;

// Microseconds that an early launch of a softmax adds: its first loads, its last stores.
constexpr double kEarlyLaunch = 0.5;

// A layer: its matrices and sizes, and where it gets memory from.
struct Layer {
  Caller caller;
  SoftmaxShape shape;
  Memory<float> x, W;
  Memory<float> sliced;  // (slices of D, B, C): partial logits
  // How many elements two rows are apart. With one row any number will do, and this one suits the
  // copy engine.
  int64_t x_stride = shape.rows > 1 ? shape.inputs : (shape.inputs + 3) / 4 * 4;
  int64_t W_stride = shape.classes;
  int B = static_cast<int>(shape.rows), D = static_cast<int>(shape.inputs);
  int C = static_cast<int>(shape.classes), sms = multiprocessors();
  int64_t slices_at_most = kMostSlices;

  // Launches a kernel that reads x or W. It is launched early, unless other work of the caller's
  // may come before it, which might still be writing them.
  template <typename... Parameters, typename... Arguments>
  void launch(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, size_t shared_bytes,
              const Arguments&... arguments) const {
    launch_clusters_on(caller.stream, kernel, 1, caller.alone, blocks, threads, shared_bytes,
                       arguments...);
  }

  // The largest number of slices such that each has at least `least` inputs, and all fit into
  // `sliced`.
  int most_slices(int least) const {
    const int64_t fit = kMostSliced / static_cast<int64_t>(shape.logits());
    return static_cast<int>(
        std::clamp<int64_t>(std::min<int64_t>(fit, D / least), 1, slices_at_most));
  }
  /// How long all logits (rows, classes) take on their way from or to memory. The L2 cache holds
  /// some of them, so not all go there. (The estimates here, and those of the kinds of kernels,
  /// were fitted to shapes drawn at random, on an H200.)
  double logits_microseconds() const { return 0.77 * 4 * shape.logits() / memory_rate(); }
  /// How long a softmax takes that follows a product. It reads the logits of all slices, and writes
  /// probabilities. Rows that are not multiples of 16 bytes are read and written number by number.
  /// If slices of a long row are added up, a launch of its own does that, and writes logits.
  double softmax_microseconds(int slices = 1) const {
    const double width = C % 4 != 0 ? 1.43 : 1, slice = 310 / cycles();
    const bool two = slices > 1 && C > kLongestInRegisters;
    return kEarlyLaunch + (slices + 1) * width * logits_microseconds() + (slices - 1) * slice +
           (two ? kEarlyLaunch + 2 * logits_microseconds() : 0);
  }
};

// Of the plans of a kind at most so many are tried.
constexpr size_t kMostPlans = 24;

// The kinds of kernels, which softmax_product.cuh describes.
enum class Kernels : int64_t { rows_split, few_rows, tiles, online, narrow, cluster, exchange };

// What becomes of a product's sums.
enum class Epilogue {
  logits,   // out = logits: the product of the unfused way
  parts,    // the same, and of each tile's part of a row its maximum and its sum: half fused
  softmax,  // out = probs
};

struct Results {
  Epilogue epilogue;
  float* out;               // (B, C); of slices of D (slices, B, C)
  float2* parts = nullptr;  // (B, tiles of C): a tile's maximum, and sum relative to it
  // What blocks of fused tiles leave to the last one of those that share a row.
  float* partial = nullptr;     // (splits of D, B, C): partial logits
  unsigned* arrived = nullptr;  // blocks of these rows that have ended; zero between launches
};

// Takes a row's logits, which are spread over the lanes of a warp, and does what the epilogue says.
// kLanes lanes share the row, or its tile number `tile` of `tiles`, which is kLanes * kValues
// columns wide. Lane l has its columns l, l + kLanes, and so on. Where there is no such row (not
// `exists`), the lanes take part in the shuffles, and write nothing.
template <int kValues, int kLanes = 32>
__device__ void finish_row(float (&v)[kValues], int row, int C, const Results& results,
                           int tile = 0, int tiles = 1, bool exists = true) {
  const int col = kLanes * kValues * tile + static_cast<int>(threadIdx.x) % kLanes;
  const bool softmax = results.epilogue == Epilogue::softmax;
  float factor = 1;
  if (results.epilogue != Epilogue::logits) {
    float largest = minus_infinity(), sum = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (col + kLanes * i >= C) v[i] = minus_infinity();
      largest = fmaxf(largest, v[i]);
    }
    largest = lanes_max<kLanes>(largest);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const float exponential = expf(v[i] - base_of(largest));
      sum += exponential;
      if (softmax) v[i] = exponential;
    }
    sum = lanes_sum<kLanes>(sum);
    if (softmax) factor = 1 / sum;
    if (!softmax && threadIdx.x % kLanes == 0) {
      results.parts[static_cast<size_t>(row) * tiles + tile] = {largest, sum};
    }
  }
  float* out = results.out + static_cast<size_t>(row) * C + col;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    if (exists && col + kLanes * i < C) out[kLanes * i] = v[i] * factor;
  }
}

// How long a product should take, in microseconds: fused, and unfused, with a softmax after it.
// `tiles` names its tiles, and `tile` is their id, if its kind has several. D may be cut into
// slices, and `how` says what fused means if that is more than one launch.
struct Expected {
  double microseconds = INFINITY, unfused_microseconds = INFINITY;
  WayId tile = 0;
  int slices = 0;  // 0: one launch
  std::string tiles = {}, how = {};
};

// A kernel that is ready to be launched, but for the results.
struct Product {
  Kernels kind;
  std::function<void(Results)> launch;
  int shared_bytes;
  bool fuses = true;  // false: for probabilities it launches a product and a softmax
  Expected expected = {};
  // Of a half fused one, for logits alone. With one slice results.out becomes x W, and, if the
  // epilogue is `parts`, each row's `parts` maxima and sums go to results.parts. With several,
  // results.out (slices, B, C) becomes partial logits, which somebody adds up.
  std::function<void(Results)> launch_alone = {};
  int parts = 0;
};

inline Product product_of(Kernels kind, AnyKernel kernel, int shared_bytes,
                          std::function<void(Results)> launch) {
  allow_shared_bytes(kernel, shared_bytes);
  return {kind, std::move(launch), shared_bytes};
}

// A product in two launches. `launch` (results, slices) starts `kernel`, which leaves logits, or
// partial logits of so many slices of D. A second kernel makes probabilities of them:
//
//   - finish_columns(), for rows of more than kLeastForParts columns, without slices. Then `launch`
//     also leaves the maximum and the sum of each of a row's `tiles` tiles, so that each logit is
//     read once. That is half fused. If there are more than kRowsForParts rows, it is so only for
//     rows that do not fit into a block's registers.
//   - In all other cases it is the usual softmax, which reads rows that fit once, too. Without
//     slices nothing is fused then.
constexpr int kLeastForParts = 4096, kRowsForParts = 16;
inline bool leaves_parts(const Layer& layer) {
  return layer.C > (layer.B > kRowsForParts ? kLongestInRegisters : kLeastForParts);
}
inline Product half_fused(const Layer& layer, Kernels kind, AnyKernel kernel, int shared_bytes,
                          int slices, int tiles,
                          const std::function<void(const Results&, int)>& launch) {
  const bool parts = slices == 1 && leaves_parts(layer);
  const auto both = [=, sliced = layer.sliced, shape = layer.shape, B = layer.B, C = layer.C,
                     stream = layer.caller.stream](Results results) {
    if (results.epilogue == Epilogue::logits) return launch(results, 1);
    float* out = results.out;
    results.epilogue = parts ? Epilogue::parts : Epilogue::logits;
    if (slices > 1) results.out = sliced;
    launch(results, slices);
    if (parts) {
      launch_clusters_on(stream, finish_columns<kSoftmaxThreads, float>, 1, true,
                         dim3(B, blocks_for(C, kPartColumns)), kSoftmaxThreads, 0, out, out,
                         results.parts, C, tiles);
    } else {
      softmax<float>(results.out, out, shape, results.parts, slices, stream);
    }
  };
  Product product = product_of(kind, kernel, shared_bytes, both);
  product.fuses = parts || slices > 1;
  product.launch_alone = [=](const Results& results) { launch(results, slices); };
  product.parts = tiles;
  return product;
}

// Returns the layer with x, W or both in rows that begin at multiples of 16 bytes, and a launch
// that copies them there. The launch is empty if nothing has to be copied. Its time counts for the
// products that use the copies.
inline std::pair<Layer, std::function<void()>> with_aligned_rows(const Layer& layer, bool of_x,
                                                                 bool of_W) {
  struct Copy {
    Memory<float> from, to;
    int rows, cols, stride;
  };
  Layer aligned = layer;
  std::vector<Copy> copies;
  const auto align = [&](Memory<float>& matrix, int64_t& stride, int rows, int cols) {
    if (cols % 4 == 0) return;
    stride = blocks_for(cols, 4) * 4;
    const auto to = layer.caller.workspace.any<float>(rows * stride);
    copies.push_back({matrix, to, rows, cols, static_cast<int>(stride)});
    matrix = to;
  };
  if (of_x) align(aligned.x, aligned.x_stride, layer.B, layer.D);
  if (of_W) align(aligned.W, aligned.W_stride, layer.D, layer.C);
  if (copies.empty()) return {aligned, nullptr};
  return {aligned, [copies, caller = layer.caller] {
            product::RowCopies<float, 2> rows = {};
            for (size_t i = 0; i < copies.size(); ++i) {
              const Copy& copy = copies[i];
              rows.of[i] = {copy.from, copy.to, copy.rows, copy.cols, copy.stride};
            }
            product::launch_align_rows<float, 2>(rows, caller.stream, caller.alone);
          }};
}

// A plan: how a product is made, whether x or W has to be copied into aligned rows first, and how
// long all of that should take, with the softmax.
struct Plan {
  Expected expected = {};
  bool copies_x = false, copies_W = false;
  std::function<Product(const Layer&)> make = {};
  double of_logits = INFINITY;  // microseconds without the softmax

  double microseconds() const { return expected.microseconds; }
  bool operator<(const Plan& other) const { return microseconds() < other.microseconds(); }
};

// The plans that are tried: those that should be the fastest, fused or unfused. If not `all`, only
// the one that should be the fastest.
inline std::vector<Plan> plans_to_try(std::vector<Plan> plans, bool all) {
  std::vector<Plan> tried;
  const auto take = [&](size_t most, auto microseconds) {
    const size_t count = common::worth_trying(plans, most, microseconds);
    const auto end = plans.begin() + static_cast<std::ptrdiff_t>(count);
    tried.insert(tried.end(), plans.begin(), end);
    plans.erase(plans.begin(), end);
  };
  take(all ? kMostPlans : 1, [](const Plan& plan) { return plan.microseconds(); });
  take(all ? kMostPlans / 3 : 0,
       [](const Plan& plan) { return plan.expected.unfused_microseconds; });
  return tried;
}

// The products of the plans that are tried. Plans that need the same copies share them.
inline std::vector<Product> products_of(const Layer& layer, const std::vector<Plan>& plans) {
  std::map<std::pair<bool, bool>, std::pair<Layer, std::function<void()>>> aligned;
  std::vector<Product> products;
  for (const Plan& plan : plans_to_try(plans, layer.caller.search.all)) {
    const std::pair copies = {plan.copies_x, plan.copies_W};
    if (!aligned.contains(copies)) {
      aligned.emplace(copies, with_aligned_rows(layer, plan.copies_x, plan.copies_W));
    }
    const auto& [inputs, align] = aligned.at(copies);
    Product& product = products.emplace_back(plan.make(inputs));
    product.expected = plan.expected;
    if (!align) continue;
    for (auto* const launch : {&product.launch, &product.launch_alone}) {
      *launch = [align = align, launch = *launch](Results results) {
        align();
        launch(results);
      };
    }
  }
  return products;
}

inline std::string text_of_tiles(int rows, int cols, int cluster, bool copies_x) {
  return "tile " + std::to_string(rows) + " x " + std::to_string(cols) +
         "; cluster: " + std::to_string(cluster) + (copies_x ? "; x copied" : "");
}

}  // namespace operators::softmax
