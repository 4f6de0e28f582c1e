// A problem and its kernels, as a lesson describes them: buffers, checks, rows. Lesson::run() does
// what is described here (common/lesson.h).
#pragma once

#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "common/check.h"
#include "common/choose/way.h"
#include "common/device.h"

namespace common {

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
/// Before and behind it lie guards, whose bytes nobody may change (common/verify/guards.h).
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
using Storages = std::vector<std::shared_ptr<Storage>>;

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

/// What the device's peak rates allow, in milliseconds; 0 if they are unknown. And whether it is
/// the memory's rate that is the limit.
double limit_ms(const Work& work, const Device& device, Rate rate);
bool is_memory_bound(const Work& work, const Device& device, Rate rate);

struct Dim {
  const char* name;
  int64_t extent;
};

/// Error of an output against its fp64 reference; NaN or infinite if any element is. Where the
/// reference is all zeros it is 0 if the output is, too, and infinite if not.
struct Error {
  double frobenius = 0;  ///< ||out - reference|| / ||reference||
  /// max |out - reference| / rms(reference): one wrong element shows here. See kWorstToFrobenius.
  double worst = 0;
  double bound = 0;  ///< that both are held to, see bound_of()
};

/// An output, its fp64 reference of the same count, and the bound on the relative Frobenius error.
/// A single element may be off by kWorstToFrobenius times that bound, in units of the reference's
/// rms: rounding errors of 10^8 elements stay within 6 standard deviations, a wrong element does
/// not. (Few references have elements of more than kWorstToFrobenius times their rms, as the
/// gradient of a key that all queries see among those that few see. Such an element is rounded in
/// units of its own size: it may be off by the bound times itself.)
struct Check {
  std::shared_ptr<Storage> output, reference;
  double tolerance = 0;
  std::function<void()> compute_reference = {};  ///< if it is not the problem's
  /// The rms that the reference has unless terms cancel, for bound_of(); who computes the reference
  /// writes it. Null, or 0: the reference's own.
  std::shared_ptr<const double> uncancelled = {};
};
inline constexpr double kWorstToFrobenius = 16;

/// A tolerance is derived in units of the rms that a result has unless its terms cancel: for sums
/// of terms of either sign the root of the sum of their squares, which is what the terms' rounding
/// errors are a part of. Of many results that is their rms, too. Where there are few, all of them
/// may cancel, and their errors are a larger part of what is left. `few` results are therefore held
/// to the tolerance in those units: by a bound that is larger by what has cancelled. Inputs that
/// make it larger than kMostBound are drawn again, as it would prove nothing.
///
/// No bound is larger than that, whatever roundings could explain: the errors of right kernels
/// stay far below what the longest sums allow, and one beyond it is of no use.
double bound_of(const Check& check, double reference_rms);
inline constexpr double kMostBound = 0.05;
inline bool few(double results) { return results <= 256; }

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

/// Of the ways to compute a row at most so many are tried, where it does not say how many.
inline constexpr size_t kMostTried = 16;

/// What a few rows do around a launch.
struct Hooks {
  std::function<void()> before;  ///< a verified launch, untimed: a step's inputs
  /// Of work on several devices: brings all results to where the checks look; not timed.
  std::function<void()> collect;
  /// And what one launch takes, in milliseconds; of Timing::graph, each of kGraphCalls.
  std::function<float(Timing)> time;
  /// Of a kernel that reads its multiprocessor's clock: the cycles of its last launch.
  std::function<double()> cycles;
};

/// One row of the table.
struct Kernel {
  std::string name;
  Role role{};
  std::vector<Way> ways;      ///< to compute it, those that should be the fastest first; often one
  Work work;                  ///< the problem's, unless is_step() changes it
  std::vector<Check> checks;  ///< the problem's, unless there are some
  Hooks hooks;
  double steps = 0;          ///< of which each waits for the one before; 0: not stated
  double memory_bytes = 0;   ///< device memory that this way of computing needs; 0: not stated
  int least_capability = 0;  ///< compute capability of a GPU, times 10
  bool only_hopper = false;  ///< and it must be 9.0
  int shared_bytes =
      0;  ///< that a block asks for, if that is more than the 48 KB that every device gives

