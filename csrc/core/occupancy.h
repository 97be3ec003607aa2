// The occupancy of clusters on a GPU.
#pragma once

#include <cuda_runtime_api.h>

namespace flash_cute {

// How many clusters of `ctas` CTAs, each with most of an SM, the current device can run at once.
cudaError_t max_active_clusters(int ctas, int& count);

}  // namespace flash_cute
