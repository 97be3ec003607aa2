// A kernel that starts while the one before it in the stream is still running (programmatic dependent launch, on Hopper
// and newer): launch_with_pdl() in kernels/launch.h.
#pragma once

#include <cuda_runtime.h>

namespace flash_cute {

// Whether kernels can, here.
__device__ constexpr bool has_pdl() {
#if __CUDA_ARCH__ >= 900
  return true;
#else
  return false;
#endif
}

// After this everything that the kernel before has written is visible.
__device__ __forceinline__ void wait_on_dependent_grids() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// The next kernel may start once every CTA has said so; it waits for the end of this one before it reads its results.
__device__ __forceinline__ void launch_dependent_grids() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

}  // namespace flash_cute
