// Bonus. Attention's gradients
//
//     P  = exp(scale Q K^T - log_sums)       as forward (bonus_attention) left the logarithms
//     dV = P^T dO        dP = dO V^T         D(s) = sum over the columns of dO(s) out(s)
//     dS = P (dP - D)    dQ = scale dS K     dK = scale dS^T Q
//     Q, out, dO, dQ (batch, S, heads, width), K, V, dK, dV (batch, T, kv_heads, width): bf16 or
//     fp16, row-major; log_sums (batch, heads, S): fp32
//
// Head h of Q reads head g of K and V; where there are fewer of these, neighbouring heads share
// one, whose dK and dV are the sums over these heads. With a causal mask query s sees the keys t <=
// s + T - S only.
//
// Forward kept neither the logits nor the probabilities: they are computed again. That makes five
// products for forward's two. In forward a block owned rows of Q, and their results never left it.
// Here something has to: dQ is a sum over the keys, and dK and dV are sums over the queries, so
// whatever a block owns, one of them comes in parts from many blocks.
//
//     library              cuBLAS's five products: logits, P, dP and dS go through memory
//
// --causal and --full print one of the two tables.

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "primitives/launch.h"
#include "problems/attention/backward.h"
#include "problems/attention/library_backward.cuh"

using namespace problems;
using namespace primitives;

// What a kernel gets. group: how many heads of Q share one of K and V. row_sums (batch, heads,
// queries) is D; dq_sums (batch, queries, heads, width) is where parts of dQ are added up.
template <typename T>
struct Operands {
  const T *Q, *K, *V, *out, *d_out;
  const float* log_sums;
  T *dQ, *dK, *dV;
  float* row_sums;
  float* dq_sums;
  int batch, queries, keys, heads, group;
  bool causal;
  float scale;

  // The first key that query s does not see.
  __device__ int limit(int s) const {
    return causal ? max(0, min(keys, s + keys - queries + 1)) : keys;
  }
};

// -------------------------------------------------------------------------------------------------

template <typename T>
struct Table : AttentionBackwardProblem<T> {
  Table(Lesson& lesson, cublasHandle_t blas, const std::string& name, const AttentionShape& shape,
        std::function<void(double)> report)
      : AttentionBackwardProblem<T>(lesson, blas, name, shape, std::move(report)),
        row_sums(this->problem.template output<float>(shape.rows())),
        dq_sums(this->problem.template output<float>(shape.query_elements())) {}

  Operands<T> operands() const {
    const AttentionShape& of = this->shape;
    const auto narrow = [](int64_t value) { return static_cast<int>(value); };
    return {this->Q,
            this->K,
            this->V,
            this->out,
            this->d_out,
            this->log_sums,
            this->dQ,
            this->dK,
            this->dV,
            row_sums,
            dq_sums,
            narrow(of.batch),
            narrow(of.queries),
            narrow(of.keys),
            narrow(of.heads),
            narrow(of.group()),
            of.causal,
            of.scale()};
  }

  Buffer<float> row_sums, dq_sums;  // workspace of all rows
};

template <typename T>
void add_table(Lesson& lesson, cublasHandle_t blas, const std::string& type, AttentionShape shape,
               const std::function<void(double)>& report,
               std::vector<std::shared_ptr<void>>& tables) {
  const std::string name = type + (shape.causal ? " causal" : " full");
  const auto table = std::make_shared<Table<T>>(lesson, blas, name, shape, report);
  tables.push_back(table);
  const auto library = std::make_shared<LibraryAttentionBackward<T>>(blas, *table);
  table->kernel("library", Role::library, [library] { (*library)(); });
}

int main(int argc, char** argv) {
  Lesson lesson(
      argc, argv,
      {.name = "bonus_attention_backward",
       .title = "The gradients of attention",
       .n_meaning = "S, queries of a head",
       .n_gpu = 4096,
       .n_cpu = 70,
       // Tiles of keys of which the last is not full; and heads that share keys.
       .options = {{.name = "--keys",
                    .meaning = "T, keys of a head; 0: as many as queries",
                    .value = 0,
                    .cpu = 150},
                   {"--width", "columns of a head, at most 256", 128},
                   {.name = "--heads", .meaning = "of Q; 0: 2048 / width", .value = 0, .cpu = 2},
                   {.name = "--kv-heads",
                    .meaning = "of K and V, a divisor of --heads; 0: as many",
                    .value = 0,
                    .cpu = 1},
                   {.name = "--batch",
                    .meaning = "0: as many as make 16384 queries",
                    .value = 0,
                    .cpu = 1}},
       .flags = {{"--causal", "only the table with the causal mask"},
                 {"--full", "only the table without it"},
                 {"--fp16", "fp16 in place of bf16"}}});
  AttentionShape shape;
  shape.queries = lesson.n();
  shape.width = lesson.option("--width");
  if (shape.width < 1 || shape.width > 256) fail(kBadUsage, "--width is from 1 to 256");
  const auto or_else = [&](const char* option, int64_t value) {
    return lesson.option(option) > 0 ? lesson.option(option) : std::max<int64_t>(1, value);
  };
  shape.keys = or_else("--keys", shape.queries);
  shape.heads = or_else("--heads", lesson.on_cpu() ? 2 : 2048 / shape.width);
  shape.kv_heads = or_else("--kv-heads", shape.heads);
  shape.batch = or_else("--batch", lesson.on_cpu() ? 1 : 16384 / shape.queries);
  if (shape.heads % shape.kv_heads != 0) {
    fail(kBadUsage, "--kv-heads has to be a divisor of --heads");
  }

  Cublas blas;
  std::vector<std::shared_ptr<void>> tables;
  double worst = 0;
  for (const bool causal : {false, true}) {
    if (lesson.flag(causal ? "--full" : "--causal")) continue;
    shape.causal = causal;
    const bool last = causal || lesson.flag("--full");
    const auto report = [&, last](double difference) {
      worst = std::max(worst, difference);
      char text[128];
      snprintf(text, sizeof text,
               "The reference's gradients agree with finite differences to within %.0e.", worst);
      if (last) lesson.note(text);
    };
    lesson.flag("--fp16") ? add_table<half>(lesson, blas, "fp16", shape, report, tables)
                          : add_table<__nv_bfloat16>(lesson, blas, "bf16", shape, report, tables);
  }
  return lesson.run();
}
