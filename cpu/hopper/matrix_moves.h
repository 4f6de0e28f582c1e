// ldmatrix and stmatrix: the lanes of a warp hand over rows and registers, and the last one to
// arrive distributes them.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/execution/cuda_cpu.h"

namespace cuda_cpu {

/// A lane's part in ldmatrix: the row that it fetched, and the registers that it receives.
struct Ldmatrix {
  alignas(16) uint16_t row[8];
  unsigned (&matrices)[4];

  template <bool kTransposed>
  static void combine(void* const* operands, unsigned lanes) {
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

  template <bool kTransposed>
  static void run(unsigned (&matrices)[4], const void* row) {
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) {
      fail("ldmatrix: the row at %p is not aligned to 16 bytes", row);
    }
    Ldmatrix self = {{}, matrices};
    memcpy(self.row, row, sizeof self.row);
    meet<kTransposed>(self, Site::here());
  }
  template <bool kTransposed>
  static void meet(Ldmatrix& self, Site site) {
    warp_meet(~0u, combine<kTransposed>, &self, "ldmatrix", site);
  }
};

/// A lane's part in stmatrix: the registers that it gives, and the row that it writes.
template <int kCount>
struct Stmatrix {
  const std::uint32_t* registers;
  alignas(16) std::uint16_t row[8];

  template <bool kTransposed>
  static void combine(void* const* operands, unsigned lanes) {
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

  template <bool kTransposed>
  static void meet(Stmatrix& self, const char* operation, Site site) {
    warp_meet(~0u, combine<kTransposed>, &self, operation, site);
  }
};

}  // namespace cuda_cpu
