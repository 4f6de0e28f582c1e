// Attention, forward: what it computes, and where its operands lie.
//
//     out(b, s, h) = sum over t of P(t) V(b, t, g)
//     P = softmax over t of scale Q(b, s, h) . K(b, t, g)
//
//     Q, out (batch, queries, heads, width), K, V (batch, keys, kv_heads, width): T, half or
//     __nv_bfloat16. Head h of Q reads head g = h / (heads / kv_heads) of K and V. Where the three
//     first dimensions lie is said by strides, so that (batch, heads, queries, width) is as good.
//     log_sums (batch, heads, queries): fp32, the logarithm of the sum of exp(scale Q . K).
//
// With `causal`, query s sees the keys t <= s + keys - queries: the last query sees all keys. A
// query that sees no key, or only logits of -inf, gets zeros, and -inf as its logarithm.
#pragma once

#include <cstddef>
#include <cstdint>

#include "operators/operands.h"

namespace operators::attention {

struct AttentionShape {
  int64_t batch = 1, queries, keys, heads, kv_heads, width;
  bool causal = false;

  int64_t group() const { return heads / kv_heads; }  ///< heads of Q that share one of K and V
  /// How many pairs of a query and a key there are in a head.
  double pairs() const {
    const double all = static_cast<double>(queries) * static_cast<double>(keys);
    if (!causal) return all;
    // Query s sees s + keys - queries + 1 keys, where that is positive: the last one sees `keys`.
    const double seeing = static_cast<double>(queries < keys ? queries : keys);
    return seeing * static_cast<double>(keys) - seeing * (seeing - 1) / 2;
  }
  /// The multiplications and additions of the two products.
  double flops() const { return 4 * static_cast<double>(batch * heads * width) * pairs(); }
  /// Least possible traffic in bytes: Q, K and V in, out and the logarithms out.
  double bytes() const {
    return 2.0 * static_cast<double>(batch * width) *
               static_cast<double>(2 * queries * heads + 2 * keys * kv_heads) +
           4.0 * static_cast<double>(batch * heads * queries);
  }
};

/// How many elements apart neighbours of a dimension are. The width's are neighbours in memory.
struct Strides {
  int64_t batch, row, head;

  /// Of (batch, rows, heads, width), dense.
  static Strides rows_of_heads(int64_t rows, int64_t heads, int64_t width) {
    return {rows * heads * width, heads * width, width};
  }
};

/// What a kernel gets.
template <typename T>
struct AttentionOperands {
  const T *Q, *K, *V;
  T* out;
  float* log_sums;
  Strides q, k, v, o;
  int queries, keys, heads, group, width;
  bool causal;
  float scale;

  /// The first key that query s does not see.
  __host__ __device__ int limit(int s) const {
    return causal ? max(0, min(keys, s + keys - queries + 1)) : keys;
  }

 private:
  __host__ __device__ static int min(int a, int b) { return a < b ? a : b; }
  __host__ __device__ static int max(int a, int b) { return a > b ? a : b; }
};

}  // namespace operators::attention
