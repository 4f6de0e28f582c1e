// Kernels that are wrong, each in one way that a real one has been wrong in. The verification that
// passes every kernel of the lessons has to reject each of them: test_verification.py, beside this
// file, runs them one by one.
//
//     C = A B + bias        A, B, C: N x N, bias: N, fp32, row-major

#include "common/lesson.h"
#include "common/numerics.h"

using namespace common;

enum class Bug {
  none,
  last_k_tile_skipped,
  last_row_not_written,
  column_off_by_one,
  missing_barrier,
  bias_forgotten,
  multiples_of_32_only,
  one_wrong_element,
  adds_to_old_output,
  transposed_result,
  infinite_element,
  half_precision_sum,
  writes_zeros,
  writes_behind_output,
  writes_before_output,
  changes_input,
  block_too_large,
  counter_left_as_it_is,
  half_left_as_it_is,
  none_after_the_others,
};

constexpr int kTile = 32;

// Lesson 2's first kernel, with a bug planted.
template <Bug bug>
__global__ void matmul(const float* A, const float* B, const float* bias, float* C, int n) {
  __shared__ float a_tile[kTile][kTile];
  __shared__ float b_tile[kTile][kTile];
  const int x = threadIdx.x, y = threadIdx.y;
  const int row = blockIdx.y * kTile + y, col = blockIdx.x * kTile + x;
  const int end = bug == Bug::last_k_tile_skipped ? (n - 1) / kTile * kTile : n;
  float sum = 0;
  for (int k0 = 0; k0 < end; k0 += kTile) {
    const int b_col = bug == Bug::column_off_by_one ? (col + 1) % n : col;
    a_tile[y][x] = row < n && k0 + x < n ? A[static_cast<size_t>(row) * n + k0 + x] : 0;
    b_tile[y][x] = k0 + y < n && col < n ? B[static_cast<size_t>(k0 + y) * n + b_col] : 0;
    if (bug != Bug::missing_barrier) __syncthreads();
    for (int k = 0; k < kTile; ++k) {
      sum += a_tile[y][k] * b_tile[k][x];
      if (bug == Bug::half_precision_sum) sum = __half2float(__float2half_rn(sum));
    }
    __syncthreads();
  }
  if (row >= n || col >= n) return;
  if (bug == Bug::last_row_not_written && row == n - 1) return;
  if (bug != Bug::bias_forgotten) sum += bias[col];
  if (bug == Bug::one_wrong_element && row == n - 1 && col == n - 1) sum = -sum;
  if (bug == Bug::infinite_element && row == n / 2 && col == n / 3) {
    sum = __int_as_float(0x7f800000);
  }
  if (bug == Bug::writes_zeros) sum = 0;
  const size_t at = bug == Bug::transposed_result ? static_cast<size_t>(col) * n + row
                                                  : static_cast<size_t>(row) * n + col;
  C[at] = bug == Bug::adds_to_old_output ? C[at] + sum : sum;
}

// result[row][col] += bias[col], one thread an element.
__global__ void add_bias(double* result, const float* bias, int n) {
  const int col = blockIdx.x * blockDim.x + threadIdx.x;
  if (col < n) result[static_cast<size_t>(blockIdx.y) * n + col] += bias[col];
}

// values[i] = value, one thread an element.
__global__ void set_all(float* values, float value, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) values[i] = value;
}

// 0, but for every 1000th value, which is 1000; and what the first of these is times `first`.
template <typename T>
__global__ void set_few(T* values, double first, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) values[i] = static_cast<T>(i % 1000 != 0 ? 0 : i == 0 ? 1000 * first : 1000);
}

// What stands beside C is somebody else's, and so are A and B.
__global__ void reach_out(float* at) { *at = 1; }

// The launch fails.
__global__ void stop() { __trap(); }

// C is right if the counter was zero, which is how the next launch should find it.
__global__ void count_rows(unsigned* counter, float* C) {
  if (atomicAdd(counter, 1u) > 0) C[0] = 0;
}

// The same with two counters that take turns: counters[0] says in which launch, and neither is set
// back. So the third launch is the first that finds one as a launch has left it.
__global__ void count_rows_in_turn(unsigned* counters, float* C) {
  const unsigned launch = counters[0]++;
  if (counters[1 + launch % 2]++ > 0) C[0] = 0;
}

