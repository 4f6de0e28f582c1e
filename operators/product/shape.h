#pragma once

#include <cstdint>

namespace operators::product {

/// C (rows x cols) = A (rows x depth) B (depth x cols).
struct ProductShape {
  int rows, cols, depth;
};

/// How many elements the rows of a product's matrices are apart: a multiple of 16 bytes, or
/// 0 if dense.
struct RowStrides {
  int64_t a = 0, b = 0, c = 0;
};

/// For ids of ways: how tiles are divided among clusters; or that they are those of mma.sync, of
/// aligned rows or of shifted ones; or that a second launch adds up slices.
enum class Divided : int64_t { whole, shared, in_slices, by_mma_sync, shifted, added };

}  // namespace operators::product
