// What the CPU backend promises, case by case.
//
//     semantics --list     prints the names of the cases
//     semantics CASE...    runs them (all without arguments); exits with 1 if an expectation fails

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_pipeline.h>
#include <cuda_runtime.h>
#include <mma.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda/atomic>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "primitives/mma.cuh"

using namespace primitives;

namespace {

// ---- A small test framework --------------------------------------------------------------------

int failures = 0;

std::map<std::string, void (*)()>& cases() {
  static std::map<std::string, void (*)()> all;
  return all;
}

struct Registration {
  Registration(const char* name, void (*run)()) { cases()[name] = run; }
};

#define CASE(name)                                        \
  void case_##name();                                     \
  const Registration register_##name(#name, case_##name); \
  void case_##name()

#define EXPECT(condition)                                                                        \
  do {                                                                                           \
    if (!(condition)) {                                                                          \
      if (++failures <= 10) std::printf("%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
    }                                                                                            \
  } while (false)

/// Memory that host and kernels both see.
template <class T>
struct Array {
  T* data = nullptr;
  int size;

  explicit Array(int size_) : size(size_) {
    EXPECT(cudaMallocManaged(&data, size * sizeof(T)) == cudaSuccess);
  }
  Array(int size_, T value) : Array(size_) {
    for (int i = 0; i < size; ++i) data[i] = value;
  }
  ~Array() { cudaFree(data); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  T& operator[](int i) { return data[i]; }
  operator T*() { return data; }
};

/// What `run` prints on stderr.
std::string errors_of(const std::function<void()>& run) {
  std::FILE* file = std::tmpfile();
  std::fflush(stderr);
  const int original = dup(STDERR_FILENO);
  dup2(fileno(file), STDERR_FILENO);
  run();
  std::fflush(stderr);
  dup2(original, STDERR_FILENO);
  close(original);
  std::rewind(file);
  std::string text;
  for (int c; (c = std::fgetc(file)) != EOF;) text += static_cast<char>(c);
  std::fclose(file);
  return text;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// A kernel error: one line that has all the parts, a sticky error, and a working device after a
/// reset.
__global__ void store_one(int* result) { *result = 1; }

void expect_failure(const std::function<void()>& run, const std::vector<std::string>& parts,
                    cudaError_t error = cudaErrorLaunchFailure) {
  const std::string errors = errors_of(run);
  EXPECT(std::count(errors.begin(), errors.end(), '\n') == 1);
  for (const std::string& part : parts) {
    if (!contains(errors, part)) std::printf("missing \"%s\" in: %s", part.c_str(), errors.c_str());
    EXPECT(contains(errors, part));
  }
  EXPECT(cudaDeviceSynchronize() == error);
  EXPECT(cudaGetLastError() == error);
  EXPECT(cudaGetLastError() == error);
  EXPECT(cudaDeviceReset() == cudaSuccess);
  EXPECT(cudaGetLastError() == cudaSuccess);
  Array<int> result(1, 0);
  store_one<<<1, 1>>>(result);
  EXPECT(cudaDeviceSynchronize() == cudaSuccess);
  EXPECT(result[0] == 1);
}

std::string line(int number) { return "semantics.cu:" + std::to_string(number); }

// ---- Launches, indices -------------------------------------------------------------------------

__global__ void record_indices(int* count, uint3* block_of, uint3* thread_of) {
  const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const int i = block * (blockDim.x * blockDim.y * blockDim.z) + thread;
  __syncthreads();
  ++count[i];
  block_of[i] = blockIdx;
  thread_of[i] = threadIdx;
  EXPECT(warpSize == 32);
}

CASE(indices_3d) {
  const dim3 grid(3, 2, 2), block(5, 3, 4);
  const int n = 12 * 60;
  Array<int> count(n, 0);
  Array<uint3> blocks(n), threads(n);
  record_indices<<<grid, block>>>(count, blocks, threads);
  EXPECT(cudaGetLastError() == cudaSuccess);
  int i = 0;
  for (unsigned bz = 0; bz < 2; ++bz)
    for (unsigned by = 0; by < 2; ++by)
      for (unsigned bx = 0; bx < 3; ++bx)
        for (unsigned tz = 0; tz < 4; ++tz)
          for (unsigned ty = 0; ty < 3; ++ty)
            for (unsigned tx = 0; tx < 5; ++tx, ++i) {
              EXPECT(count[i] == 1);
              EXPECT(blocks[i].x == bx && blocks[i].y == by && blocks[i].z == bz);
              EXPECT(threads[i].x == tx && threads[i].y == ty && threads[i].z == tz);
            }
}

template <class T, int N>
__global__ void convert(T* results, double a, float b, long long c, const void* d, half e) {
  if (threadIdx.x + blockIdx.x > 0) return;
  results[0] = static_cast<T>(a);
  results[1] = static_cast<T>(b);
  results[2] = static_cast<T>(c);
  results[3] = d == results;
  results[4] = static_cast<T>(static_cast<float>(e));
  results[5] = N;
}

CASE(argument_conversion) {
  Array<float> results(6);
  const unsigned three = 3;
  convert<float, 7><<<1, 1, 0, nullptr>>>(results, 1, 2.5, three, results.data, 4.5f);
  EXPECT(cudaGetLastError() == cudaSuccess);
  const float expected[] = {1, 2.5, 3, 1, 4.5, 7};
  for (int i = 0; i < 6; ++i) EXPECT(results[i] == expected[i]);
  int calls = 0;
  const auto pointer = [&] {
    ++calls;
    return results.data;
  };
  convert<float, 1><<<dim3(4), dim3(64)>>>(pointer(), 1, 1, 1, nullptr, 1.0f);
  EXPECT(calls == 1);
}

__global__ void count_launch(int* count) { atomicAdd(count, 1); }

CASE(invalid_launches) {
  Array<int> count(1, 0);
  const auto expect = [&](dim3 grid, dim3 block, size_t bytes, cudaError_t error) {
    count[0] = 0;
    count_launch<<<grid, block, bytes>>>(count);
    EXPECT(cudaPeekAtLastError() == error);
    EXPECT(cudaGetLastError() == error);
    EXPECT(cudaGetLastError() == cudaSuccess);
    EXPECT((count[0] != 0) == (error == cudaSuccess));
  };
  expect(1, 1024, 0, cudaSuccess);
  expect(1, 1025, 0, cudaErrorInvalidValue);
  expect(1, dim3(32, 33), 0, cudaErrorInvalidValue);
  expect(1, dim3(65536, 65536), 0, cudaErrorInvalidValue);
  expect(1, dim3(1, 1, 65), 0, cudaErrorInvalidValue);
  expect(1, 0, 0, cudaErrorInvalidValue);
  expect(0, 1, 0, cudaErrorInvalidValue);
  expect(-1, 1, 0, cudaErrorInvalidValue);
  expect(dim3(1, 0), 1, 0, cudaErrorInvalidValue);
  expect(dim3(1, 65535), 1, 0, cudaSuccess);
  expect(dim3(1, 65536), 1, 0, cudaErrorInvalidValue);
  expect(dim3(1, 1, 65536), 1, 0, cudaErrorInvalidValue);
  expect(1, 1, 48 * 1024, cudaSuccess);
  expect(1, 1, 48 * 1024 + 1, cudaErrorInvalidValue);
  EXPECT(cudaFuncSetAttribute(count_launch, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              100 * 1024) == cudaSuccess);
  expect(1, 1, 100 * 1024, cudaSuccess);
  expect(1, 1, 100 * 1024 + 1, cudaErrorInvalidValue);
  EXPECT(cudaFuncSetAttribute(count_launch, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              227 * 1024) == cudaSuccess);
  expect(1, 1, 227 * 1024, cudaSuccess);
  EXPECT(cudaFuncSetAttribute(count_launch, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              227 * 1024 + 1) == cudaErrorInvalidValue);
}

// ---- Barriers ----------------------------------------------------------------------------------

__global__ void reverse_in_rounds(int* data, int rounds) {
  __shared__ int buffer[1024];
  const int n = blockDim.x;
  const int i = threadIdx.x;
  int value = data[blockIdx.x * n + i];
  for (int round = 0; round < rounds; ++round) {
    buffer[i] = value;
    __syncthreads();
    value = buffer[n - 1 - i] + 1;
    __syncthreads();
  }
  data[blockIdx.x * n + i] = value;
}

CASE(barrier) {
  for (int n : {1, 31, 32, 33, 257, 1024}) {
    Array<int> data(4 * n);
    for (int rounds : {4, 5}) {
      for (int i = 0; i < 4 * n; ++i) data[i] = i;
      reverse_in_rounds<<<4, n>>>(data, rounds);
      EXPECT(cudaDeviceSynchronize() == cudaSuccess);
      for (int i = 0; i < 4 * n; ++i) {
        const int source = rounds % 2 == 0 ? i : i / n * n + (n - 1 - i % n);
        EXPECT(data[i] == source + rounds);
      }
    }
  }
}

__global__ void barrier_votes(int* results) {
  const int i = threadIdx.x;
  const int count = __syncthreads_count(i % 3 == 0 ? 7 : 0);
  const int none = __syncthreads_or(0);
  const int one = __syncthreads_or(i == 40);
  const int all = __syncthreads_and(i + 1);
  const int not_all = __syncthreads_and(i != 40);
  results[i] = count == 34 && !none && one == 1 && all == 1 && !not_all;
}

CASE(barrier_votes) {
  Array<int> results(100, 0);
  barrier_votes<<<1, 100>>>(results);
  EXPECT(cudaDeviceSynchronize() == cudaSuccess);
  for (int i = 0; i < 100; ++i) EXPECT(results[i] == 1);
}

/// Where the barriers of a kernel are, written by all threads alike.
std::atomic<int> lines[2];

__global__ void barrier_after_exit(int n) {
  if (threadIdx.x >= static_cast<unsigned>(n)) return;
  lines[0] = __LINE__ + 1;
  __syncthreads();
}

CASE(divergence_exit) {
  expect_failure([] { barrier_after_exit<<<3, 64>>>(40); },
                 {"barrier_after_exit", "block (", "thread (0,0,0) waits in __syncthreads() at ",
                  "thread (40,0,0) has exited"});
  EXPECT(lines[0] > 0);
  expect_failure([] { barrier_after_exit<<<3, 64>>>(40); }, {line(lines[0])});
}

__global__ void exit_before_barrier() {
  if (threadIdx.x < 40) return;
  __syncthreads();
}

CASE(divergence_early_exit) {
  expect_failure([] { exit_before_barrier<<<1, 64>>>(); },
                 {"thread (40,0,0) waits in", "thread (0,0,0) has exited"});
}

__global__ void two_barriers() {
  if (threadIdx.y == 0) {
    lines[0] = __LINE__ + 1;
    __syncthreads();
  } else {
    lines[1] = __LINE__ + 1;
    __syncthreads();
  }
}

CASE(divergence_sites) {
  const auto run = [] { two_barriers<<<2, dim3(8, 2)>>>(); };
  expect_failure(run, {"thread (0,0,0) waits in", "thread (0,1,0) waits in", "launched at "});
  expect_failure(run, {line(lines[0]), line(lines[1])});
}

__global__ void deadlock() {
  if (threadIdx.x == 5) {
    lines[0] = __LINE__ + 1;
    __syncwarp();
  } else {
    lines[1] = __LINE__ + 1;
    __syncthreads();
  }
}

CASE(divergence_deadlock) {
  const auto run = [] { deadlock<<<1, 64>>>(); };
  expect_failure(run, {"deadlock", "thread (0,0,0) waits in __syncthreads()",
                       "thread (5,0,0) waits in __syncwarp()"});
  expect_failure(run, {line(lines[0]), line(lines[1])});
}

__global__ void wrong_mask() { __syncwarp(1); }

__global__ void different_operations() {
  if (threadIdx.x % 2) {
    __any_sync(~0u, 1);
  } else {
    __syncwarp();
  }
}

__global__ void trap() {
  if (threadIdx.x == 3) __trap();
  __syncthreads();
}

CASE(misused_warp_operations) {
  expect_failure([] { wrong_mask<<<1, 2>>>(); }, {"thread (1,0,0) is not in the mask 0x00000001"});
  expect_failure([] { different_operations<<<1, 2>>>(); }, {"__any_sync()", "__syncwarp()"});
  expect_failure([] { trap<<<1, 32>>>(); }, {"thread (3,0,0): __trap()"});
}

__global__ void __launch_bounds__(64) bounded(int* memory) {
  assert(memory[0] == 0 && "memory is zero");
  if (threadIdx.x == 5) assert(memory[1] == 1);
}

CASE(assertions) {
  Array<int> memory(2, 0);
  cuda_cpu::set_row("ours");
  expect_failure([&] { bounded<<<2, 64>>>(memory); },
                 {"(bounded, row \"ours\"), block (", "thread (5,0,0): assertion `memory[1] == 1` ",
                  "semantics.cu:"},
                 cudaErrorAssert);
  cuda_cpu::set_row("");
}

/// The errors are those of a GPU.
CASE(refused_launches_say_why) {
  Array<int> memory(2, 0);
  const auto refused = [&](dim3 grid, dim3 block, size_t shared, cudaError_t error,
                           const std::vector<std::string>& parts) {
    bounded<<<grid, block, shared>>>(memory);
    EXPECT(cudaGetLastError() == error);
    const std::string why = cuda_cpu::why_launch_failed();
    EXPECT(contains(why, "bounded, launched at ") && contains(why, "semantics.cu:"));
    for (const std::string& part : parts) {
      EXPECT(contains(why, part));
      if (!contains(why, part)) std::printf("no \"%s\" in: %s\n", part.c_str(), why.c_str());
    }
  };
  refused(1, dim3(64, 32), 0, cudaErrorInvalidValue, {"64 x 32 x 1 threads", "most 1024"});
  refused(dim3(1, 70000), 64, 0, cudaErrorInvalidValue, {"1 x 70000 x 1 blocks", "65535"});
  refused(1, 64, 100 << 10, cudaErrorInvalidValue, {"102400 bytes", "most 49152 bytes"});
  refused(1, 128, 0, cudaErrorInvalidValue, {"__launch_bounds__ are 64 threads"});
  store_one<<<1, 1>>>(memory);
  EXPECT(*cuda_cpu::why_launch_failed() == 0);
}

CASE(sticky_errors) {
  Array<int> count(1, 0);
  Array<char> other(16, 0);
  errors_of([] { trap<<<1, 32>>>(); });
  count_launch<<<1, 1>>>(count);
  EXPECT(count[0] == 0);
  int* pointer = nullptr;
  EXPECT(cudaMalloc(&pointer, 16) == cudaErrorLaunchFailure);
  char host[16];
  EXPECT(cudaMemcpy(host, other, 16, cudaMemcpyDeviceToHost) == cudaErrorLaunchFailure);
  EXPECT(cudaMemset(other, 0, 16) == cudaErrorLaunchFailure);
  EXPECT(cudaStreamSynchronize(nullptr) == cudaErrorLaunchFailure);
  EXPECT(cudaGetLastError() == cudaErrorLaunchFailure);
  EXPECT(cudaGetLastError() == cudaErrorLaunchFailure);
  EXPECT(std::strcmp(cudaGetErrorName(cudaErrorLaunchFailure), "cudaErrorLaunchFailure") == 0);
  EXPECT(cudaErrorLaunchFailure == 719);
  cudaDeviceReset();
  // An ordinary error is forgotten once it has been read, and does no harm.
  EXPECT(cudaMalloc(&pointer, ~size_t{0} / 2) == cudaErrorMemoryAllocation);
  EXPECT(cudaDeviceSynchronize() == cudaSuccess);
  EXPECT(cudaPeekAtLastError() == cudaErrorMemoryAllocation);
  EXPECT(cudaGetLastError() == cudaErrorMemoryAllocation);
  EXPECT(cudaGetLastError() == cudaSuccess);
}

// ---- Warp operations ---------------------------------------------------------------------------

template <class T>
__global__ void shuffles(T* results) {
  const int i = threadIdx.x;
  const T value = static_cast<T>(static_cast<float>(i));
  results[i * 8 + 0] = __shfl_sync(~0u, value, 5);
  results[i * 8 + 1] = __shfl_sync(~0u, value, i + 1);
  results[i * 8 + 2] = __shfl_up_sync(~0u, value, 3);
  results[i * 8 + 3] = __shfl_down_sync(~0u, value, 3);
  results[i * 8 + 4] = __shfl_xor_sync(~0u, value, 17);
  results[i * 8 + 5] = __shfl_up_sync(~0u, value, 1, 8);
  results[i * 8 + 6] = __shfl_down_sync(~0u, value, 2, 4);
  results[i * 8 + 7] = __shfl_sync(~0u, value, 13, 8);
}

template <class T>
void test_shuffles() {
  Array<T> results(64 * 8);
  shuffles<T><<<1, 64>>>(results);
  EXPECT(cudaDeviceSynchronize() == cudaSuccess);
  for (int i = 0; i < 64; ++i) {
    const int lane = i % 32;
    const int warp = i - lane;
    const int expected[] = {
        warp + 5, warp + (lane + 1) % 32,    lane < 3 ? i : i - 3,     lane > 28 ? i : i + 3,
        i ^ 17,   lane % 8 == 0 ? i : i - 1, lane % 4 > 1 ? i : i + 2, warp + lane / 8 * 8 + 5};
    for (int k = 0; k < 8; ++k) EXPECT(results[i * 8 + k] == static_cast<T>(float(expected[k])));
  }
}

CASE(shuffles) {
  test_shuffles<int>();
  test_shuffles<unsigned>();
  test_shuffles<long long>();
  test_shuffles<float>();
  test_shuffles<double>();
  test_shuffles<half>();
  test_shuffles<__nv_bfloat16>();
}

__global__ void shuffle_pairs(half2* results) {
  const float x = static_cast<float>(threadIdx.x);
  results[threadIdx.x] = __shfl_xor_sync(~0u, __floats2half2_rn(x, -x), 1);
}

CASE(shuffle_half2) {
  Array<half2> results(32);
  shuffle_pairs<<<1, 32>>>(results);
  for (int i = 0; i < 32; ++i) {
    EXPECT(__low2float(results[i]) == float(i ^ 1) && __high2float(results[i]) == -float(i ^ 1));
  }
}

__global__ void partial_warp(float* results, unsigned* masks) {
  const int i = threadIdx.x;
  float sum = static_cast<float>(i);
  for (int d = 4; d; d /= 2) sum += __shfl_xor_sync(0xFF, sum, d);
  results[i * 2] = sum;
  results[i * 2 + 1] = __shfl_down_sync(0xFF, static_cast<float>(i), 5);
  if (i >= 4) return;
  __syncwarp(0xF);
  masks[i] = __activemask();
  __syncwarp(0xF);
}

CASE(partial_warp) {
  Array<float> results(16);
  Array<unsigned> masks(4);
  partial_warp<<<1, 8>>>(results, masks);
  EXPECT(cudaDeviceSynchronize() == cudaSuccess);
  for (int i = 0; i < 8; ++i) EXPECT(results[i * 2] == 28);
  for (int i = 0; i < 3; ++i) EXPECT(results[i * 2 + 1] == float(i + 5));
  // Lanes 8 and up do not exist; what they would give is undefined, and shows as NaN.
  for (int i = 3; i < 8; ++i) EXPECT(std::isnan(results[i * 2 + 1]));
  for (int i = 0; i < 4; ++i) EXPECT((masks[i] & 0xF) == 0xF);
}

__global__ void half_masks(int* results) {
  const int i = threadIdx.x;
  int sum = i;
  if (i < 16) {
    for (int d = 8; d; d /= 2) sum += __shfl_xor_sync(0x0000FFFF, sum, d);
  } else {
    for (int d = 8; d; d /= 2) sum += __shfl_down_sync(0xFFFF0000, sum, d);
  }
  __syncwarp();
  results[i] = sum;
}

CASE(divergent_halves) {
  Array<int> results(32);
  half_masks<<<1, 32>>>(results);
  EXPECT(cudaDeviceSynchronize() == cudaSuccess);
  for (int i = 0; i < 16; ++i) EXPECT(results[i] == 120);
  EXPECT(results[16] == 376);
}

__global__ void votes(unsigned* results) {
  const int i = threadIdx.x;
  const int lane = i % 32;
  bool good = __ballot_sync(~0u, lane % 2) == (0xAAAAAAAA & (i < 32 ? ~0u : 0xFF));
  good = good && __any_sync(~0u, lane == 7) && !__any_sync(~0u, lane > 31);
  good = good && __all_sync(~0u, lane < 32) && !__all_sync(~0u, lane != 7);
  const int n = i < 32 ? 32 : 8;
  good = good && __reduce_add_sync(~0u, lane) == n * (n - 1) / 2;
  good = good && __reduce_min_sync(~0u, -lane) == 1 - n;
  good = good && __reduce_max_sync(~0u, static_cast<unsigned>(lane)) == unsigned(n - 1);
  good = good && __match_any_sync(~0u, lane / 4) == 0xFu << lane / 4 * 4;
  results[i] = good;
}

CASE(votes) {
  Array<unsigned> results(40, 0);
  votes<<<1, 40>>>(results);
  EXPECT(cudaDeviceSynchronize() == cudaSuccess);
  for (int i = 0; i < 40; ++i) EXPECT(results[i] == 1);
}

__global__ void warps_without_exited_lanes(int* results) {
  const int i = threadIdx.x;
  if (i % 2) return;
  results[i] = __reduce_add_sync(0x55555555, 1);
  __syncwarp();
  results[i] += __popc(__ballot_sync(~0u, 1));
}

CASE(exited_lanes) {
  Array<int> results(32, 0);
  warps_without_exited_lanes<<<1, 32>>>(results);
  EXPECT(cudaDeviceSynchronize() == cudaSuccess);
  for (int i = 0; i < 32; i += 2) EXPECT(results[i] == 32);
}

// ---- Atomics -----------------------------------------------------------------------------------

struct Atomics {
  int add, sub, max, min, bits_or, exchanged;
  unsigned inc;
  unsigned long long wide;
  float real;
  double real_wide;
  int locked, lock;
};

__global__ void atomics(Atomics* a, half* h, __nv_bfloat162* b2) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(&a->add, 1);
  atomicSub(&a->sub, 2);
  atomicMax(&a->max, i);
  atomicMin(&a->min, -i);
  atomicOr(&a->bits_or, 1 << i % 31);
  atomicInc(&a->inc, 99);
  atomicAdd(&a->wide, 1ull << 33);
  atomicAdd(&a->real, 0.5f);
  atomicAdd(&a->real_wide, 0.25);
  if (i < 512) {
    atomicAdd(h, half(1.0f));
    atomicAdd(b2, __floats2bfloat162_rn(i < 128 ? 1.0f : 0.0f, -0.0f));
  }
  while (atomicCAS(&a->lock, 0, 1) != 0) __nanosleep(20);
  ++a->locked;
  __threadfence();
  atomicExch(&a->lock, 0);
}

CASE(atomics) {
  Array<Atomics> a(1, Atomics{});
  Array<half> h(1, half(0.0f));
  Array<__nv_bfloat162> b2(1, __floats2bfloat162_rn(0.0f, 0.0f));
  atomics<<<64, 128>>>(a, h, b2);
  EXPECT(cudaDeviceSynchronize() == cudaSuccess);
  const int n = 64 * 128;
  EXPECT(a[0].add == n && a[0].sub == -2 * n && a[0].max == n - 1 && a[0].min == 1 - n);
  EXPECT(a[0].bits_or == 0x7FFFFFFF && a[0].inc == n % 100u);
  EXPECT(a[0].wide == static_cast<unsigned long long>(n) << 33);
  EXPECT(a[0].real == n / 2 && a[0].real_wide == n / 4 && a[0].locked == n);
  EXPECT(float(h[0]) == 512 && __low2float(b2[0]) == 128);
}

__global__ void last_block_sums(float* partial, unsigned* done, float* total) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = static_cast<float>(blockIdx.x);
    __threadfence();
    last = atomicInc(done, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    float sum = 0;
    for (unsigned i = 0; i < gridDim.x; ++i) sum += partial[i];
    *total = sum;
  }
}

CASE(last_block) {
  Array<float> partial(100), total(1, 0.0f);
  Array<unsigned> done(1, 0);
  for (int repeat = 0; repeat < 10; ++repeat) {
    last_block_sums<<<100, 32>>>(partial, done, total);
    EXPECT(total[0] == 4950 && done[0] == 0);
  }
}

// ---- Shared memory -----------------------------------------------------------------------------

template <class T, int N>
struct Pair {
  T a[N];
};

template <int N>
__device__ float* shared_of_size() {
  __shared__ float storage[N];
  return storage;
}

template <class T, int ROWS>
__global__ void static_shared(int* good) {
  __shared__ T tile[ROWS][ROWS + 1];
  __shared__ __align__(16) unsigned char bytes[3 * (ROWS > 4 ? 2 : 1)];
  __shared__ alignas(32) Pair<T, 2> pair;
  __shared__ unsigned long long number;
  static_assert(sizeof tile == sizeof(T) * ROWS * (ROWS + 1));
  static_assert(sizeof bytes == 3 * (ROWS > 4 ? 2 : 1));
  bool fine = reinterpret_cast<uintptr_t>(&tile) % 128 == 0;
  const auto* raw = reinterpret_cast<const unsigned char*>(&tile);
  for (size_t i = 0; i < sizeof tile; ++i) fine = fine && raw[i] == 0xFF;
  fine = fine && bytes[0] == 0xFF && number == ~0ull;
  fine = fine && shared_of_size<8>() != shared_of_size<16>();
  fine = fine && shared_of_size<8>() == shared_of_size<8>();
  __syncthreads();
  tile[threadIdx.x][threadIdx.x] = static_cast<T>(1.0f);
  if (threadIdx.x == 0) {
    number = 5;
    bytes[0] = 6;
    pair.a[1] = static_cast<T>(2.0f);
  }
  __syncthreads();
  const unsigned other = (threadIdx.x + 1) % blockDim.x;
  fine = fine && tile[other][other] == static_cast<T>(1.0f) && number == 5 && bytes[0] == 6;
  fine = fine && pair.a[1] == static_cast<T>(2.0f);
  if (!fine) atomicAdd(good, -1000);
  atomicAdd(good, 1);
}

CASE(static_shared_memory) {
  Array<int> good(1, 0);
  static_shared<float, 8><<<50, 8>>>(good);
  static_shared<half, 4><<<50, 4>>>(good);
  static_shared<double, 8><<<50, 8>>>(good);
  EXPECT(cudaDeviceSynchronize() == cudaSuccess);
  EXPECT(good[0] == 50 * 20);
}

__global__ void dynamic_shared(int n, int* good) {
  extern __shared__ __align__(16) float buffer[];
  bool fine = reinterpret_cast<uintptr_t>(buffer) % 128 == 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    fine = fine && std::isnan(buffer[i]);
    buffer[i] = static_cast<float>(i);
  }
  __syncthreads();
  for (int i = 0; i < n; ++i) fine = fine && buffer[i] == static_cast<float>(i);
  atomicAdd(good, fine);
}

CASE(dynamic_shared_memory) {
  Array<int> good(1, 0);
  const int n = 50 * 1024;
  EXPECT(cudaFuncSetAttribute(dynamic_shared, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              n * sizeof(float)) == cudaSuccess);
  dynamic_shared<<<10, 32, n * sizeof(float)>>>(n, good);
  dynamic_shared<<<10, 32, 100 * sizeof(float)>>>(100, good);
  EXPECT(cudaDeviceSynchronize() == cudaSuccess);
  EXPECT(good[0] == 640);
}

// ---- Asynchronous copies -----------------------------------------------------------------------

__global__ void copy_async(const float* source, float* results, bool wait) {
  __shared__ alignas(16) float buffer[3][128];
  const int i = threadIdx.x * 4;
  for (int stage = 0; stage < 3; ++stage) {
    __pipeline_memcpy_async(&buffer[stage][i], source + stage * 128 + i, 16, stage == 2 ? 8 : 0);
    __pipeline_commit();
  }
  for (int stage = 0; stage < 3; ++stage) {
    if (wait) __pipeline_wait_prior(2 - stage);
    __syncthreads();
    const int other = (i + 4) % 128;
    for (int k = 0; k < 4; ++k) results[stage * 128 + i + k] = buffer[stage][other + k];
    // Later stages have not landed yet.
    if (stage == 0 && wait) results[3 * 128 + i / 4] = buffer[1][i];
  }
}

CASE(async_copies) {
  Array<float> source(384), results(384 + 32);
  for (int i = 0; i < 384; ++i) source[i] = static_cast<float>(i);
  copy_async<<<1, 32>>>(source, results, true);
  EXPECT(cudaDeviceSynchronize() == cudaSuccess);
  for (int i = 0; i < 384; ++i) {
    const int read = i / 128 * 128 + (i + 4) % 128;
    const bool zero = i >= 256 && i % 4 >= 2;
    EXPECT(results[i] == (zero ? 0.0f : static_cast<float>(read)));
  }
  for (int i = 0; i < 32; ++i) EXPECT(std::isnan(results[384 + i]));
}

CASE(async_copies_missing_wait) {
  Array<float> source(384, 1.0f), results(384 + 32);
  copy_async<<<1, 32>>>(source, results, false);
  EXPECT(cudaDeviceSynchronize() == cudaSuccess);
  // When the first threads end, their copies land for others to see; not so before the last
  // barrier.
  for (int i = 0; i < 256; ++i) EXPECT(std::isnan(results[i]));
}

__global__ void bad_copy(const char* source, int offset, int size) {
  __shared__ alignas(16) char buffer[64];
  __pipeline_memcpy_async(buffer, source + offset, size);
  __pipeline_commit();
  __pipeline_wait_prior(0);
}

CASE(async_copies_checked) {
  Array<char> source(64, 0);
  expect_failure([&] { bad_copy<<<1, 1>>>(source, 0, 12); }, {"12 bytes"});
  expect_failure([&] { bad_copy<<<1, 1>>>(source, 4, 16); }, {"not aligned"});
}

// ---- Small floating point numbers ---------------------------------------------------------------

/// The number with `fraction_bits` of fraction and exponents from `min_exponent` to `max_exponent`
/// that is nearest to x; the even one of two.
double rounded(double x, int fraction_bits, int min_exponent, int max_exponent) {
  if (x == 0 || !std::isfinite(x)) return x;
  const int exponent = std::max(std::ilogb(x), min_exponent);
  const double unit = std::ldexp(1.0, exponent - fraction_bits);
  const double result = std::nearbyint(x / unit) * unit;
  const double limit = std::ldexp(2.0, max_exponent);
  return std::abs(result) >= limit ? std::copysign(INFINITY, x) : result;
}

/// The value of a 16-bit pattern.
double decoded(unsigned bits, int fraction_bits, int bias) {
  const int fraction = static_cast<int>(bits & ((1u << fraction_bits) - 1));
  const int exponent_mask = (1 << (15 - fraction_bits)) - 1;
  const int exponent = static_cast<int>(bits >> fraction_bits) & exponent_mask;
  double value;
  if (exponent == exponent_mask) {
    value = fraction ? NAN : INFINITY;
  } else {
    const int leading = exponent ? 1 << fraction_bits : 0;
    value = std::ldexp(leading + fraction, std::max(exponent, 1) - bias - fraction_bits);
  }
  return bits & 0x8000 ? -value : value;
}

bool same(double a, double b) {
  return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b);
}

