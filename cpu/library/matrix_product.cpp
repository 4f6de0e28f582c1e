#include "cpu/library/matrix_product.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>

#include "cpu/execution/worker_pool.h"
#include "cpu/runtime/device_state.h"
#include "cpu/watch/hooks.h"
#include "cpu/watch/ledger.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"

// The inner loops are compiled twice, for any x86-64 and for those with 256-bit FMA units; this
// machine's kind is looked up once.
#if defined(__x86_64__)
#define CUDA_CPU_HAS_WIDE_VARIANT 1
#define CUDA_CPU_WIDE __attribute__((target("avx2,fma")))
#endif
#define CUDA_CPU_INLINE inline __attribute__((always_inline))

namespace cuda_cpu {

namespace {

bool wide_units() {
#if defined(CUDA_CPU_HAS_WIDE_VARIANT)
  static const bool wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return wide;
#else
  return false;
#endif
}

/// 32 bytes of T, which the compiler keeps in one or two registers. Unaligned in memory.
template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(32), aligned(alignof(T)), may_alias));
  static constexpr int kSize = 32 / sizeof(T);
};

constexpr int kTile = 64;
constexpr int kDepth = 256;

/// A tile of the product in the making: kTile x kTile sums, column by column, of products of kDepth
/// columns of A with kDepth rows of B, both packed so that the innermost loop reads consecutively.
template <class T>
struct Tile {
  alignas(64) T sums[kTile][kTile];
  alignas(64) T a[kDepth][kTile];
  alignas(64) T b[kDepth][kTile];
};

/// Adds a * b, of the given depth, to the sums.
template <class T>
CUDA_CPU_INLINE void accumulate_body(Tile<T>& tile, int depth) {
  using Vector = typename VectorOf<T>::type;
  constexpr int kSize = VectorOf<T>::kSize;
  for (int column = 0; column < kTile; column += 4) {
    for (int row = 0; row < kTile; row += 2 * kSize) {
      Vector sums[4][2];
      for (int j = 0; j < 4; ++j) {
        sums[j][0] = *reinterpret_cast<const Vector*>(&tile.sums[column + j][row]);
        sums[j][1] = *reinterpret_cast<const Vector*>(&tile.sums[column + j][row + kSize]);
      }
      for (int k = 0; k < depth; ++k) {
        const Vector a0 = *reinterpret_cast<const Vector*>(&tile.a[k][row]);
        const Vector a1 = *reinterpret_cast<const Vector*>(&tile.a[k][row + kSize]);
        for (int j = 0; j < 4; ++j) {
          sums[j][0] += a0 * tile.b[k][column + j];
          sums[j][1] += a1 * tile.b[k][column + j];
        }
      }
      for (int j = 0; j < 4; ++j) {
        *reinterpret_cast<Vector*>(&tile.sums[column + j][row]) = sums[j][0];
        *reinterpret_cast<Vector*>(&tile.sums[column + j][row + kSize]) = sums[j][1];
      }
    }
  }
}

template <int N>
CUDA_CPU_INLINE void multiply_small_body(const float* a, const float* b, const float* c, float* d,
                                         int m, int k) {
  using Vector = VectorOf<float>::type;
  for (int row = 0; row < m; ++row) {
    Vector sums[N / 8];
    std::memcpy(sums, c + row * N, sizeof sums);
    for (int i = 0; i < k; ++i) {
      const float factor = a[row * k + i];
      for (int j = 0; j < N / 8; ++j) {
        sums[j] += factor * *reinterpret_cast<const Vector*>(b + i * N + 8 * j);
      }
    }
    std::memcpy(d + row * N, sums, sizeof sums);
  }
}

CUDA_CPU_INLINE void multiply_small_any(const float* a, const float* b, const float* c, float* d,
                                        int m, int n, int k) {
  if (n == 8) return multiply_small_body<8>(a, b, c, d, m, k);
  if (n == 16) return multiply_small_body<16>(a, b, c, d, m, k);
  multiply_small_body<32>(a, b, c, d, m, k);
}

template <class T>
void accumulate_basic(Tile<T>& tile, int depth) {
  accumulate_body(tile, depth);
}

#if defined(CUDA_CPU_HAS_WIDE_VARIANT)
template <class T>
CUDA_CPU_WIDE void accumulate_wide(Tile<T>& tile, int depth) {
  accumulate_body(tile, depth);
}

CUDA_CPU_WIDE void multiply_small_wide(const float* a, const float* b, const float* c, float* d,
                                       int m, int n, int k) {
  multiply_small_any(a, b, c, d, m, n, k);
}
#endif

template <class T>
void accumulate(Tile<T>& tile, int depth) {
#if defined(CUDA_CPU_HAS_WIDE_VARIANT)
  if (wide_units()) return accumulate_wide(tile, depth);
#endif
  accumulate_basic(tile, depth);
}

