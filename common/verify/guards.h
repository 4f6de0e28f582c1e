// Guards: bytes before and behind a buffer that nobody may change. On a GPU a write just behind a
// matrix would be invisible otherwise.
#pragma once

#include <cstddef>
#include <string>

#include "common/problem.h"

namespace common {

/// How many there are on each side. A multiple of every alignment that a kernel may ask for. None
/// where an address sanitizer guards each allocation, or where its bytes are what is measured.
size_t guard_bytes();

/// Of memory that was just allocated.
void set_guards(const Storage& storage);

/// "wrote 12 bytes behind output 2", if somebody has changed guards of one of the problem's
/// buffers, which are made whole again; empty otherwise.
std::string trespass(const Problem& problem);

}  // namespace common
