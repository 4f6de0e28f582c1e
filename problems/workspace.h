// What an operator of operators/ is given by a lesson's table, and what it gives to one.
#pragma once

#include <utility>
#include <vector>

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

/// An operator's ways as those of a row.
inline std::vector<common::Way> ways_of_row(std::vector<operators::Way> ways) {
  std::vector<common::Way> result;
  for (operators::Way& way : ways) {
    result.push_back(
        {std::move(way.name), way.microseconds, std::move(way.launch), way.shared_bytes});
  }
  return result;
}

}  // namespace problems
