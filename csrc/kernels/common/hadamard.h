// Rows times an orthonormal matrix: the signs of Rudin and Shapiro, then a Hadamard matrix. Sums are taken from the
// highest bit of the index to the lowest, so results have the bits of any code that does so.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flash_cute {

// 1 where the sign of a dim is negative: an odd number of adjacent ones.
__device__ __forceinline__ uint32_t sign_of_dim(uint32_t dim) {
  return __popc(dim & dim >> 1) & 1;
}

// x times the sign of a dim and the scale that makes the matrix orthonormal.
__device__ __forceinline__ float signed_and_scaled(float x, uint32_t sign, float scale) {
  return __fmul_rn(x, sign != 0 ? -scale : scale);
}

// A row's elements among consecutive lanes: chunk c of a lane is the eight from (c * lanes + lane) * 8 on.
template <int kChunks>
struct HadamardRow {
  int lanes, lane, dim;
  uint32_t signs = 0;  // of the lane's elements, a bit each

  __device__ HadamardRow(int lanes, int lane, int dim) : lanes(lanes), lane(lane), dim(dim) {
    for (int i = 0; i < 8 * kChunks; ++i) signs |= sign_of_dim((i / 8 * lanes + lane) * 8 + i % 8) << i;
  }

  // By all lanes of a warp.
  __device__ __forceinline__ void multiply(float (&x)[8 * kChunks], float scale) const {
#pragma unroll
    for (int i = 0; i < 8 * kChunks; ++i) x[i] = signed_and_scaled(x[i], signs >> i & 1, scale);
#pragma unroll
    for (int step = 4 * kChunks; step >= 8; step /= 2) add_and_subtract(x, step);
    for (int step = lanes / 2; step > 0; step /= 2) {
      const float sign = (lane & step) != 0 ? -1.f : 1.f;
#pragma unroll
      for (float& mine : x) mine = __fmaf_rn(mine, sign, __shfl_xor_sync(~0u, mine, step));
    }
#pragma unroll
    for (int step = 4; step > 0; step /= 2) {
      if (step < dim) add_and_subtract(x, step);
    }
  }

 private:
  static __device__ __forceinline__ void add_and_subtract(float (&x)[8 * kChunks], int step) {
#pragma unroll
    for (int i = 0; i < 8 * kChunks; ++i) {
      if ((i & step) != 0) continue;
      const float first = x[i], second = x[i + step];
      x[i] = __fadd_rn(first, second);
      x[i + step] = __fsub_rn(first, second);
    }
  }
};

}  // namespace flash_cute
