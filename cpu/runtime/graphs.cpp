#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "cpu/execution/cuda_cpu.h"
#include "cpu/order/stream_order.h"
#include "cpu/runtime/capture.h"
#include "cpu/runtime/device_state.h"

using cuda_cpu::Capture;
using cuda_cpu::Captured;
using cuda_cpu::result;
using cuda_cpu::Work;

struct CUgraphNode_st {
  cudaGraphNodeType type;
  Work work;
  std::vector<cudaGraphNode_t> after;
};

struct CUgraph_st {
  std::vector<std::unique_ptr<CUgraphNode_st>> nodes;

  cudaGraphNode_t add(cudaGraphNodeType type, Work work, std::vector<cudaGraphNode_t> after) {
    nodes.push_back(
        std::make_unique<CUgraphNode_st>(CUgraphNode_st{type, std::move(work), std::move(after)}));
    return nodes.back().get();
  }
};

struct CUgraphExec_st {
  struct Step {
    cudaGraphNode_t of;  ///< which may be gone
    cudaGraphNodeType type;
    Work work;
  };
  std::vector<Step> steps;
};

namespace cuda_cpu {

struct Capture {
  std::unique_ptr<CUgraph_st> graph = std::make_unique<CUgraph_st>();
  CUstream_st* origin = nullptr;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread = std::this_thread::get_id();
  unsigned long long id = 0;
  bool is_void = false;  ///< something has been called that cannot be captured
};

namespace {

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

/// All that are under way.
struct Captures {
  std::mutex mutex;
  std::atomic<int> count = 0;
  std::vector<std::shared_ptr<Capture>> all;
  unsigned long long last_id = 0;
};
Captures& captures() {
  static Captures* const captures = new Captures;
  return *captures;
}

/// Null for the legacy stream.
CUstream_st* known(cudaStream_t stream) {
  static thread_local CUstream_st per_thread;
  if (stream == cudaStreamPerThread) return &per_thread;
  return stream == cudaStreamLegacy ? nullptr : stream;
}

/// The capture of a stream or an event, forgotten if it has ended.
Capture* alive(Captured& captured) {
  if (captured.capture && !captured.capture->origin) captured = {};
  return captured.capture.get();
}

void finish(const std::shared_ptr<Capture>& capture) {
  capture->origin = nullptr;
  std::erase(captures().all, capture);
  --captures().count;
}

void join(std::vector<cudaGraphNode_t>& last, const std::vector<cudaGraphNode_t>& more) {
  for (const cudaGraphNode_t node : more) {
    if (std::find(last.begin(), last.end(), node) == last.end()) last.push_back(node);
  }
}

/// `nodes` in an order in which each comes after those that it depends on; fewer if there is a
/// cycle.
std::vector<cudaGraphNode_t> in_order(const CUgraph_st& graph) {
  std::vector<cudaGraphNode_t> order;
  std::set<cudaGraphNode_t> done;
  for (bool progress = true; progress;) {
    progress = false;
    for (const auto& node : graph.nodes) {
      const auto ready = [&](cudaGraphNode_t before) { return done.contains(before); };
      if (done.contains(node.get()) || !std::all_of(node->after.begin(), node->after.end(), ready))
        continue;
      order.push_back(node.get());
      done.insert(node.get());
      progress = true;
    }
  }
  return order;
}

/// Runs what `steps` are, one after the other.
cudaError_t run(const std::vector<CUgraphExec_st::Step>& steps, cudaStream_t stream) {
  for (const auto& step : steps) {
    const cudaError_t error = step.work ? step.work(stream) : cudaSuccess;
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t steps_of(const CUgraph_st& graph, std::vector<CUgraphExec_st::Step>& steps) {
  const auto order = in_order(graph);
  if (order.size() != graph.nodes.size()) return cudaErrorInvalidValue;
  for (const cudaGraphNode_t node : order) steps.push_back({node, node->type, node->work});
  return cudaSuccess;
}

// ---- What nodes do: nothing, if the parameters are not valid ------------------------------------

/// Copies each layer of a box by copy_layer().
template <class CopyLayer>
cudaError_t copy_box(const cudaMemcpy3DParms& p, const CopyLayer& copy_layer) {
  if (p.srcArray || p.dstArray) return result(cudaErrorNotSupported);
  const auto start = [](const cudaPitchedPtr& memory, const cudaPos& position, std::size_t layer) {
    return static_cast<char*>(memory.ptr) + position.x +
           memory.pitch * (position.y + memory.ysize * (position.z + layer));
  };
  for (std::size_t layer = 0; layer < p.extent.depth; ++layer) {
    const cudaError_t error = copy_layer(start(p.dstPtr, p.dstPos, layer), p.dstPtr.pitch,
                                         start(p.srcPtr, p.srcPos, layer), p.srcPtr.pitch,
                                         p.extent.width, p.extent.height, p.kind);
    if (error != cudaSuccess) return error;
  }
  return result(cudaSuccess);
}

Work copy_work(const cudaMemcpy3DParms* parameters) {
  if (!parameters) return {};
  return [copy = *parameters](cudaStream_t stream) {
    return copy_box(copy, [&](auto... layer) { return cudaMemcpy2DAsync(layer..., stream); });
  };
}

Work copy_work(void* target, const void* source, std::size_t size, cudaMemcpyKind kind) {
  return [=](cudaStream_t stream) { return cudaMemcpyAsync(target, source, size, kind, stream); };
}

Work fill_work(const cudaMemsetParams* parameters) {
  if (!parameters || parameters->elementSize == 0) return {};
  return [fill = *parameters](cudaStream_t stream) {
    std::vector<char> row(fill.width * fill.elementSize);
    for (std::size_t i = 0; i < row.size(); ++i) {
      row[i] = static_cast<char>(fill.value >> (8 * (i % fill.elementSize)));
    }
    for (std::size_t i = 0; i < fill.height; ++i) {
      const cudaError_t error =
          cudaMemcpyAsync(static_cast<char*>(fill.dst) + i * fill.pitch, row.data(), row.size(),
                          cudaMemcpyHostToDevice, stream);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  };
}

Work host_work(const cudaHostNodeParams* parameters) {
  if (!parameters || !parameters->fn) return {};
  return [host = *parameters](cudaStream_t stream) {
    run_kept_kernels();
    const auto order = order_of(stream);
    // What the host keeps is read in its own name.
    const auto [function, data] = host;
    if (!device().broken) {
      const StreamWork work(*order, reinterpret_cast<const void*>(function));
      function(data);
    }
    return result(cudaSuccess);
  };
}

/// The arguments are copied now: the kernel is launched in a stream of a capture of its own, whose
/// only node it becomes.
Work kernel_work(const cudaKernelNodeParams* parameters) {
  if (!parameters || parameters->extra) return {};
  CUstream_st stream;
  const auto capture = std::make_shared<Capture>();
  capture->origin = &stream;
  stream.captured.capture = capture;
  ++captures().count;
  launch_known(
      launch(parameters->gridDim, parameters->blockDim, parameters->sharedMemBytes, &stream),
      parameters->func.address, parameters->kernelParams);
  --captures().count;
  return capture->graph->nodes.empty() ? Work() : capture->graph->nodes.front()->work;
}

Work graph_work(const CUgraph_st* graph) {
  std::vector<CUgraphExec_st::Step> steps;
  if (!graph || steps_of(*graph, steps) != cudaSuccess) return {};
  return [steps](cudaStream_t stream) { return run(steps, stream); };
}

cudaError_t add(cudaGraphNode_t* node, cudaGraph_t graph, const cudaGraphNode_t* after,
                std::size_t count, cudaGraphNodeType type, Work work) {
  if (!node || !graph || (count > 0 && !after) || !work) return result(cudaErrorInvalidValue);
  std::vector<cudaGraphNode_t> before;
  if (count > 0) before.assign(after, after + count);
  for (const cudaGraphNode_t each : before) {
    const auto is = [&](const auto& own) { return own.get() == each; };
    if (std::none_of(graph->nodes.begin(), graph->nodes.end(), is)) {
      return result(cudaErrorInvalidValue);
    }
  }
  *node = graph->add(type, std::move(work), std::move(before));
  return result(cudaSuccess);
}

cudaError_t set(cudaGraphNode_t node, cudaGraphNodeType type, Work work) {
  if (!node || node->type != type || !work) return result(cudaErrorInvalidValue);
  node->work = std::move(work);
  return result(cudaSuccess);
}

cudaError_t set(cudaGraphExec_t made, cudaGraphNode_t node, cudaGraphNodeType type, Work work) {
  if (!made || !work) return result(cudaErrorInvalidValue);
  for (auto& step : made->steps) {
    if (step.of != node || step.type != type) continue;
    step.work = std::move(work);
    return result(cudaSuccess);
  }
  return result(cudaErrorInvalidValue);
}

cudaError_t list(const std::vector<cudaGraphNode_t>& all, cudaGraphNode_t* nodes,
                 std::size_t* count) {
  if (!count) return result(cudaErrorInvalidValue);
  if (nodes) std::copy_n(all.begin(), std::min(*count, all.size()), nodes);
  if (!nodes || *count > all.size()) *count = all.size();
  return result(cudaSuccess);
}

}  // namespace

// ---- Captures -----------------------------------------------------------------------------------

bool any_capture() { return captures().count > 0; }

std::optional<cudaError_t> captured(cudaStream_t stream, cudaGraphNodeType type, Work work) {
  if (!any_capture()) return {};
  const std::lock_guard lock(captures().mutex);
  CUstream_st* const own = known(stream);
  if (own) {
    Capture* const capture = alive(own->captured);
    if (!capture) return {};
    if (capture->is_void) return cudaErrorStreamCaptureInvalidated;
    own->captured.last = {capture->graph->add(type, std::move(work), own->captured.last)};
    return cudaSuccess;
  }
  // The legacy stream waits for all others, but for those that say that they do not.
  bool implicit = false;
  for (const auto& capture : captures().all) {
    if (capture->origin->flags & cudaStreamNonBlocking) continue;
    implicit = capture->is_void = true;
  }
  if (implicit) return cudaErrorStreamCaptureImplicit;
  return {};
}

cudaError_t in_order(cudaStream_t stream, cudaGraphNodeType type, const Work& work) {
  const auto error = captured(stream, type, work);
  return error ? result(*error) : work(stream);
}

cudaError_t forbidden_in_capture() {
  if (captures().count == 0 || thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  const std::lock_guard lock(captures().mutex);
  bool found = false;
  for (const auto& capture : captures().all) {
    const bool local = capture->thread == std::this_thread::get_id();
    if (capture->mode == cudaStreamCaptureModeRelaxed ||
        (capture->mode == cudaStreamCaptureModeThreadLocal && !local) ||
        (thread_mode == cudaStreamCaptureModeThreadLocal && !local)) {
      continue;
    }
    found = capture->is_void = true;
  }
  return found ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

cudaError_t forbidden_in_capture(cudaStream_t stream) {
  if (!any_capture()) return cudaSuccess;
  const std::lock_guard lock(captures().mutex);
  CUstream_st* const own = known(stream);
  Capture* const capture = own ? alive(own->captured) : nullptr;
  if (!capture) return cudaSuccess;
  capture->is_void = true;
  return cudaErrorStreamCaptureUnsupported;
}

void forget_capture(cudaStream_t stream) {
  if (!any_capture()) return;
  const std::lock_guard lock(captures().mutex);
  const std::shared_ptr<Capture> capture = stream->captured.capture;
  if (capture && capture->origin == stream) finish(capture);
}

bool record_in_capture(cudaEvent_t event, cudaStream_t stream) {
  event->captured = {};
  if (!any_capture()) return false;
  const std::lock_guard lock(captures().mutex);
  CUstream_st* const own = known(stream);
  if (!own || !alive(own->captured)) return false;
  event->captured = own->captured;
  return true;
}

std::optional<cudaError_t> wait_in_capture(cudaStream_t stream, cudaEvent_t event) {
  if (!any_capture()) return {};
  const std::lock_guard lock(captures().mutex);
  CUstream_st* const own = known(stream);
  Capture* const capture = alive(event->captured);
  Capture* const present = own ? alive(own->captured) : nullptr;
  if (!capture) {
    if (!present) return {};
    present->is_void = true;
    return cudaErrorStreamCaptureIsolation;
  }
  if (!own) {
    capture->is_void = true;
    return cudaErrorStreamCaptureImplicit;
  }
  if (present && present != capture) {
    capture->is_void = present->is_void = true;
    return cudaErrorStreamCaptureMerge;
  }
  own->captured.capture = event->captured.capture;
  join(own->captured.last, event->captured.last);
  return cudaSuccess;
}

}  // namespace cuda_cpu

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  const std::lock_guard lock(cuda_cpu::captures().mutex);
  CUstream_st* const own = cuda_cpu::known(stream);
  if (!own) return result(cudaErrorStreamCaptureUnsupported);
  if (cuda_cpu::alive(own->captured)) return result(cudaErrorIllegalState);
  const auto capture = std::make_shared<Capture>();
  capture->origin = own;
  capture->mode = mode;
  capture->id = ++cuda_cpu::captures().last_id;
  own->captured = {capture, {}};
  cuda_cpu::captures().all.push_back(capture);
  ++cuda_cpu::captures().count;
  return result(cudaSuccess);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  if (!graph) return result(cudaErrorInvalidValue);
  *graph = nullptr;
  const std::lock_guard lock(cuda_cpu::captures().mutex);
  CUstream_st* const own = cuda_cpu::known(stream);
  if (!own || !cuda_cpu::alive(own->captured)) return result(cudaErrorIllegalState);
  const std::shared_ptr<Capture> capture = own->captured.capture;
  if (capture->origin != own) return result(cudaErrorStreamCaptureUnmatched);
  if (capture->mode != cudaStreamCaptureModeRelaxed &&
      capture->thread != std::this_thread::get_id()) {
    return result(cudaErrorStreamCaptureWrongThread);
  }
  std::set<cudaGraphNode_t> joined;
  for (std::vector<cudaGraphNode_t> left = own->captured.last; !left.empty();) {
    const cudaGraphNode_t node = left.back();
    left.pop_back();
    if (joined.insert(node).second) left.insert(left.end(), node->after.begin(), node->after.end());
  }
  own->captured = {};
  cuda_cpu::finish(capture);
  if (capture->is_void) return result(cudaErrorStreamCaptureInvalidated);
  if (joined.size() != capture->graph->nodes.size()) {
    return result(cudaErrorStreamCaptureUnjoined);
  }
  *graph = capture->graph.release();
  return result(cudaSuccess);
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id) {
  if (!status) return result(cudaErrorInvalidValue);
  const std::lock_guard lock(cuda_cpu::captures().mutex);
  CUstream_st* const own = cuda_cpu::known(stream);
  const Capture* const capture = own ? cuda_cpu::alive(own->captured) : nullptr;
  *status = !capture           ? cudaStreamCaptureStatusNone
            : capture->is_void ? cudaStreamCaptureStatusInvalidated
                               : cudaStreamCaptureStatusActive;
  if (id && capture) *id = capture->id;
  return result(cudaSuccess);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  if (!mode) return result(cudaErrorInvalidValue);
  std::swap(cuda_cpu::thread_mode, *mode);
  return result(cudaSuccess);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  const cudaHostNodeParams host = {function, data};
  const Work work = cuda_cpu::host_work(&host);
  if (!work) return result(cudaErrorInvalidValue);
  return cuda_cpu::in_order(stream, cudaGraphNodeTypeHost, work);
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data,
                                  unsigned flags) {
  if (!function || flags != 0) return result(cudaErrorInvalidValue);
  if (const cudaError_t error = cuda_cpu::forbidden_in_capture(stream)) return result(error);
  cuda_cpu::run_kept_kernels();
  const auto order = cuda_cpu::order_of(stream);
  const cuda_cpu::StreamWork work(*order, __builtin_return_address(0));
  function(stream, cuda_cpu::device().broken, data);
  return result(cudaSuccess);
}

// ---- Copies of boxes ----------------------------------------------------------------------------

cudaError_t cudaMemcpy3D(const cudaMemcpy3DParms* parameters) {
  if (!parameters) return result(cudaErrorInvalidValue);
  return cuda_cpu::copy_box(*parameters, [](auto... layer) { return cudaMemcpy2D(layer...); });
}

cudaError_t cudaMemcpy3DAsync(const cudaMemcpy3DParms* parameters, cudaStream_t stream) {
  if (!parameters) return result(cudaErrorInvalidValue);
  return cuda_cpu::in_order(stream, cudaGraphNodeTypeMemcpy, cuda_cpu::copy_work(parameters));
}

cudaError_t cudaMalloc3D(cudaPitchedPtr* pointer, cudaExtent extent) {
  if (!pointer) return result(cudaErrorInvalidValue);
  const std::size_t pitch = (extent.width + 511) / 512 * 512;
  *pointer = {nullptr, pitch, extent.width, extent.height};
  return cudaMalloc(&pointer->ptr, pitch * extent.height * extent.depth);
}

// ---- Graphs -------------------------------------------------------------------------------------

cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned flags) {
  if (!graph || flags != 0) return result(cudaErrorInvalidValue);
  *graph = new CUgraph_st;
  return result(cudaSuccess);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  if (!graph) return result(cudaErrorInvalidValue);
  delete graph;
  return result(cudaSuccess);
}

cudaError_t cudaGraphClone(cudaGraph_t* clone, cudaGraph_t graph) {
  if (!clone || !graph) return result(cudaErrorInvalidValue);
  auto copy = std::make_unique<CUgraph_st>();
  std::map<cudaGraphNode_t, cudaGraphNode_t> of;
  for (const auto& node : graph->nodes) of[node.get()] = copy->add(node->type, node->work, {});
  for (const auto& node : graph->nodes) {
    for (const cudaGraphNode_t before : node->after) of[node.get()]->after.push_back(of[before]);
  }
  *clone = copy.release();
  return result(cudaSuccess);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
  if (!graph) return result(cudaErrorInvalidValue);
  std::vector<cudaGraphNode_t> all;
  for (const auto& node : graph->nodes) all.push_back(node.get());
  return cuda_cpu::list(all, nodes, count);
}

cudaError_t cudaGraphGetRootNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
  if (!graph) return result(cudaErrorInvalidValue);
  std::vector<cudaGraphNode_t> roots;
  for (const auto& node : graph->nodes) {
    if (node->after.empty()) roots.push_back(node.get());
  }
  return cuda_cpu::list(roots, nodes, count);
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  if (!node || !type) return result(cudaErrorInvalidValue);
  *type = node->type;
  return result(cudaSuccess);
}

cudaError_t cudaGraphAddDependencies(cudaGraph_t graph, const cudaGraphNode_t* from,
                                     const cudaGraphNode_t* to, std::size_t count) {
  if (!graph || (count > 0 && (!from || !to))) return result(cudaErrorInvalidValue);
  for (std::size_t i = 0; i < count; ++i) to[i]->after.push_back(from[i]);
  return result(cudaSuccess);
}

cudaError_t cudaGraphAddDependencies(cudaGraph_t graph, const cudaGraphNode_t* from,
                                     const cudaGraphNode_t* to, const void* edges,
                                     std::size_t count) {
  if (edges) return result(cudaErrorNotSupported);
  return cudaGraphAddDependencies(graph, from, to, count);
}

cudaError_t cudaGraphAddEmptyNode(cudaGraphNode_t* node, cudaGraph_t graph,
                                  const cudaGraphNode_t* after, std::size_t count) {
  return cuda_cpu::add(node, graph, after, count, cudaGraphNodeTypeEmpty,
                       [](cudaStream_t) { return cudaSuccess; });
}

cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t* node, cudaGraph_t graph,
                                   const cudaGraphNode_t* after, std::size_t count,
                                   const cudaKernelNodeParams* parameters) {
  return cuda_cpu::add(node, graph, after, count, cudaGraphNodeTypeKernel,
                       cuda_cpu::kernel_work(parameters));
}

cudaError_t cudaGraphAddMemcpyNode(cudaGraphNode_t* node, cudaGraph_t graph,
                                   const cudaGraphNode_t* after, std::size_t count,
                                   const cudaMemcpy3DParms* parameters) {
  return cuda_cpu::add(node, graph, after, count, cudaGraphNodeTypeMemcpy,
                       cuda_cpu::copy_work(parameters));
}

cudaError_t cudaGraphAddMemcpyNode1D(cudaGraphNode_t* node, cudaGraph_t graph,
                                     const cudaGraphNode_t* after, std::size_t count, void* target,
                                     const void* source, std::size_t size, cudaMemcpyKind kind) {
  return cuda_cpu::add(node, graph, after, count, cudaGraphNodeTypeMemcpy,
                       cuda_cpu::copy_work(target, source, size, kind));
}

cudaError_t cudaGraphAddMemsetNode(cudaGraphNode_t* node, cudaGraph_t graph,
                                   const cudaGraphNode_t* after, std::size_t count,
                                   const cudaMemsetParams* parameters) {
  return cuda_cpu::add(node, graph, after, count, cudaGraphNodeTypeMemset,
                       cuda_cpu::fill_work(parameters));
}

cudaError_t cudaGraphAddHostNode(cudaGraphNode_t* node, cudaGraph_t graph,
                                 const cudaGraphNode_t* after, std::size_t count,
                                 const cudaHostNodeParams* parameters) {
  return cuda_cpu::add(node, graph, after, count, cudaGraphNodeTypeHost,
                       cuda_cpu::host_work(parameters));
}

cudaError_t cudaGraphAddChildGraphNode(cudaGraphNode_t* node, cudaGraph_t graph,
                                       const cudaGraphNode_t* after, std::size_t count,
                                       cudaGraph_t child) {
  return cuda_cpu::add(node, graph, after, count, cudaGraphNodeTypeGraph,
                       cuda_cpu::graph_work(child));
}

cudaError_t cudaGraphKernelNodeSetParams(cudaGraphNode_t node,
                                         const cudaKernelNodeParams* parameters) {
  return cuda_cpu::set(node, cudaGraphNodeTypeKernel, cuda_cpu::kernel_work(parameters));
}

cudaError_t cudaGraphMemcpyNodeSetParams1D(cudaGraphNode_t node, void* target, const void* source,
                                           std::size_t size, cudaMemcpyKind kind) {
  return cuda_cpu::set(node, cudaGraphNodeTypeMemcpy,
                       cuda_cpu::copy_work(target, source, size, kind));
}

cudaError_t cudaGraphMemsetNodeSetParams(cudaGraphNode_t node, const cudaMemsetParams* parameters) {
  return cuda_cpu::set(node, cudaGraphNodeTypeMemset, cuda_cpu::fill_work(parameters));
}

cudaError_t cudaGraphHostNodeSetParams(cudaGraphNode_t node, const cudaHostNodeParams* parameters) {
  return cuda_cpu::set(node, cudaGraphNodeTypeHost, cuda_cpu::host_work(parameters));
}

cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t made, cudaGraphNode_t node,
                                             const cudaKernelNodeParams* parameters) {
  return cuda_cpu::set(made, node, cudaGraphNodeTypeKernel, cuda_cpu::kernel_work(parameters));
}

