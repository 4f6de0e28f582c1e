// What the words of primitives/hopper/ mean, case by case, each with the section of the
// PTX ISA that says so. Built for the CPU backend and with nvcc: both are held to the same
// expectations.
//
//     hopper_semantics --list     prints the names of the cases
//     hopper_semantics CASE...    runs them (all without arguments); exits with 1 if one fails
//
// Cases of the last part are the CPU backend's alone: what it makes of mistakes, and how late it
// does things.

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <cuda/atomic>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "common/check.h"
#include "primitives/early_launch.cuh"
#include "primitives/hopper/hopper.cuh"
#include "primitives/hopper/tiles.cuh"
#include "primitives/mma.cuh"
#include "primitives/spin.cuh"

using namespace common;
using namespace primitives;

namespace {

using bf16 = __nv_bfloat16;
using e4m3 = __nv_fp8_e4m3;

int failures = 0;

std::map<std::string, void (*)()>& cases() {
  static std::map<std::string, void (*)()> all;
  return all;
}

struct Registration {
  Registration(const char* name, void (*run)()) { cases()[name] = run; }
};

#define CASE(name)                                        \
  void case_##name();                                     \
  const Registration register_##name(#name, case_##name); \
  void case_##name()

#define EXPECT(condition)                                                                        \
  do {                                                                                           \
    if (!(condition)) {                                                                          \
      if (++failures <= 10) std::printf("%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
    }                                                                                            \
  } while (false)

/// Device memory, and a copy of it on the host.
template <class T>
struct Array {
  std::vector<T> host;
  T* device = nullptr;

  explicit Array(size_t size, T value = {}) : host(size, value) {
    CUDA_CHECK(cudaMalloc(&device, size * sizeof(T)));
    put();
  }
  ~Array() { cudaFree(device); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  void put() {
    CUDA_CHECK(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  void get() {
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
  }
  T& operator[](size_t i) { return host[i]; }
};

// Small numbers that fp16, bf16, TF32 and FP8 hold, and whose sums of products are exact.
float number(int row, int col) { return static_cast<float>((7 * row + 3 * col) % 11 - 5); }

template <class T>
void fill(Array<T>& matrix, int cols) {
  for (size_t i = 0; i < matrix.host.size(); ++i) {
    const int at = static_cast<int>(i);
    matrix[i] = static_cast<T>(number(at / cols, at % cols));
  }
  matrix.put();
}

// ---- Barriers -----------------------------------------------------------------------------------

__global__ void phases(int* seen) {
#if HOPPER_CODE
  __shared__ Barrier barrier;
  if (threadIdx.x == 0) {
    barrier_init(&barrier, 32);
    barrier_wait(&barrier, 1);  // the phase before the first one is over
  }
  __syncthreads();
  if (threadIdx.x >= 32) {
    for (int phase = 0; phase < 5; ++phase) {
      seen[phase] = 10 * phase;
      __syncwarp();
      barrier_arrive(&barrier);
      named_barrier(1, 64);
    }
  } else {
    for (int phase = 0; phase < 5; ++phase) {
      barrier_wait(&barrier, phase % 2);
      if (seen[phase] == 10 * phase) seen[phase + 5] = 1;
      named_barrier(1, 64);
    }
  }
#endif
}

// "mbarrier", "Phase of the mbarrier object"; "mbarrier.test_wait / mbarrier.try_wait":
// phaseParity.
CASE(barrier_phases) {
  Array<int> seen(10);
  phases<<<1, 64>>>(seen.device);
  seen.get();
  for (int phase = 0; phase < 5; ++phase) EXPECT(seen[5 + phase] == 1);
}

__global__ void HOPPER_CLUSTER(2) remote_arrivals(int* order) {
#if HOPPER_CODE
  __shared__ Barrier barrier;
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    barrier_init(&barrier, 3);  // one of this block, two of the other
    barrier_init_fence();
  }
  cluster_meet();
  if (threadIdx.x < 2) barrier_arrive(&barrier, rank ^ 1);
  if (threadIdx.x == 2) barrier_arrive(&barrier, rank);
  barrier_wait(&barrier, 0);
  if (threadIdx.x == 0) order[blockIdx.x] = 1 + rank;
  cluster_sync();
#endif
}

// "mbarrier.arrive" on .shared::cluster; "mapa"; "barrier.cluster"; "%cluster_ctarank".
CASE(arrivals_at_other_blocks) {
  Array<int> order(4);
  remote_arrivals<<<4, 32>>>(order.device);
  order.get();
  for (int block = 0; block < 4; ++block) EXPECT(order[block] == 1 + block % 2);
}

// ---- Copies -------------------------------------------------------------------------------------

template <typename T>
__global__ void load_box(const __grid_constant__ CUtensorMap map, int row, int col, int rows,
                         T* raw, int before) {
#if HOPPER_CODE
  extern __shared__ __align__(1024) char bytes[];
  T* box = reinterpret_cast<T*>(bytes + 128 * before);
  __shared__ Barrier barrier;
  const int count = rows * static_cast<int>(128 / sizeof(T));
  if (threadIdx.x == 0) {
    barrier_init(&barrier, 1);
    barrier_init_fence();
    barrier_arrive_expect(&barrier, rows * 128);
    tensor_load(box, &map, row, col, &barrier);
  }
  __syncthreads();
  barrier_wait(&barrier, 0);
  for (int i = threadIdx.x; i < count; i += blockDim.x) raw[i] = box[i];
#endif
}

template <typename T>
void expect_box(int rows, int cols, int row, int col, int box_rows, bool to_tf32 = false,
                int before = 0) {
  constexpr int kCols = 128 / sizeof(T), kPiece = 16 / sizeof(T);
  Array<T> matrix(static_cast<size_t>(rows) * cols), raw(static_cast<size_t>(box_rows) * kCols);
  fill(matrix, cols);
  const CUtensorMap map = tensor_map<T>(matrix.device, rows, cols, box_rows, to_tf32);
  load_box<T><<<1, 64, (before + box_rows) * 128>>>(map, row, col, box_rows, raw.device, before);
  raw.get();
  for (int r = 0; r < box_rows; ++r) {
    for (int c = 0; c < kCols; ++c) {
      const int y = row + r, x = col + c;
      const bool inside = y >= 0 && y < rows && x >= 0 && x < cols;
      const float expected = inside ? number(y, x) : 0;
      const int at = r * kCols + (c / kPiece ^ (before + r) % 8) * kPiece + c % kPiece;
      EXPECT(static_cast<float>(raw[at]) == expected);
    }
  }
}

// "cp.async.bulk.tensor"; "Tensors": "Swizzling modes" (128B), "Bounding Box", out-of-bounds:
// zeros.
CASE(loads_swizzled_and_padded) {
  expect_box<half>(40, 80, 0, 0, 32);
  expect_box<half>(40, 80, 24, 64, 32);   // beyond both ends
  expect_box<half>(40, 72, -8, -16, 64);  // before both
  expect_box<bf16>(8, 8, 100, 0, 8);      // nothing of it
  expect_box<float>(30, 36, 8, 32, 64);
  expect_box<e4m3>(40, 144, 24, 128, 32);
  expect_box<e4m3>(40, 144, -8, -16, 64);
  expect_box<half>(40, 80, 3, 64, 18, false, 18);  // swizzled by address: a part of a larger box
}

__global__ void copy_box(const __grid_constant__ CUtensorMap from,
                         const __grid_constant__ CUtensorMap to, int matrix, int row, int col) {
#if HOPPER_CODE
  __shared__ __align__(1024) half box[2][16 * 64];
  __shared__ Barrier barrier;
  if (threadIdx.x == 0) {
    barrier_init(&barrier, 1);
    barrier_init_fence();
    barrier_arrive_expect(&barrier, sizeof box);
    tensor_load(box[0], &from, matrix, row, col, &barrier, evict_first());
    tensor_load_multicast(box[1], &from, matrix, row + 16, col, &barrier, 1, evict_last());
    barrier_wait(&barrier, 0);
    shared_fence();
    for (int i = 0; i < 2; ++i) {
      tensor_store(&to, matrix, row + 16 * i, col, box[i], evict_normal());
    }
    tensor_store_commit();
    tensor_store_wait_read<0>();
  }
#endif
}

// "cp.async.bulk.tensor", .3d: a box ends where its matrix does.
CASE(copies_of_a_matrix_of_a_batch) {
  constexpr int kRows = 36, kCols = 72, kMatrix = kRows * kCols;
  Array<half> from(3 * kMatrix), to(3 * kMatrix, __float2half_rn(-1));
  fill(from, kCols);
  copy_box<<<1, 1>>>(batch_map<half>(from.device, 3, kRows, kCols, 16),
                     batch_map<half>(to.device, 3, kRows, kCols, 16), 1, 8, 16);
  to.get();
  for (int i = 0; i < 3 * kMatrix; ++i) {
    const bool copied = i / kMatrix == 1 && i % kMatrix / kCols >= 8 && i % kCols >= 16;
    EXPECT(static_cast<float>(to[i]) == (copied ? number(i / kCols, i % kCols) : -1));
  }
}

__global__ void load_vector(const __grid_constant__ CUtensorMap map, int first, half* out) {
#if HOPPER_CODE
  __shared__ __align__(128) half box[64];
  __shared__ Barrier barrier;
  if (threadIdx.x == 0) {
    barrier_init(&barrier, 1);
    barrier_init_fence();
    barrier_arrive_expect(&barrier, sizeof box);
    tensor_load(box, &map, first, &barrier);
  }
  __syncthreads();
  barrier_wait(&barrier, 0);
  out[threadIdx.x] = box[threadIdx.x];
#endif
}

// "cp.async.bulk.tensor", .1d.
CASE(loads_of_vectors) {
  Array<half> vector(90), out(64);
  fill(vector, 90);
  load_vector<<<1, 64>>>(tensor_map<half>(vector.device, 90), 64, out.device);
  out.get();
  for (int i = 0; i < 64; ++i)
    EXPECT(static_cast<float>(out[i]) == (i < 26 ? number(0, 64 + i) : 0));
}

// CUDA Driver API, CU_TENSOR_MAP_DATA_TYPE_TFLOAT32: 10 bits of mantissa, rounded to nearest.
CASE(loads_rounded_to_tf32) {
  Array<float> matrix(32), raw(32);
  for (int i = 0; i < 32; ++i) matrix[i] = (1 + static_cast<float>(i) / 0x1p13f) * (i % 2 ? -1 : 1);
  matrix.put();
  load_box<float>
      <<<1, 64, 128>>>(tensor_map<float>(matrix.device, 1, 32, 1, true), 0, 0, 1, raw.device, 0);
  raw.get();
  for (int i = 0; i < 32; ++i) {
    if (i % 8 == 4) continue;  // a tie
    const float expected =
        (1 + std::nearbyint(static_cast<float>(i) / 8) / 0x1p10f) * (i % 2 ? -1 : 1);
    EXPECT(raw[i] == expected);
  }
}

__global__ void HOPPER_CLUSTER(2)
    multicast(const __grid_constant__ CUtensorMap map, half* out) {  // (4, 2, 512)
#if HOPPER_CODE
  __shared__ __align__(1024) half boxes[2][8 * 64];
  __shared__ Barrier barrier;
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    barrier_init(&barrier, 1);
    barrier_init_fence();
  }
  cluster_meet();
  if (threadIdx.x == 0) {
    barrier_arrive_expect(&barrier, sizeof boxes);
    tensor_load_multicast(boxes[rank], &map, 8 * static_cast<int>(blockIdx.x), 0, &barrier, 3);
  }
  barrier_wait(&barrier, 0);
  for (int i = threadIdx.x; i < 2 * 8 * 64; i += blockDim.x) {
    out[blockIdx.x * 2 * 8 * 64 + i] = boxes[0][i];
  }
  cluster_sync();
#endif
}

// "cp.async.bulk.tensor", .multicast::cluster: same offsets, each block's own mbarrier.
CASE(multicast_to_both) {
  Array<half> matrix(32 * 64), out(4 * 2 * 512);
  fill(matrix, 64);
  multicast<<<4, 64>>>(tensor_map<half>(matrix.device, 32, 64, 8), out.device);
  out.get();
  for (int block = 0; block < 4; ++block) {
    for (int from = 0; from < 2; ++from) {
      for (int r = 0; r < 8; ++r) {
        for (int c = 0; c < 64; ++c) {
          const int at = (2 * block + from) * 512 + r * 64 + (c / 8 ^ r) * 8 + c % 8;
          EXPECT(static_cast<float>(out[at]) == number(8 * (block / 2 * 2 + from) + r, c));
        }
      }
    }
  }
}

__global__ void HOPPER_CLUSTER(2) bulk_copies(const float* from, float* out) {
#if HOPPER_CODE
  __shared__ alignas(16) float mine[64];
  __shared__ alignas(16) float theirs[64];
  __shared__ Barrier loaded;
  __shared__ Barrier come;
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    barrier_init(&loaded, 1);
    barrier_init(&come, 1);
    barrier_init_fence();
    barrier_arrive_expect(&loaded, sizeof mine);
    barrier_arrive_expect(&come, sizeof theirs);
    bulk_load(mine, from + 64 * blockIdx.x, sizeof mine, &loaded);
  }
  cluster_sync();
  barrier_wait(&loaded, 0);
  mine[threadIdx.x] += 100;
  shared_fence();
  __syncthreads();
  if (threadIdx.x == 0) bulk_push(theirs, mine, sizeof mine, &come, rank ^ 1);
  barrier_wait(&come, 0);
  out[64 * blockIdx.x + threadIdx.x] = theirs[threadIdx.x];
  cluster_sync();
#endif
}

// "cp.async.bulk", from global memory and to .shared::cluster; "fence.proxy.async".
CASE(bulk_loads_and_pushes) {
  Array<float> from(256), out(256);
  fill(from, 256);
  bulk_copies<<<4, 64>>>(from.device, out.device);
  out.get();
  for (int i = 0; i < 256; ++i) EXPECT(out[i] == number(0, i ^ 64) + 100);
}

__global__ void store_rows(float* out) {
#if HOPPER_CODE
  __shared__ alignas(16) float mine[64];
  for (int turn = 0; turn < 3; ++turn) {
    if (threadIdx.x == 0) tensor_store_wait_read<0>();
    __syncthreads();
    mine[threadIdx.x] = static_cast<float>(100 * turn + threadIdx.x);
    shared_fence();
    __syncthreads();
    if (threadIdx.x == 0) {
      bulk_store(out + 68 * turn, mine + 4, (64 - 4) * sizeof(float));
      tensor_store_commit();
    }
  }
  if (threadIdx.x == 0) tensor_store_wait_read<0>();
#endif
}

// "cp.async.bulk", from .shared::cta to .global, in groups; what is around the bytes stays.
CASE(bulk_stores) {
  Array<float> out(3 * 68, -1);
  store_rows<<<1, 64>>>(out.device);
  out.get();
  for (int i = 0; i < 3 * 68; ++i) {
    const bool written = i % 68 < 60;
    EXPECT(out[i] == (written ? static_cast<float>(100 * (i / 68) + i % 68 + 4) : -1));
  }
}

// Each block adds to the same numbers, after the block before it. The first one stores.
__global__ void add_in_turn(float* sums, unsigned* added) {
#if HOPPER_CODE
  __shared__ alignas(16) float mine[64];
  mine[threadIdx.x] = static_cast<float>(blockIdx.x + threadIdx.x);
  shared_fence();
  __syncthreads();
  if (threadIdx.x > 0) return;
  const GridCount count(*added);
  wait_for_count(count, blockIdx.x, "the block before");
  global_fence();
  blockIdx.x == 0 ? bulk_store(sums, mine, sizeof mine) : bulk_add(sums, mine, sizeof mine);
  tensor_store_commit();
  tensor_store_wait<0>();
  count.fetch_add(1, cuda::memory_order_release);
#endif
}

// "cp.reduce.async.bulk"; "cp.async.bulk.wait_group" without .read: the writes are visible to the
// thread that has waited, and after its release to others.
CASE(bulk_adds_in_turn) {
  Array<float> sums(64, -1);
  Array<unsigned> added(1);
  add_in_turn<<<4, 64>>>(sums.device, added.device);
  sums.get();
  for (int i = 0; i < 64; ++i) EXPECT(sums[i] == static_cast<float>(6 + 4 * i));
}

__global__ void HOPPER_CLUSTER(2) pushed_values(float* out) {
#if HOPPER_CODE
  __shared__ float theirs[64];
  __shared__ Barrier come;
  if (threadIdx.x == 0) {
    barrier_init(&come, 1);
    barrier_init_fence();
    barrier_arrive_expect(&come, sizeof theirs);
  }
  cluster_sync();
  const int at = static_cast<int>(threadIdx.x);
  store_push(&theirs[at], static_cast<float>(64 * blockIdx.x + at), &come, cluster_rank() ^ 1);
  barrier_wait(&come, 0);
  out[64 * blockIdx.x + threadIdx.x] = theirs[threadIdx.x];
  cluster_sync();
#endif
}

// "st.async".
CASE(values_are_pushed) {
  Array<float> out(256);
  pushed_values<<<4, 64>>>(out.device);
  out.get();
  for (int i = 0; i < 256; ++i) EXPECT(out[i] == static_cast<float>(i ^ 64));
}

__global__ void store_box(const __grid_constant__ CUtensorMap map, int row, int col) {
#if HOPPER_CODE
  __shared__ __align__(1024) half box[2][8 * 64];
  for (int turn = 0; turn < 4; ++turn) {
    if (threadIdx.x == 0) tensor_store_wait_read<1>();
    __syncthreads();
    half* to = box[turn % 2];
    const int r = threadIdx.x / 8, piece = threadIdx.x % 8;
    for (int i = 0; i < 8; ++i) {
      to[swizzled(r, piece) + i] = __float2half_rn(static_cast<float>(100 * turn + 8 * piece + i));
    }
    shared_fence();
    __syncthreads();
    if (threadIdx.x == 0) {
      tensor_store(&map, row + 8 * turn, col, to);
      tensor_store_commit();
    }
  }
  if (threadIdx.x == 0) tensor_store_wait_read<0>();
#endif
}

// "cp.async.bulk.tensor", .bulk_group; "cp.async.bulk.wait_group.read"; what is outside is dropped.
CASE(stores_in_groups) {
  Array<half> matrix(30 * 72, __float2half_rn(-1));
  store_box<<<1, 64>>>(tensor_map<half>(matrix.device, 30, 72, 8), 2, 40);
  matrix.get();
  for (int r = 0; r < 30; ++r) {
    for (int c = 0; c < 72; ++c) {
      const bool inside = r >= 2 && c >= 40;
      const float expected = inside ? static_cast<float>(100 * ((r - 2) / 8) + c - 40) : -1;
      EXPECT(static_cast<float>(matrix[r * 72 + c]) == expected);
    }
  }
}

// ---- Warps and warpgroups -----------------------------------------------------------------------

__global__ void __launch_bounds__(256, 2) warpgroups(int* out, half* matrices) {
#if HOPPER_CODE
  __shared__ int counts[2];
  __shared__ __align__(128) half box[4][8 * 8];
  if (threadIdx.x < 2) counts[threadIdx.x] = 0;
  __syncthreads();
  const int group = threadIdx.x / 128;
  if (group == 0) {
    registers_shrink_to<24>();
  } else {
    registers_grow_to<152>();
  }
  for (int i = 0; i < 3; ++i) {
    const bool first = elect_one();
    if (first) atomicAdd(&counts[group], 1);
    named_barrier(1 + group, 128);
  }
  if (threadIdx.x % 128 == 0) out[group] = counts[group];
  const int warp = warp_of_block();
  if (threadIdx.x % 32 == 0) out[2 + warp] = warp;
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    uint32_t registers[4];
    for (int m = 0; m < 4; ++m) {
      const float value = static_cast<float>(64 * m + 8 * (lane / 4) + 2 * (lane % 4));
      registers[m] = pack2<half>(value, value + 1);
    }
    store_matrices(&box[lane / 8][lane % 8 * 8], registers);
    __syncwarp();
    for (int i = lane; i < 256; i += 32) matrices[i] = box[0][i];
    __syncwarp();
    store_matrices<true>(&box[lane / 8][lane % 8 * 8], registers);
    __syncwarp();
    for (int i = lane; i < 256; i += 32) matrices[256 + i] = box[0][i];
    __syncwarp();
    const uint32_t two[2] = {registers[2], registers[3]};
    store_matrices<true>(&box[lane / 8 % 2][lane % 8 * 8], two);
    __syncwarp();
    for (int i = lane; i < 128; i += 32) matrices[512 + i] = box[0][i];
  }
#endif
}

// Warps 0 and 1 make numbers, two at a time, and warps 2 and 3 read them. Nobody waits where it
// only tells the others.
__global__ void made_and_read(int* seen) {
  __shared__ int numbers[2][64];
  const int thread = static_cast<int>(threadIdx.x) % 64;
  for (int step = 0; step < 5; ++step) {
    const int room = step % 2;
    if (threadIdx.x < 64) {
      if (step >= 2) named_barrier(3 + room, 128);
      numbers[room][thread] = 100 * step + thread;
      named_arrive(1 + room, 128);
    } else {
      named_barrier(1 + room, 128);
      seen[64 * step + thread] = numbers[room][63 - thread];
      if (step + 2 < 5) named_arrive(3 + room, 128);
    }
  }
}

// "bar.arrive": it "does not cause the executing thread to wait".
CASE(arrivals_by_name) {
  Array<int> seen(5 * 64);
  made_and_read<<<1, 128>>>(seen.device);
  seen.get();
  for (int i = 0; i < 5 * 64; ++i) EXPECT(seen[i] == 100 * (i / 64) + 63 - i % 64);
}

// "bar.sync" with a thread count; "elect.sync"; "setmaxnreg"; "stmatrix".
CASE(warps_and_warpgroups) {
  Array<int> out(10);
  Array<half> matrices(640);
  warpgroups<<<1, 256>>>(out.device, matrices.device);
  out.get();
  matrices.get();
  EXPECT(out[0] == 12 && out[1] == 12);
  for (int warp = 0; warp < 8; ++warp) EXPECT(out[2 + warp] == warp);
  for (int i = 0; i < 256; ++i) {
    const int turned = i / 64 * 64 + i % 8 * 8 + i % 64 / 8;
    EXPECT(static_cast<float>(matrices[i]) == i);
    EXPECT(static_cast<float>(matrices[256 + i]) == turned);
    if (i < 128) EXPECT(static_cast<float>(matrices[512 + i]) == 128 + turned);
  }
}

__global__ void powers(float* values) {
#if HOPPER_CODE
  values[threadIdx.x] = exp2_approximate(values[threadIdx.x]);
#endif
}
__global__ void reciprocals(float* values) {
#if HOPPER_CODE
  values[threadIdx.x] = reciprocal_approximate(values[threadIdx.x]);
#endif
}

// "ex2.approx.ftz".
CASE(powers_of_two) {
  Array<float> values(4);
  const float from[4] = {3, -130, 0.5f, -INFINITY}, to[4] = {8, 0, 1.41421356f, 0};
  std::copy(from, from + 4, values.host.begin());
  values.put();
  powers<<<1, 4>>>(values.device);
  values.get();
  for (int i = 0; i < 4; ++i) EXPECT(std::fabs(values[i] - to[i]) <= 1e-6f * to[i]);
}

// "rcp.approx.ftz".
CASE(reciprocals_of_few) {
  Array<float> values(4);
  const float from[4] = {3, 0x1p127f, -0.5f, INFINITY}, to[4] = {0.333333343f, 0, -2, 0};
  std::copy(from, from + 4, values.host.begin());
  values.put();
  reciprocals<<<1, 4>>>(values.device);
  values.get();
  for (int i = 0; i < 4; ++i) EXPECT(std::fabs(values[i] - to[i]) <= 2e-7f * std::fabs(to[i]));
}

// ---- wgmma --------------------------------------------------------------------------------------

enum class From { shared, transposed, registers, turned };

// sum (64, 2 kCount) = A (64, 64) B (64, 2 kCount), plus B's first row: two groups of two steps
// each.
template <typename T, From kFrom, int kCount>
__global__ void __launch_bounds__(128)
    multiply(const __grid_constant__ CUtensorMap A, const __grid_constant__ CUtensorMap B,
             const float* start, float* out) {
#if HOPPER_CODE
  constexpr int N = 2 * kCount, kBoxes = (N + 63) / 64;
  extern __shared__ __align__(1024) char bytes[];
  T* a = reinterpret_cast<T*>(bytes);
  T* b = a + 64 * 64;
  __shared__ Barrier barrier;
  if (threadIdx.x == 0) {
    barrier_init(&barrier, 1);
    barrier_init_fence();
    barrier_arrive_expect(&barrier, 2 * 64 * 64 * (1 + kBoxes));
    tensor_load(a, &A, 0, 0, &barrier);
    for (int box = 0; box < kBoxes; ++box)
      tensor_load(b + box * 64 * 64, &B, 0, 64 * box, &barrier);
  }
  __syncthreads();
  barrier_wait(&barrier, 0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = 16 * warp + lane / 4, col = 2 * (lane % 4);
  float sum[kCount];
  for (int i = 0; i < kCount; ++i) sum[i] = start[8 * (i / 4) + col + i % 2];
  uint32_t fragments[4][4];
  for (int k = 0; k < 4; ++k) {
    ldmatrix_x4(fragments[k], a + swizzled(16 * warp + lane % 16, 2 * k + lane / 16));
  }
  wgmma_fence();
  for (int k = 0; k < 4; ++k) {
    const uint64_t right = descriptor_b(b, 64) + 128 * k;
    if constexpr (kFrom == From::registers) {
      wgmma<T>(sum, fragments[k], right, true);
    } else if constexpr (kFrom == From::transposed) {
      wgmma<T, true>(sum, descriptor_b(a, 64) + 128 * k, right, true);
    } else if constexpr (kFrom == From::turned) {
      static_assert(N == 64, "B's rows are as many as A's");
      wgmma<T, true, true>(sum, descriptor_b(a, 64) + 128 * k, descriptor_a(b) + 2 * k, true);
    } else {
      wgmma<T>(sum, descriptor_a(a) + 2 * k, right, true);
    }
    if (k % 2 == 1) wgmma_commit();
  }
  wgmma_wait<1>();
  wgmma_wait<0>();
  for (int i = 0; i < kCount; ++i) {
    out[(row + 8 * (i / 2 % 2)) * N + 8 * (i / 4) + col + i % 2] = sum[i];
  }
#endif
}

template <typename T, From kFrom, int kCount>
void expect_product() {
  constexpr int N = 2 * kCount;
  Array<T> A(64 * 64), B(64 * N);
  Array<float> start(N), out(64 * N);
  fill(A, 64);
  fill(B, N);
  for (int i = 0; i < N; ++i) start[i] = static_cast<float>(i % 7);
  start.put();
  constexpr int kBytes = 2 * 64 * 64 * (1 + (N + 63) / 64);
  const auto kernel = multiply<T, kFrom, kCount>;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  multiply<T, kFrom, kCount><<<1, 128, kBytes>>>(tensor_map<T>(A.device, 64, 64, 64),
                                                 tensor_map<T>(B.device, 64, N, 64), start.device,
                                                 out.device);
  out.get();
  for (int row = 0; row < 64; ++row) {
    for (int col = 0; col < N; ++col) {
      float expected = start[col];
      for (int k = 0; k < 64; ++k) {
        const bool tall = kFrom == From::turned, turned = tall || kFrom == From::transposed;
        expected +=
            number(turned ? k : row, turned ? row : k) * number(tall ? col : k, tall ? k : col);
      }
      EXPECT(out[row * N + col] == expected);
    }
  }
}

// "wgmma.mma_async": "Register Fragments and Shared Memory Matrix Layouts", "Matrix Descriptor
// Format", "wgmma.commit_group", "wgmma.wait_group".
CASE(wgmma_fp16) {
  expect_product<half, From::shared, 16>();
  expect_product<half, From::shared, 32>();
  expect_product<half, From::shared, 64>();
  expect_product<half, From::shared, 128>();
  expect_product<half, From::registers, 16>();
  expect_product<half, From::registers, 24>();
  expect_product<half, From::registers, 32>();
  expect_product<half, From::registers, 40>();
  expect_product<half, From::registers, 48>();
  expect_product<half, From::registers, 56>();
  expect_product<half, From::registers, 72>();
  expect_product<half, From::registers, 80>();
  expect_product<half, From::registers, 128>();
  expect_product<half, From::transposed, 64>();
  expect_product<half, From::turned, 32>();
}
CASE(wgmma_bf16) {
  expect_product<bf16, From::shared, 64>();
  expect_product<bf16, From::registers, 64>();
  expect_product<bf16, From::registers, 32>();
  expect_product<bf16, From::transposed, 64>();
  expect_product<bf16, From::transposed, 32>();
}

// out (64, N) = A (64, 32) x^T, x (N, 32): twice, the second time instead of the first.
template <int kCount>
__global__ void __launch_bounds__(128)
    multiply_tf32(const __grid_constant__ CUtensorMap x, const float* A, float* out) {
#if HOPPER_CODE
  constexpr int N = 2 * kCount;
  extern __shared__ __align__(1024) char bytes[];
  __shared__ Barrier barrier;
  if (threadIdx.x == 0) {
    barrier_init(&barrier, 1);
    barrier_init_fence();
    barrier_arrive_expect(&barrier, N * 128);
    tensor_load(bytes, &x, 0, 0, &barrier);
  }
  __syncthreads();
  barrier_wait(&barrier, 0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = 16 * warp + lane / 4, t = lane % 4;
  float sum[kCount];
  uint32_t fragments[4][4];
  for (int k = 0; k < 4; ++k) {
    for (int i = 0; i < 4; ++i) {
      const float value = A[(row + i % 2 * 8) * 32 + 8 * k + t + i / 2 * 4];
      fragments[k][i] = __float_as_uint(value) | 0x1fff;  // bits that do not count
    }
  }
  wgmma_fence();
  for (int k = 0; k < 8; ++k) {
    wgmma_tf32(sum, fragments[k % 4], descriptor_a(bytes) + 2 * (k % 4), k % 4 > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < kCount; ++i) {
    out[(row + 8 * (i / 2 % 2)) * N + 8 * (i / 4) + 2 * t + i % 2] = sum[i];
  }
#endif
}

// What the products of `number`s below have to give.
void expect_tf32_product(Array<float>& out, int N) {
  out.get();
  for (int row = 0; row < 64; ++row) {
    for (int col = 0; col < N; ++col) {
      float expected = 0;
      for (int k = 0; k < 32; ++k) {
        // The bits that do not count make no difference, but for a zero, which they make none.
        expected += number(row, k) * number(col, k);
      }
      EXPECT(std::fabs(out[row * N + col] - expected) < 1e-30f);
    }
  }
}

template <int kCount>
void expect_tf32() {
  constexpr int N = 2 * kCount;
  Array<float> x(N * 32), A(64 * 32), out(64 * N);
  fill(x, 32);
  fill(A, 32);
  constexpr int kBytes = N * 128;
  multiply_tf32<kCount>
      <<<1, 128, kBytes>>>(tensor_map<float>(x.device, N, 32, N, true), A.device, out.device);
  expect_tf32_product(out, N);
}

// "wgmma.mma_async", .tf32: the same sections; the lower 13 bits are ignored.
CASE(wgmma_tf32) {
  expect_tf32<8>();
  expect_tf32<20>();
  expect_tf32<32>();
  expect_tf32<40>();
  expect_tf32<64>();
  expect_tf32<80>();
  expect_tf32<128>();
}

// The same product with A in shared memory, below x.
template <int kCount>
__global__ void __launch_bounds__(128)
    multiply_tf32_shared(const __grid_constant__ CUtensorMap x,
                         const __grid_constant__ CUtensorMap A, float* out) {
#if HOPPER_CODE
  constexpr int N = 2 * kCount;
  extern __shared__ __align__(1024) char bytes[];
  __shared__ Barrier barrier;
  if (threadIdx.x == 0) {
    barrier_init(&barrier, 1);
    barrier_init_fence();
    barrier_arrive_expect(&barrier, (64 + N) * 128);
    tensor_load(bytes, &x, 0, 0, &barrier);
    tensor_load(bytes + N * 128, &A, 0, 0, &barrier);
  }
  __syncthreads();
  barrier_wait(&barrier, 0);
  float sum[kCount];
  wgmma_fence();
  for (int k = 0; k < 8; ++k) {
    wgmma_tf32(sum, descriptor_a(bytes + N * 128) + 2 * (k % 4), descriptor_a(bytes) + 2 * (k % 4),
               k % 4 > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < kCount; ++i) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * (i / 2 % 2);
    out[row * N + 8 * (i / 4) + threadIdx.x % 4 * 2 + i % 2] = sum[i];
  }
#endif
}

template <int kCount>
void expect_tf32_shared() {
  constexpr int N = 2 * kCount;
  Array<float> x(N * 32), A(64 * 32), out(64 * N);
  fill(x, 32);
  fill(A, 32);
  multiply_tf32_shared<kCount>
      <<<1, 128, (64 + N) * 128>>>(tensor_map<float>(x.device, N, 32, N, true),
                                   tensor_map<float>(A.device, 64, 32, 64, true), out.device);
  expect_tf32_product(out, N);
}

// "wgmma.mma_async", .tf32, both operands by descriptors.
CASE(wgmma_tf32_shared) {
  expect_tf32_shared<64>();
  expect_tf32_shared<128>();
}

// Two ways to scale `number`s of FP8, row by row. The tensor cores keep 14 bits or so of a sum. So
// the numbers are small multiples of one power of two for all of a row: of a sum of products, that
// of one row by one column, no bit is lost.
enum class Scale { one, powers };

// Up to 9, as 4 bits of significand allow it, times a power of two. The powers take a row to where
// its numbers are all or in part subnormal, and to where they are the largest.
float fp8_number(Scale scale, int row, int col) {
  if (scale == Scale::one) return number(row, col);
  return std::ldexp(static_cast<float>((7 * row + 3 * col) % 19 - 9), row % 15 - 9);
}

// sum (64, 2 kCount) = A (64, 128) x^T, x (N, 128), in shared memory behind A; plus what is in
// `out`, if `add`.
template <From kFrom, int kCount>
__global__ void __launch_bounds__(128)
    multiply_fp8(const __grid_constant__ CUtensorMap A, const __grid_constant__ CUtensorMap x,
                 const e4m3* a, bool add, float* out) {
#if HOPPER_CODE
  constexpr int N = 2 * kCount;
  extern __shared__ __align__(1024) char bytes[];
  __shared__ Barrier barrier;
  if (threadIdx.x == 0) {
    barrier_init(&barrier, 1);
    barrier_init_fence();
    barrier_arrive_expect(&barrier, (64 + N) * 128);
    tensor_load(bytes, &A, 0, 0, &barrier);
    tensor_load(bytes + 64 * 128, &x, 0, 0, &barrier);
  }
  __syncthreads();
  barrier_wait(&barrier, 0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = 16 * warp + lane / 4, t = lane % 4;
  const auto place = [&](int i) {
    return (row + 8 * (i / 2 % 2)) * N + 8 * (i / 4) + 2 * t + i % 2;
  };
  float sum[kCount];
  for (int i = 0; i < kCount; ++i) sum[i] = out[place(i)];
  uint32_t fragments[4][4];
  for (int k = 0; k < 4; ++k) {
    for (int i = 0; i < 4; ++i) {
      const e4m3* from = a + (row + i % 2 * 8) * 128 + 32 * k + 4 * t + i / 2 * 16;
      fragments[k][i] = *reinterpret_cast<const uint32_t*>(from);
    }
  }
  wgmma_fence();
  for (int k = 0; k < 4; ++k) {
    const uint64_t right = descriptor_a(bytes + 64 * 128) + 2 * k;
    if constexpr (kFrom == From::registers) {
      wgmma_fp8(sum, fragments[k], right, add || k > 0);
    } else {
      wgmma_fp8(sum, descriptor_a(bytes) + 2 * k, right, add || k > 0);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < kCount; ++i) out[place(i)] = sum[i];
#endif
}

// The same product in the words of tiles.cuh.
template <From kFrom, int kCols>
__global__ void __launch_bounds__(128)
    multiply_fp8_tiles(const __grid_constant__ CUtensorMap A, const __grid_constant__ CUtensorMap x,
                       const e4m3* a, bool add, float* out) {
#if HOPPER_CODE
  struct Tiles {
    LeftTile<e4m3, 64> left;
    ColumnTile<e4m3, kCols> right;
  };
  extern __shared__ __align__(1024) char bytes[];
  Tiles& tiles = *reinterpret_cast<Tiles*>(bytes);
  __shared__ Barrier barrier;
  if (threadIdx.x == 0) {
    barrier_init(&barrier, 1);
    barrier_init_fence();
    barrier_arrive_expect(&barrier, sizeof tiles);
    tensor_load(&tiles.left, &A, 0, 0, &barrier);
    tensor_load(&tiles.right, &x, 0, 0, &barrier);
  }
  __syncthreads();
  barrier_wait(&barrier, 0);
  Sum<kCols> sum;
  for (int i = 0; i < sum.size(); ++i) sum.element(i) = out[sum.row(i) * kCols + sum.col(i)];
  if constexpr (kFrom == From::registers) {
    LeftFragments<e4m3> fragments;
    for (int k = 0; k < kSlices; ++k) {
      for (int i = 0; i < 4; ++i) {
        const int from = (sum.row(0) + i % 2 * 8) * 128 + 32 * k + sum.col(0) * 2 + i / 2 * 16;
        fragments.slices[k][i] = *reinterpret_cast<const uint32_t*>(a + from);
      }
    }
    sum.start_product(fragments, tiles.right.columns(), add);
  } else {
    sum.start_product(tiles.left.rows(0), tiles.right.columns(), add);
  }
  wgmma_wait<0>();
  for (int i = 0; i < sum.size(); ++i) out[sum.row(i) * kCols + sum.col(i)] = sum.element(i);
#endif
}

template <class Kernel>
void expect_fp8(Kernel kernel, int N, Scale scale, bool add) {
  Array<e4m3> A(64 * 128), x(static_cast<size_t>(N) * 128);
  Array<float> out(static_cast<size_t>(64) * N);
  for (Array<e4m3>* matrix : {&A, &x}) {
    for (size_t i = 0; i < matrix->host.size(); ++i) {
      const int at = static_cast<int>(i);
      (*matrix)[i] = static_cast<e4m3>(fp8_number(scale, at / 128, at % 128));
    }
    matrix->put();
  }
  // What is in `out` is as large as a sum may be, in units of its row and column.
  const auto start = [&](int row, int col) {
    const float of_sum = static_cast<float>((5 * row + col) % 13 - 6);
    return scale == Scale::one ? of_sum : std::ldexp(of_sum, row % 15 - 9 + col % 15 - 9);
  };
  for (int i = 0; i < 64 * N; ++i) out[i] = start(i / N, i % N);
  out.put();
  const int bytes = (64 + N) * 128;
  kernel<<<1, 128, bytes>>>(tensor_map<e4m3>(A.device, 64, 128, 64),
                            tensor_map<e4m3>(x.device, N, 128, N), A.device, add, out.device);
  out.get();
  for (int row = 0; row < 64; ++row) {
    for (int col = 0; col < N; ++col) {
      float expected = add ? start(row, col) : 0;
      for (int k = 0; k < 128; ++k) {
        expected += fp8_number(scale, row, k) * fp8_number(scale, col, k);
      }
      EXPECT(out[row * N + col] == expected);
    }
  }
}

// "wgmma.mma_async", .e4m3: "Matrix Fragments for wgmma.mma_async.m64nNk32", "Shared Memory Matrix
// Layout" (K-major), "Matrix Descriptor Format"; scale-d. "Alternate Floating-Point Data Formats".
CASE(wgmma_fp8) {
  for (const Scale scale : {Scale::one, Scale::powers}) {
    for (const bool add : {false, true}) {
      expect_fp8(multiply_fp8<From::shared, 32>, 64, scale, add);
      expect_fp8(multiply_fp8<From::shared, 64>, 128, scale, add);
      expect_fp8(multiply_fp8<From::shared, 128>, 256, scale, add);
      expect_fp8(multiply_fp8<From::registers, 32>, 64, scale, add);
      expect_fp8(multiply_fp8<From::registers, 64>, 128, scale, add);
      expect_fp8(multiply_fp8<From::registers, 128>, 256, scale, add);
    }
  }
}

// The same sections, and what tiles.cuh makes of them.
CASE(products_of_fp8_tiles) {
  for (const bool add : {false, true}) {
    expect_fp8(multiply_fp8_tiles<From::shared, 64>, 64, Scale::powers, add);
    expect_fp8(multiply_fp8_tiles<From::shared, 256>, 256, Scale::powers, add);
    expect_fp8(multiply_fp8_tiles<From::registers, 128>, 128, Scale::powers, add);
  }
}

// A block writes a matrix, which the copy engine reads for another one.
__global__ void write_then_copy(const __grid_constant__ CUtensorMap map, float* matrix,
                                unsigned* written, float* out) {
#if HOPPER_CODE
  __shared__ alignas(1024) float box[8 * 32];
  __shared__ Barrier barrier;
  const cuda::atomic_ref<unsigned, cuda::thread_scope_device> count(*written);
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < 8 * 32; i += 32) matrix[i] = static_cast<float>(i);
    global_fence();
    __syncwarp();
    if (threadIdx.x == 0) count.fetch_add(1, cuda::memory_order_release);
    return;
  }
  if (threadIdx.x == 0) {
    barrier_init(&barrier, 1);
    barrier_init_fence();
    while (count.load(cuda::memory_order_acquire) == 0) continue;
    global_fence();
    barrier_arrive_expect(&barrier, sizeof box);
    tensor_load(box, &map, 0, 0, &barrier);
  }
  __syncthreads();
  barrier_wait(&barrier, 0);
  for (int row = 0; row < 8; ++row) {
    const int col = threadIdx.x;
    out[row * 32 + col] = box[row * 32 + (col / 4 ^ row) * 4 + col % 4];
  }
#endif
}

// "membar/fence": .proxy.async establishes ordering between the generic and the async proxy.
CASE(global_fence_before_a_copy) {
  Array<float> matrix(8 * 32), out(8 * 32);
  Array<unsigned> written(1);
  write_then_copy<<<2, 32>>>(tensor_map<float>(matrix.device, 8, 32, 8), matrix.device,
                             written.device, out.device);
  out.get();
  for (int i = 0; i < 8 * 32; ++i) EXPECT(out[i] == static_cast<float>(i));
}

// One warp of the four comes later than the others to the product. `seen` counts the warps that are
// through with it before the late one has begun.
template <bool kFragments>
__global__ void __launch_bounds__(128) wait_for_late_warps(int late, int* seen) {
#if HOPPER_CODE
  extern __shared__ __align__(1024) char bytes[];
  __shared__ int begun;
  cuda::atomic_ref<int, cuda::thread_scope_block> flag(begun);
  for (int i = threadIdx.x; i < 1024; i += 128) reinterpret_cast<float4*>(bytes)[i] = float4{};
  if (threadIdx.x == 0) flag.store(0, cuda::memory_order_relaxed);
  shared_fence();
  __syncthreads();
  const int warp = threadIdx.x / 32;
  uint32_t fragments[4] = {};
  if (warp == late) {
    for (int i = 0; i < 100; ++i) __nanosleep(1000);
    if constexpr (kFragments) fragments[0] = *reinterpret_cast<uint32_t*>(bytes);
    if (threadIdx.x % 32 == 0) flag.store(1, cuda::memory_order_relaxed);
    __syncwarp();
  }
  float sum[32];
  wgmma_fence();
  if constexpr (kFragments) {
    wgmma_tf32(sum, fragments, descriptor_a(bytes), false);
  } else {
    wgmma<bf16>(sum, descriptor_a(bytes), descriptor_b(bytes + 8192, 64), false);
  }
  wgmma_commit();
  wgmma_wait<0>();
  if (threadIdx.x % 32 == 0 && flag.load(cuda::memory_order_relaxed) == 0) atomicAdd(seen, 1);
  if (sum[0] != 0) atomicAdd(seen, 1);
#endif
}

// "Asynchronous Warpgroup Level Matrix Instructions": a warpgroup executes the product, and a group
// of products is a warpgroup's. So a thread that has waited knows that all four warps have begun,
// and have read what their fragments are made of: it can give that memory back for all of them.
CASE(products_wait_for_all_warps) {
  Array<int> seen(1);
  for (int late = 0; late < 4; ++late) {
    wait_for_late_warps<true><<<1, 128, 16384>>>(late, seen.device);
    wait_for_late_warps<false><<<1, 128, 16384>>>(late, seen.device);
  }
  seen.get();
  EXPECT(seen[0] == 0);
}

// ---- Launches -----------------------------------------------------------------------------------

__global__ void write_later(int* value) {
#if HOPPER_CODE
  start_next_kernel();
  *value += 1;
#endif
}
__global__ void read_early(const int* value, int* result) {
#if HOPPER_CODE
  wait_for_previous_kernel();
  *result = *value;
#endif
}

// "griddepcontrol": after .wait the memory operations of the kernels before are visible.
CASE(early_launches) {
  Array<int> value(1), result(1);
  for (int i = 1; i <= 3; ++i) {
    write_later<<<1, 1>>>(value.device);
    launch_early(read_early, 1, 1, 0, value.device, result.device);
    result.get();
    EXPECT(result[0] == i);
  }
}

// Every block waits until all have come.
__global__ void meet_all(unsigned* arrived) {
#if HOPPER_CODE
  if (threadIdx.x == 0) {
    GridCount(*arrived).fetch_add(1, cuda::memory_order_acq_rel);
    wait_for_count(GridCount(*arrived), gridDim.x, "all blocks");
  }
  __syncthreads();
#endif
}

// "atom", "ld.acquire"; CUDA Programming Guide, co-resident blocks.
CASE(blocks_that_wait_for_one_another) {
  int sms = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  for (int blocks : {1, 2, sms}) {
    Array<unsigned> arrived(1);
    meet_all<<<blocks, 64>>>(arrived.device);
    arrived.get();
    EXPECT(arrived[0] == static_cast<unsigned>(blocks));
  }
}

// "cudaLaunchAttributeCooperative": of two launches in two streams, each of which takes the whole
// device, neither takes a part of it and waits for the rest. More blocks than fit are refused.
CASE(blocks_that_start_together) {
  constexpr int kLaunches = 50;
  const int bytes = most_shared_bytes();
  allow_shared_bytes(meet_all, bytes);
  cudaStream_t streams[2];
  for (cudaStream_t& stream : streams) CUDA_CHECK(cudaStreamCreate(&stream));
  for (const unsigned cluster : {1u, 2u}) {
    const unsigned blocks = cluster * clusters_that_fit(meet_all, cluster, 64, bytes);
    Array<unsigned> arrived(kLaunches);
    for (int i = 0; i < kLaunches; ++i) {
      launch_clusters_on(streams[i % 2], meet_all, cluster, Start::together, blocks, 64, bytes,
                         arrived.device + i);
    }
    for (cudaStream_t stream : streams) CUDA_CHECK(cudaStreamSynchronize(stream));
    arrived.get();
    for (int i = 0; i < kLaunches; ++i) EXPECT(arrived[i] == blocks);
  }
  Array<unsigned> arrived(1);
  bool refused = false;
  try {
    launch_clusters_on(nullptr, meet_all, 1, Start::together, multiprocessors() + 1, 64, bytes,
                       arrived.device);
  } catch (const std::exception&) {
    refused = true;
    cudaGetLastError();
  }
  arrived.get();
  EXPECT(refused && arrived[0] == 0);
  for (cudaStream_t stream : streams) CUDA_CHECK(cudaStreamDestroy(stream));
}

CASE(clusters_that_fit) {
  int sms = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  EXPECT(resident_clusters(remote_arrivals, 2, 32, 0) >= sms / 2);
}

#ifdef CUDA_CPU

// ---- The CPU backend: what it makes of mistakes -------------------------------------------------

/// What `run` prints on stderr.
std::string errors_of(const std::function<void()>& run) {
  std::FILE* file = std::tmpfile();
  std::fflush(stderr);
  const int original = dup(STDERR_FILENO);
  dup2(fileno(file), STDERR_FILENO);
  run();
  std::fflush(stderr);
  dup2(original, STDERR_FILENO);
  close(original);
  std::rewind(file);
  std::string text;
  for (int c; (c = std::fgetc(file)) != EOF;) text += static_cast<char>(c);
  std::fclose(file);
  return text;
}

/// A kernel's mistake: one line that has all the parts.
void expect_error(const std::function<void()>& run, const std::vector<std::string>& parts) {
  const std::string errors = errors_of(run);
  EXPECT(std::count(errors.begin(), errors.end(), '\n') == 1);
  for (const std::string& part : parts) {
    const bool there = errors.find(part) != std::string::npos;
    if (!there) std::printf("missing \"%s\" in: %s", part.c_str(), errors.c_str());
    EXPECT(there);
  }
  EXPECT(cudaGetLastError() == cudaErrorLaunchFailure);
  EXPECT(cudaDeviceReset() == cudaSuccess);
}

enum class Mistake {
  none,
  no_fence,
  few_bytes,
  many_bytes,
  no_arrival,
  arrival_too_many,
  misaligned,
  column_between,
  not_waited,
  other_parity,
  barrier_overwritten,
  not_a_map
};

__global__ void wrong_load(const __grid_constant__ CUtensorMap map, Mistake mistake) {
  extern __shared__ __align__(1024) char bytes[];
  __shared__ Barrier barrier;
  if (threadIdx.x == 0) {
    barrier_init(&barrier, 1);
    if (mistake != Mistake::no_fence) barrier_init_fence();
    if (mistake == Mistake::barrier_overwritten) barrier = 5;
    const int less = mistake == Mistake::few_bytes ? -16 : mistake == Mistake::many_bytes ? 16 : 0;
    if (mistake != Mistake::no_arrival) barrier_arrive_expect(&barrier, 8 * 128 + less);
    if (mistake == Mistake::arrival_too_many) barrier_arrive(&barrier);
    CUtensorMap other = map;
    if (mistake == Mistake::not_a_map) other.opaque[0] = 0;
    tensor_load(bytes + (mistake == Mistake::misaligned ? 64 : 0), &other, 0,
                mistake == Mistake::column_between ? 4 : 0, &barrier);
  }
  __syncthreads();
  if (mistake == Mistake::not_waited) return;
  barrier_wait(&barrier, mistake == Mistake::other_parity);
}

CASE(errors_of_loads) {
  Array<half> matrix(64 * 64);
  const CUtensorMap map = tensor_map<half>(matrix.device, 64, 64, 8);
  const auto expect = [&](Mistake mistake, const std::vector<std::string>& parts) {
    expect_error([&] { wrong_load<<<1, 64, 2048>>>(map, mistake); }, parts);
  };
  EXPECT(errors_of([&] { wrong_load<<<1, 64, 2048>>>(map, Mistake::none); }).empty());
  expect(Mistake::no_fence, {"thread (0,0,0): tensor_load()", "barrier_init_fence() is missing"});
  expect(Mistake::few_bytes, {"a copy of 1024 bytes", "phase 0 expects 1008 bytes more"});
  expect(Mistake::many_bytes, {"deadlock: thread (0,0,0) waits in barrier_wait()", "for phase 0",
                               "0 of 1 arrivals and 16 bytes are missing", "like 63 more"});
  expect(Mistake::no_arrival, {"deadlock", "1 of 1 arrivals and 0 bytes", "1 copies under way"});
  expect(Mistake::arrival_too_many, {"barrier_arrive()", "one arrival too many", "of phase 0"});
  expect(Mistake::misaligned, {"not aligned to 128 bytes"});
  expect(Mistake::column_between, {"starts at column 4, no multiple of 16 bytes"});
  expect(Mistake::not_waited, {"the block ends while 1024 bytes are on their way",
                               "in phase 0, and no barrier_wait() was called for it"});
  expect(Mistake::other_parity, {"the block ends while 1024 bytes are on their way",
                                 "in phase 0, of parity 0,", "was told parity 1, at "});
  expect(Mistake::barrier_overwritten, {"there is no barrier at this place"});
  expect(Mistake::not_a_map, {"that is no tensor map"});
}

enum class Wrong {
  none,
  no_fence,
  half_a_warpgroup,
  no_wait,
  wait_too_few,
  other_shape,
  barrier_number,
  barrier_threads,
  registers,
  more_registers
};

__global__ void __launch_bounds__(128) wrong_product(Wrong wrong, int* nan) {
  extern __shared__ __align__(1024) char bytes[];
  for (int i = threadIdx.x; i < 2 * 64 * 64; i += 128) reinterpret_cast<half*>(bytes)[i] = 1.0f;
  shared_fence();
  __syncthreads();
  if (wrong == Wrong::barrier_number) named_barrier(16, 128);
  if (wrong == Wrong::barrier_threads) named_barrier(1, threadIdx.x < 64 ? 64 : 128);
  if (wrong == Wrong::registers) registers_grow_to<100>();
  if (wrong == Wrong::more_registers) registers_shrink_to<256>();
  if (wrong == Wrong::half_a_warpgroup && threadIdx.x >= 64) return;
  float sums[64];
  auto& sum = columns_of<0, 32>(sums);
  const uint64_t a = descriptor_a(bytes), b = descriptor_b(bytes + 64 * 128, 64);
  if (wrong != Wrong::no_fence) wgmma_fence();
  wgmma<half>(sum, a, b, false);
  if (wrong == Wrong::other_shape) wgmma<half>(sums, a, b, false);
  wgmma_commit();
  // As late as allowed: until the wait it is no number.
  if (wrong == Wrong::none && !(sum[0] == sum[0])) atomicAdd(nan, 1);
  if (wrong == Wrong::wait_too_few) wgmma_wait<1>();
  if (wrong != Wrong::no_wait && wrong != Wrong::wait_too_few) wgmma_wait<0>();
  if (wrong == Wrong::none && sum[0] != 16) atomicAdd(nan, 1000);
}

CASE(errors_of_products) {
  Array<int> nan(1);
  const auto run = [&](Wrong wrong) {
    return [&nan, wrong] { wrong_product<<<1, 128, 3 * 64 * 128>>>(wrong, nan.device); };
  };
  EXPECT(errors_of(run(Wrong::none)).empty());
  nan.get();
  EXPECT(nan[0] == 128);
  expect_error(run(Wrong::no_fence), {"wgmma<half>()", "wgmma_fence() is missing"});
  expect_error(run(Wrong::half_a_warpgroup),
               {"deadlock", "wgmma_wait()", "64 of the 128 threads of the warpgroup"});
  expect_error(run(Wrong::no_wait), {"ends before its products: wgmma_wait() is missing"});
  expect_error(run(Wrong::wait_too_few), {"ends before its products"});
  expect_error(run(Wrong::other_shape), {"a product of another shape is under way"});
  expect_error(run(Wrong::barrier_number), {"barrier 16 of 128 threads", "there are 16 barriers"});
  expect_error(run(Wrong::barrier_threads), {"barrier 1 of ", "but others wait there for "});
  expect_error(run(Wrong::registers),
               {"registers_grow_to()", "100 registers: not a multiple of 8"});
  expect_error(run(Wrong::more_registers),
               {"registers_shrink_to()", "has 255 registers: it cannot go to 256"});
}

__global__ void __launch_bounds__(384) too_many_registers() {  // 168 for each thread
  if (threadIdx.x < 128) {
    registers_shrink_to<64>();
  } else {
    registers_grow_to<232>();  // for one warpgroup there are enough to spare, not for two
  }
}

CASE(registers_that_are_not_there) {
  expect_error([] { too_many_registers<<<1, 384>>>(); },
               {"deadlock", "registers_grow_to()", "for 232 registers a thread (it has 168"});
}

__global__ void late_store(const __grid_constant__ CUtensorMap map, bool wait, bool commit) {
  __shared__ __align__(1024) half box[8 * 64];
  for (int i = 0; i < 512; ++i) box[i] = 1.0f;
  shared_fence();
  tensor_store(&map, 0, 0, box);
  if (commit) tensor_store_commit();
  if (wait) tensor_store_wait_read<0>();
  for (int i = 0; i < 512; ++i) box[i] = 2.0f;
}

// "cp.async.bulk.wait_group.read": until then the source may not be written.
CASE(stores_are_late) {
  Array<half> matrix(8 * 64);
  const CUtensorMap map = tensor_map<half>(matrix.device, 8, 64, 8);
  late_store<<<1, 1>>>(map, true, true);
  matrix.get();
  EXPECT(float(matrix[0]) == 1 && float(matrix[511]) == 1);
  expect_error([&] { late_store<<<1, 1>>>(map, false, true); },
               {"tensor_store_wait_read() is missing"});
  expect_error([&] { late_store<<<1, 1>>>(map, true, false); },
               {"tensor_store_commit() is missing"});
}

enum class Alone { none, no_wait, no_meeting, arrives_twice, waits_alone, rank };

__global__ void HOPPER_CLUSTER(2) leave_cluster(Alone alone) {
  __shared__ Barrier barrier;
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    barrier_init(&barrier, 1);
    barrier_init_fence();
  }
  if (alone == Alone::arrives_twice) cluster_arrive();
  if (alone == Alone::waits_alone) cluster_wait();
  if (alone != Alone::no_meeting) cluster_meet();
  if (threadIdx.x == 0) {
    barrier_arrive(&barrier, alone == Alone::rank ? 2 : rank ^ 1);
    if (alone != Alone::no_wait) barrier_wait(&barrier, 0);
  }
}

CASE(errors_of_clusters) {
  const auto run = [](Alone alone) { return [alone] { leave_cluster<<<2, 32>>>(alone); }; };
  EXPECT(errors_of(run(Alone::none)).empty());
  expect_error(run(Alone::no_wait), {"block", "has ended"});
  expect_error(run(Alone::no_meeting), {"there is no barrier at this place in block 1"});
  expect_error(run(Alone::arrives_twice), {"cluster_arrive()", "has arrived before"});
  expect_error(run(Alone::waits_alone), {"cluster_wait()", "has not arrived"});
  expect_error(run(Alone::rank), {"there is no block 2 in a cluster of 2"});
  leave_cluster<<<3, 32>>>(Alone::none);
  EXPECT(cudaGetLastError() == cudaErrorInvalidClusterSize);
}

CASE(more_blocks_than_the_device_holds) {
  int sms = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  Array<unsigned> arrived(1);
  expect_error([&] { meet_all<<<sms + 1, 64>>>(arrived.device); },
               {"deadlock", "a loop of loads", " for all blocks", "blocks at a time",
                "CUDA_CPU_MULTIPROCESSORS"});
}

#endif  // CUDA_CPU

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> chosen(argv + 1, argv + argc);
  if (chosen == std::vector<std::string>{"--list"}) {
    for (const auto& [name, run] : cases()) std::printf("%s\n", name.c_str());
    return 0;
  }
  if (chosen.empty()) {
    for (const auto& [name, run] : cases()) chosen.push_back(name);
  }
  for (const std::string& name : chosen) {
    const auto found = cases().find(name);
    if (found == cases().end()) {
      std::fprintf(stderr, "no case %s\n", name.c_str());
      return 2;
    }
    const int before = failures;
    found->second();
    CUDA_CHECK(cudaGetLastError());
    std::printf("%-34s %s\n", name.c_str(), failures == before ? "ok" : "FAILED");
    std::fflush(stdout);
  }
  return failures == 0 ? 0 : 1;
}
