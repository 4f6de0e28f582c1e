// What ./try runs of a file without a main(): a function that says what the kernels are given, and
// what has to come out.
//
//     void test(Try& t, int n) {
//       auto x = t.input<float>(n);
//       auto y = t.result<float>(n);
//       t.run("scale", [=] { scale<<<(n + 255) / 256, 256>>>(x, y, 2.0f, n); });
//       t.expect(y, [=](int i) { return 2.0f * x[i]; }, 1e-6);
//     }
//
// It is called with n = 1000, 1024 and 1: sizes that fit the blocks, and sizes that do not.
// `./try scale.cu -- 50 60` takes 50 and 60 instead. Nothing but this header is needed, so nvcc
// builds such a file, too.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace common {

/// Memory of the device, and what is in it before each run.
struct TriedMemory {
  void* device = nullptr;
  std::vector<unsigned char> start, now;
  bool poisoned = false;
  int number = 0;  ///< of a result, from 1 on; an input has none

  TriedMemory() = default;
  TriedMemory(const TriedMemory&) = delete;
  TriedMemory& operator=(const TriedMemory&) = delete;
  ~TriedMemory() { cudaFree(device); }
};

/// Elements of type T. A kernel takes it as a T*; on the host `x[i]` is what element i is before
/// each run.
template <class T>
class Tried {
 public:
  using Element = T;

  explicit Tried(std::shared_ptr<TriedMemory> memory) : memory_(std::move(memory)) {}
  operator T*() const { return data(); }
  /// The same for a kernel template, whose type is deduced.
  T* data() const { return static_cast<T*>(memory_->device); }
  size_t size() const { return memory_->start.size() / sizeof(T); }
  template <class Index>
  const T& operator[](Index i) const {
    if (i < 0 || static_cast<size_t>(i) >= size()) {
      std::printf("test() asks for element %lld of memory that has %zu\n",
                  static_cast<long long>(i), size());
      std::fflush(stdout);
      std::exit(1);
    }
    return reinterpret_cast<const T*>(memory_->start.data())[i];
  }
  TriedMemory& memory() const { return *memory_; }

 private:
  std::shared_ptr<TriedMemory> memory_;
};

class Try {
 public:
  explicit Try(int n) : n_(n) {}

  /// Random numbers: from -1 to 1, and whole ones from -100 to 100.
  template <class T>
  Tried<T> input(size_t count) {
    std::uniform_real_distribution<float> real(-1, 1);
    std::uniform_int_distribution<int> whole(std::is_unsigned_v<T> ? 0 : -100, 100);
    return input<T>(count, [&](size_t) {
      if constexpr (std::is_same_v<T, bool>) {
        return real(random_) < 0;
      } else if constexpr (std::is_integral_v<T>) {
        return static_cast<T>(whole(random_));
      } else {
        static_assert(std::is_constructible_v<T, float>,
                      "input<T>(count, value) says what element i of such a type is");
        return T(real(random_));
      }
    });
  }

  /// Element i is value(i).
  template <class T, class Value>
  Tried<T> input(size_t count, Value value) {
    return make<T>(count, [&](T* start) {
      for (size_t i = 0; i < count; ++i) start[i] = value(static_cast<int>(i));
    });
  }

  /// What a kernel writes. Before each run it is NaN (a whole number: a value that nobody expects),
  /// so that an element that is never written shows.
  template <class T>
  Tried<T> result(size_t count) {
    const Tried<T> made = make<T>(count, [&](T* start) {
      const int byte = std::is_integral_v<T> ? 0xA5 : 0xFF;
      std::memset(static_cast<void*>(start), byte, count * sizeof(T));
    });
    made.memory().poisoned = true;
    return result_of(made);
  }
  /// The same of a kernel that adds to it, or the like: each element is `start` before each run.
  template <class T>
  Tried<T> result(size_t count, typename Tried<T>::Element start) {
    return result_of(input<T>(count, [=](int) { return start; }));
  }
  /// The same of a kernel that works in place: before each run it is what `start` is.
  template <class T>
  Tried<T> result(const Tried<T>& start) {
    return result_of(input<T>(start.size(), [&](int i) { return start[i]; }));
  }

  /// Sets all memory to its start, launches, and waits.
  template <class Launch>
  void run(const char* name, Launch launch) {
    name_ = name;
    for (const auto& each : all_) {
      cudaMemcpy(each->device, each->start.data(), each->start.size(), cudaMemcpyHostToDevice);
    }
    launch();
    cudaError_t error = cudaPeekAtLastError();
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
    for (const auto& each : all_) {
      const size_t bytes = each->now.size();
      if (error != cudaSuccess) break;
      error = cudaMemcpy(each->now.data(), each->device, bytes, cudaMemcpyDeviceToHost);
    }
    failed_ = error != cudaSuccess;
    if (failed_) say(false, std::string("it failed: ") + cudaGetErrorString(error));
    if (failed_) go_on();
  }

