// Numbers and prose as lessons print them.
#pragma once

#include <fmt/core.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace common {

/// 1234567 -> "1.23 M", with the prefix that leaves one to three digits before the point.
std::string with_prefix(double value);
/// Four digits, or what there is room for in `width` columns.
std::string digits(double value, size_t width);
/// The largest unit, with its prefix, in which the number has a digit before the point.
std::pair<double, std::string> unit_for(double least);
/// {"a", "b", "c"} -> "a, b or c"; with `comma` instead of the comma.
std::string listed(const std::vector<std::string>& words, const char* comma, const char* last);

/// Columns of the terminal that stdout is; 0 if it is none, such as a file or a pipe, which take
/// lines of any length.
size_t terminal_columns();
/// How long a line may be.
size_t screen_columns();
/// Prints a line of prose, in several where it is longer than the screen is wide.
void print_prose(std::string text);

}  // namespace common
