// Fills rows that belong to no sequence: their outputs become 0, their statistics those of a row that sees no key, for
// any values in the index tensors.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.h"

namespace flash_cute {

// Writes nothing if sequences are contiguous and used whole: it then only reads the index tensors.
cudaError_t zero_fill(const FwdProblem& p, cudaStream_t stream);
cudaError_t zero_fill(const BwdProblem& p, cudaStream_t stream);

}  // namespace flash_cute
