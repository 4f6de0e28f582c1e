// What every lesson shares: the command line, device buffers, verification, timing, the table,
// JSON.
//
// A lesson's main declares its problems (inputs, outputs, a reference, the kernels) and ends with
// `return lesson.run();`. No buffer is allocated and no kernel launched before run(), which for
// each problem
//   1. refuses what does not fit in memory,
//   2. fills the inputs with random numbers, computes the reference, and on a GPU tries the ways
//      of kernels that have several,
//   3. for each kernel: poisons every output with NaN, launches, compares with the reference,
//   4. samples the kernels in turn, each round in another order, each with a cold L2 cache (or, for
//      kernels of microseconds, as the nodes of a CUDA graph), for as long as the run may last,
//   5. verifies again, and prints the table;
// or, in the place of 4 and 5, on the CPU unless it is asked for times, counts in the launch of 3
// what the kernel moves;
// then it writes the JSON record and returns the exit code.
#pragma once

#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/check.h"
#include "common/device.h"
#include "cpu/watch/counts.h"

namespace common {

using cuda_cpu::Counts;

enum class Type { fp16, bf16, fp32, fp64 };
template <typename T>
constexpr Type type_of = Type::fp32;
template <>
inline constexpr Type type_of<half> = Type::fp16;
template <>
inline constexpr Type type_of<__nv_bfloat16> = Type::bf16;
template <>
inline constexpr Type type_of<double> = Type::fp64;

// Unit roundoffs: the largest relative error of rounding to nearest.
inline constexpr double kRoundoffFp16 = 0x1p-11;
inline constexpr double kRoundoffBf16 = 0x1p-8;
inline constexpr double kRoundoffTf32 = 0x1p-11;
inline constexpr double kRoundoffFp32 = 0x1p-24;

/// Device memory of a Problem: allocated by Lesson::run(), released after the problem's table.
struct Storage {
  void* data = nullptr;
  size_t count = 0;
  Type type{};
  size_t element_bytes = 0;
  double scale = 0, center = 0;  ///< inputs: uniform in [center - scale, center + scale)
  Storage() = default;
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;
  ~Storage() { release(); }
  double bytes() const { return static_cast<double>(count) * static_cast<double>(element_bytes); }
  void allocate();
  void release();
};

/// Refers to a Storage, as T*. Copies refer to the same memory, so a launch lambda may capture it
/// by value or by reference.
template <typename T>
class Buffer {
 public:
  explicit Buffer(std::shared_ptr<Storage> storage) : storage_(std::move(storage)) {}
  operator T*() const { return static_cast<T*>(storage_->data); }
  T* data() const { return *this; }
  size_t size() const { return storage_->count; }
  double bytes() const { return storage_->bytes(); }
  const std::shared_ptr<Storage>& storage() const { return storage_; }

