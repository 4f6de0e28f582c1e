// The gated layer of operators/gating as a program calls it: its ways, against sums in double, at
// shapes that lesson 6 does not have. On the CPU backend and on a GPU.
//
//     gating_shapes ROWS CHANNELS HIDDEN [MOST]    runs at most MOST ways, prints a line for each;
//                                                  exits with 1 if one is wrong, or if there is
//                                                  none
//     gating_shapes ROWS CHANNELS HIDDEN 0         prints all ways, and runs none

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "common/device.h"
#include "operators/gating/layer.cuh"
#include "operators/tests/device_memory.h"

using namespace common;
using namespace tests;
using namespace operators::gating;
using operators::Memory, operators::Way, operators::Workspace;

namespace {

/// A matrix of multiples of 1/8 that fp16 holds, different from seed to seed.
struct Matrix {
  int rows, cols;
  std::vector<half> host;
  Memory<half> device;

  Matrix(int row_count, int col_count, int seed, float scale)
      : rows(row_count),
        cols(col_count),
        host(static_cast<size_t>(rows) * cols),
        device(memory_of<half>(host.size(), 0xff)) {
    for (size_t i = 0; i < host.size(); ++i) {
      const auto number = static_cast<int>((i * 37 + i / 11 * 5 + 13 * seed) % 17) - 8;
      host[i] = __float2half_rn(scale * static_cast<float>(number) / 8);
    }
    CUDA_CHECK(cudaMemcpy(device, host.data(), host.size() * sizeof(half), cudaMemcpyHostToDevice));
  }
  double at(int row, int col) const {
    return static_cast<double>(__half2float(host[static_cast<size_t>(row) * cols + col]));
  }
};

std::vector<double> layer_of(const Matrix& x, const Matrix& W1, const Matrix& b1, const Matrix& W2,
                             const Matrix& b2) {
  std::vector<double> out;
  for (int row = 0; row < x.rows; ++row) {
    for (int col = 0; col < W1.cols; ++col) {
      double gate = b1.at(0, col), value = b2.at(0, col);
      for (int k = 0; k < x.cols; ++k) {
        gate += x.at(row, k) * W1.at(k, col);
        value += x.at(row, k) * W2.at(k, col);
      }
      out.push_back(value / (1 + std::exp(-gate)));
    }
  }
  return out;
}

bool right(const Way& way, const Memory<half>& out, const std::vector<double>& expected) {
  std::vector<half> host(out.size());
  for (int launch = 0; launch < 2; ++launch) {  // a launch leaves what the next one needs
    CUDA_CHECK(cudaMemset(out, 0xff, host.size() * sizeof(half)));
    way.launch();
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(host.data(), out, host.size() * sizeof(half), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < host.size(); ++i) {
      // The sums are exact in fp32: what is left is fp16's rounding (2^-11) and some of fp32's in
      // the sigmoid; below 2^-14 fp16 has steps of 2^-24. Written so that a NaN is never right.
      const double found = static_cast<double>(__half2float(host[i]));
      const double bound = 0x1p-11 * 1.01 * std::fabs(expected[i]) + 0x1p-25;
      if (!(std::fabs(found - expected[i]) <= bound)) return false;
    }
  }
  return true;
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
  const Workspace no_workspace{[](size_t) { return memory_of<char>(1, 0); },
                               [](size_t) { return memory_of<char>(1, 0); }};
  if (most == 0) {
    const GatedLayer<half> layer(no_workspace, {none, none, none, none, none, none}, {M, K, H});
    for (const Way& way : layer.ways()) std::printf("%s\n", way.name.c_str());
    return 0;
  }

  const Matrix x(M, K, 0, 1), W1(K, H, 1, 0.5f), b1(1, H, 2, 1), W2(K, H, 3, 0.5f), b2(1, H, 4, 1);
  const Memory<half> out = memory_of<half>(static_cast<size_t>(M) * H, 0xff);
  const std::vector<double> expected = layer_of(x, W1, b1, W2, b2);
  std::vector<Way> ways =
      GatedLayer<half>(workspace(), {x.device, W1.device, b1.device, W2.device, b2.device, out},
                       {M, K, H})
          .ways();
  std::sort(ways.begin(), ways.end(),
            [](const Way& a, const Way& b) { return a.microseconds < b.microseconds; });
  ways.resize(std::min(ways.size(), most));
  bool all = !ways.empty();
  for (const Way& way : ways) {
    const bool ok = right(way, out, expected);
    std::printf("%s%s\n", way.name.c_str(), ok ? "" : ": FAILED");
    all = all && ok;
  }
  return all ? 0 : 1;
}
