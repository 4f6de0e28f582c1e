// Memory for the programs in tests/ that call operators as a program does.
#pragma once

#include <algorithm>
#include <cstdio>
#include <vector>

#include "common/device.h"
#include "operators/caller.h"

namespace tests {

/// Device memory that lasts as long as the program; each of its bytes is `byte`.
template <typename T>
operators::Memory<T> memory_of(size_t count, int byte) {
  void* data = nullptr;
  CUDA_CHECK(cudaMalloc(&data, count * sizeof(T)));
  CUDA_CHECK(cudaMemset(data, byte, count * sizeof(T)));
  return operators::Memory<T>([data] { return static_cast<T*>(data); }, count);
}

/// Whether each way alone is found again by its id. make(caller) returns an operator's ways.
template <typename Make>
bool found_by_ids(const std::vector<operators::Way>& ways, const Make& make) {
  const auto none = [](size_t bytes) {
    return operators::Memory<char>([] { return static_cast<char*>(nullptr); }, bytes);
  };
  return std::ranges::all_of(ways, [&](const operators::Way& way) {
    const auto found =
        make(operators::Caller{.workspace = {none, none}, .search = {.only = way.id}});
    const bool same =
        found.size() == 1 && found[0].name == way.name && found[0].microseconds == way.microseconds;
    if (!same) std::printf("%s: not found by its id\n", way.name.c_str());
    return same;
  });
}

inline operators::Caller caller() {
  return {{[](size_t bytes) { return memory_of<char>(bytes, 0xff); },
           [](size_t bytes) { return memory_of<char>(bytes, 0); }}};
}

}  // namespace tests
