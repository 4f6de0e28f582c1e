// 3. Matrix multiplication by tensor cores
//
//     C = A B        A, B, C: N x N, fp16 (its type is half), row-major; fp32 accumulation
//
// Lesson 2 ended where one instruction of a thread is one multiply-add. A tensor core multiplies
// matrices: one instruction, mma.sync, executed by the 32 threads of a warp together, is
//
//     S (16 x 8) += L (16 x 16) R (16 x 8)        2048 multiply-adds, 64 a thread
//
// where L and R are the left and the right factor, pieces of A and of B. They are in registers.
// Each matrix is spread over the registers of all lanes, which are the threads of the warp. What
// one lane holds of a matrix is its fragment (README has a picture). L consists of four matrices of
// 8 x 8; R and the sums consist of two each. Of each 8 x 8 matrix lane l holds two elements:
//
//   - of L two neighbours of a row, as two 16-bit numbers in one register: row l / 4, columns
//     2 * (l % 4) and 2 * (l % 4) + 1. Lane 5 has columns 2 and 3 of row 1;
//   - of the sums the same two elements, as two fp32 numbers;
//   - of R two neighbours of a column: column l / 4, rows 2 * (l % 4) and 2 * (l % 4) + 1. Lane 5
//     has rows 2 and 3 of column 1.
//
// A lane's registers are only a part of each matrix. To load a matrix is a warp's joint work, too,
// and there is an instruction for it, ldmatrix: the lanes pass the addresses of rows in shared
// memory, and receive elements of these rows.
//
// The arithmetic of lesson 2's inner loop, 128 multiply-adds of a thread, now takes two
// instructions. Two things decide how near a kernel then comes to the tensor cores' rate:
//
//   - Shared memory. It has 32 banks of 4 bytes, so places that are a multiple of 128 bytes apart
//     are in the same bank. ldmatrix reads 8 rows of 16 bytes at a time. If the rows of a tile are
//     a multiple of 128 bytes apart, all 8 are in the same banks and are read one after the other.
//     So the tile needs another layout: longer rows, or rows whose pieces change places.
//   - Instructions. Those for addresses, bound checks and copies take cycles in which no mma.sync
//     starts. And there are few warps, too few to fill the time that a load takes: loads have to
//     start long before what they bring is needed.
//
// One more thing: mma.sync wants each lane's two elements of R below each other, in one column, but
// B is row-major, where neighbours in memory are in one row. ldmatrix can transpose each 8 x 8
// matrix on its way to the registers (.trans), at no cost; no transposed copy of B is needed.
//
//     cuBLAS fp16          the library, lesson 4; "cuBLASLt, best": its fastest proposal
//     wmma global          fragments straight from memory, through the C++ interface
//     wmma shared          tiles in shared memory, padded rows
//     swizzled tiles       the instructions themselves, ldmatrix and mma.sync, and no padding
//     stages               the next tiles arrive while these are multiplied
//     lean                 addresses are worked out once, and tiles are larger
//     double buffering     the next fragments are loaded while these are multiplied
//     one warpgroup        (Hopper) four warps multiply from shared memory; the copy engine (TMA)
//                          brings the tiles
//     warp specialization  (Hopper) one thread starts all copies, eight warps only multiply
//     tile scheduler       (Hopper) blocks stay for several tiles of C, which TMA stores
//     clusters             (Hopper) two blocks share the tiles of B that they copy
//     rasterization        (Hopper) an order of tiles in which the L2 cache still has more of what
//                          the next ones read
//
// The kernels that are not marked (Hopper) need compute capability 7.5 or more. (At 7.5 a thread
// waits for each of its copies.) The CPU backend, which runs lessons without a GPU, runs all.
//
// At the first reading take n as a multiple of all sizes of tiles. Then no check finds an element
// outside of a matrix. Kernels have template parameters for other n: for yours kWhole, kAligned and
// kEven are true, and kWidth, the number of elements that one copy moves, is 8. The kernels down to
// *double buffering* are the core path. Those for Hopper come after it, and have a first reading of
// their own (see "How to read the kernels for Hopper"). What a kernel calls from primitives/ is
// explained where it is first used.

#include "primitives/async_copy.cuh"
#include "primitives/hopper/pipeline.cuh"
#include "primitives/launch.h"
#include "primitives/mma.cuh"
#include "primitives/spin.cuh"
#include "primitives/wmma_fragments.cuh"
#include "problems/product/library_product.h"
#include "problems/product/square_matmul.h"

using namespace problems;
using namespace primitives;

// ---- wmma global --------------------------------------------------------------------------------

// WMMA is CUDA's C++ interface to the tensor cores. All lanes of a warp together call its
// functions, here for matrices of 16 x 16. (The compiler makes two instructions of such a product.)
// FragmentA, FragmentB and FragmentSum (primitives/wmma_fragments.cuh) are what a lane holds of a
// left factor, of a right factor, and of sums. WMMA does not tell which elements these are.

// Loads the 16 x 16 elements of `from` (row-major, n x n) at (row0, col0). WMMA's function for it,
// load_matrix_sync, takes the address of the first element and the distance between two rows. All
// elements have to be inside of `from`, the address has to be a multiple of 32 bytes, and the
// distance a multiple of 16 bytes (CUDA C++ Programming Guide, "Warp Matrix Functions"). If kWhole
// (n is a multiple of 16), all of this is true. Otherwise each lane first copies 8 elements to
// `corner`, a place in shared memory that its warp has for itself. What is outside becomes 0 there.
template <bool kWhole, typename Fragment>
__device__ void load_global(Fragment& fragment, const half* from, int row0, int col0, int n,
                            half* corner) {
  if constexpr (kWhole) {
    wmma::load_matrix_sync(fragment, from + static_cast<size_t>(row0) * n + col0, n);
  } else {
    const int lane = threadIdx.x % 32, row = row0 + lane / 2, col = lane % 2 * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool inside = row < n && col0 + col + i < n;
      corner[lane * 8 + i] =
          inside ? from[static_cast<size_t>(row) * n + col0 + col + i] : __float2half_rn(0);
    }
    __syncwarp();  // all lanes have written their elements
    wmma::load_matrix_sync(fragment, corner, 16);
    __syncwarp();  // all lanes have read the corner, so it may be written again
  }
}

// A block is kSide x kSide warps: threadIdx.x is the lane, y and z are the warp's column and row.
constexpr int kSide = 4;

// This is lesson 1 with a warp in the place of a thread. Each warp owns one 16 x 16 tile of C and
// walks along k in steps of 16. It keeps only its sums. For every product it loads two matrices
// from memory: 512 elements for 4096 multiply-adds. Four of the block's 16 warps need the same
// matrix. The first of them reads it from memory. The others find it in the multiprocessor's L1
// cache, if it is still there.
//
// The sums are fp32 and C is fp16. A lane that stores a rounded sum has to know its row and column,
// and WMMA does not say them. So store_rounded (primitives/wmma_fragments.cuh) lets WMMA store the
// sums to a staging. This is a place in shared memory where they lie in rows, kStagingStride floats
// apart. From there each lane takes 8 neighbours of a row, rounds them, and stores them to C.
// (`corners` are not used if kWhole.)
template <bool kWhole>
__global__ void __launch_bounds__(32 * kSide * kSide)
    matmul_wmma_global(const half* A, const half* B, half* C, int n) {
  __shared__ __align__(128) half corners[kSide][kSide][2][16 * 16];
  __shared__ __align__(128) float stagings[kSide][kSide][16 * kStagingStride];
  const int row0 = (blockIdx.y * kSide + threadIdx.z) * 16;
  const int col0 = (blockIdx.x * kSide + threadIdx.y) * 16;
  if (row0 >= n || col0 >= n) return;  // all lanes of the warp, or none
  half* corner_a = corners[threadIdx.z][threadIdx.y][0];
  half* corner_b = corners[threadIdx.z][threadIdx.y][1];
  FragmentSum sum;
  wmma::fill_fragment(sum, 0.0f);
  for (int k = 0; k < n; k += 16) {
    FragmentA a;
    FragmentB b;
    load_global<kWhole>(a, A, row0, k, n, corner_a);
    load_global<kWhole>(b, B, k, col0, n, corner_b);
    wmma::mma_sync(sum, a, b, sum);  // sum = a b + sum
  }
  store_rounded<kWhole>(C, row0, col0, n, n, sum, stagings[threadIdx.z][threadIdx.y]);
}

// ---- wmma shared --------------------------------------------------------------------------------

// Here a block has tiles, as in lesson 2. Its kWarpsM x kWarpsN warps own a tile of C, BM x BN
// elements. A step takes BK of the n values of k. In it the block loads a tile of A, BM x BK, and
// one of B, BK x BN, into shared memory, once for all its warps. Then each warp multiplies its 16 *
// kRows rows by its 16 * kCols columns. For 16 of k it loads kRows + kCols matrices of 16 x 16, and
// makes kRows * kCols products. Here tiles are 128 x 128, BK is 32, and there are 2 x 4 warps. So a
// warp has 64 x 32 elements of C: kRows is 4, and kCols is 2.
//
// The rows of the tiles are 8 elements longer than their data, so that rows start in different
// banks. For example, a row of A's tile has 32 elements and 8 more. These are 80 bytes, the width
// of 20 banks. So eight rows start in the banks 0, 20, 8, 28, 16, 4, 24 and 12. A piece of 16
// bytes takes four banks, so the first pieces of these rows have no bank in common.
//
// There are two barriers a step: one when the tiles are there, and one when nobody reads them any
// more. copy_tile (primitives/async_copy.cuh) starts the copies of a tile by cp.async, as in lesson
// 2's *async*, and what is outside of the matrix becomes 0. As there, copy_async_commit closes a
// thread's copies as a group, and copy_async_wait<n> waits for all of its groups but the n newest.
// Here n is 0: the block waits for its copies at once, so nothing is multiplied meanwhile.
template <int BM, int BN, int BK, int kWarpsM, int kWarpsN, bool kAligned>
__global__ void __launch_bounds__(32 * kWarpsM * kWarpsN)
    matmul_wmma_shared(const half* A, const half* B, half* C, int n) {
  constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  constexpr int kRows = BM / kWarpsM / 16, kCols = BN / kWarpsN / 16;
  constexpr int kStrideA = BK + 8, kStrideB = BN + 8;
  __shared__ __align__(128) half a_tile[BM][kStrideA];
  __shared__ __align__(128) half b_tile[BK][kStrideB];
  __shared__ __align__(128) float stagings[kWarpsM * kWarpsN][16 * kStagingStride];
  const int warp = threadIdx.x / 32;
  const int warp_row = warp / kWarpsN * 16 * kRows, warp_col = warp % kWarpsN * 16 * kCols;
  const int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;
  FragmentSum sum[kRows][kCols];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kCols; ++j) wmma::fill_fragment(sum[i][j], 0.0f);
  }
  for (int k0 = 0; k0 < n; k0 += BK) {
    copy_tile<BM, BK, kStrideA, kThreads, kAligned>(a_tile[0], A, row0, k0, n, n);
    copy_tile<BK, BN, kStrideB, kThreads, kAligned>(b_tile[0], B, k0, col0, n, n);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < BK; k += 16) {
      FragmentA a[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        wmma::load_matrix_sync(a[i], &a_tile[warp_row + 16 * i][k], kStrideA);
      }
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        FragmentB b;
        wmma::load_matrix_sync(b, &b_tile[k][warp_col + 16 * j], kStrideB);
#pragma unroll
        for (int i = 0; i < kRows; ++i) wmma::mma_sync(sum[i][j], a[i], b, sum[i][j]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      store_rounded<kAligned>(C, row0 + warp_row + 16 * i, col0 + warp_col + 16 * j, n, n,
                              sum[i][j], stagings[warp]);
    }
  }
}

