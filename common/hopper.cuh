// Hopper's own instructions (sm_90a), under names that a kernel reads well with: tensor maps and
// the copies that follow them (TMA), barriers in shared memory (mbarrier), products of a whole
// warpgroup (wgmma), clusters of blocks. Lesson 3 introduces them; the PTX stays in here. Section
// names are the PTX ISA's. The CPU backend says the same words in common/cpu/hopper_device.h.
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

/// On a kernel: its blocks come in clusters of `blocks`, where the architecture has clusters.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define HOPPER_CLUSTER(blocks)
#else
#define HOPPER_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#endif

// ---- Host: tensor maps --------------------------------------------------------------------------

template <typename T>
CUtensorMap encode_tensor_map(const T* tensor, unsigned rank, const cuuint64_t* extents,
                              const cuuint64_t* strides, const cuuint32_t* box,
                              CUtensorMapSwizzle swizzle, bool to_tf32 = false) {
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
  CUtensorMap map;
  const CUresult status =
      encode(&map, type, rank, const_cast<T*>(tensor), extents, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    fail(kDeviceCannot, "cuTensorMapEncodeTiled: CUresult %d (%u dimensions, the first of %llu)",
         static_cast<int>(status), rank, static_cast<unsigned long long>(extents[0]));
  }
  return map;
}

/// Describes a row-major matrix (rows, cols) of half, __nv_bfloat16 or float to the copy engine,
/// which moves boxes of `box_rows` (at most 256) rows by 128 bytes (64 columns, of float 32) to or
/// from shared memory. There the box is dense, 128 bytes a row, and swizzled: the 16-byte piece p
/// of row r lies at piece p ^ (r % 8), as wgmma and swizzled() expect it. What a box reads outside
/// of the matrix becomes zero; what it writes there is dropped. `matrix` must be aligned to 16
/// bytes, and so must its rows, `row_stride` elements apart (0: `cols`). With `to_tf32`, floats are
/// rounded to TF32 on the way. CUDA Driver API, "Tensor Map Object Management".
template <typename T>
CUtensorMap tensor_map(const T* matrix, int64_t rows, int64_t cols, unsigned box_rows,
                       bool to_tf32 = false, int64_t row_stride = 0) {
  const cuuint64_t extents[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  if (row_stride == 0) row_stride = cols;
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_stride) * sizeof(T)};
  const cuuint32_t box[2] = {128 / sizeof(T), box_rows};
  return encode_tensor_map(matrix, 2, extents, strides, box, CU_TENSOR_MAP_SWIZZLE_128B, to_tf32);
}

/// The same for a vector of `count` elements, moved `box` at a time, without a swizzle.
template <typename T>
CUtensorMap tensor_map(const T* vector, int64_t count, cuuint32_t box = 64) {
  const cuuint64_t extent = static_cast<cuuint64_t>(count);
  const cuuint64_t strides[1] = {};  // one dimension has none, but the driver wants an address
  return encode_tensor_map(vector, 1, &extent, strides, &box, CU_TENSOR_MAP_SWIZZLE_NONE);
}

/// How many clusters of `blocks` blocks of `kernel` the device holds at once. For a device without
/// clusters: how many it has multiprocessors for, so that the rest can be worked out as elsewhere.
template <typename Kernel>
int resident_clusters(Kernel* kernel, unsigned blocks, unsigned threads, size_t shared_bytes) {
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
#include "hopper_device.h"
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

/// Copies the box whose first element is (row, col) to `to` (aligned to 1024 bytes) in shared
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

/// Has the cache line of `from` brought into the L2 cache. "prefetch".
__device__ inline void prefetch_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
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

/// Copies a box from shared memory to the matrix. The threads that wrote the box call
/// shared_fence() and meet at a barrier before.
__device__ inline void tensor_store(const CUtensorMap* map, int row, int col, const void* from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
      "r"(col), "r"(row), "r"(shared_address(from))
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
// ---- Device: wgmma ------------------------------------------------------------------------------
//
// "Asynchronous Warpgroup Level Matrix Instructions". The 128 threads of a warpgroup multiply a
// 64 x 16 piece of A by a 16 x N piece of B, both in shared memory, into a 64 x N sum in registers.
// sum[i] of thread t is the element
//     row 16 (t / 32) + t % 32 / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (t % 4) + i % 2

/// Before the first product, and after registers of a sum were touched by other instructions.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most kNewest committed groups of products are still under way.
template <int kNewest>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kNewest) : "memory");
}

