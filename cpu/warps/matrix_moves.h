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
  static void combine(void* const* operands, unsigned lanes);

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
  static void combine(void* const* operands, unsigned lanes);

  template <bool kTransposed>
  static void meet(Stmatrix& self, const char* operation, Site site) {
    warp_meet(~0u, combine<kTransposed>, &self, operation, site);
  }
};

}  // namespace cuda_cpu
