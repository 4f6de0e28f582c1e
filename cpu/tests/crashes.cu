// What ends a program on a CPU: a kernel does what its argument says.

#define SPIN_LIMIT 1000000  // a millisecond

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "primitives/spin.cuh"

using namespace primitives;

__global__ void wild(int* memory, long long far) {
  if (blockIdx.x == 1 && threadIdx.x == 2) memory[far + threadIdx.x] = 1;
}

__device__ int deep(int n) {
  volatile char room[1024];
  room[n % 1024] = static_cast<char>(n);
  return n == 0 ? 0 : deep(n - 1) + room[n % 1024];
}

__global__ void overflow(int* result, int depth) {
  __syncthreads();
  if (threadIdx.x == 2) *result = deep(depth);
}

__global__ void divide(int* result, int by) {
  if (threadIdx.x == 2) result[0] = 7 / (by - static_cast<int>(threadIdx.x));
}

__global__ void wait_in_vain(unsigned* count) {
  if (threadIdx.x == 1) wait_for_count(GridCount(*count), 2, "what nobody does");
}

int main(int, char** arguments) {
  const char* const what = arguments[1];
  std::printf("before it\n");  // in a pipe it waits in the buffer
  int* memory = nullptr;
  cudaMalloc(&memory, 1024);
  if (!std::strcmp(what, "host")) std::abort();
  cuda_cpu::set_row("naive");
  if (!std::strcmp(what, "wild")) wild<<<3, 4>>>(memory, 1ll << 40);
  if (!std::strcmp(what, "overflow")) overflow<<<1, 4>>>(memory, 1 << 20);
  if (!std::strcmp(what, "divide")) divide<<<1, 4>>>(memory, 2);
  if (!std::strcmp(what, "spin")) {
    cudaMemset(memory, 0, 4);
    wait_in_vain<<<1, 2>>>(reinterpret_cast<unsigned*>(memory));
  }
  std::printf("then: %s\n", cudaGetErrorName(cudaDeviceSynchronize()));
  return 0;
}
