// Benchmark of operators/clifford_connected: the geometric product with matrices of weights, and
// its norm, forward, and forward with backward, beside cuBLAS with planes in memory. The formulas
// are at the top of bonus_clifford_fully_connected.cu.

#include <memory>

#include "operators/bench/clifford_unfused.cuh"
#include "operators/clifford_connected/layer.cuh"
#include "problems/clifford/clifford.h"

using namespace problems;
using namespace operators::clifford;
using namespace operators::clifford_connected;

// The inverse norms of forward, which backward needs.
template <typename A>
Memory<float> inverses_of(const CliffordTable& of) {
  return of.workspace.any<float>(static_cast<size_t>(A::kGrades) * of.layer.batch);
}

template <typename A>
void add_forward(const CliffordTable& of, const std::shared_ptr<Cublas>& blas) {
  Problem& problem = of.problem;
  const UnfusedConnected<A> unfused(of, blas);
  problem.kernel("unfused", Role::library, [=] { unfused.forward(); })
      .occupies(of.bytes() + unfused.bytes())
      .needs(80);
  const auto add = [&](const char* name, const auto& ready) {
    problem.kernel(name, Role::ours, [=] { ready.forward(nullptr); })
        .occupies(of.bytes() + ready.bytes())
        .hopper_only();
    problem.compare(name, "unfused", std::string("Forward, ") + name + ": % times as fast.");
  };
  const Memory<float> inverses = inverses_of<A>(of);
  add("planes first", Ready<A, false>(of, inverses));
  add("planes beside", Ready<A, true>(of, inverses));
}

template <typename A>
void add_backward(const CliffordTable& of, const CliffordGradients& d,
                  const std::shared_ptr<Cublas>& blas) {
  Problem& problem = of.problem;
  const double ends = of.bytes() + d.bytes();
  const UnfusedConnectedBackward<A> unfused(of, d, blas);
  problem.kernel("unfused", Role::library, [=] { unfused.forward_and_backward(); })
      .occupies(ends + unfused.bytes())
      .needs(80);
  const auto add = [&](const char* name, const auto& ready) {
    problem.kernel(name, Role::ours, [=] { ready.run(); })
        .occupies(ends + ready.bytes())
        .hopper_only();
    problem.compare(name, "unfused", std::string("Both, ") + name + ": % times as fast.");
  };
  const Memory<float> inverses = inverses_of<A>(of);
  add("planes first", ReadyBackward<A, false>(Ready<A, false>(of, inverses), d));
  add("planes beside", ReadyBackward<A, true>(Ready<A, true>(of, inverses), d));
}

template <int p, int q, int r>
int run_tables(Lesson& lesson) {
  using A = Cl<p, q, r>;
  CliffordTables tables(lesson, p, q, r, A::kTriples, true);
  const auto blas = std::make_shared<Cublas>();
  for (const CliffordReference& size : tables.sizes()) {
    const double flops = 2.0 * kPlanes<A> * size.shape().features;
    add_forward<A>(tables.forward(size, flops), blas);
    if (lesson.flag("--turned")) continue;
    const auto [of, d] = tables.backward(size, 3 * flops);
    add_backward<A>(of, d, blas);
  }
  return lesson.run();
}

int main(int argc, char** argv) {
  Lesson lesson(
      argc, argv,
      {.name = "operators_clifford_connected",
       .title = "operators/clifford_connected: geometric product with matrices of weights",
       .n_meaning = "the batch",
       .n_gpu = 4096,
       .n_cpu = 8,
       .options = {{.name = "--features",
                    .meaning = "multivectors per batch element (CPU: 68)",
                    .value = 512,
                    .sweep = {.gpu = {128, 1024}, .cpu = {8, 64}}}},
       .choices = {{"--algebra",
                    "signature: basis vectors that square to +1, -1, 0",
                    {"3,0,0", "2,0,0"}}},
       .flags = {{"--no-norm", "without the norm"},
                 {"--turned", "expect turned results of turned inputs (forward)"}},
       .sweep = {.gpu = {1024, 8192}, .cpu = {8, 64}}});
#ifndef FEW_ALGEBRAS  // for tests, as in operators/bench/clifford.cu
  if (lesson.choice("--algebra") == "3,0,0") return run_tables<3, 0, 0>(lesson);
#endif
  return run_tables<2, 0, 0>(lesson);
}
