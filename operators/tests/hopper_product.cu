// The product of operators/product/product.cuh with each kind of tile, schedule and alignment,
// against sums in double: sizes that no lesson has, on the CPU backend and on a GPU.
//
//     hopper_product ROWS COLS DEPTH    prints a line for each kind; exits with 1 if one is wrong
//
// hopper_mutants.py plants mistakes into it. Further arguments are ignored.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <type_traits>
#include <vector>

#include "common/device.h"
#include "operators/product/layouts/gathered.cuh"
#include "operators/product/product.cuh"
#include "operators/product/sliced.cuh"
#include "operators/product/store_sums.cuh"
#include "operators/product/tf32_product.cuh"

using namespace common;
using namespace operators::product;

namespace {

// Tiles are counted in 32 bits, and divided approximately: what is too much is known on the host.
using SmallTile = Tiles<half, 64, 64, 1, 1, 1>;
static_assert(Schedule<SmallTile>::kTile.tiles_of({1 << 28, 8, 8}) > Timetable::kMostTiles);
static_assert(Schedule<SmallTile>::kTile.tiles_of({1 << 17, 1 << 15, 8}) == 1 << 20);
static_assert(Schedule<SmallTile>({64 * 100, 64 * 2, 1 << 20}, 66, true).shared == 68);
static_assert(Schedule<SmallTile>({64 * 100, 64 * 2, 1 << 25}, 66, true).shared == 0);
static_assert(kIsTransposed<TransposedTiles<half, 56, 64, 4, 1>> && !kIsTransposed<SmallTile>);

/// A rows x cols matrix of T, of numbers that it holds, in device memory, its rows `stride` apart.
/// What is between them, and behind the last one, is NaN.
template <typename T>
struct Matrix {
  int rows, cols, stride;
  T* data = nullptr;

  Matrix(int row_count, int col_count) : rows(row_count), cols(col_count) {
    stride = (cols + 7) / 8 * 8;
    CUDA_CHECK(cudaMalloc(&data, bytes()));
    CUDA_CHECK(cudaMemset(data, 0xff, bytes()));
  }
  ~Matrix() { cudaFree(data); }
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;

  size_t bytes() const { return static_cast<size_t>(rows) * stride * sizeof(T); }
  static float number(int row, int col) { return static_cast<float>((7 * row + 3 * col) % 11 - 5); }

  void fill() const {
    std::vector<T> host(static_cast<size_t>(rows) * stride, T(NAN));
    for (int row = 0; row < rows; ++row) {
      for (int col = 0; col < cols; ++col) {
        host[static_cast<size_t>(row) * stride + col] = T(number(row, col));
      }
    }
    CUDA_CHECK(cudaMemcpy(data, host.data(), bytes(), cudaMemcpyHostToDevice));
  }
  CUtensorMap map(int box_rows, bool to_tf32 = false) const {
    return tensor_map<T>(data, rows, cols, box_rows, to_tf32, stride);
  }
  Factor<> factor(int box_rows) const { return {{map(box_rows)}}; }
};

/// The same, dense. Behind the last row are some elements that are NaN.
template <typename T>
struct Dense {
  int rows, cols;
  T* data = nullptr;

  Dense(int row_count, int col_count) : rows(row_count), cols(col_count) {
    CUDA_CHECK(cudaMalloc(&data, bytes()));
    std::vector<T> host(bytes() / sizeof(T), T(NAN));
    for (int i = 0; i < rows * cols; ++i) host[i] = T(Matrix<T>::number(i / cols, i % cols));
    CUDA_CHECK(cudaMemcpy(data, host.data(), bytes(), cudaMemcpyHostToDevice));
  }
  ~Dense() { cudaFree(data); }
  Dense(const Dense&) = delete;
  Dense& operator=(const Dense&) = delete;

