// What attention and its gradients have in common: where their tensors lie, and which descriptions
// are refused.
#pragma once

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>

#include "operators/attention/attention.h"
#include "operators/library/call.h"

namespace operators::library {

using operators::attention::Strides;

/// One of the tensors (batch, rows, heads, width).
struct AttentionTensor {
  const char* name;
  fk_strides strides;
  int64_t batch, rows, heads, width;

  /// The strides; dense ones where there is no neighbour.
  Strides all() const {
    const Strides dense = Strides::rows_of_heads(rows, heads, width);
    if ((strides.batch | strides.row | strides.head) == 0) return dense;
    return {batch == 1 ? dense.batch : strides.batch, rows == 1 ? dense.row : strides.row,
            heads == 1 ? dense.head : strides.head};
  }
  /// How many elements there are from the first to the last.
  int64_t count() const {
    const Strides by = all();
    return (batch - 1) * by.batch + (rows - 1) * by.row + (heads - 1) * by.head + width;
  }
  /// Refuses strides in which two elements of the tensor may share a place.
  void check() const {
    struct Dimension {
      int64_t stride, size;
    };
    const Strides by = all();
    Dimension sorted[] = {{by.batch, batch}, {by.row, rows}, {by.head, heads}};
    std::sort(std::begin(sorted), std::end(sorted),
              [](const Dimension& a, const Dimension& b) { return a.stride < b.stride; });
    int64_t long_so_far = width;
    for (const Dimension& each : sorted) {
      if (each.size == 1) continue;
      if (each.stride < long_so_far || each.stride > int64_t{1} << 38) {
        throw Refusal{FK_BAD_SHAPE, std::string(name) + ": a stride is " +
                                        std::to_string(each.stride) +
                                        "; neighbours have to be from " +
                                        std::to_string(long_so_far) + " to 2^38 elements apart"};
      }
      if (each.size - 1 > (kMostElements - long_so_far) / each.stride) {
        throw Refusal{FK_BAD_SHAPE, std::string(name) + ": a stride is " +
                                        std::to_string(each.stride) + "; " +
                                        std::to_string(each.size) +
                                        " neighbours reach beyond 2^60 elements then"};
      }
      long_so_far += (each.size - 1) * each.stride;
    }
  }
};

/// Refuses what is the same in both descriptions, but the capability of the GPU and strides.
template <typename Description>
void check_attention(const Description& of, int64_t most_width) {
  constexpr int64_t kMost = 1 << 30;
  check_type("attention", of.type, {FK_FLOAT16, FK_BFLOAT16});
  if (of.causal != 0 && of.causal != 1) {
    throw Refusal{FK_BAD_ARGUMENT,
                  "causal is " + std::to_string(of.causal) + "; it has to be 0 or 1"};
  }
  check_sizes({{"batch", of.batch, kMost},
               {"queries", of.queries, kMost},
               {"keys", of.keys, kMost},
               {"heads", of.heads, kMost},
               {"kv_heads", of.kv_heads, kMost},
               {"width", of.width, most_width}});
  if (of.heads % of.kv_heads != 0) {
    throw Refusal{FK_BAD_SHAPE, "heads is " + std::to_string(of.heads) +
                                    ", which is not a multiple of kv_heads, " +
                                    std::to_string(of.kv_heads)};
  }
  if (of.batch * of.heads > kMost || of.batch * of.heads * of.queries > kMost) {
    throw Refusal{FK_BAD_SHAPE, "batch * heads * queries is more than 2^30"};
  }
  if (of.batch * of.kv_heads * of.keys > kMost) {
    throw Refusal{FK_BAD_SHAPE, "batch * kv_heads * keys is more than 2^30"};
  }
  if (!(of.scale > 0) || std::isinf(of.scale)) {
    throw Refusal{FK_BAD_ARGUMENT,
                  "scale is " + std::to_string(of.scale) + "; it has to be positive and finite"};
  }
}

}  // namespace operators::library
