// Hopper's own instructions (sm_90a), under names that a kernel reads well with: tensor maps and
// the copies that follow them (TMA), barriers in shared memory (mbarrier), products of a whole
// warpgroup (wgmma), clusters of blocks. Lesson 3 introduces them; the PTX stays in here. Section
// names are the PTX ISA's. The CPU backend says the same words in cpu/hopper/hopper_device.h.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/check.h"
#include "common/lesson.h"

// True while compiling device code that may use these instructions. A kernel's body stands between
// #if HOPPER_CODE and #endif, so that it is empty for other architectures.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(CUDA_CPU)
#define HOPPER_CODE 1
#else
#define HOPPER_CODE 0
#endif

// The same for what is of a cluster, which later architectures have, too.
#if (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900) || defined(CUDA_CPU)
#define CLUSTER_CODE 1
#else
#define CLUSTER_CODE 0
#endif

/// On a kernel: its blocks come in clusters of `blocks`, where the architecture has clusters.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define HOPPER_CLUSTER(blocks)
#else
#define HOPPER_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#endif

// ---- Host: tensor maps --------------------------------------------------------------------------

/// How often a byte is copied, which says what the L2 cache should read from memory at a time.
/// `once`: 256 bytes. `often`, by many blocks: 256 bytes where rows are multiples of that, else
/// 128. With other rows, a row of a box often lies in two pieces of 256 bytes, and to ask for both
/// costs up to 10 % of a product's time. For a matrix that is only written it means nothing.
enum class Reads { once, often };

template <typename T>
CUtensorMap encode_tensor_map(const T* tensor, unsigned rank, const cuuint64_t* extents,
                              const cuuint64_t* strides, const cuuint32_t* box,
                              CUtensorMapSwizzle swizzle, bool to_tf32 = false,
                              Reads reads = Reads::once) {
  static_assert(sizeof(T) == 2 || std::is_same_v<T, float>);
  // Through the runtime, so that the program starts where there is no driver to link to.
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                cudaEnableDefault, &result));
    if (result != cudaDriverEntryPointSuccess) fail(kDeviceCannot, "the driver has no tensor maps");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUtensorMapDataType type = to_tf32                    ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
                                   : type_of<T> == Type::fp32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : type_of<T> == Type::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                              : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto fetched = reads == Reads::often && strides[0] % 256 != 0
                           ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                           : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  CUtensorMap map;
  const CUresult status =
      encode(&map, type, rank, const_cast<T*>(tensor), extents, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, fetched, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    fail(kDeviceCannot, "cuTensorMapEncodeTiled: CUresult %d (%u dimensions, the first of %llu)",
         static_cast<int>(status), rank, static_cast<unsigned long long>(extents[0]));
  }
  return map;
}

/// Describes a row-major matrix (rows, cols) of half, __nv_bfloat16 or float to the copy engine,
/// which moves boxes of `box_rows` (at most 256) rows by 128 bytes (64 columns, of float 32) to or
/// from shared memory. There the box is dense, 128 bytes a row, and swizzled by address: if it
/// starts at a multiple of 1024 bytes, the 16-byte piece p of row r lies at piece p ^ (r % 8), as
/// wgmma and swizzled() expect it; from another multiple of 128 on, as if it were a later part of
/// such a box. What a box reads outside of the matrix becomes zero; what it writes there is
/// dropped. `matrix` must be aligned to 16 bytes, and so must its rows, `row_stride` elements apart
/// (0: `cols`). With `to_tf32`, floats are rounded to TF32 on the way. CUDA Driver API, "Tensor Map
/// Object Management".
template <typename T>
CUtensorMap tensor_map(const T* matrix, int64_t rows, int64_t cols, unsigned box_rows,
                       bool to_tf32 = false, int64_t row_stride = 0, Reads reads = Reads::once) {
  const cuuint64_t extents[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  if (row_stride == 0) row_stride = cols;
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_stride) * sizeof(T)};
  const cuuint32_t box[2] = {128 / sizeof(T), box_rows};
  return encode_tensor_map(matrix, 2, extents, strides, box, CU_TENSOR_MAP_SWIZZLE_128B, to_tf32,
                           reads);
}

