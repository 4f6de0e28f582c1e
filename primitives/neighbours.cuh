// What a thread moves as one access.
#pragma once

namespace primitives {

/// kWidth elements side by side, which move as one.
template <typename T, int kWidth>
struct alignas(kWidth * sizeof(T)) Neighbours {
  T values[kWidth];
};

}  // namespace primitives
