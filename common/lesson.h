// What every lesson shares: the command line, device buffers, verification, timing, the table,
// JSON.
//
// A lesson's main declares its problems (inputs, outputs, a reference, the kernels) and ends with
// `return lesson.run();`. No buffer is allocated and no kernel launched before run(), which refuses
// what does not fit in memory, and then for each problem
//   1. allocates the buffers,
//   2. fills the inputs with random numbers, computes the reference, and on a GPU tries the ways
//      of kernels that have several,
//   3. for each kernel: poisons every output with NaN, launches, compares with the reference,
//   4. samples the kernels in turn, each round in another order, each with a cold L2 cache (or, for
//      kernels of microseconds, as the nodes of a CUDA graph), for as long as the run may last,
//   5. verifies again, and prints the table;
// Where it counts (on the CPU unless times are asked for, on a GPU by --count) the launch of 3 is
// counted, 4 is left out, and what was quick on the CPU is verified a second time. At the end it
// writes the JSON record and returns the exit code.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/problem.h"

namespace common {

/// What --sweep takes in the place of one size: `first`, 2 `first`, ... `last`.
struct Sizes {
  int first = 0, last = 0;
};
struct Sweep {
  Sizes gpu = {}, cpu = {};
};

struct Option {
  const char* name;  ///< "--hidden"
  const char* meaning;
  int value;  ///< default
  int multiple_of = 1;
  Sweep sweep = {};  ///< if --sweep goes over it, too
  int cpu = 0;       ///< default beside n_cpu, if it is another one
};

struct Choice {
  const char* name;  ///< "--algebra"
  const char* meaning;
  std::vector<std::string> values;  ///< the first is the default
};

struct Flag {
  const char* name;  ///< "--no-norm"
  const char* meaning;
};

struct LessonInfo {
  const char* name;       ///< the file's name without .cu
  const char* title;      ///< one line
  const char* n_meaning;  ///< what N is, for --help and for errors
  int n_gpu, n_cpu;       ///< N where none is given: on a GPU; on the CPU, in seconds
  std::vector<Option> options = {};
  std::vector<Choice> choices = {};
  std::vector<Flag> flags = {};
  Sweep sweep = {};  ///< of N; with it the lesson has a --sweep, whose problems are of all sizes()
};

class Lesson {
 public:
  /// Parses the command line and picks the device. Without a usable GPU it says so in one line and
  /// goes on with the CPU build of the same lesson. Bad usage and --help end the program here.
  Lesson(int argc, char** argv, LessonInfo info);
  ~Lesson();

  int64_t n() const;
  /// Value of one of the lesson's own options, at least 1.
  int64_t option(const char* name) const;
  const std::string& choice(const char* name) const;
  bool flag(const char* name) const;
  /// Whether the command line names this option, or "N".
  bool given(const char* name) const;
  /// Whether N is at most n_cpu, and options have their values for that: on the CPU, unless the
  /// command line insists on N.
  bool small() const;
  /// The values of N, or of one of the lesson's own options: one, or with --sweep those of it.
  std::vector<int64_t> sizes(const char* of = "N") const;
  const Device& device() const;
  /// True on the CPU backend.
  bool on_cpu() const { return device().backend == "cpu"; }

  /// The reference returned lives as long as the lesson.
  Problem& problem(std::string name, std::vector<Dim> dims, std::string dtype, Work work,
                   Rate rate);
  /// A line printed after the tables.
  void note(std::string line);

  /// See the top of this file. Returns the exit code.
  int run();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace common
