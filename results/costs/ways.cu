// Times all ways of products in fp16 or TF32 on Hopper, for fit.py, which builds this program.
//
//     ways half|tf32 SECONDS SEED > FILE
//
// Sizes are drawn at random: rows and columns from 64 to 8192, depths to 16384, each logarithm
// evenly, and every other number of columns, and every other depth, a multiple of 8. The first line
// says what the estimates know of the device, each further one is a product: its sizes, the
// microseconds of cuBLAS, and of each way whose estimate is at most 1.35 of the least one its name,
// its microseconds, its estimate, and from what that is made. Each way is in a CUDA graph of its
// own, so often that this takes 150 us. The graphs take turns, and the median of five counts.

#include <cublas_v2.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

// estimate_of() is another one here: it keeps from what each estimate is made.
#define estimate_of untold_estimate_of
#include "operators/product/estimate.h"
#undef estimate_of

namespace operators::product {
struct Made {
  TileWork tile;
  ProductMatrices of;
  Division division;
};
inline std::map<double, Made> made;  ///< by estimates

inline Estimate estimate_of(const ProductCosts& cost, const TileWork& tile,
                            const TileFactors& factors, const ProductMatrices& of,
                            double more = 0) {
  return [=, estimate = untold_estimate_of(cost, tile, factors, of, more)](const Division& by) {
    const double found = estimate(by);
    made[found] = {tile, of, by};
    return found;
  };
}
}  // namespace operators::product

#include "common/check.h"
#include "common/measure/event.h"
#include "common/measure/graph.h"
#include "operators/product/half_product.cuh"
#include "operators/product/tf32_product.cuh"

using namespace operators;
using namespace operators::product;

namespace {

constexpr double kGraph = 150, kMargin = 1.35, kLeast = 8;  ///< us; of the best estimate; us
constexpr int kMostRows = 8192, kMostDepth = 16384, kRounds = 5;
const cudaStream_t kStream = cudaStreamPerThread;
constexpr size_t kZeros = size_t{64} << 20, kRoom = size_t{3} << 30;  ///< bytes of a workspace

template <typename T>
__global__ void fill(T* to, size_t count, float scale) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    uint64_t hash = (i + 1) * 0x9E3779B97F4A7C15;
    hash = (hash ^ hash >> 29) * 0xBF58476D1CE4E5B9;
    float sum = -2;  // of four numbers from 0 to 1
    for (int part = 0; part < 64; part += 16) sum += ((hash >> part) & 0xffff) / 65536.0f;
    to[i] = T(sum * scale);
  }
}

/// A launch, so often that it can be timed.
class Replayed {
 public:
  explicit Replayed(const std::function<void()>& launch) {
    launch();
    graph_ = std::make_unique<common::Graph>(launch, 1);
    const double once = std::min(microseconds(), microseconds());
    calls_ = std::clamp(static_cast<int>(kGraph / once + 0.5), 1, 100);
    graph_ = std::make_unique<common::Graph>(launch, calls_);
  }

  double microseconds() {
    start_.record();
    graph_->launch();
    stop_.record();
    return 1e3 * stop_.since(start_) / calls_;
  }

 private:
  std::unique_ptr<common::Graph> graph_;
  common::Event start_, stop_;
  int calls_ = 1;
};

/// Bytes of the device, given out one after another.
struct Room {
  char* data = nullptr;
  size_t size, used = 0;

  explicit Room(size_t bytes) : size(bytes) { CUDA_CHECK(cudaMalloc(&data, bytes)); }
  ~Room() { cudaFree(data); }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  Memory<char> take(size_t bytes) {
    char* const at = data + used;
    used += (bytes + 255) / 256 * 256;
    if (used > size) throw primitives::Error("a way needs more room than there is");
    return Memory<char>([at] { return at; }, bytes);
  }
};

template <typename T>
class Measurement {
 public:
  Measurement() : a_(kBytes), b_(kBytes), c_(kBytes), of_library_(32 << 20) {
    CUBLAS_CHECK(cublasCreate(&library_));
    CUBLAS_CHECK(cublasSetStream(library_, kStream));
    CUBLAS_CHECK(cublasSetWorkspace(library_, of_library_.data, of_library_.size));
    fill<T><<<1024, 256>>>(reinterpret_cast<T*>(a_.data), kBytes / sizeof(T), 1);
    fill<T><<<1024, 256>>>(reinterpret_cast<T*>(b_.data), kBytes / sizeof(T), 1.0f / 64);
    CUDA_CHECK(cudaDeviceSynchronize());
  }
  ~Measurement() { cublasDestroy(library_); }
  Measurement(const Measurement&) = delete;
  Measurement& operator=(const Measurement&) = delete;

