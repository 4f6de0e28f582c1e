// A table of lesson 9: inputs and buffers, what its rows are held to, the library's product, and
// how our kernels become rows.
#pragma once

#include <cublas_v2.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "checks/product/library_product.h"
#include "operators/softmax/rows.cuh"

// D may be cut into at most so many slices; what they leave takes at most so many floats.
constexpr int kMostSlices = 16;
constexpr int64_t kMostSliced = 16 << 20;

// What a product is made for.
struct Layer {
  const Lesson& lesson;
  Problem& problem;
  SoftmaxShape shape;
  Buffer<float> x, W;
  Buffer<float> sliced;  // (slices of D, B, C): parts of the logits
  // From one row to the next. Of a single row any will do, and this suits the copy engine.
  int64_t x_stride = shape.rows > 1 ? shape.inputs : (shape.inputs + 3) / 4 * 4;
  int64_t W_stride = shape.classes;
  int B = static_cast<int>(shape.rows), D = static_cast<int>(shape.inputs);
  int C = static_cast<int>(shape.classes), sms = lesson.device().sms;

  // So many that each has `least` inputs, and that there is room.
  int most_slices(int least) const {
    const int64_t fit = kMostSliced / static_cast<int64_t>(shape.logits());
    return static_cast<int>(std::clamp<int64_t>(std::min<int64_t>(fit, D / least), 1, kMostSlices));
  }
};

// What lesson 9's estimates are worth: some are a third too low.
constexpr Tries kTries = {.most = 40, .hopeless = 1.4};

// What becomes of a product's sums:
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
  float* partial = nullptr;     // (splits of D, B, C): logits of a part of D
  unsigned* arrived = nullptr;  // blocks of these rows that have ended; zero between launches
};

// How long (3) and (2) should take with a product; and where there are others, its tiles in words,
// and what (3) is with them if it is more than one launch.
struct Expected {
  double microseconds = INFINITY, unfused_microseconds = INFINITY;
  std::string tiles = {}, how = {};
};

// One of the lesson's kernels with its tile, its grid, and what it needs besides results.
struct Product {
  const char* name;
  std::function<void(Results)> launch;
  std::function<void(Kernel&)> state_resources;
  bool fuses = true;  // false: launched for probabilities, it is its unfused form
  Expected expected = {};
};

template <typename Function>
Product product_of(const char* name, Function* kernel, int threads, int shared_bytes,
                   std::function<void(Results)> launch) {
  allow_shared_bytes(kernel, shared_bytes);
  return {name, std::move(launch),
          [=](Kernel& row) { row.resources(kernel, threads, shared_bytes); }};
}

// A half fused product: `launch` (results, slices) starts `kernel`, which leaves logits or, of that
// many slices of D, parts of them. Another kernel makes probabilities of them. For rows of up to
// kLeastForParts columns that is the usual softmax, which reads a logit once: maxima and sums would
// save nothing, so without slices nothing is fused. Of longer rows `launch` also leaves the maximum
// and the sum of each of a row's `tiles` tiles, and finish_columns() uses them; of more than
// kRowsForParts only if they do not fit into a block's registers.
constexpr int kLeastForParts = 4096, kRowsForParts = 16;
template <typename Function, typename Launch>
Product half_fused(const Layer& layer, const char* name, Function* kernel, int threads,
                   int shared_bytes, int slices, int tiles, Launch launch) {
  const int least = layer.B > kRowsForParts ? kLongestInRegisters : kLeastForParts;
  const bool parts = slices == 1 && layer.C > least;
  const auto both = [=, sliced = layer.sliced, shape = layer.shape, B = layer.B,
                     C = layer.C](Results results) {
    if (results.epilogue == Epilogue::logits) return launch(results, 1);
    float* out = results.out;
    results.epilogue = parts ? Epilogue::parts : Epilogue::logits;
    if (slices > 1) results.out = sliced;
    launch(results, slices);
    if (parts) {
      launch_early(finish_columns<kSoftmaxThreads>, dim3(B, blocks(C, kPartColumns)),
                   kSoftmaxThreads, 0, out, out, results.parts, C, tiles);
    } else {
      softmax(results.out, out, shape, results.parts, slices);
    }
  };
  Product product = product_of(name, kernel, threads, shared_bytes, both);
  product.fuses = parts || slices > 1;
  return product;
}

