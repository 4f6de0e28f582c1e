// A moment in the work of the stream.
#pragma once

#include "common/check.h"

namespace common {

class Event {
 public:
  Event() { CUDA_CHECK(cudaEventCreate(&event_)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { cudaEventDestroy(event_); }
  void record() { CUDA_CHECK(cudaEventRecord(event_)); }
  /// The same at another place in the queue of commands each time: at some places what follows
  /// starts up to a microsecond later, whatever it is. Of several records the last one counts.
  template <class Random>
  void record_anywhere(Random& random) {
    constexpr unsigned kPlaces = 16;
    for (auto i = random() % kPlaces; i > 0; --i) record();
    record();
  }
  /// Milliseconds from `start` to this event; waits for it.
  float since(const Event& start) const {
    CUDA_CHECK(cudaEventSynchronize(event_));
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, start.event_, event_));
    return ms;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace common
