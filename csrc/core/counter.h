// Counters in device memory: tile schedulers and arrival counts.
#pragma once

#include <cuda_runtime_api.h>

namespace flash_cute {

// Counters that are 0 whenever no kernel of this stream runs, as each kernel leaves them so. Each stream has its own,
// and each launch captured into a graph. A graph must not run beside itself (two executables of one capture could):
// both would write the same results anyway.
cudaError_t zeroed_counters(unsigned*& counters, int count, cudaStream_t stream);

}  // namespace flash_cute