// ---- The order of blocks ------------------------------------------------------------------------

// GPUs start blocks in the order of their numbers, as many as fit at a time. (CUDA does not promise
// this order. Here only the time depends on it.) Those that run at the same time share the L2
// cache: what one block has read, the others find there. So which tiles of C should they have? Take
// tiles of 256 x 128 elements, as in *lean*, below. An H100 works on 132 of them at a time, one on
// each multiprocessor. At N = 4096 a row of tiles has 32 of them. Taken row by row, 132 tiles are
// 132 / 32 = 4.125 rows of tiles, 4.125 x 256 = 1056 rows of C with all their 4096 columns. Then
// the blocks read 1056 rows of A and 4096 columns of B. Or the 132 tiles can be a square of about
// 2080 x 2080, as many elements. Then the blocks read 2080 rows and 2080 columns, which is less.
//
// So kGroup rows of tiles form a group, and the numbers of the blocks go down one column of the
// group, then down the next column. With tiles of 256 x 128 kGroup is 8. So a group has 2048 rows
// of C, and 132 tiles are 16.5 columns of tiles in it, 2112 columns of C: nearly that square. The
// grid has one dimension, so blockIdx.x is the number of a block. As a smaller example, these are
// the numbers of the blocks for 6 x 5 tiles and kGroup = 3:
//
//      0  3  6  9 12
//      1  4  7 10 13
//      2  5  8 11 14
//     15 18 21 24 27
//     16 19 22 25 28
//     17 20 23 26 29
//
// The kernels from *swizzled tiles* to *double buffering* take their tiles in this order. (The
// field calls the order of tiles rasterization.)
constexpr int kSquareRows = 2048;  // about the side of that square
template <int kGroup>
__device__ void tile_of_block(int tiles_m, int tiles_n, int& tile_m, int& tile_n) {
  const int group_size = kGroup * tiles_n;
  const int first = static_cast<int>(blockIdx.x) / group_size * kGroup;
  const int within = static_cast<int>(blockIdx.x) % group_size;
  const int rows = min(kGroup, tiles_m - first);  // the last group may have fewer
  tile_m = first + within % rows;
  tile_n = within / rows;
}

// ---- swizzled tiles -----------------------------------------------------------------------------

// A piece is 16 bytes of a row, 8 elements. A swizzle leaves each element in its own row and in its
// own piece, but the pieces of a row change places, and where they go depends on the row. With rows
// of 64 columns, piece p of row r lies at place p ^ (r % 8). Then the same piece of 8 rows, which
// ldmatrix reads together, lies on 8 different groups of banks. And a row still fills all banks
// once. So neither the copies nor ldmatrix meet a bank twice, and no row needs padding.
// swizzle<kCols>(row, col) (primitives/mma.cuh) is where an element lies in the tile.
//
// What about rows of other lengths? Two rows of 32 columns share 128 bytes, the width of all banks.
// They have no bank in common, so their pieces may change places alike: piece p (0 to 3) of row r
// lies at place p ^ (r / 2 % 4). A row of 128 columns is 128 bytes twice. p ^ (r % 8) keeps each
// piece in its own 128 bytes, since r % 8 is less than 8. So that rule is good here, too.
//
// The block's kThreads threads copy the kRows x kCols tile of `from` (n x n) at (row0, col0) to
// shared memory, kWidth elements at a time. copy_async<bytes>(to, from, inside) starts one copy. As
// in lesson 2, zeros are written if the source is not `inside` of the matrix.
template <int kRows, int kCols, int kThreads, int kWidth>
__device__ void copy_swizzled_tile(half* to, const half* from, int row0, int col0, int n) {
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kCols / kWidth; i += kThreads) {
    const int row = i / (kCols / kWidth), col = i % (kCols / kWidth) * kWidth;
    const bool inside = row0 + row < n && col0 + col < n;
    const half* at = from + static_cast<size_t>(row0 + row) * n + col0 + col;
    if constexpr (kWidth == 1) {
      to[swizzle<kCols>(row, col)] = inside ? *at : __float2half_rn(0);
    } else {
      copy_async<kWidth * sizeof(half)>(to + swizzle<kCols>(row, col), at, inside);
    }
  }
}

// A lane has four elements of a 16 x 8 matrix of sums. Elements 0 and 1 are neighbours in one row,
// and PairPlace says where element 0 is. Elements 2 and 3 are 8 rows below them.
struct PairPlace {
  int row, col;
};
__device__ PairPlace place_of_pair(int lane) {
  const int row = lane / 4;
  const int col = lane % 4 * 2;
  return {row, col};
}

// Stores two neighbours of a row of C. kEven: n is even, so one store of 4 bytes can do it, of a
// half2, two numbers of type half. __floats2half2_rn rounds two floats and makes a half2 of them.
template <bool kEven>
__device__ void store_pair(half* C, int row, int col, int n, float left, float right) {
  half* at = C + static_cast<size_t>(row) * n + col;
  if (row >= n) return;
  if constexpr (kEven) {
    if (col < n) *reinterpret_cast<half2*>(at) = __floats2half2_rn(left, right);
  } else {
    if (col < n) at[0] = __float2half_rn(left);
    if (col + 1 < n) at[1] = __float2half_rn(right);
  }
}

