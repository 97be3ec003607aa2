// How a GPU takes clusters of CTAs.
#pragma once

#include <cuda_runtime_api.h>

namespace flash_cute {

// How many clusters of `ctas` CTAs, which take most of an SM each, the current device can run at once.
cudaError_t max_active_clusters(int ctas, int& count);

}  // namespace flash_cute