template <class T>
void test_conversions(int fraction_bits, int bias) {
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    const T value = T::from_bits(static_cast<uint16_t>(bits));
    EXPECT(same(static_cast<float>(value), decoded(bits, fraction_bits, bias)));
    const T back(static_cast<float>(value));
    EXPECT(std::isnan(float(value)) ? std::isnan(float(back)) : back.bits == bits);
  }
  const auto check = [&](uint32_t bits) {
    const float x = std::bit_cast<float>(bits);
    const double expected = rounded(x, fraction_bits, 1 - bias, bias);
    EXPECT(same(static_cast<float>(T(x)), expected));
    EXPECT(same(static_cast<float>(T(static_cast<double>(x))), expected));
  };
  for (uint32_t top = 0; top < 1u << 19; ++top) {
    for (uint32_t low : {0x0000u, 0x0FFFu, 0x1000u, 0x1001u, 0x1FFFu}) check(top << 13 | low);
  }
  for (uint32_t top = 0; top < 1u << 16; ++top) {
    for (uint32_t low : {0x7FFFu, 0x8000u, 0x8001u}) check(top << 16 | low);
  }
}

CASE(half_conversions) { test_conversions<half>(10, 15); }

CASE(bfloat16_conversions) { test_conversions<__nv_bfloat16>(7, 127); }

