// What a row's launches ask of memory, instead of how long they take.
#pragma once

#include "common/results.h"

namespace common {

/// Launches the row. The CPU backend counts what it moves; on a GPU a profiler may watch, which
/// sees the launch in a range that is named after problem and row.
void count_launch(const Table& table, Row& row);

}  // namespace common
