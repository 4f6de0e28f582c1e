// softmax(x W), its backward pass and its cross-entropy in fp64: what lesson 9 is held to.
//
//     logits = x W, probs = softmax(logits) row by row
//     x (B, D), W (D, C), logits and probs (B, C), row-major, dense
#pragma once

#include "common/lesson.h"
#include "common/numerics.h"
#include "operators/softmax/softmax.h"

namespace problems {

using namespace common;
using namespace operators::softmax;

/// Inputs that give logits of mean 0 and standard deviation 1/2: x is uniform in [-1, 1), of
/// variance 1/3; W is uniform in +-kWeightScale / sqrt(D), of variance 3 / (4 D). Not more, so that
/// the largest of 10^8 probabilities is within 13 times their rms, and the bound on a single
/// element (kWorstToFrobenius) is meant for it, too.
inline constexpr double kWeightScale = 1.5, kLogitRms = 0.5;

/// Bound on the relative Frobenius error of probs. An error of the logits, d, changes
///
///     p_i  by the factor  1 + d_i - sum_j p_j d_j,
///
/// so that the *absolute* errors of logits are the *relative* errors of probs, twice: once of its
/// own and once, weighted, of the others: sqrt(2), if they are independent. dot_tolerance() bounds
/// them relative to the rms of the logits. What follows is in fp32, in units of its roundoff u: the
/// differences to the maximum, of up to 4, are rounded (4), exp is within two units in the last
/// place (4), and where the maximum is found in parts there is a second of both to correct it; the
/// sum and the division (2).
double softmax_tolerance(int64_t inputs, double u_sum, double u_in = 0);

/// What few results are held to, where a sum's terms may cancel. For example, a row of x is (1, 1),
/// and the two columns of W are (1, -1) and (0, 0). Both logits are 0, and both probabilities 1/2.
/// But the first logit is 1 - 1, whose rounding error does not cancel: it is eps T_0, with eps of a
/// few roundoffs, and T_0 = sqrt(1 + 1). The second logit has no error: T_1 = 0. By the formula of
/// probs, below, the probabilities have errors of 0.79 eps and 0.35 eps, of rms 0.61 eps.
/// softmax_tolerance() has assumed sqrt(2) kLogitRms = 0.71 for the root. So `probs` becomes 0.61 /
/// 0.71 = 0.87. The rms of the reference is 0.5, so bound_of() allows 0.87 / 0.5 = 1.7 times the
/// tolerance.
///
/// In general: the rms that each result has unless its terms cancel, in units that make its
/// tolerance a bound, and 0 where there are many results. An error d_j of each logit, independent
/// of the others', is a part of T_j, the root of the sum of the squares of the logit's terms, of
/// which kLogitRms is the rms. It leaves of
///     probs    p_i (d_i - sum p_j d_j):                 p_i sqrt(T_i^2 + sum (p_j T_j)^2)
///     loss     sum p_j d_j - d_label:                   sqrt(T_label^2 + sum (p_j T_j)^2)
///     dlogits  of the loss: what it leaves of probs
/// and where softmax_tolerance() has assumed sqrt(2) kLogitRms for the root, that many times as
/// much. The gradients come from p_i (dprobs_i - sum p_j dprobs_j), which is
///     p_i sqrt(dprobs_i^2 + sum (p_j dprobs_j)^2)       if it does not cancel
/// times what of probs is more than assumed, if any; from there on they are sums of products.
struct Uncancelled {
  std::shared_ptr<double> probs = std::make_shared<double>(0), loss = std::make_shared<double>(0),
                          dx = std::make_shared<double>(0), dW = std::make_shared<double>(0);
  /// What there is beside x and W: for the gradients dprobs, for the loss labels; and of W (inputs,
  /// heads classes) so many heads, each with its softmax.
  struct Given {
    const float* dprobs = nullptr;
    const int* labels = nullptr;
    int heads = 1;
  };
  template <typename T>
  void find(const T* x, const T* W, const SoftmaxShape& shape, const Given& given) const {
    find(x, W, type_of<T>, shape, given);
  }

