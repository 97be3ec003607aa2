// Appends new keys and values to the cache, and applies rotary embedding to keys and queries.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.h"

namespace flash_cute {

// Writes the new rows that fit into the cache, and rotated queries to fwd.q. The next kernel on the stream may start
// before this pass ends: after all previous kernels have ended, or, if it waits for this pass before it relies on
// memory, even earlier. `next_ctas` are its CTAs that run at once in that case, else 0.
cudaError_t append_keys(const DecodeProblem& p, cudaStream_t stream, int next_ctas = 0);

}  // namespace flash_cute