  /// Element i of the result has to be value(i), up to tolerance * max(1, |value(i)|).
  template <class T, class Value>
  void expect(const Tried<T>& result, Value value, double tolerance = 0) {
    if (name_.empty()) return say(false, "expect() comes after run()");
    if (failed_) return;
    const auto* const now = reinterpret_cast<const T*>(result.memory().now.data());
    const int count = static_cast<int>(result.size());
    int wrong = 0, unwritten = 0, first = 0, last = 0;
    for (int i = 0; i < count; ++i) {
      if (same(now[i], static_cast<T>(value(i)), tolerance)) continue;
      if (wrong++ == 0) first = i;
      last = i;
      const bool as_before = std::memcmp(&now[i], &result[i], sizeof(T)) == 0;
      unwritten += result.memory().poisoned && as_before;
    }
    if (wrong == 0) return say(true, of(result));
    std::string text = of(result) + (results_ < 2 ? "" : ", ") + "element " +
                       std::to_string(first) + " is " + text_of(now[first]) + ", and should be " +
                       text_of(static_cast<T>(value(first))) + ". Wrong are " +
                       std::to_string(wrong) + " of " + std::to_string(count) + " elements";
    if (wrong > 1) text += ", the last one is element " + std::to_string(last);
    if (unwritten > 0) text += "; " + std::to_string(unwritten) + " were never written";
    say(false, text);
  }

  bool right() const { return right_; }

 private:
  template <class T, class Fill>
  Tried<T> make(size_t count, Fill fill) {
    static_assert(std::is_trivially_copyable_v<T>, "the device gets copies, byte by byte");
    auto memory = std::make_shared<TriedMemory>();
    memory->start.resize(count * sizeof(T));
    memory->now.resize(count * sizeof(T));
    fill(reinterpret_cast<T*>(memory->start.data()));
    if (cudaMalloc(&memory->device, count * sizeof(T)) != cudaSuccess) {
      say(false, "there is no memory for " + std::to_string(count) + " elements");
      std::exit(1);
    }
    all_.push_back(memory);
    return Tried<T>(memory);
  }
  template <class T>
  Tried<T> result_of(const Tried<T>& memory) {
    memory.memory().number = ++results_;
    return memory;
  }

  template <class T>
  static constexpr bool is_number = std::is_arithmetic_v<T> || std::is_constructible_v<float, T>;
  template <class T>
  static double number(const T& value) {
    if constexpr (std::is_arithmetic_v<T>)
      return static_cast<double>(value);
    else
      return static_cast<float>(value);  // half and its kin
  }
  template <class T>
  static bool same(const T& got, const T& want, double tolerance) {
    if constexpr (is_number<T> && !std::is_integral_v<T>) {
      const double a = number(got), b = number(want);
      if (std::isnan(b) || std::isinf(b)) return a == b || (std::isnan(a) && std::isnan(b));
      return std::abs(a - b) <= tolerance * std::fmax(1, std::abs(b));
    } else if constexpr (std::is_integral_v<T>) {
      return got == want || std::abs(number(got) - number(want)) <= tolerance * number(want);
    } else {
      return std::memcmp(&got, &want, sizeof(T)) == 0;
    }
  }
  template <class T>
  static std::string text_of(const T& value) {
    if constexpr (std::is_integral_v<T>) {
      return std::to_string(value);
    } else if constexpr (is_number<T>) {
      char text[40];
      std::snprintf(text, sizeof text, "%.7g", number(value));
      return text;
    } else {
      return "another one";
    }
  }
  template <class T>
  std::string of(const Tried<T>& result) const {
    return results_ < 2 ? "" : "result " + std::to_string(result.memory().number);
  }
  /// The runs after one that has failed are not to blame for it.
  static void go_on() {
    cudaGetLastError();
#ifdef CUDA_CPU
    cudaDeviceReset();  // keeps all memory there, and kernels run again
#endif
  }
  void say(bool right, const std::string& text) {
    right_ = right_ && right;
    const std::string colon = text.empty() ? "" : ": ";
    std::printf("n = %d, %s: %s%s%s\n", n_, name_.c_str(), right ? "right" : "wrong", colon.c_str(),
                text.c_str());
  }

  int n_;
  std::mt19937 random_{1};
  std::vector<std::shared_ptr<TriedMemory>> all_;
  std::string name_;
  int results_ = 0;
  bool failed_ = false, right_ = true;
};

/// The main() that ./try gives such a file.
inline int run_tests(void (*test)(Try&, int), int count, char** words) {
  std::vector<int> sizes;
  for (int i = 1; i < count; ++i) sizes.push_back(std::atoi(words[i]));
  if (sizes.empty()) sizes = {1000, 1024, 1};
  bool right = true;
  for (const int n : sizes) {
    if (n < 1) {
      std::printf("%d is no size\n", n);
      return 2;
    }
    Try t(n);
    test(t, n);
    right = right && t.right();
    if (cudaDeviceSynchronize() != cudaSuccess) break;  // a GPU runs nothing more
  }
  return right ? 0 : 1;
}

}  // namespace common

using common::Try;