 private:
  void find(const void* x, const void* W, Type type, const SoftmaxShape& shape,
            const Given& given) const;
};

/// Each row of `logits` (rows, classes) becomes its softmax; a row of only -inf becomes NaN.
void softmax_fp64(double* logits, int64_t rows, int64_t classes);

/// Device memory that reference_softmax allocates while it runs.
inline double softmax_scratch(const SoftmaxShape& shape) {
  return reference_scratch(shape.rows, shape.classes, shape.inputs);
}

/// probs = softmax(x W).
template <typename T>
void reference_softmax(cublasHandle_t blas, const T* x, const T* W, double* probs,
                       const SoftmaxShape& shape) {
  reference_matmul<T>(blas, x, W, probs, shape.rows, shape.classes, shape.inputs);
  softmax_fp64(probs, shape.rows, shape.classes);
}

/// How far a gradient is from a central difference.
struct GradientCheck {
  double difference;  ///< |finite difference - <gradient, direction>|
  double slope;       ///< |<gradient, direction>|
  double bound;
  /// Ends the program if the difference is larger than the bound; else a line that says it is not.
  std::string verdict(const char* name) const;
};

/// Both check a gradient against (f(+h v) - f(-h v)) / (2 h) in fp64, for a random direction v with
/// h = 1e-6. Such a difference is off by h^2 / 6 times the third derivative, and by the roundoff of
/// f over h. With A the sum of the absolute terms of f, and a direction that changes logits by up
/// to 6 h:
///   - a third derivative of softmax or of its logarithm is at most 6 (2 * 6)^3 times its value:
///     the first part is at most 1e-12 / 6 * 10368 A < 2e-9 A;
///   - f's roundoff is some 10 units of 2^-53 per term, random: at most 1e-15 A / 1e-6 = 1e-9 A.
/// Together less than the bound, 1e-8 A.

/// Gradients of <dprobs, softmax(x W)>: dx (B, D) and dW (D, C). x, W and dprobs in fp32.
struct BackwardReference {
  const float *x, *W, *dprobs;
  double *dx, *dW;
};
GradientCheck reference_backward(cublasHandle_t blas, const BackwardReference& reference,
                                 const SoftmaxShape& shape);
/// The most device memory that it allocates.
double backward_scratch(const SoftmaxShape& shape);

/// loss (B) = -log softmax(x W)[labels], and dlogits (B, C), the gradient of the sum of losses.
struct CrossEntropyReference {
  const float *x, *W;
  const int* labels;
  double *loss, *dlogits;
};
GradientCheck reference_cross_entropy(cublasHandle_t blas, const CrossEntropyReference& reference,
                                      const SoftmaxShape& shape);
double cross_entropy_scratch(const SoftmaxShape& shape);

/// Makes three rows of four hard for a softmax; the logits of those are exact in TF32, too:
///   row % 4 == 0   +-2^100, and 2^101 for the last class: exp() of their difference to anything is
///                  0 or 1, and a sum without the last class is 0
///   row % 4 == 1   2000 to 2007: exp() would overflow without the maximum
///   row % 4 == 2   all equal
/// and in every row every third class but the last has the logit -inf. With more than 512 classes
/// so have all of the first 256, of the third 256, and so on, but the last class: kernels that know
/// a row in parts have parts of only -inf then, beside others. To that end W has special rows, 0
/// for the first, 1 for the second and 2 for -inf, and x picks them; where it does not pick row 0
/// or 1 it is zero there. (It always picks row 2: 0 * -inf would be NaN.)
inline constexpr int kSpecialInputs = 3, kEmptyPart = 256;
void make_hard(float* x, float* W, const SoftmaxShape& shape);

/// Every other row of logits becomes -inf: x has -inf at its end, where the next row begins, and
/// that row of W only 1.
void make_only_minus_infinity(float* x, float* W, const SoftmaxShape& shape);

/// For example, a kernel wrote 0.25, and NaN in a row of only -inf, and did not write a third
/// element: mark_nan() makes 0.25, -1 and NaN of the three. Verification takes NaN for an error, so
/// a NaN that should come out becomes -1 first, in the result and in the reference. What nobody
/// wrote in the result stays NaN: all of its bits are set, by which it is known.
void mark_nan(const float* in, float* out, size_t count);
void mark_nan(double* values, size_t count);

}  // namespace problems
