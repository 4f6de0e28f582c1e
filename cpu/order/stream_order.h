// What streams and events order, for ThreadSanitizer. The work itself is done when it is asked for,
// one after the other, so its results are right whatever a program forgets. But a kernel, a copy or
// a memset comes, for ThreadSanitizer, only after what its stream, the events that this one has
// waited for, and the calls of the host before it say. The host comes after it only when it has
// waited. So it is a race if two streams, or a stream and the host, use the same memory without an
// order. Without ThreadSanitizer all of this does nothing.
//
// A copy from memory of the host that is not pinned reads it before the call returns, and a copy
// into such memory ends before that (CUDA Runtime API, "API synchronization behavior"). What is in
// doubt is taken as ordered: a plain cudaMemcpy() waits for all devices, and if a device may use
// the memory of another one, its streams are one.

#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

#include "cuda_runtime_api.h"

namespace cuda_cpu {

/// How far a stream is.
struct StreamOrder : std::enable_shared_from_this<StreamOrder> {
  enum class Kind { legacy, blocking, non_blocking };

  StreamOrder(int device, Kind kind);
  ~StreamOrder();
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;

  const int device;
  const Kind kind;
  const unsigned long long number;  ///< of all streams, from 1 on, in the order of their first use
  void* identity = nullptr;         ///< ThreadSanitizer's, of work that is no kernel
  std::atomic<unsigned> launches = 0;

  // What ThreadSanitizer's order hangs on.
  char called = 0;      ///< what the host has done before it asked for work
  char begins = 0;      ///< a launch
  char ended[4] = {};   ///< launches, by their number
  char other_work = 0;  ///< has ended
};

/// The stream's, of the calling host thread.
std::shared_ptr<StreamOrder> order_of(cudaStream_t stream);

/// The next launch in the stream comes after what the host has done, and, unless it starts early,
/// after what is in the stream.
void order_launch(StreamOrder& order, bool early);
/// The same launch's end, which the launch after it, or a thread of it, may wait for.
void* launch_end(StreamOrder& order, unsigned number);
/// What the calling identity does between them has a frame in ThreadSanitizer's stacks that names
/// the stream, as in_stream<3>(). An identity's own name would be gone when it has ended.
void frame_begins(const StreamOrder& order);
void frame_ends();
/// Whether a launch in `next` comes after all that `last` has when nobody waits.
bool always_follows(const StreamOrder& next, const StreamOrder& last);

/// The calling host thread has waited for a stream; for all of them.
void host_waits_for(StreamOrder& order);
void host_waits_for_all();
/// How often a host thread has done the latter.
unsigned times_host_waited_for_all();

/// An event, at its address, is recorded in a stream; a stream waits for it; the host does.
void order_event(void* event, StreamOrder& order);
void order_after_event(StreamOrder& order, void* event);
void host_waits_for_event(void* event);

/// While one exists, the calling host thread acts for a stream: a copy, a memset, a function of the
/// host. `place` is where the program has called for it.
class StreamWork {
 public:
  StreamWork(StreamOrder& order, const void* place, bool all_devices = false);
  ~StreamWork();
  StreamWork(const StreamWork&) = delete;
  StreamWork& operator=(const StreamWork&) = delete;

  /// memmove(); the host itself reads the source before its call returns, or the stream does later.
  void copy(void* target, const void* source, std::size_t size, bool host_reads);
  void fill(void* target, int value, std::size_t size);

 private:
  StreamOrder& order_;
  void* const host_;
};

}  // namespace cuda_cpu
