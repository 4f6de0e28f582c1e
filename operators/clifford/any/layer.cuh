// How the kernels of this folder are launched.
#pragma once

#include <algorithm>
#include <bit>
#include <string>
#include <vector>

#include "operators/caller.h"
#include "operators/clifford/any/items.cuh"
#include "operators/clifford/any/known.cuh"
#include "operators/clifford/any/rows.cuh"
#include "operators/estimate.h"
#include "primitives/launch.h"

namespace operators::clifford {

using namespace primitives;

/// The tensors of a layer, of whichever types: pointers and bytes.
struct AnyTensors {
  Layer layer;
  Storage storage;         ///< of x, y, out and their gradients
  Storage weight_storage;  ///< of w and dw
  bool weighted;           ///< or else there is neither w nor dw
  int p, q;                ///< signature; r comes from the number of vectors
  Memory<char> x, y, w, out;
  Workspace workspace;
  cudaStream_t stream;
};
struct AnyGradients {
  Memory<char> d_out, dx, dy, dw;
};

/// What the kernels of n basis vectors know, where a thread has W features.
template <int n, int W>
AnyLayer any_layer(const AnyTensors& tensors) {
  const int threads = ceil_div(tensors.layer.features, W);
  return {.layer = tensors.layer,
          .metric = metric_of<Cl<n, 0, 0>>(tensors.p, tensors.q),
          .storage = tensors.storage,
          .per_row = std::min<int>(kAnyThreads, std::bit_ceil(static_cast<unsigned>(threads))),
          .weight_stride = ceil_div(tensors.layer.features, 4) * 4};
}

/// Prepared weights in the workspace, and what writes them; null if all are 1.
template <int n>
struct PreparedWeights {
  AnyTensors tensors;
  AnyLayer of;
  int count;
  Memory<float> memory;

  PreparedWeights(const AnyTensors& tensors, const AnyLayer& of)
      : tensors(tensors),
        of(of),
        count(tensors.weighted ? Cl<n, 0, 0>::kTriples * of.weight_stride : 0),
        memory(tensors.workspace.any<float>(static_cast<size_t>(count))) {}

