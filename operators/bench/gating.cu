// Benchmark of operators/gating: out = sigmoid(x W1 + b1) * (x W2 + b2), beside the best that
// libraries allow: one product with its biases by cuBLASLt, and one kernel after it.
//
// Two tables: a layer of M = 1024 N rows, which memory limits, and a square one, N x N x N.

#include <deque>

#include "operators/gating/layer.cuh"
#include "operators/product/plan.cuh"
#include "problems/gating/library.cuh"
#include "problems/workspace.h"

using namespace problems;

// Estimates say which of the ways may be the fastest, and these are tried. Some keep the weights on
// chip, and others are products as in lesson 3. To have enough of both, up to 24 are tried. (Below
// compute capability 9.0 there are fewer.)
void add_operator(GatingProblem& table) {
  const GatingMemory<half> memory{table.x, table.W1, table.b1, table.W2, table.b2, table.out};
  const auto ways = gated_layer<half>({workspace_of(table.problem)}, memory, table.shape);
  if (ways.empty()) return;
  table.problem.kernel("operator", Role::ours, ways, 24).needs(80);
  table.problem.compare("operator", "cuBLASLt + one kernel",
                        table.problem.name + ": % times as fast as the library.");
}

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "operators_gating",
                 .title = "operators/gating: sigmoid(x W1 + b1) * (x W2 + b2) of any shape",
                 .n_meaning = "M = 1024 N rows for the layer, N x N x N for the square",
                 .n_gpu = 4096,
                 .n_cpu = 128,
                 .options = {{.name = "--channels",
                              .meaning = "K, columns of x in the layer",
                              .value = 128,
                              .cpu = 64},
                             {"--hidden", "H, columns of the layer's result", 64}},
                 .flags = {{"--hard-gates", "gates up to 200, of which exp() is infinite"}}});
  const int64_t n = lesson.n();

  Cublas blas;
  GatingProblem layer(lesson, blas, "layer",
                      {layer_rows(lesson), lesson.option("--channels"), lesson.option("--hidden")},
                      1, lesson.flag("--hard-gates"));
  GatingProblem square(lesson, blas, "square", {n, n, n}, 1);
  std::deque<LibraryGate> libraries;
  for (GatingProblem* table : {&layer, &square}) {
    libraries.emplace_back(*table).add();
    add_operator(*table);
  }
  return lesson.run();
}
