// What the words of primitives/mma.cuh mean on the CPU: lanes hand over their operands, and the
// last one to arrive computes.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/execution/cuda_cpu.h"
#include "cpu/execution/later_than_cpp17.h"
#include "cpu/hopper/matrix_moves.h"
#include "cpu/library/matrix_product.h"

namespace cuda_cpu {

/// A lane's part in mma_m16n8k16.
template <typename T>
struct Mma {
  float (&sum)[4];
  const unsigned (&a)[4];
  unsigned b[2];

  static float low(unsigned pair) { return T::from_bits(static_cast<uint16_t>(pair)); }
  static float high(unsigned pair) { return T::from_bits(static_cast<uint16_t>(pair >> 16)); }

  static void combine(void* const* operands, unsigned lanes) {
    if (lanes != ~0u) fail("mma without all 32 lanes of the warp");
    alignas(64) float a[16][16], b[16][8], sum[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const Mma& self = *static_cast<const Mma*>(operands[lane]);
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 4; ++i) {
        a[g + i % 2 * 8][2 * t + i / 2 * 8] = low(self.a[i]);
        a[g + i % 2 * 8][2 * t + i / 2 * 8 + 1] = high(self.a[i]);
        sum[g + i / 2 * 8][2 * t + i % 2] = self.sum[i];
      }
      for (int i = 0; i < 2; ++i) {
        b[2 * t + i * 8][g] = low(self.b[i]);
        b[2 * t + i * 8 + 1][g] = high(self.b[i]);
      }
    }
    multiply_small(a[0], b[0], sum[0], sum[0], 16, 8, 16);
    for (int lane = 0; lane < 32; ++lane) {
      const Mma& self = *static_cast<const Mma*>(operands[lane]);
      for (int i = 0; i < 4; ++i) {
        self.sum[i] = sum[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
      }
    }
  }
};

/// A lane's part in mma_m16n8k8_tf32. As the hardware does, it ignores the 13 lowest bits.
struct MmaTf32 {
  float (&sum)[4];
  const unsigned (&a)[4];
  unsigned b[2];

  static float element(unsigned bits) { return cuda_cpu::bit_cast<float>(bits & ~0x1fffu); }

  static void combine(void* const* operands, unsigned lanes) {
    if (lanes != ~0u) fail("mma without all 32 lanes of the warp");
    alignas(64) float a[16][8], b[8][8], sum[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const MmaTf32& self = *static_cast<const MmaTf32*>(operands[lane]);
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 4; ++i) {
        a[g + i % 2 * 8][t + i / 2 * 4] = element(self.a[i]);
        sum[g + i / 2 * 8][2 * t + i % 2] = self.sum[i];
      }
      for (int i = 0; i < 2; ++i) b[t + i * 4][g] = element(self.b[i]);
    }
    multiply_small(a[0], b[0], sum[0], sum[0], 16, 8, 8);
    for (int lane = 0; lane < 32; ++lane) {
      const MmaTf32& self = *static_cast<const MmaTf32*>(operands[lane]);
      for (int i = 0; i < 4; ++i) {
        self.sum[i] = sum[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
      }
    }
  }
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
