// The execution model of CUDA on CPU cores: launches, blocks, threads, barriers, shared memory.
//
// A block runs on one OS thread of the worker pool, its CUDA threads run one after the other, each
// until it ends or has to wait in a barrier (cuda_cpu.cpp). A thread that spins until another one
// has done something must therefore look at a cuda::atomic_ref, or call __nanosleep(). Blocks start
// in ascending order. The blocks of a cluster run at the same time; so do blocks that wait for one
// another, as many as the device holds. A launch returns when all its blocks have ended, so streams
// are ordered without further ado. But once a device may use the memory of another one
// (cudaDeviceEnablePeerAccess), kernels may wait for those of other devices: from then on a launch
// is kept until somebody synchronizes, and then all devices run what they have, at the same time.
//
// A kernel error (a divergent barrier, a misused intrinsic) prints one line on stderr, abandons the
// launch, and makes every later runtime call return cudaErrorLaunchFailure, or cudaErrorAssert. An
// access outside of all memory, or a division by zero, prints such a line and ends the program.

#pragma once

#include <cstddef>
#include <new>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/execution/later_than_cpp17.h"
#include "cuda_runtime_api.h"
#include "vector_types.h"

extern CUDA_CPU_CONSTINIT thread_local uint3 threadIdx;
extern CUDA_CPU_CONSTINIT thread_local uint3 blockIdx;
extern CUDA_CPU_CONSTINIT thread_local dim3 blockDim;
extern CUDA_CPU_CONSTINIT thread_local dim3 gridDim;
inline constexpr int warpSize = 32;

namespace cuda_cpu {

inline constexpr unsigned kMaxThreadsPerBlock = 1024;
inline constexpr std::size_t kDefaultSharedBytes = 48 * 1024;

/// How many multiprocessors the device has, each of which holds one block at a time.
int multiprocessors();

/// Ten times the compute capability of the device that is played. Kernels that need another one are
/// left out, as on such a GPU.
int compute_capability();

/// How much shared memory a block may have on such a device (CUDA C++ Programming Guide, "Technical
/// Specifications per Compute Capability").
std::size_t max_shared_bytes();

/// A place in the source code.
struct Site {
  const char* file;
  int line;
  const char* function;

  /// As a default argument: the place of the call.
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE(),
                             const char* function = __builtin_FUNCTION()) {
    return {file, line, function};
  }
};

// ---- For kernels -------------------------------------------------------------------------------

/// Ends the launch with an error: prints the message (printf-like) in one line together with the
/// launch, block and thread. To be called from a kernel.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

/// The same for assert(): the launch's error is cudaErrorAssert.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail_assertion(const char* format, ...);

/// Waits until all threads of the block have called it with the same site. Returns in how many of
/// them `predicate` was nonzero. `operation` is the barrier's name in error reports.
int block_barrier(int predicate, const char* operation, Site site);

/// What a warp operation computes: called once, when all `lanes` (a bit each) have arrived, with
/// the operand of each of them; operands of other lanes are indeterminate.
using Combine = void(void* const* operands, unsigned lanes);

/// Waits until all live lanes of `mask` have called it with the same mask and `combine`, which then
/// sees their operands. The caller must be a lane of `mask`.
void warp_meet(unsigned mask, Combine* combine, void* operand, const char* operation, Site site);

/// The calling thread's number in its warp, 0 to 31.
unsigned lane_id();

/// The lanes of the calling thread's warp that have not exited, a bit each.
unsigned live_lanes();

/// Lets other threads run, also of other blocks.
void yield(Site site = Site::here());

/// A thread has read `value` from `address` and may be waiting for another one. If it read the same
/// there before, other threads go on first.
void look(const void* address, unsigned long long value, Site site);
/// The same of an atomic operation that changes nothing, or of a load of a volatile variable, which
/// may as well be no loop: only after a thousand of them that have found `value` there.
void only_looked(const void* address, unsigned long long value, Site site);
bool looks_for_long(const void* address, unsigned long long value);
/// Before an access to a volatile variable at `address`. In a program of a reader's own the threads
/// of a block go on together, an access each: old programs have no __syncwarp() between them, and
/// count on the threads of a warp to do so. ThreadSanitizer reports the race.
void step(const void* address);
/// What the loop of loads is for that the thread goes into, for reports; null: it has ended.
void waits_for(const char* what);
/// What it has read then.
void saw(const void* address, unsigned long long value);

