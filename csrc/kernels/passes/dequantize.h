// Numbers of e4m3 times their descales, in 16 bits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/config.h"

namespace flash_cute {

struct DequantizeE4M3 {
  const uint8_t* values;  // contiguous (rows, heads, dim)
  const float* descale;   // each of so many consecutive heads
  int heads_of_descale;
  int heads, dim;
  int64_t numbers;
  void* out;  // contiguous
  DType dtype;  // FP16 or BF16
};

cudaError_t dequantize_e4m3(const DequantizeE4M3& p, cudaStream_t stream);

}  // namespace flash_cute
