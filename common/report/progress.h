// What a run is doing, for whoever waits.
#pragma once

#include <string>

namespace common {

/// A line on stderr that the next one overwrites; only on a terminal, and only after two seconds.
void show_progress(const std::string& text);
void clear_progress();

}  // namespace common
