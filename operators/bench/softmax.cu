// Benchmark of operators/softmax: softmax(x W) of any shape, unfused and fused, beside the
// library's product with the operator's softmax after it.
//
// The rows of a table, for each arithmetic that keeps to the table's bound:
//
//     library   the fastest product that cuBLAS and cuBLASLt have, then the operator's softmax
//     unfused   the operator's product, then the same softmax
//     fused     product and softmax in one launch, or in two that leave less in memory
//
// TF32's tables have the operator in TF32. Those of fp32 have it in fp32 and, named 3xTF32, with
// each factor as the sum of two TF32 numbers. --kinds has a row for each kind of kernel that the
// operator chooses from.

#include <memory>
#include <string>
#include <vector>

#include "operators/softmax/rows.cuh"
#include "operators/softmax/softmax_product.cuh"
#include "problems/product/library_product.h"
#include "problems/softmax/softmax_problem.h"
#include "problems/workspace.h"

using namespace problems;
using namespace operators::softmax;

// logits (B, C) = x W by cuBLAS; row-major: W and x swapped, see lesson 4.
void library_product(cublasHandle_t blas, const float* x, const float* W, float* logits,
                     const SoftmaxShape& shape, cublasComputeType_t compute) {
  const float one = 1, zero = 0;
  const int B = static_cast<int>(shape.rows), D = static_cast<int>(shape.inputs),
            C = static_cast<int>(shape.classes);
  CUBLAS_CHECK(cublasGemmEx(blas, CUBLAS_OP_N, CUBLAS_OP_N, C, B, D, &one, W, CUDA_R_32F, C, x,
                            CUDA_R_32F, D, &zero, logits, CUDA_R_32F, C, compute,
                            CUBLAS_GEMM_DEFAULT));
}

// A table is one shape in one precision.
struct SoftmaxTable : SoftmaxProblem {
  Buffer<float> logits;
  Buffer<float2> halves;  // of a softmax of long rows: maximum and sum of parts of a row

  SoftmaxTable(Lesson& lesson, About about, const SoftmaxShape& shape)
      : SoftmaxProblem(lesson, about, shape),
        logits(problem.output<float>(shape.rows * shape.classes)),
        halves(problem.output<float2>(shape.rows * blocks_for(shape.classes, kPartColumns))) {}

  // cuBLAS's own choice or one of cuBLASLt's candidates, whichever is the fastest.
  void add_library(cublasHandle_t blas) const {
    const bool tf32 = about == About::tf32;
    const auto compute = tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    std::vector<Way> ways;
    const auto add_product = [&](const std::string& name, const std::function<void()>& product) {
      const auto launch = [product, *this] {
        product();
        softmax<float>(logits, probs, shape, halves);
      };
      // The estimate is the same for all, so none is left out as hopeless.
      ways.push_back({name, shape.flops() / (tf32 ? 400e6 : 50e6), launch});
    };
    add_product("cuBLAS", [=, *this] { library_product(blas, x, W, logits, shape, compute); });
    const LibraryProduct::Shape product_shape = {shape.rows, shape.classes, shape.inputs};
    const auto product =
        std::make_shared<LibraryProduct>(problem, product_shape, CUDA_R_32F, compute);
    for (int i = 0; i < product->candidates(); ++i) {
      add_product("cuBLASLt, candidate " + std::to_string(i),
                  [=, *this] { product->call(i, x, W, logits); });
    }
    add("library", Role::library, tf32 ? 80 : 0, ways, kMostWays);
  }

  // A row for the operator's unfused ways and one for its fused ways; with each_kind two for each
  // kind of its kernels.
  void add_operator(const SoftmaxProduct& product, Math math, bool each_kind) const {
    // Rows of 3xTF32 say so, since their tables have rows of fp32, too. Rows of TF32 say so only in
    // the tables of only -inf, which have all three arithmetics.
    const std::string suffix = math == Math::split             ? ", 3xTF32"
                               : about == About::only_infinite ? math == Math::tf32 ? ", TF32" : ""
                                                               : "";
    const auto add_both = [&](const std::string& row, int needs, const auto& ways) {
      if (!ways.unfused.empty()) {
        add("unfused" + row, Role::ours, needs, ways.unfused, kMostWays);
        problem.compare("unfused" + row, "library",
                        name + row + ": unfused against library, % times as fast.");
      }
      if (ways.fused.empty()) return;
      add("fused" + row, Role::ours, needs, ways.fused, kMostWays);
      problem.compare("fused" + row, "unfused" + row,
                      name + row + ": fused against unfused, % times as fast.");
    };
    const std::vector<Kind> kinds = product.kinds(math);
    if (!each_kind) add_both(suffix, 0, product.together(kinds));
    for (const Kind& kind : kinds) {
      if (each_kind) add_both(": " + kind.name + suffix, kind.capability, kind);
    }
  }
};

void add_table(Lesson& lesson, cublasHandle_t blas, About about, const SoftmaxShape& shape) {
  const SoftmaxTable table(lesson, about, shape);
  table.verify(blas, lesson.flag("--hard-rows"));
  table.add_library(blas);
  const SoftmaxProduct product({workspace_of(table.problem)}, table.x, table.W, table.probs, shape);
  const bool each_kind = lesson.flag("--kinds");
  if (about != About::fp32) table.add_operator(product, Math::tf32, each_kind);
  if (about == About::tf32) return;
  table.add_operator(product, Math::fp32, each_kind);
  table.add_operator(product, Math::split, each_kind);
}

int main(int argc, char** argv) {
  Lesson lesson(
      argc, argv,
      {.name = "operators_softmax",
       .title = "operators/softmax: softmax(x W) of any shape, unfused and fused",
       .n_meaning = "B, rows of x; without a shape: some of those of --all",
       .n_gpu = 4096,
       .n_cpu = 64,
       .options = {{"--inputs", "D, columns of x", 1024}, {"--classes", "C, columns of W", 1000}},
       .flags = {{"--all", "the fp32 tables, too; without a shape: five shapes (CPU: four)"},
                 {"--kinds", "rows for each kind of kernel that the operator chooses from"},
                 {"--hard-rows", "make logits huge, equal and -inf in some rows"}}});
  const bool all = lesson.flag("--all");
  std::vector<SoftmaxShape> shapes = {
      {64, 128, 10}, {256, 512, 50}, {1024, 1024, 100}, {4096, 1024, 1000}, {8192, 4096, 8192}};
  if (lesson.on_cpu()) shapes = {{8, 16, 10}, {33, 65, 50}, {17, 129, 130}, {5, 40, 300}};
  if (lesson.given("N") || lesson.given("--inputs") || lesson.given("--classes")) {
    shapes = {{lesson.n(), lesson.option("--inputs"), lesson.option("--classes")}};
  } else if (!all) {
    shapes.erase(shapes.begin() + 2), shapes.erase(shapes.begin());
  }
  if (lesson.flag("--hard-rows") && shapes.front().inputs < kSpecialInputs) {
    fail(kBadUsage, "--hard-rows needs at least %d inputs", kSpecialInputs);
  }

  Cublas blas;
  const bool has_tf32 = lesson.device().major >= 8;
  for (const SoftmaxShape& shape : shapes) {
    if (all || has_tf32) add_table(lesson, blas, About::tf32, shape);
    if (all || !has_tf32) add_table(lesson, blas, About::fp32, shape);
  }
  if (lesson.flag("--hard-rows")) {
    for (const SoftmaxShape& shape : shapes) add_table(lesson, blas, About::only_infinite, shape);
  }
  return lesson.run();
}
