#include "common/start/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <limits>

#include "common/report/output_file.h"
#include "common/report/text.h"

namespace common {

namespace {

// What a run may last, unless --seconds says otherwise: with what cannot be left out, ten seconds.
constexpr int kSecondsGpu = 8, kSecondsCpu = 2;

/// "256, 512, ... 4194304"
std::string text_of(const Sizes& sizes) {
  return fmt::format("{}, {}, ... {}", sizes.first, 2 * sizes.first, sizes.last);
}

std::string in_place_of(const char* name, const Sweep& sweep) {
  return fmt::format("{} {} (CPU: {})", name, text_of(sweep.gpu), text_of(sweep.cpu));
}

int64_t whole_number(const std::string& text, const char* what, const char* meaning) {
  const long long largest = std::numeric_limits<int>::max();
  char* end = nullptr;
  errno = 0;
  const long long value = strtoll(text.c_str(), &end, 10);
  if (text.empty() || isspace(text[0]) || *end || errno || value < 1 || value > largest) {
    fail(kBadUsage, "%s is a whole number from 1 to %lld (%s), not '%s'", what, largest, meaning,
         text.c_str());
  }
  return value;
}

/// CLI11 would take a negative number for an option.
void refuse_negative_numbers(const LessonInfo& info, int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const char* argument = argv[i];
    char* end = nullptr;
    if (argument[0] == '-' && strtod(argument, &end) <= 0 && end != argument && *end == '\0') {
      const bool of_option = argv[i - 1][0] == '-' && argv[i - 1][1] == '-';
      fail(kBadUsage, "%s cannot be negative (%s): '%s'", of_option ? argv[i - 1] : "N",
           of_option ? "see --help" : info.n_meaning, argument);
    }
  }
}

void require_one_of(const char* name, const std::string& value,
                    const std::vector<std::string>& values) {
  if (std::find(values.begin(), values.end(), value) != values.end()) return;
  fail(kBadUsage, "%s is %s, not '%s' (see --help)", name, listed(values, " or ", " or ").c_str(),
       value.c_str());
}

/// The options of all lessons and of this one, for CLI11; whole numbers stay texts until it is
/// done.
class Parser {
 public:
  Parser(const LessonInfo& info, CommandLine& line)
      : info_(info), line_(line), app_(info.title, info.name) {
    add_common();
    add_timing();
    add_own();
    app_.footer(
        "Exit codes: 0 all verified; 1 a kernel failed verification; 2 bad usage;\n"
        "            3 the device cannot do it.");
  }
  Parser(const Parser&) = delete;

  void parse(int argc, char** argv) {
    refuse_negative_numbers(info_, argc, argv);
    try {
      app_.parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
      fputs(app_.help().c_str(), stdout);
      require_printed();
      std::exit(kAllVerified);
    } catch (const CLI::ParseError& error) {
      fail(kBadUsage, "%s (see --help)", error.what());
    }
    for (const CLI::Option* option : app_.get_options()) {
      if (option->count() > 0) line_.given.insert(option->get_name());
    }
    check_words();
    check_numbers();
    check_timing();
  }

 private:
  void add_common() {
    app_.add_option("N", n_, info_.n_meaning)
        ->type_name("INT")
        ->default_str(fmt::format("{} (CPU: {})", info_.n_gpu, info_.n_cpu));
    app_.add_option("--json", line_.json_path, "write the results to FILE (-: standard output)")
        ->type_name("FILE");
    app_.add_option("--kernel", line_.kernel_pattern,
                    "only the kernels whose name contains a match of REGEX (as for grep -E)")
        ->type_name("REGEX");
    app_.add_option("--device", line_.device,
                    "auto, cuda or cpu (auto: cuda, or cpu at a small size)")
        ->type_name("DEVICE");
    app_.add_option("--samples", line_.samples,
                    "timed launches of each kernel (default: as many as fit)")
        ->check(CLI::Range(1, 1000000))
        ->type_name("K");
    app_.add_option(
            "--seconds", line_.seconds,
            "of the whole run: each kernel has 3 to 50 samples, as many as fit (CPU: 1 to 5)")
        ->check(CLI::Range(0.1, 1e6))
        ->type_name("S")
        ->default_str(fmt::format("{} (CPU: {})", kSecondsGpu, kSecondsCpu));
    app_.add_option("--seed", line_.seed, "seed of the random inputs")->capture_default_str();
    app_.add_flag("--list", line_.list, "list the kernels and stop");
    app_.add_flag("--explain", line_.explain,
                  "where a kernel FAILED, say which elements are wrong");
  }
  void add_timing() {
    auto* cold = app_.add_flag("--cold", cold_,
                               "overwrite the L2 cache before each sample (usually the default)");
    auto* hot = app_.add_flag("--hot", hot_, "leave the L2 cache warm between samples");
    app_.add_flag("--graph", graph_,
                  "time a CUDA graph of 20 calls, per call, with a warm L2 cache")
        ->excludes(cold)
        ->excludes(hot);
    hot->excludes(cold);
    app_.add_flag("--count", line_.count,
                  "count what each kernel moves instead of timing it (the default on the CPU; on "
                  "a\nGPU a profiler has to watch: scons counters)")
        ->excludes(app_.add_flag("--time", line_.time,
                                 "CPU: time the kernels instead (so do the options that say how)"));
  }
  void add_own() {
    for (const Option& option : info_.options) {
      const std::string which =
          option.multiple_of > 1 ? fmt::format(": a multiple of {}", option.multiple_of) : "";
      app_.add_option(option.name, numbers_[option.name], option.meaning + which)
          ->type_name("INT")
          ->default_str(option.cpu ? fmt::format("{} (CPU: {})", option.value, option.cpu)
                                   : std::to_string(option.value));
    }
    for (const Choice& choice : info_.choices) {
      std::string& value = line_.choices[choice.name] = choice.values.front();
      app_.add_option(choice.name, value,
                      choice.meaning + (": " + listed(choice.values, " | ", " | ")))
          ->type_name("NAME")
          ->capture_default_str();
    }
    for (const Flag& flag : info_.flags) {
      app_.add_flag(flag.name, line_.flags[flag.name], flag.meaning);
    }
    if (info_.sweep.gpu.first == 0) return;
    std::string meaning = "instead of one size: " + in_place_of("N", info_.sweep);
    for (const Option& option : info_.options) {
      if (option.sweep.gpu.first == 0) continue;
      meaning += ",\nby " + in_place_of(option.name, option.sweep);
    }
    app_.add_flag("--sweep", line_.sweep, meaning);
  }

