// Several GPUs of one host, from one thread: who is there, who can write into whose memory, and how
// they are timed together.
#pragma once

#include <atomic>
#include <cuda/atomic>
#include <memory>
#include <string>
#include <vector>

#include "common/lesson.h"
#include "common/measure/event.h"
#include "common/numerics.h"

namespace common {

/// While one exists, GPU `gpu` is the calling thread's.
class OnGpu {
 public:
  explicit OnGpu(int gpu) {
    CUDA_CHECK(cudaGetDevice(&before_));
    CUDA_CHECK(cudaSetDevice(gpu));
  }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;
  ~OnGpu() { cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

/// Calls f(gpu) for each of the first `gpus`, on it.
template <typename F>
void on_each_gpu(int gpus, F f) {
  for (int gpu = 0; gpu < gpus; ++gpu) {
    const OnGpu on(gpu);
    f(gpu);
  }
}

inline int gpu_count() {
  int count = 0;
  CUDA_CHECK(cudaGetDeviceCount(&count));
  return count;
}

/// Lets each of the first `gpus` read and write the memory of all others; false if one cannot.
inline bool enable_peer_access(int gpus) {
  for (int gpu = 0; gpu < gpus; ++gpu) {
    for (int peer = 0; peer < gpus; ++peer) {
      int can = 0;
      if (gpu != peer) CUDA_CHECK(cudaDeviceCanAccessPeer(&can, gpu, peer));
      if (gpu != peer && !can) return false;
    }
  }
  on_each_gpu(gpus, [&](int gpu) {
    for (int peer = 0; peer < gpus; ++peer) {
      if (gpu != peer) CUDA_CHECK(cudaDeviceEnablePeerAccess(peer, 0));
    }
  });
  return true;
}

#ifndef CUDA_CPU
/// Waits until the host has put `ticket` into its memory.
static __global__ void wait_for_host(unsigned* word, unsigned ticket) {
  const cuda::atomic_ref<unsigned, cuda::thread_scope_system> gate(*word);
  while (gate.load(cuda::memory_order_acquire) != ticket) {
  }
}

/// Times what several GPUs do together. The host queues it all behind a gate, a kernel on each GPU
/// that looks at a word of the host's memory, and opens the gates when all GPUs stand there: the
/// host's own time, which is longer than some kernels, does not count, and the GPUs start within
/// the microsecond or so that they take to see the word. Each GPU's time runs from its gate to the
/// end of its last kernel, and the longest is taken: who starts first and waits for the others pays
/// for it.
class GpuTimer {
 public:
  explicit GpuTimer(int gpus) : gpus_(gpus) {
    CUDA_CHECK(cudaHostAlloc(&word_, sizeof *word_, cudaHostAllocPortable));
    *word_ = 0;
    on_each_gpu(gpus, [&](int) {
      reached_.push_back(std::make_unique<Event>());
      starts_.push_back(std::make_unique<Event>());
      stops_.push_back(std::make_unique<Event>());
    });
  }
  GpuTimer(const GpuTimer&) = delete;
  GpuTimer& operator=(const GpuTimer&) = delete;
  ~GpuTimer() {
    cudaFreeHost(word_);
    for (cudaGraphExec_t graph : graphs_) cudaGraphExecDestroy(graph);
  }

  /// `launch` queues one call on all GPUs. Milliseconds for a call.
  float time(Timing timing, const std::function<void()>& launch) {
    const bool graph = timing == Timing::graph;
    if (graph && graphs_.empty()) capture(launch);
    // The harness has flushed the first GPU's L2 cache; here the other GPUs' follow.
    if (timing == Timing::cold) flush();
    ++ticket_;
    on_each_gpu(gpus_, [&](int gpu) {
      reached_[gpu]->record();
      wait_for_host<<<1, 1>>>(word_, ticket_);
      CUDA_CHECK(cudaGetLastError());
      starts_[gpu]->record();
    });
    if (!graph) launch();
    on_each_gpu(gpus_, [&](int gpu) {
      if (graph) CUDA_CHECK(cudaGraphLaunch(graphs_[gpu], cudaStreamPerThread));
      stops_[gpu]->record();
    });
    on_each_gpu(gpus_, [&](int gpu) { reached_[gpu]->since(*reached_[gpu]); });  // waits
    std::atomic_ref(*word_).store(ticket_, std::memory_order_release);
    float longest = 0;
    on_each_gpu(gpus_,
                [&](int gpu) { longest = std::max(longest, stops_[gpu]->since(*starts_[gpu])); });
    return longest / static_cast<float>(graph ? kGraphCalls : 1);
  }

 private:
  /// A graph of each GPU's own share of kGraphCalls calls. All are captured before one is made:
  /// while a stream of the thread captures, much else is forbidden.
  void capture(const std::function<void()>& launch) {
    on_each_gpu(gpus_, [&](int) {
      CUDA_CHECK(cudaStreamBeginCapture(cudaStreamPerThread, cudaStreamCaptureModeRelaxed));
    });
    for (int call = 0; call < kGraphCalls; ++call) launch();
    std::vector<cudaGraph_t> captured(gpus_);
    on_each_gpu(gpus_, [&](int gpu) {
      CUDA_CHECK(cudaStreamEndCapture(cudaStreamPerThread, &captured[gpu]));
    });
    on_each_gpu(gpus_, [&](int gpu) {
      CUDA_CHECK(cudaGraphInstantiate(&graphs_.emplace_back(), captured[gpu]));
      CUDA_CHECK(cudaGraphDestroy(captured[gpu]));
      CUDA_CHECK(cudaGraphUpload(graphs_.back(), cudaStreamPerThread));
    });
  }
  void flush() {
    const size_t bytes = 2 * static_cast<size_t>(Device::current().l2_bytes);
    on_each_gpu(gpus_, [&](int gpu) {
      if (gpu == 0) return;
      if (static_cast<int>(flushed_.size()) < gpu) {
        flushed_.push_back(std::make_unique<Scratch<char>>(bytes));
      }
      CUDA_CHECK(cudaMemsetAsync(*flushed_[gpu - 1], static_cast<int>(ticket_), bytes));
    });
  }

  const int gpus_;
  unsigned* word_ = nullptr;
  unsigned ticket_ = 0;
  std::vector<std::unique_ptr<Event>> reached_, starts_, stops_;
  std::vector<std::unique_ptr<Scratch<char>>> flushed_;
  std::vector<cudaGraphExec_t> graphs_;
};
#endif

}  // namespace common
