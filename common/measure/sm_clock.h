// The clock at which the multiprocessors ran: what they made of the power that they may take.
#pragma once

#include <memory>

namespace common {

/// Two readings of the GPU's counters, in the stream: cycles over time between them is the average
/// clock. Reads nothing on the CPU backend.
class SmClock {
 public:
  SmClock();
  void start() { read(0); }
  void stop() { read(1); }
  /// Of the last start() and stop(), in Hz; waits for them. 0 if unknown.
  double hz() const;

 private:
  void read(int which);

  struct Reading;
  std::shared_ptr<Reading> readings_;
};

}  // namespace common
