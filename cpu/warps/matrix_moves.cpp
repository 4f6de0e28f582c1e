// Here and not in the header, for the reason that warp_products.cpp gives.
#include "cpu/warps/matrix_moves.h"

namespace cuda_cpu {

template <bool kTransposed>
void Ldmatrix::combine(void* const* operands, unsigned lanes) {
  if (lanes != ~0u) fail("ldmatrix without all 32 lanes of the warp");
  for (int lane = 0; lane < 32; ++lane) {
    Ldmatrix& self = *static_cast<Ldmatrix*>(operands[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      const auto element = [&](int row, int col) -> unsigned {
        return static_cast<const Ldmatrix*>(operands[8 * i + row])->row[col];
      };
      self.matrices[i] = kTransposed ? element(2 * t, g) | element(2 * t + 1, g) << 16
                                     : element(g, 2 * t) | element(g, 2 * t + 1) << 16;
    }
  }
}

template void Ldmatrix::combine<false>(void* const*, unsigned);
template void Ldmatrix::combine<true>(void* const*, unsigned);

template <int kCount>
template <bool kTransposed>
void Stmatrix<kCount>::combine(void* const* operands, unsigned lanes) {
  if (lanes != ~0u) fail("stmatrix without all 32 lanes of the warp");
  for (int lane = 0; lane < 8 * kCount; ++lane) {
    Stmatrix& to = *static_cast<Stmatrix*>(operands[lane]);
    for (int i = 0; i < 8; ++i) {
      const int from = kTransposed ? i * 4 + lane % 8 / 2 : lane % 8 * 4 + i / 2;
      const int half = (kTransposed ? lane : i) % 2;
      to.row[i] = static_cast<std::uint16_t>(
          static_cast<const Stmatrix*>(operands[from])->registers[lane / 8] >> 16 * half);
    }
  }
}

#define CUDA_CPU_STMATRIX(COUNT)                                         \
  template void Stmatrix<COUNT>::combine<false>(void* const*, unsigned); \
  template void Stmatrix<COUNT>::combine<true>(void* const*, unsigned)
CUDA_CPU_STMATRIX(1);
CUDA_CPU_STMATRIX(2);
CUDA_CPU_STMATRIX(4);
#undef CUDA_CPU_STMATRIX

}  // namespace cuda_cpu
