// Blocks add to the same element without an atomic operation: ThreadSanitizer must report it.

#include <cuda_runtime.h>

#include <cstdio>

__global__ void count(int* total) {
  if (threadIdx.x == 0) *total += 1;
}

int main() {
  int* total = nullptr;
  cudaMalloc(&total, sizeof(int));
  cudaMemset(total, 0, sizeof(int));
  count<<<2, 32>>>(total);
  const cudaError_t error = cudaDeviceSynchronize();
  cudaFree(total);
  std::printf("%s\n", cudaGetErrorString(error));
  return error == cudaSuccess ? 0 : 1;
}
