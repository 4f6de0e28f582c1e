#include <cuda.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <tuple>
#include <utility>

#include "operators/device_facts.h"
#include "operators/library/call.h"
#include "primitives/check.h"
#include "primitives/early_launch.cuh"
#include "primitives/launch.h"

namespace operators::library {

namespace {

using primitives::check;

constexpr size_t kAligned = 256;  // a workspace and its pieces, in bytes
constexpr size_t kMostWords = 512;
constexpr int64_t kMostStride = 1 << 30;

thread_local char error[kMostWords] = "", way[kMostWords] = "";

/// Without an allocation, so that it cannot fail.
void copy(char (&to)[kMostWords], const char* words) noexcept {
  size_t end = 0;
  for (; words[end] != '\0' && end + 1 < kMostWords; ++end) to[end] = words[end];
  to[end] = '\0';
}
void note(const char* sentence) noexcept { copy(error, sentence); }

uintptr_t address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

/// An argument of a call. `alignment` in bytes.
struct Given {
  const char* name;
  const void* data;
  size_t bytes;
  bool written;
  size_t alignment = 16;
};
using Pointers = std::span<const void* const>;  // of a call's operands

bool overlap(const Given& a, const Given& b) {
  return address(a.data) < address(b.data) + b.bytes && address(b.data) < address(a.data) + a.bytes;
}

const char* name_of(fk_type type) {
  switch (type) {
    case FK_FLOAT16:
      return "FK_FLOAT16";
    case FK_BFLOAT16:
      return "FK_BFLOAT16";
    case FK_FLOAT32:
      return "FK_FLOAT32";
    case FK_TF32:
      return "FK_TF32";
    case FK_TF32X3:
      return "FK_TF32X3";
  }
  return "?";
}

std::string dotted(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}
[[noreturn]] void refuse_capability(const char* name, const std::string& needed) {
  throw Refusal{FK_BAD_DEVICE,
                std::string(name) + " needs a GPU of compute capability " + needed +
                    "; this one has " + dotted(primitives::own_capability()) +
                    (primitives::taken_for.number != 0
                         ? " and is taken for " + dotted(primitives::taken_for.number)
                         : "")};
}

/// What plans that are made now take the current device for: what the environment's variable says,
/// or what it is.
primitives::Capability capability_to_plan_for() {
  const char* const variable = "FUSED_KERNELS_CAPABILITY";
  const char* const said = std::getenv(variable);
  if (said == nullptr || *said == '\0') return {};
  const auto found =
      std::find_if(std::begin(kCapabilities), std::end(kCapabilities),
                   [&](const primitives::Capability& each) { return dotted(each.number) == said; });
  if (found == std::end(kCapabilities)) {
    throw Refusal{FK_BAD_ARGUMENT, std::string(variable) + " is \"" + said +
                                       "\"; it has to be a compute capability, such as 8.0"};
  }
  if (found->number > primitives::own_capability()) {
    throw Refusal{FK_BAD_DEVICE, std::string(variable) + " is " + said + "; this GPU has only " +
                                     dotted(primitives::own_capability())};
  }
  return *found;
}

constexpr int kZerosThreads = 256, kMostZerosBlocks = 1024;

/// Zeros in a workspace: a thread writes 16 bytes at a time. A launch that follows early takes its
/// places meanwhile; after cudaMemsetAsync it would wait some 3 us longer.
__global__ void __launch_bounds__(kZerosThreads) zeros(uint4* to, size_t count) {
  primitives::start_next_kernel();
  const size_t all = size_t{gridDim.x} * kZerosThreads;
  for (size_t i = size_t{blockIdx.x} * kZerosThreads + threadIdx.x; i < count; i += all) {
    to[i] = make_uint4(0, 0, 0, 0);
  }
}

/// Writes `bytes` zeros, rounded up to a multiple of 16. `to` is aligned to 16 bytes.
void write_zeros(void* to, size_t bytes, cudaStream_t stream) {
  const size_t count = primitives::ceil_div(bytes, sizeof(uint4));
  const size_t blocks = std::min<size_t>(primitives::ceil_div(count, size_t{kZerosThreads}),
                                         size_t{kMostZerosBlocks});
  zeros<<<static_cast<unsigned>(blocks), kZerosThreads, 0, stream>>>(static_cast<uint4*>(to),
                                                                     count);
  check(cudaPeekAtLastError(), "the launch of zeros");
}

/// Gives out pieces of a call's workspace, one after another.
class Carver {
 public:
  Carver(const Running& running, cudaStream_t stream) : running_(&running), stream_(stream) {}

