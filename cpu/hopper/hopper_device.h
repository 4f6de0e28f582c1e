// What primitives/hopper says in PTX, said by the CPU: barriers in shared memory, the copy engine,
// clusters, wgmma. units.h has what these are made of.

#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/execution/cuda_cpu.h"
#include "cpu/execution/device_functions.h"
#include "cpu/hopper/units.h"
#include "cpu/warps/matrix_moves.h"
#include "cuda.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_fp8.h"

namespace cuda_cpu {

template <class T>
inline constexpr Wgmma kWgmmaType = std::is_same_v<T, __half> ? Wgmma::fp16 : Wgmma::bf16;

}  // namespace cuda_cpu

namespace primitives {

// ---- Barriers ----------------------------------------------------------------------------------

inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

inline void barrier_init(std::uint64_t* barrier, int count,
                         cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::mbarrier_init(barrier, count, site);
}
inline void barrier_init_fence() { cuda_cpu::mbarrier_init_fence(); }
inline void barrier_arrive(std::uint64_t* barrier, cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::mbarrier_arrive(barrier, cuda_cpu::kOwnRank, 0, "barrier_arrive()", site);
}
inline void barrier_arrive(std::uint64_t* barrier, int rank,
                           cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::mbarrier_arrive(barrier, rank, 0, "barrier_arrive()", site);
}
inline void barrier_arrive_expect(std::uint64_t* barrier, int bytes,
                                  cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::mbarrier_arrive(barrier, cuda_cpu::kOwnRank, bytes, "barrier_arrive_expect()", site);
}
inline void barrier_wait(std::uint64_t* barrier, int parity,
                         cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::mbarrier_wait(barrier, parity, site);
}

// ---- Copies ------------------------------------------------------------------------------------

inline void tensor_load(void* to, const CUtensorMap* map, int row, int col, std::uint64_t* barrier,
                        cuda_cpu::Site site = cuda_cpu::Site::here()) {
  const int coordinates[2] = {col, row};
  cuda_cpu::tensor_load(to, map, 2, coordinates, barrier, 0, site);
}
inline void prefetch_l2(const CUtensorMap*, int, int) {}
inline std::uint64_t evict_first() { return 0; }
inline std::uint64_t evict_last() { return 0; }
inline std::uint64_t evict_normal() { return 0; }
inline void tensor_load(void* to, const CUtensorMap* map, int row, int col, std::uint64_t* barrier,
                        std::uint64_t /*policy*/, cuda_cpu::Site site = cuda_cpu::Site::here()) {
  tensor_load(to, map, row, col, barrier, site);
}
inline void tensor_load(void* to, const CUtensorMap* map, int matrix, int row, int col,
                        std::uint64_t* barrier, std::uint64_t /*policy*/,
                        cuda_cpu::Site site = cuda_cpu::Site::here()) {
  const int coordinates[3] = {col, row, matrix};
  cuda_cpu::tensor_load(to, map, 3, coordinates, barrier, 0, site);
}
inline void tensor_load(void* to, const CUtensorMap* map, const int (&at)[5],
                        std::uint64_t* barrier, std::uint64_t /*policy*/,
                        cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::tensor_load(to, map, 5, at, barrier, 0, site);
}
inline void tensor_load(void* to, const CUtensorMap* map, int first, std::uint64_t* barrier,
                        cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::tensor_load(to, map, 1, &first, barrier, 0, site);
}
inline void tensor_load_multicast(void* to, const CUtensorMap* map, int row, int col,
                                  std::uint64_t* barrier, std::uint16_t ranks,
                                  cuda_cpu::Site site = cuda_cpu::Site::here()) {
  const int coordinates[2] = {col, row};
  cuda_cpu::tensor_load(to, map, 2, coordinates, barrier, ranks, site);
}
inline void tensor_load_multicast(void* to, const CUtensorMap* map, int row, int col,
                                  std::uint64_t* barrier, std::uint16_t ranks,
                                  std::uint64_t /*policy*/,
                                  cuda_cpu::Site site = cuda_cpu::Site::here()) {
  tensor_load_multicast(to, map, row, col, barrier, ranks, site);
}
inline void tensor_load_multicast(void* to, const CUtensorMap* map, int matrix, int row, int col,
                                  std::uint64_t* barrier, std::uint16_t ranks,
                                  std::uint64_t /*policy*/,
                                  cuda_cpu::Site site = cuda_cpu::Site::here()) {
  const int coordinates[3] = {col, row, matrix};
  cuda_cpu::tensor_load(to, map, 3, coordinates, barrier, ranks, site);
}
inline void tensor_load_multicast(void* to, const CUtensorMap* map, const int (&at)[5],
                                  std::uint64_t* barrier, std::uint16_t ranks,
                                  std::uint64_t /*policy*/,
                                  cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::tensor_load(to, map, 5, at, barrier, ranks, site);
}
inline void bulk_load(void* to, const void* from, int bytes, std::uint64_t* barrier,
                      cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::bulk_copy(to, from, bytes, barrier, cuda_cpu::kOwnRank, site);
}
inline void bulk_push(void* to, const void* from, int bytes, std::uint64_t* barrier, int rank,
                      cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::bulk_copy(to, from, bytes, barrier, rank, site);
}
inline void store_push(float* to, float value, std::uint64_t* barrier, int rank,
                       cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::store_push(to, value, barrier, rank, site);
}
inline void tensor_store(const CUtensorMap* map, int row, int col, const void* from,
                         cuda_cpu::Site site = cuda_cpu::Site::here()) {
  const int coordinates[2] = {col, row};
  cuda_cpu::tensor_store(map, 2, coordinates, from, site);
}
inline void tensor_store(const CUtensorMap* map, int row, int col, const void* from,
                         std::uint64_t /*policy*/, cuda_cpu::Site site = cuda_cpu::Site::here()) {
  tensor_store(map, row, col, from, site);
}
inline void tensor_store(const CUtensorMap* map, int matrix, int row, int col, const void* from,
                         std::uint64_t /*policy*/, cuda_cpu::Site site = cuda_cpu::Site::here()) {
  const int coordinates[3] = {col, row, matrix};
  cuda_cpu::tensor_store(map, 3, coordinates, from, site);
}
inline void tensor_store(const CUtensorMap* map, const int (&at)[5], const void* from,
                         cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::tensor_store(map, 5, at, from, site);
}
inline void bulk_store(void* to, const void* from, int bytes,
                       cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::bulk_store(to, from, bytes, site);
}
inline void bulk_add(float* to, const float* from, int bytes,
                     cuda_cpu::Site site = cuda_cpu::Site::here()) {
  const cuda_cpu::Reduction add = [](void* sums, const void* floats, std::size_t count) {
    for (std::size_t i = 0; i < count / sizeof(float); ++i) {
      atomicAdd(static_cast<float*>(sums) + i, static_cast<const float*>(floats)[i]);
    }
  };
  cuda_cpu::bulk_reduce(add, to, from, bytes, site);
}
inline void tensor_store_commit() { cuda_cpu::bulk_commit(); }
template <int kNewest>
void tensor_store_wait_read(cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::bulk_wait_read(kNewest, site);
}
template <int kNewest>
void tensor_store_wait(cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::bulk_wait(kNewest, site);
}
inline void shared_fence() { cuda_cpu::async_proxy_fence(); }
inline void global_fence() { cuda_cpu::async_proxy_fence(); }

// ---- Warpgroups and clusters -------------------------------------------------------------------

inline void named_barrier(int id, int threads, cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::named_barrier(id, threads, site);
}
inline void named_arrive(int id, int threads, cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::named_arrive(id, threads, site);
}
template <int kRegisters>
void registers_shrink_to(cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::set_registers(kRegisters, false, site);
}
template <int kRegisters>
void registers_grow_to(cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::set_registers(kRegisters, true, site);
}
inline bool elect_one(cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::warp_meet(
      ~0u, [](void* const*, unsigned) {}, nullptr, "elect_one()", site);
  return cuda_cpu::lane_id() == 0;
}
inline int cluster_rank() { return cuda_cpu::cluster_rank(); }
inline void cluster_sync(cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::cluster_arrive(true, site);
  cuda_cpu::cluster_wait(site);
}
inline void cluster_arrive(cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::cluster_arrive(false, site);
}
inline void cluster_wait(cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::cluster_wait(site);
}

// ---- wgmma -------------------------------------------------------------------------------------

inline void wgmma_fence() { cuda_cpu::wgmma_fence(); }
inline void wgmma_commit() { cuda_cpu::wgmma_commit(); }
template <int kNewest>
void wgmma_wait(cuda_cpu::Site site = cuda_cpu::Site::here()) {
  cuda_cpu::wgmma_wait(kNewest, site);
}

template <typename T, bool kTransposed = false, bool kTall = false, int kCount>
void wgmma(float (&sum)[kCount], std::uint64_t a, std::uint64_t b, bool add,
           cuda_cpu::Site site = cuda_cpu::Site::here()) {
  static_assert(sizeof(T) == 2 && kCount % 4 == 0 && kCount <= 128);
  cuda_cpu::wgmma(cuda_cpu::kWgmmaType<T>, sum, kCount, a, nullptr, kTransposed, b, kTall, add,
                  site);
}
template <typename T, int kCount>
void wgmma(float (&sum)[kCount], const std::uint32_t (&a)[4], std::uint64_t b, bool add,
           cuda_cpu::Site site = cuda_cpu::Site::here()) {
  static_assert(sizeof(T) == 2 && kCount % 8 == 0 && kCount <= 128);
  cuda_cpu::wgmma(cuda_cpu::kWgmmaType<T>, sum, kCount, 0, a, false, b, false, add, site);
}
template <int kCount>
void wgmma_tf32(float (&sum)[kCount], const std::uint32_t (&a)[4], std::uint64_t b, bool add,
                cuda_cpu::Site site = cuda_cpu::Site::here()) {
  static_assert(kCount % 4 == 0 && kCount <= 128);
  cuda_cpu::wgmma(cuda_cpu::Wgmma::tf32, sum, kCount, 0, a, false, b, true, add, site);
}

template <int kCount>
void wgmma_tf32(float (&sum)[kCount], std::uint64_t a, std::uint64_t b, bool add,
                cuda_cpu::Site site = cuda_cpu::Site::here()) {
  static_assert(kCount % 4 == 0 && kCount <= 128);
  cuda_cpu::wgmma(cuda_cpu::Wgmma::tf32, sum, kCount, a, nullptr, false, b, true, add, site);
}

template <int kCount>
void wgmma_fp8(float (&sum)[kCount], std::uint64_t a, std::uint64_t b, bool add,
               cuda_cpu::Site site = cuda_cpu::Site::here()) {
  static_assert(kCount % 4 == 0 && kCount <= 128);
  cuda_cpu::wgmma(cuda_cpu::Wgmma::e4m3, sum, kCount, a, nullptr, false, b, true, add, site);
}
template <int kCount>
void wgmma_fp8(float (&sum)[kCount], const std::uint32_t (&a)[4], std::uint64_t b, bool add,
               cuda_cpu::Site site = cuda_cpu::Site::here()) {
  static_assert(kCount % 4 == 0 && kCount <= 128);
  cuda_cpu::wgmma(cuda_cpu::Wgmma::e4m3, sum, kCount, 0, a, false, b, true, add, site);
}

template <bool kTransposed = false, int kCount>
void store_matrices(void* row, const std::uint32_t (&registers)[kCount],
                    cuda_cpu::Site site = cuda_cpu::Site::here()) {
  static_assert(kCount == 2 || kCount == 4);
  cuda_cpu::Stmatrix<kCount> self = {registers, {}};
  self.template meet<kTransposed>(self, "store_matrices()", site);
  if (threadIdx.x % 32 >= 8 * kCount) return;  // its address does not count
  if (reinterpret_cast<std::uintptr_t>(row) % 16 != 0) {
    cuda_cpu::fail("store_matrices(): the row at %p is not aligned to 16 bytes", row);
  }
  memcpy(row, self.row, sizeof self.row);
}

}  // namespace primitives
