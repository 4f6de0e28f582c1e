#include "common/lesson.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>
#include <system_error>

#include "common/choose/choose.h"
#include "common/measure/count.h"
#include "common/measure/resources.h"
#include "common/measure/sample.h"
#include "common/numerics.h"
#include "common/report/output_file.h"
#include "common/report/progress.h"
#include "common/report/record.h"
#include "common/report/table.h"
#include "common/report/text.h"
#include "common/start/backend.h"
#include "common/start/command_line.h"
#include "common/start/memory.h"
#include "common/start/row_filter.h"
#include "common/verify/attempt.h"
#include "common/verify/inputs.h"
#include "common/verify/verify.h"

#ifdef CUDA_CPU
#include "cpu/watch/counting.h"
#include "cpu/watch/memory_watch.h"
#endif

namespace common {

using Clock = std::chrono::steady_clock;

namespace {

/// Ends the program with one line for an exception that nobody has caught: of primitives/ and
/// operators/, or of fmt where it cannot print.
[[noreturn]] void end_by_exception() {
  try {
    if (const std::exception_ptr current = std::current_exception())
      std::rethrow_exception(current);
  } catch (const std::system_error& error) {
    fail(kBadUsage, "cannot write what is printed: %s", error.code().message().c_str());
  } catch (const std::exception& error) {
    fail(kDeviceCannot, "%s", error.what());
  }
  std::abort();
}

}  // namespace

struct Lesson::State {
  LessonInfo info;
  CommandLine line;
  Clock::time_point started = Clock::now();
  RowFilter filter;
  Device device;
  bool counting = false;
  std::deque<Problem> problems;
  std::vector<std::string> notes;

