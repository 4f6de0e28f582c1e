// A plan: an operator that is ready to be launched, for any pointers.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "operators/library/plan/key.h"
#include "primitives/early_launch.cuh"

namespace operators::library {

constexpr size_t kAligned = 256;  // a workspace and its pieces, in bytes

/// An argument of a call. `alignment` in bytes.
struct Given {
  const char* name;
  const void* data;
  size_t bytes;
  bool written;
  size_t alignment = 16;
  bool optional = false;  ///< may be NULL, and is 0 bytes then
};
using Pointers = std::span<const void* const>;  // of a call's operands

inline bool overlap(const Given& a, const Given& b) {
  return address(a.data) < address(b.data) + b.bytes && address(b.data) < address(a.data) + a.bytes;
}

constexpr int kZerosThreads = 256, kMostZerosBlocks = 1024;

/// Zeros in a workspace: a thread writes 16 bytes at a time. A kernel, and not cudaMemsetAsync, so
/// that a launch that follows early may take its places meanwhile.
static __global__ void __launch_bounds__(kZerosThreads) zeros(uint4* to, size_t count) {
  primitives::start_next_kernel();
  const size_t all = size_t{gridDim.x} * kZerosThreads;
  for (size_t i = size_t{blockIdx.x} * kZerosThreads + threadIdx.x; i < count; i += all) {
    to[i] = make_uint4(0, 0, 0, 0);
  }
}

/// Writes `bytes` zeros, rounded up to a multiple of 16. `to` is aligned to 16 bytes.
inline void write_zeros(void* to, size_t bytes, cudaStream_t stream) {
  const size_t count = primitives::ceil_div(bytes, sizeof(uint4));
  const size_t blocks = std::min<size_t>(primitives::ceil_div(count, size_t{kZerosThreads}),
                                         size_t{kMostZerosBlocks});
  zeros<<<static_cast<unsigned>(blocks), kZerosThreads, 0, stream>>>(static_cast<uint4*>(to),
                                                                     count);
  primitives::check(cudaPeekAtLastError(), "the launch of zeros");
}

/// Gives out pieces of a call's workspace, one after another.
class Carver {
 public:
  Carver(const Running& running, cudaStream_t stream) : running_(&running), stream_(stream) {}

  size_t used() const { return used_; }

  /// The operator's ways that are searched for and that the device has the shared memory for:
  /// others would fail when they are launched, after everything has been accepted. Another stream
  /// may be at work, too.
  std::vector<Way> ways(const Operator& make, const Search& search) {
    const Workspace workspace = {
        .of_any =
            [this](size_t bytes) {
              return Memory<char>([of = running_, at = take(bytes)] { return of->workspace + at; },
                                  bytes);
            },
        .of_zeros = [this](size_t bytes) { return zeros(bytes); },
    };
    std::vector<Way> all = make({workspace, stream_, false, search}, Operands(*running_));
    const int most = primitives::most_shared_bytes();
    std::erase_if(all, [&](const Way& way) { return way.shared_bytes > most; });
    return all;
  }

 private:
  size_t take(size_t bytes) {
    const size_t piece = used_;
    used_ += (bytes + kAligned - 1) / kAligned * kAligned;
    return piece;
  }
  /// Memory that is set to zero on the stream when a way first asks where it is, once a call: not
  /// all ways do.
  Memory<char> zeros(size_t bytes) {
    const auto data = [of = running_, at = take(bytes), bytes, stream = stream_,
                       last = std::make_shared<uint64_t>(0)] {
      char* const piece = of->workspace + at;
      if (*last != of->number && bytes > 0) write_zeros(piece, bytes, stream);
      *last = of->number;
      return piece;
    };
    return Memory<char>(data, bytes);
  }

  const Running* running_;
  cudaStream_t stream_;
  size_t used_ = 0;
};

/// The answers that a plan's launches have been given: a few for each question, as there may be
/// several pointers that take turns.
class PlanAnswers : public primitives::Answers {
 public:
  bool find(const void* question, size_t bytes, void* answer, size_t answer_bytes) override {
    // The next question is most often the one that came next the last time.
    for (size_t i = 0; i < entries_.size(); ++i, ++next_) {
      if (next_ >= entries_.size()) next_ = 0;
      const Entry& entry = entries_[next_];
      if (entry.bytes != bytes || entry.answer_bytes != answer_bytes) continue;
      if (std::memcmp(entry.question, question, bytes) != 0) continue;
      std::memcpy(answer, entry.answer, answer_bytes);
      ++next_;
      return true;
    }
    return false;
  }
  void keep(const void* question, size_t bytes, const void* answer, size_t answer_bytes) override {
    if (bytes > sizeof(Entry::question) || answer_bytes > sizeof(Entry::answer)) return;
    if (entries_.size() < kMost) entries_.emplace_back();
    Entry& entry = entries_[entries_.size() < kMost ? entries_.size() - 1 : oldest_++ % kMost];
    entry.bytes = bytes, entry.answer_bytes = answer_bytes;
    std::memcpy(entry.question, question, bytes);
    std::memcpy(entry.answer, answer, answer_bytes);
  }

