// Copies keys and values out of pages, for kernels that cannot read them.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.h"

namespace flash_cute {

// The number of keys of each sequence in pages: seqused, or else the difference of its offsets, at most `longest`.
cudaError_t count_paged_keys(const int* cu_k, const int* used_k, int batch, int longest, int* lengths,
                             cudaStream_t stream);

// The contiguous tensors for a batch's keys and values.
struct GatheredKeys {
  TensorView k, v;
  int rows;  // that each sequence has room for
  int* lengths;  // [batch], rows that it has
};

// Copies the keys and values of every sequence out of p's pages, those of its padding excepted. A page that does not
// exist reads as zeros.
cudaError_t gather_pages(const DecodeProblem& p, const GatheredKeys& to, cudaStream_t stream);

}  // namespace flash_cute
