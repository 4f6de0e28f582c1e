// How one of several ways to compute the same is chosen, for a table's row and for the library.
//
// Whoever can compute something in several ways estimates how long each should take, and offers
// all of them to `Ways`. It keeps those that are searched for: the one that should be the fastest,
// all of them, or the one with an id. Whoever tries several tries the first worth_trying().
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <vector>

#include "common/choose/way.h"

namespace common {

/// What takes so many times as long as the best is not worth trying, nor trying once more. Most
/// estimates err by less.
inline constexpr double kHopeless = 1.4;

/// The id of a way that these numbers tell from others, such as its kind, its tile, and how many
/// blocks work on it.
constexpr WayId way_id(std::initializer_list<int64_t> numbers) {
  WayId id = numbers.size();
  for (const int64_t each : numbers) {
    id = (id ^ static_cast<WayId>(each)) * 0x9E3779B97F4A7C15;
    id ^= id >> 32;
  }
  return id;
}

/// Steps, one after another, as one way, with the name and the id of `named`.
inline Way in_turn(const Way& named, const std::vector<Way>& steps) {
  Way all = {.name = named.name, .id = named.id};
  for (const Way& step : steps) {
    all.microseconds += step.microseconds;
    all.shared_bytes = std::max(all.shared_bytes, step.shared_bytes);
  }
  all.launch = [steps] {
    for (const Way& step : steps) step.launch();
  };
  return all;
}

/// The one that should be the fastest, of equal ones the first; nullptr if there is none.
template <typename T>
const T* fastest(const std::vector<T>& ways) {
  const auto found = std::min_element(ways.begin(), ways.end(), [](const T& a, const T& b) {
    return a.microseconds < b.microseconds;
  });
  return found == ways.end() ? nullptr : &*found;
}

/// Sorts by `microseconds`, a function of T, and returns how many of the first are worth trying: at
/// most `most`, and none that is hopeless.
template <typename T, typename Microseconds>
size_t worth_trying(std::vector<T>& all, size_t most, const Microseconds& microseconds) {
  std::stable_sort(all.begin(), all.end(),
                   [&](const T& a, const T& b) { return microseconds(a) < microseconds(b); });
  const auto hopeless = std::find_if(all.begin(), all.end(), [&](const T& each) {
    return microseconds(each) > kHopeless * microseconds(all[0]);
  });
  return std::min(most, static_cast<size_t>(hopeless - all.begin()));
}
inline size_t worth_trying(std::vector<Way>& all, size_t most) {
  return worth_trying(all, most, [](const Way& way) { return way.microseconds; });
}

/// Which ways are searched for: all, to be tried; or the one with this id; or the one that should
/// be the fastest.
struct Search {
  bool all = false;
  std::optional<WayId> only = {};
};

/// The ways that are searched for, as they are found.
class Ways {
 public:
  explicit Ways(const Search& search) : search_(search) {}

  /// make() returns the way with this id that should take so long. Names and launches take longer
  /// to make than an estimate, so of ways that are not wanted none are made. Returns whether this
  /// one is wanted, so far.
  template <typename Make>
  bool offer(double microseconds, WayId id, const Make& make) {
    if (search_.only
            ? id != *search_.only || !found_.empty()
            : !search_.all && !found_.empty() && !(microseconds < found_.front().microseconds)) {
      return false;
    }
    if (!search_.all) found_.clear();
    found_.push_back(make());
    found_.back().microseconds = microseconds;
    found_.back().id = id;
    return true;
  }
  /// How much of something a wanted way and those that were found before it need at most.
  template <typename T>
  T most(T of_others, T of_this) const {
    return search_.all ? std::max(of_others, of_this) : of_this;
  }
  const std::vector<Way>& found() const { return found_; }

 private:
  Search search_;
  std::vector<Way> found_;
};

}  // namespace common
