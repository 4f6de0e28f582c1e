// The record that --json writes: tests/schema.json says what is in it.
#pragma once

#include <cstdint>
#include <string>

#include "common/results.h"

namespace common {

/// As JSON, with the commit that this was built from and the time of now.
std::string record_of(const std::string& lesson, uint64_t seed, const Device& device,
                      const Tables& tables);
/// An upper bound of its length, in bytes.
size_t most_bytes_of(const Tables& tables);

}  // namespace common
