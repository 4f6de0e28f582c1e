#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>

#include "primitives/launch.h"
#include "problems/clifford/clifford.h"
#include "problems/clifford/connected.h"
#include "problems/clifford/fp64.cuh"
#include "problems/gradient_check.h"
#include "problems/last_term.cuh"
#include "problems/workspace.h"

namespace problems {

using namespace primitives;

namespace {

constexpr double kEpsilon = 1e-6;
constexpr int kMaxBlades = 32;
constexpr double kStep = 1e-5;             // of a central difference, before norm_amplification
const double kDeviation = std::sqrt(3.0);  // scale of numbers of variance 1, as after a norm
constexpr double kTurn = 0.2;              // angle, rapidity or distance, of two vectors

using fp64::blocks, fp64::direction, fp64::gate, fp64::gate_slope, fp64::kThreads, fp64::OnDevice;
using Term = CliffordReference::Term;

/// One thread a (row, feature): z before the norm. Inputs are moved by `step` along the direction.
/// With `squares` each term is replaced by its square.
__global__ void product_kernel(const float* x, const float* y, const float* w, double* z,
                               const Term* terms, int term_count, int blades, int triples,
                               size_t plane, int features, double x_step, double y_step,
                               double w_step, bool squares) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= plane) return;
  double left[kMaxBlades] = {}, right[kMaxBlades] = {}, sum[kMaxBlades];
  for (int i = 0; i < blades; ++i) {
    const size_t element = i * plane + at;
    left[i] = static_cast<double>(x[element]) + x_step * direction(element);
    right[i] = static_cast<double>(y[element]) + y_step * direction(element);
    sum[i] = 0;
  }
  const double left_gate = gate(left[0]), right_gate = gate(right[0]);
  for (int i = 0; i < blades; ++i) {
    left[i] *= left_gate;
    right[i] *= right_gate;
  }
  const size_t first_weight = at % features * triples;
  for (int n = 0; n < term_count; ++n) {
    const Term term = terms[n];
    const size_t element = first_weight + term.triple;
    const double weight = static_cast<double>(w[element]) + w_step * direction(element);
    const double product = weight * term.sign * left[term.left] * right[term.right];
    sum[term.result] += squares ? product * product : product;
  }
  for (int i = 0; i < blades; ++i) z[i * plane + at] = sum[i];
}

/// sums[row * grades + c] = sum over the features and the blades of grade c of a * b. A warp each.
template <typename T>
__global__ void grade_sums_kernel(const T* a, const double* b, double* sums, const int* first,
                                  int grades, size_t plane, int features) {
  const int grade = blockIdx.x % grades;
  const size_t row = blockIdx.x / grades;
  double sum = 0;
  for (int blade = first[grade]; blade < first[grade + 1]; ++blade) {
    const size_t start = blade * plane + row * features;
    for (int f = threadIdx.x; f < features; f += 32) {
      sum += static_cast<double>(a[start + f]) * b[start + f];
    }
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

__device__ double inverse_rms(double squares, int features) {
  return 1 / sqrt(squares / features + kEpsilon);
}

/// One thread an element: out = z / rms(z).
__global__ void normalize_kernel(const double* z, double* out, const double* squares,
                                 const int* grade_of, int grades, size_t plane, int features,
                                 size_t count) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const size_t row = i % plane / features;
  out[i] = z[i] * inverse_rms(squares[row * grades + grade_of[i / plane]], features);
}

/// One thread an element: from z and the gradient of out, that of z, in place of z. With
/// r = (sum(z^2) / F + e)^(-1/2), dr/dz = -z r^3 / F: dz = r d_out - z r^3 sum(d_out z) / F.
__global__ void normalize_gradient_kernel(double* z, const float* d_out, const double* squares,
                                          const double* products, const int* grade_of, int grades,
                                          size_t plane, int features, size_t count, bool normed) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const size_t sum = i % plane / features * grades + grade_of[i / plane];
  const double r = inverse_rms(squares[sum], features), d = d_out[i];
  z[i] = normed ? r * d - z[i] * r * r * r * products[sum] / features : d;
}

