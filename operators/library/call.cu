#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "operators/library/call.h"
#include "operators/library/plan/plan.cuh"

namespace operators::library {

namespace {

using primitives::check;

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

[[noreturn]] void refuse_capability(const char* name, const std::string& needed) {
  throw Refusal{FK_BAD_DEVICE,
                std::string(name) + " needs a GPU of compute capability " + needed +
                    "; this one has " + dotted(primitives::own_capability()) +
                    (primitives::taken_for.number != 0
                         ? " and is taken for " + dotted(primitives::taken_for.number)
                         : "")};
}

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

  /// Nothing: not tried yet.
  std::optional<WayId> of(const Key& key) {
    const std::lock_guard lock(mutex_);
    const auto found = ids_.find(key.without_stream());
    return found == ids_.end() ? std::nullopt : std::optional(found->second);
  }
  void set(const Key& key, WayId id) {
    const std::lock_guard lock(mutex_);
    if (ids_.size() >= kMost) ids_.erase(ids_.begin());
    ids_[key.without_stream()] = id;
    ++changes;
  }

 private:
  static constexpr size_t kMost = 4096;
  std::mutex mutex_;
  std::map<decltype(std::declval<Key>().without_stream()), WayId> ids_;
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

void check_capability(const char* name, int least) {
  const TakingFor device(capability_to_plan_for());
  if (primitives::compute_capability() >= least) return;
  refuse_capability(name, dotted(least) + " or newer");
}

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
      if (tunings.on.load(std::memory_order_relaxed) && !tunings.of(key) && !plan.captured()) {
        tunings.set(key, plan.fastest());
      }
      if (const uint64_t now = tunings.changes.load(std::memory_order_acquire);
          entry.changes != now) {
        plan.choose(tunings.of(key));
        entry.changes = now;
      }
      plan.launch();
      copy(way, plan.way().c_str());
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
                                          &cross_entropy_backward,
                                          &attention_backward,
                                          &product_bias_forward,
                                          &product_backward,
                                          &diffusion_ragged_forward,
                                          &diffusion_ragged_backward,
                                          &gradients_ragged_forward,
                                          &gradients_ragged_backward,
                                          &gating_two_forward,
                                          &gating_two_backward,
                                          &clifford_connected_kept_forward,
                                          &clifford_connected_kept_backward,
                                          &clifford_layer_forward,
                                          &clifford_layer_backward,
                                          &gating_two_kept_forward,
                                          &gating_two_kept_backward};
static_assert(std::size(kFunctions) == FK_GATING_TWO_KEPT_BACKWARD);

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
    if (carver.ways(task.make, {}).empty()) refuse_shape();
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
    copy(way, plan.way().c_str());
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

extern "C" const char* fk_plan_way(const fk_plan* plan) {
  return plan ? plan->plan.way().c_str() : "";
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
