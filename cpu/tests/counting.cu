// Kernels whose requests can be counted by hand: test_cpu_backend.py knows the numbers. Prints for
// each what the backend has counted.

#include <cublas_v2.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <cuda_runtime.h>
#include <mma.h>

#include <cstdio>
#include <functional>

#include "cpu/watch/counting.h"

using cuda_cpu::Counts;

constexpr int kThreads = 64, kBlocks = 2, kSteps = 5;

__global__ void neighbours(const float* in, float* out) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  out[i] = in[i];
}

__global__ void strided(const float* in, float* out) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  out[i] = in[8 * i];
}

__global__ void vectors(const float4* in, float4* out) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  const float4 v = in[i];
  out[i] = {v.w, v.z, v.y, v.x};
}

__global__ void shifted(const float* in, float* out) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  out[i] = in[i + 1];
}

__global__ void same(const float* in, float* out) {
  out[blockIdx.x * kThreads + threadIdx.x] = in[0];
}

// Lanes take part in some steps only, and meet again after all.
__global__ void parting(const float* in, float* out) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  float sum = 0;
  for (int step = 0; step < kSteps; ++step) {
    if (threadIdx.x % 2 == 0) sum += in[i];
    __syncwarp();
  }
  out[i] = sum;
}

template <typename T>
__global__ void rows_of_words(float* out, int words_apart) {
  extern __shared__ __align__(16) float shared[];
  const int i = threadIdx.x % 32;
  T value = *reinterpret_cast<const T*>(shared + i * words_apart);
  if (reinterpret_cast<const float*>(&value)[0] == 1) out[0] = 1;
}

__global__ void atomics(float* sum, unsigned* count) {
  atomicAdd(sum + threadIdx.x, 1.0f);
  atomicAdd(count, 1u);
}

__global__ void copies(const float4* in, float4* out) {
  __shared__ float4 buffer[kThreads];
  const int i = blockIdx.x * kThreads + threadIdx.x;
  __pipeline_memcpy_async(&buffer[threadIdx.x], &in[i], 16, threadIdx.x < 32 ? 0 : 16);
  __pipeline_commit();
  __pipeline_wait_prior(0);
  __syncthreads();
  out[i] = buffer[threadIdx.x];
}

__global__ void fragments(const half* in, float* out) {
  using namespace nvcuda;
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> b;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum;
  wmma::fill_fragment(sum, 0.0f);
  wmma::load_matrix_sync(a, in, 16);
  wmma::load_matrix_sync(b, in, 16);
  wmma::mma_sync(sum, a, b, sum);
  wmma::store_matrix_sync(out, sum, 16, wmma::mem_row_major);
}

int main() {
  if (!cuda_cpu::can_count()) {
    std::puts("not compiled for counting");
    return 3;
  }
  float *in, *out;
  const size_t bytes = 1 << 16;
  if (cudaMalloc(&in, bytes) != cudaSuccess || cudaMalloc(&out, bytes) != cudaSuccess) return 1;
  cudaMemset(in, 0, bytes);
  cudaMemset(out, 0, bytes);
  const auto count = [](const char* name, const std::function<void()>& launch) {
    cuda_cpu::start_counting();
    launch();
    const Counts c = cuda_cpu::stop_counting();
    std::printf("%s %lld %lld %lld %lld %lld %lld %lld %lld %lld %lld %lld %lld %lld %lld\n", name,
                static_cast<long long>(c.global_load_requests),
                static_cast<long long>(c.global_load_sectors),
                static_cast<long long>(c.global_store_requests),
                static_cast<long long>(c.global_store_sectors),
                static_cast<long long>(c.shared_load_requests),
                static_cast<long long>(c.shared_load_conflicts),
                static_cast<long long>(c.shared_store_requests),
                static_cast<long long>(c.shared_store_conflicts),
                static_cast<long long>(c.atomic_requests), static_cast<long long>(c.atomic_sectors),
                static_cast<long long>(c.async_copy_bytes), static_cast<long long>(c.tensor_flops),
                static_cast<long long>(c.barriers), static_cast<long long>(c.l2_bytes));
    for (const Counts::Place& place : c.worst) {
      std::printf("worst of %s: %s:%d %g of %g\n", name, place.file.c_str(), place.line,
                  place.per_request, place.least);
    }
  };
  auto* in4 = reinterpret_cast<float4*>(in);
  auto* out4 = reinterpret_cast<float4*>(out);
  count("neighbours", [&] { neighbours<<<kBlocks, kThreads>>>(in, out); });
  count("strided", [&] { strided<<<kBlocks, kThreads>>>(in, out); });
  count("vectors", [&] { vectors<<<kBlocks, kThreads>>>(in4, out4); });
  count("shifted", [&] { shifted<<<kBlocks, kThreads>>>(in, out); });
  count("same", [&] { same<<<kBlocks, kThreads>>>(in, out); });
  count("parting", [&] { parting<<<kBlocks, kThreads>>>(in, out); });
  for (const int apart : {1, 2, 32, 33}) {
    count(("words_" + std::to_string(apart)).c_str(),
          [&] { rows_of_words<float><<<1, 32, 8192>>>(out, apart); });
  }
  for (const int apart : {2, 4, 34}) {
    count(("pairs_" + std::to_string(apart)).c_str(),
          [&] { rows_of_words<float2><<<1, 32, 8192>>>(out, apart); });
  }
  for (const int apart : {4, 32, 36}) {
    count(("fours_" + std::to_string(apart)).c_str(),
          [&] { rows_of_words<float4><<<1, 32, 8192>>>(out, apart); });
  }
  count("atomics",
        [&] { atomics<<<kBlocks, kThreads>>>(out, reinterpret_cast<unsigned*>(out) + 1024); });
  count("copies", [&] { copies<<<kBlocks, kThreads>>>(in4, out4); });
  count("fragments", [&] { fragments<<<1, 32>>>(reinterpret_cast<half*>(in), out); });
  // The library's products, of which only the bytes are counted: 5 x 7 by 7 x 6.
  cublasHandle_t blas;
  if (cublasCreate(&blas) != CUBLAS_STATUS_SUCCESS) return 1;
  const auto multiply = [&](float beta) {
    const float one = 1;
    cublasSgemm(blas, CUBLAS_OP_N, CUBLAS_OP_N, 5, 6, 7, &one, in, 5, in, 7, &beta, out, 5);
  };
  count("product", [&] { multiply(0); });
  count("product_added", [&] { multiply(1); });
  count("product_and_neighbours", [&] {
    multiply(0);
    neighbours<<<kBlocks, kThreads>>>(in, out);
  });
  cublasDestroy(blas);
  cudaFree(in);
  cudaFree(out);
  return cudaGetLastError() == cudaSuccess ? 0 : 1;
}
