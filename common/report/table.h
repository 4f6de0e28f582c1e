// The table of a problem, as it is printed.
#pragma once

#include "common/results.h"

namespace common {

struct Layout {
  size_t name_width = 0;    ///< of the first column, the same in all tables
  bool all_places = false;  ///< print all lines of source that are to blame, not the worst alone
  int places_left = 6;      ///< of the worst, that fit on the screen
};

void print_table(const Table& table, const Device& device, Layout& layout);
/// The sentences that compare rows which were timed.
void print_comparisons(const Tables& tables);

}  // namespace common
