// Counters in device memory: tile schedulers and arrival counts.
#pragma once

#include <cuda_runtime_api.h>

namespace flash_cute {

// Counters that are 0 while no kernel of this stream runs: each kernel resets them. Each stream has its own, and so has
// each launch captured into a graph. Two executables of one capture must not run concurrently: they would also write
// the same results.
cudaError_t zeroed_counters(unsigned*& counters, int count, cudaStream_t stream);

}  // namespace flash_cute
