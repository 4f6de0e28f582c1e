// 5. A gated layer, as a framework dispatches it
//
//     out = sigmoid(x W1 + b1) * (x W2 + b2)
//     x (M, K), W1 and W2 (K, H), b1 and b2 (H), out (M, H): fp16, row-major
//
// Written in PyTorch this is one line. Run, it is six kernels, because a framework has a kernel for
// each of the six operators, and each of those reads its inputs from memory and writes its result
// back:
//
//     t1 = x W1        reads M K, writes M H         t4 = x W2        reads M K, writes M H
//     t2 = t1 + b1     reads M H, writes M H         t5 = t4 + b2     reads M H, writes M H
//     t3 = sigmoid(t2) reads M H, writes M H         out = t3 * t5    reads 2 M H, writes M H
//
// Together these are (2 K + 11 H) M elements, where K M + H M would do: with K = 128 channels and H
// = 64 hidden, 5 times as much. (The weights and biases are left out. They are 33 kB here, and stay
// in a cache.) At these shapes the layer is memory-bound: at an H100's peak rates its arithmetic
// takes 0.13 ms, and its least possible bytes take 0.48 ms. So those bytes are the time. The first
// table shows how near each step comes to a limit of its own. No single step is slow. They just do
// not need to exist.
//
// The second table puts whole layers side by side: the six kernels above, and the best that
// libraries allow. cuBLASLt adds a bias in the epilogue of its product, while the result is still
// in registers; and since both products have the same left factor, one product with [W1 W2] side by
// side reads x once. What no library kernel has is our sigmoid and the multiplication by it: for
// these one elementwise kernel stays (problems/gating/library.cuh). That second form is the honest
// baseline for lesson 6.
//
// The third table is a square one, N x N x N, where arithmetic is the limit: there the temporaries
// hardly matter, and fusion has less to win.

#include <deque>

#include "problems/gating/library.cuh"

using namespace problems;

// ---- The elementwise kernels --------------------------------------------------------------------

// __expf is e^s by the hardware's approximate 2^s. It is wrong by some units in the last place of
// fp32, far less than the rounding of the result to fp16.
__device__ float sigmoid(float s) { return 1 / (1 + __expf(-s)); }

// kWidth consecutive elements, moved as one access of up to 16 bytes. Neighbours, in
// primitives/neighbours.cuh, is an array `values` of so many elements, aligned to its own size.
template <int kWidth>
using Pack = Neighbours<half, kWidth>;

// A thread owns kWidth neighbouring elements of a row-major (rows, columns) result, and reads the
// same elements of its inputs. In the code i is the first of them. Every byte of `in` is read once.
// The bias is read again for every row, mostly from a cache. columns is a multiple of kWidth.
template <int kWidth>
__global__ void add_bias(const half* in, const half* bias, half* out, size_t count, int columns) {
  const size_t i = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kWidth;
  if (i >= count) return;
  const Pack<kWidth> a = *reinterpret_cast<const Pack<kWidth>*>(in + i);
  const Pack<kWidth> b = *reinterpret_cast<const Pack<kWidth>*>(bias + i % columns);
  Pack<kWidth> sum;
  for (int j = 0; j < kWidth; ++j) {
    sum.values[j] = __float2half_rn(__half2float(a.values[j]) + __half2float(b.values[j]));
  }
  *reinterpret_cast<Pack<kWidth>*>(out + i) = sum;
}

template <int kWidth>
__global__ void apply_sigmoid(const half* in, half* out, size_t count) {
  const size_t i = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kWidth;
  if (i >= count) return;
  const Pack<kWidth> a = *reinterpret_cast<const Pack<kWidth>*>(in + i);
  Pack<kWidth> result;
  for (int j = 0; j < kWidth; ++j) {
    result.values[j] = __float2half_rn(sigmoid(__half2float(a.values[j])));
  }
  *reinterpret_cast<Pack<kWidth>*>(out + i) = result;
}

template <int kWidth>
__global__ void multiply(const half* left, const half* right, half* out, size_t count) {
  const size_t i = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kWidth;
  if (i >= count) return;
  const Pack<kWidth> a = *reinterpret_cast<const Pack<kWidth>*>(left + i);
  const Pack<kWidth> b = *reinterpret_cast<const Pack<kWidth>*>(right + i);
  Pack<kWidth> product;
  for (int j = 0; j < kWidth; ++j) {
    product.values[j] = __float2half_rn(__half2float(a.values[j]) * __half2float(b.values[j]));
  }
  *reinterpret_cast<Pack<kWidth>*>(out + i) = product;
}

constexpr int kThreads = 256;

template <int kWidth>
unsigned blocks(size_t count) {
  return static_cast<unsigned>((count / kWidth + kThreads - 1) / kThreads);
}

// ---- The library's product ----------------------------------------------------------------------

