// In which orders a caller may have the blades of a multivector, and with which signs. The kernels
// have them by grade, those of a grade by their vectors as bits of a number (algebra.cuh).
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <cstdint>

namespace operators::clifford {

/// As fk_order of the library counts them.
enum class Order : int {
  grade,      ///< the kernels' own
  bits,       ///< by the vectors as bits of a number alone
  shortlex,   ///< by grade, those of a grade as words in a dictionary
  null_first  ///< shortlex, with the vectors whose square is 0 before the others
};

/// Where a caller has blade k of the kernels: at place[k], multiplied by -1 if bit k of `negative`
/// is set. That is so where the vectors of a word stand in another order: e0 e1 is -e1 e0.
struct BladeOrder {
  uint8_t place[32] = {};
  unsigned negative = 0;
  bool operator==(const BladeOrder&) const = default;
};

/// Whether word a stands before word b. A word is a set of vectors that ascend, bit v for vector v.
constexpr bool is_before(Order order, unsigned a, unsigned b) {
  if (order == Order::bits) return a < b;
  if (std::popcount(a) != std::popcount(b)) return std::popcount(a) < std::popcount(b);
  if (order == Order::grade) return a < b;
  // The first letter in which two words of a length differ is the lowest that only one has.
  const unsigned differ = a ^ b;
  return (a & differ & -differ) != 0;
}

/// Of an algebra A, of whose vectors the last `null` have the square 0.
template <typename A>
constexpr BladeOrder order_of(Order order, int null) {
  const int others = A::kVectors - null;
  const unsigned low = (1u << others) - 1;
  // Vectors as the order counts them.
  const auto word = [&](unsigned vectors) {
    return order == Order::null_first ? vectors >> others | (vectors & low) << null : vectors;
  };
  const auto& tables = A::kTables;
  BladeOrder result = {};
  for (int k = 0; k < A::kBlades; ++k) {
    const unsigned own = tables.vectors[k];
    for (unsigned other = 0; other < A::kBlades; ++other) {
      result.place[k] += is_before(order, word(other), word(own));
    }
    // Each of its null vectors has moved before each of its others.
    const int swaps = std::popcount(own >> others) * std::popcount(own & low);
    if (order == Order::null_first && swaps % 2 != 0) result.negative |= 1u << k;
  }
  return result;
}

}  // namespace operators::clifford
