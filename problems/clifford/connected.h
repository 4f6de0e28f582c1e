// The fully connected product of the bonus lesson in fp64: what CliffordReference does where a
// grade triple has a matrix of weights (features, features) instead of a weight per feature. For
// one triple at a time it makes the planes of products that the lesson's kernels avoid:
//
//     P_t,k = sum over i, j with e_i e_j = sign e_k of  sign x'_i y'_j    z_k = sum of P_t,k w[t]
//     d_t,k = dz_k w[t]^T             dx'_i += sign y'_j d_t,k    dy'_j += sign x'_i d_t,k
//     dw[t] = sum over k of P_t,k^T dz_k
#pragma once

#include "problems/clifford/clifford.h"

namespace problems {

using namespace common;
using namespace operators::clifford;

class ConnectedReference {
 public:
  using Term = CliffordReference::Term;
  /// `results[t]`: first blade of triple t's result, and how many there are.
  ConnectedReference(const CliffordShape& shape, const std::vector<Term>& terms,
                     std::vector<std::pair<int, int>> results);

  /// Device memory that the functions below allocate while they run.
  double scratch_bytes() const;

  /// z before the norm. Inputs are moved by so much along a random direction. With `squares` each
  /// term is replaced by its square.
  void product(const float* x, const float* y, const float* w, double x_step, double y_step,
               double w_step, bool squares, double* z) const;
  void gradients(const float* x, const float* y, const float* w, const double* dz, double* dx,
                 double* dy, double* dw) const;

 private:
  size_t weights() const { return static_cast<size_t>(shape_.features) * shape_.features; }
  size_t planes() const;  ///< elements of the planes of one triple, at most
  std::vector<Term> terms_of(int triple) const;

  CliffordShape shape_;
  std::vector<Term> terms_;
  std::vector<std::pair<int, int>> results_;
};

}  // namespace problems
