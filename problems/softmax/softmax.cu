#include <cstdio>
#include <numeric>

#include "primitives/launch.h"
#include "problems/gradient_check.h"
#include "problems/softmax/softmax.h"
#include "problems/warps.cuh"

namespace problems {

namespace {

/// log(sum of exp) of a row, in two parts: the maximum, and the sum relative to it.
struct LogSum {
  double largest, sum;
};
__device__ LogSum log_sum(const double* row, int64_t classes, int lane) {
  double largest = row[0], sum = 0;
  for (int64_t c = lane; c < classes; c += 32) largest = fmax(largest, row[c]);
  largest = warp_max(largest);
  for (int64_t c = lane; c < classes; c += 32) sum += exp(row[c] - largest);
  return {largest, warp_sum(sum)};
}

/// In all of these a warp owns a row.
__device__ int64_t row_of_warp() {
  return static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
}

__global__ void softmax_kernel(double* logits, int64_t rows, int64_t classes) {
  const int lane = threadIdx.x % 32;
  if (row_of_warp() >= rows) return;
  double* row = logits + row_of_warp() * classes;
  const LogSum of_row = log_sum(row, classes, lane);
  __syncwarp();
  for (int64_t c = lane; c < classes; c += 32) {
    row[c] = exp(row[c] - of_row.largest) / of_row.sum;
  }
}

/// dlogits = probs * (dprobs - <probs, dprobs>)
__global__ void softmax_backward_kernel(const double* probs, const double* dprobs, double* dlogits,
                                        int64_t rows, int64_t classes) {
  const int lane = threadIdx.x % 32;
  if (row_of_warp() >= rows) return;
  const int64_t start = row_of_warp() * classes;
  double dot = 0;
  for (int64_t c = lane; c < classes; c += 32) dot += probs[start + c] * dprobs[start + c];
  dot = warp_sum(dot);
  for (int64_t c = lane; c < classes; c += 32) {
    dlogits[start + c] = probs[start + c] * (dprobs[start + c] - dot);
  }
}

/// loss[row] = log(sum of exp) - logits[row][label]; dlogits, if asked for, = softmax - one-hot
__global__ void cross_entropy_kernel(const double* logits, const int* labels, double* loss,
                                     double* dlogits, int64_t rows, int64_t classes) {
  const int lane = threadIdx.x % 32;
  const int64_t r = row_of_warp();
  if (r >= rows) return;
  const double* row = logits + r * classes;
  const LogSum of_row = log_sum(row, classes, lane);
  if (lane == 0) loss[r] = of_row.largest + log(of_row.sum) - row[labels[r]];
  if (!dlogits) return;
  for (int64_t c = lane; c < classes; c += 32) {
    dlogits[r * classes + c] =
        exp(row[c] - of_row.largest) / of_row.sum - (c == labels[r] ? 1.0 : 0.0);
  }
}

/// out = a + factor * b; out may be a.
__global__ void add_scaled_kernel(const double* a, double factor, const double* b, double* out,
                                  size_t count) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    out[i] = a[i] + factor * b[i];
  }
}

/// One thread an element.
__global__ void make_x_hard(float* x, size_t count, int D) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const size_t d = i % D, kind = i / D % 4;
  if (d == kSpecialInputs - 1) {
    x[i] = 1;
  } else if (d < kSpecialInputs - 1) {
    x[i] = d == kind ? 1 : 0;
  } else if (kind < 3) {
    x[i] = 0;
  }
}

__global__ void make_W_hard(float* W, int C) {
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= C) return;
  const bool last = c == C - 1;
  W[c] = last ? 0x1p101f : c % 2 == 0 ? 0x1p100f : -0x1p100f;
  W[C + c] = static_cast<float>(2000 + c % 8);
  const bool in_empty_part = C > 2 * kEmptyPart && c / kEmptyPart % 2 == 0;
  W[2 * static_cast<size_t>(C) + c] = !last && (c % 3 == 1 || in_empty_part) ? -INFINITY : 0;
}

