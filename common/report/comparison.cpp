#include "common/report/comparison.h"

#include <fmt/core.h>

namespace common {

std::string comparison_text(const std::string& format, double factor) {
  const size_t percent = format.find('%');
  if (percent == std::string::npos) return format;
  return format.substr(0, percent) + fmt::format("{:.2f}", factor) + format.substr(percent + 1);
}

}  // namespace common
