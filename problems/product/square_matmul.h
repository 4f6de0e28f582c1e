// The problem of lessons 1 to 4: C = A B for square, row-major, dense matrices of T.
#pragma once

#include "common/lesson.h"
#include "common/numerics.h"

namespace problems {

using namespace common;

template <typename T>
struct SquareMatmul {
  /// A table `name` with random A and B, and C held to their fp64 product by `tolerance`.
  SquareMatmul(Lesson& lesson, cublasHandle_t blas, const char* name, const char* dtype, Rate rate,
               double tolerance)
      : n(lesson.n()),
        problem(lesson.problem(name, {{"N", n}}, dtype,
                               {.flops = 2.0 * static_cast<double>(n) * n * n,
                                .bytes = 3.0 * static_cast<double>(n) * n * sizeof(T)},
                               rate)),
        A(problem.input<T>(n * n)),
        B(problem.input<T>(n * n)),
        C(problem.output<T>(n * n)) {
    const Buffer<double> expected = problem.reference(n * n);
    problem.reference_from(reference_scratch(n, n, n), [blas, expected, a = A, b = B, n = n] {
      reference_matmul<T>(blas, a, b, expected, n, n, n);
    });
    problem.check(C, expected, tolerance);
  }

  int64_t n;
  Problem& problem;
  Buffer<T> A, B, C;
};

}  // namespace problems