// Of the 8 bits one pattern of each sign is NaN, and none is infinity.
CASE(fp8_conversions) {
  const auto check = [](float x) {
    const __nv_fp8_e4m3 value(x);
    const double expected = std::min(std::abs(rounded(x, 3, -6, 8)), 448.0);
    EXPECT(std::isnan(x) ? value.__x == 0x7F
                         : same(static_cast<float>(value), std::copysign(expected, x)));
  };
  for (unsigned bits = 0; bits < 0x100; ++bits) {
    __nv_fp8_e4m3 value;
    value.__x = static_cast<uint8_t>(bits);
    const int exponent = bits >> 3 & 15, fraction = bits & 7;
    const double magnitude = (bits & 0x7F) == 0x7F ? NAN
                             : exponent > 0        ? std::ldexp(8 + fraction, exponent - 10)
                                                   : std::ldexp(fraction, -9);
    EXPECT(same(static_cast<float>(value), bits & 0x80 ? -magnitude : magnitude));
    check(static_cast<float>(value));
  }
  for (uint32_t top = 0; top < 1u << 16; ++top) {
    for (uint32_t low : {0x0000u, 0x0001u, 0xFFFFu}) check(std::bit_cast<float>(top << 16 | low));
  }
}

CASE(half_arithmetic) {
  // A double that rounds twice to a wrong half: just above the middle of 1 and 1 + 2^-10.
  EXPECT(float(half(1 + 0x1p-11 + 0x1p-40)) == 1 + 0x1p-10f);
  EXPECT(float(half(1 + 0x1p-11)) == 1);
  EXPECT(float(half(65519.99)) == 65504 && std::isinf(float(half(65520.0))));
  EXPECT(float(half(1e300)) == INFINITY && float(__nv_bfloat16(-1e300)) == -INFINITY);
  half a = 1.5f, b = __float2half(0.25f);
  const half c = a * b + half(2);
  EXPECT(float(c) == 2.375f && float(-c) == -2.375f);
  a += b;
  EXPECT(float(a) == 1.75f && a > b && b < a && a != b && !(a == b) && a >= b && b <= a);
  EXPECT(float(__hfma(half(1 + 0x1p-10f), half(1 + 0x1p-10f), half(-1.0f))) ==
         static_cast<float>(half(0x1p-9f + 0x1p-20f)));
  EXPECT(float(__hadd(a, b)) == 2 && float(__hmul(a, b)) == 0.4375f);
  EXPECT(float(hexp(half(0.0f))) == 1 && float(__hmax(a, b)) == 1.75f);
  EXPECT(__half_as_ushort(half(1.0f)) == 0x3C00 && float(__ushort_as_half(0xC000)) == -2);
  EXPECT(static_cast<int>(half(-3.75f)) == -3 && float(half(7)) == 7);
  const half2 p = __floats2half2_rn(1, 2) * __float2half2_rn(3) + __halves2half2(a, b);
  EXPECT(__low2float(p) == 4.75f && __half22float2(p).y == 6.25f);
  EXPECT(float(__low2half(p)) == 4.75f && float(__high2half(p)) == 6.25f);
  const float2 q = __bfloat1622float2(__hfma2(
      __floats2bfloat162_rn(1, 2), __floats2bfloat162_rn(3, 4), __float2bfloat162_rn(0.5f)));
  EXPECT(q.x == 3.5f && q.y == 8.5f);
  static_assert(sizeof(half2) == 4 && alignof(half2) == 4 && sizeof(half[3]) == 6);
}

