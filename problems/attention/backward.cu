#include <array>
#include <cmath>
#include <vector>

#include "primitives/launch.h"
#include "problems/attention/backward.h"
#include "problems/gradient_check.h"
#include "problems/warps.cuh"

namespace problems {

namespace {

double as_double(int64_t count) { return static_cast<double>(count); }

/// A warp owns a row of `keys`: dP becomes dS = P (dP - D), where D = sum of P dP.
__global__ void gradients_of_logits(const double* P, double* dP, int64_t rows, int64_t keys) {
  const int lane = threadIdx.x % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  const double* p = P + row * keys;
  double* own = dP + row * keys;
  double sum = 0;
  for (int64_t t = lane; t < keys; t += 32) sum += p[t] * own[t];
  sum = warp_sum(sum);
  for (int64_t t = lane; t < keys; t += 32) own[t] = p[t] * (own[t] - sum);
}

/// A warp owns a row of `keys`: P becomes its square, and dS becomes (2 dS^2 + (P d)^2) / 3. Of the
/// three roundings by u that the tolerance counts, those of dS and of the result are parts of dS,
/// and that of out is a part of P d, with d^2 = sum of (d_out out)^2, however much cancels.
__global__ void squares_of_terms(double* P, double* dS, const double* out, const double* d_out,
                                 int64_t rows, int64_t keys, int64_t width, int64_t stride) {
  const int lane = threadIdx.x % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  double sum = 0;
  for (int64_t i = lane; i < width; i += 32) {
    const double term = out[row * stride + i] * d_out[row * stride + i];
    sum += term * term;
  }
  sum = warp_sum(sum);
  for (int64_t i = row * keys + lane; i < (row + 1) * keys; i += 32) {
    P[i] *= P[i];
    dS[i] = (2 * dS[i] * dS[i] + P[i] * sum) / 3;
  }
}

/// One thread an element.
__global__ void square(double* values, size_t count) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) values[i] *= values[i];
}

/// to[i] = from[i] + offset, one thread an element.
template <typename From, typename To>
__global__ void add_offset(const From* from, To* to, size_t count, double offset) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  to[i] = static_cast<To>(static_cast<float>(from[i]) + static_cast<float>(offset));
}

template <typename From, typename To>
void launch_add_offset(const From* from, To* to, size_t count, double offset) {
  const unsigned blocks = primitives::blocks_for(static_cast<int64_t>(count), 256);
  add_offset<From, To><<<blocks, 256>>>(from, to, count, offset);
  CUDA_CHECK(cudaGetLastError());
}

/// What one head's gradients are computed from, and where they go; rows are as far apart as those
/// of all heads.
struct BackwardHead {
  const double *Q, *K, *V, *d_out;
  double *dQ, *dK, *dV;
};

/// What cuBLAS has to know of a head's matrices. Row-major ones are their transposes for cuBLAS.
struct HeadExtents {
  int q_stride, k_stride, keys, width, queries;

  HeadExtents(const AttentionShape& shape, int64_t rows)
      : q_stride(static_cast<int>(shape.heads * shape.width)),
        k_stride(static_cast<int>(shape.kv_heads * shape.width)),
        keys(static_cast<int>(shape.keys)),
        width(static_cast<int>(shape.width)),
        queries(static_cast<int>(rows)) {}
};

/// dS (rows, keys) of `rows` queries of a head, from P.
void logit_gradients(cublasHandle_t blas, const BackwardHead& in, const double* P, double* dS,
                     const HeadExtents& of) {
  const double one = 1, zero = 0;
  CUBLAS_CHECK(cublasDgemm(blas, CUBLAS_OP_T, CUBLAS_OP_N, of.keys, of.queries, of.width, &one,
                           in.V, of.k_stride, in.d_out, of.q_stride, &zero, dS, of.keys));
  gradients_of_logits<<<primitives::blocks_for(of.queries, 8), 256>>>(P, dS, of.queries, of.keys);
  CUDA_CHECK(cudaGetLastError());
}

/// dQ, and what these queries add to dK and dV; `first`: nothing is there yet.
void add_products(cublasHandle_t blas, const BackwardHead& in, const double* P, const double* dS,
                  const HeadExtents& of, double scale, bool first) {
  const double one = 1, zero = 0, before = first ? 0 : 1;
  CUBLAS_CHECK(cublasDgemm(blas, CUBLAS_OP_N, CUBLAS_OP_N, of.width, of.queries, of.keys, &scale,
                           in.K, of.k_stride, dS, of.keys, &zero, in.dQ, of.q_stride));
  CUBLAS_CHECK(cublasDgemm(blas, CUBLAS_OP_N, CUBLAS_OP_T, of.width, of.keys, of.queries, &scale,
                           in.Q, of.q_stride, dS, of.keys, &before, in.dK, of.k_stride));
  CUBLAS_CHECK(cublasDgemm(blas, CUBLAS_OP_N, CUBLAS_OP_T, of.width, of.keys, of.queries, &one,
                           in.d_out, of.q_stride, P, of.keys, &before, in.dV, of.k_stride));
}