// Copies rows, `cols` wide, into rows `stride` floats apart, a block a row: for the copy engine.
template <int kThreads>
__global__ void align_rows(const float* from, float* to, int cols, int64_t stride) {
  start_next_kernel();
  wait_for_previous_kernel();
  constexpr int kAtOnce = 4;  // loads under way: the compiler must not move one before a store
  from += static_cast<size_t>(blockIdx.x) * cols, to += blockIdx.x * stride;
  for (int c = threadIdx.x; c < cols; c += kAtOnce * kThreads) {
    float v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (c + i * kThreads < cols) v[i] = from[c + i * kThreads];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (c + i * kThreads < cols) to[c + i * kThreads] = v[i];
    }
  }
}

// The layer, and a launch that copies rows of x, of W, or of both, where they do not start at
// multiples of 16 bytes, into rows that do. That time counts.
inline std::pair<Layer, std::function<void()>> with_aligned_rows(const Layer& layer, bool of_x,
                                                                 bool of_W) {
  Layer aligned = layer;
  std::function<void()> launch;
  const auto align = [&](Buffer<float>& matrix, int64_t& stride, int rows, int cols) {
    if (cols % 4 == 0) return;
    stride = blocks(cols, 4) * 4;
    const auto from = matrix, to = layer.problem.workspace<float>(rows * stride);
    launch = [=, before = launch, stride = stride] {
      if (before) before();
      launch_early(align_rows<256>, rows, 256, 0, from, to, cols, stride);
    };
    matrix = to;
  };
  if (of_x) align(aligned.x, aligned.x_stride, layer.B, layer.D);
  if (of_W) align(aligned.W, aligned.W_stride, layer.D, layer.C);
  return {aligned, launch};
}

// How a product is to be made, and what to expect of it: that counts its kernel, the softmax after
// it, and copies of x or of W with aligned rows.
struct Plan {
  Expected expected = {};
  bool copies_x = false, copies_W = false;
  std::function<Product(const Layer&)> make = {};

  double microseconds() const { return expected.microseconds; }
  bool operator<(const Plan& other) const { return microseconds() < other.microseconds(); }
};

