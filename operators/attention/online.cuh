// The softmax between attention's two products, for the rows of a warp whose logits come a tile of
// keys at a time. A thread has elements of two rows of each 16, as mma.sync and wgmma leave their
// sums: element i is in the row 8 (i / 2 % 2) below the first, and four neighbouring lanes share a
// row.
#pragma once

#include <cuda_fp16.h>

#include <cmath>

#include "operators/attention/attention.h"
#include "primitives/approximate.cuh"
#include "primitives/row_parts.cuh"

namespace operators::attention {

using namespace primitives;

inline constexpr float kLog2E = 1.44269504088896340736f, kLn2 = 0.693147180559945309417f;

/// By less a base does not change: exponentials of up to 2^8 are as good as those of up to 1.
inline constexpr float kGrowth = 8;

/// How large the exponentials of a tile may become, in sum, before a new maximum is looked for: far
/// below what T, and sums in fp32, can hold.
template <typename T>
inline constexpr float kMostExponentials = 0x1p64f;
template <>
inline constexpr float kMostExponentials<half> = 0x1p14f;

/// If a base, as an exponent of 2, is larger than this, the maximum is subtracted from the logits
/// before they are scaled. Otherwise an FMA subtracts a rounded base from a product that is not
/// rounded. All exponents of a row are then off by what its base has been rounded by. The row's sum
/// makes good for it. But it must not be more than 1, or an exponential may overflow or vanish.
inline constexpr float kLargestProduct = 0x1p24f;

/// The sum of exponentials of a row, or of a part: sum * 2^base. The two are kept apart: where
/// the base is large, the logarithm of both together has lost the sum.
struct PartSum {
  float base, sum;  ///< -infinity and 0 of a row without keys

  __device__ float logarithm() const {
    return base == minus_infinity() ? base : fmaf(base, kLn2, logf(sum));
  }
};

/// What a thread knows of its two rows. Exponentials are relative to `base`. Which base that is
/// does not matter for the result, as long as nothing overflows, and as long as not all of a row
/// underflows. So it is the maximum of the first tile in which the row has logits; and later ones
/// need not be compared with it: that their exponentials became too large shows in the sum.
struct OnlineRows {
  float base[2] = {NAN, NAN};  ///< in logits times scale; NaN before the first logit
  float sum[2] = {};           ///< of the thread's own exponentials
  bool large = false;          ///< in logits: a row of the warp is beyond kLargestProduct

  /// Makes exponentials of a tile's logits (16 rows by 2 kCount columns), relative to the base that
  /// there is. Returns whether that was right for all rows of the warp; if not, the logits are
  /// lost, and the sums are as before. scale: of the logits, times log2(e), positive.
  template <typename T, int kCount>
  __device__ __forceinline__ bool try_exponentials(float (&logits)[kCount], float scale) {
    float more[2];
    sum_of_exponentials(more, logits, scale);
    // Written so that NaN is too large.
    const bool right = more[0] <= kMostExponentials<T> && more[1] <= kMostExponentials<T>;
    if (!__all_sync(kAllLanes, right)) return false;
    sum[0] += more[0];
    sum[1] += more[1];
    return true;
  }

  /// The same with a base that is large enough for these logits, too. `factor` is what has been
  /// summed up for a row must be multiplied by.
  template <int kCount>
  __device__ __forceinline__ void exponentials(float (&logits)[kCount], float scale,
                                               float (&factor)[2]) {
    float most[2];
    find_largest(most, logits);
    grow(most, scale, factor);
    float more[2];
    sum_of_exponentials(more, logits, scale);
    add(more, logits);
  }

  /// The same for who looks at each tile's maximum: the base grows only if it has to by more than
  /// kGrowth. Returns whether that was so in a row of the warp; only then there is a `factor`.
  template <int kCount>
  __device__ __forceinline__ bool tile_exponentials(float (&logits)[kCount], float scale,
                                                    float (&factor)[2]) {
    float most[2];
    find_largest(most, logits);
    bool grows = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float growth = large ? (most[r] - base[r]) * scale : most[r] * scale - base[r];
      // Written so that a base that is NaN grows, but not to -inf.
      grows = grows || (!(growth <= kGrowth) && most[r] != minus_infinity());
    }
    const bool rescale = __any_sync(kAllLanes, grows);
    if (rescale) grow(most, scale, factor);
    float more[2];
    sum_of_exponentials(more, logits, scale);
    add(more, logits);
    return rescale;
  }

  /// The rows' whole sums, once all tiles have come, and the factors for the results: 0 for a row
  /// without keys.
  __device__ __forceinline__ void finish(float scale, float (&factor)[2], PartSum (&whole)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = lanes_sum<4>(sum[r]);
      const bool none = isnan(base[r]);
      factor[r] = none ? 0 : 1 / sum[r];
      whole[r] =
          none ? PartSum{minus_infinity(), 0} : PartSum{large ? base[r] * scale : base[r], sum[r]};
    }
  }

 private:
  /// The largest logits of the rows.
  template <int kCount>
  static __device__ __forceinline__ void find_largest(float (&most)[2],
                                                      const float (&logits)[kCount]) {
    most[0] = logits[0];
    most[1] = logits[2];
#pragma unroll
    for (int i = 1; i < kCount; ++i) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], logits[i]);
    for (float& of_row : most) of_row = lanes_max<4>(of_row);
  }

  /// All of the warp call this, and then have the same `large`.
  __device__ __forceinline__ void grow(const float (&most)[2], float scale, float (&factor)[2]) {
    float to[2], power[2];
    bool beyond = large;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      to[r] = most[r] == minus_infinity() ? base[r] : fmaxf(most[r] * scale, base[r]);
      power[r] = base[r] - to[r];
      beyond = beyond || fabsf(to[r]) > kLargestProduct;
    }
    if (__any_sync(kAllLanes, beyond)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float old = large ? base[r] : base[r] / scale;
        to[r] = most[r] == minus_infinity() ? old : fmaxf(most[r], old);
        // Where the base was a product, what is subtracted from it must not be rounded, either.
        power[r] = large ? (old - to[r]) * scale : fmaf(-to[r], scale, base[r]);
      }
      large = true;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] = isnan(base[r]) ? 0 : exp2_approximate(power[r]);
      sum[r] *= factor[r];
      base[r] = to[r];
    }
  }

  /// Adds the exponentials of a tile. Where all of a row was -inf so far they are 0, not NaN.
  template <int kCount>
  __device__ __forceinline__ void add(const float (&more)[2], float (&logits)[kCount]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] += isnan(base[r]) ? 0 : more[r];
    if (isnan(base[0]) || isnan(base[1])) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (isnan(base[i / 2 % 2])) logits[i] = 0;
      }
    }
  }

  template <int kCount>
  __device__ __forceinline__ void sum_of_exponentials(float (&all)[2], float (&logits)[kCount],
                                                      float scale) const {
    float from[2] = {base[0], base[1]};  // each product
    if (large) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) logits[i] -= base[i / 2 % 2];
      from[0] = from[1] = 0;
    }
    float more[2][2] = {};  // two chains for each row: a chain waits for each of its additions
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float power = fmaf(logits[i], scale, -from[i / 2 % 2]);
      logits[i] = exp2_approximate(power);
      more[i / 2 % 2][i / 4 % 2] += logits[i];
    }
    all[0] = more[0][0] + more[0][1];
    all[1] = more[1][0] + more[1][1];
  }
};

}  // namespace operators::attention
