// What an operator asks of a device once, not at each call.
#pragma once

#include <atomic>
#include <iterator>

#include "primitives/check.h"
#include "primitives/launch.h"

namespace operators {

/// The compute capabilities that a device may be taken for. CUDA Programming Guide, "Technical
/// Specifications per Compute Capability": the most shared memory of a block.
inline constexpr primitives::Capability kCapabilities[] = {
    {75, 64 << 10},   {80, 163 << 10}, {86, 99 << 10},   {87, 163 << 10},
    {89, 99 << 10},   {90, 227 << 10}, {100, 227 << 10}, {103, 227 << 10},
    {110, 227 << 10}, {120, 99 << 10}, {121, 99 << 10},
};

/// While there is one, this host thread takes its device for that: is_hopper(), has_clusters() and
/// most_shared_bytes() of primitives/ answer as they would there. Rates and the number of
/// multiprocessors stay the device's own.
class TakingFor {
 public:
  explicit TakingFor(const primitives::Capability& capability) : before_(primitives::taken_for) {
    primitives::taken_for = capability;
  }
  ~TakingFor() { primitives::taken_for = before_; }
  TakingFor(const TakingFor&) = delete;
  TakingFor& operator=(const TakingFor&) = delete;

 private:
  primitives::Capability before_;
};

/// For each device 1 more than a number, or 0: not asked yet.
using FactsOfDevices = std::atomic<int>[64];

/// What find() returns, a number from 0 on that is the same for this device whenever it is asked
/// for: found once a device. What a device is taken for is no part of `facts`: then find() is
/// called each time.
inline int fact_of_device(FactsOfDevices& facts, int (*find)()) {
  int device = 0;
  primitives::check(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= static_cast<int>(std::size(facts)) || primitives::taken_for.number != 0) {
    return find();
  }
  int fact = facts[device].load(std::memory_order_relaxed);
  if (fact == 0) {
    fact = 1 + find();
    facts[device].store(fact, std::memory_order_relaxed);
  }
  return fact - 1;
}
/// The same for a lambda without captures, whose type has a table of its own.
template <typename Find>
int fact_of_device(Find find) {
  static FactsOfDevices facts = {};
  return fact_of_device(facts, find);
}

}  // namespace operators
