// Bonus. How long a load takes, and how many bytes a second come
//
// The other lessons move numbers to nearer places: from memory to the L2 cache, to shared memory,
// to registers. This one measures what each of these places gives, by two questions that have
// little to do with each other:
//
//   latency  How long does one load take, if nothing else happens? One thread walks along a chain:
//            what a load brings is the address of the next load, so no load can start before the
//            one before it has ended. The time of many steps, divided by their number, is that of
//            one. The same for a multiply-add whose factors are the result of the one before.
//   rate     How many bytes a second come, if as many threads as the GPU holds have loads under
//            way? Each thread sums up what it reads, so that every load is needed.
//
// A chain visits its lines of 128 bytes in a random order, and each of them once before it comes
// back to the first. No load finds a line that its neighbour has brought, and nothing can guess
// which line is next.
//
// The kernels of the first table read the multiprocessor's clock themselves, before the walk and
// behind it: their ms are those of the walk alone, without the launch and without the lap that
// brings the lines to where they shall be found. Its results are exact: the line where a walk ends
// is the one where the host's walk ends.

#include <algorithm>
#include <functional>

#include "common/numerics.h"
#include "problems/memory.cuh"

using namespace problems;

// ---- Latency: one thread ------------------------------------------------------------------------

constexpr int kSteps = 32749;    // of each walk that is timed; a prime: no walk ends where it began
constexpr int kNearLines = 256;  // 32 KB: fits in the shared memory and in the L1 cache of any GPU

// The base of the comparison: x <- x x + c, one multiply-add in registers, which waits for nothing
// but the one before. With c = -1.9 x stays between -2 and 2, and never comes to rest: a kernel
// that left out a step would end elsewhere.
constexpr float kC = -1.9F;
__global__ void chain_registers(const float* first, double* end, double* cycles) {
  float x = *first;
  const long long start = clock64();
#pragma unroll 256
  for (int i = 0; i < kSteps; ++i) x = fmaf(x, x, kC);
  *cycles = static_cast<double>(clock64() - start);
  *end = x;
}

// Shared memory. The block's threads copy the chain, a line each, with offsets in the place of
// addresses; then the first thread walks alone.
__global__ void chase_shared(const Line* lines, double* end, double* cycles) {
  __shared__ __align__(128) char copy[kNearLines * sizeof(Line)];
  const auto next_of = [&](unsigned line) { return reinterpret_cast<unsigned*>(copy + line); };
  const Line* next = reinterpret_cast<const Line*>(lines[threadIdx.x].next);
  *next_of(threadIdx.x * sizeof(Line)) = static_cast<unsigned>((next - lines) * sizeof(Line));
  __syncthreads();
  if (threadIdx.x > 0) return;
  unsigned at = 0;
  const long long start = clock64();
#pragma unroll 32
  for (int i = 0; i < kSteps; ++i) at = *next_of(at);
  *cycles = static_cast<double>(clock64() - start);
  *end = at / sizeof(Line);
}

// The L1 cache, which is the same memory as shared memory, and has to look up which lines it holds.
// The first lap, which is not timed, brings all of them: at the start of a kernel the cache is
// empty. __ldca is a load that looks into all caches, as a plain one does.
__global__ void chase_l1(const Line* lines, double* end, double* cycles) {
  const Line* at = lines;
  for (int i = 0; i < kNearLines; ++i) at = reinterpret_cast<const Line*>(__ldca(&at->next));
  const long long start = clock64();
#pragma unroll 32
  for (int i = 0; i < kSteps; ++i) at = reinterpret_cast<const Line*>(__ldca(&at->next));
  *cycles = static_cast<double>(clock64() - start);
  *end = static_cast<double>(at - lines);
}

