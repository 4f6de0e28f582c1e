// Lesson 9's tables: their buffers, and what every row of them is held to.
#pragma once

#include <string>
#include <vector>

#include "problems/softmax/softmax.h"

namespace problems {

inline std::string text_of(const SoftmaxShape& shape) {
  return std::to_string(shape.rows) + "x" + std::to_string(shape.inputs) + "x" +
         std::to_string(shape.classes);
}

/// What a table is about. only_infinite, with --hard-rows: rows of only -inf, beside others. Of
/// these tables what is verified are their NaN.
enum class About { tf32, fp32, only_infinite };

/// A table of softmax(x W): its buffers, and how a row is added.
struct SoftmaxProblem {
  Problem& problem;
  About about;
  SoftmaxShape shape;
  std::string name;
  Buffer<float> x, W, probs;
  Buffer<float> result;  // what is verified: probs, or that with its NaN marked

  SoftmaxProblem(Lesson& lesson, About about, const SoftmaxShape& shape)
      : SoftmaxProblem(problem_of(lesson, about, shape), about, shape) {}
  SoftmaxProblem(Problem& problem, About about, const SoftmaxShape& shape)
      : problem(problem),
        about(about),
        shape(shape),
        name(name_of(about, shape)),
        x(problem.input<float>(shape.rows * shape.inputs)),
        W(problem.input<float>(shape.inputs * shape.classes,
                               kWeightScale / sqrt(static_cast<double>(shape.inputs)))),
        probs(problem.output<float>(shape.rows * shape.classes)),
        result(about == About::only_infinite ? problem.output<float>(probs.size()) : probs) {
    problem.in_graph();
  }

  static std::string name_of(About about, const SoftmaxShape& shape) {
    const char* names[] = {"TF32 ", "fp32 ", "only -inf "};
    return names[static_cast<int>(about)] + text_of(shape);
  }

  static Problem& problem_of(Lesson& lesson, About about, const SoftmaxShape& shape) {
    if (shape.inputs > kMostInputs || shape.classes > kMostClasses) {
      fail(kBadUsage, "at most %lld inputs and %lld classes", static_cast<long long>(kMostInputs),
           static_cast<long long>(kMostClasses));
    }
    const bool tf32 = about == About::tf32;
    return lesson.problem(
        name_of(about, shape), {{"B", shape.rows}, {"D", shape.inputs}, {"C", shape.classes}},
        tf32 ? "tf32" : "fp32", {.flops = shape.flops(), .bytes = shape.bytes(sizeof(float))},
        tf32 ? Rate::tf32 : Rate::fp32);
  }

  Kernel& add(const std::string& row, Role role, const std::function<void()>& launch) const {
    return problem.kernel(row, role, verifiable(launch));
  }
  // `needs` is 90 for what Hopper alone runs, or else the least compute capability, times 10.
  void add(const std::string& row, Role role, int needs, std::vector<Way> ways,
           size_t most = kMostTried) const {
    for (Way& way : ways) way.launch = verifiable(way.launch);
    Kernel& kernel = problem.kernel(row, role, ways, most).needs(needs);
    if (needs == 90) kernel.hopper_only();
  }
  std::function<void()> verifiable(const std::function<void()>& launch) const {
    if (about != About::only_infinite) return launch;
    return [launch, probs = probs, result = result] {
      launch();
      mark_nan(probs, result, probs.size());
    };
  }

  // What every row of the table is held to.
  void verify(cublasHandle_t blas, bool hard_rows) const {
    const bool only_infinite = about == About::only_infinite;
    const auto expected = problem.reference(probs.size());
    if (only_infinite) {
      problem.adjust_inputs([=, *this] { make_only_minus_infinity(x, W, shape); });
    } else if (hard_rows) {
      problem.adjust_inputs([=, *this] { make_hard(x, W, shape); });
    }
    const Uncancelled uncancelled;
    problem.reference_from(softmax_scratch(shape), [=, *this] {
      reference_softmax<float>(blas, x, W, expected, shape);
      // The logits of hard rows are exact.
      if (!only_infinite && !hard_rows) uncancelled.find(x.data(), W.data(), shape, {});
      if (only_infinite) mark_nan(expected, expected.size());
    });
    problem.check(
        result, expected,
        about != About::fp32
            ? softmax_tolerance(shape.inputs, tensor_core_sum(shape.inputs), kRoundoffTf32)
            : softmax_tolerance(shape.inputs, kRoundoffFp32),
        uncancelled.probs);
  }
};

}  // namespace problems
