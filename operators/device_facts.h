// What an operator asks of a device once, not at each call.
#pragma once

#include <atomic>

#include "primitives/check.h"

namespace operators {

/// What find() returns, a number from 0 on that is the same for this device whenever it is asked
/// for: found once a device. find is a lambda without captures, whose type has a table of its own.
template <typename Find>
int fact_of_device(Find find) {
  constexpr int kMostDevices = 64;
  static std::atomic<int> facts[kMostDevices] = {};  // 1 more than the number; 0: not asked yet
  int device = 0;
  primitives::check(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= kMostDevices) return find();
  int fact = facts[device].load(std::memory_order_relaxed);
  if (fact == 0) {
    fact = 1 + find();
    facts[device].store(fact, std::memory_order_relaxed);
  }
  return fact - 1;
}

}  // namespace operators
