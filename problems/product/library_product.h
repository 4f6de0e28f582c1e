// The product that the kernels are compared with: the fastest that cuBLASLt has for its shape.
#pragma once

#include <cublasLt.h>

#include <vector>

#include "common/lesson.h"

namespace problems {

using namespace common;

/// c (m, n) = a (m, k) b (k, n) by cuBLASLt, row-major and dense, plus a bias for each column if
/// there is one. cuBLAS's heuristic guesses which of its kernels is the fastest; this asks the
/// heuristic for all that it would consider, calls each a few times, and keeps the fastest. That
/// happens in the first call, which must not be captured in a graph.
class LibraryProduct {
 public:
  struct Shape {
    int64_t m, n, k;
  };

  /// `type`: of a, b, c and the bias. The workspace is `problem`'s.
  LibraryProduct(Problem& problem, const Shape& shape, cudaDataType_t type,
                 cublasComputeType_t compute, bool with_bias = false);
  LibraryProduct(const LibraryProduct&) = delete;
  LibraryProduct& operator=(const LibraryProduct&) = delete;
  ~LibraryProduct();

  void operator()(const void* a, const void* b, void* c, const void* bias = nullptr);

  /// For those who try them otherwise: how many kernels the heuristic would consider, and a call of
  /// one of them, without a bias. The first is the one that it guesses to be the fastest.
  int candidates();
  void call(int candidate, const void* a, const void* b, void* c) const;

 private:
#ifdef CUDA_CPU  // whose cuBLASLt takes none
  static constexpr size_t kWorkspaceBytes = sizeof(float);
#else
  static constexpr size_t kWorkspaceBytes = 64 << 20;
#endif

  cublasLtHandle_t blas_ = nullptr;
  cublasLtMatmulDesc_t matmul_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, c_ = nullptr;
  Buffer<float> workspace_;
  bool with_bias_;
  std::vector<cublasLtMatmulAlgo_t> candidates_;
  int fastest_ = -1;
};

}  // namespace problems
