// What the words of primitives/mma.cuh mean on the CPU: lanes hand over their operands, and the
// last one to arrive computes.
#pragma once

#include <cstdint>

#include "cpu/execution/cuda_cpu.h"
#include "cpu/execution/later_than_cpp17.h"
#include "cpu/warps/matrix_moves.h"

namespace cuda_cpu {

/// A lane's part in mma_m16n8k16. T: half or bfloat16.
template <typename T>
struct Mma {
  float (&sum)[4];
  const unsigned (&a)[4];
  unsigned b[2];

  static void combine(void* const* operands, unsigned lanes);
};

/// A lane's part in mma_m16n8k8_tf32. As the hardware does, it ignores the 13 lowest bits.
struct MmaTf32 {
  float (&sum)[4];
  const unsigned (&a)[4];
  unsigned b[2];

  static void combine(void* const* operands, unsigned lanes);
};

}  // namespace cuda_cpu

namespace primitives {

inline void ldmatrix_x4(unsigned (&matrices)[4], const void* row) {
  cuda_cpu::Ldmatrix::run<false>(matrices, row);
}
inline void ldmatrix_x4_trans(unsigned (&matrices)[4], const void* row) {
  cuda_cpu::Ldmatrix::run<true>(matrices, row);
}
template <typename T>
void mma_m16n8k16(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  cuda_cpu::Mma<T> self = {sum, a, {b0, b1}};
  cuda_cpu::warp_meet(~0u, cuda_cpu::Mma<T>::combine, &self, "mma", cuda_cpu::Site::here());
}

inline unsigned to_tf32(float value) {
  const unsigned bits = cuda_cpu::bit_cast<unsigned>(value);
  if ((bits & 0x7f800000) == 0x7f800000) return bits;
  return (bits + 0x1000) & ~0x1fffu;
}
inline void mma_m16n8k8_tf32(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  cuda_cpu::MmaTf32 self = {sum, a, {b0, b1}};
  cuda_cpu::warp_meet(~0u, cuda_cpu::MmaTf32::combine, &self, "mma", cuda_cpu::Site::here());
}

}  // namespace primitives
