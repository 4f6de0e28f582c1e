#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <vector>

#include "common/numerics.h"

namespace common {

namespace {

/// A 64-bit mix of `x` in which every input bit reaches every output bit: the finalizer of
/// SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
__device__ uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

__device__ void put(half& to, double value) { to = __float2half_rn(static_cast<float>(value)); }
__device__ void put(__nv_bfloat16& to, double value) {
  to = __float2bfloat16_rn(static_cast<float>(value));
}
__device__ void put(float& to, double value) { to = static_cast<float>(value); }
__device__ void put(double& to, double value) { to = value; }

__device__ double get(half value) { return __half2float(value); }
__device__ double get(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ double get(float value) { return value; }
__device__ double get(double value) { return value; }

/// One thread fills every (threads of the grid)-th element.
template <typename T>
__global__ void fill_random_kernel(T* out, size_t count, double scale, double center,
                                   uint64_t seed) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    const uint64_t bits = mix(seed * 0x9e3779b97f4a7c15ull + i + 1);
    put(out[i], center + scale * (static_cast<double>(bits >> 11) * 0x1p-52 - 1));
  }
}

template <typename T>
__global__ void to_fp64_kernel(const T* in, double* out, size_t count) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    out[i] = get(in[i]);
  }
}

/// One thread adds up every (threads of the grid)-th of the words.
__global__ void checksum_kernel(const uint32_t* in, size_t words, unsigned long long* sum) {
  unsigned long long own = 0;
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < words;
       i += stride) {
    own += mix((static_cast<uint64_t>(i) << 32) + in[i] + 1);
  }
  atomicAdd(sum, own);
}

struct Sums {
  double difference;         // sum of |out - reference|^2
  double reference;          // sum of |reference|^2
  unsigned long long worst;  // bits of max |out - reference|
};

/// Each warp reduces its share with shuffles and adds it to `sums` (which starts as zeros). The
/// bits of non-negative doubles are ordered as the doubles are, and those of a NaN come last: an
/// integer maximum therefore keeps a NaN, where fmax would drop it.
template <typename T>
__global__ void compare_kernel(const T* out, const double* reference, size_t count, Sums* sums) {
  double difference = 0, total = 0;
  unsigned long long worst = 0;
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    const double error = fabs(get(out[i]) - reference[i]);
    difference += error * error;
    total += reference[i] * reference[i];
    worst = max(worst, static_cast<unsigned long long>(__double_as_longlong(error)));
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    difference += __shfl_xor_sync(0xffffffffu, difference, lanes);
    total += __shfl_xor_sync(0xffffffffu, total, lanes);
    worst = max(worst, __shfl_xor_sync(0xffffffffu, worst, lanes));
  }
  if (threadIdx.x % 32 == 0) {
    atomicAdd(&sums->difference, difference);
    atomicAdd(&sums->reference, total);
    atomicMax(&sums->worst, worst);
  }
}

/// Bits of max |out - reference| / max(rms, |reference| / kWorstToFrobenius), into `worst`, which
/// starts as 0.
template <typename T>
__global__ void worst_kernel(const T* out, const double* reference, size_t count, double rms,
                             unsigned long long* worst) {
  unsigned long long own = 0;
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    const double error =
        fabs(get(out[i]) - reference[i]) / fmax(rms, fabs(reference[i]) / kWorstToFrobenius);
    own = max(own, static_cast<unsigned long long>(__double_as_longlong(error)));
  }
  atomicMax(worst, own);
}

#ifdef CUDA_CPU  // where to start a thread takes longer than tens of elements
constexpr int kThreads = 32;
constexpr size_t kMostBlocks = 8;
#else
constexpr int kThreads = 256;
constexpr size_t kMostBlocks = 4096;
#endif

int blocks_for(size_t count) {
  return static_cast<int>(std::clamp<size_t>((count + kThreads - 1) / kThreads, 1, kMostBlocks));
}

