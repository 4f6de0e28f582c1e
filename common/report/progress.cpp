#include "common/report/progress.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>

namespace common {

namespace {

const auto start = std::chrono::steady_clock::now();
bool shown = false;

}  // namespace

void show_progress(const std::string& text) {
  constexpr std::chrono::seconds kPatience(2);
  if (!isatty(STDERR_FILENO) || std::chrono::steady_clock::now() - start < kPatience) return;
  fprintf(stderr, "\r\033[K%s", text.c_str());
  shown = true;
}

void clear_progress() {
  if (shown) fputs("\r\033[K", stderr);
  shown = false;
}

}  // namespace common
