#pragma once

namespace operators::product {

/// C (rows x cols) = A (rows x depth) B (depth x cols).
struct ProductShape {
  int rows, cols, depth;
};

}  // namespace operators::product