// ---- Matrices ----------------------------------------------------------------------------------

/// Small integers: products of them are exact in every type.
template <class T>
void fill(Array<T>& array, int seed) {
  unsigned state = static_cast<unsigned>(seed);
  for (int i = 0; i < array.size; ++i) {
    state = state * 1664525 + 1013904223;
    array[i] = static_cast<T>(static_cast<float>(static_cast<int>(state >> 28) - 8));
  }
}

template <int M, int N, int K, class T, class Acc, class LayoutA, class LayoutB>
__global__ void wmma_product(const T* a, const T* b, const Acc* c, Acc* d, Acc* sum,
                             nvcuda::wmma::layout_t layout_c) {
  using namespace nvcuda;
  __shared__ alignas(32) T shared_a[2][M * K];
  const int warp = threadIdx.x / 32;
  for (int i = threadIdx.x % 32; i < M * K; i += 32) shared_a[warp][i] = a[i];
  __syncwarp();
  wmma::fragment<wmma::matrix_a, M, N, K, T, LayoutA> fa;
  wmma::fragment<wmma::matrix_b, M, N, K, T, LayoutB> fb;
  wmma::fragment<wmma::accumulator, M, N, K, Acc> fc, fd;
  wmma::load_matrix_sync(fa, shared_a[warp], std::is_same_v<LayoutA, wmma::row_major> ? K : M);
  wmma::load_matrix_sync(fb, b, std::is_same_v<LayoutB, wmma::row_major> ? N : K);
  const unsigned ldc = layout_c == wmma::mem_row_major ? N : M;
  wmma::load_matrix_sync(fc, c, ldc, layout_c);
  wmma::mma_sync(fd, fa, fb, fc);
  wmma::store_matrix_sync(d + warp * M * N, fd, ldc, layout_c);
  for (int i = 0; i < fd.num_elements; ++i) fd.x[i] = fd.x[i] + fc.x[i];
  wmma::store_matrix_sync(sum + warp * M * N, fd, N, wmma::mem_row_major);
}

