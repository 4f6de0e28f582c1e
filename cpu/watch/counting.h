// Counts what kernels ask of memory, as a profiler on a GPU would.
//
// Lessons are compiled with the calls that -fsanitize=thread makes for each load and store, but
// linked with functions of our own (counting.cpp). The k-th time that the lanes of a warp come to
// the same place in the program is one request; lanes that part and meet again count from there,
// at the next barrier or operation of the whole warp.
//
// What is not in it: caches, and what nvcc merges or splits otherwise than the CPU's compiler.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "cpu/execution/later_than_cpp17.h"
#include "cpu/watch/counts.h"

namespace cuda_cpu {

/// Whether this program was compiled for it.
bool can_count();

/// From now on, for all launches.
void start_counting();
/// Since start_counting().
Counts stop_counting();

/// What several launches of one kernel ask for together.
class Tally {
 public:
  Tally();
  ~Tally();
  /// Around each launch. After so many seconds its further blocks are left out, if each of them
  /// begins when the one before has ended; stop() says how many they were.
  void start(double seconds);
  std::int64_t stop();
  Counts counts() const;

 private:
  struct Places;
  std::unique_ptr<Places> places_;
};

/// From now on accesses that go astray are told ledger.h.
void check_accesses();

/// A line of the reader's own source.
struct Line {
  std::string file;  ///< empty: it is not known
  int number;
};

/// Those of places in this program, as binutils' addr2line knows them. Of each place it is the
/// innermost that is not the backend's. Without addr2line there are none.
std::vector<Line> lines_of(const std::vector<std::uintptr_t>& addresses);
/// file:line of a place in the program; empty if it is not known.
std::string line_of(std::uintptr_t code);

// ---- For the backend ----------------------------------------------------------------------------

struct Block;

/// A library's product, whose kernels are not here, has inputs and outputs of so many bytes.
void count_library(std::int64_t bytes);

/// What the hook before each load and store of the calling thread is for. 1: to count. 2: nothing,
/// as on the host. cpu/two_versions.py asks.
extern CUDA_CPU_CONSTINIT thread_local std::uint8_t hook_use;
/// A thread of a kernel starts.
void choose_hook_use();

/// All lanes of the warp of thread number `first`, or all threads of the block, have met: these at
/// a barrier, or because they have ended.
void requests_of_warp_end(const Block& block, unsigned first);
void requests_of_block_end(const Block& block, bool ended);

/// A lane's part of a request: of a copy by cp.async, made at `place` in the program; of an atomic
/// operation, made where this is called.
void count_async_copy(const void* from, std::size_t bytes, const void* place);
void count_atomic(const void* address, std::size_t bytes);
/// Whether this is memory of the calling thread's block.
bool is_shared(const void* address);
/// The same of a load or store that the compiler does not see as such.
void count_access(const void* address, std::size_t bytes, bool store);
/// Consecutive bytes that the copy engine reads or writes in global memory.
void count_copy_engine(const void* address, std::size_t bytes);
void count_multicast(std::size_t saved_bytes);
void count_tensor_flops(std::int64_t flops);
/// A thread has come to a barrier.
void count_barrier();

/// While one exists, nothing is counted for the calling thread: loads and stores that stand for
/// another instruction, which is counted as such.
class Uncounted {
 public:
  Uncounted();
  ~Uncounted();
  Uncounted(const Uncounted&) = delete;
  Uncounted& operator=(const Uncounted&) = delete;
};

}  // namespace cuda_cpu