/// One thread a (row, feature): dx and dy from dz.
__global__ void input_gradient_kernel(const float* x, const float* y, const float* w,
                                      const double* dz, double* dx, double* dy, const Term* terms,
                                      int term_count, int blades, int triples, size_t plane,
                                      int features) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= plane) return;
  const double left_gate = gate(x[at]), right_gate = gate(y[at]);
  double d_left[kMaxBlades], d_right[kMaxBlades];
  for (int i = 0; i < blades; ++i) d_left[i] = d_right[i] = 0;
  for (int n = 0; n < term_count; ++n) {
    const Term term = terms[n];
    const double scaled = term.sign *
                          static_cast<double>(w[at % features * triples + term.triple]) *
                          dz[term.result * plane + at];
    d_left[term.left] += scaled * right_gate * static_cast<double>(y[term.right * plane + at]);
    d_right[term.right] += scaled * left_gate * static_cast<double>(x[term.left * plane + at]);
  }
  double d_left_gate = 0, d_right_gate = 0;
  for (int i = 0; i < blades; ++i) {
    d_left_gate += d_left[i] * static_cast<double>(x[i * plane + at]);
    d_right_gate += d_right[i] * static_cast<double>(y[i * plane + at]);
  }
  for (int i = 0; i < blades; ++i) {
    dx[i * plane + at] = d_left[i] * left_gate + (i == 0 ? d_left_gate * gate_slope(x[at]) : 0);
    dy[i * plane + at] = d_right[i] * right_gate + (i == 0 ? d_right_gate * gate_slope(y[at]) : 0);
  }
}

/// One thread a (triple, feature), neighbours in the feature: sums over the rows in their order.
__global__ void weight_gradient_kernel(const float* x, const float* y, const double* dz, double* dw,
                                       const Term* terms, int term_count, int triples, size_t plane,
                                       int features) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= static_cast<size_t>(features) * triples) return;
  const int triple = static_cast<int>(at / features);
  const size_t feature = at % features;
  double sum = 0;
  for (size_t i = feature; i < plane; i += features) {
    double products = 0;
    for (int n = 0; n < term_count; ++n) {
      const Term term = terms[n];
      if (term.triple != triple) continue;
      products += term.sign * static_cast<double>(x[term.left * plane + i]) *
                  static_cast<double>(y[term.right * plane + i]) * dz[term.result * plane + i];
    }
    sum += products * gate(x[i]) * gate(y[i]);
  }
  dw[feature * triples + triple] = sum;
}

constexpr size_t kChunk = 4096;  // elements that a warp of along_direction_kernel adds up

/// sums[2 i] = (gradient, direction), sums[2 i + 1] = |gradient|^2 over the i-th chunk.
__global__ void along_direction_kernel(const double* gradient, size_t count, double* sums) {
  double along = 0, squares = 0;
  const size_t start = blockIdx.x * kChunk, end = min(count, start + kChunk);
  for (size_t i = start + threadIdx.x; i < end; i += 32) {
    along += gradient[i] * direction(i);
    squares += gradient[i] * gradient[i];
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    along += __shfl_xor_sync(0xffffffffu, along, lanes);
    squares += __shfl_xor_sync(0xffffffffu, squares, lanes);
  }
  if (threadIdx.x == 0) {
    sums[2 * blockIdx.x] = along;
    sums[2 * blockIdx.x + 1] = squares;
  }
}

/// One thread a (row, feature): x = R x ~R with R = c + s e_plane, in fp64.
template <typename T>
__global__ void turn_kernel(T* x, const Term* terms, int term_count, int blades, size_t count,
                            int bivector, double c, double s) {
  const size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= count) return;
  double once[kMaxBlades], twice[kMaxBlades];
  for (int i = 0; i < blades; ++i) once[i] = twice[i] = 0;
  for (int n = 0; n < term_count; ++n) {
    const Term term = terms[n];
    if (term.left != 0 && term.left != bivector) continue;
    once[term.result] +=
        (term.left == 0 ? c : s) * term.sign * static_cast<double>(x[term.right * count + at]);
  }
  for (int n = 0; n < term_count; ++n) {
    const Term term = terms[n];
    if (term.right != 0 && term.right != bivector) continue;
    twice[term.result] += (term.right == 0 ? c : -s) * term.sign * once[term.left];
  }
  for (int i = 0; i < blades; ++i) x[i * count + at] = static_cast<T>(twice[i]);
}