#define HOPPER_SUM4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define HOPPER_SUM8(i) HOPPER_SUM4(i), HOPPER_SUM4(i + 4)
#define HOPPER_SUM32(i) HOPPER_SUM8(i), HOPPER_SUM8(i + 8), HOPPER_SUM8(i + 16), HOPPER_SUM8(i + 24)
#define HOPPER_R8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define HOPPER_R20 HOPPER_R8 ", %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19"
#define HOPPER_R32                                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define HOPPER_R56                                                                \
  HOPPER_R32                                                                      \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, " \
  "%47, %48, %49, %50, %51, %52, %53, %54, %55"
#define HOPPER_R64                                                                \
  HOPPER_R32                                                                      \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, " \
  "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define HOPPER_R72 HOPPER_R64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define HOPPER_R96                                                                \
  HOPPER_R64                                                                      \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, " \
  "%79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define HOPPER_R112                                                                          \
  HOPPER_R96                                                                                 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, " \
  "%111"
#define HOPPER_R128                                                                          \
  HOPPER_R96                                                                                 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, " \
  "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, "     \
  "%125, %126, %127"
// The types' instructions. `n`: columns; `k`: rows of B; `registers`: the sum's operands; `a` to
// `flags`: the operands after them; flags: signs of A and B, and but for TF32 transposed A (only in
// shared memory), B row-major.
#define HOPPER_WGMMA_TEXT(n, k, type, registers, a, b, add, flags)                              \
  "{\n.reg .pred add;\nsetp.ne.b32 add, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k" k \
  ".f32." type "." type " {" registers "}, " a ", " b ", add, " flags ";\n}"
#define HOPPER_WGMMA_TF32(n, registers, a, b, add, ...)                        \
  asm volatile(HOPPER_WGMMA_TEXT(n, "8", "tf32", registers, a, b, add, "1, 1") \
               : __VA_ARGS__                                                   \
               : HOPPER_REGISTER_A)
#define HOPPER_WGMMA_TF32_SHARED(n, registers, left, right, adds, ...)                 \
  asm volatile(HOPPER_WGMMA_TEXT(n, "8", "tf32", registers, left, right, adds, "1, 1") \
               : __VA_ARGS__                                                           \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)))
#define HOPPER_WGMMA(n, registers, a, b, add, flags, inputs, ...)                \
  if constexpr (type_of<T> == Type::fp16) {                                      \
    asm volatile(HOPPER_WGMMA_TEXT(n, "16", "f16", registers, a, b, add, flags)  \
                 : __VA_ARGS__                                                   \
                 : inputs);                                                      \
  } else {                                                                       \
    asm volatile(HOPPER_WGMMA_TEXT(n, "16", "bf16", registers, a, b, add, flags) \
                 : __VA_ARGS__                                                   \
                 : inputs);                                                      \
  }
#define HOPPER_SHARED_A "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposed ? 1 : 0)
#define HOPPER_REGISTER_A \
  "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add))

/// sum (64, N) = A B, plus the old sum if `add`, N = 2 kCount; T is half or __nv_bfloat16. A as
/// descriptor_a, B as descriptor_b. kTransposed: A is the transpose of a row-major matrix, given as
/// descriptor_b gives one of 64 columns.
template <typename T, bool kTransposed = false, int kCount>
__device__ inline void wgmma(float (&sum)[kCount], uint64_t a, uint64_t b, bool add) {
  static_assert(sizeof(T) == 2);
  if constexpr (kCount == 32) {
    HOPPER_WGMMA("64", HOPPER_R32, "%32", "%33", "%34", "1, 1, %35, 1", HOPPER_SHARED_A,
                 HOPPER_SUM32(0))
  } else if constexpr (kCount == 64) {
    HOPPER_WGMMA("128", HOPPER_R64, "%64", "%65", "%66", "1, 1, %67, 1", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM32(32))
  } else if constexpr (kCount == 56) {
    HOPPER_WGMMA("112", HOPPER_R56, "%56", "%57", "%58", "1, 1, %59, 1", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM8(32), HOPPER_SUM8(40), HOPPER_SUM8(48))
  } else if constexpr (kCount == 72) {
    HOPPER_WGMMA("144", HOPPER_R72, "%72", "%73", "%74", "1, 1, %75, 1", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM8(64))
  } else if constexpr (kCount == 96) {
    HOPPER_WGMMA("192", HOPPER_R96, "%96", "%97", "%98", "1, 1, %99, 1", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM32(64))
  } else if constexpr (kCount == 112) {
    HOPPER_WGMMA("224", HOPPER_R112, "%112", "%113", "%114", "1, 1, %115, 1", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM32(64), HOPPER_SUM8(96),
                 HOPPER_SUM8(104))
  } else {
    static_assert(kCount == 128);
    HOPPER_WGMMA("256", HOPPER_R128, "%128", "%129", "%130", "1, 1, %131, 1", HOPPER_SHARED_A,
                 HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM32(64), HOPPER_SUM32(96))
  }
}

