// How long a product of tiles should take: an estimate, counted from the tiles, from the device's
// rates and from a few costs, the constants below. (Kernels whose costs are of other kinds have
// estimates of their own, beside them.) If a program tries ways (docs/measuring.md#ways), the
// estimate leaves out what is hopeless; if nothing is tried, it alone decides.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "primitives/launch.h"

namespace operators {

/// What a way to compute a product costs each multiprocessor. A line is 128 bytes.
struct Cost {
  double rounds = 1;        ///< tiles that a block has, one after another
  double steps = 1;         ///< of a tile, each a line of k
  double rows, cols;        ///< of a block's tile
  double shared_lines;      ///< that a step moves into shared memory and, by wgmma, out of it
  double fetched_lines;     ///< that a block asks the L2 cache for in a step
  double blocks;            ///< that work at the same time, each on a multiprocessor of its own
  double multiprocessors;   ///< of the device
  double memory_bytes = 0;  ///< that go from and to memory in all
  double more = 0;          ///< further microseconds: other launches, waiting for one another
};

inline constexpr double kFetchedOffSectors = 1.45;  ///< see fetched_for_a_line

/// What a multiprocessor asks the L2 cache for, to get a line of a matrix whose rows are `bytes`
/// long. A line that is not aligned lies on two lines of the cache, and one that does not begin at
/// a sector of 32 bytes has parts of five sectors instead of four. What such lines cost is fitted
/// to products of lesson 3.
inline double fetched_for_a_line(int64_t bytes) {
  return bytes % 128 == 0 ? 1 : bytes % 32 == 0 ? 1.2 : kFetchedOffSectors;
}

inline constexpr double kLineBytes = 128;

/// Clock cycles in a microsecond: five sixths of the highest clock, for a GPU under load. 1650 on
/// an H100 or H200.
inline double cycles() {
  const int kilohertz = primitives::device_fact<cudaDevAttrClockRate>();
  return kilohertz > 0 ? kilohertz / 1200.0 : 1650;
}
/// Bytes to or from memory in a microsecond: 0.9 of what its clock says, 3.0e6 on an H100, 4.3e6 on
/// an H200.
inline double memory_rate() {
  const double kilohertz = primitives::device_fact<cudaDevAttrMemoryClockRate>();
  const int bits = primitives::device_fact<cudaDevAttrGlobalMemoryBusWidth>();
  return kilohertz > 0 && bits > 0 ? 0.9 * 2e-3 * kilohertz * bits / 8 : 3e6;
}
inline constexpr double kFirstLaunch = 4;  ///< microseconds until the first data and after the last
inline constexpr double kNextLaunch = 2;   ///< the same of a kernel that follows another one early

/// A launch that does nothing but move so many bytes from or to memory.
inline double microseconds_to_move(double bytes) { return kNextLaunch + bytes / memory_rate(); }

/// Time of one step. In a cycle the tensor cores of a multiprocessor do 2048 multiply-adds in fp16,
/// 1024 in TF32: 32 rows x columns of a step, whose line of k has 64 or 32 elements. Shared memory
/// moves 128 bytes a cycle; as not all reads of wgmma meet those of others, we count 150. Of the L2
/// cache we count 39 bytes a cycle if all multiprocessors ask, and three times as much if few do.
inline double step_microseconds(const Cost& cost) {
  const double asking = std::max(0.33, cost.blocks / cost.multiprocessors);
  return std::max({cost.rows * cost.cols / 32, cost.shared_lines * kLineBytes / 150,
                   cost.fetched_lines * kLineBytes / 39 * asking}) /
         cycles();
}

/// Time of the whole product: the steps and the memory work at the same time. We count that a
/// multiprocessor finishes 16 of a tile's sums in a cycle.
inline double microseconds(const Cost& cost) {
  const double finish = cost.rows * cost.cols / 16 / cycles();
  return kFirstLaunch + cost.more +
         std::max(cost.rounds * (cost.steps * step_microseconds(cost) + finish),
                  cost.memory_bytes / memory_rate());
}

}  // namespace operators
