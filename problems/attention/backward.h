// The gradients of attention (attention.h) in fp64: what a backward pass is held to.
//
//     dV = P^T dO,   dP = dO V^T,   dS = P (dP - D),   dQ = scale dS K,   dK = scale dS^T Q
//     P = exp(scale Q K^T - log_sums),   D(s) = sum over the columns of dO(s) out(s)
//
// for each head; dK and dV are summed up over the heads of Q that share a head of K and V. A
// backward pass reads what forward has left: out, rounded to the lesson's type, and log_sums, the
// logarithms of the sums, rounded to fp32. Layouts are those of forward: d_out and dQ as Q, dK and
// dV as K.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "problems/attention/attention.h"

namespace problems {

/// Bounds on the relative Frobenius errors of the gradients, whose elements have the unit roundoff
/// `u`. Terms are of random sign: relative errors of terms are relative errors of their sum, and
/// independent ones add up as squares (dot_tolerance()). What goes into them:
///   P      its relative error is the absolute one of logit - log_sum: that of the logits, as in
///          attention_tolerance(), once and not twice, as the sum comes from forward; and in units
///          of fp32's roundoff the rounding of the logarithm, its factor log2(e) and the
///          difference, of up to 16 each, and exp (4). Hard rows (make_hard) have logits of up to
///          2^18 scale in the place of 16. Their sums have few factors that are not 0, but the
///          errors of the logits are counted for them, too
///   dV     P is rounded by u before the product over the queries of all heads that share V, one
///          factor of two (u / sqrt(2) for dot_tolerance()); the result is rounded by u
///   dP     a sum over the width: dot_tolerance() of tensor cores
///   D      out was rounded by u, so D is off by as much of its rms, which is that of dP times
///          r = sqrt(sum of p^2) <= 1. This moves dS of a whole row by p u r rms(dP), and dQ by u r
///          rms(dP) times the row's mean of K, whose rms is r, too: no more than another rounding
///          of dS by u. In dK and dV rows are independent, and the same holds
///   dS     is rounded by u before its products over the keys (dQ), or over the queries of all
///          heads that share K (dK). With D that is both factors of the terms rounded (u); the
///          result is rounded by u. The lesson's kernels for Hopper compute dS from the rounded P
///          where the width is 64: a third rounding, which the bound does not count. In the
///          records the error is 2.9e-3 with it, and 2.4e-3 without it
/// In fp16 numbers below 2^-14 are rounded in steps of 2^-24; of P and dS that is below u / 3 of
/// their rms up to 2^14 keys.
struct GradientTolerances {
  double dQ, dK, dV;
};
GradientTolerances attention_gradient_tolerances(const AttentionShape& shape, double u,
                                                 bool hard = false);

/// The least work of a backward pass: five products for forward's two; every input and output once.
Work attention_backward_work(const AttentionShape& shape);

/// In fp64; as many elements as the inputs of these names.
struct GradientsFp64 {
  double *dQ, *dK, *dV;
};

/// What the gradients' elements would be (rms) if neither terms cancelled, nor dP and D: in these
/// units GradientTolerances are bounds, see bound_of(). For example, with one key P is 1 and dP is
/// D. So dS, dQ and dK are 0, but a kernel's are differences of rounded numbers. The unit of their
/// errors then comes from the squares of D's terms.
struct UncancelledGradients {
  double dQ = 0, dK = 0, dV = 0;
};

/// Whether there are so few terms or results, for example one key, that what cancels has to be
/// known. Then reference_attention_backward finds it; otherwise it returns zeros.
bool gradients_cancel(const AttentionShape& shape);

/// Device memory that reference_attention_backward allocates while it runs.
double attention_backward_scratch(const AttentionShape& shape);

/// The gradients as they should be, of the inputs alone: P and D come from fp64, not from what
/// forward has rounded. In pieces of rows_at_once(). T is a type of the lesson, or double.
template <typename T>
UncancelledGradients reference_attention_backward(cublasHandle_t blas, const T* Q, const T* K,
                                                  const T* V, const T* d_out,
                                                  const GradientsFp64& gradients,
                                                  const AttentionShape& shape);

/// A table of attention's backward pass: its buffers, and what its rows are held to.
template <typename T>
struct AttentionBackwardProblem {
  /// `report` is told how far the reference's gradients are from finite differences
  /// (problems/gradient_check.h). `hard`: see make_hard(), without infinities, for a width of
  /// kSpecialWidth or more.
  AttentionBackwardProblem(Lesson& lesson, cublasHandle_t blas, const std::string& name,
                           const AttentionShape& shape, std::function<void(double)> report,
                           bool hard = false);

  /// Adds a row that writes dQ, dK and dV.
  template <class Launch>  // or ways
  Kernel& kernel(std::string name, Role role, Launch launch) const {
    Kernel& row = problem.kernel(std::move(name), role, std::move(launch));
    if (one_key) row.hooks.collect = [*this] { collect_of_one_key(); };
    return row;
  }

  /// Of inputs and outputs, in bytes.
  double ends() const {
    return Q.bytes() + K.bytes() + V.bytes() + d_out.bytes() + out.bytes() + log_sums.bytes() +
           dQ.bytes() + dK.bytes() + dV.bytes();
  }

  AttentionShape shape;
  Problem& problem;
  Buffer<T> Q, K, V, d_out;
  Buffer<T> out;           ///< forward's, rounded
  Buffer<float> log_sums;  ///< forward's
  Buffer<T> dQ, dK, dV;

 private:
  /// With one key P is 1 and dS is 0, and what a kernel makes of dQ and dK is the rounding errors
  /// of terms that cancel. They are held to the tolerance in units of what is left if the terms do
  /// not cancel: these buffers have the gradients plus this unit.
  struct OneKey {
    Buffer<float> dQ, dK;
  };
  void collect_of_one_key() const;

  std::optional<OneKey> one_key;
  std::shared_ptr<UncancelledGradients> uncancelled;
};

}  // namespace problems
