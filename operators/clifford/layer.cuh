// How lesson 10's layer is launched on Hopper, by the kernels of streamed.cuh. Rows may have up to
// 8192 features with 4 or 8 blades, 4096 with 16, and 2048 with 32.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "operators/caller.h"
#include "operators/clifford/streamed.cuh"
#include "operators/estimate.h"

namespace operators::clifford {

/// The one way to compute a pass, and the bytes that it needs beside inputs and outputs. There is
/// none where a row is too long, or the device has no room for a cluster.
struct Streamed {
  std::vector<Way> ways;
  double workspace_bytes = 0;
};

// How rows are divided: a block has no more rows at a time than the same number of rounds needs.
// For example, with up to 16 rows in a block 132 multiprocessors take 1000 rows in one round, and 8
// rows in each block are enough.
template <typename A, int W>
RowsOnChip streamed_rows(const Layer& layer) {
  RowsOnChip shape = rows_on_chip<A, W>(layer);
  const int rounds = ceil_div(shape.groups(layer), multiprocessors());
  shape.threads = ceil_div(layer.batch, rounds * multiprocessors()) * shape.per_row;
  return shape;
}

/// How many blocks stay on the device, and take row after row. 0: it has no room for a cluster.
inline int streamed_grid(AnyKernel kernel, const RowsOnChip& shape, int bytes, const Layer& layer) {
  allow_shared_bytes(kernel, bytes);
  const int resident = bytes > most_shared_bytes() ? multiprocessors()  // it is not launched
                       : shape.blocks == 1
                           ? resident_blocks(kernel, shape.threads, bytes)
                           : clusters_that_fit(kernel, shape.blocks, shape.threads, bytes);
  return shape.blocks * std::min(shape.groups(layer), resident);
}

template <typename A, typename T>
Way streamed_way(const RowsOnChip& shape, int blocks, const Layer& layer, int tensors, int bytes,
                 std::function<void()> launch) {
  const double moved = static_cast<double>(sizeof(T) * tensors * A::kBlades * layer.plane());
  return {"rows streamed: " + std::to_string(blocks) + " blocks of " +
              std::to_string(shape.threads) + " threads, " + std::to_string(shape.blocks) +
              " for a row",
          kFirstLaunch + moved / memory_rate(), std::move(launch), bytes};
}

// kVector only where every row starts at a multiple of 16 bytes, which the copy engine needs. Of
// 16-bit elements other rows of up to 8 blades are left to other kernels.
template <typename A, int W = kStreamedWidth<A>, bool kVector = (W > 1), typename T>
Streamed streamed_forward(const TensorsOf<T>& of) {
  if constexpr (kVector) {
    if (!whole_packs<A, W>(of.layer, 16 / sizeof(T))) {
      if constexpr (sizeof(T) == 4) {
        return streamed_forward<A, W, false>(of);
      } else {
        return {};
      }
    }
  }
  const RowsOnChip shape = streamed_rows<A, W>(of.layer);
  if (shape.blocks > kMaxBlocks) return {};
  const auto kernel = forward_streamed<A, W, kVector, T>;
  const int bytes = static_cast<int>(Stream<A, W, kVector, 2, T>::bytes(shape));
  const int blocks = streamed_grid(kernel, shape, bytes, of.layer);
  if (blocks == 0) return {};
  const auto launch = [=] {
    launch_clusters_on(of.stream, kernel, shape.blocks, true, blocks, shape.threads, bytes, of.x,
                       of.y, of.w, of.out, of.layer, shape);
  };
  return {{streamed_way<A, T>(shape, blocks, of.layer, 3, bytes, launch)}};
}

template <typename A, int W = kStreamedWidth<A>, bool kVector = (W > 1), typename T, typename D>
Streamed streamed_backward(const TensorsOf<T>& of, const GradientsOf<T, D>& d) {
  if constexpr (kVector) {
    if (!whole_packs<A, W>(of.layer, 16 / sizeof(T))) {
      if constexpr (sizeof(T) == 4) {
        return streamed_backward<A, W, false>(of, d);
      } else {
        return {};
      }
    }
  }
  const RowsOnChip shape = streamed_rows<A, W>(of.layer);
  if (shape.blocks > kMaxBlocks) return {};
  const auto kernel = backward_streamed<A, W, kVector, T>;
  const int bytes = static_cast<int>(Stream<A, W, kVector, 3, T>::bytes(shape));
  const int blocks = streamed_grid(kernel, shape, bytes, of.layer);
  if (blocks == 0) return {};
  const auto partials = of.workspace.template any<float>(
      static_cast<size_t>(blocks / shape.blocks) * shape.rows() * of.w.size());
  const auto launch = [=] {
    launch_clusters_on(of.stream, kernel, shape.blocks, false, blocks, shape.threads, bytes, of.x,
                       of.y, of.w, d.d_out, d.dx, d.dy, partials, of.layer, shape);
    add_up_weights<A>(d, partials, of.layer, of.stream);
  };
  return {{streamed_way<A, T>(shape, blocks, of.layer, 5, bytes, launch)}, partials.bytes()};
}

}  // namespace operators::clifford
