// Streams and events, and what becomes of work for a stream that is captured.

#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "cpu/order/stream_order.h"
#include "cuda_runtime_api.h"

namespace cuda_cpu {

struct Capture;
/// What a node of a graph does, with the stream that the graph is launched in.
using Work = std::function<cudaError_t(cudaStream_t)>;

/// How far a stream, or an event, is in a graph that is captured: null and nothing if it is not.
struct Captured {
  std::shared_ptr<Capture> capture;
  std::vector<cudaGraphNode_t> last;  ///< what comes next depends on these
};

/// Whether any stream is captured.
bool any_capture();

/// If the stream is captured, `work` becomes a node, and the result is the call's. Nothing if the
/// caller is to do the work itself.
std::optional<cudaError_t> captured(cudaStream_t stream, cudaGraphNodeType type, Work work);

/// Does the work now, or when the graph runs that the stream is captured for.
cudaError_t in_order(cudaStream_t stream, cudaGraphNodeType type, const Work& work);

/// Of a call that must not be made while a stream is captured: cudaErrorStreamCaptureUnsupported,
/// and the capture is void. `stream`: the one that the call waits for, if it is not all.
cudaError_t forbidden_in_capture();
cudaError_t forbidden_in_capture(cudaStream_t stream);

/// The stream is about to be destroyed: if it has begun a capture, this ends it, without a graph.
void forget_capture(cudaStream_t stream);

/// How a stream's events join streams to its capture: see CUDA's "Cross-stream Dependencies".
/// False: the event, or the stream, belongs to no capture.
bool record_in_capture(cudaEvent_t event, cudaStream_t stream);
std::optional<cudaError_t> wait_in_capture(cudaStream_t stream, cudaEvent_t event);

}  // namespace cuda_cpu

struct CUstream_st {
  unsigned flags = 0;
  cuda_cpu::Captured captured;
  std::shared_ptr<cuda_cpu::StreamOrder> order;  ///< since its first use
};

struct CUevent_st {
  bool recorded = false;
  std::chrono::steady_clock::time_point time;
  cuda_cpu::Captured captured;
};
