// Random inputs and fp64 references, on the device. Matrices are row-major and dense.
#pragma once

#include <cublas_v2.h>

#include <algorithm>
#include <string>

#include "common/lesson.h"

namespace common {

/// A cuBLAS handle on the stream that `<<<grid, block>>>` launches into.
class Cublas {
 public:
  Cublas() {
    CUBLAS_CHECK(cublasCreate(&handle_));
    CUBLAS_CHECK(cublasSetStream(handle_, cudaStreamPerThread));
  }
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;
  ~Cublas() { cublasDestroy(handle_); }
  operator cublasHandle_t() const { return handle_; }

 private:
  cublasHandle_t handle_ = nullptr;
};

/// Device memory for the duration of a scope, `count` elements of T.
template <typename T>
class Scratch {
 public:
  explicit Scratch(size_t count) { CUDA_CHECK(cudaMalloc(&data_, count * sizeof(T))); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { cudaFree(data_); }
  operator T*() const { return data_; }

 private:
  T* data_ = nullptr;
};

/// Element i becomes a number uniform around storage.center that depends on seed and i alone.
void fill_random(const Storage& storage, uint64_t seed);

/// A sum over all bytes and where they are: of memory that was changed it is another one.
uint64_t checksum(const Storage& storage);

/// Relative error of `check.output` against `check.reference`, accumulated in fp64.
Error compare(const Check& check);

/// Whether so much of the reference has cancelled that inputs are drawn again; see bound_of().
bool proves_nothing(const Check& check);

/// In words: which element of `check.output` is the first wrong one, what it should be, and how
/// many are wrong.
std::string wrong_elements(const Check& check);

/// out[i] = in[i] in fp64, for `count` elements.
void to_fp64(const void* in, Type type, size_t count, double* out);

/// How memory holds a factor of a product: as it is, or its transpose.
enum Transposed : bool { kPlain = false, kTransposed = true };

/// c (m, n) = alpha a b + beta c in fp64, row-major; a is stored as (m, k), or transposed, b as
/// (k, n), or transposed.
void product_fp64(cublasHandle_t blas, double alpha, const double* a, Transposed a_is,
                  const double* b, Transposed b_is, double beta, double* c, int64_t m, int64_t n,
                  int64_t k);

/// c (m, n) = a (m, k) b (k, n) in fp64.
void matmul_fp64(cublasHandle_t blas, const double* a, const double* b, double* c, int64_t m,
                 int64_t n, int64_t k);

/// Rows of a left factor that references convert to fp64 at a time, and the bytes of device memory
/// that reference_matmul takes for it.
inline constexpr int64_t kReferenceRows = 8192;
inline double reference_scratch(int64_t m, int64_t n, int64_t k) {
  const double rows = static_cast<double>(std::min(m, kReferenceRows));
  return 8 * static_cast<double>(k) * (rows + static_cast<double>(n));
}

/// c (m, n) = a (m, k) b (k, n), the operands converted to fp64.
template <typename T>
void reference_matmul(cublasHandle_t blas, const T* a, const T* b, double* c, int64_t m, int64_t n,
                      int64_t k) {
  const int64_t chunk = std::min(m, kReferenceRows);
  Scratch<double> a64(chunk * k), b64(k * n);
  to_fp64(b, type_of<T>, k * n, b64);
  for (int64_t row = 0; row < m; row += chunk) {
    const int64_t rows = std::min(chunk, m - row);
    to_fp64(a + row * k, type_of<T>, rows * k, a64);
    matmul_fp64(blas, a64, b64, c + row * n, rows, n, k);
  }
}

}  // namespace common
