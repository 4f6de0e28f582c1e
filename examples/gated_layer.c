/* Calls the gated layer of libfused_kernels.so: out = sigmoid(x W1 + b1) * (x W2 + b2). x and the
 * biases are ones, the weights zeros, so each element of out is sigmoid(1) * 1, 0.731. */
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "fused_kernels.h"

enum { kRows = 100, kInputs = 32, kHidden = 48 };

/* fp16 on the device, each element of which has these bits. */
static void* filled(size_t count, uint16_t bits) {
  void* device = NULL;
  uint16_t* host = malloc(count * sizeof *host);
  for (size_t i = 0; host && i < count; ++i) host[i] = bits;
  if (!host || cudaMalloc(&device, count * sizeof *host) != cudaSuccess ||
      cudaMemcpy(device, host, count * sizeof *host, cudaMemcpyHostToDevice) != cudaSuccess) {
    exit(3);
  }
  free(host);
  return device;
}

int main(void) {
  /* What is not named is 0: the rows of x and of out are dense, and the gate is a sigmoid. */
  const fk_gating layer = {.size = sizeof layer,
                           .type = FK_FLOAT16,
                           .rows = kRows,
                           .inputs = kInputs,
                           .hidden = kHidden};
  const uint16_t one = 0x3c00, zero = 0;
  void *x = filled(kRows * kInputs, one), *out = filled(kRows * kHidden, zero), *workspace = NULL;
  void *w1 = filled(kInputs * kHidden, zero), *w2 = filled(kInputs * kHidden, zero);
  void *b1 = filled(kHidden, one), *b2 = filled(kHidden, one);
  size_t bytes = 0;
  uint16_t first = 0;
  if (fk_gating_workspace(&layer, &bytes) != FK_OK ||
      (bytes > 0 && cudaMalloc(&workspace, bytes) != cudaSuccess) ||
      fk_gating_forward(&layer, x, w1, w2, b1, b2, out, workspace, bytes, NULL) != FK_OK ||
      cudaMemcpy(&first, out, sizeof first, cudaMemcpyDeviceToHost) != cudaSuccess) {
    fprintf(stderr, "%s\n", fk_last_error());
    return 1;
  }
  printf("out[0] has the bits %04x\n", first); /* 39d9: fp16's nearest to 0.73106 */
  return first == 0x39d9 ? 0 : 1;
}
