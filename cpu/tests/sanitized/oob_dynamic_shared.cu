// One thread reaches one element beyond the end of dynamic shared memory: AddressSanitizer must
// report it.

#include <cuda_runtime.h>

#include <cstdio>

__global__ void touch(float* out) {
  extern __shared__ float buffer[];
  buffer[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = buffer[threadIdx.x + 1];
}

int main() {
  float* out = nullptr;
  cudaMalloc(&out, 32 * sizeof(float));
  touch<<<1, 32, 32 * sizeof(float)>>>(out);
  const cudaError_t error = cudaDeviceSynchronize();
  cudaFree(out);
  std::printf("%s\n", cudaGetErrorString(error));
  return error == cudaSuccess ? 0 : 1;
}