  const float* write() const {
    if (!tensors.weighted) return nullptr;
    prepare_weights<<<ceil_div(count, kAnyThreads), kAnyThreads, 0, tensors.stream>>>(
        tensors.w, tensors.weight_storage, memory, count, of);
    return memory;
  }
};

template <int n>
Way any_way(const AnyTensors& tensors, const AnyLayer& of, double passes,
            std::function<void()> launch) {
  const double moved = passes * static_cast<double>(bytes_of(tensors.storage)) *
                       Cl<n, 0, 0>::kBlades * static_cast<double>(tensors.layer.plane());
  return {"any algebra of " + std::to_string(n) +
              " vectors: threads for a row: " + std::to_string(of.per_row),
          kFirstLaunch + moved / (0.7 * memory_rate()), std::move(launch), 0};
}

template <int n>
std::vector<Way> any_forward(const AnyTensors& tensors) {
  const AnyLayer of = any_layer<n, kAnyWidth<n>>(tensors);
  const PreparedWeights<n> weights(tensors, of);
  const bool again = of.layer.normed && of.layer.features > of.per_row * kAnyWidth<n>;
  const auto launch = [=] {
    const float* const w = weights.write();
    forward_any<n>
        <<<of.groups(), kAnyThreads, 0, tensors.stream>>>(tensors.x, tensors.y, w, tensors.out, of);
  };
  return {any_way<n>(tensors, of, again ? 4 : 3, launch)};
}

template <int n>
std::vector<Way> any_backward(const AnyTensors& tensors, const AnyGradients& d) {
  using Sums = GradientSums<Cl<n, 0, 0>>;
  constexpr int W = kAnyBackwardWidth<n>;
  const AnyLayer of = any_layer<n, W>(tensors);
  const PreparedWeights<n> weights(tensors, of);
  const int chunks = ceil_div(of.layer.features, of.per_row * W);
  const bool is_long = of.layer.normed && chunks > 1;
  const int resident = resident_blocks(backward_any<n>, kAnyThreads, 0);
  const int groups = std::min(of.groups(), std::max(1, resident / chunks));
  const auto sums = tensors.workspace.any<Sums>(is_long ? static_cast<size_t>(of.layer.batch) : 0);
  const int count = groups * of.rows(), triples = of.metric.triples;
  const size_t of_weights = static_cast<size_t>(triples) * of.layer.features;
  const auto partials = tensors.workspace.any<float>(tensors.weighted ? count * of_weights : 0);
  const auto launch = [=, stream = tensors.stream] {
    const float* const w = weights.write();
    if (is_long) {
      gradient_sums_any<n>
          <<<of.groups(), kAnyThreads, 0, stream>>>(d.d_out, tensors.x, tensors.y, w, sums, of);
    }
    backward_any<n><<<groups * chunks, kAnyThreads, 0, stream>>>(
        d.d_out, tensors.x, tensors.y, w, is_long ? sums.data() : nullptr, d.dx, d.dy,
        tensors.weighted ? partials.data() : nullptr, chunks, of);
    if (!tensors.weighted) return;
    with_stored_type(tensors.weight_storage, [&]<typename T>(const T*) {
      sum_partials<T><<<blocks_for(of_weights, 32), dim3(32, kSumRows), 0, stream>>>(
          partials, reinterpret_cast<T*>(d.dw.data()), count, triples, of.layer.features);
    });
  };
  return {any_way<n>(tensors, of, is_long ? 8 : 5, launch)};
}

// ---- Items --------------------------------------------------------------------------------------

/// The tensors' layout, and what it costs to touch one of them once.
template <int n>
unsigned item_blocks(const Layer& layer) {
  return blocks_for(layer.plane(), kItems<n>);
}
inline double item_microseconds(const AnyTensors& of, int blades, double passes) {
  const double bytes = static_cast<double>(bytes_of(of.storage)) * blades;
  return passes * bytes * static_cast<double>(of.layer.plane()) / (0.8 * memory_rate());
}

template <int n>
Way item_way(const AnyTensors& tensors, int passes, std::function<void()> launch) {
  return {"items of " + std::to_string(n) + " vectors",
          kFirstLaunch + item_microseconds(tensors, 1 << n, passes), std::move(launch), 0};
}
template <int n>
Way known_way(const AnyTensors& tensors, int passes, std::function<void()> launch) {
  Way way = item_way<n>(tensors, passes, std::move(launch));
  way.name += ", in registers";
  return way;
}

/// Memory as a kernel of one type has it.
template <typename T>
T* as(const Memory<char>& memory) {
  return reinterpret_cast<T*>(memory.data());
}

template <int n>
ItemProduct item_product(const AnyTensors& tensors, const ItemLayout& layout) {
  return {tensors.layer, metric_of<Cl<n, 0, 0>>(tensors.p, tensors.q), tensors.storage, layout};
}

/// Calls run with an algebra of n vectors and an order, if the product of these tensors is one of
/// those that known.cuh is compiled for. Returns whether it is.
template <int n, typename Run>
bool with_known(const AnyTensors& of, const ItemLayout& layout, Run run) {
  if (!layout.blades_last || of.layer.gated) return false;
  bool found = false;
  const auto attempt = [&]<int p, int q, Order order>(std::integral_constant<Order, order>,
                                                      Cl<p, q, n - p - q>) {
    using A = Cl<p, q, n - p - q>;
    if (found || of.p != p || of.q != q || layout.order != kBladeOrder<A, order>) return;
    found = true;
    run.template operator()<A, order>();
  };
  if constexpr (n == 3) attempt(std::integral_constant<Order, Order::grade>(), Cl<3, 0, 0>());
  if constexpr (n == 4) {
    attempt(std::integral_constant<Order, Order::null_first>(), Cl<3, 0, 1>());
    attempt(std::integral_constant<Order, Order::shortlex>(), Cl<1, 3, 0>());
  }
  return found;
}
template <int n>
unsigned known_blocks(const Layer& layer) {
  return blocks_for(layer.plane(), kKnownThreads);
}

/// The product without weights and norm, in this layout.
template <int n>
std::vector<Way> items_forward(const AnyTensors& tensors, const ItemLayout& layout) {
  std::vector<Way> ways;
  with_known<n>(tensors, layout, [&]<typename A, Order order>() {
    ways = {known_way<n>(tensors, 3, [=] {
      with_stored_type(tensors.storage, [&]<typename T>(const T*) {
        multiply_known<A, order, T>
            <<<known_blocks<n>(tensors.layer), kKnownThreads, 0, tensors.stream>>>(
                as<T>(tensors.x), as<T>(tensors.y), as<T>(tensors.out), tensors.layer.plane());
      });
    })};
  });
  if (!ways.empty()) return ways;
  const ItemProduct of = item_product<n>(tensors, layout);
  return {item_way<n>(tensors, 3, [=] {
    multiply_items<n><<<item_blocks<n>(tensors.layer), kItems<n>, 0, tensors.stream>>>(
        tensors.x, tensors.y, tensors.out, of);
  })};
}

template <int n>
std::vector<Way> items_backward(const AnyTensors& tensors, const AnyGradients& d,
                                const ItemLayout& layout) {
  std::vector<Way> ways;
  with_known<n>(tensors, layout, [&]<typename A, Order order>() {
    ways = {known_way<n>(tensors, 5, [=] {
      with_stored_type(tensors.storage, [&]<typename T>(const T*) {
        multiply_known_backward<A, order, T>
            <<<known_blocks<n>(tensors.layer), kKnownThreads, 0, tensors.stream>>>(
                as<T>(d.d_out), as<T>(tensors.x), as<T>(tensors.y), as<T>(d.dx), as<T>(d.dy),
                tensors.layer.plane());
      });
    })};
  });
  if (!ways.empty()) return ways;
  const ItemProduct of = item_product<n>(tensors, layout);
  return {item_way<n>(tensors, 5, [=] {
    multiply_items_backward<n><<<item_blocks<n>(tensors.layer), kItems<n>, 0, tensors.stream>>>(
        d.d_out, tensors.x, tensors.y, d.dx, d.dy, of);
  })};
}

/// Copies a tensor from one layout to another.
template <int n>
void copy_to_layout(const AnyTensors& of, const char* from, char* to, const ItemLayout& own,
                    const ItemLayout& other) {
  copy_items<n><<<item_blocks<n>(of.layer), kItems<n>, 0, of.stream>>>(from, to, of.layer.plane(),
                                                                       of.storage, own, other);
}

}  // namespace operators::clifford
