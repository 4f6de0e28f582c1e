// A sum of many terms hardly shows that the last of them is missing: of V random terms it is
// 1 / sqrt(V) of the result, which among the roundings of bf16 is lost from some thousands on. The
// last term is what a kernel leaves out that forgets the last, not quite full step. Where sums may
// be so long, inputs make their last term larger: an eighth of the result, or more.
#pragma once

#include <algorithm>
#include <cmath>

#include "common/numerics.h"
#include "primitives/launch.h"

namespace problems::last_term {

using namespace common;

/// A power of two, so that products stay exact: of n terms the last is sqrt(n) / 8 to sqrt(n) / 4
/// times as large as the others; of fewer than 64 it is 1 / 8 of the result, or more, as it is.
inline double weight(double n) {
  return std::exp2(std::max(0.0, std::floor(std::log2(std::sqrt(n) / 4))));
}

/// `runs` of so many elements, each beginning `stride` after the one before.
struct Elements {
  size_t first, length, stride = 0, runs = 1;
};

/// One thread an element.
template <typename T>
__global__ void change_kernel(T* data, Elements elements, float factor, float offset) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= elements.runs * elements.length) return;
  T& element = data[elements.first + i / elements.length * elements.stride + i % elements.length];
  element = static_cast<T>(static_cast<float>(element) * factor + offset);
}

template <typename T>
void change(T* data, const Elements& elements, double factor, double offset) {
  const size_t count = elements.runs * elements.length;
  change_kernel<T><<<primitives::blocks_for(count, 256), 256>>>(
      data, elements, static_cast<float>(factor), static_cast<float>(offset));
  CUDA_CHECK(cudaGetLastError());
}

template <typename T>
void multiply(T* data, const Elements& elements, double factor) {
  change(data, elements, factor, 0);
}
template <typename T>
void set(T* data, const Elements& elements, double value) {
  change(data, elements, 0, value);
}

}  // namespace problems::last_term
