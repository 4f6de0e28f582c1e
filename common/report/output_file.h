// The file that --json names.
#pragma once

#include <string>

namespace common {

/// Ends the program, with a line that says why, if the file could not be written.
void require_writable(const std::string& path);
/// Writes `text` beside `path`, then renames it, so that a reader never sees half of it. If that
/// cannot be done nothing is left behind, and the program ends.
void write_output(const std::string& path, const std::string& text);

}  // namespace common
