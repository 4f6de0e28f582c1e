// softmax(x W), row by row: its sizes.
//
//     logits = x W, probs = softmax(logits)
//     x (B, D), W (D, C), logits and probs (B, C), fp32, row-major, dense
#pragma once

#include <cstddef>
#include <cstdint>

#include "operators/operands.h"

namespace operators::softmax {

/// Long rows are cut into parts of so many columns.
inline constexpr int kPartColumns = 4096;
// A block's steps may end behind the last input, and that number is an int, too. A grid's y, at
// most 65535, counts the parts of a row.
inline constexpr int64_t kMostInputs = INT32_MAX - 1023;
inline constexpr int64_t kMostClasses = int64_t{65535} * kPartColumns;

struct SoftmaxShape {
  int64_t rows, inputs, classes;  ///< B, D, C; each below 2^31

  double logits() const { return static_cast<double>(rows) * static_cast<double>(classes); }
  /// Operations of the product, and for each logit five: compare with the maximum, subtract it,
  /// exp, add, divide.
  double flops() const { return logits() * (2 * static_cast<double>(inputs) + 5); }
  /// Least possible traffic in bytes: x and W (elements of `input_bytes`) in, probs (fp32) out.
  double bytes(size_t input_bytes) const {
    const double b = static_cast<double>(rows), d = static_cast<double>(inputs),
                 c = static_cast<double>(classes);
    return static_cast<double>(input_bytes) * (b * d + d * c) + sizeof(float) * b * c;
  }
};

}  // namespace operators::softmax