template <int M, int N, int K, class T, class Acc, class LayoutA, class LayoutB>
void test_wmma() {
  using nvcuda::wmma::row_major;
  Array<T> a(M * K), b(K * N);
  Array<Acc> c(M * N), d(2 * M * N), sum(2 * M * N);
  fill(a, 1);
  fill(b, 2);
  fill(c, 3);
  for (const auto layout : {nvcuda::wmma::mem_row_major, nvcuda::wmma::mem_col_major}) {
    const auto at_c = [&](int i, int j) {
      return layout == nvcuda::wmma::mem_row_major ? i * N + j : j * M + i;
    };
    wmma_product<M, N, K, T, Acc, LayoutA, LayoutB><<<1, 64>>>(a, b, c, d, sum, layout);
    EXPECT(cudaDeviceSynchronize() == cudaSuccess);
    for (int w = 0; w < 2; ++w) {
      for (int i = 0; i < M; ++i) {
        for (int j = 0; j < N; ++j) {
          const float start = static_cast<float>(c[at_c(i, j)]);
          float expected = start;
          for (int k = 0; k < K; ++k) {
            expected +=
                static_cast<float>(a[std::is_same_v<LayoutA, row_major> ? i * K + k : k * M + i]) *
                static_cast<float>(b[std::is_same_v<LayoutB, row_major> ? k * N + j : j * K + k]);
          }
          EXPECT(static_cast<float>(d[w * M * N + at_c(i, j)]) == expected);
          EXPECT(static_cast<float>(sum[w * M * N + i * N + j]) == expected + start);
        }
      }
    }
  }
}

template <int M, int N, int K, class T, class Acc>
void test_wmma_layouts() {
  using nvcuda::wmma::col_major;
  using nvcuda::wmma::row_major;
  test_wmma<M, N, K, T, Acc, row_major, row_major>();
  test_wmma<M, N, K, T, Acc, row_major, col_major>();
  test_wmma<M, N, K, T, Acc, col_major, row_major>();
  test_wmma<M, N, K, T, Acc, col_major, col_major>();
}

CASE(wmma_half) {
  test_wmma_layouts<16, 16, 16, half, float>();
  test_wmma_layouts<32, 8, 16, half, float>();
  test_wmma_layouts<8, 32, 16, half, float>();
  test_wmma_layouts<16, 16, 16, half, half>();
}

CASE(wmma_bfloat16) {
  test_wmma_layouts<16, 16, 16, __nv_bfloat16, float>();
  test_wmma_layouts<32, 8, 16, __nv_bfloat16, float>();
  test_wmma_layouts<8, 32, 16, __nv_bfloat16, float>();
}

__global__ void wmma_tf32(const float* a, const float* b, float* c) {
  using namespace nvcuda;
  wmma::fragment<wmma::matrix_a, 16, 16, 8, wmma::precision::tf32, wmma::row_major> fa;
  wmma::fragment<wmma::matrix_b, 16, 16, 8, wmma::precision::tf32, wmma::row_major> fb;
  wmma::fragment<wmma::accumulator, 16, 16, 8, float> fc;
  wmma::fill_fragment(fc, 0.0f);
  wmma::load_matrix_sync(fa, a, 8);
  wmma::load_matrix_sync(fb, b, 16);
  for (auto& x : fa.x) x = wmma::__float_to_tf32(x);
  for (auto& x : fb.x) x = wmma::__float_to_tf32(x);
  wmma::mma_sync(fc, fa, fb, fc);
  wmma::store_matrix_sync(c, fc, 16, wmma::mem_row_major);
}

CASE(wmma_tf32) {
  Array<float> a(16 * 8, 0.0f), b(8 * 16, 0.0f), c(256);
  a[0] = 1 + 0x1.8p-11f;
  b[3] = 2;
  wmma_tf32<<<1, 32>>>(a, b, c);
  EXPECT(cudaDeviceSynchronize() == cudaSuccess);
  EXPECT(c[3] == 2 * (1 + 0x1p-10f) && c[2] == 0);
}