/// Calls `visit` with `data` as a pointer to elements of `type`.
template <typename Visit>
void with_type(void* data, Type type, Visit visit) {
  switch (type) {
    case Type::fp16:
      return visit(static_cast<half*>(data));
    case Type::bf16:
      return visit(static_cast<__nv_bfloat16*>(data));
    case Type::fp32:
      return visit(static_cast<float*>(data));
    case Type::fp64:
      return visit(static_cast<double*>(data));
  }
}

template <typename T>
void launch_fill_random(T* out, const Storage& storage, uint64_t seed) {
  fill_random_kernel<T><<<blocks_for(storage.count), kThreads>>>(out, storage.count, storage.scale,
                                                                 storage.center, seed);
  CUDA_CHECK(cudaGetLastError());
}

template <typename T>
void launch_to_fp64(const T* in, double* out, size_t count) {
  to_fp64_kernel<T><<<blocks_for(count), kThreads>>>(in, out, count);
  CUDA_CHECK(cudaGetLastError());
}

template <typename T>
void launch_worst(const T* out, const double* reference, size_t count, double rms,
                  unsigned long long* worst) {
  worst_kernel<T><<<blocks_for(count), kThreads>>>(out, reference, count, rms, worst);
  CUDA_CHECK(cudaGetLastError());
}

template <typename T>
void launch_compare(const T* out, const double* reference, size_t count, Sums* sums) {
  compare_kernel<T><<<blocks_for(count), kThreads>>>(out, reference, count, sums);
  CUDA_CHECK(cudaGetLastError());
}

/// Error::worst, where some element is off by more than is allowed in units of the reference's rms.
double worst_by_size(const Check& check, double rms) {
  const size_t count = check.output->count;
  Scratch<unsigned long long> worst(1);
  CUDA_CHECK(cudaMemset(worst, 0, sizeof(unsigned long long)));
  with_type(check.output->data, check.output->type, [&](const auto* out) {
    launch_worst(out, static_cast<const double*>(check.reference->data), count, rms, worst);
  });
  unsigned long long bits = 0;
  CUDA_CHECK(cudaMemcpy(&bits, worst, sizeof bits, cudaMemcpyDeviceToHost));
  return std::bit_cast<double>(bits);
}

}  // namespace

void fill_random(const Storage& storage, uint64_t seed) {
  with_type(storage.data, storage.type, [&](auto* out) { launch_fill_random(out, storage, seed); });
}

void to_fp64(const void* in, Type type, size_t count, double* out) {
  with_type(const_cast<void*>(in), type,
            [&](const auto* typed) { launch_to_fp64(typed, out, count); });
}

uint64_t checksum(const Storage& storage) {
  const size_t bytes = storage.count * storage.element_bytes, words = bytes / sizeof(uint32_t);
  Scratch<unsigned long long> device_sum(1);
  CUDA_CHECK(cudaMemset(device_sum, 0, sizeof(unsigned long long)));
  checksum_kernel<<<blocks_for(words), kThreads>>>(static_cast<const uint32_t*>(storage.data),
                                                   words, device_sum);
  CUDA_CHECK(cudaGetLastError());
  unsigned long long sum = 0;
  CUDA_CHECK(cudaMemcpy(&sum, device_sum, sizeof sum, cudaMemcpyDeviceToHost));
  uint32_t rest = 0;  // bytes that are no whole word
  CUDA_CHECK(cudaMemcpy(&rest, static_cast<const char*>(storage.data) + words * sizeof rest,
                        bytes % sizeof rest, cudaMemcpyDeviceToHost));
  return sum + rest;
}