/// In place, on the device.
void square_all(double* values, size_t count) {
  square<<<primitives::blocks_for(static_cast<int64_t>(count), 256), 256>>>(values, count);
  CUDA_CHECK(cudaGetLastError());
}

/// The root of the mean of `count` squares on the device.
double root_of_mean(const double* squares, size_t count) {
  double sum = 0;
  for (const double value : to_host(squares, count)) sum += value;
  return std::sqrt(sum / static_cast<double>(count));
}

// ---- Is the reference's gradient the gradient? --------------------------------------------------

// reference_attention_backward was derived by hand from reference_attention: along random
// directions of Q, K and V it is held to finite differences of the loss f = sum(dO * out), see
// problems/gradient_check.h. The bound's two parts:
//
//   - f is linear in V. In Q and K, derivatives of a mean of V under softmax are its joint
//     cumulants with what the logits change by. That is about 1, as directions are as large as the
//     inputs, and at most 5 in these few logits: f''' is to f' as 4 * 5^2 to 1, and 6 times that is
//     left room for.
//   - The elements of out are off by dot_tolerance() of themselves: twice by the logits' errors,
//     and by that of the sum.
//
// With fp64's roundoff of 2^-53, h = 2^-18 makes both parts about 10^-9.
constexpr double kStep = 0x1p-18;

/// Enough to run the same code; two keys or more, as with one dQ and dK are 0.
AttentionShape difference_shape(AttentionShape shape) {
  const int64_t group = std::min<int64_t>(shape.group(), 2);
  shape.batch = 1;
  shape.kv_heads = std::min<int64_t>(shape.kv_heads, 2);
  shape.heads = group * shape.kv_heads;
  shape.queries = std::clamp<int64_t>(shape.queries, 2, 40);
  shape.keys = std::clamp<int64_t>(shape.keys, 2, 50);
  return shape;
}

/// The largest of the three gradients' differences to finite differences.
double check_gradients(cublasHandle_t blas, const AttentionShape& shape) {
  const std::array<const char*, 3> names = {"dQ", "dK", "dV"};
  const std::array<size_t, 3> counts = {shape.query_elements(), shape.key_elements(),
                                        shape.key_elements()};
  const std::array<double, 3> scales = {kQueryRange, kQueryRange, 1};
  using Inputs = std::array<std::vector<double>, 3>;

  Scratch<double> Q(counts[0]), K(counts[1]), V(counts[2]), out(counts[0]), lse(shape.rows());
  const std::vector<double> d_out_host = random_fp64(counts[0], 1, 0, 7);
  Scratch<double> d_out(counts[0]), dQ(counts[0]), dK(counts[1]), dV(counts[2]);
  to_device(d_out_host, d_out);
  const auto put = [&](const Inputs& inputs) {
    double* const to[] = {Q, K, V};
    for (int i = 0; i < 3; ++i) to_device(inputs[i], to[i]);
  };
  const auto loss = [&](const Inputs& inputs) {
    put(inputs);
    double uncancelled;
    reference_attention<double>(blas, Q, K, V, out, lse, &uncancelled, shape);
    Loss result;
    result.add(d_out_host, to_host(out, counts[0]));
    return result;
  };

  Inputs inputs;
  for (int i = 0; i < 3; ++i) inputs[i] = random_fp64(counts[i], scales[i], 0, 1 + i);
  put(inputs);
  reference_attention_backward<double>(blas, Q, K, V, d_out, {dQ, dK, dV}, shape);
  const std::array<std::vector<double>, 3> gradients = {
      to_host(dQ, counts[0]), to_host(dK, counts[1]), to_host(dV, counts[2])};

  const DifferenceBound bound = {
      .h = kStep,
      .curvature = 100,
      .roundoff = 2 * dot_tolerance(shape.width, 0x1p-53, sqrt(4) * 0x1p-53) +
                  dot_tolerance(shape.keys, 0x1p-53, 0x1p-53)};
  double worst = 0;
  for (int i = 0; i < 3; ++i) {
    const std::vector<double> direction = random_fp64(counts[i], scales[i], 0, 4 + i);
    const auto loss_at = [&](double h) {
      Inputs at = inputs;
      at[i] = moved(inputs[i], direction, h);
      return loss(at);
    };
    worst = std::max(worst, check_slope(names[i], gradients[i], direction, loss_at(kStep),
                                        loss_at(-kStep), bound));
  }
  return worst;
}

}  // namespace