/// Whether the calling thread runs a kernel, or is the host's.
bool in_kernel();

/// Whether the launch is cooperative.
bool is_cooperative();
/// All blocks of the grid wait for one another.
void grid_barrier(Site site);

/// A copy that cuda_pipeline.h has queued: `size` bytes, the last `zero_fill` of them zeros.
struct AsyncCopy {
  void* target;
  const void* source;
  std::size_t size;
  std::size_t zero_fill;
};

/// The calling thread's asynchronous copies that have not landed yet, oldest first. What is left
/// when the thread ends lands then.
class AsyncCopies {
 public:
  void add(const AsyncCopy& copy);
  /// Makes a batch of what was added since the last call.
  void commit();
  /// Performs the copies of all batches but the last `pending`.
  void wait(std::size_t pending);
  /// Performs all copies.
  void end();
  /// Forgets them.
  void clear();

 private:
  void land(std::size_t count);

  std::vector<AsyncCopy> queue_;
  /// For each committed batch, oldest first, how many entries of the queue it has.
  std::vector<std::size_t> batches_;
  std::size_t uncommitted_ = 0;
};
AsyncCopies& async_copies();

/// Shared memory of the block for the declaration that `key` identifies: the same in all threads of
/// a block, all bits set when the block starts.
void* static_shared_storage(const void* key, std::size_t size, std::size_t alignment);
void* dynamic_shared_storage();

/// Where `pointer` is in the block's window of shared memory.
std::size_t shared_window(const void* pointer);

/// %globaltimer. A thread that looks at it does not wait for ever: no deadlock is reported while
/// one does.
unsigned long long nanoseconds();

/// griddepcontrol.wait: what the kernel before this one has written can be read.
void wait_for_previous_kernel();

/// Whether the constructor leaves all bytes as they are. (Needs -fno-lifetime-dse.)
template <class T>
bool constructor_is_empty() {
  alignas(T) unsigned char memory[sizeof(T)];
  for (const unsigned char before : {0x5A, 0xA5}) {
    __builtin_memset(memory, before, sizeof memory);
    asm volatile("" : : "r"(memory) : "memory");
    ::new (static_cast<void*>(memory)) T;
    asm volatile("" : : "r"(memory) : "memory");
    for (const unsigned char byte : memory) {
      if (byte != before) return false;
    }
  }
  return true;
}

/// Storage that converts to a reference to whatever type is declared. `Declaration` is a type that
/// occurs at one declaration only.
template <class Declaration>
struct StaticShared {
  template <class T>
  operator T&() const {
    static constexpr char key = 0;
    if constexpr (!std::is_trivially_default_constructible_v<T>) {
      static const bool empty = constructor_is_empty<std::remove_all_extents_t<T>>();
      if (!empty)
        fail("a __shared__ variable has a constructor that is not empty: nvcc refuses it");
    }
    return *static_cast<T*>(static_shared_storage(&key, sizeof(T), alignof(T)));
  }
};

/// `T (&name)[n] = static_shared([] {});` is what cu2cpp.py makes of `__shared__ T name[n];`. Each
/// lambda expression has a type of its own, in each instance of a template.
template <class Declaration>
StaticShared<Declaration> static_shared(Declaration) {
  return {};
}

/// `T* const name = dynamic_shared();` is what cu2cpp.py makes of `extern __shared__ T name[];`.
struct DynamicShared {
  template <class T>
  operator T*() const {
    return static_cast<T*>(dynamic_shared_storage());
  }
};
inline DynamicShared dynamic_shared() { return {}; }

