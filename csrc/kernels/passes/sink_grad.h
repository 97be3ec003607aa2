// The gradient of the sinks.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.h"

namespace flash_cute {

// p.dsink, all of it: -sum over batch and rows of exp(sink - lse) * softmax_d, in the same order every time.
cudaError_t sink_gradient_pass(const BwdProblem& p, cudaStream_t stream);

}  // namespace flash_cute
