// A barrier is missing between writing shared memory and reading what a neighbour wrote:
// ThreadSanitizer must report it.

#include <cuda_runtime.h>

#include <cstdio>

__global__ void rotate(int* data) {
  __shared__ int buffer[64];
  buffer[threadIdx.x] = data[threadIdx.x];
  data[threadIdx.x] = buffer[(threadIdx.x + 1) % 64];
}

int main() {
  int* data = nullptr;
  cudaMalloc(&data, 64 * sizeof(int));
  cudaMemset(data, 0, 64 * sizeof(int));
  rotate<<<1, 64>>>(data);
  const cudaError_t error = cudaDeviceSynchronize();
  cudaFree(data);
  std::printf("%s\n", cudaGetErrorString(error));
  return error == cudaSuccess ? 0 : 1;
}
