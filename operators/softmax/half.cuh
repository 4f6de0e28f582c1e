// softmax(x W) in fp16 or bf16: a product that leaves its sums in fp32 (product::HalfProduct), and
// the softmax of rows.cuh, which rounds probabilities, and nothing before. So logits may be beyond
// the range of fp16, and each is written once and read once (twice, if its row does not fit into a
// block's registers).
#pragma once

#include <vector>

#include "operators/estimate.h"
#include "operators/softmax/logits.cuh"
#include "operators/softmax/rows.cuh"

namespace operators::softmax {

/// The ways to compute probs = softmax(logits), one for each way to compute the logits, whole ones.
template <typename T>
std::vector<Way> softmax_of(const Caller& caller, const std::vector<LogitsWay>& products,
                            const Memory<float>& logits, const Memory<T>& probs,
                            const SoftmaxShape& shape) {
  const bool is_long = shape.classes > kLongestInRegisters;
  const auto parts = caller.workspace.any<float2>(
      is_long ? shape.rows * blocks_for(shape.classes, kPartColumns) : 1);
  const Way finish = {
      "", microseconds_to_move((sizeof(float) * (is_long ? 2 : 1) + sizeof(T)) * shape.logits()),
      [=, stream = caller.stream] { softmax<T>(logits, probs, shape, parts, 1, stream); }, 0};
  std::vector<Way> ways;
  for (const LogitsWay& product : products) {
    ways.push_back(in_turn(product, {product, finish}));
  }
  return ways;
}

}  // namespace operators::softmax