GradientTolerances attention_gradient_tolerances(const AttentionShape& shape, double u, bool hard) {
  const double width = dot_tolerance(shape.width, tensor_core_sum(shape.width), 0);
  const double largest = hard ? 0x1p18 * shape.scale() : 16;
  const double units = std::sqrt((3 * largest * largest + 4 * 4) / 3);
  const double of_P = kLogitStandard * width + 4 * units * kRoundoffFp32;
  const int64_t rows = shape.queries * shape.group();
  const auto product = [&](int64_t terms, double u_in) {
    return dot_tolerance(terms, tensor_core_sum(terms), u, u_in);
  };
  return {.dQ = of_P + width + product(shape.keys, u),
          .dK = of_P + width + product(rows, u),
          .dV = of_P + product(rows, u / std::sqrt(2.0))};
}

Work attention_backward_work(const AttentionShape& shape) {
  // Q, out, d_out and dQ; K, V, dK and dV; the logarithms.
  const double bytes = 2.0 * 4 *
                           (static_cast<double>(shape.query_elements()) +
                            static_cast<double>(shape.key_elements())) +
                       4.0 * static_cast<double>(shape.rows());
  return {.flops = 2.5 * shape.flops(), .bytes = bytes};
}

bool gradients_cancel(const AttentionShape& shape) {
  return few(static_cast<double>(shape.query_elements())) ||
         few(static_cast<double>(shape.key_elements())) || shape.keys <= 16;
}

double attention_backward_scratch(const AttentionShape& shape) {
  const double chunk = as_double(rows_at_once(shape)), keys = as_double(shape.keys);
  const double q_row = as_double(shape.heads * shape.width);
  const double kv_elements = keys * as_double(shape.kv_heads * shape.width);
  const double squares = gradients_cancel(shape) ? static_cast<double>(shape.query_elements()) +
                                                       2 * static_cast<double>(shape.key_elements())
                                                 : 0;
  return sizeof(double) * (2 * kv_elements + chunk * (3 * q_row + 1) + 2 * chunk * keys + squares);
}

template <typename T>
UncancelledGradients reference_attention_backward(cublasHandle_t blas, const T* Q, const T* K,
                                                  const T* V, const T* d_out,
                                                  const GradientsFp64& gradients,
                                                  const AttentionShape& shape) {
  const int64_t chunk = rows_at_once(shape), d = shape.width, q_row = shape.heads * d;
  const int64_t kv_elements = shape.keys * shape.kv_heads * d;
  const double scale = 1 / std::sqrt(as_double(d));
  Scratch<double> K64(kv_elements), V64(kv_elements), Q64(chunk * q_row), d_out64(chunk * q_row);
  Scratch<double> out(chunk * q_row), lse(chunk), P(chunk * shape.keys), dS(chunk * shape.keys);

  // `squares`: of the factors, and so of the terms of the results.
  const auto all = [&](const GradientsFp64& to, bool squares) {
    for (int64_t b = 0; b < shape.batch; ++b) {
      for (int64_t first = 0; first < shape.queries; first += chunk) {
        const int64_t rows = std::min(chunk, shape.queries - first);
        const int64_t from = (b * shape.queries + first) * q_row;
        for (int64_t h = 0; h < shape.heads; ++h) {
          const int64_t shared = h / shape.group() * d, own = h * d;
          if (h == 0 || squares) {
            to_fp64(K + b * kv_elements, type_of<T>, kv_elements, K64);
            to_fp64(V + b * kv_elements, type_of<T>, kv_elements, V64);
            to_fp64(Q + from, type_of<T>, rows * q_row, Q64);
            to_fp64(d_out + from, type_of<T>, rows * q_row, d_out64);
          }
          attend_fp64(blas, {Q64 + own, K64 + shared, V64 + shared}, P, out + own, lse, shape,
                      first, rows);
          const BackwardHead head = {Q64 + own,
                                     K64 + shared,
                                     V64 + shared,
                                     d_out64 + own,
                                     to.dQ + from + own,
                                     to.dK + b * kv_elements + shared,
                                     to.dV + b * kv_elements + shared};
          const HeadExtents of(shape, rows);
          logit_gradients(blas, head, P, dS, of);
          if (squares) {
            squares_of_terms<<<primitives::blocks_for(rows, 8), 256>>>(P, dS, out + own, head.d_out,
                                                                       rows, shape.keys, d, q_row);
            CUDA_CHECK(cudaGetLastError());
            square_all(K64, kv_elements);
            square_all(Q64, rows * q_row);
            square_all(d_out64, rows * q_row);
          }
          add_products(blas, head, P, dS, of, squares ? scale * scale : scale,
                       first == 0 && h % shape.group() == 0);
        }
      }
    }
  };
  all(gradients, false);
  if (!gradients_cancel(shape)) return {};
  const size_t q_count = shape.query_elements(), k_count = shape.key_elements();
  Scratch<double> dQ(q_count), dK(k_count), dV(k_count);
  all({dQ, dK, dV}, true);
  return {root_of_mean(dQ, q_count), root_of_mean(dK, k_count), root_of_mean(dV, k_count)};
}