 private:
  std::shared_ptr<Storage> storage_;
};

/// What a problem costs whichever way it is computed.
struct Work {
  double flops = 0;  ///< an FMA counts as two
  double bytes = 0;  ///< least possible traffic: every input read once, every output written once
};

struct Dim {
  const char* name;
  int64_t extent;
};

/// Error of an output against its fp64 reference; NaN or infinite if any element is.
struct Error {
  double frobenius = 0;  ///< ||out - reference|| / ||reference||
  double worst = 0;      ///< max |out - reference| / rms(reference): one wrong element shows here
};

/// An output, its fp64 reference of the same count, and the bound on the relative Frobenius error.
/// A single element may be off by kWorstToFrobenius times that bound, in units of the reference's
/// rms: rounding errors of 10^8 elements stay within 6 standard deviations, a wrong element does
/// not.
struct Check {
  std::shared_ptr<Storage> output, reference;
  double tolerance = 0;
  std::function<void()> compute_reference = {};  ///< if it is not the problem's
};
inline constexpr double kWorstToFrobenius = 16;

/// Bound on the relative Frobenius error of `length`-term dot products of random numbers of mean
/// zero. Rounding errors are independent, so variances add. Per unit of the result's rms:
///   inputs   both factors of each term rounded by u_in:     2 u_in^2 / 3
///   sum      partial sum k has rms sqrt(k / length), rounded:  u_sum^2 length / 6
///   output   rounded once by u_out:                         u_out^2 / 3
/// (a rounding error is uniform in [-u, u], hence u^2 / 3). Tensor cores truncate instead of
/// rounding to nearest: pass tensor_core_sum, whose errors all point to zero and therefore add up
/// linearly. The factor 4 leaves room for the few elements of a small problem.
double dot_tolerance(int64_t length, double u_sum, double u_out, double u_in = 0);
/// u_sum for dot_tolerance when tensor cores accumulate `length` terms in fp32, in steps of 8.
double tensor_core_sum(int64_t length);

enum class Role { baseline, library, ours };

/// How a kernel is timed: alone, after the L2 cache was overwritten (cold) or after a launch of its
/// own (hot); or as one of the kGraphCalls calls of a CUDA graph, launch included.
enum class Timing { cold, hot, graph };
inline constexpr int kGraphCalls = 20;

struct Kernel;

/// Which of the ways to compute a row are tried: at most so many, and none that is expected to take
/// so much longer than the first. Most estimates err by less.
struct Tries {
  size_t most = 16;
  double hopeless = 1.15;
};

/// One of several ways to compute a row, such as with one of several tiles.
struct Way {
  std::string name;
  double microseconds;  ///< that it should take
  std::function<void()> launch;
  std::function<void(Kernel&)> state_resources = {};
  double tried_ms = 0;  ///< that it took when it was tried; 0: it was not
};

/// One row of the table.
struct Kernel {
  std::string name;
  Role role;
  std::function<void()> launch;
  std::vector<Way> ways;         ///< to compute it, those that should be the fastest first
  std::string way;               ///< which of them `launch` is
  Work work;                     ///< the problem's, unless is_step() changes it
  std::vector<Check> checks;     ///< the problem's, unless is_step() changes them
  std::function<void()> before;  ///< comes before a verified launch, untimed: a step's inputs
  /// Of work on several devices: brings all results to where the checks look, not timed; and what
  /// one launch takes, in milliseconds (of Timing::graph, each of kGraphCalls).
  std::function<void()> collect;
  std::function<float(Timing)> time;
  double memory_bytes = 0;  ///< device memory that this way of computing needs; 0: not stated
  int needs_cc = 0;         ///< least compute capability of a GPU, times 10
  bool hopper = false;      ///< and it must be 9.0
  int needs_shared = 0;     ///< bytes of shared memory for a block

  void take(const Way& way) {
    launch = way.launch, this->way = way.name;
    if (way.state_resources) way.state_resources(*this);
  }

  /// A step of a longer computation has its own work, inputs that earlier steps make, and a result
  /// that `compute_reference` puts into `reference`.
  template <typename T>
  Kernel& is_step(Work step, std::function<void()> earlier_steps, const Buffer<T>& output,
                  const Buffer<double>& reference, double tolerance,
                  std::function<void()> compute_reference) {
    work = step;
    before = std::move(earlier_steps);
    checks = {{output.storage(), reference.storage(), tolerance, std::move(compute_reference)}};
    return *this;
  }
  /// States the device memory (bytes) that this way of computing needs, inputs and outputs
  /// included.
  Kernel& occupies(double bytes) {
    memory_bytes = bytes;
    return *this;
  }

  /// `cc` / 10 is the least compute capability that can run this; below it the row says so instead.
  Kernel& needs(int cc) {
    needs_cc = cc;
    hopper = cc == 90;
    return *this;
  }
  /// sm_90a code: later architectures do not run it either.
  Kernel& hopper_only() { return needs(90); }

  /// What one block of `function` takes, for the record: registers, spills, and how many fit on a
  /// multiprocessor. Unknown (and nothing is asked) on the CPU backend. Where a block may not have
  /// so much shared memory the row says so instead.
  template <typename Function>
  Kernel& resources([[maybe_unused]] Function* function, [[maybe_unused]] int block,
                    size_t shared_bytes = 0) {
    needs_shared = static_cast<int>(shared_bytes);
#ifndef CUDA_CPU
    if (needs_shared > most_shared_bytes()) return *this;
    cudaFuncAttributes attributes;
    CUDA_CHECK(cudaFuncGetAttributes(&attributes, function));
    threads = block;
    registers = attributes.numRegs;
    local_bytes = static_cast<int>(attributes.localSizeBytes);
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_per_sm, function, block,
                                                             shared_bytes));
#endif
    return *this;
  }

  int threads = 0;        ///< of a block; 0: resources not stated
  int registers = 0;      ///< of a thread, at launch
  int local_bytes = 0;    ///< of a thread, in memory: spilled registers and indexed arrays
  int blocks_per_sm = 0;  ///< that run at the same time

  // Filled in by Lesson::run().
  bool ran = false;
  bool ok = false;
  Error error;
  double tolerance = 0;
  std::string wrong;              ///< with --explain: which elements are
  std::vector<float> samples_ms;  ///< sorted
  std::vector<double> clocks_hz;  ///< of the multiprocessors, for each sample; sorted
  std::optional<Counts> counts;   ///< instead of samples
  double percentile(double p) const;
  double median_ms() const { return percentile(50); }
};