/// What __cluster_dims__ and __launch_bounds__ say of a kernel.
struct Cluster3 {
  unsigned x, y, z;
};
struct LaunchBounds {
  unsigned threads, blocks;
};
constexpr Cluster3 cluster_dims(unsigned x = 1, unsigned y = 1, unsigned z = 1) {
  return {x, y, z};
}
constexpr LaunchBounds launch_bounds(unsigned threads = 0, unsigned blocks = 1, unsigned = 0) {
  return {threads, blocks};
}

/// The first thing that a kernel does, cu2cpp.py sees to it. True: it was called only to say what
/// its attributes and its name are, and returns.
bool describe_kernel(Cluster3 cluster, LaunchBounds bounds,
                     const char* name = __builtin_FUNCTION());

// ---- For hosts ---------------------------------------------------------------------------------

/// A kernel bound to its arguments: `run` executes it for the calling CUDA thread.
struct BoundKernel {
  const void* function;
  void (*run)(const void* arguments);
  const void* arguments;
  std::size_t size;
};

/// What stands between <<< and >>>.
struct LaunchConfig {
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes;
  cudaStream_t stream;
  Site site;
  /// Blocks of a cluster along x; 0: as the kernel says.
  unsigned cluster = 0;
  /// Programmatic dependent launch: not ordered after the kernel before it.
  bool early = false;
  /// All blocks run at the same time, so they may wait for each other.
  bool cooperative = false;

  /// The arguments of a launch, before they are converted to the kernel's parameters.
  template <class... Arguments>
  struct Call {
    const LaunchConfig& config;
    std::tuple<Arguments&&...> arguments;
  };

  template <class... Arguments>
  Call<Arguments...> operator()(Arguments&&... arguments) const {
    return {*this, std::forward_as_tuple(std::forward<Arguments>(arguments)...)};
  }
};

inline LaunchConfig launch(dim3 grid, dim3 block, std::size_t shared_bytes = 0,
                           cudaStream_t stream = nullptr, Site site = Site::here()) {
  return {grid, block, shared_bytes, stream, site, 0, false, false};
}

/// Whether a cooperative launch of so many blocks fits on the device.
cudaError_t check_cooperative(dim3 grid);

/// Runs the kernel for all threads of the grid, on the current device; see the top. An invalid
/// configuration is reported as by CUDA, through cudaGetLastError().
void execute(const LaunchConfig& config, const BoundKernel& kernel);

/// Why the calling host thread's last launch was refused, in words: the kernel, the launch and the
/// limit. Empty if it was not.
const char* why_launch_failed();

/// What the launches that follow are for, such as a row of a table: reports of errors name it. Not
/// longer than 100 characters; empty: nothing is named.
void set_row(const char* name);

template <class T>
T implicitly(T value) {
  return value;
}

/// A parameter of a class that has a copy constructor or a destructor of its own. As with nvcc, it
/// gets to the kernel byte by byte, and neither of them runs.
template <class T>
struct CopiedBytes {
  alignas(T) unsigned char bytes[sizeof(T)];

  template <class Argument>
  requires(!std::is_same_v<cuda_cpu::remove_cvref_t<Argument>, CopiedBytes>)
      CopiedBytes(Argument&& argument) {
    const T& value = std::forward<Argument>(argument);
    __builtin_memcpy(bytes, &value, sizeof(T));
  }
};
/// Then the caller of a function passes its address: Itanium C++ ABI, "Non-Trivial Parameters".
template <class T>
inline constexpr bool kByAddress =
    !std::is_trivially_copy_constructible_v<T> || !std::is_trivially_destructible_v<T>;
template <class T>
using KeptParameter = std::conditional_t<kByAddress<T>, CopiedBytes<T>, T>;
template <class T>
using PassedParameter = std::conditional_t<kByAddress<T>, T&, T>;
template <class T>
PassedParameter<T> pass(KeptParameter<T>& kept) {
  if constexpr (kByAddress<T>) {
    return reinterpret_cast<T&>(kept.bytes);
  } else {
    return kept;
  }
}

