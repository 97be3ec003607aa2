// New keys and values join the cache, and rotary embedding rotates keys and queries on the way.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.h"

namespace flash_cute {

// Writes what fits of the new rows into the cache, and rotated queries to fwd.q. The next kernel on the stream may
// start before it ends: when all that came before has ended, or yet earlier beside its `next_ctas` that run at once, if
// it waits for this one before it relies on anything in memory (else 0).
cudaError_t append_keys(const DecodeProblem& p, cudaStream_t stream, int next_ctas = 0);

}  // namespace flash_cute
