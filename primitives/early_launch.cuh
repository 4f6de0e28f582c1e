// Programmatic dependent launch, from compute capability 9.0 on. Between two kernels of a stream
// some time passes. It shrinks if the blocks of the second kernel take their places while those of
// the first one end. CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization".
// (Not every kernel gains. Blocks that start early take the places that are free just then, so they
// may be spread less evenly over the GPU.)
#pragma once

#include <cuda_runtime.h>

#include "primitives/check.h"
#include "primitives/launch.h"

namespace primitives {

/// Whether a kernel's code was compiled for devices that have clusters and early launches (9.0 and
/// newer), and the device is taken for one.
inline bool has_clusters(AnyKernel kernel) {
  if (compute_capability() < 90) return false;
  return answer_to<bool>(kernel.address, [&] {
    cudaFuncAttributes code;
    check(cudaFuncGetAttributes(&code, kernel.address), "cudaFuncGetAttributes");
    return code.ptxVersion >= 90;
  });
}

/// How many blocks are launched. On the CPU backend it also knows which line of the source launches
/// them, for messages.
#ifdef CUDA_CPU
using Blocks = cuda_cpu::BlocksAt;
#else
using Blocks = dim3;
#endif

/// When the blocks of a launch start:
///   - usual: when the kernel before it in the stream has ended;
///   - early: sooner, as launch_early() says;
///   - together: as usual, but all at the same time. The launch fails if there is no room for all.
enum class Start { usual, early, together };

/// A launch in clusters, as the runtime takes it.
struct ClusterLaunch {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};

  ClusterLaunch(cudaStream_t stream, AnyKernel kernel, unsigned cluster, Start start, dim3 blocks,
                dim3 threads, size_t shared_bytes) {
    const bool early = start == Start::early;
    const bool modern = (cluster > 1 || early) && has_clusters(kernel);
    config.gridDim = blocks;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    if (cluster > 1 && modern) {
      cudaLaunchAttribute& size = attributes[config.numAttrs++];
      size.id = cudaLaunchAttributeClusterDimension;
      size.val.clusterDim.x = cluster;
      size.val.clusterDim.y = size.val.clusterDim.z = 1;
    }
    if (early && modern) {
      cudaLaunchAttribute& serialization = attributes[config.numAttrs++];
      serialization.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      serialization.val.programmaticStreamSerializationAllowed = 1;
    }
    if (start == Start::together) {
      cudaLaunchAttribute& together = attributes[config.numAttrs++];
      together.id = cudaLaunchAttributeCooperative;
      together.val.cooperative = 1;
    }
  }
  ClusterLaunch(const ClusterLaunch&) = delete;  // config points to attributes
  ClusterLaunch& operator=(const ClusterLaunch&) = delete;
};

/// Launches a kernel in clusters of `cluster` blocks, if the kernel itself does not say how many.
/// With 1 it is launched as the kernel says. Code for older devices starts as usual instead of
/// early.
template <typename... Parameters, typename... Arguments>
void launch_clusters_on(cudaStream_t stream, void (*kernel)(Parameters...), unsigned cluster,
                        Start start, Blocks blocks, dim3 threads, size_t shared_bytes,
                        const Arguments&... arguments) {
  const ClusterLaunch of(stream, kernel, cluster, start, blocks, threads, shared_bytes);
#ifdef CUDA_CPU
  const cuda_cpu::LaunchAt launch(&of.config, blocks.site);
#else
  const cudaLaunchConfig_t* const launch = &of.config;
#endif
  check(cudaLaunchKernelEx(launch, kernel, arguments...), "cudaLaunchKernelEx");
}

/// The same, early or as usual.
template <typename... Parameters, typename... Arguments>
void launch_clusters_on(cudaStream_t stream, void (*kernel)(Parameters...), unsigned cluster,
                        bool early, Blocks blocks, dim3 threads, size_t shared_bytes,
                        const Arguments&... arguments) {
  launch_clusters_on(stream, kernel, cluster, early ? Start::early : Start::usual, blocks, threads,
                     shared_bytes, arguments...);
}

/// The same on the default stream.
template <typename... Parameters, typename... Arguments>
void launch_clusters(void (*kernel)(Parameters...), unsigned cluster, bool early, Blocks blocks,
                     dim3 threads, size_t shared_bytes, const Arguments&... arguments) {
  launch_clusters_on(nullptr, kernel, cluster, early, blocks, threads, shared_bytes, arguments...);
}

/// Launches a kernel whose blocks may start before the kernel before it in the stream has ended: as
/// soon as all blocks of that one have called start_next_kernel() or ended, and there is room.
///
/// Such a kernel has to call wait_for_previous_kernel(), in one thread at least, before it reads or
/// writes anything that an earlier kernel of the stream may use. (There is one exception. If the
/// kernel before it was launched as usual, then all kernels before that one had ended when it
/// began. What these have left may be read at once. For example, kernels 1 and 2 are launched as
/// usual, and kernel 3 early. Kernel 3 may read at once what kernel 1 has written, but not what
/// kernel 2 has written.) Code for older devices does not wait, and is launched as usual.
template <typename... Parameters, typename... Arguments>
void launch_early(void (*kernel)(Parameters...), Blocks blocks, dim3 threads, size_t shared_bytes,
                  const Arguments&... arguments) {
  launch_clusters(kernel, 1, true, blocks, threads, shared_bytes, arguments...);
}

/// Waits until the kernel before this one has ended; what it has written can be read then. PTX ISA,
/// "Parallel Synchronization and Communication Instructions: griddepcontrol".
__device__ inline void wait_for_previous_kernel() {
#ifdef CUDA_CPU
  cuda_cpu::wait_for_previous_kernel();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next kernel begin: when each block of this kernel has come here or ended, blocks of the
/// next one may start where there is room. By then no block of this kernel is left that has not
/// started.
__device__ inline void start_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace primitives
