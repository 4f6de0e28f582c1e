// One thread of a warpgroup gives memory back in which all four warps have read the left factor of
// a product: that of the product that it has waited for, which is right, or with the argument
// `newest` that of the one that is still under way. ThreadSanitizer must report only that.

#include <cuda_runtime.h>

#include <cstdio>

#include "primitives/hopper/hopper.cuh"

using namespace primitives;

__global__ void __launch_bounds__(160) hand_back(int which, float* out) {
  extern __shared__ __align__(1024) char right[];
  __shared__ float stages[2][128];
  __shared__ Barrier empty;
  const int i = threadIdx.x;
  for (int at = i; at < 1024; at += 160) reinterpret_cast<float*>(right)[at] = 0;
  if (i < 128) stages[0][i] = stages[1][i] = 1;
  if (i == 0) {
    barrier_init(&empty, 1);
    barrier_init_fence();
  }
  shared_fence();
  __syncthreads();
  if (i < 128) {
    float sum[16];
    uint32_t fragments[2][4] = {};
    for (int step = 0; step < 2; ++step) {
      fragments[step][0] = __float_as_uint(stages[step][i]);
      wgmma_fence();
      wgmma_tf32(sum, fragments[step], descriptor_a(right), step > 0);
      wgmma_commit();
    }
    wgmma_wait<1>();
    if (i == 0) barrier_arrive(&empty);
    wgmma_wait<0>();
    out[i] = sum[0];
  } else if (i == 128) {
    barrier_wait(&empty, 0);
    for (int j = 0; j < 128; ++j) stages[which][j] = 2;
  }
}

int main(int count, char**) {
  float* out = nullptr;
  cudaMalloc(&out, 128 * sizeof(float));
  hand_back<<<1, 160, 4096>>>(count > 1 ? 1 : 0, out);
  const cudaError_t error = cudaDeviceSynchronize();
  cudaFree(out);
  std::printf("%s\n", cudaGetErrorString(error));
  return error == cudaSuccess ? 0 : 1;
}
