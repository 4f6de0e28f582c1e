// What Hopper's units do on the CPU: barriers in shared memory, the copy engine, clusters, wgmma.
// hopper.cpp does the work. Who calls it: hopper_device.h, for the words of primitives/hopper, and
// cpu/foreign/ptx.h, for inline PTX.
//
// Everything asynchronous happens as late as the PTX memory model allows: when a thread waits for
// it, and no other thread can go on. What it reads is read then. What it will write is poison (all
// bits set, NaN) from the moment on when it starts.

#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/execution/cuda_cpu.h"
#include "cuda.h"

namespace cuda_cpu {

inline constexpr int kOwnRank = -1;

/// An address of the window of shared memory has so many bits. In the bits above, an address of
/// another block of the cluster has the block's number, plus one.
inline constexpr unsigned kWindowBits = 24;
inline constexpr std::uint32_t kWindowMask = (1u << kWindowBits) - 1;
/// The memory behind such an address.
void* shared_pointer(std::uint32_t address);

void mbarrier_init(std::uint64_t* barrier, int count, Site site);
void mbarrier_init_fence();
/// Arrives at the barrier in block `rank`, and announces `bytes`.
void mbarrier_arrive(std::uint64_t* barrier, int rank, int bytes, const char* operation, Site site);
void mbarrier_wait(std::uint64_t* barrier, int parity, Site site);
/// Whether the phase of this parity has ended. If not, others go on first; and a thread that asks
/// again at once waits, as long as it takes.
bool mbarrier_test(std::uint64_t* barrier, int parity, Site site);
/// The parity of the phase that arrivals count for.
int mbarrier_parity(std::uint64_t* barrier, Site site);
/// Announces bytes, and is no arrival.
void mbarrier_expect(std::uint64_t* barrier, int rank, int bytes, Site site);
void mbarrier_invalidate(std::uint64_t* barrier, Site site);

/// coordinates: the innermost first. ranks: 0 for this block alone.
void tensor_load(void* to, const CUtensorMap* map, int rank, const int* coordinates,
                 std::uint64_t* barrier, std::uint16_t ranks, Site site);
void bulk_copy(void* to, const void* from, int bytes, std::uint64_t* barrier, int rank, Site site);
void store_push(float* to, float value, std::uint64_t* barrier, int rank, Site site);
void tensor_store(const CUtensorMap* map, int rank, const int* coordinates, const void* from,
                  Site site);
void bulk_store(void* to, const void* from, int bytes, Site site);
/// Combines `bytes` of whole elements with those in memory, each atomically: what the copy engine
/// does with a store that reduces. It is made where the program is compiled, so that
/// ThreadSanitizer knows that it is atomic.
using Reduction = void (*)(void* to, const void* from, std::size_t bytes);
void bulk_reduce(Reduction reduction, void* to, const void* from, int bytes, Site site);
/// The same into another block's shared memory, whose barrier gets the bytes.
void bulk_reduce(Reduction reduction, void* to, const void* from, int bytes, std::uint64_t* barrier,
                 int rank, Site site);
/// The reduction by the type of a map's elements; null: none has such elements.
using ReductionOf = Reduction (*)(CUtensorMapDataType type);
void tensor_reduce(ReductionOf reduction, const CUtensorMap* map, int rank, const int* coordinates,
                   const void* from, Site site);
void bulk_commit();
void bulk_wait_read(int newest, Site site);
void bulk_wait(int newest, Site site);
void async_proxy_fence();

void named_barrier(int id, int threads, Site site);
/// Counts there, and does not wait.
void named_arrive(int id, int threads, Site site);
/// Of the block's tile of that number, of 64, 128, ... or 1024 threads.
void tile_barrier(unsigned number, unsigned threads, Site site);
/// Of all threads of the block.
void barrier_of_block(int id, Site site);
void set_registers(int count, bool grow, Site site);
int cluster_rank();
int cluster_size();
void cluster_arrive(bool release, Site site);
void cluster_wait(Site site);

enum class Wgmma { fp16, bf16, tf32, e4m3 };
/// fragments: of A, or null if it is in shared memory. transposed: A's columns are contiguous.
/// tall: B's columns are, as of TF32 and e4m3 always. halves: each register of the sum has two
/// numbers of fp16, and the sum is rounded to that after each product.
void wgmma(Wgmma type, float* sum, int registers, std::uint64_t a, const std::uint32_t* fragments,
           bool transposed, std::uint64_t b, bool tall, bool add, Site site, bool halves = false);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int newest, Site site);

}  // namespace cuda_cpu
