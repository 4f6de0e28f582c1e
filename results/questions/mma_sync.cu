// How many multiply-adds a cycle `mma.sync` makes where nothing holds it up: the limit of lesson
// 3's kernels 1 to 6. mma_sync.py builds this program, runs it, and records what it prints.
//
// Each multiprocessor has one block of lesson 3's *double buffering*, with the same tile of 64 x 64
// for each warp and the same order of products. Two kernels leave out what that one does besides:
//
//     products     fragments are loaded once: mma.sync, and nothing else
//     fragments    ldmatrix loads the fragments of the next 16 of k meanwhile, as in the lesson
//
// Nothing is copied, there is no barrier in the loop, and the tile in shared memory stays.

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "primitives/mma.cuh"

using namespace primitives;

namespace {

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "error: %s\n", cudaGetErrorString(error));
  std::exit(3);
}

constexpr int kDepth = 64, kWarpsN = 2, kWarp = 64, kRounds = 1000;

__device__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// C = kRounds A B, for A of 64 kWarpsM x 64 and B of 64 x 128, both row by row in memory; with
// kFragments = false only the first 16 of k are multiplied, 4 kRounds times. A thread owns what it
// owns in lesson 3: of its warp's 64 x 64 sums those that mma.sync gives it. `took` is how many
// cycles and nanoseconds the loop of a block takes.
template <int kWarpsM, bool kFragments>
__global__ void __launch_bounds__(64 * kWarpsM, 1)
    multiply(const half* __restrict__ A, const half* __restrict__ B, float* __restrict__ C,
             uint64_t* __restrict__ took) {
  constexpr int kRows = kWarp * kWarpsM, kCols = kWarp * kWarpsN;
  __shared__ __align__(128) half tile_a[kRows * kDepth], tile_b[kDepth * kCols];
  for (int at = threadIdx.x; at < kRows * kDepth; at += blockDim.x) {
    tile_a[swizzle<kDepth>(at / kDepth, at % kDepth)] = A[at];
  }
  for (int at = threadIdx.x; at < kDepth * kCols; at += blockDim.x) {
    tile_b[swizzle<kCols>(at / kCols, at % kCols)] = B[at];
  }
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row0 = warp / kWarpsN * kWarp, col0 = warp % kWarpsN * kWarp;
  const int a_lane = swizzle<kDepth>(row0 + lane % 16, lane / 16 * 8);
  const int b_lane = swizzle<kCols>(lane % 16, col0 + lane / 16 * 8);
  unsigned a[2][4][4], b[2][4][4];
  const auto load = [&](int k) {
    const int buffer = k / 16 % 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ldmatrix_x4(a[buffer][i], tile_a + (a_lane ^ k) + i * 16 * kDepth);
      ldmatrix_x4_trans(b[buffer][i], tile_b + (b_lane ^ i * 16) + k * kCols);
    }
  };
  load(0);
  float sum[4][8][4] = {};
  __syncthreads();
  const uint64_t cycles = clock64(), time = nanoseconds();
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      if constexpr (kFragments) load((k + 16) % kDepth);
      const int buffer = kFragments ? k / 16 % 2 : 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int forth = 0; forth < 8; ++forth) {
          const int j = i % 2 == 0 ? forth : 7 - forth;
          mma_m16n8k16<half>(sum[i][j], a[buffer][i], b[buffer][j / 2][j % 2 * 2],
                             b[buffer][j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    took[2 * blockIdx.x] = clock64() - cycles;
    took[2 * blockIdx.x + 1] = nanoseconds() - time;
  }
  float* const tile = C + int64_t{blockIdx.x} * kRows * kCols;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = row0 + 16 * i + lane / 4 + e / 2 * 8;
        tile[row * kCols + col0 + 8 * j + lane % 4 * 2 + e % 2] = sum[i][j][e];
      }
    }
  }
}

struct Result {
  double error, per_cycle, tflops, mhz;
};

