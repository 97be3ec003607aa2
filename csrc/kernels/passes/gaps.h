// Rows that belong to no sequence: their outputs are 0 and their LSE is -inf, whatever the index tensors say.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.h"

namespace flash_cute {

struct GapFill {
  const int* cu;    // [batch + 1]
  const int* used;  // [batch], may be null
  int batch, longest;
  int64_t total;
  int heads, head_dim;
  int element_bytes;         // 2 or 4
  Matrices matrices;         // set to 0
  Statistics first, second;  // set to `statistic`; may be null
  float statistic;
};

inline GapFill query_gaps(const FwdProblem& p, const Matrices& m, int head_dim, const Statistics& first,
                          const Statistics& second, float statistic) {
  return {p.sequences.cu_q, p.sequences.used_q,     p.batch, p.seqlen_q, p.total_q, p.heads,
          head_dim,         element_bytes(p.dtype), m,       first,      second,    statistic};
}

inline GapFill key_gaps(const FwdProblem& p, const Matrices& m, int head_dim) {
  return {p.sequences.cu_k, p.sequences.used_k,     p.batch, p.seqlen_k, p.total_k, p.heads_k,
          head_dim,         element_bytes(p.dtype), m,       {},         {},        0.f};
}

// Writes nothing where sequences lie end to end and are used whole: it then only reads `cu`.
cudaError_t fill_gaps(const GapFill& gaps, cudaStream_t stream);

}  // namespace flash_cute