  State(LessonInfo lesson, int argc, char** argv);
  Tables tables();
  void require_selected(const Tables& tables) const;
  void say_how_long(const Tables& tables) const;
  void print_machine() const;
  void run(Table& table, Clock::time_point end);
  void print_end(const Tables& tables) const;
};

// ---- What lessons call --------------------------------------------------------------------------

Lesson::Lesson(int argc, char** argv, LessonInfo info)
    : state_(std::make_unique<State>(std::move(info), argc, argv)) {}
Lesson::~Lesson() = default;

int64_t Lesson::n() const { return state_->line.n; }
int64_t Lesson::option(const char* name) const { return state_->line.options.at(name); }
const std::string& Lesson::choice(const char* name) const { return state_->line.choices.at(name); }
bool Lesson::flag(const char* name) const { return state_->line.flags.at(name); }
bool Lesson::given(const char* name) const { return state_->line.given.contains(name); }
bool Lesson::small() const { return state_->line.small; }
std::vector<int64_t> Lesson::sizes(const char* of) const {
  if (state_->line.sweep) return sweep_of(state_->info, of, on_cpu());
  return {of == std::string_view("N") ? n() : option(of)};
}
const Device& Lesson::device() const { return state_->device; }
void Lesson::note(std::string line) { state_->notes.push_back(std::move(line)); }

Problem& Lesson::problem(std::string name, std::vector<Dim> dims, std::string dtype, Work work,
                         Rate rate) {
  Problem& problem = state_->problems.emplace_back();
  problem.name = std::move(name);
  problem.dims = std::move(dims);
  problem.dtype = std::move(dtype);
  problem.work = work;
  problem.rate = rate;
  require_memory(problem, state_->line);
  return problem;
}

int Lesson::run() {
  State& state = *state_;
  if (state.line.list) {
    for (const Problem& problem : state.problems) {
      for (const Kernel& kernel : problem.kernels) {
        fmt::print("{}: {}\n", problem.name, kernel.name);
      }
    }
    require_printed();
    return kAllVerified;
  }
  Tables tables = state.tables();
  state.require_selected(tables);
  require_memory(state.problems, state.line, state.device);
  if (!state.line.json_path.empty()) require_writable(state.line.json_path, most_bytes_of(tables));
  if (on_cpu()) state.say_how_long(tables);
  state.print_machine();

  const auto seconds = std::chrono::milliseconds(std::lround(1e3 * state.line.seconds));
  const Clock::time_point deadline = state.started + seconds;
  auto left = std::count_if(tables.begin(), tables.end(),
                            [](const Table& table) { return table.any_selected(); });
  Layout layout = {.all_places = state.line.count};
  for (const Problem& problem : state.problems) {
    for (const Kernel& kernel : problem.kernels) {
      layout.name_width = std::max(layout.name_width, kernel.name.size());
    }
  }
  for (Table& table : tables) {
    if (!table.any_selected()) continue;
    // What one problem leaves of its share is for those after it.
    const Clock::time_point start = Clock::now();
    std::string lost;
    try {
      state.run(table, start + (deadline - start) / left--);
    } catch (const DeviceLost& device_lost) {
      lost = device_lost.how;
    }
    clear_progress();
    print_table(table, state.device, layout);
    if (!lost.empty()) fail(kDeviceCannot, "%s", lost.c_str());
    fflush(stdout);
  }
  state.print_end(tables);
  require_printed();
  if (!state.line.json_path.empty()) {
    write_output(state.line.json_path,
                 record_of(state.info.name, state.line.seed, state.device, tables));
  }
  const auto failed = [](const Table& table) {
    return std::any_of(table.rows.begin(), table.rows.end(),
                       [](const Row& row) { return row.ran && !row.ok; });
  };
  return std::any_of(tables.begin(), tables.end(), failed) ? kVerificationFailed : kAllVerified;
}

// ---- A run --------------------------------------------------------------------------------------

Lesson::State::State(LessonInfo lesson, int argc, char** argv)
    : info(std::move(lesson)),
      line(parse_command_line(info, argc, argv)),
      filter(line.kernel_pattern) {
  std::set_terminate(end_by_exception);
  settle_backend(info, line, argv);
#ifdef CUDA_CPU
  counting = !line.time && (line.count || cuda_cpu::can_count());
#else
  counting = line.count;
#endif
  device = Device::current();
}

namespace {

/// What the kernel needs that the device does not have, if anything.
std::string missing(const Kernel& kernel, const Device& device) {
  const int capability = 10 * device.major + device.minor, needed = kernel.least_capability;
  if (kernel.only_hopper ? capability != needed : capability < needed) {
    return fmt::format("a GPU of compute capability {}.{}", needed / 10, needed % 10);
  }
  int least = kernel.ways.front().shared_bytes;
  for (const Way& way : kernel.ways) least = std::min(least, way.shared_bytes);
  least = std::max(least, kernel.shared_bytes);
  if (least <= device.shared_bytes) return "";
  return fmt::format("{} KB of shared memory a block", (least + 1023) / 1024);
}

/// The first way that the device can run.
size_t first_way(const Kernel& kernel, const Device& device) {
  size_t way = 0;
  while (way + 1 < kernel.ways.size() && kernel.ways[way].shared_bytes > device.shared_bytes) ++way;
  return way;
}

/// Memory, random inputs, and the reference, which may add notes. Inputs by which nothing would be
/// proved are drawn again.
void prepare(Problem& problem, Inputs& inputs, std::vector<std::string>& notes) {
  for (Storages* list :
       {&problem.inputs, &problem.references, &problem.outputs, &problem.workspaces}) {
    for (auto& storage : *list) storage->allocate();
  }
  for (auto& storage : problem.workspaces) {
    CUDA_CHECK(cudaMemsetAsync(storage->data, 0, storage->count * storage->element_bytes));
  }
  show_progress(problem.name + ": reference");
  constexpr int kMostDraws = 20;
  const size_t notes_before = notes.size();
  for (int draw = 1;; ++draw) {
    inputs.fill();
    problem.compute_reference();
    CUDA_CHECK(cudaDeviceSynchronize());
    const auto& checks = problem.checks;
    if (draw == kMostDraws || std::none_of(checks.begin(), checks.end(), proves_nothing)) break;
    notes.resize(notes_before);
    inputs.draw_others();
  }
  inputs.keep();
}

void release(Problem& problem) {
  for (Storages* list :
       {&problem.inputs, &problem.outputs, &problem.references, &problem.workspaces}) {
    for (auto& storage : *list) storage->release();
  }
}

/// The first launch of a row. The CPU backend says, if asked, which memory it uses.
void launch_watched([[maybe_unused]] const Problem& problem, const Row& row) {
#ifdef CUDA_CPU
  cuda_cpu::start_watching();
#endif
  row.launch()();
#ifdef CUDA_CPU
  const double claimed = row.kernel->memory_bytes;
  if (const double used = cuda_cpu::stop_watching(); used > 0 && claimed > 0) {
    fmt::print(stderr, "memory of {}: {}: {:.0f} bytes used, {:.0f} claimed\n", problem.name,
               row.kernel->name, used, claimed);
  }
#endif
}

}  // namespace

Tables Lesson::State::tables() {
  Tables tables;
  for (Problem& problem : problems) {
    // There is no cache to overwrite and no graph on the CPU.
    const Timing timing =
        device.backend == "cpu" ? Timing::hot : line.timing.value_or(problem.timing);
    Table& table = tables.emplace_back(Table{&problem, timing, counting});
    for (const Kernel& kernel : problem.kernels) {
      table.rows.push_back({.kernel = &kernel,
                            .missing = missing(kernel, device),
                            .asked_for = filter.matches(kernel.name),
                            .way = first_way(kernel, device)});
    }
  }
  return tables;
}

void Lesson::State::require_selected(const Tables& tables) const {
  const Row* least = nullptr;
  for (const Table& table : tables) {
    if (table.any_selected()) return;
    for (const Row& row : table.rows) {
      const int needed = row.kernel->least_capability;
      if (!least || needed < least->kernel->least_capability) least = &row;
    }
  }
  if (line.kernel_pattern.empty()) {
    fail(kDeviceCannot, "every kernel of this lesson needs %s%s", least->missing.c_str(),
         least->kernel->only_hopper ? " (H100, H200)" : "");
  }
  fail(kBadUsage, "no kernel that this device can run matches --kernel '%s' (see --list)",
       line.kernel_pattern.c_str());
}

/// Where nobody has asked for it, N alone is made small for the CPU backend.
void Lesson::State::say_how_long(const Tables& tables) const {
  constexpr double kFlopsPerSecond = 1e8;  // give or take a factor of three
  constexpr double kPatience = 20;
  double flops = 0;
  for (const Table& table : tables) {
    for (const Row& row : table.rows) {
      const bool emulated = row.selected() && row.kernel->role != Role::library;
      if (emulated) flops += row.kernel->work.flops;
    }
  }
  if (flops < kPatience * kFlopsPerSecond) return;
  std::string sizes = "N";
  for (const Option& option : info.options) sizes += std::string(", ") + option.name;
  fmt::print(stderr,
             "The CPU backend computes {}FLOP, in about {:.2g} s. What decides on that: {}.\n",
             with_prefix(flops), flops / kFlopsPerSecond, sizes);
}

void Lesson::State::print_machine() const {
  const bool cpu = device.backend == "cpu";
  print_prose(fmt::format("{}: {}", info.name, info.title));
  std::string machine = fmt::format("{}, {} {}", device.name, device.sms, cpu ? "cores" : "SMs");
  if (!cpu) {
    machine +=
        fmt::format(", compute capability {}.{}, {}B/s, fp32 {}FLOP/s, fp16 tensor {}FLOP/s",
                    device.major, device.minor, with_prefix(device.bytes_per_second),
                    with_prefix(device.peak(Rate::fp32)), with_prefix(device.peak(Rate::fp16)));
  }
  print_prose(machine);
}

void Lesson::State::run(Table& table, Clock::time_point end) {
  Problem& problem = *table.problem;
  Inputs inputs(problem, line.seed);
  prepare(problem, inputs, notes);
  if (!counting) choose_ways(table, device);
  const Clock::time_point prepared = Clock::now();
  const auto verify = [&](const auto& launch, const auto& which) {
    common::verify(table, inputs, launch, line.explain, which);
  };
  const auto all = [](const Row&) { return true; };
  if (counting) {
    verify([&](Row& row) { count_launch(table, row); }, all);
  } else {
    verify([&](Row& row) { launch_watched(problem, row); }, all);
  }
  // What a launch leaves in a workspace must suit the next one. Kernels may have two halves of it
  // that take turns: the third launch is the first one that finds a half as a launch has left it.
  const auto again = [](Row& row) { row.launch()(); };
  for (int launch = 2; launch <= 3; ++launch) {
    verify(again, [](const Row& row) { return row.leaves_something; });
  }
  for (Row& row : table.rows) {
    // The streams of other devices cannot be recorded with this one's.
    const bool recordable = row.ran && row.harmless && !row.kernel->hooks.time;
    if (recordable) row.resources = resources_of(row.launch());
  }
  if (!counting) {
    sample(table, {line.samples, end - (Clock::now() - prepared), line.seed}, device,
           [&](const auto& launch) { verify(launch, all); });
  } else if (device.backend == "cpu") {
    // The others do the same again unless they keep something where the harness does not look; of
    // long ones a reader does not wait twice.
    constexpr double kLongSeconds = 0.1;
    verify(again, [](const Row& row) {
      return !row.leaves_something && row.launch_seconds < kLongSeconds;
    });
  }
  release(problem);
}

void Lesson::State::print_end(const Tables& tables) const {
  const bool cpu = device.backend == "cpu";
  fmt::print("\n");
  if (counting && cpu) {
    print_prose(
        "Counted by the CPU backend: loads and stores of warps, sectors of 32 bytes that one asks "
        "for, bytes asked of the L2 cache, and how many times the least that is "
        "(docs/profiling.md).");
    bool of_library = false;
    for (const Table& table : tables) {
      for (const Row& row : table.rows) of_library |= row.counts && row.counts->library_bytes > 0;
    }
    if (of_library) {
      print_prose(
          "Of a library's product: the bytes of its inputs and outputs, each once; it may move "
          "more.");
    }
  } else if (cpu) {
    print_prose("On the CPU backend only the results count: its times say nothing about a GPU.");
  } else if (counting) {
    print_prose("What was launched is for a profiler to count: scons counters.");
  } else if (!line.sweep) {  // a sweep has a plot
    print_comparisons(tables);
  }
  for (const std::string& note : notes) print_prose(note);
  int ran = 0, failed = 0;
  for (const Table& table : tables) {
    for (const Row& row : table.rows) ran += row.ran, failed += row.ran && !row.ok;
  }
  if (failed) {
    fmt::print("{} of {} kernels FAILED verification.\n", failed, ran);
  } else {
    fmt::print("All {} kernels verified against fp64.\n", ran);
  }
  print_prose(other_tables(info, line));
}

}  // namespace common
