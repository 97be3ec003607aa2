// Rows that belong to no sequence: their outputs are 0, and their statistics those of a row that sees no key,
// whatever the index tensors say.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.h"

namespace flash_cute {

// Writes nothing where sequences lie end to end and are used whole: it then only reads the index tensors.
cudaError_t zero_fill(const FwdProblem& p, cudaStream_t stream);
cudaError_t zero_fill(const BwdProblem& p, cudaStream_t stream);

}  // namespace flash_cute
