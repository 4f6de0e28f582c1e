#include "operators/library/call.h"

#include <algorithm>
#include <exception>
#include <memory>

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

bool overlap(const Argument& a, const Argument& b) {
  return address(a.data) < address(b.data) + b.bytes && address(b.data) < address(a.data) + a.bytes;
}

const char* name_of(fk_type type) {
  return type == FK_FLOAT16 ? "FK_FLOAT16" : type == FK_BFLOAT16 ? "FK_BFLOAT16" : "FK_FLOAT32";
}

/// The current device's compute capability, such as 90.
int capability() {
  return 10 * primitives::device_fact<cudaDevAttrComputeCapabilityMajor>() +
         primitives::device_fact<cudaDevAttrComputeCapabilityMinor>();
}
std::string dotted(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}
[[noreturn]] void refuse_capability(const char* name, const std::string& needed) {
  throw Refusal{FK_BAD_DEVICE, std::string(name) + " needs a GPU of compute capability " + needed +
                                   "; this one has " + dotted(capability())};
}

/// Gives out pieces of the caller's workspace, one after another.
class Carver {
 public:
  Carver(void* memory, cudaStream_t stream) : memory_(address(memory)), stream_(stream) {}

  /// Another stream may be at work, too, and nothing is tried.
  Workspace workspace() {
    return {
        .of_any =
            [this](size_t bytes) { return Memory<char>([at = take(bytes)] { return at; }, bytes); },
        .of_zeros = [this](size_t bytes) { return zeros(bytes); },
        .stream = stream_,
        .alone = false,
        .all_ways = false,
    };
  }
  size_t used() const { return used_; }

 private:
  char* take(size_t bytes) {
    char* const piece = reinterpret_cast<char*>(memory_ + used_);
    used_ += (bytes + kAligned - 1) / kAligned * kAligned;
    return piece;
  }
  /// Memory that is set to zero on the stream when a way first asks where it is: not all do.
  Memory<char> zeros(size_t bytes) {
    const auto data = [at = take(bytes), bytes, stream = stream_,
                       done = std::make_shared<bool>(false)] {
      if (!*done) check(cudaMemsetAsync(at, 0, bytes, stream), "cudaMemsetAsync");
      *done = true;
      return at;
    };
    return Memory<char>(data, bytes);
  }

  uintptr_t memory_;
  cudaStream_t stream_;
  size_t used_ = 0;
};

}  // namespace

void check_description(const char* name, const void* description, size_t size) {
  if (!description) throw Refusal{FK_BAD_ARGUMENT, std::string(name) + " is NULL"};
  const size_t found = *static_cast<const size_t*>(description);
  if (found != size) {
    throw Refusal{FK_BAD_ARGUMENT, std::string(name) + ": size is " + std::to_string(found) +
                                       "; this library's struct has " + std::to_string(size) +
                                       " bytes"};
  }
}

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
  if (capability() != 90) refuse_capability(name, "9.0");
}

void check_capability(const char* name, int least) {
  if (capability() >= least) return;
  refuse_capability(name, dotted(least) + " or newer");
}

namespace {

/// `count` of `arguments`, the last ones, have not been checked.
void check_last(const std::vector<Argument>& arguments, size_t count) {
  const auto first = arguments.end() - static_cast<std::ptrdiff_t>(count);
  for (auto at = first; at != arguments.end(); ++at) {
    const Argument& each = *at;
    if (!each.data) throw Refusal{FK_BAD_ARGUMENT, std::string(each.name) + " is NULL"};
    if (address(each.data) % each.alignment != 0) {
      throw Refusal{FK_BAD_ALIGNMENT, std::string(each.name) + ": the pointer is not aligned to " +
                                          std::to_string(each.alignment) + " bytes"};
    }
    if (address(each.data) + each.bytes < address(each.data)) {
      throw Refusal{FK_BAD_SHAPE, std::string(each.name) + " ends beyond the address space"};
    }
  }
  for (const Argument& out : arguments) {
    for (const Argument& other : arguments) {
      if (!out.written || &out == &other || !overlap(out, other)) continue;
      throw Refusal{FK_OVERLAP,
                    std::string(out.name) + ", which is written, overlaps " + other.name};
    }
  }
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  for (auto at = first; at != arguments.end(); ++at) {
    const Argument& each = *at;
    cudaPointerAttributes attributes = {};
    check(cudaPointerGetAttributes(&attributes, each.data), "cudaPointerGetAttributes");
    if (attributes.type == cudaMemoryTypeManaged) continue;
    if (attributes.type != cudaMemoryTypeDevice) {
      throw Refusal{FK_BAD_DEVICE, std::string(each.name) + " is not memory of a GPU"};
    }
    if (attributes.device != device) {
      throw Refusal{FK_BAD_DEVICE, std::string(each.name) + " is memory of device " +
                                       std::to_string(attributes.device) +
                                       "; the current device is " + std::to_string(device)};
    }
  }
}

}  // namespace

size_t workspace_bytes(const Operator& make) {
  Carver carver(nullptr, nullptr);
  if (make(carver.workspace()).empty()) {
    throw Refusal{FK_BAD_SHAPE, "this device has no way to compute this shape"};
  }
  return carver.used();
}

void launch(const Operator& make, std::vector<Argument> arguments, void* workspace, size_t bytes,
            cudaStream_t stream) {
  check(cudaPeekAtLastError(), "an earlier call, before this one");
  // A thread that has used no stream has no context yet, which the driver's tensor maps need.
  cudaStreamCaptureStatus status;
  check(cudaStreamIsCapturing(cudaStreamPerThread, &status), "cudaStreamIsCapturing");
  check_last(arguments, arguments.size());
  Carver carver(workspace, stream);
  const std::vector<Way> ways = make(carver.workspace());
  if (ways.empty()) throw Refusal{FK_BAD_SHAPE, "this device has no way to compute this shape"};
  if (bytes < carver.used()) {
    throw Refusal{FK_BAD_WORKSPACE, "workspace has " + std::to_string(bytes) + " bytes; " +
                                        std::to_string(carver.used()) + " are needed"};
  }
  if (carver.used() > 0) {
    arguments.push_back({"workspace", workspace, carver.used(), kAligned, true});
    check_last(arguments, 1);
  }
  // One way, or the fastest one of several kinds of ways, which come first where they are equal.
  const Way& best = *std::min_element(ways.begin(), ways.end(), [](const Way& a, const Way& b) {
    return a.microseconds < b.microseconds;
  });
  best.launch();
  check(cudaPeekAtLastError(), "the launch");
  copy(way, best.name.c_str());
}

int guarded(const std::function<void()>& call) noexcept {
  try {
    call();
    return FK_OK;
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

}  // namespace operators::library

extern "C" int fk_version(void) { return FK_VERSION; }

extern "C" const char* fk_last_error(void) { return operators::library::error; }

extern "C" const char* fk_last_way(void) { return operators::library::way; }
