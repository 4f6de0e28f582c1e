// What all operators and whoever calls them say to each other: which pass, where operands are, and
// in which memory.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <functional>
#include <utility>

namespace operators {

enum class Pass { forward, backward };

/// `size()` elements of T on the device. It holds not a pointer but how to get one, since a
/// lesson's buffers are allocated only after its rows are described. data() is for launches.
template <typename T>
class Memory {
 public:
  Memory(std::function<T*()> at, size_t size) : at_(std::move(at)), size_(size) {}
  template <class Buffer>
  requires requires(const Buffer& buffer) {
    static_cast<T*>(buffer);
    buffer.size();
  }
  Memory(const Buffer& buffer)
      : at_([buffer] { return static_cast<T*>(buffer); }), size_(buffer.size()) {}

  T* data() const { return at_(); }
  operator T*() const { return at_(); }
  size_t size() const { return size_; }
  double bytes() const { return static_cast<double>(size_) * sizeof(T); }

 private:
  std::function<T*()> at_;
  size_t size_;
};

/// Where an operator gets the memory that it needs beside its inputs and outputs.
struct Workspace {
  using Allocate = std::function<Memory<char>(size_t bytes)>;
  Allocate of_any;  ///< its contents are undefined at each launch
  /// Zeros before the first launch; each launch leaves it ready for the next. A way asks for its
  /// data() before it launches the kernel that uses it: whoever owns it may write the zeros then.
  Allocate of_zeros;

  template <typename T>
  Memory<T> any(size_t count) const {
    return typed<T>(of_any, count);
  }
  template <typename T>
  Memory<T> zeros(size_t count) const {
    return typed<T>(of_zeros, count);
  }

 private:
  template <typename T>
  static Memory<T> typed(const Allocate& allocate, size_t count) {
    const Memory<char> bytes = allocate(count * sizeof(T));
    return Memory<T>([bytes] { return reinterpret_cast<T*>(bytes.data()); }, count);
  }
};

}  // namespace operators
