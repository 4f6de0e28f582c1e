// Threads that hand data to each other in every way there is, correctly: ThreadSanitizer must be
// silent.

#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <cuda_runtime.h>
#include <mma.h>

#include <cstdio>
#include <cuda/atomic>
#include <vector>

constexpr int kThreads = 128;
constexpr int kBlocks = 5;

__global__ void barriers(const float* in, float* out) {
  __shared__ float buffer[kThreads];
  extern __shared__ float sums[];
  const int i = threadIdx.x;
  float value = in[blockIdx.x * kThreads + i];
  for (int round = 0; round < 4; ++round) {
    buffer[i] = value;
    __syncthreads();
    value = buffer[(i + 1) % kThreads];
    __syncthreads();
  }
  for (int d = 16; d; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  if (i % 32 == 0) sums[i / 32] = value;
  if (__syncthreads_or(value < 0)) return;
  if (i < 32) {
    float sum = i < kThreads / 32 ? sums[i] : 0;
    for (int d = 16; d; d /= 2) sum += __shfl_down_sync(~0u, sum, d);
    if (i == 0) atomicAdd(out, sum);
  }
}

__global__ void through_warps(int* out) {
  __shared__ int buffer[kThreads];
  buffer[threadIdx.x] = threadIdx.x;
  __syncwarp();
  const int neighbour = buffer[threadIdx.x ^ 1];
  __syncwarp();
  buffer[threadIdx.x] = neighbour + 1;
  __syncwarp();
  out[blockIdx.x * kThreads + threadIdx.x] = buffer[threadIdx.x ^ 31];
}

__global__ void pipeline(const float* in, float* out) {
  __shared__ alignas(16) float stages[2][kThreads];
  const int i = threadIdx.x;
  __pipeline_memcpy_async(&stages[0][i], in + i, 4);
  __pipeline_commit();
  for (int block = 0; block < kBlocks; ++block) {
    if (block + 1 < kBlocks) {
      __pipeline_memcpy_async(&stages[(block + 1) % 2][i], in + (block + 1) * kThreads + i, 4);
    }
    __pipeline_commit();
    __pipeline_wait_prior(1);
    __syncthreads();
    if (blockIdx.x == 0) out[block * kThreads + i] = stages[block % 2][kThreads - 1 - i];
    __syncthreads();
  }
}

__global__ void tensor_cores(const half* a, float* c) {
  using namespace nvcuda;
  __shared__ alignas(32) half tile[16 * 16];
  __shared__ alignas(32) float result[2][16 * 16];
  for (int i = threadIdx.x; i < 256; i += 64) tile[i] = a[i];
  __syncthreads();
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> fb;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
  wmma::fill_fragment(fc, 0.0f);
  wmma::load_matrix_sync(fa, tile, 16);
  wmma::load_matrix_sync(fb, tile, 16);
  for (int repeat = 0; repeat < 3; ++repeat) wmma::mma_sync(fc, fa, fb, fc);
  const int warp = threadIdx.x / 32;
  wmma::store_matrix_sync(result[warp], fc, 16, wmma::mem_row_major);
  __syncwarp();
  for (int i = threadIdx.x % 32; i < 256; i += 32) c[warp * 256 + i] = result[warp][255 - i];
}

__global__ void last_block(const float* in, float* partial, unsigned* done, float* total) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = in[blockIdx.x];
    __threadfence();
    last = atomicAdd(done, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    for (unsigned i = 0; i < gridDim.x; ++i) *total += partial[i];
  }
}

// As many blocks as run at a time: each waits for all others.
__global__ void meeting(const float* in, float* left, unsigned* come, float* out) {
  const cuda::atomic_ref<unsigned, cuda::thread_scope_device> all(*come);
  if (threadIdx.x == 0) {
    left[blockIdx.x] = in[blockIdx.x];
    all.fetch_add(1, cuda::memory_order_release);
    while (all.load(cuda::memory_order_acquire) < gridDim.x) {
    }
    out[blockIdx.x] = left[(blockIdx.x + 1) % gridDim.x];
  }
}

template <class T>
T* allocate(int count) {
  T* pointer = nullptr;
  cudaMalloc(&pointer, count * sizeof(T));
  cudaMemset(pointer, 0, count * sizeof(T));
  return pointer;
}

int main() {
  const int n = kBlocks * kThreads;
  const std::vector<float> ones(n, 1.0f);
  float* in = allocate<float>(n);
  float* out = allocate<float>(n);
  int* integers = allocate<int>(n);
  half* matrix = allocate<half>(256);
  float* products = allocate<float>(512);
  unsigned* done = allocate<unsigned>(2);
  int multiprocessors = 0;
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0);
  cudaMemcpy(in, ones.data(), n * sizeof(float), cudaMemcpyHostToDevice);

  barriers<<<kBlocks, kThreads, kThreads / 32 * sizeof(float)>>>(in, out);
  float total = 0;
  cudaMemcpy(&total, out, sizeof total, cudaMemcpyDeviceToHost);
  through_warps<<<kBlocks, kThreads>>>(integers);
  pipeline<<<2, kThreads>>>(in, out);
  tensor_cores<<<1, 64>>>(matrix, products);
  last_block<<<kBlocks, 32>>>(in, out, done, products);
  meeting<<<multiprocessors, 32>>>(in, products, done + 1, out);
  const cudaError_t error = cudaDeviceSynchronize();
  for (void* pointer :
       {static_cast<void*>(in), static_cast<void*>(out), static_cast<void*>(integers),
        static_cast<void*>(matrix), static_cast<void*>(products), static_cast<void*>(done)}) {
    cudaFree(pointer);
  }
  std::printf("%s, %g\n", cudaGetErrorString(error), total);
  return error == cudaSuccess && total == n ? 0 : 1;
}