 private:
  static constexpr size_t kMost = 64;
  struct Entry {
    size_t bytes, answer_bytes;
    unsigned char question[120], answer[128];
  };
  std::vector<Entry> entries_;
  size_t next_ = 0, oldest_ = 0;
};

/// While there is one, the thread's launches ask these answers first.
class Asking {
 public:
  explicit Asking(PlanAnswers& answers) { primitives::kept_answers = &answers; }
  ~Asking() { primitives::kept_answers = nullptr; }
  Asking(const Asking&) = delete;
  Asking& operator=(const Asking&) = delete;
};

/// Refuses what is not memory of the device, which is the current one.
inline void check_place(const Given& argument, int device) {
  const uint64_t number = KnownAllocations::number_of(argument.data);
  if (number != 0 && known_allocations.has(number)) return;
  cudaPointerAttributes attributes = {};
  primitives::check(cudaPointerGetAttributes(&attributes, argument.data),
                    "cudaPointerGetAttributes");
  if (attributes.type == cudaMemoryTypeManaged) return;
  if (attributes.type != cudaMemoryTypeDevice) {
    throw Refusal{FK_BAD_DEVICE, std::string(argument.name) + " is not memory of a GPU"};
  }
  if (attributes.device != device) {
    throw Refusal{FK_BAD_DEVICE, std::string(argument.name) + " is memory of device " +
                                     std::to_string(attributes.device) +
                                     "; the current device is " + std::to_string(device)};
  }
  if (number != 0 && KnownAllocations::is_whole(argument.data)) known_allocations.add(number);
}

/// Refuses the last argument. Those before it have been checked.
inline void check_last(std::span<const Given> arguments, int device) {
  const Given& last = arguments.back();
  if (!last.data && last.optional) return;
  if (!last.data) throw Refusal{FK_BAD_ARGUMENT, std::string(last.name) + " is NULL"};
  if (address(last.data) % last.alignment != 0) {
    throw Refusal{FK_BAD_ALIGNMENT, std::string(last.name) + ": the pointer is not aligned to " +
                                        std::to_string(last.alignment) + " bytes"};
  }
  if (address(last.data) + last.bytes < address(last.data)) {
    throw Refusal{FK_BAD_SHAPE, std::string(last.name) + " ends beyond the address space"};
  }
  for (const Given& other : arguments.first(arguments.size() - 1)) {
    if (!(last.written || other.written) || !overlap(last, other)) continue;
    const auto& [out, in] = last.written ? std::tie(last, other) : std::tie(other, last);
    throw Refusal{FK_OVERLAP, std::string(out.name) + ", which is written, overlaps " + in.name};
  }
  check_place(last, device);
}

/// Refuses an argument that the description says is not there.
inline void refuse_given(const char* name, const void* pointer) {
  if (!pointer) return;
  throw Refusal{FK_BAD_ARGUMENT,
                std::string(name) + " is given; by the description it has to be NULL"};
}

[[noreturn]] inline void refuse_shape() {
  throw Refusal{FK_BAD_SHAPE, "this device has no way to compute this shape"};
}

/// An operator that is ready to be launched, for any pointers.
class Plan {
 public:
  /// It computes in the way with this id, or else in the one that should be the fastest. Throws a
  /// Refusal for what cannot be computed.
  explicit Plan(const Key& key, const std::optional<WayId>& id = {})
      : key_(key), task_(key.task()), capability_(capability_to_plan_for()) {
    if (task_.arguments.size() > kMostOperands) throw primitives::Error("too many arguments");
    choose(id);
  }
  Plan(const Plan&) = delete;  // its way refers to it
  Plan& operator=(const Plan&) = delete;

  const Key& key() const { return key_; }
  size_t operands() const { return task_.arguments.size(); }
  /// In bytes, as a query says it too.
  size_t workspace() const { return needed_; }

  /// Copies what a call brings, a pointer for each operand, or refuses it.
  void accept(Pointers pointers, void* workspace, size_t bytes) {
    // What an earlier call of the caller's own has left is not this call's to report as its own.
    primitives::check(cudaPeekAtLastError(), "an earlier call, before this one");
    Given all[kMostOperands + 1];
    known_allocations.are_of(key_.context());
    size_t count = 0, place = 0;
    for (const Argument& each : task_.arguments) {
      const void* const pointer = pointers[place++];
      if (each.absent) {
        refuse_given(each.name, pointer);
        continue;
      }
      const bool none = each.optional && !pointer;
      all[count] = {each.name, pointer, none ? 0 : each.bytes, each.written, 16, each.optional};
      check_last({all, ++count}, key_.device());
    }
    if (bytes < needed_) {
      throw Refusal{FK_BAD_WORKSPACE, "workspace has " + std::to_string(bytes) + " bytes; " +
                                          std::to_string(needed_) + " are needed"};
    }
    if (needed_ > 0) {
      all[count++] = {"workspace", workspace, needed_, true, kAligned};
      check_last({all, count}, key_.device());
    }
    for (size_t i = 0; i < pointers.size(); ++i) {
      running_.operands[i] = const_cast<void*>(pointers[i]);
    }
    running_.workspace = static_cast<char*>(workspace);
  }

