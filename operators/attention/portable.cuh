// Attention on any GPU from compute capability 8.0 on (in fp16 from 7.5), for any shape: *tensor
// cores* of bonus_attention.cu for rows that lie anywhere, of any width, and for keys that are
// divided among blocks. And the kernel that puts the parts together which that leaves.
#pragma once

#include "operators/attention/online.cuh"
#include "primitives/async_copy.cuh"
#include "primitives/early_launch.cuh"
#include "primitives/fragments.cuh"

namespace operators::attention {

/// Results of a part of the keys: out (parts, batch, heads, queries, width), as if there were no
/// other keys, fp32, and sums of exponentials (parts, batch, heads, queries).
struct AttentionParts {
  float* out;
  PartSum* sums;
};

/// A block has kRows rows of Q, a warp kRows / kWarps of them; K and V come kKeys at a time, in two
/// stages. Widths
/// up to kWidth, a multiple of 64, are filled up with zeros. kAligned: rows are multiples of 16
/// bytes, and begin at such.
template <typename T_, int kWidth_, int kRows_, int kKeys_, int kWarps_, bool kAligned_>
struct PortableTile {
  using T = T_;
  static constexpr int kWidth = kWidth_, kRows = kRows_, kKeys = kKeys_, kWarps = kWarps_;
  static constexpr bool kAligned = kAligned_;
  static constexpr int kThreads = 32 * kWarps, kWarpRows = kRows / kWarps;
  static constexpr int kCount = kWarpRows / 16;  // matrices of 16 rows that a warp has
  static constexpr int kSharedBytes = (kRows + 4 * kKeys) * kWidth * sizeof(T);
  static_assert(kWarpRows % 16 == 0 && kKeys % 16 == 0);
};

/// Starts the copy of kRows rows to shared memory, where they lie as swizzle<kWidth>() says: rows
/// from `from` on, `stride` elements apart, of which `there` exist. Zeros for others, and from
/// column `width` on.
template <class Tile, int kRows>
__device__ __forceinline__ void copy_rows(typename Tile::T* to, const typename Tile::T* from,
                                          int64_t stride, int there, int width) {
  constexpr int kPieces = Tile::kWidth / 8, kStep = Tile::kThreads / kPieces;
  static_assert(Tile::kThreads % kPieces == 0 && kRows % kStep == 0);
  const int row = threadIdx.x / kPieces, col = threadIdx.x % kPieces * 8;
  const typename Tile::T* piece = from + row * stride + col;
#pragma unroll
  for (int r = 0; r < kRows; r += kStep, piece += kStep * stride) {
    typename Tile::T* const at = to + swizzle<Tile::kWidth>(row + r, col);
    const bool inside = row + r < there;
    if constexpr (Tile::kAligned) {
      copy_async<16>(at, piece, inside && col < width);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        at[e] = inside && col + e < width ? piece[e] : typename Tile::T(0.0f);
      }
    }
  }
}

/// The same of rows of Q of `pack` heads, row r being query r / pack of head r % pack.
template <class Tile>
__device__ __forceinline__ void copy_packed_rows(typename Tile::T* to, const typename Tile::T* from,
                                                 const Strides& strides, int row0, int pack,
                                                 int there, int width) {
  constexpr int kPieces = Tile::kWidth / 8;
  for (int i = threadIdx.x; i < Tile::kRows * kPieces; i += Tile::kThreads) {
    const int row = row0 + i / kPieces, col = i % kPieces * 8;
    const typename Tile::T* const piece =
        from + row / pack * strides.row + row % pack * strides.head + col;
    typename Tile::T* const at = to + swizzle<Tile::kWidth>(i / kPieces, col);
    if constexpr (Tile::kAligned) {
      copy_async<16>(at, piece, row < there && col < width);
    } else {
      for (int e = 0; e < 8; ++e) {
        at[e] = row < there && col + e < width ? piece[e] : typename Tile::T(0.0f);
      }
    }
  }
}

