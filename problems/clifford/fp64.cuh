// What the fp64 references of lesson 10 and of its fully connected bonus share.
#pragma once

#include <cstdint>
#include <vector>

#include "common/numerics.h"
#include "primitives/launch.h"

namespace problems {

using namespace common;
using namespace operators::clifford;

namespace fp64 {

constexpr int kThreads = 128;

inline unsigned blocks(size_t count) { return primitives::blocks_for(count, kThreads); }

__device__ inline double gate(double s) { return 0.5 * erfc(-s * sqrt(0.5)); }
__device__ inline double gate_slope(double s) {
  return exp(-s * s / 2) / sqrt(2 * 3.14159265358979323846);
}

/// Bits that look random, and follow from i.
__device__ inline uint64_t mixed(uint64_t i) {
  uint64_t bits = (i + 1) * 0x9e3779b97f4a7c15ull;
  bits = (bits ^ (bits >> 32)) * 0xd6e8feb86659fd93ull;
  return bits;
}

/// +1 or -1: coordinate i of a random direction.
__device__ inline double direction(size_t i) { return mixed(i) >> 63 ? 1 : -1; }

/// A vector of the host in device memory.
template <typename T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& values) : data_(values.size()) {
    CUDA_CHECK(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  operator const T*() const { return data_; }
  const T* data() const { return data_; }

 private:
  Scratch<T> data_;
};

}  // namespace fp64

}  // namespace problems
