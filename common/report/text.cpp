#include "common/report/text.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>

namespace common {

std::string with_prefix(double value) {
  static constexpr const char* kPrefixes[] = {"", "k", "M", "G", "T", "P", "E", "Z", "Y"};
  size_t prefix = 0;
  for (; value >= 999.5 && prefix + 1 < std::size(kPrefixes); ++prefix) value /= 1000;
  return fmt::format("{:.3g} {}", value, kPrefixes[prefix]);
}

std::string digits(double value, size_t width) {
  const std::string whole = fmt::format("{:.0f}", value);
  if (value >= 1e4 && whole.size() <= width) return whole;
  int count = 4;
  while (count > 1 && fmt::format("{:.{}g}", value, count).size() > width) --count;
  return fmt::format("{:.{}g}", value, count);
}

std::pair<double, std::string> unit_for(double least) {
  std::pair<double, std::string> unit = {1, ""};
  for (const char* larger : {"k", "M", "G"}) {
    if (least < 1000 * unit.first) break;
    unit = {1000 * unit.first, larger};
  }
  return unit;
}

std::string listed(const std::vector<std::string>& words, const char* comma, const char* last) {
  std::string text;
  for (size_t i = 0; i < words.size(); ++i) {
    text += (i == 0 ? "" : i + 1 < words.size() ? comma : last) + words[i];
  }
  return text;
}

size_t terminal_columns() {
  winsize size{};
  return isatty(STDOUT_FILENO) && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

size_t screen_columns() {
  constexpr size_t kColumns = 100, kLeast = 21;
  const size_t columns = terminal_columns();
  return columns < kLeast ? kColumns : std::min(columns, kColumns);
}

void print_prose(std::string text) {
  const size_t width = screen_columns();
  while (text.size() > width) {
    const size_t space = text.rfind(' ', width);
    if (space == std::string::npos || text.find_first_not_of(' ') > space) break;
    fmt::print("{}\n", text.substr(0, space));
    text = "  " + text.substr(space + 1);
  }
  fmt::print("{}\n", text);
}

}  // namespace common
