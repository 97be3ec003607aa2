// Rows that no warp can hold: more than 1024 dims that share a descale or a Hadamard matrix. A CTA has a row in shared
// memory, or in global memory if it is too long for that.
#pragma once

#include "kernels/common/hadamard.h"
#include "kernels/common/pdl.h"
#include "kernels/passes/quantize_tiles.h"

namespace flash_cute {

constexpr int kWideThreads = 256;
constexpr int kWideCtas = 512;
constexpr int kWideInShared = 8192;  // dims

// After this all threads have the largest of their numbers.
__device__ inline float largest_of_cta(float size) {
  __shared__ float of_warps[kWideThreads / 32];
  size = largest_of_lanes(size, 32);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = size;
  // After this barrier the largest of each warp is there.
  __syncthreads();
  for (float of_warp : of_warps) size = fmaxf(size, of_warp);
  // After this barrier all have read them.
  __syncthreads();
  return size;
}

// A row of a head without the mean, times the Hadamard matrix.
template <class Element>
__device__ void prepare_wide(const QuantizePass& p, const Element* from, const float* mean, float* row) {
  for (int dim = threadIdx.x; dim < p.dim; dim += kWideThreads) {
    float x = float(from[dim * p.dim_step]);
    if (mean != nullptr) x = __fsub_rn(x, mean[dim]);
    row[dim] = p.hadamard ? signed_and_scaled(x, sign_of_dim(dim), p.hadamard_scale) : x;
  }
  // After this barrier the row is there.
  __syncthreads();
  if (!p.hadamard) return;
  for (int step = p.dim / 2; step > 0; step /= 2) {
    for (int pair = threadIdx.x; pair < p.dim / 2; pair += kWideThreads) {
      const int place = pair / step * step * 2 + pair % step;
      const float first = row[place], second = row[place + step];
      row[place] = __fadd_rn(first, second);
      row[place + step] = __fsub_rn(first, second);
    }
    // After this barrier the sums and differences are there.
    __syncthreads();
  }
}

// Raises `largest` by each row, or if `kRounds` writes values, and descales of rows.
template <class Element, bool kRounds>
__global__ void __launch_bounds__(kWideThreads, 2) wide_rows(const __grid_constant__ QuantizePass p) {
  extern __shared__ float shared[];
  // After this wait the means, or the largest of all rows, are there.
  wait_on_dependent_grids();
  float* const row = p.dim <= kWideInShared ? shared : p.wide_rows + int64_t(blockIdx.x) * p.dim;
  const int count = static_cast<int>(p.all_rows() * p.heads);  // more would exceed any memory
  for (int number = blockIdx.x; number < count; number += gridDim.x) {
    const int head = number % p.heads;
    const RowBlock rows = one_row(p, number / p.heads);
    if (!kRounds && !rows.is_of_sequence) continue;
    const int64_t of_head = int64_t(rows.sequence) * p.heads + head;
    const float* const mean = p.mean == nullptr ? nullptr : p.mean + of_head * p.dim;
    const auto* const x = static_cast<const Element*>(p.x) + offset_of_row(p, rows.sequence, rows.first);
    prepare_wide(p, x + head * p.head_step, mean, row);
    float size = 0.f;
    for (int dim = threadIdx.x; dim < p.dim; dim += kWideThreads) size = fmaxf(size, finite_size(row[dim]));
    const bool of_channels = p.scaling == QuantizeE4M3::Scaling::Channel;
    if (!kRounds && of_channels) {
      for (int dim = threadIdx.x; dim < p.dim; dim += kWideThreads)
        raise(&p.largest[p.descale_at(rows.sequence, head, dim)], finite_size(row[dim]));
    }
    const bool of_rows = p.scaling == QuantizeE4M3::Scaling::Row;
    size = largest_of_cta(size);
    if (!kRounds && !of_channels && threadIdx.x == 0) raise(&p.largest[p.descale_at(rows.sequence, head, 0)], size);
    if (kRounds) {
      if (of_rows && threadIdx.x == 0) p.descale[number] = descale_of(size, p.power_of_two);
      for (int dim = threadIdx.x; dim < p.dim; dim += kWideThreads) {
        const float largest = of_rows             ? size
                              : rows.sequence < 0 ? 0.f
                                                  : p.largest[p.descale_at(rows.sequence, head, dim)];
        const auto divisor = E4M3Divisor::of(descale_of(largest, p.power_of_two));
        p.values[int64_t(number) * p.dim + dim] = static_cast<uint8_t>(round_to_e4m3(divisor.quotient(row[dim]), 0.f));
      }
    }
    // After this barrier nobody reads the row any more.
    __syncthreads();
  }
  if (kRounds) write_descales(p);
}

}  // namespace flash_cute