Error compare(const Check& check) {
  const size_t count = check.output->count;
  Scratch<Sums> device_sums(1);
  CUDA_CHECK(cudaMemset(device_sums, 0, sizeof(Sums)));
  with_type(check.output->data, check.output->type, [&](const auto* out) {
    launch_compare(out, static_cast<const double*>(check.reference->data), count, device_sums);
  });
  Sums sums;
  CUDA_CHECK(cudaMemcpy(&sums, device_sums, sizeof(Sums), cudaMemcpyDeviceToHost));
  const double rms = sqrt(sums.reference / static_cast<double>(count));
  // Of a difference that is NaN, too, the quotient is one.
  const auto relative = [](double difference, double size) {
    return difference == 0 ? 0 : difference / size;
  };
  Error error = {relative(sqrt(sums.difference), sqrt(sums.reference)),
                 relative(std::bit_cast<double>(sums.worst), rms), bound_of(check, rms)};
  if (error.worst > kWorstToFrobenius * error.bound) error.worst = worst_by_size(check, rms);
  return error;
}

bool proves_nothing(const Check& check) {
  if (!check.uncancelled || *check.uncancelled == 0) return false;
  const size_t count = check.reference->count;
  std::vector<double> expected(count);
  CUDA_CHECK(cudaMemcpy(expected.data(), check.reference->data, count * sizeof(double),
                        cudaMemcpyDeviceToHost));
  double squares = 0;
  for (const double value : expected) squares += value * value;
  const double rms = std::sqrt(squares / static_cast<double>(count));
  return check.tolerance * *check.uncancelled > kMostBound * rms;
}

std::string wrong_elements(const Check& check) {
  const size_t count = check.output->count;
  std::vector<double> out(count), expected(count);
  {
    Scratch<double> converted(count);
    to_fp64(check.output->data, check.output->type, count, converted);
    const size_t bytes = count * sizeof(double);
    CUDA_CHECK(cudaMemcpy(out.data(), converted, bytes, cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaMemcpy(expected.data(), check.reference->data, bytes, cudaMemcpyDeviceToHost));
  }
  double squares = 0;
  for (const double value : expected) squares += value * value;
  const double rms = std::sqrt(squares / static_cast<double>(count));
  const double bound = bound_of(check, rms);
  size_t first = 0, worst = 0, wrong = 0;
  double largest = -1;
  for (size_t i = 0; i < count; ++i) {
    const double error = std::fabs(out[i] - expected[i]);  // or NaN
    const double size = std::max(kWorstToFrobenius * rms, std::fabs(expected[i]));
    if (!(error <= bound * size) && wrong++ == 0) first = i;
    if (error > largest) largest = error, worst = i;
  }
  char text[160];
  if (wrong > 0) {
    snprintf(text, sizeof text,
             "wrong from element %zu on: %.6g where %.6g is expected; "
             "%zu of %zu elements are wrong",
             first, out[first], expected[first], wrong, count);
  } else {  // their sum of squares is too large
    snprintf(text, sizeof text,
             "a little wrong in many elements, most of all in element %zu: "
             "%.6g where %.6g is expected",
             worst, out[worst], expected[worst]);
  }
  return text;
}

void product_fp64(cublasHandle_t blas, double alpha, const double* a, Transposed a_is,
                  const double* b, Transposed b_is, double beta, double* c, int64_t m, int64_t n,
                  int64_t k) {
  // cuBLAS is column-major, and a row-major matrix read as column-major is its transpose: c^T = b^T
  // a^T, so the operands and the extents swap places.
  CUBLAS_CHECK(cublasDgemm(blas, b_is ? CUBLAS_OP_T : CUBLAS_OP_N, a_is ? CUBLAS_OP_T : CUBLAS_OP_N,
                           static_cast<int>(n), static_cast<int>(m), static_cast<int>(k), &alpha, b,
                           static_cast<int>(b_is ? k : n), a, static_cast<int>(a_is ? m : k), &beta,
                           c, static_cast<int>(n)));
}

void matmul_fp64(cublasHandle_t blas, const double* a, const double* b, double* c, int64_t m,
                 int64_t n, int64_t k) {
  product_fp64(blas, 1, a, kPlain, b, kPlain, 0, c, m, n, k);
}

}  // namespace common
