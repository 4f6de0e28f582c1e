#include "common/check.h"
#include "common/measure/sm_clock.h"

namespace common {

/// For each of two moments and each multiprocessor: its cycles, and the time in ns.
struct SmClock::Reading {
  static constexpr int kMultiprocessors = 1024;
  unsigned long long cycles[2][kMultiprocessors], ns[2][kMultiprocessors];
};

#ifdef CUDA_CPU

SmClock::SmClock() = default;
void SmClock::read(int) {}
double SmClock::hz() const { return 0; }

#else

namespace {

__global__ void read_counters(unsigned long long* cycles, unsigned long long* ns) {
  unsigned multiprocessor;
  unsigned long long now;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  cycles[multiprocessor % 1024] = clock64();
  ns[multiprocessor % 1024] = now;
}

}  // namespace

SmClock::SmClock()
    : readings_(
          [] {
            Reading* readings = nullptr;
            CUDA_CHECK(cudaMalloc(&readings, sizeof(Reading)));
            return readings;
          }(),
          [](Reading* readings) { cudaFree(readings); }) {}

void SmClock::read(int which) {
  const unsigned blocks = 64;  // so that some multiprocessor is read both times
  Reading* const readings = readings_.get();
  if (which == 0) CUDA_CHECK(cudaMemsetAsync(readings, 0, sizeof(Reading)));
  unsigned long long *cycles = readings->cycles[which], *ns = readings->ns[which];
  read_counters<<<blocks, 1>>>(cycles, ns);
}

double SmClock::hz() const {
  auto readings = std::make_unique<Reading>();
  CUDA_CHECK(cudaMemcpy(readings.get(), readings_.get(), sizeof(Reading), cudaMemcpyDeviceToHost));
  double cycles = 0, ns = 0;
  for (int i = 0; i < Reading::kMultiprocessors; ++i) {
    if (readings->ns[0][i] == 0 || readings->ns[1][i] <= readings->ns[0][i]) continue;
    cycles += static_cast<double>(readings->cycles[1][i] - readings->cycles[0][i]);
    ns += static_cast<double>(readings->ns[1][i] - readings->ns[0][i]);
  }
  return ns > 0 ? 1e9 * cycles / ns : 0;
}

#endif

}  // namespace common
