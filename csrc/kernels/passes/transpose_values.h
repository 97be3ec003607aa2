// Writes V of e4m3 with keys as the contiguous dimension.
#pragma once

#include <cuda_runtime_api.h>

#include "core/workspace.h"

namespace flash_cute {

// Fills p.values and p.key_factors. Keys behind a sequence's end are zeros, and so are those of a page that does not
// exist.
cudaError_t transpose_values(const FwdParams& p, cudaStream_t stream);

}  // namespace flash_cute
