#include "common/report/table.h"

#include <cmath>
#include <cstring>
#include <fstream>
#include <string>

#include "common/report/comparison.h"
#include "common/report/text.h"

namespace common {

namespace {

/// A column of a table. Where the terminal is too narrow for all, number 1 goes first, then 2, and
/// so on; 0 stays.
struct Column {
  int goes;
  std::string title;
  int width;
  std::function<std::string(const Row&)> text;
};

const char* name_of(Rate rate) {
  return rate == Rate::fp32 ? "fp32" : rate == Rate::tf32 ? "TF32 tensor" : "fp16 tensor";
}

std::string error_text(const Row& row) {
  return fmt::format("{:.1e}", std::fabs(row.error.frobenius));  // a NaN may print its sign
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

/// Leaves out columns, and then ends of names, until the table is no wider than the terminal.
void fit_terminal(std::vector<Column>& columns, size_t& name_width) {
  const size_t screen = terminal_columns();
  const auto width = [&] {
    size_t sum = name_width + std::strlen(" ok");
    for (const Column& column : columns) sum += 1 + static_cast<size_t>(column.width);
    return sum;
  };
  if (screen == 0) return;
  constexpr int kMost = 6;
  for (int next = 1; next <= kMost && width() > screen; ++next) {
    std::erase_if(columns, [&](const Column& column) { return column.goes == next; });
  }
  constexpr size_t kLeastName = 8;
  while (width() > screen && name_width > kLeastName) --name_width;
}

std::vector<Column> count_columns(const Table& table) {
  // Of the library's kernels nothing but the bytes.
  const auto known = [](const Row& row) { return row.counts && row.counts->library_bytes == 0; };
  const auto counted = [=](int goes, std::string title, int width, auto value) {
    return Column{goes, std::move(title), width, [=](const Row& row) {
                    if (!known(row)) return std::string("-");
                    const int64_t number = value(*row.counts);
                    if (number < 1'000'000) return std::to_string(number);
                    const auto [unit, prefix] = unit_for(static_cast<double>(number));
                    return digits(static_cast<double>(number) / unit, 5) + prefix;
                  }};
  };
  const auto sectors = [=](int goes, auto of, auto requests) {
    return Column{
        goes, "sectors", 7, [=](const Row& row) {
          if (!known(row) || requests(*row.counts) == 0) return std::string("-");
          return digits(
              static_cast<double>(of(*row.counts)) / static_cast<double>(requests(*row.counts)), 7);
        }};
  };
  const auto bytes_over = [](double unit) {
    return [=](const Row& row) {
      return row.counts ? digits(static_cast<double>(row.counts->l2_bytes) / unit, 7) : "-";
    };
  };
  int64_t least = 0;
  for (const Row& row : table.rows) {
    if (row.counts && (least == 0 || row.counts->l2_bytes < least)) {
      least = row.counts->l2_bytes;
    }
  }
  const std::pair<double, std::string> unit = unit_for(static_cast<double>(least));
  const auto x_least = [=](const Row& row) { return bytes_over(row.kernel->work.bytes)(row); };
  const auto loads = [](const Counts& c) { return c.global_load_requests; };
  const auto stores = [](const Counts& c) { return c.global_store_requests; };
  return {
      counted(3, "loads", 7, loads),
      sectors(
          5, [](const Counts& c) { return c.global_load_sectors; }, loads),
      counted(1, "stores", 7, stores),
      sectors(
          1, [](const Counts& c) { return c.global_store_sectors; }, stores),
      {6, unit.second + "B", 7, bytes_over(unit.first)},
      {0, "x least", 7, x_least},
      counted(2, "shared", 7,
              [](const Counts& c) { return c.shared_load_requests + c.shared_store_requests; }),
      counted(4, "conflicts", 9,
              [](const Counts& c) { return c.shared_load_conflicts + c.shared_store_conflicts; }),
      {0, "error", 8, error_text},
  };
}

std::vector<Column> time_columns(const Table& table, const Device& device) {
  const Row* baseline = table.baseline();
  const double baseline_ms = baseline ? baseline->median_ms() : 0;
  double least_memory = 0;
  for (const Row& row : table.rows) {
    const double bytes = row.kernel->memory_bytes;
    if (bytes > 0 && (least_memory == 0 || bytes < least_memory)) least_memory = bytes;
  }
  const auto column = [](int goes, std::string title, int width, auto text) {
    return Column{goes, std::move(title), width,
                  [=](const Row& row) { return row.timed() ? text(row) : std::string("-"); }};
  };
  const Column ms = column(0, "ms", 9, [](const Row& row) {
    const double ms = row.median_ms();
    return fmt::format("{:.{}f}", ms, ms < 0.1 ? 5 : ms < 1000 ? 4 : 1);
  });
  const Column speed = column(0, "speed", 8, [=](const Row& row) {
    return digits(baseline_ms / row.median_ms(), 7) + "x";
  });
  const Column error = {5, "error", 8, error_text};
  if (table.rows.front().kernel->steps > 0) {
    const auto step_ms = [](const Row& row) { return row.median_ms() / row.kernel->steps; };
    return {ms,
            column(0, "ns/step", 8, [=](const Row& row) { return digits(1e6 * step_ms(row), 8); }),
            column(0, "cycles/step", 11,
                   [=](const Row& row) {
                     const double hz = row.clock_hz();
                     return hz > 0 ? fmt::format("{:.1f}", 1e-3 * hz * step_ms(row)) : "-";
                   }),
            speed, error};
  }
  std::vector<Column> columns = {
      ms,
      column(3, "TFLOP/s", 8,
             [](const Row& row) {
               return digits(row.kernel->work.flops / row.median_ms() * 1e-9, 8);
             }),
      column(1, "GB/s", 7,
             [](const Row& row) {
               return digits(row.kernel->work.bytes / row.median_ms() * 1e-6, 7);
             }),
      column(4, "%limit", 7,
             [&device, rate = table.problem->rate](const Row& row) {
               const double ms = limit_ms(row.kernel->work, device, rate);
               return ms > 0 ? fmt::format("{:.1f}", 100 * ms / row.median_ms()) : "-";
             }),
      speed,
      error};
  if (least_memory > 0) {
    const auto [unit, prefix] = unit_for(least_memory);
    columns.push_back({2, prefix + "B", 8, [unit = unit](const Row& row) {
                         const double bytes = row.kernel->memory_bytes;
                         return bytes > 0 ? fmt::format("{:.4g}", bytes / unit) : "-";
                       }});
  }
  return columns;
}

/// The lines of source that are to blame: the worst of each row, or all that are known.
void print_worst_places(const Table& table, Layout& layout) {
  for (const Row& row : table.rows) {
    if (!row.counts) continue;
    for (const Counts::Place& place : row.counts->worst) {
      const bool first = &place == &row.counts->worst.front();
      if (!layout.all_places && (!first || layout.places_left-- <= 0)) break;
      std::string line =
          fmt::format("{:.60}: {:.60}:{}, {:.4g} {} a {}", row.kernel->name, place.file, place.line,
                      place.per_request, place.shared ? "conflicts" : "sectors",
                      place.store ? "store" : "load");
      if (!place.shared) line += fmt::format(", {:.4g} needed", place.least);
      const std::string code = source_line(place.file, place.line);
      if (!code.empty()) line += ": " + code;
      const size_t width = screen_columns();
      if (line.size() > width) line = line.substr(0, width - 3) + "...";
      fmt::print("{}\n", line);
    }
  }
}

void print_heading(const Table& table, const Device& device) {
  const Problem& problem = *table.problem;
  std::string heading = problem.name + ":";
  for (const Dim& dim : problem.dims) heading += fmt::format(" {} = {},", dim.name, dim.extent);
  heading += fmt::format(" {}; {}FLOP, at least {}B", problem.dtype,
                         with_prefix(problem.work.flops), with_prefix(problem.work.bytes));
  fmt::print("\n");
  print_prose(heading);
  if (const double limit = limit_ms(problem.work, device, problem.rate); limit > 0) {
    const bool memory = is_memory_bound(problem.work, device, problem.rate);
    fmt::print("limit: {}, {:.4g} ms\n",
               memory ? "memory" : name_of(problem.rate) + std::string(" arithmetic"), limit);
  }
  if (table.timing == Timing::graph && !table.counting) {
    fmt::print("timed: {} calls in a CUDA graph, per call\n", kGraphCalls);
  }
}

}  // namespace

void print_table(const Table& table, const Device& device, Layout& layout) {
  print_heading(table, device);
  size_t name_width = layout.name_width;
  std::vector<Column> columns = table.counting ? count_columns(table) : time_columns(table, device);
  fit_terminal(columns, name_width);
  const auto name = [=](const std::string& text) {
    return fmt::format("{:<{}.{}}", text, name_width, name_width);
  };
  fmt::print("{}", name("kernel"));
  for (const Column& column : columns) fmt::print(" {:>{}}", column.title, column.width);
  fmt::print("\n");
  for (const Row& row : table.rows) {
    if (!row.asked_for) continue;
    fmt::print("{}", name(row.kernel->name));
    if (!row.ran) {
      fmt::print("{}\n", row.missing.empty() ? " did not run" : " needs " + row.missing);
      continue;
    }
    for (const Column& column : columns) fmt::print(" {:>{}}", column.text(row), column.width);
    fmt::print("{}\n", row.ok ? " ok" : fmt::format(" FAILED (tolerance {:.1e})", row.tolerance));
    if (!row.wrong.empty()) fmt::print("  {}\n", row.wrong);  // one line: ./exercise reads it
  }
  print_worst_places(table, layout);
}

void print_comparisons(const Tables& tables) {
  for (const Table& table : tables) {
    for (const auto& [fast, slow, format] : table.problem->comparisons) {
      const Row *fast_row = nullptr, *slow_row = nullptr;
      for (const Row& row : table.rows) {
        if (row.timed() && row.kernel->name == fast) fast_row = &row;
        if (row.timed() && row.kernel->name == slow) slow_row = &row;
      }
      if (!fast_row || !slow_row) continue;
      print_prose(comparison_text(format, slow_row->median_ms() / fast_row->median_ms()));
    }
  }
}

}  // namespace common
