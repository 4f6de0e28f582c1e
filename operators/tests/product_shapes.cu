// The products of operators/product as a program calls them: all ways to compute C = A B, against
// sums in double, at shapes that are not square. On the CPU backend and on a GPU.
//
//     product_shapes ROWS COLS DEPTH [MOST]    prints a line for each way that was run, of each
//                                              operator at most MOST; exits with 1 if one is wrong

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "common/device.h"
#include "operators/product/fp32/fp32.cuh"
#include "operators/product/half_product.cuh"
#include "operators/product/tf32_product.cuh"
#include "operators/tests/device_memory.h"

using namespace common;
using namespace tests;
using namespace operators::product;

namespace {

/// Element (row, col) of a factor: a number that every type holds.
float number(int row, int col) { return static_cast<float>((7 * row + 3 * col) % 11 - 5); }

template <typename T>
Memory<T> factor(int rows, int cols) {
  const Memory<T> matrix = memory_of<T>(static_cast<size_t>(rows) * cols, 0xff);
  std::vector<T> host(matrix.size());
  for (int row = 0; row < rows; ++row) {
    for (int col = 0; col < cols; ++col) {
      host[static_cast<size_t>(row) * cols + col] = T(number(row, col));
    }
  }
  CUDA_CHECK(cudaMemcpy(matrix, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return matrix;
}

/// Runs at most `most` ways of Operator<T>, twice each, whose result is in Out; returns whether all
/// are right, and there is one. A relative error of `rounding` is what rounding the exact sum may
/// leave.
template <typename T, class Operator, typename Out = T>
bool right(const char* name, const ProductShape& shape, size_t most, double rounding) {
  const Memory<T> A = factor<T>(shape.rows, shape.depth), B = factor<T>(shape.depth, shape.cols);
  const size_t count = static_cast<size_t>(shape.rows) * shape.cols;
  const Memory<Out> C = memory_of<Out>(count, 0xff);
  std::vector<double> expected(count);
  for (int row = 0; row < shape.rows; ++row) {
    for (int k = 0; k < shape.depth; ++k) {
      for (int col = 0; col < shape.cols; ++col) {
        expected[static_cast<size_t>(row) * shape.cols + col] += number(row, k) * number(k, col);
      }
    }
  }
  const auto make = [&](const operators::Caller& by) {
    return Operator(by, A, B, C, shape).ways();
  };
  std::vector<Way> ways = make(caller());
  bool all = !ways.empty() && found_by_ids(ways, make);
  std::sort(ways.begin(), ways.end(),
            [](const Way& a, const Way& b) { return a.microseconds < b.microseconds; });
  ways.resize(std::min(ways.size(), most));
  std::vector<Out> host(count);
  for (const Way& way : ways) {
    bool ok = true;
    for (int launch = 0; launch < 2; ++launch) {  // a launch leaves what the next one needs
      CUDA_CHECK(cudaMemset(C, 0xff, count * sizeof(Out)));
      way.launch();
      CUDA_CHECK(cudaGetLastError());
      CUDA_CHECK(cudaDeviceSynchronize());
      CUDA_CHECK(cudaMemcpy(host.data(), C, count * sizeof(Out), cudaMemcpyDeviceToHost));
      for (size_t i = 0; i < count; ++i) {  // written so that a NaN is never right
        const double found = static_cast<float>(host[i]);
        ok = ok && std::fabs(found - expected[i]) <= rounding * std::fabs(expected[i]);
      }
    }
    std::printf("%s, %s%s\n", name, way.name.c_str(), ok ? "" : ": FAILED");
    all = all && ok;
  }
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: product_shapes ROWS COLS DEPTH [MOST]\n");
    return 2;
  }
  const ProductShape shape{std::atoi(argv[1]), std::atoi(argv[2]), std::atoi(argv[3])};
  const size_t most = argc > 4 ? static_cast<size_t>(std::atoi(argv[4])) : 1000;
  bool ok = right<float, Fp32Product>("fp32", shape, most, 0);
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) >= 8) {  // these numbers are exact
    ok = right<float, Tf32Product<Math::tf32>>("tf32", shape, most, 0) && ok;
    ok = right<float, Tf32Product<Math::split>>("3xtf32", shape, most, 0) && ok;
    ok = right<half, HalfProduct<half>>("fp16", shape, most, 0x1p-11) && ok;
    ok = right<half, HalfProduct<half, float>, float>("fp16 to fp32", shape, most, 0) && ok;
    ok = right<__nv_bfloat16, HalfProduct<__nv_bfloat16>>("bf16", shape, most, 0x1p-8) && ok;
  }
  return ok ? 0 : 1;
}