  /// A step of a longer computation has its own work, inputs that earlier steps make, and a result
  /// that `compute_reference` puts into `reference`.
  template <typename T>
  Kernel& is_step(Work step, std::function<void()> earlier_steps, const Buffer<T>& output,
                  const Buffer<double>& reference, double tolerance,
                  std::function<void()> compute_reference) {
    work = step;
    hooks.before = std::move(earlier_steps);
    checks = {{output.storage(), reference.storage(), tolerance, std::move(compute_reference)}};
    return *this;
  }
  /// States the device memory (bytes) that this way of computing needs, inputs and outputs
  /// included.
  Kernel& occupies(double bytes) {
    memory_bytes = bytes;
    return *this;
  }
  /// One thread takes so many steps, each of which waits for the one before, and puts the cycles
  /// that they took into `cycles`. On a GPU that is the row's time, over the clock of its sample.
  Kernel& counts_cycles(const Buffer<double>& cycles, int64_t count) {
    steps = static_cast<double>(count);
    hooks.cycles = [cycles] {
      double counted = 0;
      CUDA_CHECK(cudaMemcpy(&counted, cycles, sizeof counted, cudaMemcpyDeviceToHost));
      return counted;
    };
    return *this;
  }
  /// `capability` / 10 is the least compute capability that can run this; below it the row says so
  /// instead.
  Kernel& needs(int capability) {
    least_capability = capability;
    return *this;
  }
  /// sm_90a code: later architectures do not run it either.
  Kernel& hopper_only() {
    least_capability = 90;
    only_hopper = true;
    return *this;
  }
  /// A block asks for so much shared memory. To be said where that is more than 48 KB: a device
  /// that has less cannot run this, and the row says so instead.
  Kernel& needs_shared(size_t bytes) {
    shared_bytes = static_cast<int>(bytes);
    return *this;
  }
};

/// One table: inputs, outputs and a reference that its kernels share.
class Problem {
 public:
  /// Random numbers, uniform in [center - scale, center + scale).
  template <typename T>
  Buffer<T> input(size_t count, double scale = 1, double center = 0) {
    static_assert(std::is_same_v<T, half> || std::is_same_v<T, __nv_bfloat16> ||
                      std::is_same_v<T, float> || std::is_same_v<T, double>,
                  "an input is of random numbers: half, __nv_bfloat16, float or double");
    Buffer<T> result = buffer<T>(inputs, count, scale);
    result.storage()->center = center;
    return result;
  }
  /// Called when the inputs are filled, before the reference is computed: may change them.
  void adjust_inputs(std::function<void()> adjust) { adjustments.push_back(std::move(adjust)); }
  /// Zeros when the first kernel starts, and never touched between kernels: for what each
  /// launch leaves ready for the next one.
  template <typename T>
  Buffer<T> workspace(size_t count) {
    return buffer<T>(workspaces, count, 0);
  }
  /// Poisoned with NaN before each kernel is verified; also for temporaries.
  template <typename T>
  Buffer<T> output(size_t count) {
    return buffer<T>(outputs, count, 0);
  }
  /// What the outputs should be. `compute` fills the references in and is not timed; meanwhile it
  /// may allocate up to `scratch_bytes`.
  Buffer<double> reference(size_t count) { return buffer<double>(references, count, 0); }
  void reference_from(double scratch_bytes, std::function<void()> compute) {
    this->scratch_bytes = scratch_bytes;
    compute_reference = std::move(compute);
  }

  /// Times these kernels, unless the command line says otherwise, as microsecond kernels run in a
  /// real program: kGraphCalls calls in a CUDA graph, per call. The cache stays warm.
  void in_graph() { timing = Timing::graph; }

  /// Every kernel (that does not say otherwise) is held to this.
  template <typename T>
  void check(const Buffer<T>& output, const Buffer<double>& reference, double tolerance,
             std::shared_ptr<const double> uncancelled = {}) {
    checks.push_back(
        {output.storage(), reference.storage(), tolerance, {}, std::move(uncancelled)});
  }

  /// Adds a row. The first one is what `speed` compares with. The reference returned lives as long
  /// as the problem.
  Kernel& kernel(std::string name, Role role, std::function<void()> launch);
  /// Adds a row that may be computed in several ways, at least one. On a GPU the few that should be
  /// the fastest are tried before the row is verified, and the fastest of them is what is verified
  /// and timed. Where nothing is timed, the row is the way that should be the fastest.
  Kernel& kernel(std::string name, Role role, std::vector<Way> ways, size_t most = kMostTried);

  /// Prints, after the tables on a GPU if both kernels were timed, `format`, in which the one %
  /// becomes the time of `slow` over that of `fast` (common/report/comparison.h).
  void compare(std::string fast, std::string slow, std::string format);

 private:
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

 public:
  // What was described, for the harness.
  struct Comparison {
    std::string fast, slow, format;
  };
  std::string name;
  std::vector<Dim> dims;
  std::string dtype;
  Work work;
  Rate rate{};
  Timing timing = Timing::cold;
  Storages inputs, outputs, references, workspaces;
  std::vector<std::function<void()>> adjustments;
  double scratch_bytes = 0;
  std::function<void()> compute_reference;
  std::vector<Check> checks;
  std::deque<Kernel> kernels;  // whose references last
  std::vector<Comparison> comparisons;
};

}  // namespace common