cudaError_t cudaGraphExecMemcpyNodeSetParams1D(cudaGraphExec_t made, cudaGraphNode_t node,
                                               void* target, const void* source, std::size_t size,
                                               cudaMemcpyKind kind) {
  return cuda_cpu::set(made, node, cudaGraphNodeTypeMemcpy,
                       cuda_cpu::copy_work(target, source, size, kind));
}

cudaError_t cudaGraphExecMemsetNodeSetParams(cudaGraphExec_t made, cudaGraphNode_t node,
                                             const cudaMemsetParams* parameters) {
  return cuda_cpu::set(made, node, cudaGraphNodeTypeMemset, cuda_cpu::fill_work(parameters));
}

cudaError_t cudaGraphExecHostNodeSetParams(cudaGraphExec_t made, cudaGraphNode_t node,
                                           const cudaHostNodeParams* parameters) {
  return cuda_cpu::set(made, node, cudaGraphNodeTypeHost, cuda_cpu::host_work(parameters));
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph,
                                          unsigned long long) {
  if (!made || !graph) return result(cudaErrorInvalidValue);
  auto all = std::make_unique<CUgraphExec_st>();
  if (const cudaError_t error = cuda_cpu::steps_of(*graph, all->steps)) return result(error);
  *made = all.release();
  return result(cudaSuccess);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph,
                                 unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(made, graph, flags);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, cudaGraphNode_t*, char*,
                                 std::size_t) {
  return cudaGraphInstantiateWithFlags(made, graph);
}

