// Cooperative groups: blocks, tiles of a warp, coalesced threads, and the grid of a cooperative
// launch. What each function does is in the CUDA C++ Programming Guide, "Cooperative Groups".
//
// Which threads of a warp have come to a place together is nobody's promise. Here a thread is
// always alone there: coalesced_threads() is a group of one.

#pragma once

#include <type_traits>

#include "cpu/execution/sanitizers.h"
#include "cpu/hopper/units.h"
#include "cpu/watch/hooks.h"
#include "cuda_runtime.h"
#include "runtime_helpers.h"

namespace cooperative_groups {

/// What tiles of several warps need in shared memory: a value of each warp, of at most 16 bytes.
template <unsigned kMostThreads = 1024>
struct block_tile_memory {
  alignas(16) char of_warp[(kMostThreads + 31) / 32][16];
};

class thread_block {
 public:
  thread_block() = default;
  template <unsigned kMostThreads>
  explicit thread_block(block_tile_memory<kMostThreads>& memory) : of_warp_(memory.of_warp) {}

  /// The tiles' memory; null if there is none.
  char (*of_warp() const)[16] { return of_warp_; }
  static void sync(cuda_cpu::Site site = cuda_cpu::Site::here()) { __syncthreads(site); }
  static unsigned thread_rank() {
    return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  }
  static dim3 group_index() { return {blockIdx.x, blockIdx.y, blockIdx.z}; }
  static dim3 thread_index() { return {threadIdx.x, threadIdx.y, threadIdx.z}; }
  static dim3 group_dim() { return blockDim; }
  static dim3 dim_threads() { return blockDim; }
  static unsigned size() { return blockDim.x * blockDim.y * blockDim.z; }
  static unsigned num_threads() { return size(); }

 private:
  char (*of_warp_)[16] = nullptr;
};
inline thread_block this_thread_block() { return {}; }
template <unsigned kMostThreads>
thread_block this_thread_block(block_tile_memory<kMostThreads>& memory) {
  return thread_block(memory);
}

class grid_group {
 public:
  static bool is_valid() { return cuda_cpu::is_cooperative(); }
  static void sync(cuda_cpu::Site site = cuda_cpu::Site::here()) { cuda_cpu::grid_barrier(site); }
  static unsigned long long num_blocks() {
    return static_cast<unsigned long long>(gridDim.x) * gridDim.y * gridDim.z;
  }
  static unsigned long long size() { return num_blocks() * thread_block::size(); }
  static unsigned long long num_threads() { return size(); }
  static unsigned long long block_rank() {
    return blockIdx.x +
           gridDim.x * (blockIdx.y + static_cast<unsigned long long>(gridDim.y) * blockIdx.z);
  }
  static unsigned long long thread_rank() {
    return block_rank() * thread_block::size() + thread_block::thread_rank();
  }
  static dim3 group_dim() { return gridDim; }
  static dim3 dim_blocks() { return gridDim; }
  static dim3 block_index() { return {blockIdx.x, blockIdx.y, blockIdx.z}; }
};
inline grid_group this_grid() { return {}; }

/// Consecutive lanes of a warp, from `first` on.
class lanes {
 public:
  lanes(unsigned first, unsigned size) : first_(first), size_(size) {}

  void sync(cuda_cpu::Site site = cuda_cpu::Site::here()) const { __syncwarp(mask(), site); }
  unsigned thread_rank() const { return cuda_cpu::lane_id() - first_; }
  unsigned size() const { return size_; }
  unsigned num_threads() const { return size_; }
  unsigned meta_group_size() const { return (thread_block::size() + size_ - 1) / size_; }
  unsigned meta_group_rank() const { return thread_block::thread_rank() / size_; }

  template <class T>
  T shfl(T value, int source) const {
    return size_ == 1 ? value : __shfl_sync(mask(), value, source, width());
  }
  template <class T>
  T shfl_down(T value, unsigned delta) const {
    return size_ == 1 ? value : __shfl_down_sync(mask(), value, delta, width());
  }
  template <class T>
  T shfl_up(T value, unsigned delta) const {
    return size_ == 1 ? value : __shfl_up_sync(mask(), value, delta, width());
  }
  template <class T>
  T shfl_xor(T value, unsigned lane_mask) const {
    return size_ == 1 ? value
                      : __shfl_xor_sync(mask(), value, static_cast<int>(lane_mask), width());
  }
  int any(int predicate) const { return __any_sync(mask(), predicate); }
  int all(int predicate) const { return __all_sync(mask(), predicate); }
  unsigned ballot(int predicate) const { return __ballot_sync(mask(), predicate) >> first_; }
  template <class T>
  unsigned match_any(T value) const {
    return __match_any_sync(mask(), value) >> first_;
  }
  unsigned member_mask() const { return mask(); }

