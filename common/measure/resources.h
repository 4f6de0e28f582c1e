// What the blocks of a row's kernels take, found out from the launch itself.
#pragma once

#include <functional>
#include <optional>

#include "common/results.h"

namespace common {

/// `launch` is recorded, not run, and its kernels are looked at. Of several kernels it is the one
/// whose blocks hold the most registers. Nothing on the CPU backend, of a launch that cannot be
/// recorded, or of one that has only kernels of libraries.
std::optional<Resources> resources_of(const std::function<void()>& launch);

}  // namespace common
