// "matrices in shared memory: 3.21 times as fast".
#pragma once

#include <string>

namespace common {

/// `format` with `factor` for its one %: "% times as fast" -> "0.96 times as fast".
std::string comparison_text(const std::string& format, double factor);

}  // namespace common
