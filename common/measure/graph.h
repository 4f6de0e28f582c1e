// Calls as a CUDA graph: recorded once, launched as a whole. There are none on the CPU backend.
#pragma once

#ifndef CUDA_CPU

#include <cuda_runtime.h>

#include <functional>

#include "common/check.h"

namespace common {

/// `calls` calls of `launch`, one after the other.
class Graph {
 public:
  Graph(const std::function<void()>& launch, int calls) {
    CUDA_CHECK(cudaStreamBeginCapture(cudaStreamPerThread, cudaStreamCaptureModeThreadLocal));
    cudaGraph_t graph = nullptr;
    try {
      for (int call = 0; call < calls; ++call) launch();
    } catch (...) {
      cudaStreamEndCapture(cudaStreamPerThread, &graph);
      if (graph) cudaGraphDestroy(graph);
      throw;
    }
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

}  // namespace common

#endif
