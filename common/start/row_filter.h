// --kernel: which rows are asked for.
#pragma once

#include <memory>
#include <string>

namespace common {

/// An extended regular expression, as `grep -E` takes it. One that is none ends the program.
class RowFilter {
 public:
  explicit RowFilter(const std::string& pattern);
  bool matches(const std::string& name) const;

 private:
  struct Expression;
  std::shared_ptr<const Expression> expression_;  // none: all rows
};

}  // namespace common
