// Logits in fp32 of x and W in fp16 or bf16, as softmax and its cross-entropy take them: kernels of
// their own, beside those of library/product.cu, whose results are rounded.

#include "operators/library/products.h"
#include "operators/product/half_product.cuh"

namespace {

using operators::Caller, operators::Memory;
using operators::softmax::LogitsWay, operators::softmax::SoftmaxShape;

template <typename T>
std::vector<LogitsWay> half_logits_ways(const Caller& caller, const Memory<T>& x,
                                        const Memory<T>& W, const Memory<float>& logits,
                                        const SoftmaxShape& shape) {
  const operators::product::ProductShape sizes = {static_cast<int>(shape.rows),
                                                  static_cast<int>(shape.classes),
                                                  static_cast<int>(shape.inputs)};
  const auto no_parts = caller.workspace.any<float2>(1);
  std::vector<LogitsWay> ways;
  for (const operators::Way& way :
       operators::product::HalfProduct<T, float>(caller, x, W, logits, sizes).ways()) {
    ways.push_back({way, 1, 0, logits, no_parts});
  }
  return ways;
}

}  // namespace

std::vector<LogitsWay> operators::library::logits_ways(const Caller& caller, const Memory<half>& x,
                                                       const Memory<half>& W,
                                                       const Memory<float>& logits,
                                                       const SoftmaxShape& shape, bool) {
  return half_logits_ways<half>(caller, x, W, logits, shape);
}

std::vector<LogitsWay> operators::library::logits_ways(const Caller& caller,
                                                       const Memory<__nv_bfloat16>& x,
                                                       const Memory<__nv_bfloat16>& W,
                                                       const Memory<float>& logits,
                                                       const SoftmaxShape& shape, bool) {
  return half_logits_ways<__nv_bfloat16>(caller, x, W, logits, shape);
}
