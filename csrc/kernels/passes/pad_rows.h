// Copies rows of bytes to where TMA can read them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.h"

namespace flash_cute {

// Copies (batches, rows, heads, dim) of bytes into contiguous rows of `padded` numbers, with zeros behind `dim`.
cudaError_t pad_rows(const TensorView& from, int batches, int64_t rows, int heads, int dim, uint8_t* to, int padded,
                     cudaStream_t stream);

}  // namespace flash_cute
