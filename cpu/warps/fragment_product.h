// nvcuda::wmma's mma_sync(), whose lanes hand over their fragments.
#pragma once

namespace cuda_cpu {

enum class Factor { half, bfloat16, tf32 };

/// A lane's part in d = a * b + c, for a of m x k and b of k x n elements. Of each matrix it has
/// one of 32 equal pieces, by rows. c and d are floats or halves.
struct FragmentProduct {
  void* d;
  const void *a, *b, *c;
  int m, n, k;
  Factor factors;
  bool half_d, half_c;

  static void combine(void* const* operands, unsigned lanes);
};

}  // namespace cuda_cpu