 private:
  unsigned mask() const { return (~0u >> (32 - size_)) << first_; }
  int width() const { return static_cast<int>(size_); }

  unsigned first_, size_;
};

template <unsigned kSize, class Parent = void>
class thread_block_tile : public lanes {
 public:
  static_assert(kSize >= 1 && kSize <= 1024 && (kSize & (kSize - 1)) == 0,
                "a tile has 1, 2, 4, ... or 1024 threads");
  thread_block_tile() : lanes(cuda_cpu::lane_id() / kSize * kSize, kSize) {}
  template <class Other>
  thread_block_tile(const thread_block_tile<kSize, Other>&) : thread_block_tile() {}
  static constexpr unsigned size() { return kSize; }
  static constexpr unsigned num_threads() { return kSize; }
};

/// A tile of several warps. They exchange values through the block_tile_memory of the block.
template <unsigned kSize, class Parent>
requires(kSize > 32) class thread_block_tile<kSize, Parent> {
 public:
  static_assert(kSize <= 1024 && (kSize & (kSize - 1)) == 0,
                "a tile of several warps has 64, 128, 256, 512 or 1024 threads");
  explicit thread_block_tile(const thread_block& block) : of_warp_(block.of_warp()) {}
  template <class Other>
  thread_block_tile(const thread_block_tile<kSize, Other>& other) : of_warp_(other.of_warp()) {}

  static void sync(cuda_cpu::Site site = cuda_cpu::Site::here()) {
    cuda_cpu::tile_barrier(meta_group_rank(), kSize, site);
  }
  static unsigned thread_rank() { return thread_block::thread_rank() % kSize; }
  static constexpr unsigned size() { return kSize; }
  static constexpr unsigned num_threads() { return kSize; }
  static unsigned meta_group_size() { return (thread_block::size() + kSize - 1) / kSize; }
  static unsigned meta_group_rank() { return thread_block::thread_rank() / kSize; }

  template <class T>
  T shfl(T value, unsigned source, cuda_cpu::Site site = cuda_cpu::Site::here()) const {
    return with_values<T>(
        [&](T* mine) {
          if (thread_rank() == source % kSize) *mine = value;
        },
        [&](auto of_warp) { return of_warp(source % kSize / 32); }, site);
  }
  int any(int predicate, cuda_cpu::Site site = cuda_cpu::Site::here()) const {
    return combined(
        __any_sync(~0u, predicate), [](int a, int b) { return a | b; }, site);
  }
  int all(int predicate, cuda_cpu::Site site = cuda_cpu::Site::here()) const {
    return combined(
        __all_sync(~0u, predicate), [](int a, int b) { return a & b; }, site);
  }
  /// Of a value that all lanes of a warp have.
  template <class T, class Operation>
  T combined(T value, Operation operation, cuda_cpu::Site site = cuda_cpu::Site::here()) const {
    return with_values<T>(
        [&](T* mine) {
          if (cuda_cpu::lane_id() == 0) *mine = value;
        },
        [&](auto of_warp) {
          T result = of_warp(0);
          for (unsigned warp = 1; warp < kSize / 32; ++warp) {
            result = operation(result, of_warp(warp));
          }
          return result;
        },
        site);
  }

  /// Puts what the earlier warps of the tile have together before this thread's value. The `last`
  /// of a warp's last lane is what the warp has. A thread without a value gets what is before it;
  /// in the first warp all get their value.
  template <class T, class Operation>
  T behind_other_warps(T last, bool has_value, T value, Operation operation,
                       cuda_cpu::Site site = cuda_cpu::Site::here()) const {
    return with_values<T>(
        [&](T* mine) {
          if (cuda_cpu::lane_id() == 31) *mine = last;
        },
        [&](auto of_warp) {
          const unsigned warps = thread_rank() / 32;
          if (warps == 0) return value;
          T before = of_warp(0);
          for (unsigned warp = 1; warp < warps; ++warp) before = operation(before, of_warp(warp));
          return has_value ? operation(before, value) : before;
        },
        site);
  }
  char (*of_warp() const)[16] { return of_warp_; }

 private:
  /// write(the place of this thread's warp), then read(the value of a warp of this tile).
  template <class T, class Write, class Read>
  T with_values(Write write, Read read, cuda_cpu::Site site) const {
    static_assert(sizeof(T) <= 16, "tiles of several warps exchange values of up to 16 bytes");
    if (!of_warp_) {
      cuda_cpu::fail(
          "a tile of %u threads at %s:%d needs memory to exchange values:"
          " this_thread_block(memory), of a __shared__ block_tile_memory",
          kSize, site.file, site.line);
    }
    const auto place = [&](unsigned warp) { return reinterpret_cast<T*>(of_warp_[warp]); };
    write(place(thread_block::thread_rank() / 32));
    sync(site);
    const T result =
        read([&](unsigned warp) { return *place(meta_group_rank() * (kSize / 32) + warp); });
    sync(site);
    return result;
  }

  char (*of_warp_)[16];
};

/// Any lanes of a warp, numbered one after the other.
class coalesced_group {
 public:
  coalesced_group() : mask_(1u << cuda_cpu::lane_id()) {}
  explicit coalesced_group(unsigned mask) : mask_(mask) {}

