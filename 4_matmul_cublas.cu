// 4. The library: cuBLAS
//
//     C = A B        A, B, C: N x N, row-major
//
// NVIDIA ships hundreds of tuned matrix multiplications and a heuristic that picks one for a shape.
// Whoever needs a plain product calls it; lessons 1 to 3 show what is inside. Four things to know:
//
// Row-major. cuBLAS thinks in columns, as Fortran does: it takes element (row, col) of an m x n
// matrix from [row + col * m]. Memory that holds a row-major C therefore holds, in cuBLAS's eyes, C
// transposed. Since C^T = (A B)^T = B^T A^T, asking for the product of "B" and "A", in this order
// and both marked "not transposed", writes exactly our row-major C. No data moves for it.
//
// Precision. An fp32 product can run on the CUDA cores, in true fp32, or on the tensor cores after
// rounding every operand to TF32 (11 significant bits, of which 10 are stored): several times as
// fast, with an error some hundreds of times as large. fp16 and bf16 operands are half the bytes
// and twice the rate again. All of these accumulate in fp32. The four tables are four problems,
// each with a limit and a tolerance of its own: look at the errors beside the rates.
//
// Two interfaces. cuBLAS picks a kernel by itself. cuBLASLt, the other interface, proposes some for
// a shape: the row "cuBLASLt, best" has timed them, and keeps the fastest. (README's table of this
// lesson has no such rows, those of lessons 3 and 6 do.)
//
// Warm-up. The first call of a handle loads kernels and allocates a workspace; time the later ones.

#include "problems/product/library_product.h"
#include "problems/product/square_matmul.h"

using namespace problems;

// C = A B in elements of T (cuBLAS's name for it: `type`), accumulated in fp32 as `compute` says.
template <typename T>
void gemm(cublasHandle_t blas, const T* A, const T* B, T* C, int n, cudaDataType_t type,
          cublasComputeType_t compute) {
  const float one = 1, zero = 0;
  CUBLAS_CHECK(cublasGemmEx(blas, CUBLAS_OP_N, CUBLAS_OP_N, n, n, n, &one,  //
                            B, type, n, A, type, n, &zero, C, type, n, compute,
                            CUBLAS_GEMM_DEFAULT));
}

template <typename T>
void add_problem(Lesson& lesson, cublasHandle_t blas, const char* name, Rate rate, int needs_cc,
                 cudaDataType_t type, cublasComputeType_t compute, double tolerance) {
  const SquareMatmul<T> matmul(lesson, blas, name, name, rate, tolerance);
  const auto A = matmul.A, B = matmul.B, C = matmul.C;
  const int n = static_cast<int>(matmul.n);
  matmul.problem
      .kernel(std::string("cuBLAS ") + name, Role::library,
              [=] { gemm<T>(blas, A, B, C, n, type, compute); })
      .needs(needs_cc);
  const auto fastest = std::make_shared<LibraryProduct>(
      matmul.problem, LibraryProduct::Shape{n, n, n}, type, compute);
  matmul.problem.kernel("cuBLASLt, best", Role::library, [=] { (*fastest)(A, B, C); })
      .needs(needs_cc);
}

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "4_matmul_cublas",
                 .title = "C = A B by cuBLAS, in four precisions",
                 .n_meaning = "the matrices are N x N",
                 .n_gpu = 4096,
                 .n_cpu = 256});
  const int64_t n = lesson.n();
  const double tensor_sum = tensor_core_sum(n);

  Cublas blas;
  add_problem<float>(lesson, blas, "fp32", Rate::fp32, 75, CUDA_R_32F, CUBLAS_COMPUTE_32F,
                     dot_tolerance(n, kRoundoffFp32, kRoundoffFp32));
  add_problem<float>(lesson, blas, "tf32", Rate::tf32, 80, CUDA_R_32F, CUBLAS_COMPUTE_32F_FAST_TF32,
                     dot_tolerance(n, tensor_sum, kRoundoffFp32, kRoundoffTf32));
  add_problem<half>(lesson, blas, "fp16", Rate::fp16, 75, CUDA_R_16F, CUBLAS_COMPUTE_32F,
                    dot_tolerance(n, tensor_sum, kRoundoffFp16));
  add_problem<__nv_bfloat16>(lesson, blas, "bf16", Rate::fp16, 80, CUDA_R_16BF, CUBLAS_COMPUTE_32F,
                             dot_tolerance(n, tensor_sum, kRoundoffBf16));
  lesson.note("Significant bits of A and B: fp32 24, tf32 and fp16 11, bf16 8. The sums are fp32.");
  if (lesson.on_cpu()) lesson.note("The CPU backend's library does not round to tf32.");
  return lesson.run();
}