  /// The name of the way in which it computes.
  const std::string& way() const { return best_.name; }

  /// To be called after accept().
  void launch() {
    const TakingFor device(capability_);
    run(best_);
  }

  /// Chooses the way, as the constructor does. `needed_` is what the one takes that should be the
  /// fastest, since that is what a query says.
  void choose(const std::optional<WayId>& id) {
    const TakingFor device(capability_);
    Carver carver(running_, key_.stream());
    const std::vector<Way> ways = carver.ways(task_.make, {});  // the best one of each kind
    const Way* const expected = common::fastest(ways);
    if (!expected) refuse_shape();
    needed_ = carver.used();
    best_ = *expected;
    if (id && *id != best_.id) best_ = with_id(*id).value_or(best_);
    answers_ = {};
  }

  /// Whether its stream is captured: then no way can be tried.
  bool captured() const {
    cudaStreamCaptureStatus status;
    primitives::check(cudaStreamIsCapturing(key_.stream(), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }

  /// The id of the fastest of the ways to try, found by launching each. To be called after
  /// accept().
  WayId fastest() {
    const TakingFor device(capability_);
    const std::vector<Way> ways = ways_to_try();
    const Event start, end;
    const cudaStream_t stream = key_.stream();
    std::vector<float> least(ways.size(), INFINITY);
    const auto milliseconds = [&](const Way& each, int times) {
      primitives::check(cudaEventRecord(start, stream), "cudaEventRecord");
      for (int i = 0; i < times; ++i) run(each);
      primitives::check(cudaEventRecord(end, stream), "cudaEventRecord");
      primitives::check(cudaEventSynchronize(end), "cudaEventSynchronize");
      float all = 0;
      primitives::check(cudaEventElapsedTime(&all, start, end), "cudaEventElapsedTime");
      return all / static_cast<float>(times);
    };
    float first = INFINITY;  // how long the best of all has taken in the first rounds
    for (int round = 0; round < kRounds; ++round) {
      for (size_t i = 0; i < ways.size(); ++i) {
        if (round > 1 && least[i] > common::kHopeless * first) continue;
        // The first launch of a kernel loads its code.
        const int times = round == 0 || first > 0.1F ? 1 : 10;
        const float took = milliseconds(ways[i], times);
        if (round > 0) least[i] = std::min(least[i], took);
      }
      first = round == 0 ? milliseconds(ways[0], 1) : *std::min_element(least.begin(), least.end());
    }
    const auto best = std::min_element(least.begin(), least.end());
    // Where they take the same time the one stays that would be used otherwise.
    return ways[*best < kClearly * least[0] ? best - least.begin() : 0].id;
  }

 private:
  /// The way with this id, if it needs no more workspace than `needed_`.
  std::optional<Way> with_id(WayId id) const {
    Carver carver(running_, key_.stream());
    const std::vector<Way> ways = carver.ways(task_.make, {.only = id});
    const auto found = std::ranges::find(ways, id, &Way::id);
    if (found == ways.end() || carver.used() > needed_) return {};
    return *found;
  }

  void run(const Way& chosen) {
    ++running_.number;
    const Asking asking(answers_);
    chosen.launch();
    primitives::check(cudaPeekAtLastError(), "the launch");
  }

  /// The ways to try: first the one that is used otherwise, then the others, those first that
  /// should be the fastest.
  std::vector<Way> ways_to_try() const {
    Carver carver(running_, key_.stream());
    std::vector<Way> all = carver.ways(task_.make, {.all = true});
    all.resize(common::worth_trying(all, all.size()));
    std::vector<Way> ways = {best_};
    for (const Way& each : all) {
      if (ways.size() >= kMostTried) break;
      if (std::ranges::find(ways, each.id, &Way::id) != ways.end()) continue;
      if (std::optional<Way> way = with_id(each.id)) ways.push_back(std::move(*way));
    }
    return ways;
  }

  struct Event {
    cudaEvent_t event;
    Event() { primitives::check(cudaEventCreate(&event), "cudaEventCreate"); }
    ~Event() { cudaEventDestroy(event); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    operator cudaEvent_t() const { return event; }
  };

  static constexpr size_t kMostOperands = std::size(Running{}.operands);
  static constexpr size_t kMostTried = 32;
  static constexpr float kClearly = 0.98F;
  static constexpr int kRounds = 5;  ///< the first one is not timed

  Key key_;
  Task task_;
  primitives::Capability capability_;  ///< what this plan takes the device for
  Running running_;
  Way best_;
  PlanAnswers answers_;
  size_t needed_ = 0;
};

}  // namespace operators::library
