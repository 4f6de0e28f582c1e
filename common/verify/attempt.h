// Launches that may fail: one row must not lose the table.
#pragma once

#include <functional>
#include <string>

#include "common/results.h"

namespace common {

/// A kernel has failed in such a way that the device runs no others. The CPU backend always does.
struct DeviceLost {
  std::string how;
};

/// Calls `call`, which launches something. Empty if all went well, or else why not, in words.
std::string attempt(const std::function<void()>& call);

/// Launches the row by `call`, waits for it, and throws what attempt() catches if that fails.
void launch_and_wait(const std::function<void()>& call);

}  // namespace common
