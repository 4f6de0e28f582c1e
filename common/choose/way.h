// One of several ways to compute the same; ways.h chooses among them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace common {

/// Tells a way from the others of its operator, for one shape on one device: never a name, which
/// is for people.
using WayId = uint64_t;

/// One of several ways to compute the same, such as with one of several tiles.
struct Way {
  std::string name = {};    ///< for people
  double microseconds = 0;  ///< that it should take
  std::function<void()> launch = {};
  int shared_bytes = 0;  ///< that a block asks for when it is launched
  WayId id = 0;          ///< where there is no other way, any number
};

}  // namespace common
