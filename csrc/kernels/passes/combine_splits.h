// Forward's results over parts of the keys become one.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.h"

namespace flash_cute {

// Fills out, lse and row_max; the sink joins here. To be called right behind the kernel that gives the parts.
cudaError_t combine_splits(const FwdProblem& p, cudaStream_t stream);

}  // namespace flash_cute
