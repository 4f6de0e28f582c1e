// Whether what a run needs fits in the device's memory.
#pragma once

#include <deque>

#include "common/start/command_line.h"

namespace common {

/// Ends the program, with a line that says what is needed and what is free, if the largest problem
/// does not fit.
void require_memory(const std::deque<Problem>& problems, const CommandLine& line,
                    const Device& device);

}  // namespace common
