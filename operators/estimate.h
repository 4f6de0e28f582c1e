// How long a product of tiles should take on a Hopper GPU: a coarse estimate, from what the tiles
// are and from rates of the hardware, not from measurements of kernels. It only has to be good
// enough to leave out what is hopeless; of the rest the fastest is found by trying
// (docs/measuring.md#ways). Where nothing can be tried, the estimate alone decides.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace operators {

/// What a way to compute a product costs each multiprocessor. A line is 128 bytes.
struct Cost {
  double rounds = 1;     ///< tiles that a block has, one after another
  double steps = 1;      ///< of a tile, a line of k each
  double rows, cols;     ///< of a block's tile
  double shared_lines;   ///< of a step, into shared memory and, by wgmma, out of it
  double fetched_lines;  ///< of a step, that the block asks the L2 cache for
  double blocks;         ///< that work at the same time, one each multiprocessor of `all`
  double all;
  double memory_bytes = 0;  ///< that go from and to memory in all
  double more = 0;          ///< microseconds beside it: other launches, waiting for one another
};

/// What a multiprocessor asks the L2 cache for, to get a line of a matrix whose rows are `bytes`
/// long: lines that are not aligned are parts of two, or of five sectors of 32 bytes.
inline double fetched_for_a_line(int64_t bytes) {
  return bytes % 128 == 0 ? 1 : bytes % 32 == 0 ? 1.2 : 1.45;
}

constexpr double kLaunchMicroseconds = 2;  ///< of a kernel that follows another one

/// Of one step. Per multiprocessor and cycle the tensor cores take 32 rows x columns of it (1024
/// multiply-adds in fp16, 512 in TF32), shared memory moves 150 bytes, and the L2 cache delivers 39
/// bytes if all ask, up to three times as much if few do. Under load a clock has 1.65 GHz.
inline double step_microseconds(const Cost& cost) {
  const double asking = std::max(0.33, cost.blocks / cost.all);
  return std::max({cost.rows * cost.cols / 32, cost.shared_lines * 128 / 150,
                   cost.fetched_lines * 128 / 39 * asking}) /
         1650;
}

/// Of all. Of a tile's sums a multiprocessor finishes 16 a cycle. Memory moves 3 TB/s. A launch
/// takes 4 us until its first data are there and its last results gone.
inline double microseconds(const Cost& cost) {
  const double finish = cost.rows * cost.cols / 16 / 1650;
  return 4 + cost.more +
         std::max(cost.rounds * (cost.steps * step_microseconds(cost) + finish),
                  cost.memory_bytes / 3e6);
}

}  // namespace operators
