// Programmatic dependent launch (Hopper and newer): a kernel starts while the previous one in the stream still runs.
// Host side: launch_with_pdl() in kernels/launch.h.
#pragma once

#include <cuda_runtime.h>

namespace flash_cute {

// Whether this architecture has it.
__device__ constexpr bool has_pdl() {
#if __CUDA_ARCH__ >= 900
  return true;
#else
  return false;
#endif
}

// After this wait all writes of the previous kernel are visible.
__device__ __forceinline__ void wait_on_dependent_grids() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// Lets the next kernel start, once every CTA has called it or exited.
__device__ __forceinline__ void launch_dependent_grids() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

}  // namespace flash_cute
