// Where a lesson runs: on a GPU, or as the CPU build of the same program.
#pragma once

#include "common/start/command_line.h"

namespace common {

/// Without a usable GPU the program says so in one line and goes on as its CPU build, which makes
/// `line`'s N a small one unless --device cpu insists. Ends the program if the device that was
/// asked for is not there.
void settle_backend(const LessonInfo& info, CommandLine& line, char** argv);

}  // namespace common
