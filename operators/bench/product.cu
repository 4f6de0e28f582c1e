// Benchmark of operators/product: C = A B, each way beside cuBLAS and the best of cuBLASLt.
//
//     A (N x D), B (D x C), C (N x C), row-major and dense: fp16, bf16, fp32 in TF32, fp32
//
// The table of fp32 has two rows of the operator: true fp32, on the CUDA cores, and 3xTF32, which
// has to keep to the same bound on tensor cores.

#include <memory>
#include <string>

#include "common/lesson.h"
#include "common/numerics.h"
#include "operators/product/fp32/fp32.cuh"
#include "operators/product/half_product.cuh"
#include "operators/product/tf32_product.cuh"
#include "problems/product/library_product.h"
#include "problems/workspace.h"

using namespace problems;
using namespace operators::product;

// What a type is called, which peak it has, what the library calls it, and how exact it is.
struct Precision {
  const char* name;
  Rate rate;
  int capability;
  cudaDataType_t type;
  cublasComputeType_t compute;
  double tolerance;
};

// A table: inputs, the fp64 product, and the library's rows.
template <typename T>
struct ProductTable {
  Problem& problem;
  Buffer<T> A, B, C;
  Buffer<double> expected;

  ProductTable(Lesson& lesson, cublasHandle_t blas, const Precision& of, const ProductShape& shape)
      : problem(lesson.problem(of.name, {{"N", shape.rows}, {"C", shape.cols}, {"D", shape.depth}},
                               of.name, work_of(shape), of.rate)),
        A(problem.input<T>(int64_t{shape.rows} * shape.depth)),
        B(problem.input<T>(int64_t{shape.depth} * shape.cols)),
        C(problem.output<T>(int64_t{shape.rows} * shape.cols)),
        expected(problem.reference(C.size())) {
    const auto [m, n, k] = shape;
    problem.reference_from(reference_scratch(m, n, k),
                           [blas, to = expected, a = A, b = B, m = m, n = n, k = k] {
                             reference_matmul<T>(blas, a, b, to, m, n, k);
                           });
    problem.check(C, expected, of.tolerance);
    const auto product = [=, a = A, b = B, c = C, m = m, n = n, k = k] {
      const float one = 1, zero = 0;  // row-major: B and A swapped, see lesson 4
      CUBLAS_CHECK(cublasGemmEx(blas, CUBLAS_OP_N, CUBLAS_OP_N, n, m, k, &one, b, of.type, n, a,
                                of.type, k, &zero, c, of.type, n, of.compute, CUBLAS_GEMM_DEFAULT));
    };
    problem.kernel(std::string("cuBLAS ") + of.name, Role::library, product).needs(of.capability);
    const auto best = std::make_shared<LibraryProduct>(problem, LibraryProduct::Shape{m, n, k},
                                                       of.type, of.compute);
    problem
        .kernel("cuBLASLt, best", Role::library, [best, a = A, b = B, c = C] { (*best)(a, b, c); })
        .needs(of.capability);
  }

  static Work work_of(const ProductShape& shape) {
    const double m = shape.rows, n = shape.cols, k = shape.depth;
    return {.flops = 2 * m * n * k, .bytes = (m * k + k * n + m * n) * sizeof(T)};
  }

  // A row of the operator, if it has a way on this device.
  template <class Product>
  Kernel* add(const char* name, const ProductShape& shape) const {
    Product product({workspace_of(problem)}, A, B, C, shape);
    const auto ways = product.ways();
    if (ways.empty()) return nullptr;
    problem.compare(name, "cuBLASLt, best",
                    problem.name + ", " + name + ": it runs at % of cuBLASLt's rate.");
    return &problem.kernel(name, Role::ours, ways);
  }
};

int main(int argc, char** argv) {
  Lesson lesson(
      argc, argv,
      {.name = "operators_product",
       .title = "operators/product: C = A B of any shape",
       .n_meaning = "the rows of A and C",
       .n_gpu = 4096,
       .n_cpu = 256,
       .options = {{"--columns", "of B and C; 0: N", 0}, {"--depth", "columns of A; 0: N", 0}},
       .choices = {{"--type", "only this table", {"all", "fp16", "bf16", "tf32", "fp32"}}}});
  const auto extent = [&](const char* option) {
    return static_cast<int>(lesson.option(option) > 0 ? lesson.option(option) : lesson.n());
  };
  const ProductShape shape{static_cast<int>(lesson.n()), extent("--columns"), extent("--depth")};
  const auto wanted = [&](const char* type) {
    return lesson.choice("--type") == "all" || lesson.choice("--type") == type;
  };
  const int64_t depth = shape.depth;
  const double tensor_sum = tensor_core_sum(depth);

  Cublas blas;
  const auto add_half = [&]<typename T>(const Precision& of) {
    if (!wanted(of.name)) return;
    const ProductTable<T> table(lesson, blas, of, shape);
    if (Kernel* row = table.template add<HalfProduct<T>>("operator", shape)) row->needs(80);
  };
  add_half.operator()<half>({"fp16", Rate::fp16, 75, CUDA_R_16F, CUBLAS_COMPUTE_32F,
                             dot_tolerance(depth, tensor_sum, kRoundoffFp16)});
  add_half.operator()<__nv_bfloat16>({"bf16", Rate::fp16, 80, CUDA_R_16BF, CUBLAS_COMPUTE_32F,
                                      dot_tolerance(depth, tensor_sum, kRoundoffBf16)});
  if (wanted("tf32")) {
    const ProductTable<float> table(
        lesson, blas,
        {"tf32", Rate::tf32, 80, CUDA_R_32F, CUBLAS_COMPUTE_32F_FAST_TF32,
         dot_tolerance(depth, tensor_sum, kRoundoffFp32, kRoundoffTf32)},
        shape);
    if (Kernel* row = table.add<Tf32Product<Math::tf32>>("operator", shape)) row->needs(80);
  }
  if (wanted("fp32")) {
    const ProductTable<float> table(lesson, blas,
                                    {"fp32", Rate::fp32, 75, CUDA_R_32F, CUBLAS_COMPUTE_32F,
                                     dot_tolerance(depth, kRoundoffFp32, kRoundoffFp32)},
                                    shape);
    table.add<Fp32Product>("operator", shape);
    if (Kernel* row = table.add<Tf32Product<Math::split>>("operator, 3xTF32", shape)) {
      // A factor is the sum of two TF32 numbers, of which the second is rounded; and the product of
      // the two second ones is left out. Each of these three is at most u^2 of a term: as if each
      // factor were rounded to 1.5 u^2.
      const double of_factor = 1.5 * kRoundoffTf32 * kRoundoffTf32;
      row->checks = {{table.C.storage(), table.expected.storage(),
                      dot_tolerance(depth, kRoundoffFp32, kRoundoffFp32, of_factor)}};
      row->needs(80);
    }
  }
  return lesson.run();
}