/// One thread an element: those of marked rows become numbers that follow from what they were, as
/// if drawn at random in [-scale, scale).
__global__ void draw_again_kernel(float* tensor, const char* marked, double scale, size_t plane,
                                  int features, size_t count) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count || !marked[i % plane / features]) return;
  const uint64_t bits = fp64::mixed(i + (static_cast<uint64_t>(__float_as_uint(tensor[i])) << 32));
  tensor[i] = static_cast<float>(scale * (static_cast<double>(bits >> 11) * 0x1p-52 - 1));
}

std::vector<int> grades_of(const std::vector<std::vector<int>>& blades) {
  std::vector<int> grades;
  for (const auto& blade : blades) grades.push_back(static_cast<int>(blade.size()));
  return grades;
}

}  // namespace

// ---- Tolerances ---------------------------------------------------------------------------------

// A z is a sum of at most 2^n terms (one for each blade of x), each the product of three numbers of
// mean zero. On top of the roundings of the sum come, as multiples of the unit roundoff u:
//   8  from each of two gates: erff is within 2 units in the last place, 2 u if its value is above
//      1/2, and 1 + erf(s / sqrt 2) cancels to 0.32 at s = -1; halving is exact
//   4  from 1 / sqrt by rsqrtf (2 units in the last place), 4 for the sum of squares and products
// In quadrature this is less than 16 u. A row whose rms is small by chance enlarges it further.
namespace {
constexpr double kRoundings = 16 * kRoundoffFp32;
}

// An rms that is 1 on average, of m = features (a grade of a single blade) independent numbers that
// are about Gaussian, is below d with a probability of at most (d sqrt(e))^m: the tail of the chi
// distribution. Among `batch` rows that happens once in a million runs for the d below. Where d is
// small, which is where there are few features, rows are drawn again: see draw_rows_again().
int CliffordShape::stretching_pairs() const { return p * q + r * (p + q); }

constexpr double kMostAmplified = 4;
double CliffordShape::norm_amplification() const {
  if (!normed) return 1;
  return few_features() ? kMostAmplified : likely_amplification();
}
bool CliffordShape::few_features() const { return likely_amplification() > kMostAmplified; }
double CliffordShape::likely_amplification() const {
  return std::sqrt(std::exp(1.0)) * std::pow(1e6 * batch, 1.0 / features);
}

// Fully connected, every sum is a product on the tensor cores, over `length` terms (of z: at most 6
// grade triples of Cl(3,0,0), 4 of Cl(2,0,0), each with all features; of dw: the batch, for up to 3
// blades), whose two factors are rounded to TF32. A gradient has two or three such errors: its own
// roundings, z's, which dz has, and (of x and y) another sum over the blades.
double CliffordShape::connected_tolerance(double length, int errors) const {
  const int64_t terms = static_cast<int64_t>(length) + 1;
  return errors * norm_amplification() *
         dot_tolerance(terms, tensor_core_sum(terms), kRoundings, kRoundoffTf32);
}

double CliffordShape::tolerance() const {
  if (connected) return connected_tolerance(3.0 * blades() / 4 * features, 1);
  return norm_amplification() * dot_tolerance(blades(), kRoundoffFp32, kRoundings);
}

// A gradient of x is such a product of y and dz, and dz the sum of two terms of which each has z's
// error; the gate's slope adds a sum over all blades of z dz. Twice as many terms, and twice the
// roundings of z and once more the gates.
double CliffordShape::gradient_tolerance() const {
  if (connected) return connected_tolerance(3.0 * blades() / 4 * features, 3);
  return norm_amplification() * dot_tolerance(3 * blades(), kRoundoffFp32, 3 * kRoundings);
}

// Summed over the batch besides; the order does not matter for the bound.
double CliffordShape::weight_gradient_tolerance() const {
  if (connected) return connected_tolerance(3.0 * batch, 3);
  return norm_amplification() *
         dot_tolerance(static_cast<int64_t>(batch) * blades(), kRoundoffFp32, 3 * kRoundings);
}

// Rounding the turned inputs is an error of both factors of each term. A boost by a rapidity of t
// multiplies a coefficient of a vector by at most e^t, and a blade turns as the product of its
// vectors: each two vectors that boost count twice, for x and for y.
double CliffordReference::turned_tolerance() const {
  const double stretched = std::exp(2 * kTurn * shape_.stretching_pairs());
  if (shape_.connected) return stretched * shape_.tolerance();
  return stretched * shape_.norm_amplification() *
         dot_tolerance(shape_.blades(), kRoundoffFp32, kRoundings, kRoundoffFp32);
}

