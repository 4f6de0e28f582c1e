// Which code may use Hopper's instructions (sm_90a).
#pragma once

// True while compiling device code that may use these instructions. A kernel's body stands between
// #if HOPPER_CODE and #endif, so that it is empty for other architectures.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(CUDA_CPU)
#define HOPPER_CODE 1
#else
#define HOPPER_CODE 0
#endif

// The same for the instructions of clusters, which later architectures have, too.
#if (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900) || defined(CUDA_CPU)
#define CLUSTER_CODE 1
#else
#define CLUSTER_CODE 0
#endif

/// Stands on a kernel whose blocks come in clusters of `blocks`, where the architecture has
/// clusters.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define HOPPER_CLUSTER(blocks)
#else
#define HOPPER_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#endif