/// The same for a vector of `count` elements, moved `box` at a time, without a swizzle.
template <typename T>
CUtensorMap tensor_map(const T* vector, int64_t count, cuuint32_t box = 64) {
  const cuuint64_t extent = static_cast<cuuint64_t>(count);
  const cuuint64_t strides[1] = {};  // one dimension has none, but the driver wants an address
  return encode_tensor_map(vector, 1, &extent, strides, &box, CU_TENSOR_MAP_SWIZZLE_NONE);
}

/// How many clusters of `blocks` blocks of `kernel` the device holds at once, perhaps none. For a
/// device without clusters: how many it has multiprocessors for, so that the rest can be worked out
/// as elsewhere.
template <typename Kernel>
int clusters_that_fit(Kernel* kernel, unsigned blocks, unsigned threads, size_t shared_bytes) {
  const Device device = Device::current();
  if (!device.is_hopper()) return std::max(1, device.sms / static_cast<int>(blocks));
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = blocks;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  int clusters = 0;
  CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
  return clusters;
}

/// The same for a kernel that has to fit.
template <typename Kernel>
int resident_clusters(Kernel* kernel, unsigned blocks, unsigned threads, size_t shared_bytes) {
  const int clusters = clusters_that_fit(kernel, blocks, threads, shared_bytes);
  if (clusters == 0) fail(kDeviceCannot, "no cluster of %u blocks fits on this device", blocks);
  return clusters;
}

/// How many persistent blocks (or clusters) work on `tiles` tiles if `capacity` fit on the device:
/// as few as finish in the same number of rounds. Multiprocessors without work leave their share of
/// the power to the others.
inline unsigned persistent(int64_t tiles, int64_t capacity) {
  const int64_t rounds = (tiles + capacity - 1) / capacity;
  return static_cast<unsigned>((tiles + rounds - 1) / rounds);
}

/// An mbarrier; it lives in shared memory.
using Barrier = uint64_t;

/// Where a pipeline stands: at which of kStages stages, and in which of its barriers' two phases.
template <int kStages>
struct Ring {
  int stage = 0, parity = 0;
  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

/// The same for stages in any order: the next phase of each stage's barrier, bit s that of stage s.
template <int kStages>
struct Phases {
  uint32_t parities = 0;
  __device__ __forceinline__ int next(int s) {
    const int parity = parities >> s & 1;
    parities ^= 1u << s;
    return parity;
  }
};

#if HOPPER_CODE

#ifdef CUDA_CPU
#include "cpu/hopper/hopper_device.h"
#else

// ---- Device: barriers ---------------------------------------------------------------------------
//
// "Parallel Synchronization and Communication Instructions: mbarrier". A phase of a Barrier ends
// when `count` arrivals and all announced bytes have come in; phases alternate in parity.

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void barrier_init(Barrier* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(count));
}

/// Makes barrier_init visible to the copy engine and to the other blocks of the cluster; a barrier
/// among the threads (of the cluster) has to follow.
__device__ inline void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void barrier_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

/// Arrives at the barrier at the same place in block `rank` of the cluster.
__device__ inline void barrier_arrive(Barrier* barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

/// Arrives, and announces bytes that copies will bring in this phase.
__device__ inline void barrier_arrive_expect(Barrier* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

/// Waits until the phase of this parity (0, 1, 0, ...) is over; on a new barrier 1 is over.
__device__ inline void barrier_wait(Barrier* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// ---- Device: tensor copies ----------------------------------------------------------------------
//
// "Data Movement and Conversion Instructions: cp.async.bulk.tensor". One thread copies a whole box.

/// Copies the box whose first element is (row, col) to `to` (aligned to 128 bytes) in shared
/// memory; its bytes count at `barrier`.
__device__ inline void tensor_load(void* to, const CUtensorMap* map, int row, int col,
                                   Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(to)),
      "l"(map), "r"(col), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

/// Has the box that tensor_load would copy brought into the L2 cache.
__device__ inline void prefetch_l2(const CUtensorMap* map, int row, int col) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map),
               "r"(col), "r"(row)
               : "memory");
}