// ---- The algebra, from lists of basis vectors ---------------------------------------------------

CliffordReference::CliffordReference(CliffordShape shape) : shape_(shape) {
  const int vectors = shape.p + shape.q + shape.r;
  blades_ = {{}};
  for (int v = 0; v < vectors; ++v) {  // each blade without e_v, and with it
    for (size_t i = 0, count = blades_.size(); i < count; ++i) {
      blades_.push_back(blades_[i]);
      blades_.back().push_back(v);
    }
  }
  // This is the order of the bits; grades come first.
  std::stable_sort(blades_.begin(), blades_.end(),
                   [](const auto& a, const auto& b) { return a.size() < b.size(); });
  const std::vector<int> grades = grades_of(blades_);
  for (int grade = 0; grade <= vectors + 1; ++grade) {
    first_.push_back(
        static_cast<int>(std::lower_bound(grades.begin(), grades.end(), grade) - grades.begin()));
  }

  std::map<std::vector<int>, std::vector<Term>> by_triple;
  for (size_t i = 0; i < blades_.size(); ++i) {
    for (size_t j = 0; j < blades_.size(); ++j) {
      std::vector<int> product = blades_[i];
      product.insert(product.end(), blades_[j].begin(), blades_[j].end());
      double sign = 1;
      for (size_t end = product.size(); end > 1; --end) {  // each swap of two vectors is a sign
        for (size_t v = 0; v + 1 < end; ++v) {
          if (product[v] <= product[v + 1]) continue;
          std::swap(product[v], product[v + 1]);
          sign = -sign;
        }
      }
      for (size_t v = 0; v + 1 < product.size();) {  // equal neighbours are a square
        if (product[v] != product[v + 1]) {
          ++v;
          continue;
        }
        sign *= product[v] < shape.p ? 1 : product[v] < shape.p + shape.q ? -1 : 0;
        product.erase(product.begin() + static_cast<std::ptrdiff_t>(v),
                      product.begin() + static_cast<std::ptrdiff_t>(v) + 2);
      }
      if (sign == 0) continue;
      const int result =
          static_cast<int>(std::find(blades_.begin(), blades_.end(), product) - blades_.begin());
      by_triple[{grades[i], grades[result], grades[j]}].push_back(
          {static_cast<int>(i), static_cast<int>(j), result, 0, sign});
    }
  }
  for (auto& [triple, terms] : by_triple) {
    for (Term& term : terms) {
      term.triple = static_cast<int>(triples_.size());
      terms_.push_back(term);
    }
    triples_.push_back(triple);
  }
}

ConnectedReference CliffordReference::connected() const {
  std::vector<std::pair<int, int>> results;
  for (const std::vector<int>& triple : triples_) {
    const int first = first_[static_cast<size_t>(triple[1])];
    results.push_back({first, first_[static_cast<size_t>(triple[1]) + 1] - first});
  }
  return {shape_, terms_, results};
}

// ---- The operator -------------------------------------------------------------------------------

double CliffordReference::scratch_bytes() const {
  const double rows = static_cast<double>(shape_.batch) * shape_.grades();
  // z, two sums per row and grade, the sums of along_direction_kernel, the tables; or what
  // draw_rows_again() takes.
  const double tensors = shape_.few_features() ? 3 : 1 + 2.0 / kChunk;
  return 8 * (static_cast<double>(shape_.elements()) * tensors + 2 * rows) + 0x1p20 +
         (shape_.connected ? connected().scratch_bytes() : 0);
}

void CliffordReference::product(const float* x, const float* y, const float* w, Step step,
                                double* z) const {
  if (shape_.connected) {
    return connected().product(x, y, w, step.x, step.y, step.w, step.squares, z);
  }
  const OnDevice<Term> terms(terms_);
  product_kernel<<<blocks(shape_.plane()), kThreads>>>(
      x, y, w, z, terms, static_cast<int>(terms_.size()), shape_.blades(), triples(),
      shape_.plane(), shape_.features, step.x, step.y, step.w, step.squares);
  CUDA_CHECK(cudaGetLastError());
}

