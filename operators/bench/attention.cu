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
  const operators::attention::Attention<T> attention({workspace_of(table->problem)}, memory, shape,
                                                     shape.scale());
  table->kernel("operator", Role::ours, attention.ways()).needs(80);
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
  AttentionShape shape = attention_shape(lesson);
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