  void sync(cuda_cpu::Site site = cuda_cpu::Site::here()) const { __syncwarp(mask_, site); }
  unsigned thread_rank() const {
    return static_cast<unsigned>(__popc(mask_ & ((1u << cuda_cpu::lane_id()) - 1)));
  }
  unsigned size() const { return static_cast<unsigned>(__popc(mask_)); }
  unsigned num_threads() const { return size(); }

  template <class T>
  T shfl(T value, unsigned source) const {
    return size() == 1 ? value : __shfl_sync(mask_, value, lane(source % size()));
  }
  template <class T>
  T shfl_down(T value, unsigned delta) const {
    const unsigned from = thread_rank() + delta;
    return shfl(value, from < size() ? from : thread_rank());
  }
  template <class T>
  T shfl_up(T value, unsigned delta) const {
    return shfl(value, thread_rank() >= delta ? thread_rank() - delta : thread_rank());
  }
  int any(int predicate) const { return __any_sync(mask_, predicate); }
  int all(int predicate) const { return __all_sync(mask_, predicate); }
  unsigned ballot(int predicate) const { return by_rank(__ballot_sync(mask_, predicate)); }
  template <class T>
  unsigned match_any(T value) const {
    return by_rank(__match_any_sync(mask_, value));
  }
  unsigned member_mask() const { return mask_; }

 private:
  /// The lane of a rank.
  int lane(unsigned rank) const {
    unsigned rest = mask_;
    for (; rank > 0; --rank) rest &= rest - 1;
    return __ffs(static_cast<int>(rest)) - 1;
  }
  /// Bits of lanes as bits of ranks.
  unsigned by_rank(unsigned lanes) const {
    unsigned bits = 0;
    for (unsigned rank = 0; rank < size(); ++rank) bits |= (lanes >> lane(rank) & 1) << rank;
    return bits;
  }

  unsigned mask_;
};
inline coalesced_group coalesced_threads() { return {}; }

/// The threads of the group with the same label, or predicate.
template <class Group, class T>
coalesced_group labeled_partition(const Group& group, T label) {
  return coalesced_group(group.member_mask() & __match_any_sync(group.member_mask(), label));
}
template <class Group>
coalesced_group binary_partition(const Group& group, bool predicate) {
  return labeled_partition(group, static_cast<int>(predicate));
}

template <unsigned kSize, class Parent>
thread_block_tile<kSize, Parent> tiled_partition(const Parent& parent) {
  if constexpr (kSize > 32) {
    return thread_block_tile<kSize, Parent>(parent);
  } else {
    return {};
  }
}
/// A block, or lanes of a warp whose number is known when the program runs.
class thread_group {
 public:
  thread_group(thread_block) : lanes_(0, 0) {}
  thread_group(lanes of) : lanes_(of) {}