/// One thread an element of x or of W's last row.
__global__ void make_only_minus_infinity_kernel(float* x, float* W, int B, int D, int C) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < B && i % 2 == 0) x[(i + size_t{1}) * D - 1] = -INFINITY;
  if (i < C) W[(D - size_t{1}) * C + i] = 1;
}

__global__ void mark_nan_kernel(const float* in, float* out, size_t count) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = isnan(in[i]) && __float_as_uint(in[i]) != 0xffffffffu ? -1 : in[i];
}

__global__ void mark_nan_fp64_kernel(double* values, size_t count) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count && isnan(values[i])) values[i] = -1;
}

void add_scaled(const double* a, double factor, const double* b, double* out, size_t count) {
  const size_t most = std::clamp<size_t>(count / 256, 1, 4096);
  add_scaled_kernel<<<static_cast<unsigned>(most), 256>>>(a, factor, b, out, count);
  CUDA_CHECK(cudaGetLastError());
}

/// <a, b>, and the sum of the absolute values of its terms.
struct Dot {
  double sum = 0, absolute = 0;
};
Dot dot(const double* a, const double* b, size_t count) {
  const std::vector<double> left = to_host(a, count), right = to_host(b, count);
  Dot result;
  for (size_t i = 0; i < count; ++i) {
    result.sum += left[i] * right[i];
    result.absolute += fabs(left[i] * right[i]);
  }
  return result;
}

/// Random numbers in [-scale, scale).
struct Direction : Storage {
  Direction(size_t elements, double range, uint64_t seed) {
    count = elements;
    type = Type::fp64;
    element_bytes = sizeof(double);
    scale = range;
    allocate();
    fill_random(*this, seed);
  }
  operator const double*() const { return static_cast<const double*>(data); }
};

constexpr double kStep = 1e-6;

GradientCheck judge(double above, double below, double slope, double absolute) {
  return {.difference = fabs((above - below) / (2 * kStep) - slope),
          .slope = fabs(slope),
          .bound = 1e-8 * absolute};
}

double as_double(size_t count) { return static_cast<double>(count); }

}  // namespace

double softmax_tolerance(int64_t inputs, double u_sum, double u_in) {
  const double logits = kLogitRms * dot_tolerance(inputs, u_sum, 0, u_in);
  const double units = sqrt((4 * 4.0 * 4.0 + 2.0 * 2.0) / 3);
  return sqrt(2.0) * logits + 4 * units * kRoundoffFp32;
}