  void measure(const ProductShape& shape) {
    room_.used = zeros_.used = 0;
    CUDA_CHECK(cudaMemsetAsync(zeros_.data, 0, kZeros, kStream));
    made.clear();
    std::vector<Way> ways = ways_of(shape);
    const double best = common::fastest(ways)->microseconds;
    if (best < kLeast) return;
    std::erase_if(ways, [&](const Way& way) { return way.microseconds > kMargin * best; });
    std::vector<std::unique_ptr<Replayed>> graphs;
    graphs.push_back(std::make_unique<Replayed>([&] { by_library(shape); }));
    for (const Way& way : ways) {
      graphs.push_back(std::make_unique<Replayed>(way.launch));
    }
    std::vector<std::vector<double>> took(graphs.size());
    for (int round = 0; round <= kRounds; ++round) {
      for (size_t i = 0; i < graphs.size(); ++i) {
        const double microseconds = graphs[i]->microseconds();
        if (round > 0) took[i].push_back(microseconds);  // the first one warms up
      }
    }
    for (auto& each : took) std::sort(each.begin(), each.end());
    std::printf("{\"shape\": [%d, %d, %d], \"library\": %.2f, \"ways\": [", shape.rows, shape.cols,
                shape.depth, took[0][kRounds / 2]);
    for (size_t i = 0; i < ways.size(); ++i) {
      std::printf("%s[\"%s\", %.2f, %.9g", i ? ", " : "", ways[i].name.c_str(),
                  took[i + 1][kRounds / 2], ways[i].microseconds);
      print_made(ways[i], shape);
      std::printf("]");
    }
    std::printf("]}\n");
    std::fflush(stdout);
  }

 private:
  static constexpr size_t kBytes = size_t{kMostRows} * kMostDepth * sizeof(T) + 4096;
  static constexpr bool kHalf = sizeof(T) == 2;

  std::vector<Way> ways_of(const ProductShape& shape) {
    const auto memory = [](const Room& room) {
      return Memory<T>([at = room.data] { return reinterpret_cast<T*>(at); }, kBytes / sizeof(T));
    };
    const Caller caller{{[this](size_t bytes) { return room_.take(bytes); },
                         [this](size_t bytes) { return zeros_.take(bytes); }},
                        kStream,
                        false,
                        {.all = true}};
    if constexpr (kHalf) {
      return HalfProduct<T>(caller, memory(a_), memory(b_), memory(c_), shape).ways();
    } else {
      return Tf32Product<Math::tf32>(caller, memory(a_), memory(b_), memory(c_), shape).ways();
    }
  }

  void by_library(const ProductShape& shape) {
    const float one = 1, zero = 0;
    const cudaDataType type = kHalf ? CUDA_R_16F : CUDA_R_32F;
    CUBLAS_CHECK(cublasGemmEx(
        library_, CUBLAS_OP_N, CUBLAS_OP_N, shape.cols, shape.rows, shape.depth, &one, b_.data,
        type, shape.cols, a_.data, type, shape.depth, &zero, c_.data, type, shape.cols,
        kHalf ? CUBLAS_COMPUTE_32F : CUBLAS_COMPUTE_32F_FAST_TF32, CUBLAS_GEMM_DEFAULT));
  }

  /// Nothing of ways with estimates of other kinds.
  static void print_made(const Way& way, const ProductShape& shape) {
    const ProductCosts& cost = kHalf ? kHalfCosts : kTf32Costs;
    double alone = way.microseconds, added = 0;
    const size_t slices = way.name.find("slices: ");
    if (way.name.find("added up by a second launch") != std::string::npos) {
      const double elements = shape.rows * 4.0 * ceil_div(shape.cols, 4);
      added = 4.0 * std::atoi(way.name.c_str() + slices + 8) * elements / memory_rate();
      alone -= cost.added + cost.added_bytes * added;
    }
    auto found = made.lower_bound(alone * (1 - 1e-12));
    if (found == made.end() || found->first > alone * (1 + 1e-12)) return;
    const auto& [tile, of, by] = found->second;
    std::printf(", %d, %d, %d, %d, %d, %d, %d, %.9g, %.9g, %.9g, %.9g, %.9g, %.9g", tile.rows,
                tile.cols, tile.stack, tile.side, tile.transposed, tile.read_once, tile.consumers,
                tile.multiplied, tile.shared_lines, tile.fetched_a, tile.fetched_b, tile.gathering,
                tile.copied);
    std::printf(", %lld, %lld, %lld", static_cast<long long>(of.pitch_a),
                static_cast<long long>(of.pitch_b), static_cast<long long>(of.pitch_c));
    std::printf(", %d, %.9g, %.9g, %.9g, %.9g, %.9g, %d, %.9g", by.clusters, by.rounds, by.finished,
                by.shared, by.places, by.pieces, by.slices_of_cluster, added);
  }

  cublasHandle_t library_ = nullptr;
  Room a_, b_, c_, of_library_, room_{kRoom}, zeros_{kZeros};
};

template <typename T>
void measure_for(double seconds, int seed) {
  std::printf("{\"cycles\": %g, \"memory_rate\": %g, \"multiprocessors\": %d}\n", cycles(),
              memory_rate(), multiprocessors());
  std::mt19937_64 random(seed);
  const auto draw = [&](int most, bool any) {
    const double part = std::uniform_real_distribution<double>(0, 1)(random);
    const int of = any || random() % 2 ? 1 : 8;
    return std::max(of, static_cast<int>(64 * std::pow(most / 64.0, part)) / of * of);
  };
  Measurement<T> measurement;
  const auto start = std::chrono::steady_clock::now();
  while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() <
         seconds) {
    const int rows = draw(kMostRows, true), cols = draw(kMostRows, false);
    measurement.measure({rows, cols, draw(kMostDepth, false)});
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string type = argc == 4 ? argv[1] : "";
  if (type != "half" && type != "tf32") {
    std::fprintf(stderr, "usage: ways half|tf32 SECONDS SEED\n");
    return 2;
  }
  try {
    type == "half" ? measure_for<half>(std::atof(argv[2]), std::atoi(argv[3]))
                   : measure_for<float>(std::atof(argv[2]), std::atoi(argv[3]));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 3;
  }
  return 0;
}