cudaError_t cudaGraphUpload(cudaGraphExec_t made, cudaStream_t) {
  return result(made ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t made, cudaStream_t stream) {
  if (!made) return result(cudaErrorInvalidValue);
  return cuda_cpu::in_order(stream, cudaGraphNodeTypeGraph, [steps = made->steps](cudaStream_t in) {
    return cuda_cpu::run(steps, in);
  });
}

cudaError_t cudaGraphExecUpdate(cudaGraphExec_t made, cudaGraph_t graph,
                                cudaGraphExecUpdateResultInfo* info) {
  if (!made || !graph || !info) return result(cudaErrorInvalidValue);
  *info = {cudaGraphExecUpdateSuccess, nullptr, nullptr};
  std::vector<CUgraphExec_st::Step> steps;
  if (const cudaError_t error = cuda_cpu::steps_of(*graph, steps)) return result(error);
  if (steps.size() != made->steps.size()) info->result = cudaGraphExecUpdateErrorTopologyChanged;
  for (std::size_t i = 0; i < steps.size() && info->result == cudaGraphExecUpdateSuccess; ++i) {
    if (steps[i].type == made->steps[i].type) continue;
    *info = {cudaGraphExecUpdateErrorNodeTypeChanged, steps[i].of, nullptr};
  }
  if (info->result != cudaGraphExecUpdateSuccess) return result(cudaErrorGraphExecUpdateFailure);
  for (std::size_t i = 0; i < steps.size(); ++i) made->steps[i].work = steps[i].work;
  return result(cudaSuccess);
}

cudaError_t cudaGraphExecUpdate(cudaGraphExec_t made, cudaGraph_t graph, cudaGraphNode_t* node,
                                cudaGraphExecUpdateResult* how) {
  cudaGraphExecUpdateResultInfo info;
  const cudaError_t error = cudaGraphExecUpdate(made, graph, &info);
  if (node) *node = info.errorNode;
  if (how) *how = info.result;
  return error;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t made) {
  if (!made) return result(cudaErrorInvalidValue);
  delete made;
  return result(cudaSuccess);
}
