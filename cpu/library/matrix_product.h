// Matrix products for cublas.cpp and mma.h.

#pragma once

#include <cstdint>
#include <functional>

#include "library_types.h"

namespace cuda_cpu {

/// A matrix in memory: element (row, column) is at data[row * row_stride + column * column_stride].
/// Transposing it, or storing it by rows, is a matter of the strides.
template <class Pointer>
struct MatrixView {
  Pointer data;
  cudaDataType type;
  long row_stride;
  long column_stride;
};
using ConstMatrix = MatrixView<const void*>;
using Matrix = MatrixView<void*>;

/// D = epilogue(alpha * A * B + beta * C): A is m x k, B is k x n, C and D are m x n.
struct Product {
  long m, n, k;
  double alpha;
  ConstMatrix a, b;
  double beta;
  /// Not read if beta is 0; may be the same memory as d.
  ConstMatrix c;
  Matrix d;
  /// Accumulate in double instead of float.
  bool in_double;
  /// Applied to each element before it is rounded to D's type, with its row; may be empty.
  std::function<double(double value, long row)> epilogue;
  /// What that reads.
  std::int64_t epilogue_bytes = 0;

  /// What has to be moved: the inputs that are read, and D, each once.
  std::int64_t least_bytes() const;
};

/// Computes the product on all cores.
void multiply(const Product& product);

double load_element(const void* data, cudaDataType type, long index);

/// d = c + a * b for row-major float matrices without gaps: a is m x k, b is k x n, c and d are
/// m x n; n is 8, 16 or 32. d may be c.
void multiply_small(const float* a, const float* b, const float* c, float* d, int m, int n, int k);

}  // namespace cuda_cpu
