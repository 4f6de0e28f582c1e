// In the place of libcu++'s header, which cub includes instead of cuda/ptx since CCCL 3.1.

#pragma once

#include <cuda/ptx>
