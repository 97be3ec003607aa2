// Combines a caller's partial results over splits of the keys.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flash_cute {

struct Partials {
  enum class Element { FP32, FP16, BF16 };
  const float* out;   // [splits, rows, dim]
  const float* lse;   // [splits, rows]
  void* result;       // [rows, dim]
  float* result_lse;  // [rows]
  Element element;    // of the result
  int splits, dim;
  int64_t rows;
};

cudaError_t combine(const Partials& partials, cudaStream_t stream);

}  // namespace flash_cute
