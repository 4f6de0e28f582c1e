// Memory for the programs in tests/ that call operators as a program does.
#pragma once

#include "common/device.h"
#include "operators/operands.h"

namespace tests {

/// Device memory that lasts as long as the program; each of its bytes is `byte`.
template <typename T>
operators::Memory<T> memory_of(size_t count, int byte) {
  void* data = nullptr;
  CUDA_CHECK(cudaMalloc(&data, count * sizeof(T)));
  CUDA_CHECK(cudaMemset(data, byte, count * sizeof(T)));
  return operators::Memory<T>([data] { return static_cast<T*>(data); }, count);
}

inline operators::Workspace workspace() {
  return {[](size_t bytes) { return memory_of<char>(bytes, 0xff); },
          [](size_t bytes) { return memory_of<char>(bytes, 0); }};
}

}  // namespace tests