/// Block (x, y): rows of Q of a head, or of `pack` heads that share keys, and part y of the keys
/// that they see. kSplit: there are several parts.
template <class Tile, bool kSplit>
__global__ void __launch_bounds__(Tile::kThreads)
    attention_portable(AttentionOperands<typename Tile::T> in, int pack, AttentionParts parts) {
  using T = typename Tile::T;
  constexpr int kWidth = Tile::kWidth, kKeys = Tile::kKeys, kCount = Tile::kCount;
  extern __shared__ __align__(128) char shared[];
  T* const Q_tile = reinterpret_cast<T*>(shared);
  T* const stages = Q_tile + Tile::kRows * kWidth;  // [2][K and V][kKeys][kWidth]

  const int row_tiles = (in.queries * pack + Tile::kRows - 1) / Tile::kRows;
  const int turn = blockIdx.x % row_tiles, sequence = blockIdx.x / row_tiles;
  // The rows with the most keys first: their blocks take the longest.
  const int row0 = (in.causal ? row_tiles - 1 - turn : turn) * Tile::kRows;
  const int packs = in.heads / pack, batch = sequence / packs, head0 = sequence % packs * pack;
  const int kv_head = head0 / in.group;
  const T* const Q = in.Q + batch * in.q.batch + head0 * in.q.head;
  const T* const K = in.K + batch * in.k.batch + kv_head * in.k.head;
  const T* const V = in.V + batch * in.v.batch + kv_head * in.v.head;
  T* const out = in.out + batch * in.o.batch + head0 * in.o.head;

  const int last = min(in.queries, (row0 + Tile::kRows - 1) / pack + 1) - 1;
  const int tiles = (in.limit(last) + kKeys - 1) / kKeys;
  const int splits = gridDim.y, part = blockIdx.y;
  const int first = static_cast<int>(int64_t{tiles} * part / splits);
  const int end = static_cast<int>(int64_t{tiles} * (part + 1) / splits);

  const auto stage_of = [&](int step) { return stages + step % 2 * (2 * kKeys * kWidth); };
  const auto copy_tile = [&](int step) {
    const int tile = end - 1 - step, key = tile * kKeys;
    if (step == 0) copy_packed_rows<Tile>(Q_tile, Q, in.q, row0, pack, in.queries * pack, in.width);
    if (tile < first) return;
    T* const stage = stage_of(step);
    copy_rows<Tile, kKeys>(stage, K + key * in.k.row, in.k.row, in.keys - key, in.width);
    copy_rows<Tile, kKeys>(stage + kKeys * kWidth, V + key * in.v.row, in.v.row, in.keys - key,
                           in.width);
  };
  auto ahead = copies_ahead<2>(copy_tile);

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * Tile::kWarpRows;
  const float scale = in.scale * kLog2E;
  int limits[kCount][2], whole = in.keys;
#pragma unroll
  for (int m = 0; m < kCount; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      limits[m][r] = in.limit((row0 + warp_row + 16 * m + 8 * r + lane / 4) / pack);
    }
  }
  whole = in.limit((row0 + warp_row) / pack) / kKeys;

  OnlineRows online[kCount];
  float result[kCount][kWidth / 8][4] = {};
  for (int tile = end - 1; tile >= first; --tile) {
    const T* const K_tile = stage_of(ahead.next());
    const T* const V_tile = K_tile + kKeys * kWidth;
    float logits[kCount][kKeys / 8][4];
#pragma unroll
    for (int i = 0; i < kCount * kKeys / 2; ++i) (&logits[0][0][0])[i] = 0;
#pragma unroll
    for (int k = 0; k < kWidth; k += 16) {
      unsigned q[kCount][4], keys[kKeys / 16][4];
      load_left<kWidth>(q, Q_tile, warp_row, k);
      load_right_transposed<kWidth>(keys, K_tile, k, 0);
      add_product<T>(logits, q, keys);
    }
#pragma unroll
    for (int m = 0; m < kCount; ++m) {
      if (tile >= whole) {
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) {
          const int key = tile * kKeys + i / 4 * 8 + lane % 4 * 2 + i % 2;
          if (key >= limits[m][i / 2 % 2]) logits[m][i / 4][i % 4] = minus_infinity();
        }
      }
      float factor[2];
      if (online[m].tile_exponentials(reinterpret_cast<float(&)[kKeys / 2]>(logits[m]), scale,
                                      factor)) {
#pragma unroll
        for (int j = 0; j < kWidth / 8; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) result[m][j][i] *= factor[i / 2];
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kKeys; k += 16) {
      unsigned probs[kCount][4];
#pragma unroll
      for (int m = 0; m < kCount; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* const pair = &logits[m][k / 8 + i / 2][i % 2 * 2];
          probs[m][i] = pack2<T>(pair[0], pair[1]);
        }
      }
#pragma unroll
      for (int col = 0; col < kWidth; col += 64) {
        unsigned values[4][4];
        load_right<kWidth>(values, V_tile, k, col);
#pragma unroll
        for (int m = 0; m < kCount; ++m) {
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            mma_m16n8k16<T>(result[m][col / 8 + j], probs[m], values[j / 2][j % 2 * 2],
                            values[j / 2][j % 2 * 2 + 1]);
          }
        }
      }
    }
  }
  ahead.next();  // without keys Q is still on its way to where the results pass