  size_t bytes() const { return (static_cast<size_t>(rows) * cols + 8) * sizeof(T); }
  GatheredRows<T> gathered() const { return {data, cols, rows, cols}; }
};

/// A product of which a cluster has kOfCluster slices beside each other; 1: none.
template <class Whole, int kOfCluster>
struct InSlices {
  using Work = SlicedProduct<Whole, kOfCluster>;
};
template <class Whole>
struct InSlices<Whole, 1> {
  using Work = Whole;
};

/// Into how many slices k is cut: each has a step, and a cluster has all of its own. 0: too few, or
/// none are wanted.
int slices_of(int wanted, int of_cluster, int steps) {
  return std::min(wanted, steps) / of_cluster * of_cluster;
}

/// Memory for what clusters leave of tiles that are shared: counts that are 0, and sums.
struct Shared {
  unsigned* counts = nullptr;
  float* sums = nullptr;

  template <class Work>
  static Shared of(int clusters, int tiles) {
    const size_t consumers = kClusterBlocks<Work> * Work::Tile::kConsumers;
    const size_t bytes = 2 * clusters * consumers * 128 * Work::Sum::size() * sizeof(float);
    Shared memory;
    CUDA_CHECK(cudaMalloc(&memory.counts, (1 + tiles * consumers) * sizeof(unsigned)));
    CUDA_CHECK(cudaMemset(memory.counts, 0, (1 + tiles * consumers) * sizeof(unsigned)));
    CUDA_CHECK(cudaMalloc(&memory.sums, bytes));
    CUDA_CHECK(cudaMemset(memory.sums, 0xff, bytes));
    return memory;
  }
  void free() const {
    cudaFree(sums);
    cudaFree(counts);
  }
};

const char* sharing(int shared, int slices, int of_cluster) {
  return of_cluster > 1 ? "each in slices of clusters"
         : slices > 0   ? "each in slices"
         : shared > 0   ? "some shared along k"
                        : "whole";
}

/// Whether C, dense, is the product of two Matrix<T>, by elements of every row and column. (All
/// elements would take longer than the product.)
template <typename T>
bool right_elements(const T* C, const ProductShape& shape) {
  std::vector<T> host(static_cast<size_t>(shape.rows) * shape.cols);
  CUDA_CHECK(cudaMemcpy(host.data(), C, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
  bool ok = true;
  for (int row = 0; row < shape.rows; ++row) {
    for (int col = row % 16; col < shape.cols; col += 16) {
      double sum = 0;
      for (int k = 0; k < shape.depth; ++k)
        sum += Matrix<T>::number(row, k) * Matrix<T>::number(k, col);
      const double found = static_cast<float>(host[static_cast<size_t>(row) * shape.cols + col]);
      // Written so that a NaN is never right. Sums up to 2048 are exact in fp16, to 256 in bf16.
      ok = ok && std::fabs(found - sum) <= std::fabs(sum) / (std::is_same_v<T, half> ? 1024 : 128);
    }
  }
  return ok;
}

/// Multiplies with one kind of tile; returns whether the result is right. slices: into how many k
/// is cut, at most.
template <class Tile, int kOfCluster = 1>
bool right(const ProductShape& shape, bool split, bool in_step, int slices = 0) {
  using T = typename Tile::Element;
  using Epilogue = StoreRounded<T>;
  using Whole = MatrixProduct<Tile, Epilogue, kOfCluster>;
  using Work = typename InSlices<Whole, kOfCluster>::Work;
  constexpr int kBytes = sizeof(typename Work::Shared);
  const auto kernel = product<Work>;
  allow_shared_bytes(kernel, kBytes);
  const Matrix<T> A(shape.rows, shape.depth), B(shape.depth, shape.cols);
  A.fill();
  B.fill();
  const size_t count = static_cast<size_t>(shape.rows) * shape.cols;
  T* C = nullptr;
  CUDA_CHECK(cudaMalloc(&C, count * sizeof(T)));
  CUDA_CHECK(cudaMemset(C, 0xff, count * sizeof(T)));
  const int capacity = clusters_that_fit(kernel, kClusterBlocks<Work>, Tile::kThreads, kBytes);
  if (capacity == 0) return true;
  const Schedule<Tile> whole(shape, capacity, false);
  slices = slices_of(slices, kOfCluster, whole.steps);
  if (slices == 0 && kOfCluster > 1) return true;
  const int clusters = slices > 0 ? whole.tiles * slices
                       : split    ? std::min(capacity, whole.tiles * whole.steps)
                                  : static_cast<int>(persistent(whole.tiles, capacity));
  const Schedule<Tile> schedule(shape, clusters, split || slices > 0);
  const Shared memory = Shared::of<Work>(clusters, whole.tiles);
  Epilogue epilogue{{}, C, shape.rows, shape.cols, shape.cols % 8 == 0};
  if (epilogue.aligned) epilogue.map = tensor_map<T>(C, shape.rows, shape.cols, Tile::kOutRows);
  const int rest = Whole::rest_of(shape.rows);
  const Whole all{A.factor(Tile::kRowsA),
                  B.factor(Tile::kRowsB),
                  epilogue,
                  schedule,
                  Exchange{in_step ? memory.counts : nullptr, memory.counts + 1, memory.sums},
                  A.factor(rest > 0 ? rest : Tile::kRowsA).maps[0],
                  rest};
  const Work work = [&] {
    if constexpr (kOfCluster > 1) {
      return Work{all, slices / kOfCluster};
    } else {
      return all;
    }
  }();
  bool ok = true;
  for (int launch = 0; launch < 2; ++launch) {  // a launch leaves what the next one needs
    CUDA_CHECK(cudaMemset(C, 0xff, count * sizeof(T)));
    product<Work><<<clusters * Tile::kBlocks, Tile::kThreads, kBytes>>>(work);
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaDeviceSynchronize());
    ok = ok && right_elements(C, shape);
  }
  std::printf("%d x %d tiles, %d stacked, %d aside, %s%s%s\n", Tile::BM, Tile::BN, Tile::kStack,
              Tile::kSide, sharing(schedule.shared, slices, kOfCluster), in_step ? ", in step" : "",
              ok ? "" : ": FAILED");
  memory.free();
  cudaFree(C);
  return ok;
}

/// The same of dense rows, where threads copy one factor. What is behind the last row is NaN.
template <class Tile, int kOfCluster = 1>
bool right_gathered(const ProductShape& shape, int slices) {
  using T = typename Tile::Element;
  using Whole = GatheredProduct<Tile, StoreRounded<T>, kOfCluster>;
  using Work = typename InSlices<Whole, kOfCluster>::Work;
  const Dense<T> A(shape.rows, shape.depth), B(shape.depth, shape.cols), C(shape.rows, shape.cols);
  constexpr int kBytes = sizeof(typename Work::Shared);
  const auto kernel = product<Work>;
  allow_shared_bytes(kernel, kBytes);
  const int capacity = clusters_that_fit(kernel, kClusterBlocks<Work>, Tile::kThreads, kBytes);
  if (capacity == 0) return true;
  const Schedule<Tile> whole(shape, capacity, false);
  slices = slices_of(slices, kOfCluster, whole.steps);
  if (slices == 0 && kOfCluster > 1) return true;
  const int clusters =
      slices > 0 ? whole.tiles * slices : static_cast<int>(persistent(whole.tiles, capacity));
  const Shared memory = Shared::of<Work>(clusters, whole.tiles);
  Whole all{{{},
             {},
             {{}, C.data, shape.rows, shape.cols, false},
             Schedule<Tile>(shape, clusters, slices > 0),
             Exchange{nullptr, memory.counts, memory.sums}},
            (Tile::kLeft ? A : B).gathered()};
  if constexpr (Tile::kLeft) {
    all.B = {{tensor_map<T>(B.data, B.rows, B.cols, Tile::kRowsB)}};
  } else {
    all.A = {{tensor_map<T>(A.data, A.rows, A.cols, Tile::kRowsA)}};
  }
  const Work work = [&] {
    if constexpr (kOfCluster > 1) {
      return Work{all, slices / kOfCluster};
    } else {
      return all;
    }
  }();
  bool ok = true;
  for (int launch = 0; launch < 2; ++launch) {  // a launch leaves what the next one needs
    CUDA_CHECK(cudaMemset(C.data, 0xff, C.bytes()));
    launch_product(work, RowCopies<T, 2>{}, nullptr);
    CUDA_CHECK(cudaDeviceSynchronize());
    ok = ok && right_elements(C.data, shape);
  }
  std::printf("%d x %d tiles, %s by threads, %s%s\n", Tile::BM, Tile::BN, Tile::kLeft ? "A" : "B",
              sharing(all.schedule.shared, slices, kOfCluster), ok ? "" : ": FAILED");
  memory.free();
  return ok;
}

/// The same in slices that a second launch adds up. C is dense, whatever its rows' alignment is.
template <class Tile>
bool right_added(const ProductShape& shape, int slices) {
  using T = typename Tile::Element;
  using Work = MatrixProduct<Tile, StoreRoundedOrSlices<T>>;
  constexpr int kBytes = sizeof(typename Work::Shared);
  const auto kernel = product<Work>;
  allow_shared_bytes(kernel, kBytes);
  if (clusters_that_fit(kernel, kClusterBlocks<Work>, Tile::kThreads, kBytes) == 0) return true;
  const Matrix<T> A(shape.rows, shape.depth), B(shape.depth, shape.cols);
  A.fill();
  B.fill();
  const Dense<T> C(shape.rows, shape.cols);
  const Schedule<Tile> whole(shape, 1, false);
  slices = std::min(slices, whole.steps);
  const Matrix<float> apart(shape.rows * slices, shape.cols);
  const SlicesToAdd<T> add = {apart.data,   slices,    int64_t{shape.rows} * apart.stride,
                              apart.stride, C.data,    shape.cols,
                              shape.rows,   shape.cols};
  const int rest = Work::rest_of(shape.rows);
  const Work work = {A.factor(Tile::kRowsA),
                     B.factor(Tile::kRowsB),
                     {{}, {{apart.data, shape.rows, apart.stride}}, add.apart},
                     Schedule<Tile>(shape, whole.tiles * slices, true),
                     {},
                     A.factor(rest > 0 ? rest : Tile::kRowsA).maps[0],
                     rest};
  CUDA_CHECK(cudaMemset(C.data, 0xff, C.bytes()));
  launch_product(work, RowCopies<T, 2>{}, nullptr);
  launch_finish_slices(add, nullptr);
  CUDA_CHECK(cudaDeviceSynchronize());
  const bool ok = right_elements(C.data, shape);
  std::printf("%d x %d tiles, %d stacked, %d aside, added up by a second launch%s\n", Tile::BM,
              Tile::BN, Tile::kStack, Tile::kSide, ok ? "" : ": FAILED");
  return ok;
}

/// The same in TF32 or 3xTF32, for which these numbers are exact.
template <class Tile, int kOfCluster = 1>
bool right_in_tf32(const ProductShape& shape, bool split, int slices = 0, bool added = false) {
  using Whole = Tf32MatrixProduct<Tile>;
  using Work = typename InSlices<Whole, kOfCluster>::Work;
  constexpr int kBytes = sizeof(typename Work::Shared);
  const auto kernel = product<Work>;
  allow_shared_bytes(kernel, kBytes);
  const Matrix<float> A(shape.rows, shape.depth), B(shape.depth, shape.cols);
  const Matrix<float> C(shape.rows, shape.cols);
  A.fill();
  B.fill();
  const int capacity = clusters_that_fit(kernel, kClusterBlocks<Work>, Tile::kThreads, kBytes);
  if (capacity == 0) return true;
  const ProductShape transposed{shape.cols, shape.rows, shape.depth};
  const int tiles = static_cast<int>(Schedule<Tile>::kTile.tiles_of(transposed));
  const int steps = Schedule<Tile>(transposed, 1, false).steps;
  slices = slices_of(slices, kOfCluster, steps);
  if (slices == 0 && kOfCluster > 1) return true;
  const int clusters = slices > 0 ? tiles * slices
                       : split    ? std::min(capacity, tiles * steps)
                                  : static_cast<int>(persistent(tiles, capacity));
  const Schedule<Tile> schedule(transposed, clusters, split || slices > 0);
  const Shared memory = Shared::of<Work>(clusters, tiles);
  const int rest = Whole::rest_of(shape.rows);
  Whole all{A.map(Tile::kRowsB, !Tile::kSplit),
            A.map(rest > 0 ? rest : Tile::kRowsB, !Tile::kSplit),
            B.map(Tile::kRowsA, !Tile::kSplit),
            rest,
            C.data,
            C.stride,
            schedule,
            Exchange{nullptr, memory.counts, memory.sums}};
  const Matrix<float> apart(C.rows * std::max(1, slices), C.cols);
  const SlicesToAdd<float> add = {apart.data,   slices, int64_t{C.rows} * apart.stride,
                                  apart.stride, C.data, C.stride,
                                  C.rows,       C.cols};
  if (added) all.C = apart.data, all.c_stride = apart.stride, all.apart = add.apart;
  const Work work = [&] {
    if constexpr (kOfCluster > 1) {
      return Work{all, slices / kOfCluster};
    } else {
      return all;
    }
  }();
  for (int launch = 0; launch < 2; ++launch) {  // a launch leaves what the next one needs
    CUDA_CHECK(cudaMemset(C.data, 0xff, C.bytes()));
    product<Work><<<schedule.clusters * Tile::kBlocks, Tile::kThreads, kBytes>>>(work);
    if (added) launch_finish_slices(add, nullptr);
  }
  CUDA_CHECK(cudaGetLastError());
  CUDA_CHECK(cudaDeviceSynchronize());
  std::vector<float> host(static_cast<size_t>(C.rows) * C.stride);
  CUDA_CHECK(cudaMemcpy(host.data(), C.data, C.bytes(), cudaMemcpyDeviceToHost));
  bool ok = true;
  for (int row = 0; row < shape.rows; ++row) {
    for (int col = row % 16; col < shape.cols; col += 16) {
      float sum = 0;
      for (int k = 0; k < shape.depth; ++k) {
        sum += Matrix<float>::number(row, k) * Matrix<float>::number(k, col);
      }
      ok = ok && host[static_cast<size_t>(row) * C.stride + col] == sum;
    }
  }
  std::printf("%d x %d tiles, %d aside, in %s, %s%s%s\n", Tile::BN, Tile::BM, Tile::kStack,
              Tile::kSplit ? "3xTF32" : "TF32", sharing(schedule.shared, slices, kOfCluster),
              added ? ", added up by a second launch" : "", ok ? "" : ": FAILED");
  memory.free();
  return ok;
}

/// The same of dense rows, of which the first begins `shift` elements behind a multiple of 16 bytes
/// (shifted.cuh). What is before it, and behind the last one, is NaN.
template <class Tile>
bool right_as_they_lie(const ProductShape& shape, int shift, int of_cluster, int clusters) {
  if (of_cluster > multiprocessors()) return true;
  using Numbers = Matrix<float>;
  const auto filled = [shift](int rows, int cols) {
    std::vector<float> host(static_cast<size_t>(rows) * cols + 2 * shift, NAN);
    for (int row = 0; row < rows; ++row) {
      for (int col = 0; col < cols; ++col) {
        host[static_cast<size_t>(row) * cols + col + shift] = Numbers::number(row, col);
      }
    }
    float* data = nullptr;
    CUDA_CHECK(cudaMalloc(&data, host.size() * sizeof(float)));
    CUDA_CHECK(cudaMemcpy(data, host.data(), host.size() * sizeof(float), cudaMemcpyHostToDevice));
    return data;
  };
  const auto memory = [](float* data, size_t size) {
    return operators::Memory<float>([data] { return data; }, size);
  };
  const int depth = ceil_div(shape.depth, Tile::BK);
  const int tiles = ceil_div(shape.rows, Tile::BM) * ceil_div(shape.cols, Tile::BN);
  const ShiftedPlan plan = {of_cluster, clusters, ceil_div(depth, of_cluster * clusters), tiles};
  float* const A = filled(shape.rows, shape.depth);
  float* const B = filled(shape.depth, shape.cols);
  const Matrix<float> C(shape.rows, shape.cols), sums(tiles * clusters, Tile::BM * Tile::BN);
  const Matrix<unsigned> arrived(tiles, of_cluster);
  CUDA_CHECK(cudaMemset(arrived.data, 0, arrived.bytes()));
  const ShiftedWays ways = {memory(A + shift, 0),
                            memory(B + shift, 0),
                            memory(C.data, 0),
                            shape.depth,
                            shape.cols,
                            C.stride,
                            shape,
                            nullptr};
  bool ok = true;
  std::vector<float> host(static_cast<size_t>(C.rows) * C.stride);
  for (int launch = 0; launch < 2; ++launch) {  // a launch leaves what the next one needs
    CUDA_CHECK(cudaMemset(C.data, 0xff, C.bytes()));
    ways.template launch<Tile>(plan, {nullptr, arrived.data, sums.data});
    CUDA_CHECK(cudaMemcpy(host.data(), C.data, C.bytes(), cudaMemcpyDeviceToHost));
    for (int row = 0; row < shape.rows; ++row) {
      for (int col = row % 16; col < shape.cols; col += 16) {
        float sum = 0;
        for (int k = 0; k < shape.depth; ++k) {
          sum += Numbers::number(row, k) * Numbers::number(k, col);
        }
        ok = ok && host[static_cast<size_t>(row) * C.stride + col] == sum;
      }
    }
  }
  std::printf("%d x %d tiles, in %s, rows as they lie, each in %d x %d slices%s\n", Tile::BM,
              Tile::BN, Tile::kMath == Math::split ? "3xTF32" : "TF32", clusters, of_cluster,
              ok ? "" : ": FAILED");
  cudaFree(A);
  cudaFree(B);
  return ok;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: hopper_product ROWS COLS DEPTH\n");
    return 2;
  }
  const ProductShape shape{std::atoi(argv[1]), std::atoi(argv[2]), std::atoi(argv[3])};
  bool ok = right<Tiles<half, 64, 64, 1, 1, 1>>(shape, true, false);
  ok = right<Tiles<__nv_bfloat16, 128, 192, 2, 1, 1>>(shape, true, false) && ok;
  ok = right<TransposedTiles<__nv_bfloat16, 176, 192, 2, 1>>(shape, false, true) && ok;
  ok = right<Tiles<half, 128, 144, 2, 1, 1>>(shape, true, false) &&
       ok;  // a part of a box, in two copies
  ok = right<Tiles<half, 128, 128, 2, 1, 2>>(shape, false, true) && ok;  // a box each
  ok = right<Tiles<half, 192, 64, 1, 2, 1>>(shape, false, false) && ok;
  ok =
      right<Tiles<half, 64, 112, 2, 4, 1>>(shape, false, false) && ok;  // four share each tile of A
  ok = right<TransposedTiles<half, 176, 128, 1, 4>>(shape, true, false) && ok;
  ok = right<TransposedTiles<half, 72, 128, 2, 4>>(shape, false, false) && ok;  // strips of 18 rows
  ok = right<TransposedTiles<half, 200, 128, 1, 2>>(shape, false, false) && ok;
  ok = right<TransposedTiles<half, 232, 128, 1, 2>>(shape, false, false) && ok;
  ok = right<TransposedTiles<half, 112, 192, 4, 2>>(shape, true, true) && ok;
  ok = right<TransposedTiles<half, 88, 64, 1, 4>>(shape, false, false) && ok;  // 22 rows of A each
  ok = right<TransposedTiles<half, 56, 64, 4, 1>>(shape, true, false) &&
       ok;  // all columns are a box
  ok = right<TransposedTiles<half, 152, 256, 1, 2>>(shape, true, true) &&
       ok;  // results leave in strips
  ok = right<Tiles<half, 64, 64, 1, 1, 1>>(shape, false, false, 2) && ok;
  ok = right<Tiles<__nv_bfloat16, 128, 256, 2, 1, 2>>(shape, false, false, 3) && ok;
  ok = right<OneRow<TransposedTiles<half, 32, 128, 1, 1>>>(shape, false, false) && ok;
  ok = right<OneRow<Tiles<half, 64, 128, 2, 1, 2>>>(shape, false, false, 2) && ok;
  ok = right<TransposedTiles<half, 160, 256, 2, 1>>(shape, true, false) && ok;
  ok = right<Tiles<half, 128, 128, 1, 1, 2>, 8>(shape, false, false, 8) && ok;
  ok = right<Tiles<__nv_bfloat16, 64, 64, 1, 1, 1>, 4>(shape, false, false, 8) && ok;
  ok = right<Tiles<__nv_bfloat16, 64, 128, 2, 1, 2>, 2>(shape, false, false, 4) && ok;
  ok = right<Tiles<half, 128, 128, 2, 2, 2>, 2>(shape, false, false, 2) && ok;
  // Blocks fetch in turn: four beside each other, four below each other, and eight.
  ok = right<InTurn<TransposedTiles<half, 88, 64, 1, 4>>>(shape, false, false) && ok;
  ok = right<InTurn<TransposedTiles<__nv_bfloat16, 56, 64, 4, 1>>>(shape, true, false) && ok;
  ok = right<InTurn<TransposedTiles<half, 64, 64, 2, 4>>>(shape, false, false) && ok;
  ok = right_added<InTurn<TransposedTiles<half, 72, 64, 1, 4>>>(shape, 3) && ok;
  ok = right_added<TransposedTiles<__nv_bfloat16, 160, 64, 1, 4>>(shape, 5) && ok;
  // Threads copy one factor, whose rows begin at multiples of 4 bytes, or of 8.
  const int even = std::min(shape.depth, 1500) / 8 * 8 + 8, most_rows = std::min(shape.rows, 140);
  const int most_cols = std::min(shape.cols, 300) / 8 * 8 + 8;
  using Right = GatheredTile<Tiles<half, 64, 128, 1, 1, 2>, Gathers::right>;
  using Left = GatheredTile<Tiles<half, 128, 64, 1, 1, 2>, Gathers::left>;
  ok = right_gathered<Right>({most_rows, most_cols + 2, even}, 0) && ok;
  ok = right_gathered<Left>({most_rows, most_cols, even + 6}, 2) && ok;
  ok = right_gathered<GatheredTile<Tiles<__nv_bfloat16, 64, 64, 1, 1, 1>, Gathers::right>, 4>(
           {most_rows, most_cols + 4, even}, 8) &&
       ok;
  // Threads copy and split these operands themselves. Under ThreadSanitizer a tile takes ten times
  // as long.
  const ProductShape quarter{(shape.rows + 1) / 2, (shape.cols + 1) / 2, shape.depth};
  ok = right_in_tf32<PlainTf32Tile<Math::tf32, 96, 2>>(quarter, true) && ok;
  ok = right_in_tf32<PlainTf32Tile<Math::split, 64, 2>>(quarter, false) && ok;
  ok = right_in_tf32<OneRow<PlainTf32Tile<Math::tf32, 64, 1>>>(quarter, false, 2) && ok;
  ok = right_in_tf32<PlainTf32Tile<Math::split, 64, 1>>(quarter, false, 3) && ok;
  ok = right_in_tf32<PlainTf32Tile<Math::split, 64, 1>, 4>(quarter, false, 4) && ok;
  ok = right_in_tf32<PlainTf32Tile<Math::tf32, 32, 1>>(quarter, false, 5, true) && ok;
  ok = right_in_tf32<PlainTf32Tile<Math::tf32, 64, 1, 192>, 2>(quarter, false, 2) && ok;
  ok = right_in_tf32<PlainTf32Tile<Math::tf32, 64, 1, 64>, 8>(quarter, false, 8) && ok;
  // Rows begin at any element, or at every other one; more steps than stages; and a slice of none.
  using Small = ShiftedTile<Math::tf32, 32, 128, 1, 4, 3, 1>;
  const int rows = std::min(shape.rows, 40), cols = std::min(shape.cols, 150) / 4 * 4;
  ok = right_as_they_lie<Small>({rows, cols + 1, 4 * shape.depth + 1}, 3, 4, 1) && ok;
  ok = right_as_they_lie<Small>({rows, cols + 2, shape.depth + 3}, 0, 2, 3) && ok;
  ok = right_as_they_lie<ShiftedTile<Math::split, 32, 64, 1, 2, 4, 1>>(
           {rows, cols + 4, shape.depth + 2}, 1, 4, 3) &&
       ok;
  return ok ? 0 : 1;
}