// The medians of 30 launches, after a fifth of a second of the same work, and the relative error of
// the last block's result.
template <int kWarpsM, bool kFragments>
Result measure(int blocks, const std::vector<half>& host_a, const std::vector<half>& host_b,
               const half* a, const half* b, float* c, uint64_t* took) {
  constexpr int kRows = kWarp * kWarpsM, kCols = kWarp * kWarpsN;
  constexpr int64_t kMultiplyAdds = int64_t{kRows} * kCols * kDepth * kRounds;  // of a block
  std::vector<uint64_t> of_block(2 * blocks);
  std::vector<double> rates, clocks, times;
  for (int launch = 0; launch < 630; ++launch) {
    cudaEvent_t start, stop;
    check(cudaEventCreate(&start));
    check(cudaEventCreate(&stop));
    check(cudaEventRecord(start));
    multiply<kWarpsM, kFragments><<<blocks, 64 * kWarpsM>>>(a, b, c, took);
    check(cudaGetLastError());
    check(cudaEventRecord(stop));
    if (launch < 600) {
      check(cudaEventDestroy(start));
      check(cudaEventDestroy(stop));
      continue;
    }
    check(cudaEventSynchronize(stop));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, start, stop));
    check(cudaEventDestroy(start));
    check(cudaEventDestroy(stop));
    check(cudaMemcpy(of_block.data(), took, 16 * blocks, cudaMemcpyDefault));
    times.push_back(ms);
    rates.push_back(double{kMultiplyAdds} / of_block[0]);
    clocks.push_back(1e3 * of_block[0] / of_block[1]);
  }
  std::vector<float> found(kRows * kCols);
  check(cudaMemcpy(found.data(), c + int64_t{blocks - 1} * kRows * kCols, 4 * found.size(),
                   cudaMemcpyDefault));
  double off = 0, all = 0;
  for (int row = 0; row < kRows; ++row) {
    for (int col = 0; col < kCols; ++col) {
      double sum = 0;
      for (int k = 0; k < (kFragments ? kDepth : 16); ++k) {
        sum += double{__half2float(host_a[row * kDepth + k])} *
               double{__half2float(host_b[k * kCols + col])};
      }
      const double expected = sum * kRounds * (kFragments ? 1 : 4);
      off += std::pow(found[row * kCols + col] - expected, 2);
      all += expected * expected;
    }
  }
  const auto median = [](std::vector<double>& of) {
    std::sort(of.begin(), of.end());
    return of[of.size() / 2];
  };
  return {std::sqrt(off / all), median(rates), 2e-9 * kMultiplyAdds * blocks / median(times),
          median(clocks)};
}

}  // namespace

int main() {
  int blocks = 0, device = 0;
  cudaDeviceProp properties;
  check(cudaGetDevice(&device));
  check(cudaGetDeviceProperties(&properties, device));
  blocks = properties.multiProcessorCount;
  std::vector<half> host_a(256 * kDepth), host_b(kDepth * 128);
  std::mt19937 random(1);
  std::uniform_real_distribution<float> number(-1, 1);
  for (std::vector<half>* each : {&host_a, &host_b}) {
    for (half& element : *each) element = __float2half(number(random));
  }
  half *a, *b;
  float* c;
  uint64_t* took;
  check(cudaMalloc(&a, 2 * host_a.size()));
  check(cudaMalloc(&b, 2 * host_b.size()));
  check(cudaMalloc(&c, int64_t{4} * 256 * 128 * blocks));
  check(cudaMalloc(&took, 16 * blocks));
  check(cudaMemcpy(a, host_a.data(), 2 * host_a.size(), cudaMemcpyDefault));
  check(cudaMemcpy(b, host_b.data(), 2 * host_b.size(), cudaMemcpyDefault));
  const auto line = [&](const char* name, int warps, const Result& of) {
    std::printf("%s, %d warps; %.9g; %.9g; %.9g; %.9g\n", name, warps, of.error, of.per_cycle,
                of.tflops, of.mhz);
  };
  std::printf("%s; %d\n", properties.name, blocks);
  line("products", 4, measure<2, false>(blocks, host_a, host_b, a, b, c, took));
  line("products", 8, measure<4, false>(blocks, host_a, host_b, a, b, c, took));
  line("products and fragments", 8, measure<4, true>(blocks, host_a, host_b, a, b, c, took));
  for (void* each : {static_cast<void*>(a), static_cast<void*>(b), static_cast<void*>(c),
                     static_cast<void*>(took)}) {
    check(cudaFree(each));
  }
}
