#include "common/report/comparison.h"

#include <fmt/core.h>

#include <string_view>

namespace common {

std::string comparison_text(const std::string& format, double factor) {
  const size_t percent = format.find('%');
  if (percent == std::string::npos) return format;
  const auto rounded = [](double value) { return fmt::format("{:.2f}", value); };
  const std::string before = format.substr(0, percent), after = format.substr(percent + 1);
  const std::string_view faster = " times faster";
  if (!after.starts_with(faster)) return before + rounded(factor) + after;
  const std::string rest = after.substr(faster.size());
  if (rounded(factor) == "1.00" || rounded(1 / factor) == "1.00") return before + "as fast" + rest;
  if (factor > 1) return before + rounded(factor) + " times faster" + rest;
  return before + rounded(1 / factor) + " times slower" + rest;
}

}  // namespace common
