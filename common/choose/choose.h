// Which of its ways a row takes.
#pragma once

#include "common/results.h"

namespace common {

/// Tries the ways of each row that has several, as the row will be timed, and takes the fastest. On
/// the CPU backend a row stays with the way that should be the fastest.
void choose_ways(Table& table, const Device& device);

}  // namespace common
