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

}  // namespace cuda_cpu
