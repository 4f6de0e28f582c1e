// In the place of CCCL's header.

#pragma once

#include <thrust/system/cpp/vector.h>