/// Copies the 64 elements of a vector from `first` on.
__device__ inline void tensor_load(void* to, const CUtensorMap* map, int first, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2}], [%3];" ::"r"(shared_address(to)),
      "l"(map), "r"(first), "r"(shared_address(barrier))
      : "memory");
}

/// tensor_load into all blocks of the cluster with a bit in `ranks`; each one's barrier counts.
__device__ inline void tensor_load_multicast(void* to, const CUtensorMap* map, int row, int col,
                                             Barrier* barrier, uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(col), "r"(row), "r"(shared_address(barrier)), "h"(ranks)
      : "memory");
}

/// Copies `bytes` in a row; both addresses and `bytes` are multiples of 16. "cp.async.bulk".
__device__ inline void bulk_load(void* to, const void* from, int bytes, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

/// Copies `bytes` from this block's shared memory to the place of `to` in that of block `rank` of
/// the cluster, and counts them at that block's `barrier`. Addresses and `bytes` are multiples of
/// 16. As for tensor_store, shared_fence() comes before; and this block must not end before the
/// bytes have come.
__device__ inline void bulk_push(void* to, const void* from, int bytes, Barrier* barrier,
                                 int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 to, barrier;\n"
      "mapa.shared::cluster.u32 to, %0, %4;\n"
      "mapa.shared::cluster.u32 barrier, %3, %4;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
      "[to], [%1], %2, [barrier];\n"
      "}" ::"r"(shared_address(to)),
      "r"(shared_address(from)), "r"(bytes), "r"(shared_address(barrier)), "r"(rank)
      : "memory");
}

/// Writes `value` to the place of `to` in block `rank` of the cluster, and counts its 4 bytes at
/// that block's `barrier`, when they have come; that block must not end before, this one may.
/// "st.async".
__device__ inline void store_push(float* to, float value, Barrier* barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 to, barrier;\n"
      "mapa.shared::cluster.u32 to, %0, %3;\n"
      "mapa.shared::cluster.u32 barrier, %2, %3;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [to], %1, [barrier];\n"
      "}" ::"r"(shared_address(to)),
      "f"(value), "r"(shared_address(barrier)), "r"(rank)
      : "memory");
}

/// Copies a box from shared memory to the matrix. The threads that wrote the box call
/// shared_fence() and meet at a barrier before.
__device__ inline void tensor_store(const CUtensorMap* map, int row, int col, const void* from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
      "r"(col), "r"(row), "r"(shared_address(from))
      : "memory");
}
/// Copies `bytes` in a row from shared memory; both addresses and `bytes` are multiples of 16. As
/// for tensor_store, with which it shares commit and wait. "cp.async.bulk".
__device__ inline void bulk_store(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
__device__ inline void tensor_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Waits until all but the newest kNewest groups of this thread's stores have read their boxes,
/// which may then be written again.
template <int kNewest>
__device__ inline void tensor_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kNewest) : "memory");
}

/// Makes this thread's writes to shared memory visible to the copy engine and to wgmma; below: what
/// this thread has written to memory, or seen written, to the copy engine.
__device__ inline void shared_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void global_fence() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- Device: warpgroups and clusters ------------------------------------------------------------

/// A barrier among `threads` threads of the block, one of 16; 0 is __syncthreads().
__device__ inline void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Hands registers back, or takes more: per thread, for the whole warpgroup. "setmaxnreg".
template <int kRegisters>
__device__ inline void registers_shrink_to() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void registers_grow_to() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// True for one thread of the warp, the same each time; all 32 have to call it. It is for the one
/// that starts copies: the compiler then knows that there is only one, and makes no loop over the
/// warp's threads of each copy, as it does after `threadIdx.x == 0`. "elect.sync".
__device__ inline bool elect_one() {
  uint32_t chosen;
  asm volatile(
      "{\n"
      ".reg .pred chosen;\n"
      "elect.sync _|chosen, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, chosen;\n"
      "}"
      : "=r"(chosen));
  return chosen != 0;
}

__device__ inline int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// A barrier among all threads of the cluster.
__device__ inline void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

