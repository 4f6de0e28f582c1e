// The gated layer of lessons 5 and 6: its sizes, and what a kernel reads and writes.
//
//     out = sigmoid(x W1 + b1) * (x W2 + b2)
//     x (M, K), W1 and W2 (K, H), b1 and b2 (H), out (M, H): fp16, row-major, dense
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace operators::gating {

struct GatingShape {
  int64_t rows, channels, hidden;  ///< M, K, H; below 2^31, H up to 32 * 65535: a grid's y

  /// Whether every row starts at a multiple of 16 bytes.
  bool aligned() const { return channels % 8 == 0 && hidden % 8 == 0; }
  double flops() const {
    // Two products, and per output two biases, a sigmoid (negate, exp, add, divide) and a product.
    return static_cast<double>(rows) * static_cast<double>(hidden) *
           (4.0 * static_cast<double>(channels) + 7);
  }
  /// Least possible traffic in bytes: x and the weights in, out out.
  double bytes() const {
    const double m = static_cast<double>(rows), k = static_cast<double>(channels),
                 h = static_cast<double>(hidden);
    return sizeof(half) * (m * k + 2 * k * h + 2 * h + m * h);
  }
};

/// What a kernel reads and writes, on the device.
struct GatingOperands {
  const half *x, *W1, *b1, *W2, *b2;
  half* out;
  int M, K, H;
};

/// Of whoever has them: members x, W1, b1, W2, b2 and out, which become pointers here.
template <class Memory>
GatingOperands operands_of(const Memory& memory, const GatingShape& shape) {
  return {memory.x,
          memory.W1,
          memory.b1,
          memory.W2,
          memory.b2,
          memory.out,
          static_cast<int>(shape.rows),
          static_cast<int>(shape.channels),
          static_cast<int>(shape.hidden)};
}

}  // namespace operators::gating
