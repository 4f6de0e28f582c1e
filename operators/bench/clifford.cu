// Benchmark of operators/clifford: the gated, weighted geometric product and its norm, forward, and
// forward with backward, beside a kernel for each operator as a framework runs it. The formulas are
// at the top of 10_clifford_gp.cu.

#include <algorithm>

#include "operators/clifford/algebra.cuh"
#include "operators/clifford/clifford.cuh"
#include "operators/clifford/layer.cuh"
#include "operators/clifford/unfused.cuh"
#include "problems/clifford/clifford.h"

using namespace problems;
using namespace operators::clifford;

// Both return whether rows fit on chip.
template <typename A>
bool add_forward(const CliffordTable& of) {
  Problem& problem = of.problem;
  const Unfused<A> unfused(of);
  problem.kernel("unfused", Role::baseline, [=] { unfused.forward(); })
      .occupies(of.bytes() + unfused.bytes());
  const Streamed streamed = streamed_forward<A>(of);
  if (streamed.ways.empty()) return false;
  const operators::Way& way = streamed.ways.front();
  problem.kernel("rows streamed", Role::ours, way.launch)
      .occupies(of.bytes())
      .needs_shared(way.shared_bytes)
      .hopper_only();
  problem.compare("rows streamed", "unfused", "Forward in one launch: % times as fast.");
  return true;
}

// In a network other layers work between the two passes. So these are two calls, each of which
// reads x and y.
template <typename A>
bool add_backward(const CliffordTable& of, const CliffordGradients& d) {
  Problem& problem = of.problem;
  const double ends = of.bytes() + d.bytes();
  const UnfusedBackward<A> unfused(of, d);
  problem.kernel("unfused", Role::baseline, [=] { unfused.forward_and_backward(); })
      .occupies(ends + unfused.bytes());
  const Streamed forward = streamed_forward<A>(of), backward = streamed_backward<A>(of, d);
  if (forward.ways.empty() || backward.ways.empty()) return false;
  const operators::Way &first = forward.ways.front(), &second = backward.ways.front();
  const auto run = [forward = first.launch, backward = second.launch] {
    forward();
    backward();
  };
  problem.kernel("both streamed", Role::ours, run)
      .occupies(ends + backward.workspace_bytes)
      .needs_shared(std::max(first.shared_bytes, second.shared_bytes))
      .hopper_only();
  problem.compare("both streamed", "unfused", "Both in three launches: % times as fast.");
  return true;
}

template <int p, int q, int r>
int run_tables(Lesson& lesson) {
  using A = Cl<p, q, r>;
  CliffordTables tables(lesson, p, q, r, A::kTriples);
  bool all_on_chip = true;
  for (const CliffordReference& size : tables.sizes()) {
    all_on_chip &= add_forward<A>(tables.forward(size, forward_flops<A>()));
    if (lesson.flag("--turned")) continue;
    const auto [both, d] = tables.backward(size, forward_flops<A>() + backward_flops<A>());
    all_on_chip &= add_backward<A>(both, d);
  }
  if (!all_on_chip) lesson.note("Rows too long for 8 multiprocessors are left to other kernels.");
  return lesson.run();
}

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "operators_clifford",
                 .title = "operators/clifford: gated, weighted geometric product and its norm",
                 .n_meaning = "the batch",
                 .n_gpu = 8192,
                 .n_cpu = 8,
                 .options = {{.name = "--features",
                              .meaning = "multivectors per batch element",
                              .value = 1024,
                              .sweep = {.gpu = {128, 1024}, .cpu = {8, 64}}}},
                 .choices = {{"--algebra",
                              "signature: basis vectors that square to +1, -1, 0",
                              {"3,0,0", "2,0,0", "3,0,1", "1,3,0", "4,1,0"}}},
                 .flags = {{"--no-norm", "without the norm"},
                           {"--turned", "expect turned results of turned inputs (forward)"}},
                 .sweep = {.gpu = {1024, 8192}, .cpu = {8, 64}}});
  if (lesson.choice("--algebra") == "2,0,0") return run_tables<2, 0, 0>(lesson);
#ifndef FEW_ALGEBRAS  // which halves the time that it takes to compile, for tests
  if (lesson.choice("--algebra") == "3,0,1") return run_tables<3, 0, 1>(lesson);
  if (lesson.choice("--algebra") == "1,3,0") return run_tables<1, 3, 0>(lesson);
  if (lesson.choice("--algebra") == "4,1,0") return run_tables<4, 1, 0>(lesson);
#endif
  return run_tables<3, 0, 0>(lesson);
}
