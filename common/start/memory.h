// Whether what a run needs fits in the device's memory.
#pragma once

#include <deque>

#include "common/start/command_line.h"

namespace common {

/// Ends the program, with a line that says what is needed and what is free, if the inputs and
/// results of a problem do not fit. To be asked before any of its sizes is computed as a whole
/// number: what fits in memory fits in 64 bits, too.
void require_memory(const Problem& problem, const CommandLine& line);
/// The same of all buffers and what is allocated for a while, for the largest problem.
void require_memory(const std::deque<Problem>& problems, const CommandLine& line,
                    const Device& device);

}  // namespace common
