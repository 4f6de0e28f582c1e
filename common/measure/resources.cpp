#include "common/measure/resources.h"

#include <vector>

namespace common {

#ifdef CUDA_CPU

std::optional<Resources> resources_of(const std::function<void()>&) { return std::nullopt; }

#else

namespace {

/// Of one node of a graph: nothing unless it is a kernel of this program. (A library's belong to
/// modules that this program's CUDA runtime does not know.)
std::optional<Resources> resources_of(cudaGraphNode_t node) {
  cudaGraphNodeType type;
  if (cudaGraphNodeGetType(node, &type) != cudaSuccess || type != cudaGraphNodeTypeKernel)
    return {};
  cudaKernelNodeParams launch = {};
  if (cudaGraphKernelNodeGetParams(node, &launch) != cudaSuccess || !launch.func) return {};
  cudaFuncAttributes function;
  if (cudaFuncGetAttributes(&function, launch.func) != cudaSuccess) return {};
  const dim3 block = launch.blockDim;
  const int threads = static_cast<int>(block.x * block.y * block.z);
  int blocks = 0;
  if (cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, launch.func, threads,
                                                    launch.sharedMemBytes) != cudaSuccess ||
      blocks == 0) {
    return {};
  }
  return Resources{threads, function.numRegs, static_cast<int>(function.localSizeBytes), blocks};
}

/// The launch's nodes, in a graph that is the caller's; null if it cannot be recorded.
cudaGraph_t record(const std::function<void()>& launch) {
  const cudaStream_t stream = cudaStreamPerThread;
  if (cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess)
    return nullptr;
  try {
    const CallsThrow calls_throw;
    launch();
  } catch (const std::exception&) {
    // Then the graph is none, or has less in it than is launched otherwise.
  }
  cudaGraph_t graph = nullptr;
  return cudaStreamEndCapture(stream, &graph) == cudaSuccess ? graph : nullptr;
}

}  // namespace

std::optional<Resources> resources_of(const std::function<void()>& launch) {
  std::optional<Resources> most;
  if (const cudaGraph_t graph = record(launch)) {
    size_t count = 0;
    CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &count));
    std::vector<cudaGraphNode_t> nodes(count);
    if (count > 0) CUDA_CHECK(cudaGraphGetNodes(graph, nodes.data(), &count));
    const auto registers = [](const Resources& each) { return each.registers * each.threads; };
    for (const cudaGraphNode_t node : nodes) {
      const std::optional<Resources> each = resources_of(node);
      if (each && (!most || registers(*each) > registers(*most))) most = each;
    }
    CUDA_CHECK(cudaGraphDestroy(graph));
  }
  cudaGetLastError();  // of nodes that are not ours, or of a launch that could not be recorded
  return most;
}

#endif

}  // namespace common
