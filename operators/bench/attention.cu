// Benchmark of operators/attention: softmax(scale Q K^T + mask) V of any shape, beside cuBLAS with
// a softmax between its products, and cuDNN where that is found.

#include <memory>
#include <string>
#include <vector>

#include "operators/attention/layer.cuh"
#include "problems/attention/attention.h"
#include "problems/attention/cudnn.h"
#include "problems/attention/library.cuh"
#include "problems/workspace.h"

using namespace problems;

template <typename T>
void add_table(Lesson& lesson, cublasHandle_t blas, const std::string& type,
               const AttentionShape& shape, std::vector<std::shared_ptr<void>>& tables) {
  const std::string name = type + (shape.causal ? " causal" : " full");
  const auto table =
      std::make_shared<AttentionProblem<T>>(lesson, blas, name, shape, lesson.flag("--hard-rows"));
  tables.push_back(table);
  const auto library = std::make_shared<LibraryAttention<T>>(blas, *table);
  table->kernel("library", Role::library, [library] { (*library)(); });
  const std::string why = lesson.on_cpu() ? "" : add_cudnn<T>(*table);
  if (!why.empty()) lesson.note("cuDNN is left out: " + why + ".");
  const operators::attention::AttentionMemory<T> memory(shape, table->Q, table->K, table->V,
                                                        table->out, {table->lse});
  const operators::attention::Attention<T> attention(workspace_of(table->problem), memory, shape,
                                                     shape.scale());
  table->kernel("operator", Role::ours, ways_of_row(attention.ways())).needs(80);
  table->problem.compare("operator", "cuDNN", name + ": it runs at % of cuDNN's rate.");
}

int main(int argc, char** argv) {
  Lesson lesson(
      argc, argv,
      {.name = "operators_attention",
       .title = "operators/attention: softmax(scale Q K^T + mask) V of any shape",
       .n_meaning = "S, queries of a head",
       .n_gpu = 4096,
       .n_cpu = 128,
       .options = {{"--keys", "T, keys of a head; 0: as many as queries", 0},
                   {"--width", "columns of a head, at most 256", 128},
                   {.name = "--heads", .meaning = "of Q; 0: 2048 / width", .value = 0, .cpu = 2},
                   {"--kv-heads", "of K and V, a divisor of --heads; 0: as many", 0},
                   {.name = "--batch",
                    .meaning = "0: as many as make 16384 queries",
                    .value = 0,
                    .cpu = 1}},
       .flags = {{"--causal", "only the table with the causal mask"},
                 {"--full", "only the table without it"},
                 {"--fp16", "fp16 in place of bf16"},
                 {"--hard-rows", "logits of up to 2^18 scale, and of -infinity, in most rows"}}});
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
  if (lesson.flag("--hard-rows") && shape.width < kSpecialWidth) {
    fail(kBadUsage, "--hard-rows needs a width of at least %d", static_cast<int>(kSpecialWidth));
  }

  Cublas blas;
  std::vector<std::shared_ptr<void>> tables;
  for (const bool causal : {false, true}) {
    if (lesson.flag(causal ? "--full" : "--causal")) continue;
    shape.causal = causal;
    lesson.flag("--fp16") ? add_table<half>(lesson, blas, "fp16", shape, tables)
                          : add_table<__nv_bfloat16>(lesson, blas, "bf16", shape, tables);
  }
  return lesson.run();
}
