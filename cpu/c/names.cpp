// The runtime's functions under the names that C programs link to: those of the backend itself are
// C++'s. Each function here has a C name by its label, so that it does not clash with the function
// that it calls.
#include <cuda_runtime_api.h>

#define C_NAME(name) __asm__(#name) __attribute__((visibility("default")))

namespace cuda_cpu::c {

cudaError_t allocate(void** pointer, std::size_t size) C_NAME(cudaMalloc);
cudaError_t release(void* pointer) C_NAME(cudaFree);
cudaError_t copy(void* to, const void* from, std::size_t size, cudaMemcpyKind kind)
    C_NAME(cudaMemcpy);
cudaError_t fill(void* to, int value, std::size_t size) C_NAME(cudaMemset);
cudaError_t wait() C_NAME(cudaDeviceSynchronize);
cudaError_t choose(int device) C_NAME(cudaSetDevice);
cudaError_t create(cudaStream_t* stream) C_NAME(cudaStreamCreate);
cudaError_t wait_for(cudaStream_t stream) C_NAME(cudaStreamSynchronize);
cudaError_t destroy(cudaStream_t stream) C_NAME(cudaStreamDestroy);
cudaError_t reset() C_NAME(cudaDeviceReset);
cudaError_t begin(cudaStream_t stream, cudaStreamCaptureMode mode) C_NAME(cudaStreamBeginCapture);
cudaError_t end(cudaStream_t stream, cudaGraph_t* graph) C_NAME(cudaStreamEndCapture);
cudaError_t instantiate(cudaGraphExec_t* ready, cudaGraph_t graph, unsigned long long flags)
    C_NAME(cudaGraphInstantiate);
cudaError_t launch(cudaGraphExec_t ready, cudaStream_t stream) C_NAME(cudaGraphLaunch);
cudaError_t destroy(cudaGraphExec_t ready) C_NAME(cudaGraphExecDestroy);
cudaError_t destroy(cudaGraph_t graph) C_NAME(cudaGraphDestroy);

cudaError_t allocate(void** pointer, std::size_t size) { return cudaMalloc(pointer, size); }
cudaError_t release(void* pointer) { return cudaFree(pointer); }
cudaError_t copy(void* to, const void* from, std::size_t size, cudaMemcpyKind kind) {
  return cudaMemcpy(to, from, size, kind);
}
cudaError_t fill(void* to, int value, std::size_t size) { return cudaMemset(to, value, size); }
cudaError_t wait() { return cudaDeviceSynchronize(); }
cudaError_t choose(int device) { return cudaSetDevice(device); }
cudaError_t create(cudaStream_t* stream) { return cudaStreamCreate(stream); }
cudaError_t wait_for(cudaStream_t stream) { return cudaStreamSynchronize(stream); }
cudaError_t destroy(cudaStream_t stream) { return cudaStreamDestroy(stream); }
cudaError_t reset() { return cudaDeviceReset(); }
cudaError_t begin(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return cudaStreamBeginCapture(stream, mode);
}
cudaError_t end(cudaStream_t stream, cudaGraph_t* graph) {
  return cudaStreamEndCapture(stream, graph);
}
cudaError_t instantiate(cudaGraphExec_t* ready, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(ready, graph, flags);
}
cudaError_t launch(cudaGraphExec_t ready, cudaStream_t stream) {
  return cudaGraphLaunch(ready, stream);
}
cudaError_t destroy(cudaGraphExec_t ready) { return cudaGraphExecDestroy(ready); }
cudaError_t destroy(cudaGraph_t graph) { return cudaGraphDestroy(graph); }

}  // namespace cuda_cpu::c