  /// Another stream may be at work, too, and nothing is tried: one way is wanted, that of this
  /// name, or else the one that should be the fastest.
  Workspace workspace(const std::string& only = {}) {
    return {
        .of_any =
            [this](size_t bytes) {
              return Memory<char>([of = running_, at = take(bytes)] { return of->workspace + at; },
                                  bytes);
            },
        .of_zeros = [this](size_t bytes) { return zeros(bytes); },
        .stream = stream_,
        .alone = false,
        .all_ways = false,
        .only = only,
    };
  }
  size_t used() const { return used_; }

  /// The operator's ways that the device has the shared memory for: others would fail when they are
  /// launched, after everything has been accepted.
  std::vector<Way> ways(const Operator& make, const Workspace& workspace) const {
    std::vector<Way> all = make(workspace, Operands(*running_));
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

/// What this library asks of the driver, not of the runtime.
struct Driver {
  decltype(&cuPointerGetAttribute) pointer_attribute;
  decltype(&cuCtxGetId) context_id;
};
const Driver& driver() {
  // Through the runtime, so that the library can be loaded where there is no driver to link to.
  const auto entry = []<typename Function>(Function*& to, const char* name, unsigned version) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &result),
          "cudaGetDriverEntryPointByVersion");
    if (result != cudaDriverEntryPointSuccess) {
      throw primitives::Error(std::string("the driver has no ") + name);
    }
    to = reinterpret_cast<Function*>(function);
  };
  static const Driver found = [&] {
    Driver driver = {};
    entry(driver.pointer_attribute, "cuPointerGetAttribute", 4000);
    entry(driver.context_id, "cuCtxGetId", 12000);
    return driver;
  }();
  return found;
}

/// A number that no other context has, before or after. A thread that has used nothing of CUDA's
/// has no context yet, which the driver's tensor maps need: then it gets one.
uint64_t context_of_thread() {
  unsigned long long id = 0;
  if (driver().context_id(nullptr, &id) == CUDA_SUCCESS) return id;
  cudaStreamCaptureStatus status;
  check(cudaStreamIsCapturing(cudaStreamPerThread, &status), "cudaStreamIsCapturing");
  if (driver().context_id(nullptr, &id) != CUDA_SUCCESS) {
    throw primitives::Error("cuCtxGetId: the thread has no context");
  }
  return id;
}

/// Allocations that cudaPointerGetAttributes has found to be the current device's. Asking for an
/// allocation's number takes the driver a tenth of that time; and none gets the number of another
/// one that was freed.
class KnownAllocations {
 public:
  /// Forgets those of another context.
  void are_of(uint64_t context) {
    if (context == context_) return;
    *this = {};
    context_ = context;
  }
  bool has(uint64_t id) const { return numbers_[id % kMost] == id; }
  void add(uint64_t id) { numbers_[id % kMost] = id; }

  /// 0 where there is none.
  static uint64_t number_of(const void* pointer) {
    unsigned long long id = 0;
    const CUresult status =
        driver().pointer_attribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, address(pointer));
    return status == CUDA_SUCCESS ? id : 0;
  }
  /// Whether it is memory of cudaMalloc(), all on one device. (Of addresses that are reserved first
  /// and mapped later, parts may be on different ones.)
  static bool is_whole(const void* pointer) {
    unsigned long long whole = 0;
    const CUresult status = driver().pointer_attribute(
        &whole, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address(pointer));
    return status == CUDA_SUCCESS && whole != 0;
  }

 private:
  static constexpr size_t kMost = 256;
  uint64_t context_ = 0;
  uint64_t numbers_[kMost] = {};
};
thread_local KnownAllocations known_allocations;

}  // namespace

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

