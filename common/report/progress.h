// What a run is doing, for whoever waits: a line on stderr that the next one overwrites, only on a
// terminal, and only after two seconds.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <string>

namespace common {

inline const auto kProgressStart = std::chrono::steady_clock::now();
inline bool progress_shown = false;

inline void show_progress(const std::string& text) {
  constexpr std::chrono::seconds kPatience(2);
  const auto passed = std::chrono::steady_clock::now() - kProgressStart;
  if (!isatty(STDERR_FILENO) || passed < kPatience) return;
  fprintf(stderr, "\r\033[K%s", text.c_str());
  progress_shown = true;
}

inline void clear_progress() {
  if (progress_shown) fputs("\r\033[K", stderr);
  progress_shown = false;
}

}  // namespace common
