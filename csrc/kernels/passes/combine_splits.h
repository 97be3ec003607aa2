// Combines the splits of Hopper's forward.
#pragma once

#include <cuda_runtime_api.h>

#include "core/workspace.h"

namespace flash_cute {

// Fills out, lse and row_max; the sink joins here. Launched right after the kernel that writes the splits.
cudaError_t combine_splits(const FwdParams& p, cudaStream_t stream);

}  // namespace flash_cute