namespace {

/// While there is one, the thread's launches ask these answers first.
class Asking {
 public:
  explicit Asking(PlanAnswers& answers) { primitives::kept_answers = &answers; }
  ~Asking() { primitives::kept_answers = nullptr; }
  Asking(const Asking&) = delete;
  Asking& operator=(const Asking&) = delete;
};

/// A description as this library knows it, in words.
using Words = std::array<uint64_t, kMostKnown / 8>;

/// Fields that the caller does not know are 0. Those that this library does not know have to be.
Words known(const Function& function, const void* description) {
  const std::string name = function.name;
  if (!description) throw Refusal{FK_BAD_ARGUMENT, name + " is NULL"};
  size_t size = 0;
  std::memcpy(&size, description, sizeof size);
  if (size % 8 != 0 || size < function.shortest || size > kMostDescription) {
    throw Refusal{FK_BAD_ARGUMENT, name + ": size is " + std::to_string(size) +
                                       "; it has to be a multiple of 8 from " +
                                       std::to_string(function.shortest) + " to " +
                                       std::to_string(kMostDescription)};
  }
  const auto* const bytes = static_cast<const unsigned char*>(description);
  for (size_t i = function.bytes; i < size; ++i) {
    if (bytes[i] == 0) continue;
    throw Refusal{FK_BAD_ARGUMENT, name + ": size is " + std::to_string(size) +
                                       "; this library knows " + std::to_string(function.bytes) +
                                       " bytes, and the others have to be 0"};
  }
  Words words = {};
  std::memcpy(words.data(), description, std::min(size, function.bytes));
  std::memcpy(words.data(), &function.bytes, sizeof function.bytes);
  function.clear_padding(words.data());
  return words;
}

}  // namespace

/// What plans are told apart by: all that a call has but its pointers.
class Key {
 public:
  Key(const Function& function, const void* description, cudaStream_t stream)
      : function_(&function), stream_(stream), description_(known(function, description)) {
    check(cudaGetDevice(&device_), "cudaGetDevice");
    context_ = context_of_thread();
    const auto mix = [this](uint64_t word) {
      hash_ = (hash_ ^ word) * 0x9E3779B97F4A7C15;
      hash_ ^= hash_ >> 32;
    };
    for (const uint64_t each : {address(stream_), context_, address(function_)}) mix(each);
    for (size_t i = 0; i < function.bytes / 8; ++i) mix(description_[i]);
  }

  bool operator==(const Key&) const = default;
  uint64_t hash() const { return hash_; }
  int device() const { return device_; }
  uint64_t context() const { return context_; }
  cudaStream_t stream() const { return stream_; }
  const char* name() const { return function_->name; }
  Task task() const { return function_->task(description_.data()); }
  /// Without stream and context: whatever these are, the same way is the fastest.
  auto without_stream() const { return std::tuple(function_, device_, description_); }

 private:
  const Function* function_;
  cudaStream_t stream_;
  Words description_;
  int device_ = 0;
  uint64_t context_ = 0, hash_ = 0;
};

namespace {

/// The fastest ways that were found by trying, of all threads.
class Tunings {
 public:
  /// One for the process. It is never destroyed: threads may call until the process ends.
  static Tunings& all() {
    static Tunings& tunings = *new Tunings;
    return tunings;
  }
  std::atomic<bool> on = false;
  std::atomic<uint64_t> changes = 0;

  /// The name of a way; empty: not tried yet.
  std::string of(const Key& key) {
    const std::lock_guard lock(mutex_);
    const auto found = names_.find(key.without_stream());
    return found == names_.end() ? "" : found->second;
  }
  void set(const Key& key, const std::string& name) {
    const std::lock_guard lock(mutex_);
    if (names_.size() >= kMost) names_.erase(names_.begin());
    names_[key.without_stream()] = name;
    ++changes;
  }

 private:
  static constexpr size_t kMost = 4096;
  std::mutex mutex_;
  std::map<decltype(std::declval<Key>().without_stream()), std::string> names_;
};

}  // namespace

void check_type(const char* name, int type, std::initializer_list<fk_type> types) {
  std::string known;
  for (const fk_type each : types) {
    if (type == each) return;
    known += (known.empty() ? "" : " or ") + std::string(name_of(each));
  }
  throw Refusal{FK_BAD_ARGUMENT, std::string(name) + ": type is " + std::to_string(type) +
                                     "; it has to be " + known};
}

