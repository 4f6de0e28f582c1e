#include <numeric>
#include <vector>

#include "primitives/launch.h"
#include "problems/gating/gating.h"

namespace problems {

namespace {

/// Turns s1 = x W1 and s2 = x W2 (rows, hidden) into `step`'s result, in place of s2. One thread an
/// element.
__global__ void finish_step_kernel(const double* s1, double* s2, const half* b1, const half* b2,
                                   size_t count, int64_t hidden, GatingStep step) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int64_t column = static_cast<int64_t>(i % static_cast<size_t>(hidden));
  const double gate = s1[i] + static_cast<double>(__half2float(b1[column]));
  const double value = s2[i] + static_cast<double>(__half2float(b2[column]));
  const double sigmoid = 1 / (1 + exp(-gate));
  switch (step) {
    case GatingStep::x_w1:
      s2[i] = s1[i];
      break;
    case GatingStep::plus_b1:
      s2[i] = gate;
      break;
    case GatingStep::sigmoid:
      s2[i] = sigmoid;
      break;
    case GatingStep::x_w2:
      break;
    case GatingStep::plus_b2:
      s2[i] = value;
      break;
    case GatingStep::out:
      s2[i] = sigmoid * value;
      break;
  }
}

/// One thread an element: the square of what it is if its terms do not cancel, those of a sum are
/// the products and the bias. out = sigmoid value is off by what value is, times the sigmoid, and
/// by what the gate is, times value and the sigmoid's slope.
__global__ void uncancelled_kernel(GatingOperands in, double* squares) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= in.M * in.H) return;
  const int row = i / in.H, col = i % in.H;
  struct Sum {
    double value = 0, squares = 0;
    __device__ void add(double term) { value += term, squares += term * term; }
  } gate, value;
  const auto at = [](const half* from, size_t place) {
    return static_cast<double>(__half2float(from[place]));
  };
  for (size_t k = 0; k < static_cast<size_t>(in.K); ++k) {
    const double x = at(in.x, static_cast<size_t>(row) * in.K + k);
    gate.add(x * at(in.W1, k * in.H + col));
    value.add(x * at(in.W2, k * in.H + col));
  }
  gate.add(at(in.b1, col));
  value.add(at(in.b2, col));
  const double sigmoid = 1 / (1 + exp(-gate.value)), slope = sigmoid * (1 - sigmoid);
  squares[i] =
      sigmoid * sigmoid * value.squares + slope * slope * value.value * value.value * gate.squares;
}

Problem& declare(Lesson& lesson, const char* name, const GatingShape& shape) {
  if (shape.rows > INT32_MAX - 1023) {
    fail(kBadUsage, "M = 1024 N = %lld rows are more than an int can count",
         static_cast<long long>(shape.rows));
  }
  if (shape.hidden > 32 * 65535) {
    fail(kBadUsage, "H = %lld columns are more than %d", static_cast<long long>(shape.hidden),
         32 * 65535);
  }
  return lesson.problem(name, {{"M", shape.rows}, {"K", shape.channels}, {"H", shape.hidden}},
                        "fp16", {.flops = shape.flops(), .bytes = shape.bytes()}, Rate::fp16);
}

// The bias of every 16th gate is 200 or -200, beside which the rest of it is small: e^s or e^-s is
// infinite in fp32. Of random inputs alone it never is.
void make_some_gates_steep(const Buffer<half>& b1) {
  std::vector<half> bias(b1.size());
  CUDA_CHECK(cudaMemcpy(bias.data(), b1, b1.size() * sizeof(half), cudaMemcpyDeviceToHost));
  for (size_t i = 15; i < bias.size(); i += 16) {
    bias[i] = __float2half_rn(i / 16 % 2 == 0 ? 200.0f : -200.0f);
  }
  CUDA_CHECK(cudaMemcpy(b1, bias.data(), b1.size() * sizeof(half), cudaMemcpyHostToDevice));
}

}  // namespace

GatingProblem::GatingProblem(Lesson& lesson, cublasHandle_t blas, const char* name,
                             GatingShape shape, int roundings, bool hard)
    : shape(shape),
      blas(blas),
      problem(declare(lesson, name, shape)),
      x(problem.input<half>(shape.rows * shape.channels)),
      // With x uniform in [-1, 1), both products have mean 0 and variance 1: the sigmoid's bend.
      W1(problem.input<half>(shape.channels * shape.hidden,
                             3 / sqrt(static_cast<double>(shape.channels)))),
      b1(problem.input<half>(shape.hidden, hard ? 200 : 1)),
      W2(problem.input<half>(shape.channels * shape.hidden,
                             3 / sqrt(static_cast<double>(shape.channels)))),
      b2(problem.input<half>(shape.hidden)),
      out(problem.output<half>(shape.rows * shape.hidden)),
      expected(problem.reference(shape.rows * shape.hidden)) {
  problem.adjust_inputs([b1 = b1] { make_some_gates_steep(b1); });
  problem.reference_from(scratch_bytes(), [this] { compute_reference(GatingStep::out); });
  problem.check(out, expected, tolerance(roundings), uncancelled);
}

GatingOperands GatingProblem::operands() const { return operands_of(*this, shape); }

double GatingProblem::scratch_bytes() const {
  const double rows = static_cast<double>(std::min(shape.rows, kReferenceRows));
  const double k = static_cast<double>(shape.channels), h = static_cast<double>(shape.hidden);
  return 8 * (rows * k + 2 * k * h + rows * h);
}

double GatingProblem::tolerance(int roundings) const {
  return dot_tolerance(shape.channels, tensor_core_sum(shape.channels),
                       sqrt(static_cast<double>(roundings)) * kRoundoffFp16);
}

void GatingProblem::compute_reference(GatingStep step) const {
  const int64_t K = shape.channels, H = shape.hidden, chunk = std::min(shape.rows, kReferenceRows);
  Scratch<double> x64(chunk * K), W1_64(K * H), W2_64(K * H), s1(chunk * H);
  to_fp64(W1, Type::fp16, K * H, W1_64);
  to_fp64(W2, Type::fp16, K * H, W2_64);
  for (int64_t row = 0; row < shape.rows; row += chunk) {
    const int64_t rows = std::min(chunk, shape.rows - row);
    double* s2 = expected + row * H;
    to_fp64(x + row * K, Type::fp16, rows * K, x64);
    matmul_fp64(blas, x64, W1_64, s1, rows, H, K);
    matmul_fp64(blas, x64, W2_64, s2, rows, H, K);
    const size_t count = static_cast<size_t>(rows * H);
    finish_step_kernel<<<primitives::blocks_for(count, 256), 256>>>(s1, s2, b1, b2, count, H, step);
    CUDA_CHECK(cudaGetLastError());
  }
  // A step's results are 1024 or more.
  if (step == GatingStep::out && few(static_cast<double>(out.size()))) find_uncancelled();
}

void GatingProblem::find_uncancelled() const {
  const size_t results = out.size();
  Scratch<double> squares(results);
  uncancelled_kernel<<<1, static_cast<unsigned>(results)>>>(operands(), squares);
  CUDA_CHECK(cudaGetLastError());
  std::vector<double> host(results);
  CUDA_CHECK(cudaMemcpy(host.data(), squares, results * sizeof(double), cudaMemcpyDeviceToHost));
  const double sum = std::accumulate(host.begin(), host.end(), 0.0);
  *uncancelled = sqrt(sum / static_cast<double>(results));
}

}  // namespace problems
