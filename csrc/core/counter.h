// Counters in device memory by which persistent CTAs share out tiles.
#pragma once

#include <cuda_runtime_api.h>

namespace flash_cute {

// A counter that is 0 whenever no kernel of this stream is running, as long as each kernel leaves it so. No two kernels
// that may run at once get the same one: each stream has its own, and so has each launch that is captured into a graph.
cudaError_t tile_counter(unsigned*& counter, cudaStream_t stream);

}  // namespace flash_cute
