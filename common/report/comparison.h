// "matrices in shared memory: 3.21 times faster".
#pragma once

#include <string>

namespace common {

/// `format` with `factor` for its one %: "% times as fast" -> "0.96 times as fast". Of "% times
/// faster" it makes "1.04 times slower" or "as fast" where that is so.
std::string comparison_text(const std::string& format, double factor);

}  // namespace common
