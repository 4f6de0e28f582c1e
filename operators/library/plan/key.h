// What plans are told apart by.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>

#include "operators/library/plan/context.h"

namespace operators::library {

/// A description as this library knows it, in words.
using Words = std::array<uint64_t, kMostKnown / 8>;

/// Fields that the caller does not know are 0. Those that this library does not know have to be.
inline Words known(const Function& function, const void* description) {
  const std::string name = function.name;
  if (!description) throw Refusal{FK_BAD_ARGUMENT, name + " is NULL"};
  size_t size = 0;
  std::memcpy(&size, description, sizeof size);
  if (size % 8 != 0 || size < function.shortest || size > kMostDescription) {
    throw Refusal{FK_BAD_ARGUMENT, name + ": size is " + std::to_string(size) +
                                       "; it has to be a multiple of 8 from " +
                                       std::to_string(function.shortest) + " to " +
                                       std::to_string(kMostDescription)};
  }
  const auto* const bytes = static_cast<const unsigned char*>(description);
  for (size_t i = function.bytes; i < size; ++i) {
    if (bytes[i] == 0) continue;
    throw Refusal{FK_BAD_ARGUMENT, name + ": size is " + std::to_string(size) +
                                       "; this library knows " + std::to_string(function.bytes) +
                                       " bytes, and the others have to be 0"};
  }
  Words words = {};
  std::memcpy(words.data(), description, std::min(size, function.bytes));
  std::memcpy(words.data(), &function.bytes, sizeof function.bytes);
  function.clear_padding(words.data());
  return words;
}

/// What plans are told apart by: all that a call has but its pointers.
class Key {
 public:
  Key(const Function& function, const void* description, cudaStream_t stream)
      : function_(&function), stream_(stream), description_(known(function, description)) {
    primitives::check(cudaGetDevice(&device_), "cudaGetDevice");
    context_ = context_of_thread();
    const auto mix = [this](uint64_t word) {
      hash_ = (hash_ ^ word) * 0x9E3779B97F4A7C15;
      hash_ ^= hash_ >> 32;
    };
    for (const uint64_t each : {address(stream_), context_, address(function_)}) mix(each);
    for (size_t i = 0; i < function.bytes / 8; ++i) mix(description_[i]);
  }

  bool operator==(const Key&) const = default;
  uint64_t hash() const { return hash_; }
  int device() const { return device_; }
  uint64_t context() const { return context_; }
  cudaStream_t stream() const { return stream_; }
  Task task() const { return function_->task(description_.data()); }
  /// Without stream and context: whatever these are, the same way is the fastest.
  auto without_stream() const { return std::tuple(function_, device_, description_); }

 private:
  const Function* function_;
  cudaStream_t stream_;
  Words description_;
  int device_ = 0;
  uint64_t context_ = 0, hash_ = 0;
};

}  // namespace operators::library