template <Bug bug>
void add(Problem& problem, const char* name, Buffer<float> A, Buffer<float> B, Buffer<float> bias,
         Buffer<float> C, Buffer<unsigned> counter, int n) {
  const int blocks = bug == Bug::multiples_of_32_only ? n / kTile : (n + kTile - 1) / kTile;
  const dim3 block(kTile, bug == Bug::block_too_large ? 2 * kTile : kTile);
  problem.kernel(name, Role::ours, [=] {
    if (blocks > 0) matmul<bug><<<dim3(blocks, blocks), block>>>(A, B, bias, C, n);
    if (bug == Bug::writes_behind_output) reach_out<<<1, 1>>>(C + C.size());
    if (bug == Bug::writes_before_output) reach_out<<<1, 1>>>(C - 1);
    if (bug == Bug::changes_input) reach_out<<<1, 1>>>(B + B.size() / 2);
    if (bug == Bug::counter_left_as_it_is) count_rows<<<1, 1>>>(counter, C);
    if (bug == Bug::half_left_as_it_is) count_rows_in_turn<<<1, 1>>>(counter + 1, C);
  });
}

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "broken_kernels",
                 .title = "kernels that verification must reject",
                 .n_meaning = "the matrices are N x N",
                 .n_gpu = 256,
                 .n_cpu = 64,
                 .flags = {{"--wild", "with a kernel that reaches outside of all memory"},
                           {"--stop", "with a kernel whose launch fails"}}});
  const int n = static_cast<int>(lesson.n());
  const size_t elements = static_cast<size_t>(n) * n;
  Problem& problem = lesson.problem("broken", {{"N", n}}, "fp32",
                                    {.flops = 2.0 * n * n * n, .bytes = 12.0 * n * n}, Rate::fp32);
  auto A = problem.input<float>(elements);
  auto B = problem.input<float>(elements);
  auto bias = problem.input<float>(n);
  auto C = problem.output<float>(elements);
  auto counter = problem.workspace<unsigned>(4);
  auto expected = problem.reference(elements);
  Cublas blas;
  problem.reference_from(reference_scratch(n, n, n), [&] {
    reference_matmul<float>(blas, A, B, expected, n, n, n);
    add_bias<<<dim3((n + 255) / 256, n), 256>>>(expected, bias, n);
  });
  problem.check(C, expected, dot_tolerance(n + 1, kRoundoffFp32, kRoundoffFp32));

  add<Bug::none>(problem, "none", A, B, bias, C, counter, n);
  add<Bug::last_k_tile_skipped>(problem, "last_k_tile_skipped", A, B, bias, C, counter, n);
  add<Bug::last_row_not_written>(problem, "last_row_not_written", A, B, bias, C, counter, n);
  add<Bug::column_off_by_one>(problem, "column_off_by_one", A, B, bias, C, counter, n);
  add<Bug::missing_barrier>(problem, "missing_barrier", A, B, bias, C, counter, n);
  add<Bug::bias_forgotten>(problem, "bias_forgotten", A, B, bias, C, counter, n);
  add<Bug::multiples_of_32_only>(problem, "multiples_of_32_only", A, B, bias, C, counter, n);
  add<Bug::one_wrong_element>(problem, "one_wrong_element", A, B, bias, C, counter, n);
  add<Bug::adds_to_old_output>(problem, "adds_to_old_output", A, B, bias, C, counter, n);
  add<Bug::transposed_result>(problem, "transposed_result", A, B, bias, C, counter, n);
  add<Bug::infinite_element>(problem, "infinite_element", A, B, bias, C, counter, n);
  add<Bug::half_precision_sum>(problem, "half_precision_sum", A, B, bias, C, counter, n);
  add<Bug::writes_zeros>(problem, "writes_zeros", A, B, bias, C, counter, n);
  add<Bug::writes_behind_output>(problem, "writes_behind_output", A, B, bias, C, counter, n);
  add<Bug::writes_before_output>(problem, "writes_before_output", A, B, bias, C, counter, n);
  add<Bug::changes_input>(problem, "changes_input", A, B, bias, C, counter, n);
  add<Bug::block_too_large>(problem, "block_too_large", A, B, bias, C, counter, n);
  add<Bug::counter_left_as_it_is>(problem, "counter_left_as_it_is", A, B, bias, C, counter, n);
  add<Bug::half_left_as_it_is>(problem, "half_left_as_it_is", A, B, bias, C, counter, n);
  if (lesson.flag("--stop")) problem.kernel("stops", Role::ours, [=] { stop<<<1, 1>>>(); });
  add<Bug::none_after_the_others>(problem, "none_after_the_others", A, B, bias, C, counter, n);

  if (lesson.flag("--wild")) {
    problem.kernel("wild", Role::ours, [=] { reach_out<<<1, 1>>>(C + (size_t{1} << 42)); });
  }

  // Where 0 is expected everywhere there is nothing that an error could be a part of.
  Problem& zero =
      lesson.problem("zero", {{"N", n}}, "fp32", {.flops = 1.0 * n, .bytes = 4.0 * n}, Rate::fp32);
  auto values = zero.output<float>(n);
  auto zeros = zero.reference(n);
  zero.reference_from(0, [=] { CUDA_CHECK(cudaMemset(zeros, 0, n * sizeof(double))); });
  zero.check(values, zeros, kRoundoffFp32);
  const auto set = [&](const char* name, auto value) {
    zero.kernel(name, Role::ours, [=] { set_all<<<(n + 255) / 256, 256>>>(values, value, n); });
  };
  set("all_zero", 0.0f);
  set("all_small", 1e-30f);
  set("all_nan", __builtin_nanf(""));

  // Elements of 30 times the rms: one may be off by 1 % of itself, which is 0.3 times the rms.
  constexpr int kCount = 5000;
  Problem& few = lesson.problem("few", {{"N", kCount}}, "fp32",
                                {.flops = 1.0 * kCount, .bytes = 4.0 * kCount}, Rate::fp32);
  auto large = few.output<float>(kCount);
  auto expected_large = few.reference(kCount);
  few.reference_from(
      0, [=] { set_few<double><<<(kCount + 255) / 256, 256>>>(expected_large, 1, kCount); });
  few.check(large, expected_large, 0.01);
  const auto set_first = [&](const char* name, double first) {
    few.kernel(name, Role::ours,
               [=] { set_few<float><<<(kCount + 255) / 256, 256>>>(large, first, kCount); });
  };
  set_first("large_rounded", 1.008);
  set_first("large_wrong", 1.012);
  return lesson.run();
}
