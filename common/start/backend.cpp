#include "common/start/backend.h"

#include <unistd.h>

#include <algorithm>
#include <string>

#include "common/report/text.h"

namespace common {

#ifdef CUDA_CPU

void settle_backend(const LessonInfo& info, CommandLine& line, char**) {
  if (line.device == "cuda") fail(kDeviceCannot, "--device cuda: this is the CPU build");
  const int64_t asked = line.n, small = info.n_cpu;
  const bool insists = line.device == "cpu";
  line.small = asked == 0 || !insists;
  if (line.small) {
    line.n = asked == 0 ? small : std::min(asked, small);
    for (const Option& option : info.options) {
      if (option.cpu && !line.given.contains(option.name)) line.options[option.name] = option.cpu;
    }
  }
  if (insists || line.list) return;
  std::string instead;
  if (asked > line.n) instead = fmt::format(" instead of {} (--device cpu to insist)", asked);
  fmt::print(stderr, "No usable GPU: running on the CPU backend with N = {}{}.\n", line.n, instead);
}

#else

namespace {

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

}  // namespace

void settle_backend(const LessonInfo& info, CommandLine& line, char** argv) {
  const std::string no_gpu = line.device == "cpu" ? "--device cpu" : why_no_gpu();
  if (!no_gpu.empty() && line.device == "cuda") {
    fail(kDeviceCannot, "--device cuda: %s", no_gpu.c_str());
  }
  if (!no_gpu.empty()) become_cpu_twin(argv, no_gpu);
  if (line.n == 0) line.n = info.n_gpu;
}

#endif

}  // namespace common
