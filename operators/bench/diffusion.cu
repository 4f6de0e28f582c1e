// Benchmark of operators/diffusion: spatial diffusion on a mesh, or on a batch of meshes, forward
// and backward, beside the kernels that a framework launches. The formulas are at the top of
// 7_diffusion_fused.cu.

#include <deque>
#include <vector>

#include "common/lesson.h"
#include "common/numerics.h"
#include "operators/diffusion/fused.cuh"
#include "problems/diffusion/diffusion.h"
#include "problems/workspace.h"

using namespace problems;

template <Pass kPass>
void add_operator(DiffusionProblem& table) {
  const FusedDiffusion<kPass> fused(
      {workspace_of(table.problem)}, [&table] { return table.operands(); }, table.shape);
  const auto ways = fused.ways();
  if (ways.empty()) return;
  // How often it rounds to bf16 before the second product: forward mass * basis and spectral,
  // backward only the damped s. The last 1 is the result's rounding.
  table.problem.kernel("operator", Role::ours, ways)
      .hopper_only()
      .occupies(table.ends() + fused.workspace_bytes())
      .checks = table.checks(fused.vertices_of_a_block(), 0, kPass == Pass::forward ? 2 : 1, 1);
}

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "operators_diffusion",
                 .title = "operators/diffusion: spatial diffusion on a mesh, forward and backward",
                 .n_meaning = "V, vertices of the mesh",
                 .n_gpu = 131072,
                 .n_cpu = 4096,
                 .options = {{"--eigen", "E, eigenvectors", 128, 8},
                             {.name = "--width",
                              .meaning = "W, features of a vertex",
                              .value = 256,
                              .multiple_of = 8,
                              .cpu = 32},
                             {"--batch", "meshes in the same launches", 1}},
                 .sweep = {.gpu = {256, 4194304}, .cpu = {256, 1024}}});
  const int64_t E = lesson.option("--eigen"), W = lesson.option("--width");
  const int64_t meshes = lesson.option("--batch");
  const std::vector<int64_t> sizes = lesson.sizes();
  const int64_t most = std::min<int64_t>(65535, 0x7fffffff / sizes.back());
  if (meshes > most) {
    fail(kBadUsage, "--batch: %lld meshes at most, with %lld vertices each",
         static_cast<long long>(most), static_cast<long long>(sizes.back()));
  }

  Cublas blas;
  std::deque<DiffusionProblem> tables;
  double worst = 0;
  for (const int64_t V : sizes) {
    const DiffusionShape shape{V, E, W, meshes};
    DiffusionProblem& forward = tables.emplace_back(lesson, blas, Pass::forward, shape);
    DiffusionProblem& backward = tables.emplace_back(lesson, blas, Pass::backward, shape);
    add_unfused(forward);
    add_operator<Pass::forward>(forward);
    add_unfused(backward);
    add_operator<Pass::backward>(backward);
    backward.report_difference = [&, last = V == sizes.back()](double difference) {
      worst = std::max(worst, difference);
      char text[128];
      snprintf(text, sizeof text,
               "The reference's gradients agree with finite differences to within %.0e.", worst);
      if (last) lesson.note(text);
    };
  }
  if (E > kMostEigen || W > kMostWidth) {
    lesson.note("The operator keeps at most 256 x 512 of the spectrum on chip: it is left out.");
  }
  Problem &forward = tables.front().problem, &backward = tables.back().problem;
  forward.compare("operator", "unfused", "Forward: one launch instead of five: % times as fast.");
  backward.compare("operator", "unfused",
                   meshes > 1 ? "Backward: two launches instead of seven: % times as fast."
                              : "Backward: one launch instead of seven: % times as fast.");
  return lesson.run();
}
