// NCCL, NVIDIA's library for several GPUs, where a program finds it when it starts: its all-reduce,
// and its windows, memory that a kernel on one GPU reaches on the others (NCCL's device API, 2.28).
#pragma once

#include "common/gpus.cuh"

#if !defined(CUDA_CPU) && __has_include(<nccl.h>)
#include <dlfcn.h>
#include <nccl.h>
#define HAS_NCCL 1
#else
#define HAS_NCCL 0
#endif
#if HAS_NCCL && __has_include(<nccl_device.h>)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#include <nccl_device.h>
#pragma GCC diagnostic pop
#define HAS_NCCL_WINDOWS 1
#else
#define HAS_NCCL_WINDOWS 0
#endif

namespace problems {

using namespace common;
using namespace operators::diffusion;

#if HAS_NCCL
/// PyTorch brings one, nvidia/nccl/lib below its site-packages, which LD_LIBRARY_PATH may name.
class Nccl {
 public:
  explicit Nccl(int gpus) : gpus_(gpus), library_(dlopen("libnccl.so.2", RTLD_NOW)) {
    if (!library_) {
      missing_ = dlerror();
      return;
    }
    find(init_, "ncclCommInitAll", missing_);
    find(group_start_, "ncclGroupStart", missing_);
    find(group_end_, "ncclGroupEnd", missing_);
    find(all_reduce_, "ncclAllReduce", missing_);
    find(error_string_, "ncclGetErrorString", missing_);
  }

  /// Why there is none; empty if there is.
  const std::string& missing() const { return missing_; }
  int gpus() const { return gpus_; }

  /// A function of the library, by its name.
  template <typename Function>
  void find(Function& function, const char* name, std::string& missing) const {
    function = reinterpret_cast<Function>(dlsym(library_, name));
    if (!function) missing = std::string(name) + " is missing";
  }
  void check(ncclResult_t status, const char* call) const {
    if (status != ncclSuccess) fail(kDeviceCannot, "%s: %s", call, error_string_(status));
  }

  ncclComm_t comm(int gpu) {
    if (comms_.empty()) {
      comms_.resize(static_cast<size_t>(gpus_));
      check(init_(comms_.data(), gpus_, nullptr), "ncclCommInitAll");
    }
    return comms_[gpu];
  }
  /// Calls f(gpu) for each GPU, on it: calls of NCCL that all of them have to make.
  template <typename F>
  void together(F f) {
    comm(0);
    check(group_start_(), "ncclGroupStart");
    on_each_gpu(gpus_, f);
    check(group_end_(), "ncclGroupEnd");
  }

  /// sums[gpu] (count) becomes the sum of all partials[gpu], in each GPU's own stream.
  void all_reduce(const std::vector<float*>& partials, const std::vector<float*>& sums,
                  size_t count) {
    together([&](int gpu) {
      check(all_reduce_(partials[gpu], sums[gpu], count, ncclFloat, ncclSum, comm(gpu),
                        cudaStreamPerThread),
            "ncclAllReduce");
    });
  }

