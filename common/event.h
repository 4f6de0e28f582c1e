// A moment in the work of the stream.
#pragma once

#include "common/check.h"

class Event {
 public:
  Event() { CUDA_CHECK(cudaEventCreate(&event_)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { cudaEventDestroy(event_); }
  void record() { CUDA_CHECK(cudaEventRecord(event_)); }
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