__global__ void wmma_bad(const half* a, int offset, unsigned ldm, int lanes) {
  using namespace nvcuda;
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
  if (static_cast<int>(threadIdx.x) < lanes) wmma::load_matrix_sync(fa, a + offset, ldm);
}

CASE(tf32_rounding) {
  const auto rounded = [](float value) { return std::bit_cast<float>(to_tf32(value)); };
  for (const float sign : {1.0f, -1.0f}) {
    EXPECT(rounded(sign) == sign);
    EXPECT(rounded(sign * (1 + 0x1p-10f)) == sign * (1 + 0x1p-10f));
    EXPECT(rounded(sign * (1 + 0x1p-11f)) == sign * (1 + 0x1p-10f));  // a tie: away from zero
    EXPECT(rounded(sign * (1 + 0x1p-11f - 0x1p-23f)) == sign);
    EXPECT(rounded(sign * (2 - 0x1p-11f)) == sign * 2);
    EXPECT(rounded(sign * std::numeric_limits<float>::infinity()) ==
           sign * std::numeric_limits<float>::infinity());
    EXPECT(std::isnan(rounded(sign * std::numeric_limits<float>::quiet_NaN())));
  }
}

CASE(wmma_checked) {
  Array<half> a(1024, half(0.0f));
  expect_failure([&] { wmma_bad<<<1, 32>>>(a, 0, 20, 32); }, {"ldm = 20", "load_matrix_sync()"});
  expect_failure([&] { wmma_bad<<<1, 32>>>(a, 8, 16, 32); }, {"not aligned to 32 bytes"});
  expect_failure([&] { wmma_bad<<<1, 16>>>(a, 0, 16, 32); }, {"without all 32 lanes"});
  expect_failure([&] { wmma_bad<<<1, 32>>>(a, 0, 16, 20); }, {"without all 32 lanes"});
}

struct GemmShape {
  int m, n, k;
  cublasOperation_t transa, transb;
  int padding;
};

/// Leading dimensions, and element (i, j) of op(X) in memory.
int leading(cublasOperation_t op, int rows, int cols, int padding) {
  return (op == CUBLAS_OP_N ? rows : cols) + padding;
}
int place(cublasOperation_t op, int i, int j, int ld) {
  return op == CUBLAS_OP_N ? i + j * ld : j + i * ld;
}

template <class T, class Out>
void test_gemm(cublasHandle_t handle, const GemmShape& s, cudaDataType in, cudaDataType out,
               cublasComputeType_t compute, double alpha, double beta) {
  const int lda = leading(s.transa, s.m, s.k, s.padding);
  const int ldb = leading(s.transb, s.k, s.n, s.padding);
  const int ldc = s.m + s.padding;
  Array<T> a(lda * std::max(s.m, s.k)), b(ldb * std::max(s.k, s.n));
  Array<Out> c(ldc * s.n), before(ldc * s.n);
  fill(a, 4);
  fill(b, 5);
  fill(c, 6);
  if (beta == 0) {
    for (int i = 0; i < c.size; ++i) c[i] = static_cast<Out>(NAN);
  }
  for (int i = 0; i < c.size; ++i) before[i] = c[i];
  const float alpha32 = static_cast<float>(alpha), beta32 = static_cast<float>(beta);
  const half alpha16 = alpha, beta16 = beta;
  const void* scales[2] = {&alpha32, &beta32};
  if (compute == CUBLAS_COMPUTE_64F) scales[0] = &alpha, scales[1] = &beta;
  if (compute == CUBLAS_COMPUTE_16F) scales[0] = &alpha16, scales[1] = &beta16;
  EXPECT(cublasGemmEx(handle, s.transa, s.transb, s.m, s.n, s.k, scales[0], a.data, in, lda, b.data,
                      in, ldb, scales[1], c.data, out, ldc, compute,
                      CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS);
  for (int j = 0; j < s.n; ++j) {
    for (int i = 0; i < ldc; ++i) {
      double expected = static_cast<double>(before[i + j * ldc]);
      if (i < s.m) {
        expected = beta == 0 ? 0 : beta * expected;
        for (int k = 0; k < s.k; ++k) {
          expected += alpha * static_cast<double>(a[place(s.transa, i, k, lda)]) *
                      static_cast<double>(b[place(s.transb, k, j, ldb)]);
        }
        expected = static_cast<double>(static_cast<Out>(expected));
      }
      EXPECT(same(static_cast<double>(c[i + j * ldc]) + 0.0, expected + 0.0));
    }
  }
}

CASE(cublas_gemm) {
  cublasHandle_t handle;
  EXPECT(cublasCreate(&handle) == CUBLAS_STATUS_SUCCESS);
  for (const auto transa : {CUBLAS_OP_N, CUBLAS_OP_T}) {
    for (const auto transb : {CUBLAS_OP_N, CUBLAS_OP_T}) {
      for (const int padding : {0, 3}) {
        const GemmShape small = {5, 7, 3, transa, transb, padding};
        const GemmShape large = {70, 130, 300, transa, transb, padding};
        for (const GemmShape& s : {small, large}) {
          test_gemm<float, float>(handle, s, CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F, 2, 3);
          test_gemm<float, float>(handle, s, CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F_FAST_TF32,
                                  1, 0);
          test_gemm<double, double>(handle, s, CUDA_R_64F, CUDA_R_64F, CUBLAS_COMPUTE_64F, -1, 0.5);
          test_gemm<half, float>(handle, s, CUDA_R_16F, CUDA_R_32F, CUBLAS_COMPUTE_32F, 1, 0);
          test_gemm<half, half>(handle, s, CUDA_R_16F, CUDA_R_16F, CUBLAS_COMPUTE_32F, 0.5, 1);
          test_gemm<half, half>(handle, s, CUDA_R_16F, CUDA_R_16F, CUBLAS_COMPUTE_16F, 1, 0);
          test_gemm<__nv_bfloat16, __nv_bfloat16>(handle, s, CUDA_R_16BF, CUDA_R_16BF,
                                                  CUBLAS_COMPUTE_32F, 1, 1);
        }
      }
    }
  }
  test_gemm<float, float>(handle, {4, 4, 0, CUBLAS_OP_N, CUBLAS_OP_N, 1}, CUDA_R_32F, CUDA_R_32F,
                          CUBLAS_COMPUTE_32F, 1, 2);
  EXPECT(cublasDestroy(handle) == CUBLAS_STATUS_SUCCESS);
}

CASE(cublas_checked) {
  cublasHandle_t handle;
  cublasCreate(&handle);
  Array<float> a(64, 1.0f), b(64, 1.0f), c(64, 0.0f);
  const float one = 1, zero = 0;
  const auto sgemm = [&](int m, int n, int k, int lda, int ldb, int ldc) {
    return cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_T, m, n, k, &one, a, lda, b, ldb, &zero, c,
                       ldc);
  };
  EXPECT(sgemm(4, 5, 6, 4, 5, 4) == CUBLAS_STATUS_SUCCESS);
  EXPECT(c[0] == 6);
  EXPECT(sgemm(4, 5, 6, 3, 5, 4) == CUBLAS_STATUS_INVALID_VALUE);
  EXPECT(sgemm(4, 5, 6, 4, 4, 4) == CUBLAS_STATUS_INVALID_VALUE);
  EXPECT(sgemm(4, 5, 6, 4, 5, 3) == CUBLAS_STATUS_INVALID_VALUE);
  EXPECT(sgemm(-1, 5, 6, 4, 5, 4) == CUBLAS_STATUS_INVALID_VALUE);
  EXPECT(sgemm(0, 5, 6, 1, 5, 1) == CUBLAS_STATUS_SUCCESS);
  EXPECT(cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, 4, 4, 4, &one, a, CUDA_R_32F, 4, b,
                      CUDA_R_16F, 4, &zero, c, CUDA_R_32F, 4, CUBLAS_COMPUTE_32F,
                      CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_NOT_SUPPORTED);
  EXPECT(cublasSgemm(nullptr, CUBLAS_OP_N, CUBLAS_OP_N, 1, 1, 1, &one, a, 1, b, 1, &zero, c, 1) ==
         CUBLAS_STATUS_NOT_INITIALIZED);
  EXPECT(std::strcmp(cublasGetStatusName(CUBLAS_STATUS_INVALID_VALUE),
                     "CUBLAS_STATUS_INVALID_VALUE") == 0);
  cublasDestroy(handle);
}