/// Calls function(pointer) with `data` as a pointer to its elements' type.
template <class Function>
auto with_type(cudaDataType type, const void* data, Function function) {
  switch (type) {
    case CUDA_R_64F:
      return function(static_cast<const double*>(data));
    case CUDA_R_16F:
      return function(static_cast<const __half*>(data));
    case CUDA_R_16BF:
      return function(static_cast<const __nv_bfloat16*>(data));
    default:
      return function(static_cast<const float*>(data));
  }
}

/// packed[k][i] = element (first + i, k0 + k) of a matrix whose rows are `stride` and columns
/// `k_stride` apart, for i < count and k < depth; zeros up to kTile.
template <class T>
void pack(T (*packed)[kTile], const void* data, cudaDataType type, long stride, long k_stride,
          long first, int count, long k0, int depth) {
  with_type(type, data, [&](const auto* elements) {
    const auto* corner = elements + first * stride + k0 * k_stride;
    if (k_stride == 1) {
      for (int i = 0; i < count; ++i) {
        for (int k = 0; k < depth; ++k) packed[k][i] = static_cast<T>(corner[i * stride + k]);
      }
    } else if (stride == 1) {
      for (int k = 0; k < depth; ++k) {
        for (int i = 0; i < count; ++i) packed[k][i] = static_cast<T>(corner[k * k_stride + i]);
      }
    } else {
      for (int k = 0; k < depth; ++k) {
        for (int i = 0; i < count; ++i) {
          packed[k][i] = static_cast<T>(corner[i * stride + k * k_stride]);
        }
      }
    }
    for (int k = 0; k < depth; ++k) std::fill(packed[k] + count, packed[k] + kTile, T{0});
  });
}

/// Computes the tile of D whose first element is (row0, column0).
template <class T>
void compute_tile(const Product& p, Tile<T>& tile, long row0, long column0) {
  const int rows = static_cast<int>(std::min<long>(kTile, p.m - row0));
  const int columns = static_cast<int>(std::min<long>(kTile, p.n - column0));
  std::memset(tile.sums, 0, sizeof tile.sums);
  for (long k0 = 0; p.alpha != 0 && k0 < p.k; k0 += kDepth) {
    const int depth = static_cast<int>(std::min<long>(kDepth, p.k - k0));
    pack(tile.a, p.a.data, p.a.type, p.a.row_stride, p.a.column_stride, row0, rows, k0, depth);
    pack(tile.b, p.b.data, p.b.type, p.b.column_stride, p.b.row_stride, column0, columns, k0,
         depth);
    accumulate(tile, depth);
  }
  const auto combined = [&](int i, int j) {
    const long row = row0 + i;
    const long column = column0 + j;
    T value = static_cast<T>(p.alpha) * tile.sums[j][i];
    if (p.beta != 0) {
      const long index = row * p.c.row_stride + column * p.c.column_stride;
      value += static_cast<T>(p.beta) * static_cast<T>(load_element(p.c.data, p.c.type, index));
    }
    return p.epilogue ? static_cast<T>(p.epilogue(value, row)) : value;
  };
  with_type(p.d.type, p.d.data, [&](const auto* elements) {
    using Element = std::remove_cvref_t<decltype(*elements)>;
    Element* d = const_cast<Element*>(elements);
    for (int j = 0; j < columns; ++j) {
      for (int i = 0; i < rows; ++i) {
        d[(row0 + i) * p.d.row_stride + (column0 + j) * p.d.column_stride] =
            static_cast<Element>(combined(i, j));
      }
    }
  });
}

template <class T>
void multiply_in(const Product& p) {
  const long tile_rows = (p.m + kTile - 1) / kTile;
  const long tile_columns = (p.n + kTile - 1) / kTile;
  WorkerPool::instance().parallel_for(tile_rows * tile_columns, [&](long i) {
    thread_local const auto tile = std::make_unique<Tile<T>>();
    compute_tile(p, *tile, i % tile_rows * kTile, i / tile_rows * kTile);
  });
}

}  // namespace

std::int64_t Product::least_bytes() const {
  const auto bytes = [](cudaDataType type) {
    return with_type(type, nullptr, [](const auto* each) { return std::int64_t{sizeof *each}; });
  };
  const std::int64_t factors = m * k * bytes(a.type) + k * n * bytes(b.type);
  const std::int64_t results = m * n * bytes(d.type);
  return (alpha != 0 ? factors : 0) + (beta != 0 ? 2 : 1) * results + epilogue_bytes;
}

double load_element(const void* data, cudaDataType type, long index) {
  return with_type(type, data,
                   [&](const auto* elements) { return static_cast<double>(elements[index]); });
}

void multiply(const Product& product) {
  count_library(product.least_bytes());
  finish_kernels();
  const OpenMemory open;
  if (product.in_double) {
    multiply_in<double>(product);
  } else {
    multiply_in<float>(product);
  }
}

void multiply_small(const float* a, const float* b, const float* c, float* d, int m, int n, int k) {
  count_tensor_flops(2 * std::int64_t{m} * n * k);
#if defined(CUDA_CPU_HAS_WIDE_VARIANT)
  if (wide_units()) return multiply_small_wide(a, b, c, d, m, n, k);
#endif
  multiply_small_any(a, b, c, d, m, n, k);
}

}  // namespace cuda_cpu
