// Counters in device memory by which persistent CTAs share out tiles, or tell each other what is done.
#pragma once

#include <cuda_runtime_api.h>

namespace flash_cute {

// Counters that are 0 whenever no kernel of this stream is running, as long as each kernel leaves them so. Each stream
// has its own, and so has each launch that is captured into a graph. A graph must therefore not run beside itself, as
// two executable graphs made from one capture could: both would write the same results, too.
cudaError_t zeroed_counters(unsigned*& counters, int count, cudaStream_t stream);

}  // namespace flash_cute