void check_sizes(const std::vector<Size>& sizes) {
  for (const Size& size : sizes) {
    if (size.value >= 1 && size.value <= size.most) continue;
    throw Refusal{FK_BAD_SHAPE, std::string(size.name) + " is " + std::to_string(size.value) +
                                    "; it has to be from 1 to " + std::to_string(size.most)};
  }
}

void check_multiple(const char* name, int64_t value, int64_t of) {
  if (value % of == 0) return;
  throw Refusal{FK_BAD_SHAPE, std::string(name) + " is " + std::to_string(value) +
                                  "; it has to be a multiple of " + std::to_string(of)};
}

int64_t check_stride(const char* name, int64_t stride, int64_t cols, size_t element) {
  if (stride == 0 || stride == cols) return cols;
  const int64_t unit = static_cast<int64_t>(16 / element);
  if (stride < cols || stride > kMostStride) {
    throw Refusal{FK_BAD_SHAPE, std::string(name) + " is " + std::to_string(stride) +
                                    "; it has to be 0, or from " + std::to_string(cols) + " to " +
                                    std::to_string(kMostStride)};
  }
  if (stride % unit != 0) {
    throw Refusal{FK_BAD_ALIGNMENT, std::string(name) + " is " + std::to_string(stride) +
                                        "; rows that are not dense are a multiple of " +
                                        std::to_string(unit) + " elements apart, 16 bytes"};
  }
  return stride;
}

void check_hopper(const char* name) {
  const TakingFor device(capability_to_plan_for());
  if (!primitives::is_hopper()) refuse_capability(name, "9.0");
}

void check_capability(const char* name, int least) {
  const TakingFor device(capability_to_plan_for());
  if (primitives::compute_capability() >= least) return;
  refuse_capability(name, dotted(least) + " or newer");
}