  void sync(cuda_cpu::Site site = cuda_cpu::Site::here()) const {
    is_block() ? thread_block::sync(site) : lanes_.sync(site);
  }
  unsigned thread_rank() const {
    return is_block() ? thread_block::thread_rank() : lanes_.thread_rank();
  }
  unsigned size() const { return is_block() ? thread_block::size() : lanes_.size(); }
  unsigned num_threads() const { return size(); }

 private:
  bool is_block() const { return lanes_.size() == 0; }

  lanes lanes_;
};
template <class Parent>
thread_group tiled_partition(const Parent&, unsigned size) {
  return lanes(cuda_cpu::lane_id() / size * size, size);
}

template <class Group>
void sync(const Group& group) {
  group.sync();
}

template <class T>
struct plus {
  T operator()(T a, T b) const { return a + b; }
};
template <class T>
struct less {
  T operator()(T a, T b) const { return b < a ? b : a; }
};
template <class T>
struct greater {
  T operator()(T a, T b) const { return a < b ? b : a; }
};
template <class T>
struct bit_and {
  T operator()(T a, T b) const { return a & b; }
};
template <class T>
struct bit_or {
  T operator()(T a, T b) const { return a | b; }
};
template <class T>
struct bit_xor {
  T operator()(T a, T b) const { return a ^ b; }
};

template <class T, class Operation>
T reduce(const coalesced_group& group, T value, Operation operation);

/// Every thread of the group gets the result. Whole numbers of 32 bits are combined by redux.sync,
/// which leaves out lanes that the block does not have.
template <class Group, class T, class Operation>
T reduce(const Group& group, T value, Operation operation) {
  if constexpr (std::is_integral_v<T> && sizeof(T) == 4) {
    const unsigned live = group.member_mask() & cuda_cpu::live_lanes();
    if (live != group.member_mask()) return reduce(coalesced_group(live), value, operation);
  }
  for (unsigned step = group.size() / 2; step > 0; step /= 2) {
    value = operation(value, group.shfl_xor(value, step));
  }
  return value;
}
template <unsigned kSize, class Parent, class T, class Operation>
requires(kSize > 32) T
    reduce(const thread_block_tile<kSize, Parent>& tile, T value, Operation operation) {
  return tile.combined(reduce(thread_block_tile<32>(), value, operation), operation);
}
template <class T, class Operation>
T reduce(const coalesced_group& group, T value, Operation operation) {
  T result = group.shfl(value, 0);
  for (unsigned rank = 1; rank < group.size(); ++rank) {
    result = operation(result, group.shfl(value, rank));
  }
  return result;
}

/// Of the threads up to this one, with and without it.
template <class Group, class T, class Operation = plus<T>>
T inclusive_scan(const Group& group, T value, Operation operation = {}) {
  for (unsigned step = 1; step < group.size(); step *= 2) {
    const T before = group.shfl_up(value, step);
    if (group.thread_rank() >= step) value = operation(before, value);
  }
  return value;
}
template <class Group, class T, class Operation = plus<T>>
T exclusive_scan(const Group& group, T value, Operation operation = {}) {
  const T before = group.shfl_up(inclusive_scan(group, value, operation), 1);
  return group.thread_rank() > 0 ? before : T();
}
template <unsigned kSize, class Parent, class T, class Operation = plus<T>>
requires(kSize > 32) T inclusive_scan(const thread_block_tile<kSize, Parent>& tile, T value,
                                      Operation operation = {}) {
  const T in_warp = inclusive_scan(thread_block_tile<32>(), value, operation);
  return tile.behind_other_warps(in_warp, true, in_warp, operation);
}
template <unsigned kSize, class Parent, class T, class Operation = plus<T>>
requires(kSize > 32) T exclusive_scan(const thread_block_tile<kSize, Parent>& tile, T value,
                                      Operation operation = {}) {
  const thread_block_tile<32> warp;
  const T in_warp = inclusive_scan(warp, value, operation), before = warp.shfl_up(in_warp, 1);
  const bool first = warp.thread_rank() == 0;
  return tile.behind_other_warps(in_warp, !first, first ? T() : before, operation);
}

}  // namespace cooperative_groups