// c (m, n) = a (m, k) b (k, n), fp16, row-major, fp32 accumulation; operands swapped as in
// lesson 4.
void matmul(cublasHandle_t blas, const half* a, const half* b, half* c, int64_t m, int64_t n,
            int64_t k) {
  const float one = 1, zero = 0;
  CUBLAS_CHECK(cublasGemmEx(
      blas, CUBLAS_OP_N, CUBLAS_OP_N, static_cast<int>(n), static_cast<int>(m), static_cast<int>(k),
      &one, b, CUDA_R_16F, static_cast<int>(n), a, CUDA_R_16F, static_cast<int>(k), &zero, c,
      CUDA_R_16F, static_cast<int>(n), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

// -------------------------------------------------------------------------------------------------

// The six kernels, in the buffers that a framework's allocator would hand out: memory that is no
// longer needed is given to the next result. So besides x and the weights three (M, H) buffers
// suffice: `first`, `second`, and out itself.
template <int kWidth>
struct Framework {
  const GatingProblem& layer;
  Buffer<half> first, second;  ///< (M, H) each

  static constexpr int kSteps = 6;

  void run(int step) const {
    const auto [M, K, H] = layer.shape;
    const size_t count = static_cast<size_t>(M) * H;
    const Buffer<half>& out = layer.out;
    switch (step) {
      case 0:
        return matmul(layer.blas, layer.x, layer.W1, first, M, H, K);
      case 1:
        return add_bias<kWidth>
            <<<blocks<kWidth>(count), kThreads>>>(first, layer.b1, out, count, H);
      case 2:
        return apply_sigmoid<kWidth><<<blocks<kWidth>(count), kThreads>>>(out, first, count);
      case 3:
        return matmul(layer.blas, layer.x, layer.W2, out, M, H, K);
      case 4:
        return add_bias<kWidth>
            <<<blocks<kWidth>(count), kThreads>>>(out, layer.b2, second, count, H);
      case 5:
        return multiply<kWidth><<<blocks<kWidth>(count), kThreads>>>(first, second, out, count);
    }
  }
  void run_until(int end) const {
    for (int step = 0; step < end; ++step) run(step);
  }

  /// (A first reader may skip this.) A row per step. is_step gives it work and a result of its own.
  /// Before the row is checked, run_until runs the steps before it, which make its inputs.
  void add_steps() const {
    const double m = static_cast<double>(layer.shape.rows),
                 k = static_cast<double>(layer.shape.channels),
                 h = static_cast<double>(layer.shape.hidden);
    const Work product{.flops = 2 * m * k * h, .bytes = 2 * (m * k + k * h + m * h)};
    const Work bias{.flops = m * h, .bytes = 2 * (2 * m * h + h)};
    struct Step {
      const char* name;
      Role role;
      Work work;
      GatingStep result;
      const Buffer<half>& output;
      int roundings;
    };
    const Step steps[kSteps] = {
        {"t1 = x W1", Role::library, product, GatingStep::x_w1, first, 1},
        {"t2 = t1 + b1", Role::baseline, bias, GatingStep::plus_b1, layer.out, 2},
        {"t3 = sigmoid(t2)", Role::baseline, {4 * m * h, 4 * m * h}, GatingStep::sigmoid, first, 3},
        {"t4 = x W2", Role::library, product, GatingStep::x_w2, layer.out, 1},
        {"t5 = t4 + b2", Role::baseline, bias, GatingStep::plus_b2, second, 2},
        {"out = t3 * t5", Role::baseline, {m * h, 6 * m * h}, GatingStep::out, layer.out, 6},
    };
    for (int i = 0; i < kSteps; ++i) {
      const Step& step = steps[i];
      layer.problem.kernel(step.name, step.role, [this, i] { run(i); })
          .is_step(
              step.work, [this, i] { run_until(i); }, step.output, layer.expected,
              layer.tolerance(step.roundings),
              [this, result = step.result] { layer.compute_reference(result); });
    }
  }
};

template <int kWidth>
int run_lesson(Lesson& lesson, GatingShape shape) {
  Cublas blas;
  const int64_t n = lesson.n();

  // The 6, here and below: on the way to out six results are rounded to fp16.
  GatingProblem steps(lesson, blas, "the six steps", shape, 6);
  const auto temporary = [](const GatingProblem& layer) {
    return layer.problem.output<half>(layer.out.size());
  };
  const Framework<kWidth> stepwise{steps, temporary(steps), temporary(steps)};
  stepwise.add_steps();

  GatingProblem layer(lesson, blas, "layer", shape, 6);
  GatingProblem square(lesson, blas, "square", {n, n, n}, 6);
  std::deque<Framework<kWidth>> frameworks;
  std::deque<LibraryGate> libraries;
  for (GatingProblem* table : {&layer, &square}) {
    const double ends = table->x.bytes() + table->out.bytes();
    const double weights =
        table->W1.bytes() + table->b1.bytes() + table->W2.bytes() + table->b2.bytes();
    frameworks.push_back(Framework<kWidth>{*table, temporary(*table), temporary(*table)});
    const auto& framework = frameworks.back();
    table->problem
        .kernel("six kernels", Role::baseline, [&] { framework.run_until(framework.kSteps); })
        .occupies(ends + weights + framework.first.bytes() + framework.second.bytes());

    LibraryGate& library = libraries.emplace_back(*table);
    library.add().occupies(ends + library.bytes());  // whose weights lie side by side instead
  }
  layer.problem.compare("cuBLASLt + one kernel", "six kernels",
                        "Layer: with what libraries can fuse, % times as fast.");
  square.problem.compare("cuBLASLt + one kernel", "six kernels",
                         "Square: with the same fusion, % times as fast.");
  return lesson.run();
}

int main(int argc, char** argv) {
  Lesson lesson(argc, argv,
                {.name = "5_gating_unfused",
                 .title = "sigmoid(x W1 + b1) * (x W2 + b2) in six kernels, and in two",
                 .n_meaning = "M = 1024 N rows for the layer, N x N x N for the square",
                 .n_gpu = 4096,
                 .n_cpu = 136,
                 .options = {{.name = "--channels",
                              .meaning = "K, columns of x in the layer",
                              .value = 128,
                              .cpu = 64},
                             {"--hidden", "H, columns of the layer's result", 64}}});
  const GatingShape shape{layer_rows(lesson), lesson.option("--channels"),
                          lesson.option("--hidden")};
  const bool aligned = shape.hidden % 8 == 0 && lesson.n() % 8 == 0;
  return aligned ? run_lesson<8>(lesson, shape) : run_lesson<1>(lesson, shape);
}