// The L2 cache: __ldcg goes past the L1 cache. The same kernel walks through memory: it does not
// say where its lines are found, their number does. A chain of an eighth of the L2 cache stays
// there after `warm` steps, a lap. One of four times the L2 cache, which is flushed before each
// launch that is timed, is in memory, and of that no step is taken in advance.
__global__ void chase_l2(const Line* lines, int warm, double* end, double* cycles) {
  const Line* at = lines;
  for (int i = 0; i < warm; ++i) at = reinterpret_cast<const Line*>(__ldcg(&at->next));
  const long long start = clock64();
#pragma unroll 32
  for (int i = 0; i < kSteps; ++i) at = reinterpret_cast<const Line*>(__ldcg(&at->next));
  *cycles = static_cast<double>(clock64() - start);
  *end = static_cast<double>(at - lines);
}

// ---- Rate: all threads --------------------------------------------------------------------------

constexpr int kThreads = 512;  // of a block
constexpr int kTile = 1024;    // float4 in a block's shared memory: 16 KB

__device__ void add(float4& sum, float4 four) {
  sum.x += four.x, sum.y += four.y, sum.z += four.z, sum.w += four.w;
}
__device__ float total(const float4& sum) { return (sum.x + sum.y) + (sum.z + sum.w); }

// Every thread reads `steps` times 16 bytes of its set, which is `count` float4, all threads side
// by side, and begins anew where the set ends. Several loads of a thread are under way at a time.
// The set is what decides: one that is read once comes from memory; one of up to a third of the L2
// cache comes from there, past the L1 cache, but for its first lap.
__global__ void read_global(const float4* set, int64_t count, int64_t steps, float* sums) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t all = static_cast<int64_t>(gridDim.x) * kThreads;
  float4 sum = {};
  int64_t at = thread;
#pragma unroll 4
  for (int64_t i = 0; i < steps; ++i) {
    add(sum, __ldcg(set + at));
    at += all;
    if (at >= count) at -= count;
  }
  sums[thread] = total(sum);
}

// A copy reads half of the bytes, and writes as many.
__global__ void copy_memory(const float4* from, int64_t steps, float4* to) {
  int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
#pragma unroll 4
  for (int64_t i = 0; i < steps; ++i) {
    to[at] = from[at];
    at += static_cast<int64_t>(gridDim.x) * kThreads;
  }
}

// Shared memory. A warp reads 32 float4 that lie side by side, 512 bytes, and then the 32 behind
// them. Eight threads at a time read 128 bytes, one word from each of the 32 banks, so no two of
// them wait for each other.
__global__ void read_shared(const float4* set, int64_t steps, float* sums) {
  __shared__ float4 tile[kTile];
  for (int i = threadIdx.x; i < kTile; i += kThreads) tile[i] = set[i];
  __syncthreads();
  float4 sum = {};
  int at = threadIdx.x;
#pragma unroll 8
  for (int64_t i = 0; i < steps; ++i) {
    const float4 four = tile[at];
    add(sum, four);
    at = (at + 32) % kTile;
  }
  sums[static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x] = total(sum);
}

// ---- The tables ---------------------------------------------------------------------------------

// The first table. Each row ends at a place of its own, where the host ends exactly, too.
struct Latency {
  Latency(Lesson& lesson, int64_t l2_bytes)
      : table(lesson.problem("latency", {{"steps", kSteps}}, "addresses",
                             {.flops = 0, .bytes = 32.0 * kSteps}, Rate::fp32)),
        near(table, kNearLines),
        middle(table, l2_bytes / 8 / sizeof(Line)),
        far(table, 4 * l2_bytes / sizeof(Line)) {
    table.reference_from(0, [] {});  // each row has its own
    row(
        "registers", [this] { chain_registers<<<1, 1>>>(first, end, cycles); },
        [this] { return end_of_squares(first, kC, kSteps); });
    row(
        "shared memory", [this] { chase_shared<<<1, kNearLines>>>(near.get(), end, cycles); },
        [this] { return near.end(kSteps); });
    row(
        "L1 cache", [this] { chase_l1<<<1, 1>>>(near.get(), end, cycles); },
        [this] { return near.end(near.lap() + kSteps); });
    row(
        "L2 cache", [this] { chase_l2<<<1, 1>>>(middle.get(), middle.lap(), end, cycles); },
        [this] { return middle.end(middle.lap() + kSteps); });
    row(
        "memory", [this] { chase_l2<<<1, 1>>>(far.get(), 0, end, cycles); },
        [this] { return far.end(kSteps); });
    table.compare("L2 cache", "memory", "A load that the L2 cache answers: % times as fast.");
  }