namespace {

/// Refuses what is not memory of the device, which is the current one.
void check_place(const Given& argument, int device) {
  const uint64_t number = KnownAllocations::number_of(argument.data);
  if (number != 0 && known_allocations.has(number)) return;
  cudaPointerAttributes attributes = {};
  check(cudaPointerGetAttributes(&attributes, argument.data), "cudaPointerGetAttributes");
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
void check_last(std::span<const Given> arguments, int device) {
  const Given& last = arguments.back();
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

[[noreturn]] void refuse_shape() {
  throw Refusal{FK_BAD_SHAPE, "this device has no way to compute this shape"};
}

}  // namespace

/// An operator that is ready to be launched, for any pointers.
class Plan {
 public:
  /// It computes in the way of this name, or else in the one that should be the fastest. Throws a
  /// Refusal for what cannot be computed.
  explicit Plan(const Key& key, const std::string& way_name = {})
      : key_(key), task_(key.task()), capability_(capability_to_plan_for()) {
    if (task_.arguments.size() > kMostOperands) throw primitives::Error("too many arguments");
    choose(way_name);
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
    check(cudaPeekAtLastError(), "an earlier call, before this one");
    Given all[kMostOperands + 1];
    known_allocations.are_of(key_.context());
    size_t count = 0;
    for (const Argument& each : task_.arguments) {
      all[count] = {each.name, pointers[count], each.bytes, each.written};
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

  /// To be called after accept().
  void launch() {
    const TakingFor device(capability_);
    run(best_);
    copy(way, best_.name.c_str());
  }

  /// Chooses the way, as the constructor does. `needed_` is what the one takes that should be the
  /// fastest, since that is what a query says.
  void choose(const std::string& way_name) {
    const TakingFor device(capability_);
    Carver carver(running_, key_.stream());
    const std::vector<Way> ways = carver.ways(task_.make, carver.workspace());
    if (ways.empty()) refuse_shape();
    // One way, or the fastest one of several kinds of ways, which come first where they are equal.
    const Way expected = *std::min_element(ways.begin(), ways.end(), sooner);
    needed_ = carver.used();
    std::optional<Way> other;
    if (!way_name.empty() && way_name != expected.name) other = named(way_name);
    best_ = other ? *other : expected;
    answers_ = {};
  }

  /// Whether its stream is captured: then no way can be tried.
  bool captured() const {
    cudaStreamCaptureStatus status;
    check(cudaStreamIsCapturing(key_.stream(), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }

  /// The name of the fastest of the ways to try, found by launching each. To be called after
  /// accept().
  std::string fastest() {
    const TakingFor device(capability_);
    const std::vector<Way> ways = ways_to_try();
    const Event start, end;
    const cudaStream_t stream = key_.stream();
    std::vector<float> least(ways.size(), INFINITY);
    const auto milliseconds = [&](const Way& each, int times) {
      check(cudaEventRecord(start, stream), "cudaEventRecord");
      for (int i = 0; i < times; ++i) run(each);
      check(cudaEventRecord(end, stream), "cudaEventRecord");
      check(cudaEventSynchronize(end), "cudaEventSynchronize");
      float all = 0;
      check(cudaEventElapsedTime(&all, start, end), "cudaEventElapsedTime");
      return all / static_cast<float>(times);
    };
    float first = INFINITY;  // how long the best of all has taken in the first rounds
    for (int round = 0; round < kRounds; ++round) {
      for (size_t i = 0; i < ways.size(); ++i) {
        if (round > 1 && least[i] > kSlow * first) continue;
        // The first launch of a kernel loads its code.
        const int times = round == 0 || first > 0.1F ? 1 : 10;
        const float took = milliseconds(ways[i], times);
        if (round > 0) least[i] = std::min(least[i], took);
      }
      first = round == 0 ? milliseconds(ways[0], 1) : *std::min_element(least.begin(), least.end());
    }
    const auto best = std::min_element(least.begin(), least.end());
    // Where they take the same time the one stays that would be used otherwise.
    return ways[*best < kClearly * least[0] ? best - least.begin() : 0].name;
  }

 private:
  static bool sooner(const Way& a, const Way& b) { return a.microseconds < b.microseconds; }

  /// The way of this name, if it needs no more workspace than `needed_`.
  std::optional<Way> named(const std::string& name) const {
    Carver carver(running_, key_.stream());
    const std::vector<Way> ways = carver.ways(task_.make, carver.workspace(name));
    const auto found =
        std::find_if(ways.begin(), ways.end(), [&](const Way& way) { return way.name == name; });
    if (found == ways.end() || carver.used() > needed_) return {};
    return *found;
  }

  void run(const Way& chosen) {
    ++running_.number;
    const Asking asking(answers_);
    chosen.launch();
    check(cudaPeekAtLastError(), "the launch");
  }

  /// The ways to try: first the one that is used otherwise, then the others, those first that
  /// should be the fastest.
  std::vector<Way> ways_to_try() const {
    Carver carver(running_, key_.stream());
    Workspace workspace = carver.workspace();
    workspace.all_ways = true;
    std::vector<Way> all = carver.ways(task_.make, workspace);
    std::stable_sort(all.begin(), all.end(), sooner);
    std::vector<Way> ways = {best_};
    for (const Way& each : all) {
      if (ways.size() >= kMostTried || each.microseconds > kHopeless * all[0].microseconds) break;
      const auto same = [&](const Way& way) { return way.name == each.name; };
      if (std::any_of(ways.begin(), ways.end(), same)) continue;
      if (std::optional<Way> way = named(each.name)) ways.push_back(std::move(*way));
    }
    return ways;
  }

  struct Event {
    cudaEvent_t event;
    Event() { check(cudaEventCreate(&event), "cudaEventCreate"); }
    ~Event() { cudaEventDestroy(event); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    operator cudaEvent_t() const { return event; }
  };

  static constexpr size_t kMostOperands = std::size(Running{}.operands);
  static constexpr size_t kMostTried = 32;
  static constexpr double kHopeless = 1.5;  ///< so many times as long as the first are not tried
  static constexpr float kSlow = 1.5F, kClearly = 0.98F;
  static constexpr int kRounds = 5;  ///< the first one is not timed

  Key key_;
  Task task_;
  primitives::Capability capability_;  ///< what this plan takes the device for
  Running running_;
  Way best_;
  PlanAnswers answers_;
  size_t needed_ = 0;
};

namespace {

/// A thread's plans. There are at most kMost: then the one goes that was used the longest ago.
class Plans {
 public:
  static constexpr size_t kMost = 64;

  ~Plans() { gone = true; }
  static Plans& of_thread() {
    if (gone) throw Refusal{FK_CUDA_ERROR, "a call of a thread that has ended"};
    static thread_local Plans plans;
    return plans;
  }

  /// Accepts and launches what the plan with this key is given. While fk_tune() says so the ways
  /// are tried first, if they have not been.
  void launch(const Key& key, Pointers pointers, void* workspace, size_t bytes) {
    Entry& entry = at(key);
    Plan& plan = *entry.plan;
    plan.accept(pointers, workspace, bytes);
    try {
      Tunings& tunings = Tunings::all();
      if (tunings.on.load(std::memory_order_relaxed) && tunings.of(key).empty() &&
          !plan.captured()) {
        tunings.set(key, plan.fastest());
      }
      if (const uint64_t now = tunings.changes.load(std::memory_order_acquire);
          entry.changes != now) {
        plan.choose(tunings.of(key));
        entry.changes = now;
      }
      plan.launch();
    } catch (...) {  // the next call asks everything anew
      std::erase_if(entries_, [&](const Entry& each) { return each.plan.get() == &plan; });
      throw;
    }
  }

 private:
  struct Entry {
    uint64_t hash, used, changes;  ///< the last: of Tunings, when the plan chose its way
    std::unique_ptr<Plan> plan;
  };

  Entry& at(const Key& key) {
    for (Entry& each : entries_) {
      if (each.hash != key.hash() || each.plan->key() != key) continue;
      each.used = ++calls_;
      return each;
    }
    Tunings& tunings = Tunings::all();
    const uint64_t changes = tunings.changes.load(std::memory_order_acquire);
    auto plan = std::make_unique<Plan>(key, tunings.of(key));
    if (entries_.size() >= kMost) {
      entries_.erase(
          std::min_element(entries_.begin(), entries_.end(),
                           [](const Entry& a, const Entry& b) { return a.used < b.used; }));
    }
    return entries_.emplace_back(Entry{key.hash(), ++calls_, changes, std::move(plan)});
  }

  static thread_local bool gone;
  std::vector<Entry> entries_;
  uint64_t calls_ = 0;
};
thread_local bool Plans::gone = false;

/// The code for the exception that is being handled, whose sentence fk_last_error() then has.
int code_of_exception() noexcept {
  try {
    throw;
  } catch (const Refusal& refusal) {
    note(refusal.sentence.c_str());
    return refusal.code;
  } catch (const std::exception& failure) {
    note(failure.what());
    cudaGetLastError();  // it has been reported, and the next call shall not find it
    return FK_CUDA_ERROR;
  } catch (...) {
    note("an error that says nothing about itself");
    return FK_CUDA_ERROR;
  }
}

/// Runs a call to its end and returns its code.
template <typename Call>
int guarded(const Call& call) noexcept {
  try {
    call();
    return FK_OK;
  } catch (...) {
    return code_of_exception();
  }
}

/// While there is one, this device is the current one.
class OnDevice {
 public:
  explicit OnDevice(int device) : device_(device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (device_ == before_) return;
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    if (device_ < 0 || device_ >= count) {
      throw Refusal{FK_BAD_DEVICE, "device is " + std::to_string(device_) +
                                       "; it has to be from 0 to " + std::to_string(count - 1)};
    }
    check(cudaSetDevice(device_), "cudaSetDevice");
  }
  ~OnDevice() {
    if (device_ != before_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int device_, before_ = 0;
};

/// In the order of fk_function, which counts from 1.
constexpr const Function* kFunctions[] = {&product_forward,
                                          &gating_forward,
                                          &gating_backward,
                                          &attention_forward,
                                          &attention_log_sums,
                                          &diffusion_forward,
                                          &diffusion_backward,
                                          &softmax_forward,
                                          &softmax_backward,
                                          &gradients_forward,
                                          &gradients_backward,
                                          &clifford_forward,
                                          &clifford_backward,
                                          &clifford_connected_forward,
                                          &clifford_connected_backward,
                                          &cross_entropy_forward,
                                          &cross_entropy_backward};
static_assert(std::size(kFunctions) == FK_CROSS_ENTROPY_BACKWARD);

const Function& with_number(int number) {
  if (number >= 1 && number <= static_cast<int>(std::size(kFunctions))) {
    return *kFunctions[number - 1];
  }
  throw Refusal{FK_BAD_ARGUMENT,
                "function is " + std::to_string(number) + "; it has to be one of fk_function"};
}

void refuse_null(const char* name, const void* pointer) {
  if (!pointer) throw Refusal{FK_BAD_ARGUMENT, std::string(name) + " is NULL"};
}

}  // namespace

int query(const Function& function, const void* description, size_t* bytes) noexcept {
  return guarded([&] {
    const Task task = function.task(known(function, description).data());
    refuse_null("bytes", bytes);
    const TakingFor device(capability_to_plan_for());
    const Running running;
    Carver carver(running, nullptr);
    if (carver.ways(task.make, carver.workspace()).empty()) refuse_shape();
    *bytes = carver.used();
  });
}

int call(const Function& function, const void* description,
         std::initializer_list<const void*> operands, void* workspace, size_t bytes,
         cudaStream_t stream) noexcept {
  return guarded([&] {
    const Key key(function, description, stream);
    Plans::of_thread().launch(key, {operands.begin(), operands.size()}, workspace, bytes);
  });
}

}  // namespace operators::library

using namespace operators::library;

extern "C" int fk_version(void) { return FK_VERSION; }

extern "C" const char* fk_last_error(void) { return operators::library::error; }

extern "C" const char* fk_last_way(void) { return operators::library::way; }

extern "C" int fk_tune(int on) {
  return guarded([&] {
    if (on != 0 && on != 1) {
      throw Refusal{FK_BAD_ARGUMENT, "on is " + std::to_string(on) + "; it has to be 0 or 1"};
    }
    Tunings::all().on = on == 1;
  });
}

/// A plan that its caller owns.
struct fk_plan {
  Plan plan;
};

namespace {

/// Launches a caller's plan, or tries its ways first.
int run(fk_plan* handle, void* const* operands, size_t count, void* workspace, size_t bytes,
        bool is_trying) noexcept {
  return guarded([&] {
    refuse_null("plan", handle);
    refuse_null("operands", operands);
    Plan& plan = handle->plan;
    if (count != plan.operands()) {
      throw Refusal{FK_BAD_ARGUMENT, "count is " + std::to_string(count) + "; the plan has " +
                                         std::to_string(plan.operands()) + " operands"};
    }
    const OnDevice device(plan.key().device());
    if (context_of_thread() != plan.key().context()) {
      throw Refusal{FK_BAD_DEVICE, "the plan was made in another context of its device"};
    }
    plan.accept({operands, count}, workspace, bytes);
    if (is_trying) {
      if (plan.captured()) {
        throw Refusal{FK_BAD_ARGUMENT, "the stream is captured, and so no way can be tried"};
      }
      plan.choose(plan.fastest());
    }
    plan.launch();
  });
}

}  // namespace

extern "C" int fk_plan_create(int function, const void* description, int device,
                              struct CUstream_st* stream, fk_plan** plan) {
  return guarded([&] {
    refuse_null("plan", plan);
    const OnDevice current(device);
    *plan = new fk_plan{Plan(Key(with_number(function), description, stream))};
  });
}

extern "C" int fk_plan_workspace(const fk_plan* plan, size_t* bytes) {
  return guarded([&] {
    refuse_null("plan", plan);
    refuse_null("bytes", bytes);
    *bytes = plan->plan.workspace();
  });
}

extern "C" int fk_plan_run(fk_plan* plan, void* const* operands, size_t count, void* workspace,
                           size_t workspace_bytes) {
  return run(plan, operands, count, workspace, workspace_bytes, false);
}

extern "C" int fk_plan_tune(fk_plan* plan, void* const* operands, size_t count, void* workspace,
                            size_t workspace_bytes) {
  return run(plan, operands, count, workspace, workspace_bytes, true);
}

extern "C" void fk_plan_destroy(fk_plan* plan) { delete plan; }
