// The signed probabilities of return_softmax, for study; they are not fast.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.h"

namespace flash_cute {

// Fills p.softmax after forward has written p.lse: exp(score - lse), negative where dropout drops it, 0 where the query
// does not see the key or one of the two does not exist.
cudaError_t write_probabilities(const FwdProblem& p, cudaStream_t stream);

}  // namespace flash_cute
