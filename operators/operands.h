// What all operators say about themselves to whoever calls them: which pass, in which memory, and
// in which ways.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

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
  cudaStream_t stream = nullptr;  ///< where ways launch
  /// Whether a launch has the device for itself, as in a lesson's table. Only then may a block wait
  /// for one of a higher number: elsewhere other launches may hold the room that the second one
  /// needs, and wait for a block of their own as well. A block may always wait for one of a lower
  /// number, which has started before it, and for those of its cluster, which start together.
  bool alone = true;
  /// Whether all ways are wanted, to be tried; or the one alone that should be the fastest.
  bool all_ways = true;
  /// The name of the one way that is wanted; empty: as all_ways says. Who has few ways may return
  /// others as well.
  std::string only = {};

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

/// One of several ways to compute the same, such as with one of several tiles. (A table's rows have
/// a Way of their own, which problems::ways_of_row() makes of these.)
struct Way {
  std::string name;
  double microseconds;  ///< that it should take
  std::function<void()> launch;
  int shared_bytes;  ///< that a block asks for when it is launched
};

/// The ways that a workspace's owner wants, as they are found.
class Ways {
 public:
  explicit Ways(const Workspace& workspace) : all_(workspace.all_ways), only_(workspace.only) {}

  /// make() returns the way that should take so long. Names and launches take longer to make than
  /// an estimate, so of ways that are not wanted none are made. Returns whether this one is wanted,
  /// so far.
  template <typename Make>
  bool offer(double microseconds, Make make) {
    if (!only_.empty()) {
      Way way = make();
      if (!found_.empty() || way.name != only_) return false;
      found_.push_back(std::move(way));
      return true;
    }
    if (!all_ && !found_.empty()) {
      if (!(microseconds < found_.front().microseconds)) return false;
      found_.clear();
    }
    found_.push_back(make());
    return true;
  }
  std::vector<Way> found() const { return found_; }

 private:
  bool all_;
  std::string only_;
  std::vector<Way> found_;
};

}  // namespace operators