  void check_words() const {
    require_one_of("--device", line_.device, {"auto", "cuda", "cpu"});
    for (const Choice& choice : info_.choices) {
      require_one_of(choice.name, line_.choices.at(choice.name), choice.values);
    }
    if (line_.given.contains("--json") && line_.json_path.empty()) {
      fail(kBadUsage, "--json needs a file's name");
    }
  }
  void check_numbers() {
    const char* refused = line_.given.contains("N") ? "N" : nullptr;
    for (const Option& option : info_.options) {
      const bool given = line_.given.contains(option.name);
      if (option.sweep.gpu.first > 0 && given) refused = option.name;
    }
    if (line_.sweep && refused) {
      fail(kBadUsage, "--sweep has sizes of its own: leave out %s", refused);
    }
    if (line_.given.contains("N")) line_.n = whole_number(n_, "N", info_.n_meaning);
    for (const Option& option : info_.options) {
      int64_t& value = line_.options[option.name] = option.value;
      if (line_.given.contains(option.name)) {
        value = whole_number(numbers_[option.name], option.name, option.meaning);
      }
      if (value % option.multiple_of != 0) {
        fail(kBadUsage, "%s is a multiple of %d, not %lld", option.name, option.multiple_of,
             static_cast<long long>(value));
      }
    }
  }
  void check_timing() {
    if (cold_) line_.timing = Timing::cold;
    if (hot_) line_.timing = Timing::hot;
    if (graph_) line_.timing = Timing::graph;
    for (const char* how : {"--samples", "--seconds", "--cold", "--hot", "--graph"}) {
      line_.time |= line_.given.contains(how);
    }
    if (std::isnan(line_.seconds)) fail(kBadUsage, "--seconds: not a number (see --help)");
    if (line_.time && line_.count) {
      fail(kBadUsage, "--count does not time anything (see --help)");
    }
  }

  const LessonInfo& info_;
  CommandLine& line_;
  CLI::App app_;
  std::string n_;
  std::map<std::string, std::string> numbers_;
  bool cold_ = false, hot_ = false, graph_ = false;
};

}  // namespace

CommandLine parse_command_line(const LessonInfo& info, int argc, char** argv) {
  CommandLine line;
  Parser(info, line).parse(argc, argv);
#ifdef CUDA_CPU
  constexpr int kSeconds = kSecondsCpu;
#else
  constexpr int kSeconds = kSecondsGpu;
#endif
  if (!line.given.contains("--seconds")) line.seconds = kSeconds;
  return line;
}

std::vector<int64_t> sweep_of(const LessonInfo& info, const std::string& of, bool cpu) {
  Sweep sweep = info.sweep;
  for (const Option& option : info.options) {
    if (of == option.name) sweep = option.sweep;
  }
  const Sizes range = cpu ? sweep.cpu : sweep.gpu;
  std::vector<int64_t> sizes;
  for (int64_t size = range.first; size <= range.last; size *= 2) sizes.push_back(size);
  return sizes;
}

std::string other_tables(const LessonInfo& info, const CommandLine& line) {
  std::vector<std::string> names = {"another N"};
  const auto add = [&](const auto& options) {
    for (const auto& option : options) {
      if (!line.given.contains(option.name)) names.push_back(option.name);
    }
  };
  add(info.options);
  add(info.choices);
  add(info.flags);
  if (info.sweep.gpu.first > 0 && !line.sweep) names.push_back("--sweep");
  return "Other tables: " + listed(names, ", ", " or ") + " (see --help).";
}

}  // namespace common
