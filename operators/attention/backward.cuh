// The gradients of attention for any shape whose width is a multiple of 8 up to 128, and whose rows
// are aligned to 16 bytes. On Hopper by operators/attention/backward_hopper.cuh, else by
// operators/attention/backward_portable.cuh; each has a tile for widths up to 64, and one up to
// 128.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "operators/attention/backward_hopper.cuh"
#include "operators/attention/backward_portable.cuh"
#include "operators/operands.h"

namespace operators::attention {

/// The most columns of a head, and queries of a tile: dQ is added up in whole tiles.
inline constexpr int64_t kBackwardWidth = 128, kBackwardQueries = 128;

/// Where the operands of the gradients are, and how they lie.
template <typename T>
struct BackwardMemory {
  Memory<T> d_out, Q, K, V, out;
  Memory<float> log_sums;
  Memory<T> dQ, dK, dV;
  Strides d_o, q, k, v, o, dq, dk, dv;
};

/// What every launch needs.
template <typename T>
class BackwardLaunches {
 public:
  BackwardLaunches(const Workspace& workspace, const BackwardMemory<T>& memory,
                   const AttentionShape& shape, float scale)
      : memory_(memory),
        shape_(shape),
        scale_(scale),
        row_sums_(workspace.any<float>(static_cast<size_t>(rows()))),
        dq_sums_(workspace.any<float>(static_cast<size_t>(rows_of_sums() * tile_width()))),
        stream_(workspace.stream) {}

  template <class Tile>
  void launch_hopper() const {
    constexpr int kBytes = sizeof(BackwardHopperShared<Tile>);
    const auto kernel = attention_backward_hopper<Tile>;
    allow_shared_bytes(kernel, kBytes);
    const BackwardOperands<T> in = operands();
    const int64_t B = shape_.batch, S = shape_.queries, keys = shape_.keys, g = shape_.group();
    const int64_t heads = shape_.kv_heads, width = shape_.width;
    const auto of_queries = [&](const T* tensor, const Strides& by) {
      return AttentionMaps::map<T>(tensor, by, B, S, heads, g, width, 1, Tile::kQueries);
    };
    const auto of_keys = [&](const T* tensor, const Strides& by, unsigned box_rows) {
      return AttentionMaps::map<T>(tensor, by, B, keys, heads, 1, width, 1, box_rows);
    };
    const BackwardMaps maps{of_queries(in.Q, in.q),    of_queries(in.d_out, in.d_o),
                            of_keys(in.K, in.k, 128),  of_keys(in.V, in.v, 128),
                            of_keys(in.dK, in.dk, 64), of_keys(in.dV, in.dv, 64)};
    start<Tile::kWidth>(in);
    launch_clusters_on(stream_, kernel, 1, true, blocks_of<Tile>(), Tile::kThreads, kBytes, maps,
                       in);
    const int64_t parts = 2 * ceil_div(S, int64_t{Tile::kQueries}) * shape_.heads * B;
    launch_clusters_on(stream_, attention_finish_parts<Tile>, 1, true, blocks_for(parts, 1), 128, 0,
                       in);
  }

  template <class Tile>
  void launch_portable() const {
    constexpr int kBytes = sizeof(BackwardShared<Tile>);
    allow_shared_bytes(attention_backward_portable<Tile>, kBytes);
    const BackwardOperands<T> in = operands();
    start<Tile::kWidth>(in);
    attention_backward_portable<Tile><<<blocks_of<Tile>(), Tile::kThreads, kBytes, stream_>>>(in);
    attention_finish_dq<T, Tile::kWidth>
        <<<blocks_for(rows(), kBlockRows), kRowThreads, 0, stream_>>>(in, static_cast<int>(rows()));
  }

 private:
  int64_t rows() const { return shape_.batch * shape_.heads * shape_.queries; }
  int64_t rows_of_sums() const {
    return shape_.batch * shape_.heads * ceil_div(shape_.queries, kBackwardQueries) *
           kBackwardQueries;
  }
  int64_t tile_width() const { return shape_.width <= 64 ? 64 : 128; }

  int64_t sequences() const { return shape_.kv_heads * shape_.batch; }

  template <class Tile>
  dim3 blocks_of() const {
    const int64_t rows = std::min<int64_t>(sequences(), 1 << 15);
    return {blocks_for(shape_.keys, Tile::kKeys), static_cast<unsigned>(rows),
            blocks_for(sequences(), rows)};
  }

  /// D, and zeros for the sums.
  template <int kWidth>
  void start(const BackwardOperands<T>& in) const {
    attention_row_sums<T, kWidth>
        <<<blocks_for(rows_of_sums(), kBlockRows), kRowThreads, 0, stream_>>>(
            in, static_cast<int>(rows()), static_cast<int>(rows_of_sums()));
  }

  BackwardOperands<T> operands() const {
    const auto narrow = [](int64_t value) { return static_cast<int>(value); };
    return {
        {memory_.Q, memory_.K, memory_.V, memory_.out, memory_.log_sums, memory_.q, memory_.k,
         memory_.v, memory_.o, narrow(shape_.queries), narrow(shape_.keys), narrow(shape_.heads),
         narrow(shape_.group()), narrow(shape_.width), shape_.causal, scale_},
        memory_.d_out,
        memory_.dQ,
        memory_.dK,
        memory_.dV,
        row_sums_,
        dq_sums_,
        memory_.d_o,
        memory_.dq,
        memory_.dk,
        memory_.dv,
        narrow(sequences())};
  }

  BackwardMemory<T> memory_;
  AttentionShape shape_;
  float scale_;
  Memory<float> row_sums_, dq_sums_;
  cudaStream_t stream_;
};

/// The way to compute the gradients, of a shape that is at least 1 everywhere, of a width and
/// strides as above, and whose heads are a multiple of kv_heads; with queries in whole tiles, rows
/// and keys of all heads are at most 2^30. What is written must not overlap what is read.
template <typename T>
class AttentionBackward {
 public:
  AttentionBackward(const Workspace& workspace, const BackwardMemory<T>& memory,
                    const AttentionShape& shape, float scale)
      : launches_(workspace, memory, shape, scale), shape_(shape) {}

  std::vector<Way> ways() const { return {shape_.width <= 64 ? way<64>() : way<128>()}; }

 private:
  /// There is one a device: what it should take, at the rate of most long sequences, compares it
  /// with nothing.
  template <int kWidth>
  Way way() const {
    const double flops = 2.5 * shape_.flops();
    if (is_hopper()) {
      using Tile = BackwardHopperTile<T, kWidth>;
      return {"wgmma, parts of d_q added up by the copy engine", flops / 500e6,
              [self = launches_] { self.template launch_hopper<Tile>(); },
              static_cast<int>(sizeof(BackwardHopperShared<Tile>))};
    }
    using Tile = BackwardTile<T, kWidth>;
    static_assert(sizeof(BackwardShared<Tile>) <= 99 << 10);
    return {"mma.sync, parts of d_q added up by atomics", flops / 200e6,
            [self = launches_] { self.template launch_portable<Tile>(); },
            static_cast<int>(sizeof(BackwardShared<Tile>))};
  }

  BackwardLaunches<T> launches_;
  AttentionShape shape_;
};

}  // namespace operators::attention