void CliffordReference::forward(const float* x, const float* y, const float* w, double* out) const {
  product(x, y, w, {}, out);
  if (!shape_.normed) return;
  const int grades = shape_.grades();
  const unsigned rows = static_cast<unsigned>(shape_.batch);
  const OnDevice<int> first(first_), grade_of(grades_of(blades_));
  Scratch<double> squares(static_cast<size_t>(rows) * grades);
  grade_sums_kernel<double>
      <<<rows * grades, 32>>>(out, out, squares, first, grades, shape_.plane(), shape_.features);
  normalize_kernel<<<blocks(shape_.elements()), kThreads>>>(
      out, out, squares, grade_of, grades, shape_.plane(), shape_.features, shape_.elements());
  CUDA_CHECK(cudaGetLastError());
}

void CliffordReference::backward(const float* x, const float* y, const float* w, const float* d_out,
                                 double* dx, double* dy, double* dw) const {
  const int grades = shape_.grades(), term_count = static_cast<int>(terms_.size());
  const unsigned rows = static_cast<unsigned>(shape_.batch);
  const OnDevice<Term> terms(terms_);
  const OnDevice<int> first(first_), grade_of(grades_of(blades_));
  Scratch<double> z(shape_.elements()), squares(static_cast<size_t>(rows) * grades),
      products(static_cast<size_t>(rows) * grades);
  product(x, y, w, {}, z);
  grade_sums_kernel<double>
      <<<rows * grades, 32>>>(z, z, squares, first, grades, shape_.plane(), shape_.features);
  grade_sums_kernel<float>
      <<<rows * grades, 32>>>(d_out, z, products, first, grades, shape_.plane(), shape_.features);
  normalize_gradient_kernel<<<blocks(shape_.elements()), kThreads>>>(
      z, d_out, squares, products, grade_of, grades, shape_.plane(), shape_.features,
      shape_.elements(), shape_.normed);
  if (shape_.connected) return connected().gradients(x, y, w, z, dx, dy, dw);
  input_gradient_kernel<<<blocks(shape_.plane()), kThreads>>>(x, y, w, z, dx, dy, terms, term_count,
                                                              shape_.blades(), triples(),
                                                              shape_.plane(), shape_.features);
  const size_t weights = static_cast<size_t>(shape_.features) * triples();
  weight_gradient_kernel<<<blocks(weights), kThreads>>>(x, y, z, dw, terms, term_count, triples(),
                                                        shape_.plane(), shape_.features);
  CUDA_CHECK(cudaGetLastError());
}

// ---- Finite differences -------------------------------------------------------------------------

double CliffordReference::loss(const float* x, const float* y, const float* w, const float* d_out,
                               Step step, double* z) const {
  const int grades = shape_.grades();
  const unsigned rows = static_cast<unsigned>(shape_.batch);
  const size_t sums = static_cast<size_t>(rows) * grades;
  const OnDevice<int> first(first_);
  Scratch<double> squares(sums), products(sums);
  product(x, y, w, step, z);
  grade_sums_kernel<double>
      <<<rows * grades, 32>>>(z, z, squares, first, grades, shape_.plane(), shape_.features);
  grade_sums_kernel<float>
      <<<rows * grades, 32>>>(d_out, z, products, first, grades, shape_.plane(), shape_.features);
  CUDA_CHECK(cudaGetLastError());
  const std::vector<double> square = to_host(squares, sums), dot = to_host(products, sums);
  long double total = 0;
  for (size_t i = 0; i < sums; ++i) {
    total += shape_.normed ? dot[i] / std::sqrt(square[i] / shape_.features + kEpsilon) : dot[i];
  }
  return static_cast<double>(total);
}

