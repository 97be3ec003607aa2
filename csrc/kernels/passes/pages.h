// Keys and values that lie in pages, for kernels that read none, or none of this kind.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.h"

namespace flash_cute {

// Keys of each sequence in pages: as many as it uses, or else its step in the offsets, at most `longest`.
cudaError_t count_paged_keys(const int* cu_k, const int* used_k, int batch, int longest, int* lengths,
                             cudaStream_t stream);

// Where a sequence's keys and values are laid end to end, from row 0 of the batch on.
struct GatheredKeys {
  TensorView k, v;
  int rows;  // that each sequence has room for
  int* lengths;  // [batch], rows that it has
};

// Copies the keys and values of every sequence out of p's pages, those of its padding excepted. A page that does not
// exist reads as zeros.
cudaError_t gather_pages(const DecodeProblem& p, const GatheredKeys& to, cudaStream_t stream);

}  // namespace flash_cute
