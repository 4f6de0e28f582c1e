// What an operator of operators/ is given by a lesson's table.
#pragma once

#include "common/lesson.h"
#include "operators/operands.h"

namespace problems {

using namespace common;

/// Memory of the table's: `any` is an output of the problem's (NaN before each verified launch),
/// `zeros` a workspace. To be asked for before Lesson::run(), which allocates; the problem must
/// outlive it.
inline operators::Workspace workspace_of(Problem& problem) {
  return {[&problem](size_t bytes) { return problem.output<char>(bytes); },
          [&problem](size_t bytes) { return problem.workspace<char>(bytes); }};
}

}  // namespace problems
