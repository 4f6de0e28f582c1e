#include "common/verify/guards.h"

#include <fmt/core.h>

#include <algorithm>
#include <vector>

#ifdef CUDA_CPU
#include "cpu/watch/memory_watch.h"
#endif

namespace common {

namespace {

constexpr unsigned char kPattern = 0xa5;

char* first_of(const Storage& storage) { return static_cast<char*>(storage.data) - guard_bytes(); }
char* behind(const Storage& storage) {
  return static_cast<char*>(storage.data) + storage.count * storage.element_bytes;
}

void set(char* guard) { CUDA_CHECK(cudaMemsetAsync(guard, kPattern, guard_bytes())); }

/// How many bytes of a guard are not what they were.
long changed(const char* guard) {
  std::vector<unsigned char> bytes(guard_bytes());
  CUDA_CHECK(cudaMemcpy(bytes.data(), guard, bytes.size(), cudaMemcpyDeviceToHost));
  return std::count_if(bytes.begin(), bytes.end(), [](auto byte) { return byte != kPattern; });
}

}  // namespace

size_t guard_bytes() {
#ifdef CUDA_CPU
  // Asked of the backend: this file may be linked into a sanitizer's program and be built without
  // it.
  if (cuda_cpu::checks_addresses() || cuda_cpu::watches_memory()) return 0;
#endif
  return 4096;
}

void set_guards(const Storage& storage) {
  if (guard_bytes() == 0) return;
  set(first_of(storage));
  set(behind(storage));
}

std::string trespass(const Problem& problem) {
  if (guard_bytes() == 0) return "";
  std::string found;
  const auto look = [&](const Storages& list, const char* name) {
    for (size_t i = 0; i < list.size(); ++i) {
      for (char* guard : {first_of(*list[i]), behind(*list[i])}) {
        const long bytes = changed(guard);
        if (bytes == 0) continue;
        const char* side = guard == behind(*list[i]) ? "behind" : "before";
        if (found.empty()) {
          found = fmt::format("wrote {} byte{} {} {} {}", bytes, bytes > 1 ? "s" : "", side, name,
                              i + 1);
        }
        set(guard);
      }
    }
  };
  look(problem.outputs, "output");
  look(problem.workspaces, "workspace");
  look(problem.inputs, "input");
  return found;
}

}  // namespace common
