// softmax(scale Q K^T + mask) V of every head in fp64: what attention is held to.
//
//     out(b, s, h, :) = sum over t of p(t) V(b, t, h', :),  p = softmax over t of the logits
//     logit(t) = scale <Q(b, s, h, :), K(b, t, h', :)>,     scale = 1 / sqrt(width)
//     lse(b, h, s) = log of the sum over t of e^logit(t)
//
// h' is the head of K and V that query head h shares with its neighbours. Row-major, dense, as the
// projections leave them:
//     Q and out (batch, queries, heads, width), K and V (batch, keys, kv_heads, width): bf16, fp16
//     lse (batch, heads, queries): fp32
// Where a query sees no key, out is 0 and lse is -infinity.
#pragma once

#include <algorithm>
#include <string>

#include "common/lesson.h"
#include "common/numerics.h"
#include "operators/attention/attention.h"

namespace problems {

using namespace common;

/// The operator's shape, and what a check asks of it.
struct AttentionShape : operators::attention::AttentionShape {
  /// How many keys query s sees; it is the first ones.
  int64_t seen(int64_t s) const {
    return causal ? std::clamp<int64_t>(s + 1 + keys - queries, 0, keys) : keys;
  }
  size_t rows() const { return static_cast<size_t>(batch * heads * queries); }
  size_t query_elements() const { return rows() * static_cast<size_t>(width); }
  size_t key_elements() const { return static_cast<size_t>(batch * keys * kv_heads * width); }
  float scale() const { return 1 / std::sqrt(static_cast<float>(width)); }
};

/// The shape that a command line asks for: its N, --keys, --width, --heads, --kv-heads and --batch,
/// where 0 is the default that these options name. What no kernel could take is bad usage, as are
/// --hard-rows of fewer columns than kSpecialWidth. `causal` is left to the table.
AttentionShape attention_shape(const Lesson& lesson);

/// Q and K are uniform with variance 1, so that logits have mean 0 and standard deviation 1: large
/// enough for the maximum of a row to grow while it is read, and for the weights e^logit to differ
/// by factors of 1000; the largest of 10^10 logits is below 6.5. V is uniform in [-1, 1).
inline constexpr double kQueryRange = 1.7320508, kLogitStandard = 1;

/// Bound on the relative Frobenius error of out, whose elements have the unit roundoff `u`. An
/// error d_t of each logit changes out by sum p_t (d_t - sum p_j d_j) V_t: as out itself is a sum
/// of p_t V_t of random sign, the *absolute* errors of logits are the *relative* errors of out,
/// twice (see softmax_tolerance()). What goes into it:
///   logits   products of bf16 or fp16 are exact in fp32; their sum is dot_tolerance() over the
///            width, of terms with a sum of standard deviation kLogitStandard
///   p        is rounded by u before it is multiplied by V, one factor of two: u / sqrt(2) for
///            dot_tolerance(), over the keys; whether it was divided by its sum before or not
///   result   rounded by u
/// and in units of fp32's roundoff: the differences to the maximum, of up to 16 in powers of two
/// (16), exp within two units in the last place (4), and as many corrections of what was summed up
/// as there are new maxima, about log(10^10) / 2 (12, at random: their root).
double attention_tolerance(const AttentionShape& shape, double u);

/// Bound on the relative Frobenius error of lse, as a part of 1 or of its rms, if that is larger:
/// for one key it is a logit, for many it is about log(keys) + 1/2. Its absolute error is that of
/// logits, weighted by p; and in units of fp32's roundoff twice the maximum, the logarithm and
/// their sum, of up to 16 in powers of two (4 times 16, with the differences to the maximum), exp
/// (4), and the sum of `keys` positive terms one after the other, whose roundoff is
/// sqrt(keys / 3), at random.
double log_sum_exp_tolerance(const AttentionShape& shape);

/// In place of what cannot be compared: -infinity becomes -1, everything else stays. (A difference
/// of infinities is NaN, and verification takes NaN for an error.)
void mark_infinite(const float* in, float* out, size_t count);
void mark_infinite(double* values, size_t count);

/// A table of attention: of the shape, once its heads are known to fit.
Problem& declare_attention(Lesson& lesson, const std::string& name, const AttentionShape& shape,
                           Type type, const Work& work);

/// Query rows (of one batch element, all heads) that are converted to fp64 at a time, and whose
/// logits are computed, a head at a time: those of 1 GB.
int64_t rows_at_once(const AttentionShape& shape);

/// What one head is computed from, in fp64; rows are as far apart as those of all heads.
struct HeadFp64 {
  const double *Q, *K, *V;
};

/// Rows [first, first + rows) of one head: logits (rows, keys) are its softmax afterwards.
void attend_fp64(cublasHandle_t blas, const HeadFp64& in, double* logits, double* out, double* lse,
                 const AttentionShape& shape, int64_t first, int64_t rows);

/// Device memory that reference_attention allocates while it runs.
double attention_scratch(const AttentionShape& shape);

/// out and lse as they should be. In fp64 the logits of a head may be many gigabytes: so many rows
/// at a time that they are one. T is half, __nv_bfloat16 or double. `uncancelled`, where out
/// has few elements, becomes their rms if the terms p V did not cancel (see bound_of()), and 0
/// else.
template <typename T>
void reference_attention(cublasHandle_t blas, const T* Q, const T* K, const T* V, double* out,
                         double* lse, double* uncancelled, const AttentionShape& shape);

/// Makes the logits of most queries hard. By (s + h) % 4 of query s and head h:
///   0   +-2^17 scale: e^ of their difference to the largest is 0 or 1; and 2^18 scale for the last
///       key, which takes all of the sum of a query that sees it (scale = 1/8: 16384 and 32768)
///   1   (2^13 + 8 (t % 8)) scale: e^ would overflow without the maximum
///   2   all 0
///   3   as they were. Of 16 rows and of the next 16 in turn:
///         every second of them has only logits of -infinity: out 0, lse -infinity
///         of the first 8, or of the last 8 in turn, the first key has a logit 2^10 scale larger.
///         It is what kernels take last: then the maximum grows, and by more than exponentials have
///         room for up to a width of 128. A thread has rows of both eights, of which one grows
/// and for every query every third key but the last has the logit -infinity. To that end the first
/// kSpecialWidth columns of K hold such factors, and those of Q choose of them. No product is 0
/// times infinity, and sums of infinities have one sign: nothing becomes NaN. Gradients would, as
/// a key with an infinite element is a factor of dQ. Without `infinities` no query has only logits
/// of -infinity, and the other ones are kLeastFactor scale, whose e^ is 0, too.
inline constexpr int64_t kSpecialWidth = 6;
inline constexpr float kLeastFactor = -49152;
template <typename T>
void make_hard(T* Q, T* K, const AttentionShape& shape, bool infinities = true);

/// A table of attention: its buffers, and what its rows are held to: out, and lse.
template <typename T>
struct AttentionProblem {
  /// `hard`: see make_hard(), for a width of kSpecialWidth or more.
  AttentionProblem(Lesson& lesson, cublasHandle_t blas, const std::string& name,
                   const AttentionShape& shape, bool hard = false);

  /// Adds a row that writes out and lse.
  template <class Launch>  // or ways
  Kernel& kernel(std::string name, Role role, Launch launch) const {
    Kernel& row = problem.kernel(std::move(name), role, std::move(launch));
    if (compared.storage() != lse.storage()) {
      row.hooks.collect = [*this] { mark_infinite(lse, compared, lse.size()); };
    }
    return row;
  }
  /// Adds a row that writes out alone.
  template <class Launch>
  Kernel& kernel_without_lse(std::string name, Role role, Launch launch) const {
    Kernel& row = problem.kernel(std::move(name), role, std::move(launch));
    row.checks = {problem.checks.front()};
    return row;
  }

  AttentionShape shape;
  Problem& problem;
  Buffer<T> Q, K, V, out;
  Buffer<float> lse;
  Buffer<float> compared;  ///< lse, or that with its infinities marked, where there may be some
};

}  // namespace problems
