#include "cpu/watch/memory_watch.h"

#include <signal.h>
#include <sys/mman.h>

#include <atomic>
#include <deque>

#include "cpu/execution/sanitizers.h"
#include "cpu/runtime/device_state.h"
#include "cpu/runtime/environment.h"

namespace cuda_cpu {
namespace {

struct Watched {
  Watched(char* start, std::size_t bytes) : start(start), bytes(bytes) {}
  char* start;
  std::size_t bytes;
  std::atomic<bool> used = false;

  void open() { mprotect(start, in_pages(bytes), PROT_READ | PROT_WRITE); }
};
std::deque<Watched>& ranges() {
  static std::deque<Watched> all;
  return all;
}

/// What is done about an access outside of all memory.
struct sigaction otherwise;

/// Of a thread that comes to closed memory: opens it, and the thread tries again.
void open_at(int signal, siginfo_t* info, void*) {
  const char* address = static_cast<const char*>(info->si_addr);
  for (Watched& each : ranges()) {
    if (address < each.start || address >= each.start + in_pages(each.bytes)) continue;
    each.used = true;
    each.open();
    return;
  }
  sigaction(signal, &otherwise, nullptr);  // the program's own mistake, which it makes again
}

}  // namespace

bool watches_memory() { return environment().watch_memory; }

bool checks_addresses() {
#if defined(CUDA_CPU_ASAN)
  return true;
#else
  return false;
#endif
}

void start_watching() {
  if (!watches_memory()) return;
  struct sigaction action = {};
  action.sa_sigaction = open_at;
  action.sa_flags = SA_SIGINFO;
  struct sigaction before;
  sigaction(SIGSEGV, &action, &before);
  if (before.sa_sigaction != open_at) otherwise = before;
  ranges().clear();
  std::lock_guard lock(device().mutex);
  for (const auto& [start, allocation] : device().allocations) {
    if (allocation.type != cudaMemoryTypeDevice || allocation.variable) continue;
    ranges().emplace_back(const_cast<char*>(start), allocation.size);
  }
  for (const Watched& each : ranges()) mprotect(each.start, in_pages(each.bytes), PROT_NONE);
}

double stop_watching() {
  double bytes = 0;
  for (Watched& each : ranges()) {
    if (each.used) bytes += static_cast<double>(each.bytes);
    each.open();
  }
  ranges().clear();
  return bytes;
}

}  // namespace cuda_cpu