/// The same with A from registers, which stay untouched until the product is done: warp w of the
/// warpgroup holds rows 16 w to 16 w + 15, as fragments of mma_m16n8k16 (common/mma.cuh).
template <typename T, int kCount>
__device__ inline void wgmma(float (&sum)[kCount], const uint32_t (&a)[4], uint64_t b, bool add) {
  static_assert(sizeof(T) == 2);
  if constexpr (kCount == 32) {
    HOPPER_WGMMA("64", HOPPER_R32, "{%32, %33, %34, %35}", "%36", "%37", "1, 1, 1",
                 HOPPER_REGISTER_A, HOPPER_SUM32(0))
  } else if constexpr (kCount == 64) {
    HOPPER_WGMMA("128", HOPPER_R64, "{%64, %65, %66, %67}", "%68", "%69", "1, 1, 1",
                 HOPPER_REGISTER_A, HOPPER_SUM32(0), HOPPER_SUM32(32))
  } else {
    static_assert(kCount == 128);
    HOPPER_WGMMA("256", HOPPER_R128, "{%128, %129, %130, %131}", "%132", "%133", "1, 1, 1",
                 HOPPER_REGISTER_A, HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM32(64),
                 HOPPER_SUM32(96))
  }
}

/// sum (64, N) = A B, plus the old sum if `add`, N = 2 kCount, for a k of 8 elements in TF32; the
/// lower 13 bits of an element do not count. A from registers, as fragments of mma_m16n8k8_tf32, B
/// as descriptor_a: of TF32 the instruction only takes a B whose columns are contiguous.
template <int kCount>
__device__ inline void wgmma_tf32(float (&sum)[kCount], const uint32_t (&a)[4], uint64_t b,
                                  bool add) {
  if constexpr (kCount == 8) {
    HOPPER_WGMMA_TF32("16", HOPPER_R8, "{%8, %9, %10, %11}", "%12", "%13", HOPPER_SUM8(0));
  } else if constexpr (kCount == 40) {
    HOPPER_WGMMA_TF32("80", HOPPER_R32 ", %32, %33, %34, %35, %36, %37, %38, %39",
                      "{%40, %41, %42, %43}", "%44", "%45", HOPPER_SUM32(0), HOPPER_SUM8(32));
  } else if constexpr (kCount == 20) {
    HOPPER_WGMMA_TF32("40", HOPPER_R20, "{%20, %21, %22, %23}", "%24", "%25", HOPPER_SUM8(0),
                      HOPPER_SUM8(8), HOPPER_SUM4(16));
  } else if constexpr (kCount == 32) {
    HOPPER_WGMMA_TF32("64", HOPPER_R32, "{%32, %33, %34, %35}", "%36", "%37", HOPPER_SUM32(0));
  } else if constexpr (kCount == 64) {
    HOPPER_WGMMA_TF32("128", HOPPER_R64, "{%64, %65, %66, %67}", "%68", "%69", HOPPER_SUM32(0),
                      HOPPER_SUM32(32));
  } else {
    static_assert(kCount == 128);
    HOPPER_WGMMA_TF32("256", HOPPER_R128, "{%128, %129, %130, %131}", "%132", "%133",
                      HOPPER_SUM32(0), HOPPER_SUM32(32), HOPPER_SUM32(64), HOPPER_SUM32(96));
  }
}

/// The same with A from shared memory: both operands as descriptor_a.
template <int kCount>
__device__ inline void wgmma_tf32(float (&sum)[kCount], uint64_t a, uint64_t b, bool add) {
  if constexpr (kCount == 64) {
    HOPPER_WGMMA_TF32_SHARED("128", HOPPER_R64, "%64", "%65", "%66", HOPPER_SUM32(0),
                             HOPPER_SUM32(32));
  } else {
    static_assert(kCount == 128);
    HOPPER_WGMMA_TF32_SHARED("256", HOPPER_R128, "%128", "%129", "%130", HOPPER_SUM32(0),
                             HOPPER_SUM32(32), HOPPER_SUM32(64), HOPPER_SUM32(96));
  }
}

/// 2^value; results below 2^-126 are 0. "ex2".
__device__ inline float exp2_approximate(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

/// Stores four 8 x 8 matrices of 2-byte elements to shared memory: thread t gives the address of
/// row t % 8 of matrix t / 8 (16 bytes, aligned), and holds in registers[m] the elements 2 (t % 4)
/// and 2 (t % 4) + 1 of row t / 4 of matrix m. "stmatrix".
__device__ inline void store_matrices(void* row, const uint32_t (&registers)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
      "r"(registers[0]), "r"(registers[1]), "r"(registers[2]), "r"(registers[3])
      : "memory");
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