// This is *wmma shared* with the instructions themselves, mma.sync and ldmatrix. ldmatrix takes an
// address for each row of 16 bytes, so tiles may be swizzled. (WMMA wants a fixed distance between
// rows.) And a lane knows which elements it has, so it rounds and stores sums from registers.
//
// One ldmatrix, in the code ldmatrix_x4, loads 16 x 16 elements, as four matrices of 8 x 8:
//
//     +-----+-----+    Lanes 0 to 7 pass the addresses of the rows of matrix 0, lanes 8 to 15
//     |  0  |  2  |    those of matrix 1, and so on. So lane l passes the address of row l % 16,
//     +-----+-----+    from lane 16 on in the right half. Then lane l holds one register of each
//     |  1  |  3  |    matrix: two neighbours of the matrix's row l / 4, from column 2 * (l % 4).
//     +-----+-----+    (With .trans: two elements of column l / 4, one below the other.) Whose
//                      address a lane passes has nothing to do with what it receives.
//
// mma_m16n8k16<half>(s, a, b0, b1) is one mma.sync: s += a b, where b is in the registers b0 and
// b1. Of A, the four matrices of an ldmatrix are one left factor. Of B they are two right factors,
// since a right factor has only 8 columns (docs/pictures/ldmatrix.svg):
//
//     A: a[i]           B: b[j / 2], if j is even     if j is odd
//
//     +---+---+         +---+                         +---+
//     | 0 | 2 |         | 0 | b0 = b[j / 2][0]        | 2 | b0 = b[j / 2][2]
//     +---+---+         +---+                         +---+
//     | 1 | 3 |         | 1 | b1 = b[j / 2][1]        | 3 | b1 = b[j / 2][3]
//     +---+---+         +---+                         +---+
//
// kWidth is how many elements a copy moves. It is 8, which are 16 bytes, if n is a multiple of 8.
// It is 2 for other even n. For odd n it is 1, and elements are copied through registers.
template <int BM, int BN, int BK, int kWarpsM, int kWarpsN, int kWidth>
__global__ void __launch_bounds__(32 * kWarpsM * kWarpsN)
    matmul_ldmatrix(const half* A, const half* B, half* C, int n) {
  constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  constexpr int WM = BM / kWarpsM, WN = BN / kWarpsN;  // a warp's tile
  extern __shared__ __align__(128) half mma_tiles[];
  half *a_tile = mma_tiles, *b_tile = a_tile + BM * BK;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp / kWarpsN * WM, warp_col = warp % kWarpsN * WN;
  const PairPlace pair = place_of_pair(lane);
  int tile_m, tile_n;
  tile_of_block<kSquareRows / BM>((n + BM - 1) / BM, (n + BN - 1) / BN, tile_m, tile_n);
  const int row0 = tile_m * BM, col0 = tile_n * BN;
  float sum[WM / 16][WN / 8][4] = {};  // [16 rows][8 columns][a lane's four]
  for (int k0 = 0; k0 < n; k0 += BK) {
    copy_swizzled_tile<BM, BK, kThreads, kWidth>(a_tile, A, row0, k0, n);
    copy_swizzled_tile<BK, BN, kThreads, kWidth>(b_tile, B, k0, col0, n);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < BK; k += 16) {
      unsigned a[WM / 16][4], b[WN / 16][4];
#pragma unroll
      for (int i = 0; i < WM / 16; ++i) {
        const int row = warp_row + 16 * i + lane % 16, col = k + lane / 16 * 8;
        ldmatrix_x4(a[i], a_tile + swizzle<BK>(row, col));
      }
#pragma unroll
      for (int j = 0; j < WN / 16; ++j) {
        const int row = k + lane % 16, col = warp_col + 16 * j + lane / 16 * 8;
        ldmatrix_x4_trans(b[j], b_tile + swizzle<BN>(row, col));
      }
#pragma unroll
      for (int i = 0; i < WM / 16; ++i) {
#pragma unroll
        for (int j = 0; j < WN / 8; ++j) {
          mma_m16n8k16<half>(sum[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < WM / 16; ++i) {
#pragma unroll
    for (int j = 0; j < WN / 8; ++j) {
      const int row = row0 + warp_row + 16 * i + pair.row;
      const int col = col0 + warp_col + 8 * j + pair.col;
      store_pair<kWidth != 1>(C, row, col, n, sum[i][j][0], sum[i][j][1]);
      store_pair<kWidth != 1>(C, row + 8, col, n, sum[i][j][2], sum[i][j][3]);
    }
  }
}

// ---- stages -------------------------------------------------------------------------------------

// This is *swizzled tiles* with kStages stages in shared memory. A stage has room for the two tiles
// of one step, of A and of B. The tensor cores work on one stage while the copies for the next ones
// are on their way. The idea is that of lesson 2's *async*. Its loop, with three stages:
//
//     start the copies of steps 0 and 1, each as a group
//     for each step:
//       wait for the group of this step, and at a barrier for the whole block
//       start the copies of the step after the next
//       multiply the tiles of this step
//
// All but the last line is `copies_ahead` here (primitives/async_copy.cuh). Its next() does what
// the first two lines in the loop say, and returns the number of the step whose tiles are there.
template <int BM, int BN, int BK, int kWarpsM, int kWarpsN, int kStages, int kWidth>
__global__ void __launch_bounds__(32 * kWarpsM * kWarpsN)
    matmul_stages(const half* A, const half* B, half* C, int n) {
  constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  constexpr int WM = BM / kWarpsM, WN = BN / kWarpsN;  // a warp's tile
  extern __shared__ __align__(128) half mma_tiles[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp / kWarpsN * WM, warp_col = warp % kWarpsN * WN;
  const PairPlace pair = place_of_pair(lane);
  int tile_m, tile_n;
  tile_of_block<kSquareRows / BM>((n + BM - 1) / BM, (n + BN - 1) / BN, tile_m, tile_n);
  const int row0 = tile_m * BM, col0 = tile_n * BN;
  const int steps = (n + BK - 1) / BK;
  const auto tiles_of_step = [&](int step) { return mma_tiles + step % kStages * (BM + BN) * BK; };
  const auto copy_step = [&](int step) {
    if (step >= steps) return;
    half *a_tile = tiles_of_step(step), *b_tile = a_tile + BM * BK;
    copy_swizzled_tile<BM, BK, kThreads, kWidth>(a_tile, A, row0, step * BK, n);
    copy_swizzled_tile<BK, BN, kThreads, kWidth>(b_tile, B, step * BK, col0, n);
  };
  auto ahead = copies_ahead<kStages>(copy_step);
  float sum[WM / 16][WN / 8][4] = {};
  for (int step = 0; step < steps; ++step) {
    half *a_tile = tiles_of_step(ahead.next()), *b_tile = a_tile + BM * BK;
#pragma unroll
    for (int k = 0; k < BK; k += 16) {
      unsigned a[WM / 16][4], b[WN / 16][4];
#pragma unroll
      for (int i = 0; i < WM / 16; ++i) {
        const int row = warp_row + 16 * i + lane % 16, col = k + lane / 16 * 8;
        ldmatrix_x4(a[i], a_tile + swizzle<BK>(row, col));
      }
#pragma unroll
      for (int j = 0; j < WN / 16; ++j) {
        const int row = k + lane % 16, col = warp_col + 16 * j + lane / 16 * 8;
        ldmatrix_x4_trans(b[j], b_tile + swizzle<BN>(row, col));
      }
#pragma unroll
      for (int i = 0; i < WM / 16; ++i) {
#pragma unroll
        for (int j = 0; j < WN / 8; ++j) {
          mma_m16n8k16<half>(sum[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < WM / 16; ++i) {
#pragma unroll
    for (int j = 0; j < WN / 8; ++j) {
      const int row = row0 + warp_row + 16 * i + pair.row;
      const int col = col0 + warp_col + 8 * j + pair.col;
      store_pair<kWidth != 1>(C, row, col, n, sum[i][j][0], sum[i][j][1]);
      store_pair<kWidth != 1>(C, row + 8, col, n, sum[i][j][2], sum[i][j][3]);
    }
  }
}

// ---- lean ---------------------------------------------------------------------------------------

// Of the instructions of *stages* one in five is an ldmatrix or an mma.sync, as a profiler counts
// them. Most of the others work out addresses. Here these are worked out once, as in lesson 2's
// *lean*: by TileCopies for the copies, and in the kernel for ldmatrix.

// The sizes that follow from a choice of tiles. Shared memory has room for kStages stages. After
// the last step of *double buffering* the same place has to hold the rounded tile of C.
template <int kBM, int kBN, int kBK, int kWarpsM, int kWarpsN, int kStages>
struct MmaTiles {
  static constexpr int BM = kBM, BN = kBN, BK = kBK, kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kTileA = BM * BK, kTileB = BK * BN, kStage = kTileA + kTileB;  // elements
  static constexpr int kHalves = kStages * kStage > BM* BN ? kStages* kStage : BM* BN;
  static constexpr int kSharedBytes = kHalves * sizeof(half);
  static int blocks(int64_t n) {
    return static_cast<int>(((n + BM - 1) / BM) * ((n + BN - 1) / BN));
  }
};

// What a thread copies of the tiles, kWidth elements at a time. With one copy by each of its
// threads the block copies kRowsA rows of the tile of A, or kRowsB rows of the tile of B. So a
// thread's next copy is that many rows further down. Rows and columns outside of the matrix are
// replaced by the last ones inside. The sums that come from them are never stored. Only along k,
// which is summed over, zeros are needed.
template <class Tiles, int kWidth>
struct TileCopies {
  static constexpr int BM = Tiles::BM, BN = Tiles::BN, BK = Tiles::BK;
  static constexpr int kRowsA = Tiles::kThreads / (BK / kWidth);
  static constexpr int kRowsB = Tiles::kThreads / (BN / kWidth);
  using Offsets = int[BM / kRowsA];  // of the thread's rows of A
  const int n;
  int k_left;  // how many values of k have not been copied yet; 0 or less after the last step
  const int a_row = threadIdx.x / (BK / kWidth), a_k = threadIdx.x % (BK / kWidth) * kWidth;
  const int b_k = threadIdx.x / (BN / kWidth), b_col = threadIdx.x % (BN / kWidth) * kWidth;
  const half *a_from, *b_from;

  __device__ TileCopies(const half* A, const half* B, int row0, int col0, int size,
                        Offsets& offsets)
      : n(size), k_left(size) {
    a_from = A + static_cast<size_t>(row0) * n + a_k;
    b_from = B + static_cast<size_t>(b_k) * n + min(col0 + b_col, n - kWidth);
#pragma unroll
    for (int i = 0; i < BM / kRowsA; ++i) {
      offsets[i] = (min(row0 + a_row + i * kRowsA, n - 1) - row0) * n;
    }
  }
  // Starts the copies of the next BK of k.
  __device__ void start(half* a_tile, const Offsets& offsets) {
    half* b_tile = a_tile + Tiles::kTileA;
#pragma unroll
    for (int i = 0; i < BM / kRowsA; ++i) {
      copy(a_tile + swizzle<BK>(a_row + i * kRowsA, a_k), a_from + offsets[i], a_k < k_left);
    }
#pragma unroll
    for (int i = 0; i < BK / kRowsB; ++i) {
      copy(b_tile + swizzle<BN>(b_k + i * kRowsB, b_col),
           b_from + static_cast<size_t>(i * kRowsB) * n, b_k + i * kRowsB < k_left);
    }
    a_from += BK;
    b_from += static_cast<size_t>(BK) * n;
    k_left -= BK;
  }
  __device__ static void copy(half* to, const half* from, bool inside) {
    if constexpr (kWidth == 1) {
      *to = inside ? *from : __float2half_rn(0);
    } else {
      copy_async<kWidth * sizeof(half)>(to, from, inside);
    }
  }
};

// For ldmatrix a lane keeps two numbers, a_lane and b_lane: the places of its pieces for the first
// ldmatrix of A and of B, in elements from the beginning of a stage. (To each ldmatrix a lane
// passes the address of a piece of a row, 8 elements.) How does it find its other pieces? At the
// first reading believe the kernel, and go on at "Copies are simpler".
//
// Pieces in other rows are a multiple of 16 rows further on. These rows have the same r % 8, so
// they are swizzled alike, and a constant is added. For pieces in other columns to add is wrong,
// since swizzling moves columns: column c of row r lies at c ^ s, where s = 8 * (r % 8). Take A,
// and lane 2 of warp 0. It has row 2, so s = 16. These are its pieces for k = 0, 16, 32 and 48:
//
//         the piece begins at column    0   16   32   48
//         and lies at column           16    0   48   32     which is 16 ^ k
//
// Its a_lane is 2 * 64 + 16, and the piece for k is at a_lane ^ k: one instruction. Why is this
// right for all lanes? Here are the bits of a place in the tile of A, with rows of 64 columns:
//
//         | row ... | column: 5 4 3 | column: 2 1 0 |
//                         the piece   in the piece
//
// k is 0, 16, 32 or 48: only bits 4 and 5. A lane's first piece begins at column 0 or 8, where
// these two bits are 0. So k sets them, and nothing is carried: its other pieces begin at c ^ k.
// Swizzling is ^, too, and the order of two ^ does not matter. (In rows of 32 columns s is another
// number, and the rest is the same.)
//
// For B it is the same, with 16 * j in place of k. A lane's first piece begins at column warp_col
// or warp_col + 8, and warp_col is a multiple of WN, a power of two that is more than 16 * j. So
// there, too, the bits of 16 * j are 0. b_lane begins with kTileA, the place of the tile of B,
// which is a whole number of rows.
//
// Copies are simpler. If kWidth is 8, the rows that a thread copies are multiples of 8 apart, so
// they are swizzled alike: the compiler swizzles once, and adds constants.
//
// Tiles are larger, too. A block owns 256 x 128 elements of C and takes 64 of k in a step, and a
// warp owns 64 x 64 elements (in *stages* 64 x 32). For 16 of k a warp executes 32 mma.sync and 8
// ldmatrix; in *stages* 16 mma.sync and 6 ldmatrix. The price is as in lesson 2: only one such
// block, of 8 warps, fits on a multiprocessor. How much is gained by the addresses, and how much by
// the tiles, was not measured. Where shared memory is small, or N is no multiple of 8, tiles are as
// in *stages*. (`__restrict__` promises the compiler that nothing that is read through A or B is
// written through C.)
template <int BM, int BN, int BK, int kWarpsM, int kWarpsN, int kStages, int kWidth>
__global__ void __launch_bounds__(32 * kWarpsM * kWarpsN, 1)
    matmul_lean(const half* __restrict__ A, const half* __restrict__ B, half* __restrict__ C,
                int n) {
  using Tiles = MmaTiles<BM, BN, BK, kWarpsM, kWarpsN, kStages>;
  constexpr int WM = BM / kWarpsM, WN = BN / kWarpsN;  // a warp's tile
  extern __shared__ __align__(128) half mma_tiles[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp / kWarpsN * WM, warp_col = warp % kWarpsN * WN;
  const PairPlace pair = place_of_pair(lane);
  int tile_m, tile_n;
  tile_of_block<kSquareRows / BM>((n + BM - 1) / BM, (n + BN - 1) / BN, tile_m, tile_n);
  const int row0 = tile_m * BM, col0 = tile_n * BN;
  const int steps = (n + BK - 1) / BK;
  using Copies = TileCopies<Tiles, kWidth>;
  // This array is no member of `copies`: with such a member nvcc puts all of `copies` into memory,
  // and not into registers.
  typename Copies::Offsets offsets;
  Copies copies(A, B, row0, col0, n, offsets);
  const auto copy_step = [&](int step) {
    if (step < steps) copies.start(mma_tiles + step % kStages * Tiles::kStage, offsets);
  };
  auto ahead = copies_ahead<kStages>(copy_step);
  const int a_lane = swizzle<BK>(warp_row + lane % 16, lane / 16 * 8);
  const int b_lane = Tiles::kTileA + swizzle<BN>(lane % 16, warp_col + lane / 16 * 8);
  float sum[WM / 16][WN / 8][4] = {};
  for (int step = 0; step < steps; ++step) {
    const half* tiles = mma_tiles + ahead.next() % kStages * Tiles::kStage;
#pragma unroll
    for (int k = 0; k < BK; k += 16) {
      unsigned a[WM / 16][4], b[WN / 16][4];
#pragma unroll
      for (int i = 0; i < WM / 16; ++i) ldmatrix_x4(a[i], tiles + (a_lane ^ k) + i * 16 * BK);
#pragma unroll
      for (int j = 0; j < WN / 16; ++j) {
        ldmatrix_x4_trans(b[j], tiles + (b_lane ^ j * 16) + k * BN);
      }
#pragma unroll
      for (int i = 0; i < WM / 16; ++i) {
#pragma unroll
        for (int j = 0; j < WN / 8; ++j) {
          mma_m16n8k16<half>(sum[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < WM / 16; ++i) {
#pragma unroll
    for (int j = 0; j < WN / 8; ++j) {
      const int row = row0 + warp_row + 16 * i + pair.row;
      const int col = col0 + warp_col + 8 * j + pair.col;
      store_pair<kWidth != 1>(C, row, col, n, sum[i][j][0], sum[i][j][1]);
      store_pair<kWidth != 1>(C, row + 8, col, n, sum[i][j][2], sum[i][j][3]);
    }
  }
}

// ---- double buffering ---------------------------------------------------------------------------

// This is lesson 2's *ahead*, for tensor cores. Double buffering means that there are two buffers
// for the same thing: one is filled while the other is read. (*stages* does it with tiles in shared
// memory, and has more than two.) Here a buffer is the registers for the fragments of 16 of k.
// While the products of these are on the tensor cores, ldmatrix loads the fragments of the next 16
// into the other buffer. A step has BK = 64 of k, so this is done four times:
//
//     products of k =        0           16           32           48
//     meanwhile loaded:     16           32           48     0 of the next step
//
// In the last column the next step's tiles have to be there already. So the barrier that waits for
// them stands before the last products of a step, not behind them. While a warp waits there, the
// tensor cores still work on the products that were started before. copies_ahead has its barrier at
// the beginning of a step. So it cannot be used, and its loop is written out here.
//
// One small thing more: the result goes through shared memory, swizzled as well, so that it leaves
// in whole rows, 16 bytes a store.
template <int BM, int BN, int BK, int kWarpsM, int kWarpsN, int kStages, int kWidth>
__global__ void __launch_bounds__(32 * kWarpsM * kWarpsN, 1)
    matmul_mma(const half* __restrict__ A, const half* __restrict__ B, half* __restrict__ C,
               int n) {
  using Tiles = MmaTiles<BM, BN, BK, kWarpsM, kWarpsN, kStages>;
  constexpr int WM = BM / kWarpsM, WN = BN / kWarpsN;  // a warp's tile
  static_assert(BK % 32 == 0, "the two buffers of fragments alternate within a step");
  extern __shared__ __align__(128) half mma_tiles[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp / kWarpsN * WM, warp_col = warp % kWarpsN * WN;
  const PairPlace pair = place_of_pair(lane);
  int tile_m, tile_n;
  tile_of_block<kSquareRows / BM>((n + BM - 1) / BM, (n + BN - 1) / BN, tile_m, tile_n);
  const int row0 = tile_m * BM, col0 = tile_n * BN;

  using Copies = TileCopies<Tiles, kWidth>;
  // This array is no member of `copies`: with such a member nvcc puts all of `copies` into memory,
  // and not into registers.
  typename Copies::Offsets offsets;
  Copies copies(A, B, row0, col0, n, offsets);

  // Two buffers of fragments.
  unsigned a[2][WM / 16][4], b[2][WN / 16][4];
  const int a_lane = swizzle<BK>(warp_row + lane % 16, lane / 16 * 8);
  const int b_lane = Tiles::kTileA + swizzle<BN>(lane % 16, warp_col + lane / 16 * 8);
  const auto load_fragments = [&](const half* tiles, int k) {
    const int buffer = k / 16 % 2;
#pragma unroll
    for (int i = 0; i < WM / 16; ++i) {
      ldmatrix_x4(a[buffer][i], tiles + (a_lane ^ k) + i * 16 * BK);
    }
#pragma unroll
    for (int j = 0; j < WN / 16; ++j) {
      ldmatrix_x4_trans(b[buffer][j], tiles + (b_lane ^ j * 16) + k * BN);
    }
  };

  const int steps = (n + BK - 1) / BK;
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < steps) copies.start(mma_tiles + stage * Tiles::kStage, offsets);
    copy_async_commit();
  }
  copy_async_wait<kStages - 2>();
  __syncthreads();
  const half* reading = mma_tiles;
  half* writing = mma_tiles + (kStages - 1) * Tiles::kStage;
  half* const end = mma_tiles + kStages * Tiles::kStage;
  load_fragments(reading, 0);
  float sum[WM / 16][WN / 8][4] = {};
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int k = 0; k < BK; k += 16) {
      if (k + 16 == BK) {  // on to the next tiles (after the last step: loaded, but never used)
        copy_async_wait<kStages - 2>();
        __syncthreads();
        reading += Tiles::kStage;
        if (reading == end) reading = mma_tiles;
      }
      load_fragments(reading, (k + 16) % BK);
      // These copies go into the stage of the step before. In the last iteration of that step all
      // warps came to the barrier above, and by then they had loaded all fragments of the step. So
      // when a warp has passed that barrier, nobody reads this stage any more.
      if (k == 0) {
        if (step + kStages - 1 < steps) copies.start(writing, offsets);
        copy_async_commit();
        writing += Tiles::kStage;
        if (writing == end) writing = mma_tiles;
      }
      const int buffer = k / 16 % 2;
      // The products go along a row of `sum`, and back along the next one: j is 0, 1, 2 ... in even
      // rows i, and ... 2, 1, 0 in odd ones. So at each turn two products that follow each other
      // have the same fragment of B. (Whether that gains something was not measured.)
#pragma unroll
      for (int i = 0; i < WM / 16; ++i) {
#pragma unroll
        for (int nth = 0; nth < WN / 8; ++nth) {
          const int j = i % 2 == 0 ? nth : WN / 8 - 1 - nth;
          mma_m16n8k16<half>(sum[i][j], a[buffer][i], b[buffer][j / 2][j % 2 * 2],
                             b[buffer][j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }

  // Each warp's tile of C goes to shared memory and from there, 8 elements a lane, to C. A barrier
  // comes first, since slow warps may still load from a stage. pack2 rounds two numbers to fp16,
  // into one register. store_halves stores 8 neighbours of a row, but not those outside of C.
  __syncthreads();
  half* staging = mma_tiles + warp * WM * WN;
#pragma unroll
  for (int i = 0; i < WM / 16; ++i) {
#pragma unroll
    for (int j = 0; j < WN / 8; ++j) {
      const int row = i * 16 + pair.row, col = j * 8 + pair.col;
      *reinterpret_cast<unsigned*>(staging + swizzle<WN>(row, col)) =
          pack2<half>(sum[i][j][0], sum[i][j][1]);
      *reinterpret_cast<unsigned*>(staging + swizzle<WN>(row + 8, col)) =
          pack2<half>(sum[i][j][2], sum[i][j][3]);
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = lane * 8; i < WM * WN; i += 32 * 8) {
    const int row = i / WN, col = i % WN;
    store_halves<kWidth == 8>(C, row0 + warp_row + row, col0 + warp_col + col, n, n,
                              *reinterpret_cast<const uint4*>(staging + swizzle<WN>(row, col)));
  }
}

// ---- How to read the kernels for Hopper ---------------------------------------------------------

// At the first reading believe what the comments say of a word, and do not open primitives/hopper/.
// docs/hopper.md has the same words with pictures. Read *one warpgroup* and *warp specialization*
// line by line: there all waits are written out. In every kernel look for two loops over the steps:
// one that starts copies, and one that multiplies.
//
//     one warpgroup          both are the same loop
//     warp specialization    they are the two branches of an `if`: some warps, the producer, copy,
//                            and others, the consumers, multiply
//     tile scheduler         around each of the two is a loop over tiles
//     clusters, rasterization    as *tile scheduler*, and what their comments speak of
//
// HOPPER_CODE is 1 where the compiler takes Hopper's instructions.

// What a stage has room for: a tile of A, BM x 64, and one of B, 64 x BN. A box is what one copy of
// Hopper's copy engine brings: some rows of 64 columns, swizzled as above. The tile of A, a
// LeftTile, is one box of BM rows. The tile of B, a RightTile, is BN / 64 boxes of 64 rows, one for
// each 64 columns.
template <int BM, int BN>
struct Stage {
  LeftTile<half, BM> a;
  RightTile<half, BN> b;
};

#if HOPPER_CODE
// A warpgroup is four warps. Sum<kCols> is 64 x kCols sums, which the 128 threads of a warpgroup
// hold together. Each thread has kCols / 2 of them in `elements`, its fragment: element i is in row
// sum.row(i) and column sum.col(i). store_sum writes a sum as fp16 to C (n x n) at (row0, col0),
// straight from the registers: four threads store 16 neighbouring bytes.
template <int kCols>
__device__ void store_sum(const Sum<kCols>& sum, half* C, int row0, int col0, int n) {
#pragma unroll
  for (int i = 0; i < kCols / 2; i += 2) {
    const int row = row0 + sum.row(i), col = col0 + sum.col(i);
    if (row < n && col < n) {  // n is even
      *reinterpret_cast<half2*>(C + static_cast<size_t>(row) * n + col) =
          __floats2half2_rn(sum.elements[i], sum.elements[i + 1]);
    }
  }
}
#endif

// ---- one warpgroup ------------------------------------------------------------------------------

// Three things are new at once, because they need each other. Their words come with the code.
//
//   1. Copies. One thread asks the copy engine, TMA (tensor memory accelerator), for a whole box
//      and goes on. No thread computes an address, and what lies outside of the matrix arrives as
//      zeros.
//   2. Arrival. An mbarrier is a barrier in shared memory, which counts arrivals of threads and
//      bytes of copies. Each stage has one, `full`, at which all threads wait for its tiles.
//   3. Products. The four warps of a warpgroup multiply 64 x 16 by 16 x 128 with one instruction,
//      wgmma, straight out of the boxes in shared memory. There is no ldmatrix, and there are no
//      fragments of A and B in registers. wgmma reads a row-major B as it is.
//
// A block is one warpgroup with a 128 x 128 tile of C, and a multiprocessor holds two such blocks.
// The tile is two sums of 64 x 128, and each of them takes 64 registers of a thread. (wgmma takes
// up to 256 columns. But two sums of 64 x 256 would take 256 registers, and a thread has at most
// 255.) In each step all threads wait for a stage, multiply, and wait for the products. At
// __syncthreads() they wait for each other. Then nobody reads the stage any more, and one thread
// has it filled again, with the tiles of the step that is kStages further on.
//
// Tiles are taken row by row here and in *warp specialization*, column by column in *tile
// scheduler* and *clusters*. *rasterization* takes them in groups again.
//
// `A` and `B` are tensor maps (CUtensorMap), made by the host. Each says what the copy engine has
// to know of a matrix. The copy engine needs a map's address. By `__grid_constant__` this is the
// address of the argument itself, not of a thread's copy.
template <int kStages>
__global__ void __launch_bounds__(128)
    matmul_wgmma(const __grid_constant__ CUtensorMap A, const __grid_constant__ CUtensorMap B,
                 half* C, int n) {
#if HOPPER_CODE
  constexpr int BM = 128, BN = 128;
  extern __shared__ __align__(1024) char shared[];  // a box begins at a multiple of 1024 bytes
  auto* stages = reinterpret_cast<Stage<BM, BN>*>(shared);
  __shared__ Barrier full[kStages];
  const int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN, steps = (n + kStepK - 1) / kStepK;

  // Starts the copies of a step, which is kStepK = 64 of k. `barrier_arrive_expect(barrier, bytes)`
  // is this thread's arrival, and announces the bytes of all copies of the step. `tensor_load(to,
  // map, row, col, barrier)` starts the copy of the box that begins at (row, col), and `barrier`
  // counts its bytes.
  const auto load = [&](int step) {
    const int s = step % kStages;
    barrier_arrive_expect(&full[s], sizeof(Stage<BM, BN>));
    tensor_load(stages[s].a.elements, &A, row0, step * kStepK, &full[s]);
    for (int box = 0; box < BN / 64; ++box) {
      tensor_load(stages[s].b.boxes[box].elements, &B, step * kStepK, col0 + 64 * box, &full[s]);
    }
  };
  // `barrier_init(barrier, arrivals)` says for how many arrivals of threads a barrier waits, and
  // barrier_init_fence() lets the copy engine see that. After the block's barrier all threads see
  // it, too.
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) barrier_init(&full[s], 1);
    barrier_init_fence();
    for (int step = 0; step < kStages && step < steps; ++step) load(step);
  }
  __syncthreads();

  // `sum.start_product(left, right, add)` starts the products of one step. If `add`, they are added
  // to the sum, else they replace it. `stage.a.rows(r)` is the left factor, 64 rows of the tile of
  // A from row r on. wgmma_wait<n>() waits until all products are done but those of the n newest
  // start_product().
  Sum<BN> upper, lower;  // rows 0 to 63 and 64 to 127

  // An mbarrier is used again and again. Each use is a *phase*: it ends when as many threads have
  // arrived as the barrier waits for, and all announced bytes have come. Phases are counted from 0.
  // `barrier_wait(barrier, parity)` waits until a phase is over. It is told only the phase's
  // *parity*, 0 for an even number and 1 for an odd one. A Ring goes around the stages.
  // `ring.stage` is the stage of the current step, and `ring.parity` is the parity to wait for: 0
  // the first time around, 1 the second time, then 0 again.
  Ring ring{kStages};
  for (int step = 0; step < steps; ++step) {
    barrier_wait(&full[ring.stage], ring.parity);
    const auto& stage = stages[ring.stage];
    upper.start_product(stage.a.rows(0), stage.b, step > 0);
    lower.start_product(stage.a.rows(64), stage.b, step > 0);
    wgmma_wait<0>();
    __syncthreads();
    if (threadIdx.x == 0 && step + kStages < steps) load(step + kStages);
    ring.advance();
  }
  store_sum(upper, C, row0, col0, n);
  store_sum(lower, C, row0 + 64, col0, n);
#endif
}

// ---- warp specialization ------------------------------------------------------------------------

// The warpgroup above stops in every step: it waits until its products are done, and has the stage
// filled again. Warp specialization means that warps of a block have different tasks. A block is
// three warpgroups. One is the producer, which only starts copies. Two are consumers. Each of them
// computes 64 rows of a 128 x 256 tile, and stores them at the end. Each stage has two barriers,
// by which producer and consumers wait for each other:
//   - full: the tiles are there. The producer announces their bytes, the copy engine brings them.
//   - empty: both consumers have multiplied the tiles, so the producer may overwrite them. Each
//     consumer arrives once, by one of its threads, with barrier_arrive(barrier), which announces
//     no bytes.
//
// A consumer does not wait for the products that it has just started. While they are under way it
// waits for the next stage, and starts that one's products. Only then does it wait for the older
// ones. When these are done it gives their stage back. So in step i it gives back the stage of step
// i - 1.
//
// What does the producer wait for? Before it fills a stage again, the consumers must have emptied
// it. Steps go around the stages, again and again, and each time around is a *lap*, counted from 0.
// In lap r the consumers wait for phase r of `full`, and the producer for phase r - 1 of `empty`.
// So their parities differ: the consumers' is `ring.parity`, the producer's `ring.parity ^ 1`. In
// lap 0 the producer has nothing to wait for: a new barrier behaves as if a phase -1, of parity 1,
// were over. With four stages, for example:
//
//     step   stage   lap    consumers: parity of full    producer: parity of empty
//      0      0       0              0                    1, over from the beginning
//      1      1       0              0                    1, over from the beginning
//      5      1       1              1                    0, over when step 1 has been multiplied
//      9      1       2              0                    1, over when step 5 has been multiplied
//
// A sum of 64 x 256 takes 128 registers of each thread of a consumer. The producer needs few, so it
// gives some of its registers to the consumers. (Only a whole warpgroup can do that. So the
// producer is one, though a single thread does its work.) Each of the 384 threads begins with 168
// registers, 64512 in all, of 65536. Then the 128 threads of the producer keep 24 each
// (registers_shrink_to), and the 256 of the consumers get 240 each (registers_grow_to): 3072 and
// 61440, again 64512.
template <int kStages>
__global__ void __launch_bounds__(384, 1)
    matmul_specialized(const __grid_constant__ CUtensorMap A, const __grid_constant__ CUtensorMap B,
                       half* C, int n) {
#if HOPPER_CODE
  constexpr int BM = 128, BN = 256;
  extern __shared__ __align__(1024) char shared[];
  auto* stages = reinterpret_cast<Stage<BM, BN>*>(shared);
  __shared__ Barrier full[kStages];
  __shared__ Barrier empty[kStages];
  const int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN, steps = (n + kStepK - 1) / kStepK;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], 2);
    }
    barrier_init_fence();
  }
  __syncthreads();

  Ring ring{kStages};
  if (threadIdx.x < 128) {
    registers_shrink_to<24>();
    if (threadIdx.x != 0) return;
    for (int step = 0; step < steps; ++step, ring.advance()) {
      Stage<BM, BN>& stage = stages[ring.stage];
      Barrier* arrived = &full[ring.stage];
      barrier_wait(&empty[ring.stage], ring.parity ^ 1);  // ends at once in the first lap
      barrier_arrive_expect(arrived, sizeof stage);
      tensor_load(stage.a.elements, &A, row0, step * kStepK, arrived);
      for (int box = 0; box < BN / 64; ++box) {
        tensor_load(stage.b.boxes[box].elements, &B, step * kStepK, col0 + 64 * box, arrived);
      }
    }
  } else {
    registers_grow_to<240>();
    const int row = (threadIdx.x / 128 - 1) * 64;
    Sum<BN> sum;
    for (int step = 0; step < steps; ++step, ring.advance()) {
      barrier_wait(&full[ring.stage], ring.parity);
      sum.start_product(stages[ring.stage].a.rows(row), stages[ring.stage].b, step > 0);
      // Wait until only the products of this step are under way. Then those of the step before are
      // done, and its stage may be filled again. One thread says so for all 128: a wgmma is one
      // operation of the whole warpgroup, so when this thread's wait ends, all of it is done.
      wgmma_wait<1>();
      if (step > 0 && threadIdx.x % 128 == 0) {
        barrier_arrive(&empty[(ring.stage + kStages - 1) % kStages]);
      }
    }
    wgmma_wait<0>();
    store_sum(sum, C, row0 + row, col0, n);
  }
#endif
}

// ---- tile scheduler -----------------------------------------------------------------------------

// What is new: blocks stay. There are no more of them than fit on the GPU, and each computes one
// tile of C after the other. Such a kernel is called persistent. The rule by which a block finds
// its next tile is its tile scheduler. Tiles have numbers, and here block b takes the tiles b,
// b + blocks, b + 2 * blocks and so on, if there are `blocks` blocks. While the consumers still
// store a tile, the producer already starts the copies for the next one.
//
// And the copy engine stores. What is done with the sums before they are written is the epilogue.
// Here the consumers round their sums to fp16, and put them into boxes in shared memory, swizzled
// as the copy engine expects them. From there the copy engine takes them to C in whole rows of 128
// bytes, while the consumers go on with the next tile. A tile is stored in two panels, of 128
// columns each. With kBuffers = 2 each panel has a buffer of its own (double buffering again), so
// the second panel need not wait until the first one has left.
//
// The loops over the steps do what those of *warp specialization* do, but they call functions of
// primitives/hopper/pipeline.cuh for it. These are explained in the kernel: read it first, and then
// wait_for_stores and store_tile, which stand before it.
template <int kStages, int kBuffers>
struct PersistentShared {
  static constexpr int BM = 128, BN = 256, kStoreCols = 128;  // kStoreCols: the columns of a panel
  // The rounded tile on its way to C: boxes of 64 rows and 64 columns, for each buffer and each of
  // the two consumers.
  Box<half, 64> out[kBuffers][2][kStoreCols / 64];
  Pipeline<Stage<BM, BN>, kStages> pipeline;  // the stages with their barriers
};

#if HOPPER_CODE
// Waits until the copy engine has read the boxes of consumer `consumer`, so that they may be
// written again. By tensor_store_wait_read<0>() a thread can wait only for stores that it has
// started itself, so the thread that starts a consumer's stores waits for them. warp_of_block() is
// the number of the warp in the block. elect_one() is true for one lane of a warp, each time the
// same one.
//
// The other threads wait at named_barrier(id, threads). That is a barrier for so many threads of
// the block: here for the 128 threads of one consumer, with the id 1 or 2. (The id 0 is the whole
// block's.) wait_for_stores is needed at the end of a kernel, too: the block's shared memory has to
// stay until the copy engine has read it.
__device__ inline void wait_for_stores(int consumer) {
  if (warp_of_block() % 4 == 0 && elect_one()) tensor_store_wait_read<0>();
  named_barrier(1 + consumer, 128);
}

// Stores a consumer's sum, 64 rows and all columns of a tile, to C at (row0, col0): the threads
// write it to shared memory, and the copy engine takes it from there.
template <int kStages, int kBuffers>
__device__ void store_tile(PersistentShared<kStages, kBuffers>& shared, int consumer,
                           const Sum<256>& sum, const CUtensorMap& C, int row0, int col0) {
  constexpr int kStoreCols = PersistentShared<kStages, kBuffers>::kStoreCols;
  // store_matrices(to, registers) is the reverse of ldmatrix: it writes registers to shared memory.
  // A warp has 16 rows of the sum. One store_matrices stores 16 columns of them, as four matrices
  // of 8 x 8, which lie in these rows and columns as they do for ldmatrix:
  //
  //     matrix 0   matrix 2
  //     matrix 1   matrix 3
  //
  // Of each 8 columns of the sum a thread has four elements: two neighbours in one row, and the two
  // in the same columns, 8 rows below. Of 16 columns it has eight, `s` below: four pairs, each in a
  // matrix of its own. For example, thread 0 has these for the first 16 columns:
  //
  //     s[0], s[1]   row 0, columns 0 and 1   matrix 0
  //     s[2], s[3]   row 8, columns 0 and 1   matrix 1
  //     s[4], s[5]   row 0, columns 8 and 9   matrix 2
  //     s[6], s[7]   row 8, columns 8 and 9   matrix 3
  //
  // And each lane passes the address of one row of one matrix, a piece of 16 bytes: lanes 0 to 15
  // those of matrices 0 and 1, lanes 16 to 31 those of matrices 2 and 3. swizzled(row, piece) is
  // where a piece lies in a box.
  const int thread = threadIdx.x % 128;
  const int row = thread / 32 * 16 + thread % 16, piece = thread % 32 / 16;
#pragma unroll
  for (int panel = 0; panel < 256 / kStoreCols; ++panel) {
    auto& out = shared.out[panel % kBuffers][consumer];
    if (panel >= kBuffers) wait_for_stores(consumer);
#pragma unroll
    for (int c = 0; c < kStoreCols; c += 16) {
      const float* s = sum.elements + (panel * kStoreCols + c) / 2;
      uint32_t registers[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) registers[m] = pack2<half>(s[2 * m], s[2 * m + 1]);
      store_matrices(&out[c / 64].elements[swizzled(row, c % 64 / 8 + piece)], registers);
    }
    shared_fence();  // the copy engine will see what this thread has written to shared memory
    named_barrier(1 + consumer, 128);
    // tensor_store(map, row, col, from) has the copy engine store a box. tensor_store_commit()
    // closes the thread's stores as a group, which wait_for_stores waits for.
    if (warp_of_block() % 4 == 0 && elect_one()) {
#pragma unroll
      for (int box = 0; box < kStoreCols / 64; ++box) {
        tensor_store(&C, row0, col0 + panel * kStoreCols + 64 * box, out[box].elements);
      }
      tensor_store_commit();
    }
  }
}
#endif

template <int kStages, int kBuffers>
__global__ void __launch_bounds__(384, 1)
    matmul_persistent(const __grid_constant__ CUtensorMap A, const __grid_constant__ CUtensorMap B,
                      const __grid_constant__ CUtensorMap C, int n) {
#if HOPPER_CODE
  using Shared = PersistentShared<kStages, kBuffers>;
  constexpr int BM = Shared::BM, BN = Shared::BN;
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  // The block is alone, and alone.meet() is its barrier. (In *clusters* a BlockGrid is two blocks.)
  const BlockGrid<1, 1> alone;
  const int steps = (n + kStepK - 1) / kStepK;
  const int tile_rows = (n + BM - 1) / BM, tile_cols = (n + BN - 1) / BN;
  const int tiles = tile_rows * tile_cols, blocks = gridDim.x;
  // Prepares the barriers. A stage is empty after 2 arrivals, those of the two consumers.
  if (threadIdx.x == 0) prepare(shared.pipeline, 2);
  alone.meet();

  const int warp = warp_of_block();
  if (warp < 4) {
    registers_shrink_to<24>();
    if (warp == 0 && elect_one()) {
      Writer writer(shared.pipeline);
      for (int tile = blockIdx.x; tile < tiles; tile += blocks) {
        const int row = tile % tile_rows * BM, col = tile / tile_rows * BN;
        // writer.put waits until the next stage is empty, announces the stage's bytes, and calls
        // the function below, in which each alone.load starts the copies of a tile. The
        // third argument of alone.load is the tile's first row of A or first column of B, and the
        // fourth is k. (In tensor_load, above, these are always a row and a column.)
        for (int step = 0; step < steps; ++step) {
          writer.put([&](Stage<BM, BN>& stage, Barrier* arrived) {
            alone.load(stage.a, &A, row, step * kStepK, arrived);
            alone.load(stage.b, &B, col, step * kStepK, arrived);
          });
        }
      }
    }
  } else {
    registers_grow_to<240>();
    const int consumer = threadIdx.x / 128 - 1;
    Reader reader(shared.pipeline, alone);
    for (int tile = blockIdx.x; tile < tiles; tile += blocks) {
      const int row = tile % tile_rows * BM, col = tile / tile_rows * BN;
      Sum<BN> sum;
      // reader.take waits until the next stage is full, and calls the function below, which starts
      // the stage's products. `add` is false in the first step of a tile, and true in all others.
      // Then take waits until the products of the step before are done, and gives back their stage.
      // After the last step reader.finish does that for the last products.
      for (int step = 0; step < steps; ++step) {
        reader.take([&](const Stage<BM, BN>& stage, bool add) {
          sum.start_product(stage.a.rows(64 * consumer), stage.b, add);
        });
      }
      wait_for_stores(consumer);  // while the last products are on their way
      reader.finish();
      store_tile(shared, consumer, sum, C, row + 64 * consumer, col);
    }
    wait_for_stores(consumer);
  }
#endif
}

// ---- clusters -----------------------------------------------------------------------------------

// A cluster is a group of blocks that run at the same time and reach each other's shared memory,
// which is then called distributed shared memory. Here a cluster is two blocks, as
// HOPPER_CLUSTER(2) on the kernel says. Their tiles lie one below the other in C. Both need the
// same tile of B, which has four boxes. Each block fetches two of them and *multicasts* them: one
// copy arrives in both blocks. So B is read from the L2 cache once, not twice:
//
//                            block 0                     block 1
//     a tile of A            its own, for itself         its own, for itself
//     the tile of B          boxes 0 and 1, for both     boxes 2 and 3, for both
//
// Three things follow:
//   - A stage is empty only when the consumers of both blocks have read it. Each of these four
//     tells both producers. (BlockGrid<2, 1> does that, and knows who copies what.)
//   - Each block announces all bytes of its stage: those of its own copies, and those of the half
//     that the other block sends. That half may come before its bytes are announced. This does no
//     harm: the phase cannot end before this block's producer has arrived, and the producer arrives
//     and announces all bytes by one instruction, barrier_arrive_expect.
//   - A block may not end while consumers of the other block still arrive at its `empty` barriers:
//     `writer.finish` waits until they have arrived.
template <int kStages, int kBuffers>
__global__ void HOPPER_CLUSTER(2) __launch_bounds__(384, 1)
    matmul_clusters(const __grid_constant__ CUtensorMap A, const __grid_constant__ CUtensorMap B,
                    const __grid_constant__ CUtensorMap C, int n) {
#if HOPPER_CODE
  using Shared = PersistentShared<kStages, kBuffers>;
  constexpr int BM = Shared::BM, BN = Shared::BN;
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  // Two blocks with neighbouring rows. `cluster.rank` is the number of this block in its cluster, 0
  // or 1. `cluster.cluster` is the number of its cluster, and `cluster.clusters` says how many
  // clusters there are. cluster.load starts the copies that the table above gives to this block.
  // cluster.meet() is a barrier for the threads of both blocks.
  const BlockGrid<2, 1> cluster;
  const int steps = (n + kStepK - 1) / kStepK;
  // A tile of a cluster has 2 BM rows and BN columns.
  const int tile_rows = (n + 2 * BM - 1) / (2 * BM), tile_cols = (n + BN - 1) / BN;
  const int tiles = tile_rows * tile_cols, clusters = cluster.clusters;
  if (threadIdx.x == 0) prepare(shared.pipeline, 4);  // two consumers in each of two blocks
  cluster.meet();

  const int warp = warp_of_block();
  if (warp < 4) {
    registers_shrink_to<24>();
    if (warp == 0 && elect_one()) {
      Writer writer(shared.pipeline);
      for (int tile = cluster.cluster; tile < tiles; tile += clusters) {
        const int row = (2 * (tile % tile_rows) + cluster.rank) * BM, col = tile / tile_rows * BN;
        for (int step = 0; step < steps; ++step) {
          writer.put([&](Stage<BM, BN>& stage, Barrier* arrived) {
            cluster.load(stage.a, &A, row, step * kStepK, arrived);
            cluster.load(stage.b, &B, col, step * kStepK, arrived);
          });
        }
      }
      writer.finish();
    }
  } else {
    registers_grow_to<240>();
    const int consumer = threadIdx.x / 128 - 1;
    Reader reader(shared.pipeline, cluster);
    for (int tile = cluster.cluster; tile < tiles; tile += clusters) {
      const int row = (2 * (tile % tile_rows) + cluster.rank) * BM, col = tile / tile_rows * BN;
      Sum<BN> sum;
      for (int step = 0; step < steps; ++step) {
        reader.take([&](const Stage<BM, BN>& stage, bool add) {
          sum.start_product(stage.a.rows(64 * consumer), stage.b, add);
        });
      }
      wait_for_stores(consumer);  // while the last products are on their way
      reader.finish();
      store_tile(shared, consumer, sum, C, row + 64 * consumer, col);
    }
    wait_for_stores(consumer);
  }
#endif
}

// ---- rasterization ------------------------------------------------------------------------------

// Rasterization is the order in which tiles are taken; here it is another one. (A tile is that of a
// cluster here, 256 x 256.) By now the tensor cores wait so seldom that the card reaches the limit
// of its power, and its clock falls. What still helps is to need less power. To bring a byte from
// memory takes more power than to bring it from the L2 cache. So as much as possible of what a tile
// needs should still be in that cache:
//   - Tiles are taken in groups of kGroup rows of tiles, so that those of one round, which all
//     clusters work on at the same time, form a square of C (as with tile_of_block, above).
//   - Every second round is walked from the end of k to its beginning: each cluster's second tile,
//     its fourth and so on. So a round begins with the part of k with which the round before ended.
//     Where both rounds need the same rows of A, as they do within a group, the L2 cache still has
//     that part of these rows.
//   - Every second group is taken from the right to the left. So the last tiles of a group and the
//     first tiles of the next one need the same columns of B. For example, C has 4 x 3 tiles, and a
//     group has two rows of them. Then this is their order:
//
//         group 0     0   2   4
//                     1   3   5
//         group 1    10   8   6
//                    11   9   7
//
//   - What one cluster has read from memory, the other clusters find in the L2 cache. If the cache
//     does not hold all that the tiles of a square need, they find it there only while all clusters
//     are at about the same k. So then the clusters keep in step: Pace makes the fast ones wait.
//     (At N = 4096 a square needs 34 MB. The H100's L2 cache holds that, and nobody waits.)

#if HOPPER_CODE
// dividend / divisor, rounded down, for numbers from 0 to 2^20. It is computed in fp32, in 6
// instructions instead of 30. The 0.5 keeps the quotient at least 0.5 / divisor away from every
// whole number, and __fdividef is wrong by less than that.
__device__ inline int quotient(int dividend, int divisor) {
  return static_cast<int>(__fdividef(dividend + 0.5f, static_cast<float>(divisor)));
}

// Keeps the clusters in step. A pace is kSteps steps. In each cluster the producer of block 0
// counts how many paces it has made. It also adds each pace to a number in memory, the total of all
// clusters, by GridCount's atomic operations. A cluster that is more than one pace ahead of the
// mean waits. For example, one of 64 clusters that has just made its third pace waits until the
// total is 2 * 64. But it looks at the total only kPatience times: waiting saves reads of memory,
// but the result does not need it, and some clusters may not have got a multiprocessor yet.
struct Pace {
  static constexpr int kSteps = 16, kPatience = 256;  // kPatience: how often to look
  unsigned* total;
  unsigned clusters, mine = 0;

  __device__ void next() {
    const GridCount counter(*total);
    counter.fetch_add(1, cuda::memory_order_relaxed);
    // Without the pause the compiler would remove the loop, since the loop has no result.
#pragma unroll 1
    for (int look = 0; look < kPatience; ++look) {
      if (counter.load(cuda::memory_order_relaxed) >= mine * clusters) break;
      __nanosleep(20);
    }
    ++mine;
  }

  // Nobody shall wait for this cluster any more: it counts as having made `most` paces. When all
  // clusters have done so, the number is most * clusters, and the one that adds the last of them
  // leaves a 0 for the next launch.
  __device__ void end(unsigned most) {
    const GridCount counter(*total);
    const unsigned rest = most - mine;
    if (counter.fetch_add(rest, cuda::memory_order_relaxed) + rest == most * clusters) {
      counter.store(0, cuda::memory_order_relaxed);
    }
  }
};
#endif

// `progress` points to the one counter that Pace has for all clusters. It is 0 before the launch
// and after it. If `progress` is null, the clusters do not keep in step.
template <int kStages, int kBuffers, int kGroup>
__global__ void HOPPER_CLUSTER(2) __launch_bounds__(384, 1)
    matmul_rasterized(const __grid_constant__ CUtensorMap A, const __grid_constant__ CUtensorMap B,
                      const __grid_constant__ CUtensorMap C, int n, unsigned* progress) {
#if HOPPER_CODE
  using Shared = PersistentShared<kStages, kBuffers>;
  constexpr int BM = Shared::BM, BN = Shared::BN;
  extern __shared__ __align__(1024) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const BlockGrid<2, 1> cluster;  // two blocks with neighbouring rows
  const int steps = (n + kStepK - 1) / kStepK;

  // A tile of a cluster has 2 BM rows and BN columns.
  const int tile_rows = (n + 2 * BM - 1) / (2 * BM), tile_cols = (n + BN - 1) / BN;
  const int tiles = tile_rows * tile_cols, clusters = cluster.clusters;
  struct Place {
    int row, col;
  };
  // Where a tile is: the order goes through groups of kGroup rows of tiles, within a group column
  // by column, and in every second group from the right to the left.
  const auto place = [&](int tile) {
    const int group = quotient(tile, kGroup * tile_cols);
    const int within = tile - group * kGroup * tile_cols;
    const int rows = min(kGroup, tile_rows - group * kGroup), column = quotient(within, rows);
    return Place{(2 * (group * kGroup + within - column * rows) + cluster.rank) * BM,
                 (group % 2 == 0 ? column : tile_cols - 1 - column) * BN};
  };
  if (threadIdx.x == 0) prepare(shared.pipeline, 4);  // two consumers in each of two blocks
  cluster.meet();

  const int warp = warp_of_block();
  if (warp < 4) {
    registers_shrink_to<24>();
    if (warp == 0 && elect_one()) {
      Writer writer(shared.pipeline);
      const bool in_step = progress != nullptr && cluster.rank == 0;
      Pace pace{progress, static_cast<unsigned>(clusters)};
      bool backward = false;
      for (int tile = cluster.cluster; tile < tiles; tile += clusters, backward = !backward) {
        const Place at = place(tile);
        for (int step = 0; step < steps; ++step) {
          if (in_step && step % Pace::kSteps == Pace::kSteps - 1) pace.next();
          const int k = (backward ? steps - 1 - step : step) * kStepK;
          writer.put([&](Stage<BM, BN>& stage, Barrier* arrived) {
            cluster.load(stage.a, &A, at.row, k, arrived);
            cluster.load(stage.b, &B, at.col, k, arrived);
          });
        }
      }
      writer.finish();
      // As many paces as a cluster makes that has a tile in each round.
      if (in_step) pace.end((tiles + clusters - 1) / clusters * (steps / Pace::kSteps));
    }
  } else {
    registers_grow_to<240>();
    const int consumer = threadIdx.x / 128 - 1;
    Reader reader(shared.pipeline, cluster);
    for (int tile = cluster.cluster; tile < tiles; tile += clusters) {
      Sum<BN> sum;
      for (int step = 0; step < steps; ++step) {
        reader.take([&](const Stage<BM, BN>& stage, bool add) {
          sum.start_product(stage.a.rows(64 * consumer), stage.b, add);
        });
      }
      wait_for_stores(consumer);  // while the last products are on their way
      reader.finish();
      const Place at = place(tile);
      store_tile(shared, consumer, sum, C, at.row + 64 * consumer, at.col);
    }
    wait_for_stores(consumer);
  }
#endif
}

// -------------------------------------------------------------------------------------------------

// Blocks of BM x BN that cover an n x n matrix.
template <int BM, int BN>
dim3 tiles_of(int64_t n) {
  return dim3(static_cast<unsigned>((n + BN - 1) / BN), static_cast<unsigned>((n + BM - 1) / BM));
}

template <bool kWhole>
void add_wmma_global(Problem& square, Buffer<half> A, Buffer<half> B, Buffer<half> C, int n) {
  square.kernel("wmma global", Role::ours, [=] {
    matmul_wmma_global<kWhole>
        <<<tiles_of<16 * kSide, 16 * kSide>(n), dim3(32, kSide, kSide)>>>(A, B, C, n);
  });
}

template <bool kAligned>
void add_wmma_shared(Problem& square, Buffer<half> A, Buffer<half> B, Buffer<half> C, int n) {
  square.kernel("wmma shared", Role::ours, [=] {
    matmul_wmma_shared<128, 128, 32, 2, 4, kAligned><<<tiles_of<128, 128>(n), 256>>>(A, B, C, n);
  });
}

// 128 x 128 tiles, 32 of k: *swizzled tiles* and *stages*.
template <int kWidth>
void add_small_mma(Problem& square, Buffer<half> A, Buffer<half> B, Buffer<half> C, int n) {
  using Tiles = MmaTiles<128, 128, 32, 2, 4, 3>;
  constexpr int kBytes = Tiles::kStage * sizeof(half);
  square.kernel("swizzled tiles", Role::ours, [=] {
    matmul_ldmatrix<128, 128, 32, 2, 4, kWidth>
        <<<Tiles::blocks(n), Tiles::kThreads, kBytes>>>(A, B, C, n);
  });
  square.kernel("stages", Role::ours, [=] {
    matmul_stages<128, 128, 32, 2, 4, 3, kWidth>
        <<<Tiles::blocks(n), Tiles::kThreads, 3 * kBytes>>>(A, B, C, n);
  });
}

// Adds *swizzled tiles* and *stages* as above, and *lean* and *double buffering*, both with the
// tiles that the parameters say.
template <int BM, int BN, int BK, int kWarpsM, int kWarpsN, int kStages, int kWidth>
void add_mma(Problem& square, Buffer<half> A, Buffer<half> B, Buffer<half> C, int n) {
  add_small_mma<kWidth>(square, A, B, C, n);
  using Tiles = MmaTiles<BM, BN, BK, kWarpsM, kWarpsN, kStages>;
  // A block gets more than 48 KB of shared memory only if the host allows its kernel to.
  allow_shared_bytes(matmul_lean<BM, BN, BK, kWarpsM, kWarpsN, kStages, kWidth>,
                     Tiles::kSharedBytes);
  square
      .kernel("lean", Role::ours,
              [=] {
                matmul_lean<BM, BN, BK, kWarpsM, kWarpsN, kStages, kWidth>
                    <<<Tiles::blocks(n), Tiles::kThreads, Tiles::kSharedBytes>>>(A, B, C, n);
              })
      .needs_shared(Tiles::kSharedBytes);
  allow_shared_bytes(matmul_mma<BM, BN, BK, kWarpsM, kWarpsN, kStages, kWidth>,
                     Tiles::kSharedBytes);
  square
      .kernel("double buffering", Role::ours,
              [=] {
                matmul_mma<BM, BN, BK, kWarpsM, kWarpsN, kStages, kWidth>
                    <<<Tiles::blocks(n), Tiles::kThreads, Tiles::kSharedBytes>>>(A, B, C, n);
              })
      .needs_shared(Tiles::kSharedBytes);
}

// The tensor map of a factor, which many blocks read. A copy brings a box of `rows` rows. (`false`
// says that nothing is rounded, and the last n that a row begins n elements after the one above.)
CUtensorMap map_of(const half* matrix, int n, int rows) {
  return tensor_map<half>(matrix, n, n, rows, false, n, Reads::often);
}

template <int kStages, int kBuffers>
void add_persistent(Problem& square, Buffer<half> A, Buffer<half> B, Buffer<half> C, int n,
                    const Device& device) {
  constexpr int kBytes = sizeof(PersistentShared<kStages, kBuffers>), kGroup = 8;
  const dim3 tiles = tiles_of<128, 256>(n), pairs = tiles_of<256, 256>(n);  // pairs of tiles
  allow_shared_bytes(matmul_persistent<kStages, kBuffers>, kBytes);
  // `persistent` says how many blocks to launch, if device.sms of them fit. Take 512 tiles and room
  // for 132 blocks: some blocks get four tiles, and none gets more. With 128 blocks each gets four,
  // so 128 are enough.
  const unsigned blocks = persistent(int64_t{tiles.x} * tiles.y, device.sms);
  square
      .kernel("tile scheduler", Role::ours,
              [=] {
                const CUtensorMap a = map_of(A, n, 128);
                const CUtensorMap b = map_of(B, n, kStepK);
                const CUtensorMap c = tensor_map<half>(C, n, n, 64);
                matmul_persistent<kStages, kBuffers><<<blocks, 384, kBytes>>>(a, b, c, n);
              })
      .needs_shared(kBytes)
      .hopper_only();

  allow_shared_bytes(matmul_clusters<kStages, kBuffers>, kBytes);
  const auto kernel = matmul_rasterized<kStages, kBuffers, kGroup>;
  allow_shared_bytes(kernel, kBytes);
  // resident_clusters says how many clusters the GPU holds at a time.
  const unsigned clusters =
      persistent(int64_t{pairs.x} * pairs.y, resident_clusters(kernel, 2, 384, kBytes));
  square
      .kernel("clusters", Role::ours,
              [=] {
                const CUtensorMap a = map_of(A, n, 128);
                const CUtensorMap b = map_of(B, n, kStepK);
                const CUtensorMap c = tensor_map<half>(C, n, n, 64);
                matmul_clusters<kStages, kBuffers><<<2 * clusters, 384, kBytes>>>(a, b, c, n);
              })
      .needs_shared(kBytes)
      .hopper_only();

  // How many bytes the tiles of a square of 256 kGroup rows and as many columns read.
  const int64_t square_bytes = int64_t{2 * 256 * kGroup * sizeof(half)} * n;
  const bool in_step = square_bytes > device.l2_bytes;
  const auto progress = square.workspace<unsigned>(1);
  square
      .kernel("rasterization", Role::ours,
              [=] {
                const CUtensorMap a = map_of(A, n, 128);
                const CUtensorMap b = map_of(B, n, kStepK);
                const CUtensorMap c = tensor_map<half>(C, n, n, 64);
                matmul_rasterized<kStages, kBuffers, kGroup><<<2 * clusters, 384, kBytes>>>(
                    a, b, c, n, in_step ? progress.data() : nullptr);
              })
      .needs_shared(kBytes)
      .hopper_only();
}

// Adds the kernels that need TMA and wgmma, and rows of a multiple of 16 bytes.
void add_hopper_kernels(Problem& square, Buffer<half> A, Buffer<half> B, Buffer<half> C, int n,
                        const Device& device) {
  constexpr int kWgmmaBytes = 3 * sizeof(Stage<128, 128>);
  allow_shared_bytes(matmul_wgmma<3>, kWgmmaBytes);
  square
      .kernel("one warpgroup", Role::ours,
              [=] {
                const CUtensorMap a = map_of(A, n, 128);
                const CUtensorMap b = map_of(B, n, kStepK);
                matmul_wgmma<3><<<tiles_of<128, 128>(n), 128, kWgmmaBytes>>>(a, b, C, n);
              })
      .needs_shared(kWgmmaBytes)
      .hopper_only();

  constexpr int kSpecializedBytes = 4 * sizeof(Stage<128, 256>);
  allow_shared_bytes(matmul_specialized<4>, kSpecializedBytes);
  square
      .kernel("warp specialization", Role::ours,
              [=] {
                const CUtensorMap a = map_of(A, n, 128);
                const CUtensorMap b = map_of(B, n, kStepK);
                matmul_specialized<4>
                    <<<tiles_of<128, 256>(n), 384, kSpecializedBytes>>>(a, b, C, n);
              })
      .needs_shared(kSpecializedBytes)
      .hopper_only();

  // Where a cluster has one tile at most, shared memory is better spent on stages: 4 of them and
  // one buffer for results, instead of 3 and two.
  const dim3 grid = tiles_of<256, 256>(n);
  int64_t{grid.x} * grid.y <= device.sms / 2 ? add_persistent<4, 1>(square, A, B, C, n, device)
                                             : add_persistent<3, 2>(square, A, B, C, n, device);
}

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "3_matmul_tensorcore",
                 .title = "C = A B by tensor cores: fp16, accumulated in fp32",
                 .n_meaning = "the matrices are N x N",
                 .n_gpu = 4096,
                 .n_cpu = 264});
  const int64_t n = lesson.n();

  Cublas blas;
  SquareMatmul<half> matmul(lesson, blas, "square", "fp16", Rate::fp16,
                            dot_tolerance(n, tensor_core_sum(n), kRoundoffFp16));
  Problem& square = matmul.problem;
  const auto A = matmul.A, B = matmul.B, C = matmul.C;

  square.kernel("cuBLAS fp16", Role::library, [&] {
    const float one = 1, zero = 0;  // row-major: B and A swapped, see lesson 4
    CUBLAS_CHECK(cublasGemmEx(blas, CUBLAS_OP_N, CUBLAS_OP_N, n, n, n, &one,  //
                              B, CUDA_R_16F, n, A, CUDA_R_16F, n, &zero, C, CUDA_R_16F, n,
                              CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
  });
  LibraryProduct fastest(square, {n, n, n}, CUDA_R_16F, CUBLAS_COMPUTE_32F);
  square.kernel("cuBLASLt, best", Role::library, [&] { fastest(A, B, C); });
  n % 16 == 0 ? add_wmma_global<true>(square, A, B, C, n)
              : add_wmma_global<false>(square, A, B, C, n);
  n % 8 == 0 ? add_wmma_shared<true>(square, A, B, C, n)
             : add_wmma_shared<false>(square, A, B, C, n);
  if (n % 2 != 0) {
    add_mma<128, 128, 32, 2, 4, 3, 1>(square, A, B, C, n);
  } else if (n % 8 != 0) {
    add_mma<128, 128, 32, 2, 4, 3, 2>(square, A, B, C, n);
  } else if (lesson.device().shared_bytes >= 144 << 10) {
    add_mma<256, 128, 64, 4, 2, 3, 8>(square, A, B, C, n);
  } else {  // less shared memory: such as compute capability 7.5, 8.6, 8.9
    add_mma<128, 128, 32, 2, 4, 3, 8>(square, A, B, C, n);
  }

  if (n % 8 == 0) {
    add_hopper_kernels(square, A, B, C, n, lesson.device());
  } else {
    lesson.note(
        "N is no multiple of 8: rows are not aligned to 16 bytes, as TMA needs them to be. The "
        "kernels for Hopper are left out.");
  }
  square.compare("wmma shared", "wmma global", "Tiles in shared memory: % times as fast.");
  square.compare("double buffering", "wmma shared",
                 "Tiles and fragments loaded in advance, few other instructions: % times as fast.");
  square.compare("one warpgroup", "double buffering",
                 "The copy engine, and products of a whole warpgroup: % times as fast.");
  square.compare("rasterization", "one warpgroup",
                 "Specialized warps, clusters, and blocks that stay: % times as fast.");
  square.compare("rasterization", "cuBLASLt, best",
                 "The last kernel runs at % of cuBLASLt's rate.");
  return lesson.run();
}
