#include "cpu/runtime/environment.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/runtime/device_state.h"

namespace cuda_cpu {
namespace {

[[noreturn]] void refuse(const std::string& variable, const std::string& expected) {
  std::fflush(stdout);
  std::fprintf(stderr, "error: %s: %s\n", variable.c_str(), expected.c_str());
  std::exit(2);
}

/// A whole number, and nothing behind it; -1 if it is none.
int whole_number(std::string_view text) {
  int number = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() ? number : -1;
}

/// Compute capabilities that differ in what a kernel can have.
constexpr int kCapabilities[] = {75, 80, 86, 87, 89, 90, 100, 120};

/// Ten times one of them, from 8.6 or 86; -1 if it is none.
int capability(std::string_view text) {
  std::string digits(text);
  if (digits.size() > 2 && digits[digits.size() - 2] == '.') digits.erase(digits.size() - 2, 1);
  const int number = whole_number(digits);
  return std::find(std::begin(kCapabilities), std::end(kCapabilities), number) ==
                 std::end(kCapabilities)
             ? -1
             : number;
}

Environment read() {
  Environment result;
  const std::string prefix = "CUDA_CPU_";
  for (char** each = environ; each && *each; ++each) {
    const std::string variable = *each;
    if (variable.compare(0, prefix.size(), prefix) != 0) continue;
    const std::size_t equals = variable.find('=');
    const std::string name = variable.substr(prefix.size(), equals - prefix.size());
    const std::string_view value = std::string_view(variable).substr(equals + 1);
    const auto number = [&](int& to, int least, int most) {
      const int given = whole_number(value);
      if (given < least || given > most) {
        refuse(variable, "choose a whole number from " + std::to_string(least) + " to " +
                             std::to_string(most));
      }
      to = given;
    };
    const auto choice = [&](bool& to) {
      if (value != "0" && value != "1") refuse(variable, "choose 1 (yes) or 0 (no)");
      to = value == "1";
    };
    if (name == "DEVICES") {
      number(result.devices, 1, kMostDevices);
    } else if (name == "PEER_ACCESS") {
      choice(result.peer_access);
    } else if (name == "MULTIPROCESSORS") {
      number(result.multiprocessors, 1, 1024);
    } else if (name == "COMPUTE_CAPABILITY") {
      result.compute_capability = capability(value);
      if (result.compute_capability < 0) {
        refuse(variable, "choose 7.5, 8.0, 8.6, 8.7, 8.9, 9.0, 10.0 or 12.0");
      }
    } else if (name == "REPEAT_EARLY_LAUNCHES") {
      choice(result.repeat_early_launches);
    } else if (name == "WATCH_MEMORY") {
      choice(result.watch_memory);
    } else if (name == "REPORT") {
      result.report = *each + prefix.size() + sizeof "REPORT";
    } else if (name == "SECONDS") {
      number(result.seconds, 1, 100000);
    } else if (name == "COUNTED_MILLISECONDS") {
      number(result.counted_milliseconds, 1, 100000);
    } else {
      refuse(variable,
             "there is no such variable; docs/cpu.md has those that the CPU backend knows");
    }
  }
  if (result.repeat_early_launches && result.watch_memory) {
    refuse("CUDA_CPU_WATCH_MEMORY=1",
           "not together with CUDA_CPU_REPEAT_EARLY_LAUNCHES=1, which keeps copies of all memory");
  }
  return result;
}

}  // namespace

const Environment& environment() {
  static const Environment result = read();
  return result;
}

}  // namespace cuda_cpu