void Uncancelled::find(const void* x, const void* W, Type type, const SoftmaxShape& shape,
                       const Given& given) const {
  const size_t B = shape.rows, D = shape.inputs, C = shape.classes, H = given.heads;
  const auto few_of = [](size_t one, size_t other) {
    return few(as_double(one) * as_double(other));
  };
  // More products than this take seconds, and few results are the sums of so many only at extremes.
  constexpr double kMostProducts = 0x1p24;
  *probs = *loss = *dx = *dW = 0;
  if (!few_of(B, H * C) && !(given.dprobs && (few_of(B, D) || few_of(D, C)))) return;
  if (as_double(D) * shape.logits() * as_double(H) > kMostProducts) return;
  const auto host = [](const void* from, Type type, size_t count) {
    Scratch<double> converted(count);
    to_fp64(from, type, count, converted);
    return to_host(converted, count);
  };
  const std::vector<double> X = host(x, type, B * D), weights = host(W, type, D * H * C);
  const std::vector<double> dprobs(given.dprobs ? host(given.dprobs, Type::fp32, B * C)
                                                : std::vector<double>(B * H * C));
  std::vector<int> labels(B);
  if (given.labels) {
    CUDA_CHECK(cudaMemcpy(labels.data(), given.labels, B * sizeof(int), cudaMemcpyDeviceToHost));
  }
  const auto square = [](double value) { return value * value; };
  const double assumed = sqrt(2.0) * kLogitRms;
  std::vector<double> dW_squares(D * H * C);
  double probs_sum = 0, loss_sum = 0, dx_sum = 0;
  for (size_t row = 0; row < B * H; ++row) {
    const size_t b = row / H, first = row % H * C;  // of W's columns
    std::vector<double> p(C), T(C);                 // T: squared
    for (size_t k = 0; k < D; ++k) {
      for (size_t c = 0; c < C; ++c) {
        const double term = X[b * D + k] * weights[k * H * C + first + c];
        p[c] += term, T[c] += square(term);
      }
    }
    const double largest = *std::max_element(p.begin(), p.end());
    double sum = 0, shared = 0, shared_d = 0;
    for (double& value : p) sum += value = exp(value - largest);
    for (double& value : p) value /= sum;
    for (size_t c = 0; c < C; ++c) {
      shared += square(p[c]) * T[c];
      shared_d += square(p[c] * dprobs[row * C + c]);
    }
    loss_sum += T[labels[b]] + shared;
    for (size_t c = 0; c < C; ++c) {
      const double more = (T[c] + shared) / square(assumed);
      probs_sum += square(p[c]) * more;
      const double d =
          square(p[c]) * (square(dprobs[row * C + c]) + shared_d) * std::max(1.0, more);
      for (size_t k = 0; given.dprobs && k < D; ++k) {
        dx_sum += square(weights[k * C + c]) * d;
        dW_squares[k * C + c] += square(X[b * D + k]) * d;
      }
    }
  }
  const double dW_sum = std::accumulate(dW_squares.begin(), dW_squares.end(), 0.0);
  const auto rms = [](double sum, size_t count) { return sqrt(sum / static_cast<double>(count)); };
  if (few_of(B, H * C)) *probs = rms(probs_sum, B * H * C), *loss = rms(loss_sum, B) / assumed;
  if (few_of(B, D)) *dx = rms(dx_sum, B * D);
  if (few_of(D, C)) *dW = rms(dW_sum, D * C);
}

void softmax_fp64(double* logits, int64_t rows, int64_t classes) {
  softmax_kernel<<<primitives::blocks_for(rows, 8), 256>>>(logits, rows, classes);
  CUDA_CHECK(cudaGetLastError());
}

std::string GradientCheck::verdict(const char* name) const {
  // Written so that a NaN is never right.
  if (!(difference <= bound)) {
    fail(kVerificationFailed,
         "%s: the reference's gradient is %.2e off a finite difference; the bound is %.2e", name,
         difference, bound);
  }
  char text[200];
  snprintf(text, sizeof text,
           "%s: reference against a central difference: %.1e apart, of %.1e; bound %.1e", name,
           difference, slope, bound);
  return text;
}

double backward_scratch(const SoftmaxShape& shape) {
  const double b = as_double(shape.rows), d = as_double(shape.inputs), c = as_double(shape.classes);
  return 8 * (3 * b * d + 3 * d * c + 4 * b * c);
}

