// Stands beside the header, so that it is compiled with the backend: in a program's code the
// compiler calls a hook before each load and store, and what the hardware does here is none of a
// kernel's.
#include "cpu/warps/warp_products.h"

#include "cpu/library/matrix_product.h"
#include "cpu/warps/fragment_product.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"

namespace cuda_cpu {

namespace {

/// As the hardware does, it ignores the 13 lowest bits.
float tf32_factor(unsigned bits) { return cuda_cpu::bit_cast<float>(bits & ~0x1fffu); }

template <class T>
void widen(const void* from, float* to, int count) {
  for (int i = 0; i < count; ++i) to[i] = static_cast<const T*>(from)[i];
}

void widen_factor(Factor type, const void* from, float* to, int count) {
  if (type == Factor::half) return widen<__half>(from, to, count);
  if (type == Factor::bfloat16) return widen<__nv_bfloat16>(from, to, count);
  for (int i = 0; i < count; ++i) {
    to[i] = tf32_factor(cuda_cpu::bit_cast<unsigned>(static_cast<const float*>(from)[i]));
  }
}

}  // namespace

template <typename T>
void Mma<T>::combine(void* const* operands, unsigned lanes) {
  if (lanes != ~0u) fail("mma without all 32 lanes of the warp");
  const auto low = [](unsigned pair) { return T::from_bits(static_cast<std::uint16_t>(pair)); };
  const auto high = [&](unsigned pair) { return low(pair >> 16); };
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

template struct Mma<__half>;
template struct Mma<__nv_bfloat16>;

void MmaTf32::combine(void* const* operands, unsigned lanes) {
  if (lanes != ~0u) fail("mma without all 32 lanes of the warp");
  alignas(64) float a[16][8], b[8][8], sum[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const MmaTf32& self = *static_cast<const MmaTf32*>(operands[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      a[g + i % 2 * 8][t + i / 2 * 4] = tf32_factor(self.a[i]);
      sum[g + i / 2 * 8][2 * t + i % 2] = self.sum[i];
    }
    for (int i = 0; i < 2; ++i) b[t + i * 4][g] = tf32_factor(self.b[i]);
  }
  multiply_small(a[0], b[0], sum[0], sum[0], 16, 8, 8);
  for (int lane = 0; lane < 32; ++lane) {
    const MmaTf32& self = *static_cast<const MmaTf32*>(operands[lane]);
    for (int i = 0; i < 4; ++i) {
      self.sum[i] = sum[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
    }
  }
}

void FragmentProduct::combine(void* const* operands, unsigned lanes) {
  if (lanes != ~0u) fail("mma_sync() without all 32 lanes of the warp");
  alignas(64) float a[32 * 16], b[16 * 32], sums[16 * 16];
  const FragmentProduct& first = *static_cast<const FragmentProduct*>(operands[0]);
  const int m = first.m, n = first.n, k = first.k;
  const int of_a = m * k / 32, of_b = k * n / 32, of_sums = m * n / 32;
  for (int lane = 0; lane < 32; ++lane) {
    const FragmentProduct& self = *static_cast<const FragmentProduct*>(operands[lane]);
    widen_factor(first.factors, self.a, a + lane * of_a, of_a);
    widen_factor(first.factors, self.b, b + lane * of_b, of_b);
    (first.half_c ? widen<__half> : widen<float>)(self.c, sums + lane * of_sums, of_sums);
  }
  multiply_small(a, b, sums, sums, m, n, k);
  for (int lane = 0; lane < 32; ++lane) {
    void* const d = static_cast<const FragmentProduct*>(operands[lane])->d;
    for (int i = 0; i < of_sums; ++i) {
      const float sum = sums[lane * of_sums + i];
      if (first.half_d) {
        static_cast<__half*>(d)[i] = sum;
      } else {
        static_cast<float*>(d)[i] = sum;
      }
    }
  }
}

}  // namespace cuda_cpu