template <typename T>
AttentionBackwardProblem<T>::AttentionBackwardProblem(Lesson& lesson, cublasHandle_t blas,
                                                      const std::string& name,
                                                      const AttentionShape& shape,
                                                      std::function<void(double)> report, bool hard)
    : shape(shape),
      problem(declare_attention(lesson, name, shape, type_of<T>, attention_backward_work(shape))),
      Q(problem.input<T>(shape.query_elements(), kQueryRange)),
      K(problem.input<T>(shape.key_elements(), kQueryRange)),
      V(problem.input<T>(shape.key_elements())),
      d_out(problem.input<T>(shape.query_elements())),
      out(problem.input<T>(shape.query_elements())),
      log_sums(problem.input<float>(shape.rows())),
      dQ(problem.output<T>(shape.query_elements())),
      dK(problem.output<T>(shape.key_elements())),
      dV(problem.output<T>(shape.key_elements())),
      uncancelled(std::make_shared<UncancelledGradients>()) {
  if (hard && shape.width < kSpecialWidth) {
    fail(kBadUsage, "hard rows need a width of at least %d", static_cast<int>(kSpecialWidth));
  }
  if (hard) problem.adjust_inputs([shape, Q = Q, K = K] { make_hard<T>(Q, K, shape, false); });
  if (shape.keys == 1) {
    one_key = OneKey{problem.output<float>(dQ.size()), problem.output<float>(dK.size())};
  }
  problem.adjust_inputs([=, Q = Q, K = K, V = V, out = out, log_sums = log_sums] {
    Scratch<double> out64(out.size()), log_sums64(log_sums.size());
    double unused;
    reference_attention<T>(blas, Q, K, V, out64, log_sums64, &unused, shape);
    launch_add_offset<double, T>(out64, out, out.size(), 0);
    launch_add_offset<double, float>(log_sums64, log_sums, log_sums.size(), 0);
  });
  const auto expected_dQ = problem.reference(dQ.size()), expected_dK = problem.reference(dK.size()),
             expected_dV = problem.reference(dV.size());
  const double forward_scratch =
      attention_scratch(shape) +
      8 * (static_cast<double>(out.size()) + static_cast<double>(log_sums.size()));
  const bool has_one_key = one_key.has_value();
  problem.reference_from(
      std::max(forward_scratch, attention_backward_scratch(shape)),
      [=, Q = Q, K = K, V = V, d_out = d_out, uncancelled = uncancelled] {
        report(check_gradients(blas, difference_shape(shape)));
        *uncancelled = reference_attention_backward<T>(
            blas, Q, K, V, d_out, {expected_dQ, expected_dK, expected_dV}, shape);
        if (!has_one_key) return;
        for (const auto& [expected, unit] :
             {std::pair(expected_dQ, uncancelled->dQ), std::pair(expected_dK, uncancelled->dK)}) {
          launch_add_offset<double, double>(expected, expected, expected.size(), unit);
        }
      });
  const auto [tolerance_dQ, tolerance_dK, tolerance_dV] = attention_gradient_tolerances(
      shape, type_of<T> == Type::bf16 ? kRoundoffBf16 : kRoundoffFp16, hard);
  const auto unit = [&](const double& of) {
    return std::shared_ptr<const double>(uncancelled, &of);
  };
  if (one_key) {
    problem.check(one_key->dQ, expected_dQ, tolerance_dQ);
    problem.check(one_key->dK, expected_dK, tolerance_dK);
  } else {
    problem.check(dQ, expected_dQ, tolerance_dQ, unit(uncancelled->dQ));
    problem.check(dK, expected_dK, tolerance_dK, unit(uncancelled->dK));
  }
  problem.check(dV, expected_dV, tolerance_dV, unit(uncancelled->dV));
}

template <typename T>
void AttentionBackwardProblem<T>::collect_of_one_key() const {
  launch_add_offset<T, float>(dQ, one_key->dQ, dQ.size(), uncancelled->dQ);
  launch_add_offset<T, float>(dK, one_key->dK, dK.size(), uncancelled->dK);
}

template struct AttentionBackwardProblem<half>;
template struct AttentionBackwardProblem<__nv_bfloat16>;

}  // namespace problems
