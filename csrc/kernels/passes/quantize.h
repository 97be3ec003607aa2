// A tensor rounded to e4m3, with its descales: x without the mean of each sequence, times a Hadamard matrix with signs,
// divided by its descale, each of the three in fp32.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flash_cute {

struct QuantizeE4M3 {
  enum class Element { FP16, BF16, FP32 };
  enum class Scaling { Head, Tensor, Row, Channel };  // what shares a descale

  const void* x;  // [batch, rows, heads, dim], or with cu_seqlens [rows, heads, dim]
  Element element;
  int64_t batch_step, row_step, head_step, dim_step;  // of x, in elements
  bool vectors;  // eight elements of a row begin at a multiple of 16 bytes, and follow each other
  const int* cu_seqlens;  // [batch + 1], may be null
  int batch, rows, heads, heads_k, dim;
  Scaling scaling;
  bool power_of_two, hadamard;
  uint8_t* values;  // as x, contiguous
  float* descale;  // [batch, heads_k], [1], as x with one dim, or [batch, heads, dim]
  float* mean;  // [batch, heads, dim], may be null

  constexpr int64_t all_rows() const { return cu_seqlens == nullptr ? int64_t(batch) * rows : rows; }
  constexpr int64_t columns() const { return int64_t(heads) * dim; }
};

// The fp32 numbers that quantize_e4m3() needs as workspace.
int64_t quantize_workspace(const QuantizeE4M3& p);
cudaError_t quantize_e4m3(const QuantizeE4M3& p, float* workspace, cudaStream_t stream);

}  // namespace flash_cute
