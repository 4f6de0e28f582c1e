// An L2 cache in which nothing is left of what a kernel reads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/numerics.h"

namespace common {

/// Makes the L2 cache cold, in the current stream, if that is wanted. Written, not read: twice the
/// cache's size leaves nothing of a kernel's operands in it, and as in a real network the kernel
/// finds it full of somebody else's results. But data that a kernel has marked as evict_last may
/// stay where others are written. So all of it is written twice: first as evict_last, which drives
/// out what was marked so, and marked as usual thereafter.
class ColdCache {
 public:
  /// l2_bytes: the cache's size.
  ColdCache(bool wanted, int64_t l2_bytes);
  void make_cold(int value) const;

 private:
  std::size_t bytes_;
  Scratch<char> written_;
};

}  // namespace common
