#include "common/report/record.h"

#include <ctime>
#include <nlohmann/json.hpp>

#include "common/report/build_info.h"

namespace common {

namespace {

using Json = nlohmann::ordered_json;

const char* name_of(Role role) {
  return role == Role::baseline ? "baseline" : role == Role::library ? "library" : "ours";
}

const char* name_of(Timing timing) {
  return timing == Timing::cold ? "cold" : timing == Timing::hot ? "hot" : "graph";
}

Json or_null(double value) { return value > 0 ? Json(value) : Json(nullptr); }

std::string now_utc() {
  const std::time_t now = std::time(nullptr);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  return text;
}

Json json_of(const Device& device) {
  return {{"backend", device.backend},
          {"name", device.name},
          {"compute_capability", std::to_string(device.major) + "." + std::to_string(device.minor)},
          {"sms", device.sms},
          {"memory_bytes", device.memory_bytes},
          {"l2_bytes", device.l2_bytes},
          {"peak_bytes_per_second", device.bytes_per_second},
          {"clock_mhz", 1e-6 * device.clock_hz},
          {"driver", device.driver},
          {"runtime", device.runtime}};
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
          {"library_bytes", counts.library_bytes},
          {"l2_bytes", counts.l2_bytes},
          {"worst", worst}};
}

Json json_of(const Resources& resources) {
  return {{"threads", resources.threads},
          {"registers", resources.registers},
          {"local_bytes", resources.local_bytes},
          {"blocks_per_sm", resources.blocks_per_sm}};
}

Json ways_of(const Row& row) {
  const std::vector<Way>& ways = row.kernel->ways;
  Json result = Json::array();
  for (size_t i = 0; i < ways.size(); ++i) {
    result.push_back({{"name", ways[i].name},
                      {"expected_ms", ways[i].microseconds / 1000},
                      {"tried_ms", or_null(row.tried_ms.empty() ? 0 : row.tried_ms[i])}});
  }
  return result;
}

Json json_of(const Row& row, const Table& table, const Device& device) {
  const Kernel& kernel = *row.kernel;
  const std::string& way = kernel.ways[row.way].name;
  const double ms = row.timed() ? row.median_ms() : 0;
  const auto if_timed = [&](double value) { return row.timed() ? Json(value) : Json(nullptr); };
  Json times = nullptr;
  if (row.timed()) {
    times = {{"median", ms},
             {"p10", row.percentile(10)},
             {"p90", row.percentile(90)},
             {"samples", row.samples_ms.size()},
             {"mode", name_of(table.timing)}};
  }
  const double limit = limit_ms(kernel.work, device, table.problem->rate);
  return {{"name", kernel.name},
          {"role", name_of(kernel.role)},
          {"way", way.empty() ? Json(nullptr) : Json(way)},
          {"ways", way.empty() ? Json(nullptr) : ways_of(row)},
          {"ms", times},
          {"tflops", if_timed(kernel.work.flops / ms * 1e-9)},
          {"gbps", if_timed(kernel.work.bytes / ms * 1e-6)},
          {"percent_of_limit", or_null(row.timed() ? 100 * limit / ms : 0)},
          {"speedup", if_timed(row.timed() ? table.baseline()->median_ms() / ms : 0)},
          {"clock_mhz", or_null(1e-6 * row.clock_hz())},
          {"counts", row.counts ? json_of(*row.counts) : Json(nullptr)},
          {"steps", or_null(kernel.steps)},
          {"memory_bytes", or_null(kernel.memory_bytes)},
          {"resources", row.resources ? json_of(*row.resources) : Json(nullptr)},
          {"error", row.error.frobenius},  // nlohmann writes NaN as null
          {"worst_error", row.error.worst},
          {"tolerance", row.tolerance},
          {"ok", row.ok}};
}

Json json_of(const Table& table, const Device& device) {
  const Problem& problem = *table.problem;
  Json dims = Json::object(), kernels = Json::array();
  for (const Dim& dim : problem.dims) dims[dim.name] = dim.extent;
  for (const Row& row : table.rows) {
    if (row.ran) kernels.push_back(json_of(row, table, device));
  }
  const double limit = limit_ms(problem.work, device, problem.rate);
  const char* which = limit == 0                                            ? "unknown"
                      : is_memory_bound(problem.work, device, problem.rate) ? "memory"
                                                                            : "compute";
  return {{"name", problem.name},
          {"dims", dims},
          {"dtype", problem.dtype},
          {"flops", problem.work.flops},
          {"min_bytes", problem.work.bytes},
          {"limit", which},
          {"limit_ms", or_null(limit)},
          {"kernels", kernels}};
}

}  // namespace

std::string record_of(const std::string& lesson, uint64_t seed, const Device& device,
                      const Tables& tables) {
  Json problems = Json::array();
  for (const Table& table : tables) problems.push_back(json_of(table, device));
  const Json record = {{"lesson", lesson}, {"commit", build_commit()},  {"time", now_utc()},
                       {"seed", seed},     {"device", json_of(device)}, {"problems", problems}};
  return record.dump(2) + "\n";
}

size_t most_bytes_of(const Tables& tables) {
  size_t bytes = 16 << 10;
  for (const Table& table : tables) {
    for (const Row& row : table.rows) bytes += (4 << 10) + 256 * row.kernel->ways.size();
  }
  return bytes;
}

}  // namespace common