/// `format` with `factor` for its one %: "% times as fast" -> "0.96 times as fast". Of "% times
/// faster" it makes "1.04 times slower" or "as fast" where that is so.
std::string comparison_text(const std::string& format, double factor);

/// One table: inputs, outputs and a reference that its kernels share.
class Problem {
 public:
  /// Random numbers, uniform in [center - scale, center + scale).
  template <typename T>
  Buffer<T> input(size_t count, double scale = 1, double center = 0) {
    Buffer<T> result = buffer<T>(inputs_, count, scale);
    result.storage()->center = center;
    return result;
  }
  /// Called when the inputs are filled, before the reference is computed: may change them.
  void adjust_inputs(std::function<void()> adjust) { adjust_inputs_.push_back(std::move(adjust)); }
  /// Zeros when the first kernel starts, and never touched between kernels: for what each
  /// launch leaves ready for the next one.
  template <typename T>
  Buffer<T> workspace(size_t count) {
    return buffer<T>(workspaces_, count, 0);
  }
  /// Poisoned with NaN before each kernel is verified; also for temporaries.
  template <typename T>
  Buffer<T> output(size_t count) {
    return buffer<T>(outputs_, count, 0);
  }
  /// What the outputs should be. `compute` fills the references in and is not timed; meanwhile it
  /// may allocate up to `scratch_bytes`.
  Buffer<double> reference(size_t count) { return buffer<double>(references_, count, 0); }
  void reference_from(double scratch_bytes, std::function<void()> compute) {
    scratch_bytes_ = scratch_bytes;
    compute_reference_ = std::move(compute);
  }

  /// Times these kernels, unless the command line says otherwise, as microsecond kernels run in a
  /// real program: kGraphCalls calls in a CUDA graph, per call. The cache stays warm.
  void in_graph() { timing_ = Timing::graph; }

  /// Every kernel (that does not say otherwise) is held to this.
  template <typename T>
  void check(const Buffer<T>& output, const Buffer<double>& reference, double tolerance) {
    checks_.push_back({output.storage(), reference.storage(), tolerance});
  }

  /// Adds a row. The first one is what `speed` compares with. The reference returned is valid until
  /// the next call.
  Kernel& kernel(std::string name, Role role, std::function<void()> launch);
  /// Adds a row that may be computed in several ways, at least one. On a GPU the few that should be
  /// the fastest are tried before the row is verified, and the fastest of them is what is verified
  /// and timed. Where nothing is timed, the row is the way that should be the fastest.
  Kernel& kernel(std::string name, Role role, std::vector<Way> ways, const Tries& tries = {});

  /// After the tables, on a GPU, if both kernels were timed: comparison_text() of `format` and of
  /// how many times as fast as `slow` `fast` is.
  void compare(std::string fast, std::string slow, std::string format);

 private:
  friend class Lesson;
  using Storages = std::vector<std::shared_ptr<Storage>>;
  template <typename T>
  static Buffer<T> buffer(Storages& list, size_t count, double scale) {
    auto storage = std::make_shared<Storage>();
    storage->count = count;
    storage->type = type_of<T>;
    storage->element_bytes = sizeof(T);
    storage->scale = scale;
    list.push_back(storage);
    return Buffer<T>(storage);
  }
  struct Comparison {
    std::string fast, slow, format;
  };

  std::string name_;
  std::vector<Dim> dims_;
  std::string dtype_;
  Work work_;
  Rate rate_{};
  Timing timing_ = Timing::cold;
  Storages inputs_, outputs_, references_, workspaces_;
  std::vector<std::function<void()>> adjust_inputs_;
  double scratch_bytes_ = 0;
  std::function<void()> compute_reference_;
  std::vector<Check> checks_;
  std::vector<Kernel> kernels_;
  std::vector<Comparison> comparisons_;
};

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
