// The pass before forward and decode that fills rows of no packed sequence: kernels/common/gap_fill.h.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.h"

namespace flash_cute {

// Writes nothing if sequences are contiguous and used whole: it then only reads the index tensors.
cudaError_t zero_fill(const FwdProblem& p, cudaStream_t stream);

}  // namespace flash_cute
