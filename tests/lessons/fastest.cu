// Of kernels that take different times the fastest is found (common/choose/fastest.h), wherever it
// stands among them, with a cold cache and with a warm one. Exits with 1 if another one is.

#include <cstdio>

#include "common/check.h"
#include "common/choose/fastest.h"

using namespace common;

// One thread, `steps` additions that wait for each other.
__global__ void wait(float* out, int steps) {
  float sum = 0;
  for (int i = 0; i < steps; ++i) sum = sum * 0.5f + 1;
  *out = sum;
}

int main() {
  float* out = nullptr;
  CUDA_CHECK(cudaMalloc(&out, sizeof(float)));
  bool ok = true;
  constexpr int kCount = 3, kFew = 500'000, kMany = 50'000'000;
  for (const bool cold : {true, false}) {
    for (size_t fastest = 0; fastest < kCount; ++fastest) {
      std::vector<std::function<void()>> calls;
      int called[kCount] = {};
      for (size_t i = 0; i < kCount; ++i) {
        const int steps = i == fastest ? kFew : kMany;
        calls.push_back([=, &called] {
          ++called[i];
          wait<<<1, 1>>>(out, steps);
        });
      }
      const size_t found = try_all(calls, cold, 20).fastest;
      // Those that take a hundred times as long are not called again. (Number 0 is called before
      // all of them.)
      const bool right = found == fastest && called[fastest == 1 ? 2 : 1] == 2;
      std::printf("%s, number %zu: %s\n", cold ? "cold" : "warm", fastest, right ? "ok" : "FAILED");
      ok = ok && right;
    }
  }
  CUDA_CHECK(cudaDeviceSynchronize());
  CUDA_CHECK(cudaFree(out));
  return ok ? 0 : 1;
}