double CliffordReference::check_gradients(const float* x, const float* y, const float* w,
                                          const float* d_out, const double* dx, const double* dy,
                                          const double* dw) const {
  // A central difference is off by h^2 / 6 times the third derivative along the direction, and by
  // the roundoff of two sums over h. In units of the gradient's norm, and with the norm's
  // amplification A in each derivative, the first is at most about 100 (h A)^2: sums of products
  // with coefficients of about 1. The second: each of the sum's terms is off by some 20 roundoffs
  // of 2^-53, independently, while each adds about as much to the gradient's norm: 2e-15 A / h.
  // With h = kStep / A both stay below:
  const double amplification = shape_.norm_amplification();
  const double h = kStep / amplification;
  const double bound = 1e-8 + 1e-9 * amplification * amplification;
  struct Input {
    const char* name;
    const double* gradient;
    size_t count;
    Step step;
  };
  const Input inputs[] = {
      {"dx", dx, shape_.elements(), {.x = 1}},
      {"dy", dy, shape_.elements(), {.y = 1}},
      {"dw", dw, weights(), {.w = 1}},
  };
  Scratch<double> z(shape_.elements());
  double worst = 0;
  for (const Input& input : inputs) {
    const double sx = input.step.x, sy = input.step.y, sw = input.step.w;
    const double difference =
        (loss(x, y, w, d_out, {.x = h * sx, .y = h * sy, .w = h * sw}, z) -
         loss(x, y, w, d_out, {.x = -h * sx, .y = -h * sy, .w = -h * sw}, z)) /
        (2 * h);
    const size_t chunks = (input.count + kChunk - 1) / kChunk;
    Scratch<double> sums(2 * chunks);
    along_direction_kernel<<<static_cast<unsigned>(chunks), 32>>>(input.gradient, input.count,
                                                                  sums);
    CUDA_CHECK(cudaGetLastError());
    const std::vector<double> values = to_host(sums, 2 * chunks);
    double along = 0, squares = 0;
    for (size_t i = 0; i < chunks; ++i) {
      along += values[2 * i];
      squares += values[2 * i + 1];
    }
    const double error = std::fabs(difference - along) / std::sqrt(squares);
    if (!(error <= bound)) {
      fail(kVerificationFailed,
           "the reference's %s is not the gradient: finite difference %.9g, expected %.9g, "
           "norm %.3g",
           input.name, difference, along, std::sqrt(squares));
    }
    worst = std::max(worst, error);
  }
  return worst;
}

// ---- Long sums ----------------------------------------------------------------------------------

// On tensor cores the last feature's square would not be missed in the sum of some hundreds of
// them, nor a row in some thousands. (In fp32 one is missed in any sum that fits into memory.)
void CliffordReference::enlarge_last_terms(float* w, float* d_out) const {
  if (!shape_.connected) return;
  const size_t features = static_cast<size_t>(shape_.features), plane = shape_.plane();
  last_term::multiply(w, {features - 1, 1, features, triples_.size() * features},
                      last_term::weight(static_cast<double>(features)));
  if (!d_out) return;
  last_term::multiply(d_out,
                      {plane - features, features, plane, static_cast<size_t>(shape_.blades())},
                      last_term::weight(shape_.batch));
}

// ---- Few features -------------------------------------------------------------------------------

// Of few features all may be nearly 0, or cancel, in a grade of a row: its norm makes an error of z
// larger by as much as the terms of z are larger than z. Rows in which that is more than
// kMostAmplified times, for any grade, get other x and y.
//
// The gradient of z is r d_out less what of it is along z. A grade of a single number has nothing
// besides, and its gradient is 0 but for the norm's epsilon. In the others the same must not be
// left by chance: where less than 1 / kMostAmplified is, the row gets another d_out.
void CliffordReference::draw_rows_again(float* x, float* y, const float* w, float* d_out) const {
  if (!shape_.normed || !shape_.few_features()) return;
  const int grades = shape_.grades();
  const unsigned rows = static_cast<unsigned>(shape_.batch);
  const size_t sums = static_cast<size_t>(rows) * grades;
  const OnDevice<int> first(first_);
  const OnDevice<double> ones(std::vector<double>(shape_.elements(), 1));
  Scratch<double> z(shape_.elements()), of_rows(sums), along_z(sums);
  const auto add_up = [&]<typename T>(const T* a, const double* b, double* to) {
    grade_sums_kernel<T>
        <<<rows * grades, 32>>>(a, b, to, first, grades, shape_.plane(), shape_.features);
    CUDA_CHECK(cudaGetLastError());
    return to_host(to, sums);
  };
  // Whether this is so of any grade of a row.
  const auto draw = [&](std::initializer_list<float*> tensors, double scale, const auto& is_bad) {
    std::vector<char> again(rows);
    for (size_t i = 0; i < sums; ++i) again[i / grades] |= is_bad(i);
    const OnDevice<char> on_device(again);
    for (float* tensor : tensors) {
      draw_again_kernel<<<blocks(shape_.elements()), kThreads>>>(
          tensor, on_device, scale, shape_.plane(), shape_.features, shape_.elements());
      CUDA_CHECK(cudaGetLastError());
    }
    return std::find(again.begin(), again.end(), 1) != again.end();
  };
  const auto square = [](double value) { return value * value; };
  constexpr int kMostRounds = 200;
  for (int round = 0; round < kMostRounds; ++round) {
    product(x, y, w, {.squares = true}, z);
    const std::vector<double> terms = add_up(ones.data(), z, of_rows);
    product(x, y, w, {}, z);
    const std::vector<double> squares = add_up(static_cast<const double*>(z), z, of_rows);
    const auto is_bad = [&](size_t i) { return terms[i] > square(kMostAmplified) * squares[i]; };
    if (!draw({x, y}, kDeviation, is_bad)) break;
  }
  if (!d_out) return;
  Scratch<double> d64(shape_.elements());
  const std::vector<double> z_squares = add_up(static_cast<const double*>(z), z, of_rows);
  for (int round = 0; round < kMostRounds; ++round) {
    const std::vector<double> along = add_up(d_out, z, along_z);
    to_fp64(d_out, Type::fp32, shape_.elements(), d64);
    const std::vector<double> all = add_up(d_out, d64, along_z);
    const auto is_bad = [&](size_t i) {
      const bool single = (first_[i % grades + 1] - first_[i % grades]) * shape_.features == 1;
      const double left = all[i] - square(along[i]) / z_squares[i];
      return !single && all[i] > square(kMostAmplified) * left;
    };
    if (!draw({d_out}, 1, is_bad)) break;
  }
}

