// Where what a run prints goes, and the file that --json names.
#pragma once

#include <cstddef>
#include <string>

namespace common {

/// Ends the program, with a line that says why, if about so many bytes could not be written.
void require_writable(const std::string& path, size_t bytes);
/// Writes `text` beside the file, then renames it, so that a reader never sees half of it. A link
/// stays a link, and a file keeps its permissions. What is no regular file, such as a pipe, and
/// what the program's own output goes to, is written to as it is; "-" is the standard output. If it
/// cannot be done nothing is left behind, and the program ends.
void write_output(const std::string& path, const std::string& text);

/// Ends the program, with a line that says so, if not all that was printed could be written.
void require_printed();

}  // namespace common
