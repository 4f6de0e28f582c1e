// Benchmark of operators/gradients: spatial gradient features on a mesh, forward and backward,
// beside the kernels that a framework launches. The formulas are at the top of
// 8_spatial_gradients.cu.

#include <deque>
#include <vector>

#include "common/lesson.h"
#include "common/numerics.h"
#include "operators/gradients/features.cuh"
#include "problems/gradients/gradients.h"
#include "problems/workspace.h"

using namespace problems;
using namespace operators::gradients;

// False if a block would have to keep more than it has room for.
template <Pass kPass>
bool add_operator(GradientsProblem& table) {
  const GradientFeatures<kPass> features(
      {workspace_of(table.problem)}, [&table] { return table.operands(); }, table.shape);
  const auto ways = features.ways();
  if (ways.empty()) return false;
  table.problem.kernel("operator", Role::ours, ways)
      .hopper_only()
      .occupies(table.ends() + features.workspace_bytes())
      // One rounding before u: M1 and M2. Four on the way from u to a gradient: ar, which has that
      // of M1 and is a factor of R, then R, dM1, and the gradient itself.
      .checks = kPass == Pass::forward ? table.checks(1)
                                       : table.checks(1, 4, features.vertices_of_a_cluster());
  return true;
}

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "operators_gradients",
                 .title = "operators/gradients: spatial gradient features, forward and backward",
                 .n_meaning = "V, vertices of the mesh",
                 .n_gpu = 131072,
                 .n_cpu = 2048,
                 .options = {{.name = "--eigen",
                              .meaning = "E, coefficients of a feature",
                              .value = 128,
                              .multiple_of = 8,
                              .cpu = 32},
                             {.name = "--width",
                              .meaning = "W, features of a vertex",
                              .value = 256,
                              .multiple_of = 8,
                              .cpu = 128}},
                 .sweep = {.gpu = {1024, 1048576}, .cpu = {1024, 2048}}});
  const int64_t E = lesson.option("--eigen"), W = lesson.option("--width");
  const std::vector<int64_t> sizes = lesson.sizes();

  Cublas blas;
  std::deque<GradientsProblem> tables;
  double worst = 0;
  bool has_operator = true;
  for (const int64_t V : sizes) {
    const GradientsShape shape{V, E, W};
    GradientsProblem& forward = tables.emplace_back(lesson, blas, Pass::forward, shape);
    GradientsProblem& backward = tables.emplace_back(lesson, blas, Pass::backward, shape);
    add_unfused(forward);
    has_operator &= add_operator<Pass::forward>(forward);
    add_unfused(backward);
    has_operator &= add_operator<Pass::backward>(backward);
    backward.report_difference = [&, last = V == sizes.back()](double difference) {
      worst = std::max(worst, difference);
      char text[128];
      snprintf(text, sizeof text,
               "The reference's gradients agree with finite differences to within %.0e.", worst);
      if (last) lesson.note(text);
    };
  }
  if (!has_operator) {
    lesson.note("The operator's blocks are made for up to 256 eigenvectors: it is left out.");
  }
  Problem &forward = tables.front().problem, &backward = tables.back().problem;
  forward.compare("operator", "unfused", "Forward: % times as fast as unfused.");
  backward.compare("operator", "unfused",
                   "Backward: % times as fast as unfused, and nothing saved.");
  return lesson.run();
}
