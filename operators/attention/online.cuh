// The softmax between attention's two products, for the rows of a warp whose logits come a tile of
// keys at a time. A thread has elements of two rows of each 16, as mma.sync and wgmma leave their
// sums: element i is in the row 8 (i / 2 % 2) below the first, and four neighbouring lanes share a
// row.
#pragma once

#include "operators/attention/attention.h"
#include "primitives/approximate.cuh"
#include "primitives/row_parts.cuh"

namespace operators::attention {

using namespace primitives;

inline constexpr float kLog2E = 1.44269504088896340736f, kLn2 = 0.693147180559945309417f;

/// A row's running result is scaled only when its maximum has grown by more than this, as a power
/// of 2: until then exponentials are up to 2^8 times as large as they would be, which no type here
/// minds. Most tiles then scale nothing.
inline constexpr float kGrowth = 8;

/// 2^x for x <= 2^8, on the units for multiplications and additions: x = n + f, n an integer and f
/// between -1/2 and 1/2. The polynomial of f is wrong by 7.5e-5 at most, relatively (Remez), which
/// rounding to bf16 (2^-9) or fp16 (2^-11) hides. n is added to the exponent. Below 2^-126 it is
/// 2^-126.
__device__ inline float exp2_polynomial(float x) {
  constexpr float kRound = 12582912;  // 1.5 * 2^23: adding it leaves n in the lowest bits
  x = fmaxf(x, -126.0f);
  const float shifted = x + kRound, f = x - (shifted - kRound);
  const float power = fmaf(fmaf(fmaf(0.05517167f, f, 0.24261113f), f, 0.69326097f), f, 0.99992806f);
  return __int_as_float(__float_as_int(power) + (__float_as_int(shifted) << 23));
}

/// What a thread knows of its two rows.
struct OnlineRows {
  float largest[2] = {minus_infinity(), minus_infinity()};  ///< that exponentials are relative to
  float base[2] = {};  ///< the same, scaled; 0 where all logits were -inf so far
  float sum[2] = {};   ///< of the thread's own exponentials

  /// Makes exponentials of a tile's logits (64 or 16 rows by 2 kCount columns), and returns whether
  /// rows of this warp must be scaled, by `factor`, for what was summed up before. Of every 8
  /// exponentials kByPolynomial are computed by exp2_polynomial(). scale: of the logits, times
  /// log2(e), positive.
  template <int kByPolynomial, int kCount>
  __device__ __forceinline__ bool exponentials(float (&logits)[kCount], float scale,
                                               float (&factor)[2]) {
    float most[2] = {logits[0], logits[2]};
#pragma unroll
    for (int i = 1; i < kCount; ++i) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], logits[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most[r] = fmaxf(most[r], __shfl_xor_sync(kAllLanes, most[r], 1));
      most[r] = fmaxf(most[r], __shfl_xor_sync(kAllLanes, most[r], 2));
      most[r] = fmaxf(most[r], largest[r]);
    }
    // From -inf on everything grows; -inf itself does not: the difference is NaN.
    const bool grows =
        (most[0] - largest[0]) * scale > kGrowth || (most[1] - largest[1]) * scale > kGrowth;
    const bool rescale = __any_sync(kAllLanes, grows);
    if (rescale) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float to = most[r] == minus_infinity() ? 0 : most[r] * scale;
        factor[r] = largest[r] == minus_infinity() ? 0 : exp2_approximate(base[r] - to);
        sum[r] *= factor[r];
        largest[r] = most[r];
        base[r] = to;
      }
    }
    float more[2] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int r = i / 2 % 2;
      const float power = fmaf(logits[i], scale, -base[r]);
      // Neighbours take different ways, so that both units have work all the time.
      const bool polynomial = (i % 8 * kByPolynomial) % 8 + kByPolynomial >= 8 && kByPolynomial > 0;
      logits[i] = polynomial ? exp2_polynomial(power) : exp2_approximate(power);
      i / 4 % 2 == 0 ? sum[r] += logits[i] : more[r] += logits[i];
    }
    sum[0] += more[0];
    sum[1] += more[1];
    return rescale;
  }

  /// The rows' whole sums, once all tiles have come: as factors for the results, 0 for a row
  /// without keys, and as logarithms.
  __device__ __forceinline__ void finish(float (&factor)[2], float (&log_sum)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(kAllLanes, sum[r], 1);
      sum[r] += __shfl_xor_sync(kAllLanes, sum[r], 2);
      const bool none = largest[r] == minus_infinity();
      factor[r] = none ? 0 : 1 / sum[r];
      log_sum[r] = none ? minus_infinity() : fmaf(base[r], kLn2, logf(sum[r]));
    }
  }
};

}  // namespace operators::attention