CASE(cublas_batched) {
  cublasHandle_t handle;
  cublasCreate(&handle);
  const int m = 3, n = 4, k = 5, batch = 3;
  Array<half> a(m * k * batch), b(k * n);
  Array<float> c(m * n * batch);
  fill(a, 7);
  fill(b, 8);
  const float one = 1, zero = 0;
  EXPECT(cublasGemmStridedBatchedEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, m, n, k, &one, a, CUDA_R_16F,
                                    m, m * k, b, CUDA_R_16F, k, 0, &zero, c, CUDA_R_32F, m, m * n,
                                    batch, CUBLAS_COMPUTE_32F,
                                    CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS);
  for (int p = 0; p < batch; ++p) {
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) {
        float expected = 0;
        for (int l = 0; l < k; ++l)
          expected += float(a[p * m * k + i + l * m]) * float(b[l + j * k]);
        EXPECT(c[p * m * n + i + j * m] == expected);
      }
    }
  }
  cublasDestroy(handle);
}

template <class T>
void test_cublaslt(cudaDataType type, cublasLtOrder_t order, cublasOperation_t transa,
                   cublasLtEpilogue_t epilogue) {
  const int m = 9, n = 6, k = 20;
  Array<T> a(m * k), b(k * n), c(m * n), d(m * n), bias(m);
  fill(a, 9);
  fill(b, 10);
  fill(c, 11);
  fill(bias, 12);
  const auto at = [&](int i, int j, int rows, int cols) {
    return order == CUBLASLT_ORDER_COL ? i + j * rows : i * cols + j;
  };
  cublasLtHandle_t handle;
  EXPECT(cublasLtCreate(&handle) == CUBLAS_STATUS_SUCCESS);
  cublasLtMatmulDesc_t desc;
  cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &transa, sizeof transa);
  cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
  const void* bias_pointer = bias.data;
  EXPECT(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias_pointer,
                                        sizeof bias_pointer) == CUBLAS_STATUS_SUCCESS);
  EXPECT(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias_pointer,
                                        4) == CUBLAS_STATUS_INVALID_VALUE);
  const auto layout = [&](int rows, int cols) {
    cublasLtMatrixLayout_t result;
    const int ld = order == CUBLASLT_ORDER_COL ? rows : cols;
    cublasLtMatrixLayoutCreate(&result, type, rows, cols, ld);
    cublasLtMatrixLayoutSetAttribute(result, CUBLASLT_MATRIX_LAYOUT_ORDER, &order, sizeof order);
    return result;
  };
  const bool t = transa == CUBLAS_OP_T;
  const auto layout_a = t ? layout(k, m) : layout(m, k);
  const auto layout_b = layout(k, n);
  const auto layout_d = layout(m, n);
  cublasLtMatmulPreference_t preference;
  cublasLtMatmulPreferenceCreate(&preference);
  const size_t workspace = 1 << 20;
  EXPECT(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                              &workspace,
                                              sizeof workspace) == CUBLAS_STATUS_SUCCESS);
  cublasLtMatmulHeuristicResult_t result[3];
  int found = 0;
  EXPECT(cublasLtMatmulAlgoGetHeuristic(handle, desc, layout_a, layout_b, layout_d, layout_d,
                                        preference, 3, result, &found) == CUBLAS_STATUS_SUCCESS);
  EXPECT(found == 1 && result[0].state == CUBLAS_STATUS_SUCCESS);
  const float alpha = 0.125f, beta = 2;
  EXPECT(cublasLtMatmul(handle, desc, &alpha, a.data, layout_a, b.data, layout_b, &beta, c.data,
                        layout_d, d.data, layout_d, &result[0].algo, nullptr, 0,
                        nullptr) == CUBLAS_STATUS_SUCCESS);
  EXPECT(cublasLtMatmul(handle, desc, &alpha, a.data, layout_b, b.data, layout_a, &beta, c.data,
                        layout_d, d.data, layout_d, &result[0].algo, nullptr, 0,
                        nullptr) == CUBLAS_STATUS_INVALID_VALUE);
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      double x = 0;
      for (int l = 0; l < k; ++l) {
        x += static_cast<double>(t ? a[at(l, i, k, m)] : a[at(i, l, m, k)]) *
             static_cast<double>(b[at(l, j, k, n)]);
      }
      x = alpha * x + beta * static_cast<double>(c[at(i, j, m, n)]);
      if (epilogue & CUBLASLT_EPILOGUE_BIAS) x += static_cast<double>(bias[i]);
      if (epilogue & CUBLASLT_EPILOGUE_RELU) x = x > 0 ? x : 0;
      if (epilogue & CUBLASLT_EPILOGUE_GELU) {
        x *= 0.5 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
      }
      const double actual = static_cast<double>(d[at(i, j, m, n)]);
      EXPECT(std::abs(actual - static_cast<double>(static_cast<T>(x))) <= 1e-5 * std::abs(x));
    }
  }
  cublasLtMatmulPreferenceDestroy(preference);
  cublasLtMatrixLayoutDestroy(layout_a);
  cublasLtMatrixLayoutDestroy(layout_b);
  cublasLtMatrixLayoutDestroy(layout_d);
  cublasLtMatmulDescDestroy(desc);
  cublasLtDestroy(handle);
}

CASE(cublaslt) {
  for (const auto order : {CUBLASLT_ORDER_COL, CUBLASLT_ORDER_ROW}) {
    for (const auto transa : {CUBLAS_OP_N, CUBLAS_OP_T}) {
      for (const auto epilogue :
           {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_RELU,
            CUBLASLT_EPILOGUE_RELU_BIAS, CUBLASLT_EPILOGUE_GELU, CUBLASLT_EPILOGUE_GELU_BIAS}) {
        test_cublaslt<float>(CUDA_R_32F, order, transa, epilogue);
        test_cublaslt<half>(CUDA_R_16F, order, transa, epilogue);
      }
    }
  }
}

// ---- The runtime -------------------------------------------------------------------------------

__constant__ float coefficients[4];
__device__ int device_counter;

__global__ void use_symbols(float* result) {
  if (threadIdx.x + blockIdx.x == 0) *result = coefficients[0] + coefficients[3];
  atomicAdd(&device_counter, 2);
}

