// The gated layer of operators/gating as a program calls it: its ways, against sums in double, at
// shapes that lesson 6 does not have. On the CPU backend and on a GPU.
//
//     gating_shapes ROWS CHANNELS HIDDEN [MOST]    runs at most MOST ways in fp16, and as many in
//                                                  bf16 with SiLU and without biases; prints a line
//                                                  for each; exits with 1 if one is wrong, or if a
//                                                  type has none
//     gating_shapes ROWS CHANNELS HIDDEN 0         prints all ways of fp16, and runs none

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <type_traits>
#include <vector>

#include "common/device.h"
#include "operators/gating/layer.cuh"
#include "operators/tests/device_memory.h"

using namespace common;
using namespace tests;
using namespace operators::gating;
using operators::Caller, operators::Memory, operators::Way;

namespace {

/// A matrix of multiples of 1/8 that each type holds, different from seed to seed.
template <typename T>
struct Matrix {
  int rows, cols;
  std::vector<T> host;
  Memory<T> device;

  Matrix(int row_count, int col_count, int seed, float scale)
      : rows(row_count),
        cols(col_count),
        host(static_cast<size_t>(rows) * cols),
        device(memory_of<T>(host.size(), 0xff)) {
    for (size_t i = 0; i < host.size(); ++i) {
      const auto number = static_cast<int>((i * 37 + i / 11 * 5 + 13 * seed) % 17) - 8;
      host[i] = static_cast<T>(scale * static_cast<float>(number) / 8);
    }
    CUDA_CHECK(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  double at(int row, int col) const {
    return static_cast<double>(static_cast<float>(host[static_cast<size_t>(row) * cols + col]));
  }
};

/// With a sigmoid and biases, or with SiLU and without.
template <typename T>
std::vector<double> layer_of(const Matrix<T>& x, const Matrix<T>& W1, const Matrix<T>& b1,
                             const Matrix<T>& W2, const Matrix<T>& b2, Gate kind) {
  const bool plain = kind == Gate::sigmoid;
  std::vector<double> out;
  for (int row = 0; row < x.rows; ++row) {
    for (int col = 0; col < W1.cols; ++col) {
      double gate = plain ? b1.at(0, col) : 0, value = plain ? b2.at(0, col) : 0;
      for (int k = 0; k < x.cols; ++k) {
        gate += x.at(row, k) * W1.at(k, col);
        value += x.at(row, k) * W2.at(k, col);
      }
      out.push_back(value * (plain ? 1 : gate) / (1 + std::exp(-gate)));
    }
  }
  return out;
}

template <typename T>
bool right(const Way& way, const Memory<T>& out, const std::vector<double>& expected) {
  constexpr bool kHalf = std::is_same_v<T, half>;
  std::vector<T> host(out.size());
  for (int launch = 0; launch < 2; ++launch) {  // a launch leaves what the next one needs
    CUDA_CHECK(cudaMemset(out, 0xff, host.size() * sizeof(T)));
    way.launch();
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(host.data(), out, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < host.size(); ++i) {
      // The sums are exact in fp32: what is left is the type's rounding (2^-11 or 2^-8) and some of
      // fp32's in the sigmoid; below 2^-14 fp16 has steps of 2^-24. Written so that a NaN is never
      // right.
      const double found = static_cast<double>(static_cast<float>(host[i]));
      const double bound =
          (kHalf ? 0x1p-11 : 0x1p-8) * 1.01 * std::fabs(expected[i]) + (kHalf ? 0x1p-25 : 0x1p-40);
      if (!(std::fabs(found - expected[i]) <= bound)) return false;
    }
  }
  return true;
}

/// Runs the ways that should be the fastest, and prints a line for each.
template <typename T>
bool all_right(const GatingShape& shape, Gate gate, size_t most, const char* type) {
  const auto M = static_cast<int>(shape.rows), K = static_cast<int>(shape.channels);
  const auto H = static_cast<int>(shape.hidden);
  const Matrix<T> x(M, K, 0, 1), W1(K, H, 1, 0.5f), b1(1, H, 2, 1);
  const Matrix<T> W2(K, H, 3, 0.5f), b2(1, H, 4, 1);
  const Memory<T> out = memory_of<T>(static_cast<size_t>(M) * H, 0xff);
  const Memory<T> none([] { return static_cast<T*>(nullptr); }, 0);
  const std::vector<double> expected = layer_of(x, W1, b1, W2, b2, gate);
  GatingMemory<T> memory{x.device, W1.device, b1.device, W2.device, b2.device, out};
  if (gate != Gate::sigmoid) memory.b1 = none, memory.b2 = none, memory.gate = gate;
  const auto make = [&](const Caller& by) { return gated_layer<T>(by, memory, shape); };
  std::vector<Way> ways = make(caller());
  bool all = !ways.empty() && found_by_ids(ways, make);
  std::sort(ways.begin(), ways.end(),
            [](const Way& a, const Way& b) { return a.microseconds < b.microseconds; });
  ways.resize(std::min(ways.size(), most));
  for (const Way& way : ways) {
    const bool ok = right(way, out, expected);
    std::printf("%s%s%s\n", type, way.name.c_str(), ok ? "" : ": FAILED");
    all = all && ok;
  }
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: gating_shapes ROWS CHANNELS HIDDEN [MOST]\n");
    return 2;
  }
  const int M = std::atoi(argv[1]), K = std::atoi(argv[2]), H = std::atoi(argv[3]);
  const size_t most = argc > 4 ? static_cast<size_t>(std::atoi(argv[4])) : 1000;
  const Memory<half> none([] { return static_cast<half*>(nullptr); }, 0);
  const Caller no_caller{
      {[](size_t) { return memory_of<char>(1, 0); }, [](size_t) { return memory_of<char>(1, 0); }}};
  if (most == 0) {
    const GatingMemory<half> nothing{none, none, none, none, none, none};
    for (const Way& way : gated_layer<half>(no_caller, nothing, {M, K, H}))
      std::printf("%s\n", way.name.c_str());
    return 0;
  }

  const bool all = all_right<half>({M, K, H}, Gate::sigmoid, most, "") &&
                   all_right<__nv_bfloat16>({M, K, H}, Gate::silu, most, "bf16: ");
  return all ? 0 : 1;
}