 private:
  const int gpus_;
  void* const library_;
  std::string missing_;
  std::vector<ncclComm_t> comms_;  // until the process ends
  decltype(&ncclCommInitAll) init_ = nullptr;
  decltype(&ncclGroupStart) group_start_ = nullptr;
  decltype(&ncclGroupEnd) group_end_ = nullptr;
  decltype(&ncclAllReduce) all_reduce_ = nullptr;
  decltype(&ncclGetErrorString) error_string_ = nullptr;
};
#else
class Nccl;
#endif  // HAS_NCCL

#if HAS_NCCL_WINDOWS
/// seen[gpu]: where the GPU that runs this sees the window's memory on GPU `gpu`.
template <typename T>
static __global__ void ask_window(ncclWindow_t window, int gpus, T** seen) {
  for (int gpu = 0; gpu < gpus; ++gpu) {
    seen[gpu] = static_cast<T*>(ncclGetLsaPointer(window, 0, gpu));
  }
}

/// A window: `count` T on each GPU, at first with `byte` in every byte, which all GPUs reach. The
/// library owns the memory, and knows who reaches whom, and how; it has to be there until the end.
template <typename T>
class NcclWindow {
 public:
  NcclWindow(std::shared_ptr<Nccl> library, size_t count, int byte)
      : library_(std::move(library)), memory_(library_->gpus()), windows_(library_->gpus()) {
    Nccl& nccl = *library_;
    find_functions();
    if (!missing_.empty()) return;
    on_each_gpu(nccl.gpus(), [&](int gpu) {
      note(allocate_(&memory_[gpu], count * sizeof(T)), "ncclMemAlloc");
      if (!missing_.empty()) return;
      CUDA_CHECK(cudaMemset(memory_[gpu], byte, count * sizeof(T)));
      CUDA_CHECK(cudaDeviceSynchronize());
    });
    if (!missing_.empty()) return;
    nccl.together([&](int gpu) {
      note(add_(nccl.comm(gpu), memory_[gpu], count * sizeof(T), &windows_[gpu],
                NCCL_WIN_COLL_SYMMETRIC),
           "ncclCommWindowRegister");
    });
    if (missing_.empty() && (!windows_[0] || reached_by_(nccl.comm(0)).nRanks < nccl.gpus())) {
      missing_ = "it does not let these GPUs reach each other's memory";
    }
    if (missing_.empty()) ask();
  }
  NcclWindow(const NcclWindow&) = delete;
  NcclWindow& operator=(const NcclWindow&) = delete;
  ~NcclWindow() {
    on_each_gpu(library_->gpus(), [](int) { cudaDeviceSynchronize(); });
    on_each_gpu(library_->gpus(), [&](int gpu) {
      if (windows_[gpu]) remove_(library_->comm(gpu), windows_[gpu]);
    });
    on_each_gpu(library_->gpus(), [&](int gpu) {
      if (memory_[gpu]) free_(memory_[gpu]);
    });
  }

  /// Why there is none; empty if there is.
  const std::string& missing() const { return missing_; }
  /// GPU `gpu`'s memory, as GPU `me` sees it.
  T* at(int me, int gpu) const { return seen_[me * library_->gpus() + gpu]; }

 private:
  void find_functions() {
    library_->find(version_, "ncclGetVersion", missing_);
    library_->find(allocate_, "ncclMemAlloc", missing_);
    library_->find(free_, "ncclMemFree", missing_);
    library_->find(add_, "ncclCommWindowRegister", missing_);
    library_->find(remove_, "ncclCommWindowDeregister", missing_);
    library_->find(reached_by_, "ncclTeamLsa", missing_);
    if (!missing_.empty()) return;
    // What a kernel reads of a window lies as the header of the same minor version says.
    int version = 0;
    note(version_(&version), "ncclGetVersion");
    if (version / 100 != NCCL_VERSION_CODE / 100) {
      missing_ = "it is version " + std::to_string(version) + ", and nccl_device.h of " +
                 std::to_string(NCCL_VERSION_CODE);
    }
  }
  void note(ncclResult_t status, const char* call) {
    if (status != ncclSuccess) missing_ = std::string(call) + " says no";
  }
  void ask() {
    const size_t gpus = memory_.size();
    seen_.resize(gpus * gpus);
    on_each_gpu(library_->gpus(), [&](int gpu) {
      const Scratch<T*> seen(gpus);
      ask_window<T><<<1, 1>>>(windows_[gpu], library_->gpus(), seen);
      CUDA_CHECK(cudaGetLastError());
      CUDA_CHECK(cudaMemcpy(&seen_[gpu * gpus], seen, gpus * sizeof(T*), cudaMemcpyDeviceToHost));
    });
  }

  const std::shared_ptr<Nccl> library_;
  std::string missing_;
  std::vector<void*> memory_;
  std::vector<ncclWindow_t> windows_;
  std::vector<T*> seen_;
  decltype(&ncclGetVersion) version_ = nullptr;
  decltype(&ncclMemAlloc) allocate_ = nullptr;
  decltype(&ncclMemFree) free_ = nullptr;
  decltype(&ncclCommWindowRegister) add_ = nullptr;
  decltype(&ncclCommWindowDeregister) remove_ = nullptr;
  ncclTeam_t (*reached_by_)(ncclComm_t) = nullptr;
};
#endif  // HAS_NCCL_WINDOWS

#if HAS_NCCL
/// Why there can be no window on NCCL's GPUs; empty if there can.
inline std::string why_no_window([[maybe_unused]] const std::shared_ptr<Nccl>& nccl) {
#if HAS_NCCL_WINDOWS
  return NcclWindow<char>(nccl, 1, 0).missing();
#else
  return "there was no nccl_device.h to build with";
#endif
}
#endif  // HAS_NCCL

}  // namespace problems