#pragma unroll
  for (int m = 0; m < kCount; ++m) {
    float factor[2];
    PartSum whole[2];
    online[m].finish(scale, factor, whole);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row0 + warp_row + 16 * m + 8 * r + lane / 4, query = row / pack;
      if (query >= in.queries) continue;
      const size_t place =
          (static_cast<size_t>(batch) * in.heads + head0 + row % pack) * in.queries + query;
      if constexpr (kSplit) {
        const size_t all = static_cast<size_t>(gridDim.x / row_tiles) * pack * in.queries;
        const size_t to = part * all + place;
        if (lane % 4 == 0) parts.sums[to] = whole[r];
#pragma unroll
        for (int j = 0; j < kWidth / 8; ++j) {
          *reinterpret_cast<float2*>(parts.out + to * kWidth + 8 * j + lane % 4 * 2) =
              make_float2(result[m][j][2 * r] * factor[r], result[m][j][2 * r + 1] * factor[r]);
        }
      } else if (in.log_sums != nullptr && lane % 4 == 0) {
        in.log_sums[place] = whole[r].logarithm();
      }
    }
#pragma unroll
    for (int j = 0; j < kWidth / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) result[m][j][i] *= factor[i / 2];
    }
  }
  if constexpr (kSplit) return;
  // The results leave through the warp's own rows of Q, 16 bytes a lane.
  to_tile<kWidth>(Q_tile, warp_row, 0, result);
  __syncwarp();
  constexpr int kPieces = kWidth / 8;
  for (int i = lane; i < Tile::kWarpRows * kPieces; i += 32) {
    const int r = warp_row + i / kPieces, col = i % kPieces * 8, row = row0 + r;
    if (row / pack >= in.queries) continue;
    T* const to = out + row / pack * in.o.row + row % pack * in.o.head + col;
    const T* const from = Q_tile + swizzle<kWidth>(r, col);
    if constexpr (Tile::kAligned) {
      if (col < in.width) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int e = 0; e < 8 && col + e < in.width; ++e) to[e] = from[e];
    }
  }
}

/// How many warps put a row of `count` parts together: a power of 2 up to 8.
inline int merging_warps(int count) {
  int warps = 1;
  while (warps < 8 && warps < count) warps *= 2;
  return warps;
}

/// out and log_sums from parts, kWidth floats a row. `warps` warps have a row (batch, head,
/// query): each adds up every `warps`-th part, kWidth / 32 columns a lane, and the first of them
/// what all have found. A row's parts are far from each other: so warps, and not turns of a loop,
/// wait for them.
template <typename T, int kWidth>
__global__ void __launch_bounds__(256)
    attention_merge(AttentionOperands<T> in, int rows, int count, int warps, AttentionParts parts) {
  constexpr int kCols = kWidth / 32;
  __shared__ float found[8][kWidth];
  start_next_kernel();
  wait_for_previous_kernel();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = static_cast<int>(blockIdx.x) * (8 / warps) + warp / warps;
  const bool inside = row < rows;
  float largest = minus_infinity();
  if (inside) {
    for (int p = lane; p < count; p += 32) {
      largest = fmaxf(largest, parts.sums[static_cast<size_t>(p) * rows + row].base);
    }
  }
  largest = lanes_max<32>(largest);
  const float base = largest == minus_infinity() ? 0 : largest;
  const auto weight_of = [&](size_t place) {
    const PartSum part = parts.sums[place];
    return exp2f(part.base - base) * part.sum;
  };
  float sum = 0, result[kCols] = {};
  if (inside) {
    for (int p = lane; p < count; p += 32) sum += weight_of(static_cast<size_t>(p) * rows + row);
#pragma unroll 4
    for (int p = warp % warps; p < count; p += warps) {
      const size_t place = static_cast<size_t>(p) * rows + row;
      const float weight = weight_of(place);
#pragma unroll
      for (int i = 0; i < kCols; ++i) {
        result[i] = fmaf(weight, parts.out[place * kWidth + lane + 32 * i], result[i]);
      }
    }
  }
  sum = lanes_sum<32>(sum);
#pragma unroll
  for (int i = 0; i < kCols; ++i) found[warp][lane + 32 * i] = result[i];
  __syncthreads();
  if (warp % warps != 0 || !inside) return;
  for (int other = 1; other < warps; ++other) {
#pragma unroll
    for (int i = 0; i < kCols; ++i) result[i] += found[warp + other][lane + 32 * i];
  }
  const int query = row % in.queries, head = row / in.queries % in.heads;
  const int batch = row / in.queries / in.heads;
  T* const out = in.out + batch * in.o.batch + query * in.o.row + head * in.o.head;
  const float factor = largest == minus_infinity() ? 0 : 1 / sum;
#pragma unroll
  for (int i = 0; i < kCols; ++i) {
    if (lane + 32 * i < in.width) out[lane + 32 * i] = T(result[i] * factor);
  }
  if (lane == 0 && in.log_sums != nullptr) {
    in.log_sums[row] = PartSum{largest, sum}.logarithm();
  }
}

}  // namespace operators::attention
