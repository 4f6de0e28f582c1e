// A layout of tiles in shared memory in which neither rows nor columns meet a bank twice.
#pragma once

#include <cuda_runtime.h>

namespace primitives {

/// Where element (row, col) of a tile lies in shared memory, in elements of 16 bits from its start.
/// The tile has kCols columns (32, or a multiple of 64), is dense, and starts at a multiple of 128
/// bytes.
///
/// The 32 banks of shared memory are 128 bytes wide: eight pieces of 16 bytes. Row-major, the same
/// 8 columns of 8 consecutive rows would all be on one eighth of the banks, and reading them, as
/// ldmatrix does, would take 8 turns. So the pieces of a row change places: piece p of row r
/// becomes p ^ (r % 8), and then all eight are on different banks. (With 32 columns two rows share
/// 128 bytes and have four pieces each: p ^ (r / 2 % 4).) A row still has the same 128 bytes, so
/// writing whole rows is free of conflicts too, and unlike padding this costs no memory. An
/// exclusive or also undoes itself, and commutes with others: if a column has none of the bits of
/// 8 c, then column + 8 c is column ^ 8 c, and its offset is the column's offset ^ 8 c, as long as
/// neither leaves an aligned group of 64 (32) columns.
template <int kCols>
__device__ inline int swizzle(int row, int col) {
  static_assert(kCols == 32 || kCols % 64 == 0, "no layout for rows of this length");
  const int turn = kCols == 32 ? row / 2 % 4 : row % 8;
  return row * kCols + (col ^ 8 * turn);
}

}  // namespace primitives