// ---- Turning ------------------------------------------------------------------------------------

template <typename T>
void CliffordReference::turn_any(T* x) const {
  const OnDevice<Term> terms(terms_);
  const auto sign_of_square = [&](int vector) {
    return vector < shape_.p ? 1 : vector < shape_.p + shape_.q ? -1 : 0;
  };
  for (int i = first_[2]; i < first_[3]; ++i) {
    // (e_u e_v)^2 = -e_u^2 e_v^2
    const int square = -sign_of_square(blades_[i][0]) * sign_of_square(blades_[i][1]);
    const double half = kTurn / 2;
    const double c = square < 0 ? std::cos(half) : square > 0 ? std::cosh(half) : 1;
    const double s = square < 0 ? std::sin(half) : square > 0 ? std::sinh(half) : half;
    turn_kernel<T><<<blocks(shape_.plane()), kThreads>>>(x, terms, static_cast<int>(terms_.size()),
                                                         shape_.blades(), shape_.plane(), i, c, s);
    CUDA_CHECK(cudaGetLastError());
  }
}

void CliffordReference::turn(float* x) const { turn_any(x); }
void CliffordReference::turn(double* x) const { turn_any(x); }

// ---- The tables ---------------------------------------------------------------------------------

namespace {
constexpr int kConnectedFeaturesCpu = 68;  // of the fully connected product, unless given
// Problems of so few multivectors take microseconds, at which the launch is part of the time.
constexpr size_t kSmall = 1 << 18;
}  // namespace

CliffordTables::CliffordTables(Lesson& lesson, int p, int q, int r, int triples, bool connected)
    : lesson_(lesson) {
  if (const bool normed = !lesson.flag("--no-norm");
      normed && lesson.flag("--turned") &&
      CliffordShape{p, q, r, 1, 1, normed}.stretching_pairs() > 0) {
    fail(kBadUsage,
         "--turned needs --no-norm in Cl(%d,%d,%d): the norm is a sum of squares, which rotations "
         "leave alone, but not boosts and translations",
         p, q, r);
  }
  std::vector<int64_t> all_features = lesson.sizes("--features");
  if (connected && lesson.on_cpu() && !lesson.given("--features") && all_features.size() == 1) {
    all_features = {kConnectedFeaturesCpu};
  }
  for (const int64_t batch : lesson.sizes()) {
    for (const int64_t features : all_features) {
      references_.emplace_back(CliffordShape{p, q, r, static_cast<int>(batch),
                                             static_cast<int>(features), !lesson.flag("--no-norm"),
                                             connected});
    }
  }
  if (references_[0].triples() != triples) {
    fail(kVerificationFailed, "the reference counts %d grade triples, not %d",
         references_[0].triples(), triples);
  }
}