/// `kernel ->* launch(grid, block, ...)(arguments...)`: what cu2cpp.py makes of
/// `kernel<<<grid, block, ...>>>(arguments...)`. The arguments are converted as in a call.
template <class... Parameters, class... Arguments>
void operator->*(void (*kernel)(Parameters...), LaunchConfig::Call<Arguments...>&& call) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments),
                "a launch must pass as many arguments as the kernel has parameters");
  static_assert((!std::is_reference_v<Parameters> && ...),
                "the parameters of a kernel cannot be references");
  struct Bound {
    void (*kernel)(Parameters...);
    std::tuple<KeptParameter<Parameters>...> parameters;
  };
  const Bound bound = std::apply(
      [&](auto&&... arguments) {
        return Bound{kernel,
                     std::tuple<KeptParameter<Parameters>...>(implicitly<KeptParameter<Parameters>>(
                         std::forward<decltype(arguments)>(arguments))...)};
      },
      std::move(call.arguments));
  execute(call.config,
          {reinterpret_cast<const void*>(kernel),
           [](const void* arguments) {
             const auto& bound = *static_cast<const Bound*>(arguments);
             if constexpr ((kByAddress<Parameters> || ...)) {
               auto own = bound.parameters;
               const auto run =
                   reinterpret_cast<void (*)(PassedParameter<Parameters>...)>(bound.kernel);
               std::apply([&](auto&... kept) { run(pass<Parameters>(kept)...); }, own);
             } else {
               std::apply(bound.kernel, bound.parameters);
             }
           },
           &bound, sizeof bound});
}

/// A zero that a program passes to a kernel: a number, or no pointer.
struct Zero {
  template <class T>
  operator T() const {
    return T(0);
  }
};

/// An argument as call()'s kernel gets it: a copy; of an object that owns memory, its pointer.
template <class T>
auto argument(const T& value) {
  if constexpr (!std::is_trivially_copyable_v<T> && requires { value.data(); }) {
    return value.data();
  } else {
    return value;
  }
}

/// A launch of what only a call can name: a kernel template whose arguments are deduced, one of
/// several of a name, one with default arguments. `call` has the arguments, by value.
template <class CallOfKernel>
void call(const LaunchConfig& config, const CallOfKernel& call) {
  execute(config,
          {nullptr, [](const void* arguments) { (*static_cast<const CallOfKernel*>(arguments))(); },
           &call, sizeof call});
}

/// `extern __shared__ T name[];` outside of functions.
template <class T>
struct DynamicArray {
  operator T*() const { return static_cast<T*>(dynamic_shared_storage()); }
};

/// A launch with attributes: the size of its clusters, and whether it may start early.
LaunchConfig launch_with_attributes(const cudaLaunchConfig_t& config, Site site);
/// Whether the launch is not cooperative, or fits on the device.
cudaError_t check_attributes(const cudaLaunchConfig_t& config);

/// The same, and where the program makes it: the place of the call that the pointer is passed to.
struct LaunchAt {
  const cudaLaunchConfig_t* config;
  Site site;

  LaunchAt(const cudaLaunchConfig_t* config, Site site = Site::here())
      : config(config), site(site) {}
};
/// How many blocks a function is to launch, and where it is called.
struct BlocksAt {
  dim3 blocks;
  Site site;

  template <class Blocks>
  requires std::is_convertible_v<Blocks, dim3> BlocksAt(Blocks blocks, Site site = Site::here())
      : blocks(blocks), site(site) {}
  operator dim3() const { return blocks; }
};

/// Launches a kernel whose parameter k is what arguments[k] points to.
using LaunchWithPointers = void (*)(const LaunchConfig& config, void** arguments);
/// From now on the kernel can be launched by its address alone.
bool know_kernel(const void* kernel, LaunchWithPointers launch);
/// Launches a kernel that is known; cudaErrorInvalidDeviceFunction for any other address.
cudaError_t launch_known(const LaunchConfig& config, const void* kernel, void** arguments);

}  // namespace cuda_cpu

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(cuda_cpu::LaunchAt launch, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const cudaError_t error = cuda_cpu::check_attributes(*launch.config);
  if (error != cudaSuccess) return error;
  kernel->*cuda_cpu::launch_with_attributes(*launch.config,
                                            launch.site)(std::forward<Arguments>(arguments)...);
  return cudaPeekAtLastError();
}
