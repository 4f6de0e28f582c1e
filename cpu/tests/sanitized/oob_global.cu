// One thread reaches one element beyond the end of memory from cudaMalloc: AddressSanitizer must
// report it.

#include <cuda_runtime.h>

#include <cstdio>

__global__ void touch(float* out) { out[threadIdx.x + 1] = 1; }

int main() {
  float* out = nullptr;
  cudaMalloc(&out, 32 * sizeof(float));
  touch<<<1, 32>>>(out);
  const cudaError_t error = cudaDeviceSynchronize();
  cudaFree(out);
  std::printf("%s\n", cudaGetErrorString(error));
  return error == cudaSuccess ? 0 : 1;
}