CliffordTable CliffordTables::tensors(const CliffordReference& reference, const char* name,
                                      double flops, int tensors, int weights) {
  const CliffordShape& shape = reference.shape();
  const size_t multivectors = shape.plane(), elements = shape.elements(),
               all_weights = reference.weights();
  const double bytes = sizeof(float) * (tensors * static_cast<double>(elements) +
                                        weights * static_cast<double>(all_weights));
  Problem& problem = lesson_.problem(
      name, {{"batch", shape.batch}, {"features", shape.features}, {"blades", shape.blades()}},
      shape.connected ? "tf32" : "fp32",
      {.flops = flops * static_cast<double>(multivectors), .bytes = bytes},
      shape.connected ? Rate::tf32 : Rate::fp32);
  if (multivectors <= kSmall) problem.in_graph();
  const auto x = problem.input<float>(elements, kDeviation);
  const auto y = problem.input<float>(elements, kDeviation);
  const auto w = problem.input<float>(all_weights);
  const auto out = problem.output<float>(elements);
  const Layer layer{shape.batch, shape.features, shape.normed};
  return {{layer, x, y, w, out, workspace_of(problem)}, problem, out};
}

CliffordTable CliffordTables::forward(const CliffordReference& reference, double flops) {
  const bool turned = lesson_.flag("--turned");
  const CliffordTable of = tensors(reference, turned ? "turned" : "forward", flops, 3, 1);
  const Buffer<double> expected = of.problem.reference(of.out.size());
  of.problem.adjust_inputs([=, &reference] {
    reference.draw_rows_again(of.x, of.y, of.w);
    reference.enlarge_last_terms(of.w);
  });
  of.problem.reference_from(reference.scratch_bytes(), [=, &reference] {
    reference.forward(of.x, of.y, of.w, expected);
    if (!turned) return;
    reference.turn(expected);
    reference.turn(of.x);
    reference.turn(of.y);
  });
  of.problem.check(of.result, expected,
                   turned ? reference.turned_tolerance() : reference.shape().tolerance());
  return of;
}

std::pair<CliffordTable, CliffordGradients> CliffordTables::backward(
    const CliffordReference& reference, double flops) {
  const CliffordShape& shape = reference.shape();
  const CliffordTable of = tensors(reference, "forward + backward", flops, 3 + 5, 1 + 2);
  Problem& problem = of.problem;
  const size_t elements = shape.elements();
  const auto d_out = problem.input<float>(elements), d_x = problem.output<float>(elements),
             d_y = problem.output<float>(elements), d_w = problem.output<float>(of.w.size());
  const CliffordGradients d{d_out, d_x, d_y, d_w};
  const Buffer<double> out = problem.reference(elements), dx = problem.reference(elements),
                       dy = problem.reference(elements), dw = problem.reference(of.w.size());
  problem.adjust_inputs([=, &reference] { reference.draw_rows_again(of.x, of.y, of.w, d.d_out); });
  ++unchecked_;
  problem.reference_from(reference.scratch_bytes(), [=, &reference, this] {
    reference.forward(of.x, of.y, of.w, out);
    reference.backward(of.x, of.y, of.w, d.d_out, dx, dy, dw);
    worst_ = std::max(worst_, reference.check_gradients(of.x, of.y, of.w, d.d_out, dx, dy, dw));
    if (--unchecked_ > 0) return;
    char line[128];
    snprintf(line, sizeof line,
             "The reference's gradients agree with finite differences within %.0e of their norm.",
             worst_);
    lesson_.note(line);
  });
  problem.check(of.result, out, shape.tolerance());
  problem.check(d_x, dx, shape.gradient_tolerance());
  problem.check(d_y, dy, shape.gradient_tolerance());
  problem.check(d_w, dw, shape.weight_gradient_tolerance());
  return {of, d};
}

void CliffordTables::note_operations(int triples, int product, int written_out, int gradients) {
  const CliffordShape& shape = references_[0].shape();
  char line[160];
  snprintf(
      line, sizeof line,
      "Cl(%d,%d,%d): %d grade triples; the product takes %d multiply-adds (%d written out term "
      "by term), its gradients %d.",
      shape.p, shape.q, shape.r, triples, product, written_out, gradients);
  lesson_.note(line);
}

}  // namespace problems
