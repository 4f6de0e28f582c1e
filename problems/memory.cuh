// bonus_memory: chains of addresses, and what its kernels should find.
#pragma once

#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "common/lesson.h"

namespace problems {

using namespace common;

/// A line of a chain. Caches know lines of 128 bytes.
struct alignas(128) Line {
  unsigned long long next;  ///< address of another line
};

/// Lines on the device, each with the address of the next, and what the host knows of them. They
/// are visited in a random order, each once before the first comes again.
struct Chain {
  Chain(const Chain&) = delete;
  Chain(Problem& problem, int64_t count)
      : next(count), lines(problem.input<float>(count * kFloats)) {
    problem.adjust_inputs([this] { link(); });
  }

  /// Sattolo's shuffle, by the random numbers that the lines hold so far: of all orders one that is
  /// a single cycle.
  void link() {
    std::vector<float> image(lines.size());
    CUDA_CHECK(cudaMemcpy(image.data(), lines, image.size() * sizeof(float), cudaMemcpyDefault));
    for (size_t i = 0; i < next.size(); ++i) next[i] = i;
    for (size_t i = next.size() - 1; i > 0; --i) {
      const double chance = (image[i * kFloats] + 1.0) / 2;  // 0 <= chance < 1
      std::swap(next[i], next[static_cast<size_t>(chance * static_cast<double>(i))]);
    }
    for (size_t i = 0; i < next.size(); ++i) {
      const unsigned long long address = reinterpret_cast<unsigned long long>(get() + next[i]);
      std::memcpy(&image[i * kFloats], &address, sizeof address);
    }
    CUDA_CHECK(cudaMemcpy(lines, image.data(), image.size() * sizeof(float), cudaMemcpyDefault));
  }
  /// The number of the line where so many steps from the first one end.
  double end(int64_t steps) const {
    size_t at = 0;
    for (int64_t i = 0; i < steps; ++i) at = next[at];
    return static_cast<double>(at);
  }
  int lap() const { return static_cast<int>(next.size()); }
  const Line* get() const { return reinterpret_cast<const Line*>(lines.data()); }

  static constexpr int kFloats = sizeof(Line) / sizeof(float);
  std::vector<size_t> next;
  Buffer<float> lines;
};

/// Where x <- x x + c ends after so many steps from the number at `first`, on the device.
inline double end_of_squares(const float* first, float c, int steps) {
  float x = 0;
  CUDA_CHECK(cudaMemcpy(&x, first, sizeof x, cudaMemcpyDefault));
  for (int i = 0; i < steps; ++i) x = std::fmaf(x, x, c);
  return x;
}

/// What each thread of a launch should sum up, in fp64: thread i, in step s, the float4
/// (i % starts + stride * s) % count of `set`.
static __global__ void sums_fp64(const float* set, int64_t starts, int64_t stride, int64_t count,
                                 int64_t steps, double* sums) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  double sum = 0;
  for (int64_t step = 0; step < steps; ++step) {
    const float* four = set + 4 * ((thread % starts + stride * step) % count);
    for (int i = 0; i < 4; ++i) sum += static_cast<double>(four[i]);
  }
  sums[thread] = sum;
}

}  // namespace problems