/// The same in two halves, and without waiting for what was written before, which can take a
/// microsecond: after it the others' threads are there, but of their writes only the barriers that
/// barrier_init_fence() followed.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#include "primitives/hopper/wgmma.cuh"

// ---- Device: others -----------------------------------------------------------------------------

/// 2^value; results below 2^-126 are 0. "ex2".
__device__ inline float exp2_approximate(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

/// 1 / value, wrong by 1 unit in the last place; 0 where that is below 2^-126. "rcp".
__device__ inline float reciprocal_approximate(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

/// Stores kCount (2 or 4) 8 x 8 matrices of 2-byte elements to shared memory: thread t gives the
/// address of row t % 8 of matrix t / 8 (16 bytes, aligned), and holds in registers[m] the elements
/// 2 (t % 4) and 2 (t % 4) + 1 of row t / 4 of matrix m. kTransposed: of column t / 4 instead, from
/// row 2 (t % 4) on. "stmatrix".
template <bool kTransposed = false, int kCount>
__device__ inline void store_matrices(void* row, const uint32_t (&registers)[kCount]) {
  if constexpr (kCount == 2) {
    static_assert(kTransposed);
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(row)),
        "r"(registers[0]), "r"(registers[1])
        : "memory");
  } else if constexpr (kTransposed) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     shared_address(row)),
                 "r"(registers[0]), "r"(registers[1]), "r"(registers[2]), "r"(registers[3])
                 : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     shared_address(row)),
                 "r"(registers[0]), "r"(registers[1]), "r"(registers[2]), "r"(registers[3])
                 : "memory");
  }
}

#endif  // CUDA_CPU

// ---- Device: what is made of these --------------------------------------------------------------

/// The last thing that the producer of a block in a cluster does: waits until each stage has been
/// released as often as it was filled. By then all that the other blocks send to this one, bytes
/// and arrivals, has come, and the block may end.
template <int kStages>
__device__ inline void wait_until_empty(Barrier (&empty)[kStages], Ring<kStages> ring) {
  for (int s = 0; s < kStages; ++s, ring.advance()) {
    barrier_wait(&empty[ring.stage], ring.parity ^ 1);
  }
}

/// The number of this thread's warp, which the compiler then knows to be the same for all of it.
__device__ inline int warp_of_block() { return __shfl_sync(0xffffffff, threadIdx.x / 32, 0); }

/// Both at once: how the blocks of a cluster meet when each has initialized its barriers.
__device__ inline void cluster_meet() {
  cluster_arrive();
  cluster_wait();
}

/// Descriptor of a tile of A as tensor_load leaves it: 64 columns (k), rows 128 bytes apart.
/// "Matrix Descriptor Format", K-major, 128-byte swizzle: the stride offset is that of groups of 8
/// rows. The next 16 columns are 32 bytes on: add 2 to the descriptor.
__device__ inline uint64_t descriptor_a(const void* tile) {
  return (shared_address(tile) & 0x3ffff) >> 4 | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}

/// Descriptor of a tile of row-major B: boxes of `rows` rows (k) by 64 columns, next to each other
/// along the columns. MN-major, 128-byte swizzle: the leading offset is that of boxes, the stride
/// offset that of groups of 8 rows. The next 16 rows are 2048 bytes on: add 128.
__device__ inline uint64_t descriptor_b(const void* tile, int rows) {
  return (shared_address(tile) & 0x3ffff) >> 4 | static_cast<uint64_t>(rows * 128 >> 4) << 16 |
         uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

/// The kCount registers of a sum from kFirst on: 2 kCount of its columns.
template <int kFirst, int kCount, int kAll>
__device__ inline float (&columns_of(float (&sum)[kAll]))[kCount] {
  static_assert(kFirst + kCount <= kAll);
  return reinterpret_cast<float(&)[kCount]>(sum[kFirst]);
}

/// Where a box of tensor_map keeps piece `piece` (8 elements) of row `row`, in elements.
__device__ inline int swizzled(int row, int piece) { return row * 64 + (piece ^ row % 8) * 8; }

#endif  // HOPPER_CODE
