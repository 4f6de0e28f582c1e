// What the command line asks for.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/lesson.h"

namespace common {

struct CommandLine {
  int64_t n = 0;  ///< as it was given, or else the lesson's choice
  std::map<std::string, int64_t> options;
  std::map<std::string, std::string> choices;
  std::map<std::string, bool> flags;
  std::set<std::string> given;  ///< names of options, and "N"
  std::string json_path;
  std::string kernel_pattern;
  std::string device = "auto";
  int samples = 0;     ///< 0: as many as fit into `seconds`
  double seconds = 0;  ///< that the run may last
  uint64_t seed = 1;
  std::optional<Timing> timing;
  bool list = false, explain = false, sweep = false;
  bool small = false;                ///< sizes for the CPU, as nobody insists on others
  bool count = false, time = false;  ///< what was asked for, of what is moved and how long it takes
};

/// Bad usage and --help end the program here.
CommandLine parse_command_line(const LessonInfo& info, int argc, char** argv);

/// The sizes that --sweep takes of N, or of an option.
std::vector<int64_t> sweep_of(const LessonInfo& info, const std::string& of, bool cpu);

/// The last line of a run: what else this lesson can show, options that were not given.
std::string other_tables(const LessonInfo& info, const CommandLine& line);

}  // namespace common