CASE(memory) {
  float* device = nullptr;
  EXPECT(cudaMalloc(&device, 10 * sizeof(float)) == cudaSuccess);
  EXPECT(reinterpret_cast<uintptr_t>(device) % 256 == 0);
  std::vector<float> host(10, 1.0f);
  EXPECT(cudaMemcpy(host.data(), device, 40, cudaMemcpyDeviceToHost) == cudaSuccess);
  for (const float value : host) EXPECT(std::isnan(value));
  EXPECT(cudaMemset(device, 0, 40) == cudaSuccess);
  EXPECT(cudaMemcpy(host.data(), device, 40, cudaMemcpyDeviceToHost) == cudaSuccess);
  EXPECT(host[9] == 0);
  // Swapped sides, wrong directions, and more than there is.
  EXPECT(cudaMemcpy(device, host.data(), 40, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
  EXPECT(cudaMemcpy(host.data(), host.data(), 40, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  EXPECT(cudaMemcpy(device, host.data(), 41, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  EXPECT(cudaMemcpy(device, host.data(), 40, cudaMemcpyHostToDevice) == cudaSuccess);
  EXPECT(cudaMemset(device, 0, 41) == cudaErrorInvalidValue);
  EXPECT(cudaMemset(host.data(), 0, 4) == cudaErrorInvalidValue);
  // Two rows of three from a matrix with rows of five.
  for (int i = 0; i < 10; ++i) host[i] = static_cast<float>(i);
  EXPECT(cudaMemcpy2D(device, 12, host.data() + 1, 20, 12, 2, cudaMemcpyHostToDevice) ==
         cudaSuccess);
  EXPECT(device[0] == 1 && device[2] == 3 && device[3] == 6 && device[5] == 8);
  EXPECT(cudaFree(device) == cudaSuccess);
  EXPECT(cudaFree(device) == cudaErrorInvalidValue);
  EXPECT(cudaFree(nullptr) == cudaSuccess);
  EXPECT(cudaFree(host.data()) == cudaErrorInvalidValue);
  size_t free = 0, total = 0;
  EXPECT(cudaMemGetInfo(&free, &total) == cudaSuccess);
  EXPECT(free > 0 && free <= total);
  EXPECT(cudaMalloc(&device, total + 1) == cudaErrorMemoryAllocation && !device);
  EXPECT(cudaMallocHost(&device, 64) == cudaSuccess);
  EXPECT(cudaFree(device) == cudaErrorInvalidValue);
  EXPECT(cudaFreeHost(device) == cudaSuccess);
}

CASE(symbols) {
  const float values[4] = {1, 2, 3, 4};
  EXPECT(cudaMemcpyToSymbol(coefficients, values, sizeof values) == cudaSuccess);
  EXPECT(cudaMemcpyToSymbol(coefficients, values, sizeof values, 4) == cudaErrorInvalidValue);
  const int zero = 0;
  EXPECT(cudaMemcpyToSymbol(device_counter, &zero, sizeof zero) == cudaSuccess);
  Array<float> result(1);
  use_symbols<<<2, 5>>>(result);
  EXPECT(result[0] == 5);
  int counted = 0;
  EXPECT(cudaMemcpyFromSymbol(&counted, device_counter, sizeof counted) == cudaSuccess);
  EXPECT(counted == 20);
}

// Says that it is there, and waits for the other device's kernel.
__global__ void meet_other_device(unsigned* own, unsigned* other) {
  cuda::atomic_ref<unsigned, cuda::thread_scope_system>(*other).store(1,
                                                                      cuda::memory_order_release);
  cuda::atomic_ref<unsigned, cuda::thread_scope_system> flag(*own);
  while (flag.load(cuda::memory_order_acquire) == 0) cuda_cpu::nanoseconds();
}

CASE(devices_run_at_the_same_time) {
  int count = 0, can = 0;
  EXPECT(cudaGetDeviceCount(&count) == cudaSuccess && count >= 2);
  EXPECT(cudaDeviceCanAccessPeer(&can, 0, 1) == cudaSuccess && can == 1);
  unsigned* flags[2];
  for (int device = 0; device < 2; ++device) {
    EXPECT(cudaSetDevice(device) == cudaSuccess);
    EXPECT(cudaDeviceEnablePeerAccess(1 - device, 0) == cudaSuccess);
    EXPECT(cudaDeviceEnablePeerAccess(1 - device, 0) == cudaErrorPeerAccessAlreadyEnabled);
    EXPECT(cudaMalloc(&flags[device], sizeof(unsigned)) == cudaSuccess);
    EXPECT(cudaMemset(flags[device], 0, sizeof(unsigned)) == cudaSuccess);
  }
  for (int device = 0; device < 2; ++device) {
    EXPECT(cudaSetDevice(device) == cudaSuccess);
    meet_other_device<<<1, 1>>>(flags[device], flags[1 - device]);
  }
  EXPECT(cudaDeviceSynchronize() == cudaSuccess);
  for (int device = 0; device < 2; ++device) {
    unsigned flag = 0;
    EXPECT(cudaMemcpy(&flag, flags[device], sizeof flag, cudaMemcpyDeviceToHost) == cudaSuccess);
    EXPECT(flag == 1);
    cudaPointerAttributes attributes;
    EXPECT(cudaPointerGetAttributes(&attributes, flags[device]) == cudaSuccess);
    EXPECT(attributes.device == device);
    cudaFree(flags[device]);
    EXPECT(cudaSetDevice(device) == cudaSuccess);
    EXPECT(cudaDeviceDisablePeerAccess(1 - device) == cudaSuccess);
    EXPECT(cudaDeviceDisablePeerAccess(1 - device) == cudaErrorPeerAccessNotEnabled);
  }
  cudaGetLastError();
  cudaSetDevice(0);
}

CASE(device_queries) {
  int count = 0;
  EXPECT(cudaGetDeviceCount(&count) == cudaSuccess && count >= 1);
  EXPECT(cudaSetDevice(0) == cudaSuccess && cudaSetDevice(count) == cudaErrorInvalidDevice);
  cudaDeviceProp properties;
  EXPECT(cudaGetDeviceProperties(&properties, 0) == cudaSuccess);
  EXPECT(std::strlen(properties.name) > 0 && properties.major == 9 && properties.minor == 0);
  EXPECT(properties.multiProcessorCount >= 1 && properties.warpSize == 32);
  EXPECT(properties.maxThreadsPerBlock == 1024 && properties.totalGlobalMem > 0);
  EXPECT(properties.sharedMemPerBlock == 48 * 1024);
  EXPECT(properties.sharedMemPerBlockOptin == 227 * 1024);
  int value = -1;
  EXPECT(cudaDeviceGetAttribute(&value, cudaDevAttrClockRate, 0) == cudaSuccess && value == 0);
  EXPECT(cudaDeviceGetAttribute(&value, cudaDevAttrWarpSize, 0) == cudaSuccess && value == 32);
  EXPECT(cudaDriverGetVersion(&value) == cudaSuccess && value == 13000);
}

CASE(streams_and_events) {
  cudaStream_t stream;
  EXPECT(cudaStreamCreate(&stream) == cudaSuccess);
  cudaEvent_t start, stop;
  cudaEventCreate(&start);
  cudaEventCreateWithFlags(&stop, cudaEventDefault);
  float milliseconds = -1;
  EXPECT(cudaEventElapsedTime(&milliseconds, start, stop) == cudaErrorInvalidResourceHandle);
  cudaGetLastError();
  Array<int> count(1, 0);
  EXPECT(cudaEventRecord(start, stream) == cudaSuccess);
  for (int i = 0; i < 10; ++i) count_launch<<<10, 10, 0, stream>>>(count);
  EXPECT(cudaEventRecord(stop, stream) == cudaSuccess);
  EXPECT(cudaEventSynchronize(stop) == cudaSuccess && cudaEventQuery(stop) == cudaSuccess);
  EXPECT(cudaEventElapsedTime(&milliseconds, start, stop) == cudaSuccess && milliseconds > 0);
  EXPECT(count[0] == 1000);
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  EXPECT(cudaStreamDestroy(stream) == cudaSuccess);
}

CASE(intrinsics) {
  EXPECT(min(3, 4) == 3 && max(3u, 4) == 4 && max(1.0f, NAN) == 1 && min(2.0, 1.0f) == 1);
  EXPECT(__popc(0xF0F0) == 8 && __clz(1) == 31 && __clz(0) == 32 && __ffs(8) == 4 && !__ffs(0));
  EXPECT(__brev(1) == 0x80000000 && __brev(0x12345678) == 0x1E6A2C48);
  EXPECT(__umulhi(0x80000000, 6) == 3 && __mulhi(-1, 2) == -1 && __mul24(-3, 5) == -15);
  EXPECT(__byte_perm(0x33221100, 0x77665544, 0x7250) == 0x77225500);
  EXPECT(__funnelshift_l(0x80000000, 1, 4) == 0x18 && __funnelshift_r(0x18, 1, 4) == 0x10000001);
  EXPECT(__float_as_int(1.0f) == 0x3F800000 && __int_as_float(0x40000000) == 2);
  EXPECT(__saturatef(1.5f) == 1 && __saturatef(NAN) == 0 && __fdividef(1, 4) == 0.25f);
  EXPECT(rsqrtf(4) == 0.5f && __frcp_rn(8) == 0.125f && __fmaf_rn(2, 3, 4) == 10);
  EXPECT(__expf(0) == 1 && __logf(1) == 0 && __float2int_rz(-1.7f) == -1);
  EXPECT(__float2int_rn(2.5f) == 2 && __float2int_rz(1e20f) == 0x7FFFFFFF && !__float2int_rz(NAN));
  static_assert(sizeof(float4) == 16 && alignof(float4) == 16 && alignof(float2) == 8);
  static_assert(sizeof(float3) == 12 && alignof(float3) == 4 && alignof(double4) == 16);
  static_assert(sizeof(uchar4) == 4 && alignof(uchar4) == 4 && alignof(short2) == 4);
  const float4 f = make_float4(1, 2, 3, 4);
  EXPECT(__ldg(&f).w == 4);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> chosen(argv + 1, argv + argc);
  if (chosen == std::vector<std::string>{"--list"}) {
    for (const auto& [name, run] : cases()) std::printf("%s\n", name.c_str());
    return 0;
  }
  if (chosen.empty()) {
    for (const auto& [name, run] : cases()) chosen.push_back(name);
  }
  for (const std::string& name : chosen) {
    const auto found = cases().find(name);
    if (found == cases().end()) {
      std::fprintf(stderr, "no case %s\n", name.c_str());
      return 2;
    }
    const int before = failures;
    found->second();
    if (failures != before) std::printf("%s: %d failures\n", name.c_str(), failures - before);
  }
  return failures == 0 ? 0 : 1;
}