// The products of the plans that are tried. Plans that copy the same matrices share the copies.
inline std::vector<Product> products_of(const Layer& layer, const std::vector<Plan>& plans) {
  std::map<std::pair<bool, bool>, std::pair<Layer, std::function<void()>>> aligned;
  std::vector<Product> products;
  for (const Plan& plan : plans) {
    const bool hopeless = plan.microseconds() > kTries.hopeless * plans[0].microseconds();
    if (hopeless || products.size() == kTries.most) break;
    const std::pair copies = {plan.copies_x, plan.copies_W};
    if (!aligned.contains(copies)) {
      aligned.emplace(copies, with_aligned_rows(layer, plan.copies_x, plan.copies_W));
    }
    const auto& [inputs, align] = aligned.at(copies);
    Product& product = products.emplace_back(plan.make(inputs));
    product.expected = plan.expected;
    if (align) {
      product.launch = [align = align, launch = product.launch](Results results) {
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

// logits (B, C) = x W by cuBLAS; row-major: W and x swapped, see lesson 4.
inline void library_product(cublasHandle_t blas, const float* x, const float* W, float* logits,
                            const SoftmaxShape& shape, cublasComputeType_t compute) {
  const float one = 1, zero = 0;
  const int B = static_cast<int>(shape.rows), D = static_cast<int>(shape.inputs),
            C = static_cast<int>(shape.classes);
  CUBLAS_CHECK(cublasGemmEx(blas, CUBLAS_OP_N, CUBLAS_OP_N, C, B, D, &one, W, CUDA_R_32F, C, x,
                            CUDA_R_32F, D, &zero, logits, CUDA_R_32F, C, compute,
                            CUBLAS_GEMM_DEFAULT));
}

inline std::string text_of(const SoftmaxShape& shape) {
  return std::to_string(shape.rows) + "x" + std::to_string(shape.inputs) + "x" +
         std::to_string(shape.classes);
}

// What a table is about. only_infinite, with --hard-rows: rows of only -inf, beside others. Of
// these tables what is verified are their NaN.
enum class Kind { tf32, fp32, only_infinite };

// A table of softmax(x W) with its buffers, and the rows that such tables have in common.
struct SoftmaxTable : Layer {
  Kind kind;
  std::string name;
  Buffer<float> probs;
  Buffer<float> logits;  // of the unfused ways
  Buffer<float> parts;   // of long rows
  Buffer<float> result;  // what is verified: probs, or that with its NaN marked

  SoftmaxTable(Lesson& lesson, Kind kind, const SoftmaxShape& shape)
      : Layer(layer_of(lesson, kind, shape)),
        kind(kind),
        name(name_of(kind, shape)),
        probs(problem.output<float>(shape.rows * shape.classes)),
        logits(problem.output<float>(shape.rows * shape.classes)),
        parts(problem.workspace<float>(C > kLeastForParts ? 2 * shape.rows * (blocks(C, 32) + 1)
                                                          : 2)),
        result(kind == Kind::only_infinite ? problem.output<float>(probs.size()) : probs) {
    problem.in_graph();
  }

  static std::string name_of(Kind kind, const SoftmaxShape& shape) {
    const char* names[] = {"TF32 ", "fp32 ", "only -inf "};
    return names[static_cast<int>(kind)] + text_of(shape);
  }

  static Layer layer_of(Lesson& lesson, Kind kind, const SoftmaxShape& shape) {
    // Where a block's steps end is an int, too; and a grid's y counts the parts of a row.
    constexpr int64_t kMostInputs = INT32_MAX - 1023, kMostClasses = int64_t{65535} * kPartColumns;
    if (shape.inputs > kMostInputs || shape.classes > kMostClasses) {
      fail(kBadUsage, "at most %lld inputs and %lld classes", static_cast<long long>(kMostInputs),
           static_cast<long long>(kMostClasses));
    }
    const bool tf32 = kind == Kind::tf32;
    Problem& problem = lesson.problem(
        name_of(kind, shape), {{"B", shape.rows}, {"D", shape.inputs}, {"C", shape.classes}},
        tf32 ? "tf32" : "fp32", {.flops = shape.flops(), .bytes = shape.bytes(sizeof(float))},
        tf32 ? Rate::tf32 : Rate::fp32);
    const auto x = problem.input<float>(shape.rows * shape.inputs);
    const auto W = problem.input<float>(shape.inputs * shape.classes,
                                        kWeightScale / sqrt(static_cast<double>(shape.inputs)));
    const double floats = std::min<double>(kMostSlices * shape.logits(), kMostSliced);
    const auto sliced = problem.output<float>(static_cast<size_t>(floats));
    return {lesson, problem, shape, x, W, sliced};
  }

  Kernel& add(const std::string& row, Role role, int needs_cc, std::function<void()> launch) const {
    return problem.kernel(row, role, verifiable(launch)).needs(needs_cc);
  }
  void add(const std::string& row, Role role, int needs_cc, std::vector<Way> ways) const {
    for (Way& way : ways) way.launch = verifiable(way.launch);
    problem.kernel(row, role, ways, kTries).needs(needs_cc);
  }
  std::function<void()> verifiable(const std::function<void()>& launch) const {
    if (kind != Kind::only_infinite) return launch;
    return [launch, probs = probs, result = result] {
      launch();
      mark_nan(probs, result, probs.size());
    };
  }

  void softmax_of_logits() const {
    softmax(logits, probs, shape, reinterpret_cast<float2*>(parts.data()));
  }

  // (1): cuBLAS's own choice, or one of cuBLASLt's candidates if that is faster; and our softmax.
  void add_library(cublasHandle_t blas) const {
    const bool tf32 = kind == Kind::tf32;
    const auto compute = tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    std::vector<Way> ways;
    const auto add_product = [&](const std::string& name, const std::function<void()>& product) {
      const auto launch = [product, *this] {
        product();
        softmax_of_logits();
      };
      // Nobody says how long which of them takes: all are tried.
      ways.push_back({name, shape.flops() / (tf32 ? 400e6 : 50e6), launch});
    };
    add_product("cuBLAS", [=, *this] { library_product(blas, x, W, logits, shape, compute); });
    const LibraryProduct::Shape product_shape = {shape.rows, shape.classes, shape.inputs};
    const auto product =
        std::make_shared<LibraryProduct>(problem, product_shape, CUDA_R_32F, compute);
    for (int i = 0; i < product->candidates(); ++i) {
      add_product("cuBLASLt, candidate " + std::to_string(i),
                  [=, *this] { product->call(i, x, W, logits); });
    }
    add("library", Role::library, tf32 ? 80 : 0, ways);
  }

  Results results(Epilogue epilogue) const {
    float* out = epilogue == Epilogue::softmax ? probs : logits;
    return {.epilogue = epilogue, .out = out, .parts = reinterpret_cast<float2*>(parts.data())};
  }

  // Rows (2) and (3), by the same kind of product, each with the fastest of its tiles; no row (3)
  // if with none of them it differs from (2).
  void add_ours(const std::vector<Product>& products, const std::string& suffix,
                int needs_cc) const {
    const std::string kind = products[0].name + suffix, fused = "fused " + kind;
    std::vector<Way> with_logits, with_softmax;
    for (const Product& product : products) {
      const auto launch_unfused = [product, *this] {
        product.launch(results(Epilogue::logits));
        softmax_of_logits();
      };
      const auto launch_fused = [product, *this] { product.launch(results(Epilogue::softmax)); };
      // Half fused or not, (2) is the same.
      const auto& [microseconds, unfused_microseconds, tiles, how] = product.expected;
      const auto same = [&name = tiles](const Way& way) { return way.name == name; };
      if (std::none_of(with_logits.begin(), with_logits.end(), same)) {
        with_logits.push_back(
            {tiles, unfused_microseconds, launch_unfused, product.state_resources});
      }
      if (product.fuses) {
        with_softmax.push_back({tiles + how, microseconds, launch_fused, product.state_resources});
      }
    }
    add("un" + fused, Role::ours, needs_cc, with_logits);
    const std::string what = name + ", " + kind + ": ";
    if (!with_softmax.empty()) {
      add(fused, Role::ours, needs_cc, with_softmax);
      problem.compare(fused, "un" + fused, what + "fused (3) against unfused (2), % times faster.");
    }
    problem.compare("un" + fused, "library",
                    what + "unfused (2) against library (1), % times faster.");
  }

  // What every row of the table is held to.
  void verify(cublasHandle_t blas, bool hard_rows) const {
    const bool only_infinite = kind == Kind::only_infinite;
    const auto expected = problem.reference(probs.size());
    if (only_infinite) {
      problem.adjust_inputs([=, *this] { make_only_minus_infinity(x, W, shape); });
    } else if (hard_rows) {
      problem.adjust_inputs([=, *this] { make_hard(x, W, shape); });
    }
    problem.reference_from(softmax_scratch(shape), [=, *this] {
      reference_softmax<float>(blas, x, W, expected, shape);
      if (only_infinite) mark_nan(expected, expected.size());
    });
    problem.check(
        result, expected,
        kind != Kind::fp32
            ? softmax_tolerance(shape.inputs, tensor_core_sum(shape.inputs), kRoundoffTf32)
            : softmax_tolerance(shape.inputs, kRoundoffFp32));
  }
};

// A line a shape: what whole fusion saves (half fused saves none of it).
inline void add_bytes_note(Lesson& lesson, const SoftmaxShape& shape) {
  char text[160];
  snprintf(text, sizeof text,
           "%s: fused in one launch, logits are neither written nor read: 2 x %.4g of %.4g MB.",
           text_of(shape).c_str(), 4e-6 * shape.logits(),
           1e-6 * (shape.bytes(sizeof(float)) + 8 * shape.logits()));
  lesson.note(text);
}
