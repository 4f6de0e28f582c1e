// The reference of lesson 10 in fp64, on purpose made another way than the lesson's kernels: the
// product of two blades comes from sorting lists of basis vectors, its terms stand in a table that
// is read at run time, and the gates have their gradients by the chain rule, factor by factor.
//
//     x' = x gate(x_0), y' = y gate(y_0)               gate(s) = (1 + erf(s / sqrt 2)) / 2
//     z_k = sum over blades i, j with e_i e_j = sign e_k of  w[triple(i, k, j)] sign x'_i y'_j
//     out_k = z_k / sqrt(mean over features of |z_c|^2 + 1e-6)     c the grade of k, if normed
//
// x, y, out (blades, batch, features) and w (features, triples), row-major. |z_c|^2 is the plain
// sum of the squares of the coefficients of grade c, whatever the metric. Blades are ordered by
// grade, those of a grade by the bits of their basis vectors (e1 is bit 0); triples by grade of x,
// of the result, of y, those without a product left out. The first p basis vectors square to +1,
// the next q to -1, the last r to 0.
#pragma once

#include <deque>
#include <utility>
#include <vector>

#include "common/lesson.h"
#include "common/numerics.h"
#include "operators/clifford/tensors.h"

namespace problems {

using namespace common;
using namespace operators::clifford;

struct CliffordShape {
  int p, q, r;  ///< the algebra's signature
  int batch, features;
  bool normed;
  bool connected = false;  ///< w (triples, features, features): see connected.h

  int blades() const { return 1 << (p + q + r); }
  int grades() const { return p + q + r + 1; }
  size_t plane() const { return static_cast<size_t>(batch) * static_cast<size_t>(features); }
  size_t elements() const { return static_cast<size_t>(blades()) * plane(); }

  /// Bound on the relative Frobenius error of `out` in fp32; see clifford.cu.
  double tolerance() const;
  /// Of dx and dy, and of dw.
  double gradient_tolerance() const;
  double weight_gradient_tolerance() const;
  /// Of sums of `length` products on tensor cores, with so many such errors.
  double connected_tolerance(double length, int errors) const;
  /// How much an error of z can grow, relatively, when a row is divided by its rms.
  double norm_amplification() const;
  /// Of two basis vectors, in which turning is no rotation, but a boost or a translation.
  int stretching_pairs() const;
  /// So few that it would be large if rows were taken as they come.
  bool few_features() const;

 private:
  double likely_amplification() const;
};

class ConnectedReference;

class CliffordReference {
 public:
  explicit CliffordReference(CliffordShape shape);

  const CliffordShape& shape() const { return shape_; }
  int triples() const { return static_cast<int>(triples_.size()); }
  /// How many there are: one for each feature and triple, or a matrix for each triple.
  size_t weights() const {
    const size_t features = static_cast<size_t>(shape_.features);
    return triples_.size() * features * (shape_.connected ? features : 1);
  }
  /// Device memory that the functions below allocate while they run.
  double scratch_bytes() const;

  void forward(const float* x, const float* y, const float* w, double* out) const;

  /// The gradients of sum(d_out * out).
  void backward(const float* x, const float* y, const float* w, const float* d_out, double* dx,
                double* dy, double* dw) const;

  /// Compares them with central differences of that sum, as `forward` computes it, along a random
  /// direction of each of x, y and w. Ends the program if they do not agree; returns the largest
  /// difference, in units of the gradient's norm.
  double check_gradients(const float* x, const float* y, const float* w, const float* d_out,
                         const double* dx, const double* dy, const double* dw) const;

  /// Gives the last feature larger weights, and the last row a larger d_out; see last_term.cuh.
  void enlarge_last_terms(float* w, float* d_out = nullptr) const;

  /// Draws other x and y for rows that the norm would make inaccurate, and other d_out.
  void draw_rows_again(float* x, float* y, const float* w, float* d_out = nullptr) const;

  /// Replaces x by R x ~R (~: reversed), R a product of a rotation, boost or translation for
  /// each two basis vectors.
  void turn(float* x) const;
  void turn(double* x) const;
  /// Bound on the relative Frobenius error of a product of turned inputs: these are rounded, and a
  /// boost makes some coefficients larger than the result that they cancel to.
  double turned_tolerance() const;

  /// sign e_result = e_left e_right, where they do not multiply to 0.
  struct Term {
    int left, right, result, triple;
    double sign;
  };

 private:
  struct Step {
    double x = 0, y = 0, w = 0;
    bool squares = false;
  };
  void product(const float* x, const float* y, const float* w, Step step, double* z) const;
  double loss(const float* x, const float* y, const float* w, const float* d_out, Step step,
              double* z) const;
  ConnectedReference connected() const;
  template <typename T>
  void turn_any(T* x) const;

  CliffordShape shape_;
  std::vector<std::vector<int>> blades_;  ///< the sorted basis vectors of each
  std::vector<std::vector<int>> triples_;
  std::vector<Term> terms_;
  std::vector<int> first_;  ///< blade of each grade, and the number of blades
};

/// A table: its tensors are an operator's.
struct CliffordTable : CliffordTensors {
  Problem& problem;
  Buffer<float> result;  ///< `out`
};

/// The tables of a run: one size, or those of --sweep; forward, and forward + backward. With
/// --turned, inputs are turned (rotated, boosted, moved) before any kernel sees them, and the
/// result has to be that of the inputs as they were, turned.
class CliffordTables {
 public:
  /// Of Cl(p, q, r), of which the lesson says that it has so many grade triples.
  CliffordTables(Lesson& lesson, int p, int q, int r, int triples, bool connected = false);

  const std::deque<CliffordReference>& sizes() const { return references_; }
  /// Each is a table, whose kernels take so many floating-point operations per multivector.
  CliffordTable forward(const CliffordReference& reference, double flops);
  std::pair<CliffordTable, CliffordGradients> backward(const CliffordReference& reference,
                                                       double flops);
  /// A line after the tables: how many multiply-adds the lesson's product takes, how many it would
  /// take if every term had its weight, and how many its gradients take.
  void note_operations(int triples, int product, int written_out, int gradients);

 private:
  CliffordTable tensors(const CliffordReference& reference, const char* name, double flops,
                        int tensors, int weights);

  Lesson& lesson_;
  std::deque<CliffordReference> references_;
  double worst_ = 0;   ///< of the differences between gradients and finite differences
  int unchecked_ = 0;  ///< gradients
};

}  // namespace problems