GradientCheck reference_backward(cublasHandle_t blas, const BackwardReference& reference,
                                 const SoftmaxShape& shape) {
  const int64_t B = shape.rows, D = shape.inputs, C = shape.classes;
  Scratch<double> x(B * D), W(D * C), dprobs(B * C), probs(B * C), dlogits(B * C);
  to_fp64(reference.x, Type::fp32, B * D, x);
  to_fp64(reference.W, Type::fp32, D * C, W);
  to_fp64(reference.dprobs, Type::fp32, B * C, dprobs);
  const auto forward = [&](const double* some_x, const double* some_W) {
    matmul_fp64(blas, some_x, some_W, probs, B, C, D);
    softmax_fp64(probs, B, C);
  };
  forward(x, W);
  softmax_backward_kernel<<<primitives::blocks_for(B, 8), 256>>>(probs, dprobs, dlogits, B, C);
  CUDA_CHECK(cudaGetLastError());
  // Row-major, as in matmul_fp64(): operands swapped; the one that the formula transposes, marked.
  const double one = 1, zero = 0;
  const int b = static_cast<int>(B), d = static_cast<int>(D), c = static_cast<int>(C);
  CUBLAS_CHECK(cublasDgemm(blas, CUBLAS_OP_T, CUBLAS_OP_N, d, b, c, &one, W, c, dlogits, c, &zero,
                           reference.dx, d));
  CUBLAS_CHECK(cublasDgemm(blas, CUBLAS_OP_N, CUBLAS_OP_T, c, d, b, &one, dlogits, c, x, d, &zero,
                           reference.dW, c));

  const Direction x_direction(B * D, 1, 1001);
  const Direction W_direction(D * C, kWeightScale / sqrt(as_double(D)), 1002);
  const double slope =
      dot(reference.dx, x_direction, B * D).sum + dot(reference.dW, W_direction, D * C).sum;
  Scratch<double> moved_x(B * D), moved_W(D * C);
  Dot value[2];
  for (int side = 0; side < 2; ++side) {
    const double step = side == 0 ? kStep : -kStep;
    add_scaled(x, step, x_direction, moved_x, B * D);
    add_scaled(W, step, W_direction, moved_W, D * C);
    forward(moved_x, moved_W);
    value[side] = dot(probs, dprobs, B * C);
  }
  return judge(value[0].sum, value[1].sum, slope, value[0].absolute);
}

double cross_entropy_scratch(const SoftmaxShape& shape) {
  return reference_scratch(shape.rows, shape.classes, shape.inputs) +
         8 * (3 * shape.logits() + as_double(shape.rows));
}

GradientCheck reference_cross_entropy(cublasHandle_t blas, const CrossEntropyReference& reference,
                                      const SoftmaxShape& shape) {
  const int64_t B = shape.rows, D = shape.inputs, C = shape.classes;
  Scratch<double> logits(B * C), moved(B * C), loss(B);
  reference_matmul<float>(blas, reference.x, reference.W, logits, B, C, D);
  cross_entropy_kernel<<<primitives::blocks_for(B, 8), 256>>>(
      logits, reference.labels, reference.loss, reference.dlogits, B, C);
  CUDA_CHECK(cudaGetLastError());

  const Direction direction(B * C, 1, 1003);
  const double slope = dot(reference.dlogits, direction, B * C).sum;
  double value[2] = {}, absolute = 0;
  for (int side = 0; side < 2; ++side) {
    add_scaled(logits, side == 0 ? kStep : -kStep, direction, moved, B * C);
    cross_entropy_kernel<<<primitives::blocks_for(B, 8), 256>>>(moved, reference.labels, loss,
                                                                nullptr, B, C);
    CUDA_CHECK(cudaGetLastError());
    for (const double term : to_host(loss, B)) {
      value[side] += term;
      absolute += fabs(term) / 2;
    }
  }
  return judge(value[0], value[1], slope, absolute);
}

void make_hard(float* x, float* W, const SoftmaxShape& shape) {
  const size_t count = static_cast<size_t>(shape.rows) * shape.inputs;
  make_x_hard<<<primitives::blocks_for(count, 256), 256>>>(x, count,
                                                           static_cast<int>(shape.inputs));
  make_W_hard<<<primitives::blocks_for(shape.classes, 256), 256>>>(W,
                                                                   static_cast<int>(shape.classes));
  CUDA_CHECK(cudaGetLastError());
}

void make_only_minus_infinity(float* x, float* W, const SoftmaxShape& shape) {
  make_only_minus_infinity_kernel<<<
      primitives::blocks_for(std::max(shape.rows, shape.classes), 256), 256>>>(
      x, W, static_cast<int>(shape.rows), static_cast<int>(shape.inputs),
      static_cast<int>(shape.classes));
  CUDA_CHECK(cudaGetLastError());
}

void mark_nan(const float* in, float* out, size_t count) {
  mark_nan_kernel<<<primitives::blocks_for(count, 256), 256>>>(in, out, count);
  CUDA_CHECK(cudaGetLastError());
}

void mark_nan(double* values, size_t count) {
  mark_nan_fp64_kernel<<<primitives::blocks_for(count, 256), 256>>>(values, count);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace problems
