#include "common/lesson.h"

#include <limits.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <regex>
#include <set>

#include "common/build_info.h"
#include "common/event.h"
#include "common/fastest.h"
#include "common/numerics.h"
#include "common/sm_clock.h"

#ifdef CUDA_CPU
#include "cpu/watch/counting.h"
#include "cpu/watch/memory_watch.h"
#else
#include <cuda_profiler_api.h>
#include <nvtx3/nvToolsExt.h>
#endif

namespace common {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

void fail(ExitCode code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fputs("error: ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
  fflush(nullptr);
  std::_Exit(code);
}

double dot_tolerance(int64_t length, double u_sum, double u_out, double u_in) {
  const double terms = static_cast<double>(length);
  return 4 * std::sqrt(2 * u_in * u_in / 3 + u_sum * u_sum * terms / 6 + u_out * u_out / 3);
}

double tensor_core_sum(int64_t length) {
  // Truncation loses at most one unit in the last place, 2 u, of each of length / 8 partial sums;
  // this counts the most. Added up linearly, and divided by what dot_tolerance multiplies it by.
  const double terms = static_cast<double>(length);
  return 2 * kRoundoffFp32 * std::max(1.0, terms / 8) / std::sqrt(terms / 6);
}

void Storage::allocate() { CUDA_CHECK(cudaMalloc(&data, count * element_bytes)); }

void Storage::release() {
  cudaFree(data);
  data = nullptr;
}

double Kernel::percentile(double p) const {
  const double rank = p / 100 * static_cast<double>(samples_ms.size() - 1);
  return samples_ms[static_cast<size_t>(std::lround(rank))];
}

Kernel& Problem::kernel(std::string name, Role role, std::function<void()> launch) {
  Kernel kernel{};
  kernel.name = std::move(name);
  kernel.role = role;
  kernel.launch = std::move(launch);
  kernel.work = work_;
  kernels_.push_back(std::move(kernel));
  return kernels_.back();
}

Kernel& Problem::kernel(std::string name, Role role, std::vector<Way> ways, const Tries& tries) {
  std::stable_sort(ways.begin(), ways.end(),
                   [](const Way& a, const Way& b) { return a.microseconds < b.microseconds; });
  const double most = tries.hopeless * ways.front().microseconds;
  std::erase_if(ways, [&](const Way& way) { return way.microseconds > most; });
  if (ways.size() > tries.most) ways.erase(ways.begin() + tries.most, ways.end());
  Kernel& row = kernel(std::move(name), role, nullptr);
  row.ways = std::move(ways);
  row.take(row.ways.front());
  return row;
}

void Problem::compare(std::string fast, std::string slow, std::string format) {
  comparisons_.push_back({std::move(fast), std::move(slow), std::move(format)});
}

std::string comparison_text(const std::string& format, double factor) {
  const size_t percent = format.find('%');
  if (percent == std::string::npos) return format;
  const auto rounded = [](double value) {
    char text[32];
    snprintf(text, sizeof text, "%.2f", value);
    return std::string(text);
  };
  const std::string before = format.substr(0, percent), after = format.substr(percent + 1);
  const std::string_view faster = " times faster";
  if (!after.starts_with(faster)) return before + rounded(factor) + after;
  const std::string rest = after.substr(faster.size());
  if (rounded(factor) == "1.00" || rounded(1 / factor) == "1.00") return before + "as fast" + rest;
  if (factor > 1) return before + rounded(factor) + " times faster" + rest;
  return before + rounded(1 / factor) + " times slower" + rest;
}

namespace {

#ifndef CUDA_CPU
/// `calls` calls of `launch` as a CUDA graph, one after the other.
class Graph {
 public:
  Graph(const std::function<void()>& launch, int calls) {
    CUDA_CHECK(cudaStreamBeginCapture(cudaStreamPerThread, cudaStreamCaptureModeThreadLocal));
    for (int call = 0; call < calls; ++call) launch();
    cudaGraph_t graph;
    CUDA_CHECK(cudaStreamEndCapture(cudaStreamPerThread, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&instance_, graph));
    CUDA_CHECK(cudaGraphDestroy(graph));
    CUDA_CHECK(cudaGraphUpload(instance_, cudaStreamPerThread));
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() { cudaGraphExecDestroy(instance_); }
  void launch() const { CUDA_CHECK(cudaGraphLaunch(instance_, cudaStreamPerThread)); }

 private:
  cudaGraphExec_t instance_ = nullptr;
};
#endif

/// A line on stderr that the next one overwrites; only on a terminal, and only after two seconds.
class Progress {
 public:
  void show(const std::string& text) {
    if (!isatty(STDERR_FILENO) || Clock::now() - start_ < std::chrono::seconds(2)) return;
    fprintf(stderr, "\r\033[K%s", text.c_str());
    shown_ = true;
  }
  void clear() {
    if (shown_) fputs("\r\033[K", stderr);
    shown_ = false;
  }

 private:
  Clock::time_point start_ = Clock::now();
  bool shown_ = false;
};

const char* name_of(Role role) {
  return role == Role::baseline ? "baseline" : role == Role::library ? "library" : "ours";
}

const char* name_of(Timing timing) {
  return timing == Timing::cold ? "cold" : timing == Timing::hot ? "hot" : "graph";
}

const char* name_of(Rate rate) {
  return rate == Rate::fp32 ? "fp32" : rate == Rate::tf32 ? "TF32 tensor" : "fp16 tensor";
}

/// 1234567 -> "1.23 M", with the prefix that leaves one to three digits before the point.
std::string with_prefix(double value) {
  static constexpr const char* kPrefixes[] = {"", "k", "M", "G", "T", "P"};
  size_t prefix = 0;
  for (; value >= 999.5 && prefix + 1 < std::size(kPrefixes); ++prefix) value /= 1000;
  char text[32];
  snprintf(text, sizeof text, "%.3g %s", value, kPrefixes[prefix]);
  return text;
}

/// What printf makes of it.
template <typename... Values>
std::string text(const char* format, Values... values) {
  char text[320];  // any double, even without an exponent
  snprintf(text, sizeof text, format, values...);
  return text;
}

/// Four digits, or what there is room for.
std::string digits(double value, size_t width) {
  int count = 4;
  while (count > 1 && text("%.*g", count, value).size() > width) --count;
  return text("%.*g", count, value);
}

/// The largest unit, with its prefix, in which the number has a digit before the point.
std::pair<double, std::string> unit_for(double least) {
  std::pair<double, std::string> unit = {1, ""};
  for (const char* larger : {"k", "M", "G"}) {
    if (least < 1000 * unit.first) break;
    unit = {1000 * unit.first, larger};
  }
  return unit;
}

std::string error_text(const Kernel& kernel) {
  return text("%.1e", std::fabs(kernel.error.frobenius));  // a NaN may print its sign
}

/// A line of a file below this folder, without what is before its first word; empty if it is not
/// there.
std::string source_line(const std::string& path, int number) {
  std::ifstream file(path);
  std::string line;
  for (int i = 0; i < number; ++i) {
    if (!std::getline(file, line)) return "";
  }
  const size_t first = line.find_first_not_of(' ');
  return first == std::string::npos ? "" : line.substr(first);
}

/// {"a", "b", "c"} -> "a, b or c"; with `comma` instead of the comma.
std::string listed(const std::vector<std::string>& words, const char* comma, const char* last) {
  std::string text;
  for (size_t i = 0; i < words.size(); ++i) {
    text += (i == 0 ? "" : i + 1 < words.size() ? comma : last) + words[i];
  }
  return text;
}

/// "256, 512, ... 4194304"
std::string text_of(const Sizes& sizes) {
  return text("%d, %d, ... %d", sizes.first, 2 * sizes.first, sizes.last);
}

/// Columns of the terminal that stdout is; 0 if it is none, such as a file or a pipe, which take
/// lines of any length.
int terminal_columns() {
  winsize size{};
  return isatty(STDOUT_FILENO) && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

/// A column of a table.
struct Column {
  std::string title;
  int width;
  std::function<std::string(const Kernel&)> text;
};

/// Leaves out columns, and then ends of names, until the table is no wider than the terminal. What
/// goes first is what the other columns tell, too: GB/s, then memory, TFLOP/s.
void fit_terminal(std::vector<Column>& columns, size_t& name_width) {
  const size_t screen = static_cast<size_t>(terminal_columns());
  const auto width = [&] {
    size_t sum = name_width + std::strlen(" ok");
    for (const Column& column : columns) sum += 1 + static_cast<size_t>(column.width);
    return sum;
  };
  if (screen == 0) return;
  for (const char* title : {"GB/s", "B", "kB", "MB", "GB", "TFLOP/s", "%limit", "error"}) {
    if (width() <= screen) return;
    std::erase_if(columns, [&](const Column& column) { return column.title == title; });
  }
  constexpr size_t kLeastName = 8;
  if (width() > screen)
    name_width -= std::min(name_width - std::min(name_width, kLeastName), width() - screen);
}

/// How long a line may be.
size_t screen_columns() {
  constexpr int kColumns = 100;
  const int columns = terminal_columns();
  return static_cast<size_t>(columns > 20 ? std::min(columns, kColumns) : kColumns);
}

/// Prints a line of prose, in several where it is longer than the screen is wide.
void print_prose(std::string text) {
  const size_t width = screen_columns();
  while (text.size() > width) {
    const size_t space = text.rfind(' ', width);
    if (space == std::string::npos || text.find_first_not_of(' ') > space) break;
    printf("%s\n", text.substr(0, space).c_str());
    text = "  " + text.substr(space + 1);
  }
  printf("%s\n", text.c_str());
}

std::string now_utc() {
  const std::time_t now = std::time(nullptr);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  return text;
}

/// A device node, such as /dev/stdout, is written to as it is: renaming over it would replace it.
bool is_device_node(const std::string& path) {
  struct stat status;
  return stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode);
}

/// Writes `text` beside `path`, then renames it, so that a reader never sees half of it. If that
/// cannot be done nothing is left behind, and the program ends. With `rehearse` the file is written
/// and removed: what is wrong with the target is told before any work is done.
void write_atomically(const std::string& name, const std::string& text, bool rehearse) {
  // A link stays, and what it points to is replaced.
  char resolved[PATH_MAX];
  const std::string path = realpath(name.c_str(), resolved) ? resolved : name;
  const bool direct = is_device_node(path);
  if (direct && rehearse) return;
  const std::string target = direct ? path : path + ".tmp." + std::to_string(getpid());
  FILE* file = fopen(target.c_str(), "w");
  bool written = file && fwrite(text.data(), 1, text.size(), file) == text.size();
  int error = errno;
  if (file && fclose(file) != 0) written = false, error = errno;
  struct stat status;
  if (written && rehearse && stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) {
    written = false, error = EISDIR;
  }
  if (written && !direct && !rehearse && rename(target.c_str(), path.c_str()) != 0) {
    written = false, error = errno;
  }
  if (!direct && (rehearse || !written)) unlink(target.c_str());
  if (!written) fail(kBadUsage, "cannot write --json %s: %s", path.c_str(), strerror(error));
}

#ifdef CUDA_CPU
std::string why_no_gpu() { return "this is the CPU build"; }
#else
/// Why there is no usable GPU; empty if there is one.
std::string why_no_gpu() {
  int devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  if (status != cudaSuccess) return cudaGetErrorString(status);
  return devices > 0 ? "" : "no CUDA device";
}

/// Goes on as the CPU build of this program: build/cpu/NAME beside it, or ../cpu/NAME.
[[noreturn]] void become_cpu_twin(char** argv, const std::string& why) {
  char self[4096];
  const ssize_t length = readlink("/proc/self/exe", self, sizeof self);
  const std::string path(self, static_cast<size_t>(std::max<ssize_t>(length, 0)));
  const size_t slash = path.rfind('/') + 1;
  const std::string folder = path.substr(0, slash), name = path.substr(slash);
  for (const char* twins : {"build/cpu/", "../cpu/"}) {
    execv((folder + twins + name).c_str(), argv);
  }
  fail(kDeviceCannot, "%s, and there is no CPU build beside %s", why.c_str(), path.c_str());
}
#endif

}  // namespace

// What a run may last, unless --seconds says otherwise: with what cannot be left out, ten seconds.
constexpr int kSecondsGpu = 8, kSecondsCpu = 2;
#ifdef CUDA_CPU
constexpr int kSeconds = kSecondsCpu;
#else
constexpr int kSeconds = kSecondsGpu;
#endif

struct Lesson::State {
  LessonInfo info;
  Device device;
  int64_t n = 0;
  std::map<std::string, int64_t> options;
  std::map<std::string, std::string> choices;
  std::map<std::string, bool> flags;
  std::set<std::string> given;
  std::string json_path;
  std::optional<std::regex> kernel_filter;
  std::string kernel_pattern;
  int samples = 0;     // 0: as many as fit into `seconds`
  double seconds = 0;  // that the run may last; 0: kSeconds
  Clock::time_point started = Clock::now();
  uint64_t seed = 1;
  std::optional<Timing> timing_asked;
  bool list = false, explain = false, sweeps = false;
  bool counting = false;  // what is moved, instead of timing
  std::deque<Problem> problems;
  std::vector<std::string> notes;
  Progress progress;

  void parse(int argc, char** argv);
  void add_sweep(CLI::App& app);
  void check_sweep() const;
  bool can_run(const Kernel& kernel) const;
  /// What the kernel needs that the device does not have, if anything.
  std::string why_not(const Kernel& kernel) const;
  bool matches(const Kernel& kernel) const;  // --kernel
  bool selected(const Kernel& kernel) const { return can_run(kernel) && matches(kernel); }
  void require_memory();
  void prepare(Problem& problem);
  /// Tries the ways of each kernel that has several, and takes the fastest.
  void choose(Problem& problem);
  void verify(Problem& problem, const std::function<void(Kernel&)>& launch);
  /// Verifies the launches that it counts.
  void count(Problem& problem);
  /// Until then, if it takes no longer than that; and verifies what it timed.
  void sample(Problem& problem, Clock::time_point end);
  void print(const Problem& problem);
  std::vector<Column> columns(const Problem& problem) const;
  std::vector<Column> count_columns(const Problem& problem) const;
  void print_worst_places(const Problem& problem);
  int places_left = 6;  // that fit on the screen
  void print_comparisons() const;
  std::string other_tables() const;
  Json record() const;
  double limit_ms(const Work& work, Rate rate) const;
  /// There is no cache to overwrite and no graph on the CPU.
  Timing timing(const Problem& problem) const {
    return device.backend == "cpu" ? Timing::hot : timing_asked.value_or(problem.timing_);
  }
};

void Lesson::State::add_sweep(CLI::App& app) {
  if (info.sweep.gpu.first == 0) return;
  const auto in_place_of = [](const char* name, const Sweep& sweep) {
    return std::string(name) + " " + text_of(sweep.gpu) + " (CPU: " + text_of(sweep.cpu) + ")";
  };
  std::string meaning = "instead of one size: " + in_place_of("N", info.sweep);
  for (const Option& option : info.options) {
    if (option.sweep.gpu.first > 0) meaning += ",\nby " + in_place_of(option.name, option.sweep);
  }
  app.add_flag("--sweep", sweeps, meaning);
}

void Lesson::State::check_sweep() const {
  if (!sweeps) return;
  const char* refused = given.contains("N") ? "N" : nullptr;
  for (const Option& option : info.options) {
    if (option.sweep.gpu.first > 0 && given.contains(option.name)) refused = option.name;
  }
  if (refused) fail(kBadUsage, "--sweep has sizes of its own: leave out %s", refused);
}

void Lesson::State::parse(int argc, char** argv) {
  CLI::App app(info.title, info.name);
  std::string n_text, device_choice = "auto";
  app.add_option("N", n_text, info.n_meaning)
      ->type_name("INT")
      ->default_str(std::to_string(info.n_gpu) + " (CPU: " + std::to_string(info.n_cpu) + ")");
  app.add_option("--json", json_path, "write the results to FILE")->type_name("FILE");
  app.add_option("--kernel", kernel_pattern,
                 "only the kernels whose name contains a match of REGEX")
      ->type_name("REGEX");
  app.add_option("--device", device_choice,
                 "auto, cuda or cpu (auto: cuda, or cpu at a small size)")
      ->type_name("DEVICE");
  app.add_option("--samples", samples, "timed launches of each kernel (default: as many as fit)")
      ->check(CLI::Range(1, 1000000))
      ->type_name("K");
  app.add_option("--seconds", seconds,
                 "of the whole run: each kernel has 3 to 50 samples, as many as fit (CPU: 1 to 5)")
      ->check(CLI::Range(0.1, 1e6))
      ->type_name("S")
      ->default_str(std::to_string(kSecondsGpu) + " (CPU: " + std::to_string(kSecondsCpu) + ")");
  app.add_option("--seed", seed, "seed of the random inputs")->capture_default_str();
  bool cold = false, hot = false, graph = false;
  auto* cold_flag = app.add_flag("--cold", cold,
                                 "overwrite the L2 cache before each sample (usually the default)");
  auto* hot_flag = app.add_flag("--hot", hot, "leave the L2 cache warm between samples");
  app.add_flag("--graph", graph, "time a CUDA graph of 20 calls, per call, with a warm L2 cache")
      ->excludes(cold_flag)
      ->excludes(hot_flag);
  hot_flag->excludes(cold_flag);
  bool time = false;
  app.add_flag("--count", counting,
               "count what each kernel moves instead of timing it (the default on the CPU; on a\n"
               "GPU a profiler has to watch: scons counters)")
      ->excludes(app.add_flag("--time", time,
                              "CPU: time the kernels instead (so do the options "
                              "that say how)"));
  app.add_flag("--list", list, "list the kernels and stop");
  app.add_flag("--explain", explain, "where a kernel FAILED, say which elements are wrong");
  std::map<std::string, std::string> texts;
  for (const Option& option : info.options) {
    const std::string which =
        option.multiple_of > 1 ? ": a multiple of " + std::to_string(option.multiple_of) : "";
    app.add_option(option.name, texts[option.name], option.meaning + which)
        ->type_name("INT")
        ->default_str(std::to_string(option.value));
  }
  for (const Choice& choice : info.choices) {
    std::string& value = choices[choice.name] = choice.values.front();
    app.add_option(choice.name, value,
                   choice.meaning + (": " + listed(choice.values, " | ", " | ")))
        ->type_name("NAME")
        ->capture_default_str();
  }
  for (const Flag& flag : info.flags) app.add_flag(flag.name, flags[flag.name], flag.meaning);
  add_sweep(app);
  app.footer(
      "Exit codes: 0 all verified; 1 a kernel failed verification; 2 bad usage;\n"
      "            3 the device cannot do it.");

  const auto whole_number = [&](const std::string& text, const char* what, const char* meaning) {
    const int64_t largest = std::numeric_limits<int>::max();
    char* end = nullptr;
    errno = 0;
    const long long value = strtoll(text.c_str(), &end, 10);
    if (text.empty() || isspace(text[0]) || *end || errno || value < 1 || value > largest) {
      fail(kBadUsage, "%s is a whole number from 1 to %lld (%s), not '%s'", what,
           static_cast<long long>(largest), meaning, text.c_str());
    }
    return static_cast<int64_t>(value);
  };
  for (int i = 1; i < argc; ++i) {  // CLI11 would take a negative number for an option
    const char* argument = argv[i];
    char* end = nullptr;
    if (argument[0] == '-' && strtod(argument, &end) <= 0 && end != argument && *end == '\0') {
      const bool of_option = argv[i - 1][0] == '-' && argv[i - 1][1] == '-';
      fail(kBadUsage, "%s cannot be negative (%s): '%s'", of_option ? argv[i - 1] : "N",
           of_option ? "see --help" : info.n_meaning, argument);
    }
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    fputs(app.help().c_str(), stdout);
    std::exit(kAllVerified);
  } catch (const CLI::ParseError& error) {
    fail(kBadUsage, "%s (see --help)", error.what());
  }

  const auto one_of = [](const char* name, const std::string& value,
                         const std::vector<std::string>& values) {
    if (std::find(values.begin(), values.end(), value) != values.end()) return;
    fail(kBadUsage, "%s is %s, not '%s' (see --help)", name, listed(values, " or ", " or ").c_str(),
         value.c_str());
  };
  one_of("--device", device_choice, {"auto", "cuda", "cpu"});
  for (const Choice& choice : info.choices) {
    one_of(choice.name, choices[choice.name], choice.values);
  }
  for (const CLI::Option* option : app.get_options()) {
    if (option->count() > 0) given.insert(option->get_name());
  }
  check_sweep();
  if (cold) timing_asked = Timing::cold;
  if (hot) timing_asked = Timing::hot;
  if (graph) timing_asked = Timing::graph;
  if (app.count("N") > 0) n = whole_number(n_text, "N", info.n_meaning);
  for (const Option& option : info.options) {
    options[option.name] = app.count(option.name) == 0
                               ? option.value
                               : whole_number(texts[option.name], option.name, option.meaning);
    if (options[option.name] % option.multiple_of != 0) {
      fail(kBadUsage, "%s is a multiple of %d, not %lld", option.name, option.multiple_of,
           static_cast<long long>(options[option.name]));
    }
  }
  if (!kernel_pattern.empty()) {
    try {
      kernel_filter.emplace(kernel_pattern);
    } catch (const std::regex_error& error) {
      fail(kBadUsage, "--kernel '%s' is not a regular expression: %s", kernel_pattern.c_str(),
           error.what());
    }
  }
  for (const char* how : {"--samples", "--seconds", "--cold", "--hot", "--graph"}) {
    time |= given.contains(how);
  }
  if (time && counting) fail(kBadUsage, "--count does not time anything (see --help)");
  if (seconds == 0) seconds = kSeconds;
  // 64 KiB is more than a record takes, so that a full disk shows now.
  if (app.count("--json") > 0 && json_path.empty()) fail(kBadUsage, "--json needs a file's name");
  if (!json_path.empty()) write_atomically(json_path, std::string(65536, ' '), true);

  const std::string no_gpu = device_choice == "cpu" ? "--device cpu" : why_no_gpu();
  if (!no_gpu.empty() && device_choice == "cuda") {
    fail(kDeviceCannot, "--device cuda: %s", no_gpu.c_str());
  }
#ifdef CUDA_CPU
  counting = !time && (counting || cuda_cpu::can_count());
  const int64_t asked = n;
  if (n == 0 || device_choice == "auto") n = std::min<int64_t>(n ? n : info.n_cpu, info.n_cpu);
  if (device_choice == "auto" && !list) {
    fprintf(stderr, "No usable GPU: running on the CPU backend with N = %lld%s.\n",
            static_cast<long long>(n),
            asked > n
                ? (" instead of " + std::to_string(asked) + " (--device cpu to insist)").c_str()
                : "");
  }
#else
  if (!no_gpu.empty()) become_cpu_twin(argv, no_gpu);
  if (n == 0) n = info.n_gpu;
#endif
}

Lesson::Lesson(int argc, char** argv, LessonInfo info) : state_(std::make_unique<State>()) {
  state_->info = std::move(info);
  state_->parse(argc, argv);
  state_->device = Device::current();
}

Lesson::~Lesson() = default;

int64_t Lesson::n() const { return state_->n; }
int64_t Lesson::option(const char* name) const { return state_->options.at(name); }
const std::string& Lesson::choice(const char* name) const { return state_->choices.at(name); }
bool Lesson::flag(const char* name) const { return state_->flags.at(name); }
bool Lesson::given(const char* name) const { return state_->given.contains(name); }
std::vector<int64_t> Lesson::sizes(const char* of) const {
  const bool of_n = of == std::string_view("N");
  if (!state_->sweeps) return {of_n ? n() : option(of)};
  Sweep sweep = state_->info.sweep;
  for (const Option& option : state_->info.options) {
    if (of == std::string_view(option.name)) sweep = option.sweep;
  }
  const Sizes range = on_cpu() ? sweep.cpu : sweep.gpu;
  std::vector<int64_t> sizes;
  for (int64_t size = range.first; size <= range.last; size *= 2) sizes.push_back(size);
  return sizes;
}
const Device& Lesson::device() const { return state_->device; }
void Lesson::note(std::string line) { state_->notes.push_back(std::move(line)); }

Problem& Lesson::problem(std::string name, std::vector<Dim> dims, std::string dtype, Work work,
                         Rate rate) {
  Problem& problem = state_->problems.emplace_back();
  problem.name_ = std::move(name);
  problem.dims_ = std::move(dims);
  problem.dtype_ = std::move(dtype);
  problem.work_ = work;
  problem.rate_ = rate;
  return problem;
}

bool Lesson::State::can_run(const Kernel& kernel) const { return why_not(kernel).empty(); }

std::string Lesson::State::why_not(const Kernel& kernel) const {
  const int cc = 10 * device.major + device.minor, needed = kernel.needs_cc;
  if (kernel.hopper ? cc != needed : cc < needed) {
    return "a GPU of compute capability " + std::to_string(needed / 10) + "." +
           std::to_string(needed % 10);
  }
  if (kernel.needs_shared > device.shared_bytes) {
    return std::to_string((kernel.needs_shared + 1023) / 1024) + " KB of shared memory a block";
  }
  return "";
}

bool Lesson::State::matches(const Kernel& kernel) const {
  return !kernel_filter || std::regex_search(kernel.name, *kernel_filter);
}

void Lesson::State::require_memory() {
  double needed = 0;
  const Problem* largest = nullptr;
  for (const Problem& problem : problems) {
    double bytes = problem.scratch_bytes_;
    for (const auto* list :
         {&problem.inputs_, &problem.outputs_, &problem.references_, &problem.workspaces_}) {
      for (const auto& storage : *list) bytes += storage->bytes();
    }
    if (bytes > needed) needed = bytes, largest = &problem;
  }
  // The flush; workspaces that cuBLAS allocates.
  needed += 2.0 * static_cast<double>(device.l2_bytes) + 0x1p27;
  size_t free = 0, total = 0;
  CUDA_CHECK(cudaMemGetInfo(&free, &total));
  if (needed > static_cast<double>(free)) {
    // A sweep chooses its sizes itself; by its first dimension one knows a problem.
    const std::string size = largest && sweeps ? largest->dims_.front().name + std::string(" = ") +
                                                     std::to_string(largest->dims_.front().extent)
                                               : "N = " + std::to_string(n);
    fail(kDeviceCannot, "%s needs %sB of device memory (%.0f bytes), %sB (%zu bytes) are free",
         size.c_str(), with_prefix(needed).c_str(), needed,
         with_prefix(static_cast<double>(free)).c_str(), free);
  }
}

void Lesson::State::prepare(Problem& problem) {
  uint64_t stream = seed << 8;
  for (auto& storage : problem.inputs_) {
    storage->allocate();
    fill_random(*storage, stream++);
  }
  for (auto& storage : problem.references_) storage->allocate();
  for (auto& storage : problem.outputs_) storage->allocate();
  for (auto& storage : problem.workspaces_) {
    storage->allocate();
    CUDA_CHECK(cudaMemsetAsync(storage->data, 0, storage->count * storage->element_bytes));
  }
  for (const auto& adjust : problem.adjust_inputs_) adjust();
  progress.show(problem.name_ + ": reference");
  problem.compute_reference_();
  CUDA_CHECK(cudaDeviceSynchronize());
}

void Lesson::State::choose([[maybe_unused]] Problem& problem) {
#ifndef CUDA_CPU
  const Timing timing = this->timing(problem);
  for (Kernel& kernel : problem.kernels_) {
    if (kernel.ways.size() < 2 || !selected(kernel)) continue;
    progress.show(problem.name_ + ": trying the ways of " + kernel.name);
    if (kernel.before) kernel.before();
    // A way is called as the row will be timed; but long calls need no graph.
    constexpr double kLongUs = 500;
    constexpr int kCalls = 5;
    std::deque<Graph> graphs;
    std::vector<std::function<void()>> calls;
    for (const Way& way : kernel.ways) {
      if (timing == Timing::graph && kernel.ways.front().microseconds < kLongUs) {
        way.launch();  // loads what may not be loaded while it is captured
        calls.push_back([&graph = graphs.emplace_back(way.launch, kCalls)] { graph.launch(); });
      } else {
        calls.push_back(way.launch);
      }
    }
    constexpr float kMilliseconds = 200;
    const Trial trial = try_all(calls, timing == Timing::cold, kMilliseconds);
    for (size_t i = 0; i < calls.size(); ++i) {
      kernel.ways[i].tried_ms = trial.ms[i] / static_cast<float>(graphs.empty() ? 1 : kCalls);
    }
    kernel.take(kernel.ways[trial.fastest]);
    CUDA_CHECK(cudaGetLastError());
  }
#endif
}

/// The first launch of a kernel. The CPU backend says, if asked, which memory it uses.
static void launch_watched([[maybe_unused]] const std::string& problem, const Kernel& kernel) {
#ifdef CUDA_CPU
  cuda_cpu::start_watching();
#endif
  kernel.launch();
#ifdef CUDA_CPU
  if (const double used = cuda_cpu::stop_watching(); used > 0 && kernel.memory_bytes > 0) {
    fprintf(stderr, "memory of %s: %s: %.0f bytes used, %.0f claimed\n", problem.c_str(),
            kernel.name.c_str(), used, kernel.memory_bytes);
  }
#endif
}

/// Every kernel, launched by `launch`, from poisoned outputs. Called before sampling, and after it
/// with the launches that were timed: what is right must stay right.
void Lesson::State::verify(Problem& problem, const std::function<void(Kernel&)>& launch) {
  const auto poison = [](Storage& storage) {  // bytes of 0xff are a NaN in every type here
    CUDA_CHECK(cudaMemsetAsync(storage.data, 0xff, storage.count * storage.element_bytes));
  };
  for (Kernel& kernel : problem.kernels_) {
    if (!selected(kernel)) continue;
    progress.show(problem.name_ + ": verifying " + kernel.name);
    const std::vector<Check>& checks = kernel.checks.empty() ? problem.checks_ : kernel.checks;
    for (auto& storage : problem.outputs_) poison(*storage);
    if (kernel.before) {
      kernel.before();
      for (const Check& check : checks) poison(*check.output);
    }
    launch(kernel);
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaDeviceSynchronize());
    if (kernel.collect) kernel.collect();
    kernel.ok = kernel.ok || !kernel.ran;
    kernel.ran = true;
    for (const Check& check : checks) {
      if (check.compute_reference) check.compute_reference();
      const Error error = compare(check);
      // Written so that a NaN is never ok.
      const bool ok =
          error.frobenius <= check.tolerance && error.worst <= kWorstToFrobenius * check.tolerance;
      if (kernel.tolerance == 0 || !ok || error.frobenius > kernel.error.frobenius) {
        kernel.error = error;
        kernel.tolerance = check.tolerance;
      }
      kernel.ok = kernel.ok && ok;
      if (ok) continue;
      if (explain && kernel.wrong.empty()) {
        kernel.wrong = wrong_elements(check);
        if (checks.size() > 1) {
          kernel.wrong += " (result " + std::to_string(&check - checks.data() + 1) + " of " +
                          std::to_string(checks.size()) + ")";
        }
      }
      break;
    }
  }
}

void Lesson::State::count(Problem& problem) {
  verify(problem, [&](Kernel& kernel) {
#ifdef CUDA_CPU
    cuda_cpu::start_counting();
    kernel.launch();
    const Counts counts = cuda_cpu::stop_counting();
    if (cuda_cpu::counted_everything()) kernel.counts = counts;
#else
    nvtxRangePushA((problem.name_ + ": " + kernel.name).c_str());
    CUDA_CHECK(cudaProfilerStart());
    kernel.launch();
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaProfilerStop());
    nvtxRangePop();
#endif
  });
}

void Lesson::State::sample(Problem& problem, Clock::time_point end) {
  std::vector<Kernel*> timed;
  for (Kernel& kernel : problem.kernels_) {
    if (kernel.ran) timed.push_back(&kernel);
  }
  const Timing timing = this->timing(problem);
  const int calls = timing == Timing::graph ? kGraphCalls : 1;
  std::map<const Kernel*, std::function<void()>> launches;
  for (const Kernel* kernel : timed) launches[kernel] = kernel->launch;
#ifndef CUDA_CPU
  std::deque<Graph> graphs;
  if (timing == Timing::graph) {
    for (const Kernel* kernel : timed) {
      if (kernel->time) continue;
      const Graph& graph = graphs.emplace_back(kernel->launch, calls);
      launches[kernel] = [&graph] { graph.launch(); };
    }
  }
#endif
  Event start, stop;
  SmClock clock;
  std::mt19937_64 order(seed);
  const auto time_one = [&](const Kernel* kernel) {
    if (kernel->time && device.backend == "cuda") return kernel->time(timing);
    start.record_anywhere(order);
    launches[kernel]();
    stop.record();
    CUDA_CHECK(cudaGetLastError());
    return stop.since(start) / static_cast<float>(calls);
  };
  // Written, not read: twice the L2 leaves nothing of the inputs in it, and as in a real network
  // the kernel finds it full of somebody else's results.
  const bool flush = timing == Timing::cold;
  const size_t flush_bytes = flush ? 2 * static_cast<size_t>(device.l2_bytes) : 1;
  Scratch<char> flushed(flush_bytes);

  // Warm-up, which also tells how long a call takes.
  const bool gpu = device.backend == "cuda";
  std::map<const Kernel*, double> call_ms;
  double round_ms = 0;
  for (const Kernel* kernel : timed) {
    if (!gpu) break;
    call_ms[kernel] = static_cast<double>(calls) * time_one(kernel);
    round_ms += call_ms[kernel];
  }
  // To verify again takes about a round.
  end -= std::chrono::milliseconds(std::lround(round_ms));
  const int least = samples ? samples : gpu ? 3 : 1, most = samples ? samples : gpu ? 50 : 5;
  // What ran before a kernel decides on the clock that it finds. So each sample follows a call of
  // the same kernel, and in another order each round, for what ran before that. The card takes
  // about kSettleMs to forget what it did: after a shorter round it is the same mixture for all, in
  // a longer one each kernel is called for that long before its sample. A call that is queued
  // behind other work also shows the device's time and not the host's. Only a call that lasts so
  // long that its beginning does not count goes without all this.
  constexpr double kSettleMs = 200, kLongMs = 4 * kSettleMs;
  const double alone_ms = round_ms > kSettleMs ? kSettleMs : 0;
  // On the CPU a launch may take as long as all the rest: a single sample is what is verified.
  const bool together = !gpu && most == 1;
  for (int round = 0; !together && round < most && (round < least || Clock::now() < end); ++round) {
    progress.show(problem.name_ + ": sample " + std::to_string(round + 1));
    std::shuffle(timed.begin(), timed.end(), order);
    for (Kernel* kernel : timed) {
      if (gpu && call_ms[kernel] < kLongMs) {
        double ms = 0;
        do {
          launches[kernel]();
          ms += std::max(call_ms[kernel], 1e-3);
        } while (ms < alone_ms);
      }
      if (flush) CUDA_CHECK(cudaMemsetAsync(flushed, round, flush_bytes));
      clock.start();
      kernel->samples_ms.push_back(time_one(kernel));
      clock.stop();
      kernel->clocks_hz.push_back(clock.hz());
    }
  }
  verify(problem, [&](Kernel& kernel) {
    if (together) {
      kernel.samples_ms.push_back(time_one(&kernel));
    } else {
      launches[&kernel]();
    }
  });
  for (Kernel* kernel : timed) {
    std::sort(kernel->samples_ms.begin(), kernel->samples_ms.end());
    std::sort(kernel->clocks_hz.begin(), kernel->clocks_hz.end());
  }
}

double Lesson::State::limit_ms(const Work& work, Rate rate) const {
  if (device.bytes_per_second == 0 || device.peak(rate) == 0) return 0;
  return 1e3 * std::max(work.bytes / device.bytes_per_second, work.flops / device.peak(rate));
}

void Lesson::State::print(const Problem& problem) {
  const double limit = limit_ms(problem.work_, problem.rate_);
  printf("\n%s:", problem.name_.c_str());
  for (const Dim& dim : problem.dims_) {
    printf(" %s = %lld,", dim.name, static_cast<long long>(dim.extent));
  }
  printf(" %s; %sFLOP, at least %sB\n", problem.dtype_.c_str(),
         with_prefix(problem.work_.flops).c_str(), with_prefix(problem.work_.bytes).c_str());
  if (limit > 0) {
    const bool memory = problem.work_.bytes / device.bytes_per_second >=
                        problem.work_.flops / device.peak(problem.rate_);
    printf("limit: %s, %.4g ms\n",
           memory ? "memory" : (std::string(name_of(problem.rate_)) + " arithmetic").c_str(),
           limit);
  }
  if (timing(problem) == Timing::graph && !counting) {
    printf("timed: %d calls in a CUDA graph, per call\n", kGraphCalls);
  }
  size_t name_width = 6;
  for (const Problem& each : problems) {  // the same in all tables
    for (const Kernel& kernel : each.kernels_) {
      name_width = std::max(name_width, kernel.name.size());
    }
  }
  std::vector<Column> columns = counting ? count_columns(problem) : this->columns(problem);
  fit_terminal(columns, name_width);
  const int w = static_cast<int>(name_width);
  const auto print_name = [&](const char* name) { printf("%-*.*s", w, w, name); };
  print_name("kernel");
  for (const Column& column : columns) printf(" %*s", column.width, column.title.c_str());
  printf("\n");
  for (const Kernel& kernel : problem.kernels_) {
    if (!kernel.ran && !matches(kernel)) continue;
    print_name(kernel.name.c_str());
    if (!kernel.ran) {
      printf(" needs %s\n", why_not(kernel).c_str());
      continue;
    }
    for (const Column& column : columns) printf(" %*s", column.width, column.text(kernel).c_str());
    printf(kernel.ok ? " ok\n" : " FAILED (tolerance %.1e)\n", kernel.tolerance);
    if (!kernel.wrong.empty()) printf("  %s\n", kernel.wrong.c_str());
  }
  print_worst_places(problem);
}

/// The lines of source that are to blame: the worst of each kernel, or with --count all that are
/// known.
void Lesson::State::print_worst_places(const Problem& problem) {
  const bool all = given.contains("--count");
  for (const Kernel& kernel : problem.kernels_) {
    if (!kernel.counts) continue;
    for (const Counts::Place& place : kernel.counts->worst) {
      if (!all && (&place != &kernel.counts->worst.front() || places_left-- <= 0)) break;
      std::string line =
          text("%.60s: %.60s:%d, %.4g %s a %s", kernel.name.c_str(), place.file.c_str(), place.line,
               place.per_request, place.shared ? "conflicts" : "sectors",
               place.store ? "store" : "load");
      if (!place.shared) line += text(", %.4g needed", place.least);
      const std::string code = source_line(place.file, place.line);
      if (!code.empty()) line += ": " + code;
      const size_t width = screen_columns();
      if (line.size() > width) line = line.substr(0, width - 3) + "...";
      printf("%s\n", line.c_str());
    }
  }
}

std::vector<Column> Lesson::State::count_columns(const Problem& problem) const {
  const auto counted = [](std::string title, int width, auto value) {
    return Column{std::move(title), width, [=](const Kernel& kernel) {
                    if (!kernel.counts) return std::string("-");
                    const int64_t number = value(*kernel.counts);
                    if (number < 1'000'000) return std::to_string(number);
                    const auto [unit, prefix] = unit_for(static_cast<double>(number));
                    return digits(static_cast<double>(number) / unit, 5) + prefix;
                  }};
  };
  const auto column = [](std::string title, int width, auto value) {
    return Column{std::move(title), width, [=](const Kernel& kernel) {
                    if (!kernel.counts) return std::string("-");
                    const double number = value(*kernel.counts);
                    return std::isnan(number) ? "-" : digits(number, static_cast<size_t>(width));
                  }};
  };
  const auto ratio = [](int64_t of, int64_t to) {
    return to > 0 ? static_cast<double>(of) / static_cast<double>(to) : std::nan("");
  };
  int64_t least = 0;
  for (const Kernel& kernel : problem.kernels_) {
    if (kernel.counts && (least == 0 || kernel.counts->l2_bytes < least)) {
      least = kernel.counts->l2_bytes;
    }
  }
  const std::pair<double, std::string> unit = unit_for(static_cast<double>(least));
  return {
      counted("loads", 7, [](const Counts& c) { return c.global_load_requests; }),
      column("sectors", 7,
             [=](const Counts& c) { return ratio(c.global_load_sectors, c.global_load_requests); }),
      counted("stores", 7, [](const Counts& c) { return c.global_store_requests; }),
      column(
          "sectors", 7,
          [=](const Counts& c) { return ratio(c.global_store_sectors, c.global_store_requests); }),
      column(unit.second + "B", 7,
             [=](const Counts& c) { return static_cast<double>(c.l2_bytes) / unit.first; }),
      {"x least", 7,
       [=](const Kernel& kernel) {
         return kernel.counts
                    ? digits(static_cast<double>(kernel.counts->l2_bytes) / kernel.work.bytes, 7)
                    : "-";
       }},
      counted("shared", 7,
              [](const Counts& c) { return c.shared_load_requests + c.shared_store_requests; }),
      counted("conflicts", 9,
              [](const Counts& c) { return c.shared_load_conflicts + c.shared_store_conflicts; }),
      {"error", 8, error_text},
  };
}

std::vector<Column> Lesson::State::columns(const Problem& problem) const {
  const auto limit = [this, rate = problem.rate_](const Kernel& kernel) {
    return limit_ms(kernel.work, rate);
  };
  double baseline_ms = 0, least_memory = 0;
  for (const Kernel& kernel : problem.kernels_) {
    if (kernel.ran && baseline_ms == 0) baseline_ms = kernel.median_ms();
    if (kernel.memory_bytes > 0 && (least_memory == 0 || kernel.memory_bytes < least_memory)) {
      least_memory = kernel.memory_bytes;
    }
  }
  std::vector<Column> columns = {
      {"ms", 9,
       [=](const Kernel& kernel) {
         const double ms = kernel.median_ms();
         return text("%.*f", ms < 0.1 ? 5 : ms < 1000 ? 4 : 1, ms);
       }},
      {"TFLOP/s", 8,
       [=](const Kernel& kernel) {
         return digits(kernel.work.flops / kernel.median_ms() * 1e-9, 8);
       }},
      {"GB/s", 7,
       [=](const Kernel& kernel) {
         return digits(kernel.work.bytes / kernel.median_ms() * 1e-6, 7);
       }},
      {"%limit", 7,
       [=](const Kernel& kernel) {
         const double ms = limit(kernel);
         return ms > 0 ? text("%.1f", 100 * ms / kernel.median_ms()) : "-";
       }},
      {"speed", 8,
       [=](const Kernel& kernel) { return digits(baseline_ms / kernel.median_ms(), 7) + "x"; }},
      {"error", 8, error_text}};
  if (least_memory > 0) {
    const std::pair<double, std::string> unit = unit_for(least_memory);
    columns.push_back({unit.second + "B", 8, [=](const Kernel& kernel) {
                         return kernel.memory_bytes > 0
                                    ? text("%.4g", kernel.memory_bytes / unit.first)
                                    : "-";
                       }});
  }
  return columns;
}

void Lesson::State::print_comparisons() const {
  if (sweeps) return;  // there is a plot for that
  for (const Problem& problem : problems) {
    for (const Problem::Comparison& comparison : problem.comparisons_) {
      const Kernel *fast = nullptr, *slow = nullptr;
      for (const Kernel& kernel : problem.kernels_) {
        if (kernel.ran && kernel.name == comparison.fast) fast = &kernel;
        if (kernel.ran && kernel.name == comparison.slow) slow = &kernel;
      }
      if (!fast || !slow) continue;
      print_prose(comparison_text(comparison.format, slow->median_ms() / fast->median_ms()));
    }
  }
}

/// What else this lesson can show: its options that were not given.
std::string Lesson::State::other_tables() const {
  std::vector<std::string> names = {"another N"};
  const auto add = [&](const auto& options) {
    for (const auto& option : options) {
      if (!given.contains(option.name)) names.push_back(option.name);
    }
  };
  add(info.options);
  add(info.choices);
  add(info.flags);
  if (info.sweep.gpu.first > 0 && !sweeps) names.push_back("--sweep");
  return "Other tables: " + listed(names, ", ", " or ") + " (see --help).";
}

Json json_of(const Counts& counts) {
  Json worst = Json::array();
  for (const Counts::Place& place : counts.worst) {
    worst.push_back(
        {{"file", place.file},
         {"line", place.line},
         {"memory", place.shared ? "shared" : "global"},
         {"access", place.store ? "store" : "load"},
         {"requests", place.requests},
         {place.shared ? "conflicts_per_request" : "sectors_per_request", place.per_request}});
  }
  return {{"global_load_requests", counts.global_load_requests},
          {"global_load_sectors", counts.global_load_sectors},
          {"global_store_requests", counts.global_store_requests},
          {"global_store_sectors", counts.global_store_sectors},
          {"shared_load_requests", counts.shared_load_requests},
          {"shared_load_conflicts", counts.shared_load_conflicts},
          {"shared_store_requests", counts.shared_store_requests},
          {"shared_store_conflicts", counts.shared_store_conflicts},
          {"atomic_requests", counts.atomic_requests},
          {"atomic_sectors", counts.atomic_sectors},
          {"async_copy_bytes", counts.async_copy_bytes},
          {"copy_engine_bytes", counts.copy_engine_bytes},
          {"multicast_saved_bytes", counts.multicast_saved_bytes},
          {"tensor_flops", counts.tensor_flops},
          {"barriers", counts.barriers},
          {"l2_bytes", counts.l2_bytes},
          {"worst", worst}};
}

Json Lesson::State::record() const {
  Json result = {
      {"lesson", info.name},
      {"commit", build_commit()},
      {"time", now_utc()},
      {"seed", seed},
      {"device",
       {{"backend", device.backend},
        {"name", device.name},
        {"compute_capability", std::to_string(device.major) + "." + std::to_string(device.minor)},
        {"sms", device.sms},
        {"memory_bytes", device.memory_bytes},
        {"l2_bytes", device.l2_bytes},
        {"peak_bytes_per_second", device.bytes_per_second},
        {"clock_mhz", 1e-6 * device.clock_hz},
        {"driver", device.driver},
        {"runtime", device.runtime}}},
      {"problems", Json::array()}};
  const auto or_null = [](double value) { return value > 0 ? Json(value) : Json(nullptr); };
  for (const Problem& problem : problems) {
    Json dims = Json::object(), kernels = Json::array();
    for (const Dim& dim : problem.dims_) dims[dim.name] = dim.extent;
    const double limit = limit_ms(problem.work_, problem.rate_);
    const Kernel* baseline = nullptr;
    for (const Kernel& kernel : problem.kernels_) {
      if (!kernel.ran) continue;
      if (!baseline) baseline = &kernel;
      const bool timed = !kernel.samples_ms.empty();
      const double ms = timed ? kernel.median_ms() : 0;
      const auto if_timed = [&](double value) { return timed ? Json(value) : Json(nullptr); };
      Json ways = Json::array();
      for (const Way& way : kernel.ways) {
        ways.push_back({{"name", way.name},
                        {"expected_ms", way.microseconds / 1000},
                        {"tried_ms", or_null(way.tried_ms)}});
      }
      Json row = {
          {"name", kernel.name},
          {"role", name_of(kernel.role)},
          {"way", kernel.way.empty() ? Json(nullptr) : Json(kernel.way)},
          {"ways", kernel.way.empty() ? Json(nullptr) : ways},
          {"ms", timed ? Json{{"median", ms},
                              {"p10", kernel.percentile(10)},
                              {"p90", kernel.percentile(90)},
                              {"samples", kernel.samples_ms.size()},
                              {"mode", name_of(timing(problem))}}
                       : Json(nullptr)},
          {"tflops", if_timed(kernel.work.flops / ms * 1e-9)},
          {"gbps", if_timed(kernel.work.bytes / ms * 1e-6)},
          {"percent_of_limit",
           or_null(timed ? 100 * limit_ms(kernel.work, problem.rate_) / ms : 0)},
          {"speedup", if_timed(timed ? baseline->median_ms() / ms : 0)},
          {"clock_mhz", or_null(kernel.clocks_hz.empty()
                                    ? 0
                                    : 1e-6 * kernel.clocks_hz[kernel.clocks_hz.size() / 2])},
          {"counts", kernel.counts ? json_of(*kernel.counts) : Json(nullptr)},
          {"memory_bytes", or_null(kernel.memory_bytes)},
          {"resources", kernel.threads == 0 ? Json(nullptr)
                                            : Json{{"threads", kernel.threads},
                                                   {"registers", kernel.registers},
                                                   {"local_bytes", kernel.local_bytes},
                                                   {"blocks_per_sm", kernel.blocks_per_sm}}},
          {"error", kernel.error.frobenius},  // nlohmann writes NaN as null
          {"worst_error", kernel.error.worst},
          {"tolerance", kernel.tolerance},
          {"ok", kernel.ok}};
      kernels.push_back(std::move(row));
    }
    const bool memory = limit > 0 && problem.work_.bytes / device.bytes_per_second >=
                                         problem.work_.flops / device.peak(problem.rate_);
    result["problems"].push_back({{"name", problem.name_},
                                  {"dims", dims},
                                  {"dtype", problem.dtype_},
                                  {"flops", problem.work_.flops},
                                  {"min_bytes", problem.work_.bytes},
                                  {"limit", limit == 0 ? "unknown"
                                            : memory   ? "memory"
                                                       : "compute"},
                                  {"limit_ms", or_null(limit)},
                                  {"kernels", kernels}});
  }
  return result;
}

int Lesson::run() {
  State& state = *state_;
  if (state.list) {
    for (const Problem& problem : state.problems) {
      for (const Kernel& kernel : problem.kernels_) {
        printf("%s: %s\n", problem.name_.c_str(), kernel.name.c_str());
      }
    }
    return kAllVerified;
  }
  int selected = 0;
  for (const Problem& problem : state.problems) {
    for (const Kernel& kernel : problem.kernels_) selected += state.selected(kernel);
  }
  if (selected == 0 && state.kernel_pattern.empty()) {
    const Kernel* least = nullptr;
    for (const Problem& problem : state.problems) {
      for (const Kernel& kernel : problem.kernels_) {
        if (!least || kernel.needs_cc < least->needs_cc) least = &kernel;
      }
    }
    fail(kDeviceCannot, "every kernel of this lesson needs %s%s", state.why_not(*least).c_str(),
         least->hopper ? " (H100, H200)" : "");
  }
  if (selected == 0) {
    fail(kBadUsage, "no kernel that this device can run matches --kernel '%s' (see --list)",
         state.kernel_pattern.c_str());
  }
  state.require_memory();

  const Device& device = state.device;
  print_prose(state.info.name + std::string(": ") + state.info.title);
  std::string machine =
      device.name + ", " + std::to_string(device.sms) + (on_cpu() ? " cores" : " SMs");
  if (!on_cpu()) {
    machine += ", compute capability " + std::to_string(device.major) + "." +
               std::to_string(device.minor) + ", " + with_prefix(device.bytes_per_second) +
               "B/s, fp32 " + with_prefix(device.peak(Rate::fp32)) + "FLOP/s, fp16 tensor " +
               with_prefix(device.peak(Rate::fp16)) + "FLOP/s";
  }
  print_prose(machine);

  const auto runs = [&](const Problem& problem) {
    return std::any_of(problem.kernels_.begin(), problem.kernels_.end(),
                       [&](const Kernel& kernel) { return state.selected(kernel); });
  };
  const Clock::time_point deadline =
      state.started + std::chrono::milliseconds(std::lround(1e3 * state.seconds));
  auto left = std::count_if(state.problems.begin(), state.problems.end(), runs);
  int failed = 0;
  for (Problem& problem : state.problems) {
    if (!runs(problem)) continue;
    // What one problem leaves of its share is for those after it.
    const Clock::time_point start = Clock::now();
    const Clock::time_point end = start + (deadline - start) / left--;
    state.prepare(problem);
    if (!state.counting) state.choose(problem);
    const Clock::time_point prepared = Clock::now();
    if (state.counting) {
      state.count(problem);
    } else {
      state.verify(problem, [&](const Kernel& kernel) { launch_watched(problem.name_, kernel); });
      state.sample(problem, end - (Clock::now() - prepared));
    }
    for (auto* list :
         {&problem.inputs_, &problem.outputs_, &problem.references_, &problem.workspaces_}) {
      for (auto& storage : *list) storage->release();
    }
    for (const Kernel& kernel : problem.kernels_) failed += kernel.ran && !kernel.ok;
    state.progress.clear();
    state.print(problem);
    fflush(stdout);
  }

  printf("\n");
  if (state.counting && on_cpu()) {
    print_prose(
        "Counted by the CPU backend: loads and stores of warps, sectors of 32 bytes that one asks "
        "for, "
        "bytes asked of the L2 cache, and how many times the least that is (docs/profiling.md).");
  } else if (on_cpu()) {
    print_prose("On the CPU backend only the results count: its times say nothing about a GPU.");
  } else if (state.counting) {
    print_prose("What was launched is for a profiler to count: scons counters.");
  } else {
    state.print_comparisons();
  }
  for (const std::string& note : state.notes) print_prose(note);
  if (failed) {
    printf("%d of %d kernels FAILED verification.\n", failed, selected);
  } else {
    printf("All %d kernels verified against fp64.\n", selected);
  }
  print_prose(state.other_tables());
  fflush(stdout);
  if (!state.json_path.empty()) {
    write_atomically(state.json_path, state.record().dump(2) + "\n", false);
  }
  return failed ? kVerificationFailed : kAllVerified;
}

}  // namespace common