  void row(const char* name, std::function<void()> launch, std::function<double()> host) {
    const Buffer<double> expected = table.reference(1);
    Kernel& kernel = table.kernel(name, Role::ours, std::move(launch));
    kernel.counts_cycles(cycles, kSteps);
    kernel.checks = {{end.storage(), expected.storage(), 0, [=] {
                        const double value = host();
                        CUDA_CHECK(cudaMemcpy(expected, &value, sizeof value, cudaMemcpyDefault));
                      }}};
  }

  Problem& table;
  Chain near, middle, far;
  Buffer<float> first = table.input<float>(1);
  Buffer<double> end = table.output<double>(1), cycles = table.output<double>(1);
};

// The second table. All rows move the same number of bytes, from another place each.
void add_rate(Lesson& lesson, int64_t l2_bytes) {
  int device = 0, resident = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaDeviceGetAttribute(&resident, cudaDevAttrMaxThreadsPerMultiProcessor, device));
  const unsigned blocks = static_cast<unsigned>(lesson.device().sms * (resident / kThreads));
  const int64_t all = static_cast<int64_t>(blocks) * kThreads, once = 16 * all;
  // What a thread does, an even number of times, since a copy reads half and writes half.
  const int64_t steps = 2 * std::max<int64_t>(1, (lesson.n() << 20) / (2 * once));
  const int64_t count = all * steps, in_l2 = all * std::max<int64_t>(1, l2_bytes / 3 / once);
  const double bytes = 16.0 * static_cast<double>(count);

  Problem& table = lesson.problem("rate", {{"MB", lesson.n()}, {"threads", all}}, "fp32",
                                  {.flops = 0, .bytes = bytes}, Rate::fp32);
  const auto floats = table.input<float>(4 * std::max(count, in_l2));
  const auto copy = table.output<float>(2 * count), sums = table.output<float>(all);
  const auto copied = table.reference(2 * count);
  table.reference_from(0, [=] { to_fp64(floats, Type::fp32, 2 * count, copied); });
  const auto set = [=] { return reinterpret_cast<const float4*>(floats.data()); };
  // In such a row thread i reads one float4 in each step, that with the number
  // (i % starts + stride * step) % size. It adds up all that it reads, 4 * steps numbers. The bound
  // is that of such a sum.
  const auto row = [&](const char* name, int64_t starts, int64_t stride, int64_t size,
                       std::function<void()> launch) {
    const auto expected = table.reference(all);
    const double bound = dot_tolerance(4 * steps, kRoundoffFp32, kRoundoffFp32);
    table.kernel(name, Role::ours, std::move(launch)).checks = {
        {sums.storage(), expected.storage(), bound,
         [=] { sums_fp64<<<blocks, kThreads>>>(floats, starts, stride, size, steps, expected); }}};
  };

  row("memory", all, all, count,
      [=] { read_global<<<blocks, kThreads>>>(set(), count, steps, sums); });
  const auto to = [=] { return reinterpret_cast<float4*>(copy.data()); };
  table
      .kernel("memory, copied", Role::ours,
              [=] { copy_memory<<<blocks, kThreads>>>(set(), steps / 2, to()); })
      .checks = {{copy.storage(), copied.storage(), 0}};
  row("L2 cache", all, all, in_l2,
      [=] { read_global<<<blocks, kThreads>>>(set(), in_l2, steps, sums); });
  row("shared memory", kThreads, 32, kTile,
      [=] { read_shared<<<blocks, kThreads>>>(set(), steps, sums); });
  table.compare("shared memory", "memory", "The same bytes from shared memory: % times as fast.");
}

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "bonus_memory",
                 .title = "how long a load takes, and how many bytes a second come",
                 .n_meaning = "MB that each kernel of the second table moves",
                 .n_gpu = 2048,
                 .n_cpu = 4});
  Latency latency(lesson, lesson.device().l2_bytes);
  add_rate(lesson, lesson.device().l2_bytes);
  return lesson.run();
}
