#include "common/start/row_filter.h"

#include <regex.h>

#include "common/check.h"

namespace common {

struct RowFilter::Expression {
  regex_t compiled;
  ~Expression() { regfree(&compiled); }
};

RowFilter::RowFilter(const std::string& pattern) {
  if (pattern.empty()) return;
  // Without these the C library's matcher takes time and memory in proportion to the expression.
  constexpr size_t kMost = 200;
  if (pattern.size() > kMost) {
    fail(kBadUsage, "--kernel takes up to %zu characters, not %zu", kMost, pattern.size());
  }
  for (size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] == '{') fail(kBadUsage, "--kernel '%s' counts with {}", pattern.c_str());
    if (pattern[i] != '\\') continue;
    if (isdigit(pattern[++i])) {
      fail(kBadUsage, "--kernel '%s' refers back with \\%c", pattern.c_str(), pattern[i]);
    }
  }
  const auto expression = std::make_shared<Expression>();
  if (const int error = regcomp(&expression->compiled, pattern.c_str(), REG_EXTENDED | REG_NOSUB)) {
    char reason[100];
    regerror(error, &expression->compiled, reason, sizeof reason);
    fail(kBadUsage, "--kernel '%s' is not a regular expression: %s", pattern.c_str(), reason);
  }
  expression_ = expression;
}

bool RowFilter::matches(const std::string& name) const {
  return !expression_ || regexec(&expression_->compiled, name.c_str(), 0, nullptr, 0) == 0;
}

}  // namespace common
