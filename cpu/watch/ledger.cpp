#include "cpu/watch/ledger.h"

#include <execinfo.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/execution/execution.h"
#include "cpu/execution/sanitizers.h"
#include "cpu/runtime/device_heap.h"
#include "cpu/runtime/device_state.h"
#include "cpu/runtime/environment.h"
#include "cpu/watch/counting.h"
#include "cpu/watch/memory_watch.h"
#include "cpu/watch/repeats.h"

extern "C" const char __executable_start, _end;  // where the linker has put the program

namespace cuda_cpu {
namespace {

/// So much memory that was given back is kept at most.
constexpr std::size_t kMostKept = 1u << 30;
/// When a kernel has been counted for so long, the rest of it is taken to be like that. It is a
/// tenth when all kernels together have been counted for three times as long.
double most_seconds() { return environment().counted_milliseconds / 1000.0; }
/// What is nearer to zero than this is no address; and what a thread has of its own is within it.
constexpr std::size_t kNear = 1u << 16;

struct Kernel {
  std::string name;
  dim3 grid, block;
  Site site;
  long launches = 0;
  long repeats = 0;  ///< of them, that were not run
  Tally tally;
  double counted = 0;  ///< so many of the launches, all or the first ones, or blocks of one
  double seconds = 0;  ///< that those took
};

struct Kept {
  char* memory;
  std::size_t size;
};

/// The launch that a device runs.
struct Running {
  Kernel* kernel = nullptr;
  const Launch* launch = nullptr;
  bool counts = false;
  std::chrono::steady_clock::time_point start;
};

struct Ledger {
  std::mutex mutex;
  std::deque<Kernel> kernels;
  Running running[kMostDevices];     ///< by device: each may run a launch of its own
  std::vector<std::string> refused;  ///< since the program has last asked
  std::vector<std::string> unasked;  ///< calls that failed, of the same time
  std::FILE* file = nullptr;
  std::deque<Kept> kept;
  std::size_t kept_bytes = 0;
  bool ended = false;
  double seconds = 0;  ///< that all kernels were counted for
  std::vector<pthread_t> workers;
  std::set<std::pair<std::string, int>>
      left_out;  ///< the barriers that ledger_left_out() has noted
};

Ledger& ledger() {
  static Ledger* const ledger = new Ledger;
  return *ledger;
}

void say(const char* what, const std::string& text) {
  std::string line = text;
  std::replace(line.begin(), line.end(), '\n', ' ');
  std::fprintf(ledger().file, "%s\t%s\n", what, line.c_str());
  std::fflush(ledger().file);
}

std::string in_words(const dim3& size) {
  std::string text = std::to_string(size.x);
  if (size.y > 1 || size.z > 1) text += "x" + std::to_string(size.y);
  if (size.z > 1) text += "x" + std::to_string(size.z);
  return text;
}

/// Where a worker was when it was asked.
struct Whereabouts {
  void* calls[32];
  std::atomic<int> count = 0;
  uint3 block, thread;
};
Whereabouts whereabouts;

void tell_whereabouts(int) {
  if (!runner || !runner->in_thread() || whereabouts.count > 0) return;
  whereabouts.block = runner->current().block->index;
  whereabouts.thread = runner->current().index;
  whereabouts.count = backtrace(whereabouts.calls, 32);
}

/// The innermost of the calls that is in the reader's own source, or the one that has called it.
std::string line_of_calls(void* const* calls, int count, bool caller = false) {
  for (int i = 0; i < count; ++i) {
    const std::string line = line_of(reinterpret_cast<std::uintptr_t>(calls[i]));
    if (!line.empty() && !std::exchange(caller, false)) return line;
  }
  return "";
}

/// Asks the workers one after the other; "" if none is in a kernel, or the line is not known.
std::string ask_where() {
  if (kSanitized) return "";
  for (const pthread_t worker : ledger().workers) {
    pthread_kill(worker, SIGUSR2);
    for (int i = 0; i < 50 && whereabouts.count == 0; ++i) usleep(2000);
    if (whereabouts.count == 0) continue;
    const std::string line = line_of_calls(whereabouts.calls, whereabouts.count);
    const auto in_words = [](const uint3& at) {
      return "(" + std::to_string(at.x) + "," + std::to_string(at.y) + "," + std::to_string(at.z) +
             ")";
    };
    return "; thread " + in_words(whereabouts.thread) + " of block " + in_words(whereabouts.block) +
           (line.empty() ? " was running" : " was at " + line);
  }
  return "";
}

/// Of a launch that is still running nothing is counted yet.
void write_kernels() {
  Ledger& all = ledger();
  for (const Kernel& kernel : all.kernels) {
    const long launched =
        kernel.launches -
        std::count_if(std::begin(all.running), std::end(all.running),
                      [&](const Running& each) { return each.kernel == &kernel; });
    if (launched == 0) continue;
    const Counts counts = kernel.tally.counts();
    const auto of_all = [&](std::int64_t counted) {
      const auto launches = static_cast<double>(launched);
      const bool all = kernel.counted == 0 || kernel.counted == launches;
      return all ? static_cast<long long>(counted)
                 : std::llround(static_cast<double>(counted) * launches / kernel.counted);
    };
    std::fprintf(
        all.file,
        "kernel\t%s\t%s\t%s\t%ld\t%lld\t%lld\t%lld\t%lld\t%lld\t%lld\t%lld\t%lld\t%s:%d\t%.6g"
        "\t%ld\n",
        kernel.name.c_str(), in_words(kernel.grid).c_str(), in_words(kernel.block).c_str(),
        launched, of_all(counts.global_load_requests), of_all(counts.global_load_sectors),
        of_all(counts.global_store_requests), of_all(counts.global_store_sectors),
        of_all(counts.shared_load_requests + counts.shared_store_requests),
        of_all(counts.shared_load_conflicts + counts.shared_store_conflicts),
        of_all(counts.atomic_requests + counts.shared_atomic_requests), of_all(counts.l2_bytes),
        kernel.site.file, kernel.site.line, kernel.counted, kernel.repeats);
    for (const Counts::Place& place : counts.worst) {
      std::fprintf(all.file, "worst\t%s\t%s\t%d\t%d\t%d\t%lld\t%.3g\t%.3g\n", kernel.name.c_str(),
                   place.file.c_str(), place.line, place.shared, place.store,
                   static_cast<long long>(place.requests), place.per_request, place.least);
    }
  }
}

void write_ledger() {
  Ledger& all = ledger();
  if (all.ended) return;
  all.ended = true;
  if (!kSanitized) write_kernels();
  for (const std::string& why : all.refused) say("refused", why);
  for (const std::string& call : all.unasked) say("unasked", call);
  std::map<std::string, std::pair<long, std::size_t>> leaks;
  {
    std::lock_guard lock(device().mutex);
    for (const auto& [start, allocation] : device().allocations) {
      if (allocation.variable) continue;
      const std::string where =
          kSanitized ? "" : line_of(reinterpret_cast<std::uintptr_t>(allocation.place));
      auto& [count, bytes] = leaks[where];
      ++count;
      bytes += allocation.size;
    }
  }
  for (const auto& [where, leak] : leaks) {
    std::fprintf(all.file, "leak\t%ld\t%zu\t%s\n", leak.first, leak.second, where.c_str());
  }
  say("end", device().broken ? "failed" : "");
}

/// After so many seconds the program ends, and says in which kernel.
void watch_the_time(int seconds) {
  std::thread([seconds] {
    std::this_thread::sleep_for(std::chrono::seconds(seconds));
    Ledger& all = ledger();
    std::lock_guard lock(all.mutex);
    if (all.ended) return;
    std::string text = "no kernel was running";
    const auto running = std::find_if(std::begin(all.running), std::end(all.running),
                                      [](const Running& each) { return each.kernel; });
    if (running != std::end(all.running)) {
      const Kernel& kernel = *running->kernel;
      text = "kernel " + kernel.name + ", launched at " + kernel.site.file + ":" +
             std::to_string(kernel.site.line) + ", had finished " +
             std::to_string(running->launch->blocks_done.load()) + " of its " +
             std::to_string(running->launch->blocks) + " blocks" + ask_where();
    }
    say("time", text);
    if (!kSanitized) write_kernels();
    std::fflush(nullptr);
    _exit(124);
  }).detach();
}

std::string words(std::size_t bytes, bool store) {
  return std::string(store ? "writes " : "reads ") + std::to_string(bytes) + " bytes";
}

/// The place in the source, for a message.
std::string at(std::uintptr_t code) {
  const std::string line = line_of(code);
  return line.empty() ? "" : ", at " + line;
}

/// Something behind the end, or before the start, of memory that begins at `start`; empty if it is
/// far from it.
std::string beside(std::uintptr_t address, std::size_t bytes, std::uintptr_t start,
                   std::size_t size, std::size_t near) {
  const std::uintptr_t end = start + size;
  if (address + bytes > end && address < end + near) {
    return std::to_string(address + bytes - end) + " bytes behind the end";
  }
  if (address < start && address + near > start) {
    return std::to_string(start - address) + " bytes before the start";
  }
  return "";
}

}  // namespace

namespace {

/// Closing and opening may take so many seconds in all, then memory stays open.
constexpr double kMostClosing = 1;

struct Door {
  std::mutex mutex;
  int users = 0;
  double seconds = 0;
};
Door& door() {
  static Door* const door = new Door;
  return *door;
}

bool closes_memory() { return keeps_ledger() && !kSanitized && !watches_memory(); }

/// All memory of the device. The door's mutex is held.
void set_access(int access) {
  if (door().seconds > kMostClosing && access == PROT_NONE) return;
  const auto start = std::chrono::steady_clock::now();
  std::lock_guard lock(device().mutex);
  for (const auto& [memory, allocation] : device().allocations) {
    if (allocation.type != cudaMemoryTypeDevice || allocation.variable) continue;
    mprotect(const_cast<char*>(memory), in_pages(allocation.size + kGap), access);
  }
  door().seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

OpenMemory::OpenMemory(const void* written) {
  repeats_written(written);
  if (!closes_memory()) return;
  std::lock_guard lock(door().mutex);
  if (door().users++ == 0) set_access(PROT_READ | PROT_WRITE);
}

OpenMemory::~OpenMemory() {
  if (!closes_memory()) return;
  std::lock_guard lock(door().mutex);
  if (--door().users == 0) set_access(PROT_NONE);
}

void ledger_closes(void* memory, std::size_t size) {
  if (!closes_memory()) return;
  std::lock_guard lock(door().mutex);
  if (door().users == 0 && door().seconds <= kMostClosing) {
    mprotect(memory, in_pages(size + kGap), PROT_NONE);
  }
}

void ledger_opens(void* memory, std::size_t size) {
  if (closes_memory()) mprotect(memory, in_pages(size + kGap), PROT_READ | PROT_WRITE);
}

bool keeps_ledger() {
  static const bool keeps = [] {
    const Environment& user = environment();
    if (!user.report) return false;
    Ledger& all = ledger();
    all.file = std::fopen(user.report, "w");
    if (!all.file) return false;
    // The device is there first, and the ledger is written before it goes.
    device();
    std::atexit(write_ledger);
    if (!kSanitized && can_count()) check_accesses();
    if (!kSanitized) {
      void* first[1];
      backtrace(first, 1);  // loads what it needs, which a handler cannot
      struct sigaction action = {};
      action.sa_handler = tell_whereabouts;
      action.sa_flags = SA_RESTART;
      sigaction(SIGUSR2, &action, nullptr);
    }
    if (user.seconds > 0) watch_the_time(user.seconds);
    return true;
  }();
  return keeps;
}

void ledger_starts(Launch& launch) {
  if (!keeps_ledger()) return;
  Ledger& all = ledger();
  std::lock_guard lock(all.mutex);
  const LaunchConfig& config = launch.config;
  const auto key = [](const Kernel& kernel) {
    return std::tuple(kernel.name, kernel.grid.x, kernel.grid.y, kernel.grid.z, kernel.block.x,
                      kernel.block.y, kernel.block.z, kernel.site.line);
  };
  const auto found =
      std::find_if(all.kernels.begin(), all.kernels.end(), [&](const Kernel& kernel) {
        return key(kernel) == std::tuple(launch.description.name, config.grid.x, config.grid.y,
                                         config.grid.z, config.block.x, config.block.y,
                                         config.block.z, config.site.line);
      });
  Running& running = all.running[launch.device];
  if (found != all.kernels.end()) {
    running.kernel = &*found;
  } else {
    running.kernel = &all.kernels.emplace_back();
    running.kernel->name = launch.description.name;
    running.kernel->grid = config.grid;
    running.kernel->block = config.block;
    running.kernel->site = config.site;
  }
  ++running.kernel->launches;
  running.launch = &launch;
  const double most = all.seconds < 3 * most_seconds() ? most_seconds() : most_seconds() / 10;
  running.counts = !kSanitized && !device().concurrent && running.kernel->seconds < most;
  if (!running.counts) return;
  running.start = std::chrono::steady_clock::now();
  running.kernel->tally.start(most - running.kernel->seconds);
}

void ledger_ends(Launch& launch) {
  if (!keeps_ledger()) return;
  Ledger& all = ledger();
  std::lock_guard lock(all.mutex);
  Running& running = all.running[launch.device];
  if (running.counts) {
    Kernel& kernel = *running.kernel;
    const auto left_out = static_cast<double>(kernel.tally.stop());
    kernel.counted += 1 - left_out / static_cast<double>(launch.blocks);
    const double seconds = std::min(
        most_seconds(),
        std::chrono::duration<double>(std::chrono::steady_clock::now() - running.start).count());
    kernel.seconds += seconds;
    all.seconds += seconds;
  }
  running = {};
}

bool ledger_counts(const Launch& launch) { return ledger().running[launch.device].counts; }

void ledger_repeated(const Launch& launch) {
  std::lock_guard lock(ledger().mutex);
  ++ledger().running[launch.device].kernel->repeats;
}

void ledger_worker() {
  if (!keeps_ledger()) return;
  std::lock_guard lock(ledger().mutex);
  ledger().workers.push_back(pthread_self());
}

std::string ledger_place() {
  if (!keeps_ledger() || kSanitized) return "";
  void* calls[32];
  return line_of_calls(calls, backtrace(calls, 32));
}

void ledger_refused(const char* why) {
  if (!keeps_ledger()) return;
  std::lock_guard lock(ledger().mutex);
  ledger().refused.push_back(why);
}

void ledger_asked() {
  if (!keeps_ledger()) return;
  std::lock_guard lock(ledger().mutex);
  ledger().refused.clear();
  ledger().unasked.clear();
}

void ledger_called(const char* kernel) {
  if (!keeps_ledger()) return;
  void* calls[32];
  const std::string line = kSanitized ? "" : line_of_calls(calls, backtrace(calls, 32), true);
  say("host", "the program calls the kernel " + std::string(kernel) +
                  " like any function, without <<<grid, block>>>" +
                  (line.empty() ? "" : ", at " + line));
  write_ledger();
}

void ledger_aborts() {
  if (keeps_ledger()) write_ledger();
}

void note_unasked(const char* call, cudaError_t error, Site site) {
  // What follows a kernel's failure is its failure.
  if (!keeps_ledger() || device().broken) return;
  std::lock_guard lock(ledger().mutex);
  ledger().unasked.push_back(std::string(call) + "(): " + cudaGetErrorString(error) + " (" +
                             cudaGetErrorName(error) + "), at " + site.file + ":" +
                             std::to_string(site.line));
}

bool ledger_failed(const char* message) {
  if (!keeps_ledger() || kSanitized) return false;
  say("failed", message);
  return true;
}

void ledger_left_out(const char* message, const Site& site) {
  Ledger& all = ledger();
  std::lock_guard lock(all.mutex);
  if (all.left_out.insert({site.file, site.line}).second) say("exited", message);
}

bool ledger_freed(void* memory, std::size_t size) {
  if (!keeps_ledger() || kSanitized) return false;
  Ledger& all = ledger();
  std::lock_guard lock(all.mutex);
  all.kept.push_back({static_cast<char*>(memory), size});
  all.kept_bytes += size;
  while (all.kept_bytes > kMostKept) {
    all.kept_bytes -= all.kept.front().size;
    std::free(all.kept.front().memory);
    all.kept.pop_front();
  }
  return true;
}

void ledger_misaligned(std::uintptr_t address, std::size_t bytes, bool store, std::uintptr_t code) {
  fail("misaligned: it %s at once, at an address that is no multiple of %zu but %zu bytes off%s",
       words(bytes, store).c_str(), bytes, static_cast<std::size_t>(address % bytes),
       at(code).c_str());
}

bool ledger_others_may_write(const void* address) {
  if (!keeps_ledger()) return false;
  std::lock_guard lock(device().mutex);
  if (device().streams > 0) return true;
  const auto& allocations = device().allocations;
  const auto next = allocations.upper_bound(static_cast<const char*>(address));
  if (next == allocations.begin()) return false;
  const auto& [start, allocation] = *std::prev(next);
  return static_cast<const char*>(address) < start + allocation.size && !allocation.variable &&
         allocation.type != cudaMemoryTypeDevice;
}

void ledger_stray(std::uintptr_t address, std::size_t bytes, bool store, std::uintptr_t code) {
  // What a kernel reads without reaching for it: its arguments, variables of the program, and the
  // backend's of this worker.
  const auto in = [&](const void* start, std::size_t size) {
    return address - reinterpret_cast<std::uintptr_t>(start) < size;
  };
  const BoundKernel& kernel = runner->launch().kernel;
  if (in(kernel.arguments, kernel.size)) return;
  if (in(&__executable_start, static_cast<std::size_t>(&_end - &__executable_start))) return;
  const char* const thread_local_end = static_cast<const char*>(__builtin_thread_pointer());
  if (in(thread_local_end - kNear, 2 * kNear)) return;
  if (in_device_heap(address)) return;
  {  // pinned memory that is newer than the launch, such as what thrust asks for in a kernel
    std::lock_guard lock(device().mutex);
    const auto& allocations = device().allocations;
    const auto next = allocations.upper_bound(reinterpret_cast<const char*>(address));
    if (next != allocations.begin()) {
      const auto& [start, allocation] = *std::prev(next);
      if (allocation.type == cudaMemoryTypeHost && in(start, allocation.size)) return;
    }
  }

  const std::string what = words(bytes, store), where = at(code);
  if (address < kNear) {
    fail("a null pointer: it %s%s", what.c_str(), where.c_str());
  }
  const Block& block = *runner->current().block;
  for (std::size_t i = 0; i < block.shared.size(); ++i) {
    const SharedStorage& storage = block.shared[i];
    if (!storage.data) continue;
    const std::string beyond =
        beside(address, bytes, reinterpret_cast<std::uintptr_t>(storage.data), storage.size, kGap);
    if (beyond.empty()) continue;
    if (i == 0 && storage.size == 0) {
      fail(
          "dynamic shared memory, of which the launch asks for 0 bytes (the third number between"
          " <<< and >>>): it %s%s",
          what.c_str(), where.c_str());
    }
    fail("shared memory: it %s, %s of %zu bytes%s", what.c_str(), beyond.c_str(), storage.size,
         where.c_str());
  }
  bool freed = false;
  {  // fail() does not return: no lock is held then
    Ledger& all = ledger();
    std::lock_guard lock(all.mutex);
    for (const Kept& each : all.kept) freed = freed || in(each.memory, each.size);
  }
  if (freed) {
    fail("used after free: it %s of memory that cudaFree() has given back%s", what.c_str(),
         where.c_str());
  }
  std::string beyond;
  std::size_t size = 0, distance = kNear;
  {
    std::lock_guard lock(device().mutex);
    for (const auto& [start, allocation] : device().allocations) {
      const auto begin = reinterpret_cast<std::uintptr_t>(start);
      const std::string text = beside(address, bytes, begin, allocation.size, kGap);
      const std::size_t away = address < begin ? begin - address : address - begin;
      if (text.empty() || away - std::min(away, allocation.size) >= distance) continue;
      distance = away - std::min(away, allocation.size);
      beyond = text;
      size = allocation.size;
    }
  }
  if (!beyond.empty()) {
    fail("device memory: it %s, %s of %zu bytes%s", what.c_str(), beyond.c_str(), size,
         where.c_str());
  }
  fail(
      "memory that is not the device's: it %s at a host pointer, or far outside of what it was"
      " given%s",
      what.c_str(), where.c_str());
}

void ledger_host(std::uintptr_t address, Reach reach, std::uintptr_t code) {
  {
    std::unique_lock lock(device().mutex, std::try_to_lock);
    if (!lock.owns_lock() || !ledger().file) return;
    const auto& allocations = device().allocations;
    auto next = allocations.upper_bound(reinterpret_cast<const char*>(address));
    if (next == allocations.begin()) return;
    --next;
    const auto begin = reinterpret_cast<std::uintptr_t>(next->first);
    if (next->second.type != cudaMemoryTypeDevice ||
        address - begin >= in_pages(next->second.size + kGap)) {
      return;
    }
  }
  std::string place = line_of(code + 1);  // that of a call would be before its return
  if (place.empty()) place = ledger_place();
  const char* const does = reach == Reach::read    ? "reads"
                           : reach == Reach::write ? "writes"
                                                   : "reads or writes";
  std::fflush(stdout);
  say("host", std::string("the host ") + does +
                  " device memory, which only kernels and cudaMemcpy() reach" +
                  (place.empty() ? "" : ", at " + place));
  std::fflush(nullptr);
  write_ledger();
  _exit(3);
}

}  // namespace cuda_cpu
