// One answer from several over parts of the keys. A warp merges one row.
#pragma once

#include "kernels/common/fragment.h"
#include "kernels/common/softmax.h"

namespace flash_cute {

CUTE_DEVICE float warp_max(float x) {
  CUTE_UNROLL
  for (int apart = 16; apart > 0; apart /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, apart));
  return x;
}

CUTE_DEVICE float warp_sum(float x) {
  CUTE_UNROLL
  for (int apart = 16; apart > 0; apart /= 2) x += __shfl_xor_sync(0xffffffff, x, apart);
  return x;
}

// Merges parts whose log-sum-exps are lse(i) and whose outputs are out(i, column), `dim` columns, with a sink, which is a
// part without output. store(column, value) gets the result; its log-sum-exp is returned. Parts that saw no key, with
// -inf, may hold anything.
template <class Lse, class Out, class Store>
CUTE_DEVICE float merge_row(int parts, Lse lse, Out out, int dim, float sink, Store store) {
  constexpr int kLanes = 32, kColumns = 4, kBatch = 8;  // columns of a lane, parts that are read at once
  const int lane = threadIdx.x % kLanes;
  float top = sink;
  for (int i = lane; i < parts; i += kLanes) top = fmaxf(top, lse(i));
  top = warp_max(top);
  const float finite_top = top == -INFINITY ? 0.f : top;
  auto weight = [&](int i) { return i < parts ? exp2_approx((lse(i) - finite_top) * kLog2e) : 0.f; };
  float total = 0.f;
  for (int i = lane; i < parts; i += kLanes) total += weight(i);
  total = warp_sum(total) + exp2_approx((sink - finite_top) * kLog2e);
  const float inverse = total == 0.f ? 0.f : __fdividef(1.f, total);

  for (int columns = lane; columns < dim + lane; columns += kLanes * kColumns) {
    float sum[kColumns] = {};
    for (int first = 0; first < parts; first += kLanes) {
      const float own = weight(first + lane);
      for (int i = 0; i < min(parts - first, kLanes); i += kBatch) {
        float x[kBatch][kColumns];
        CUTE_UNROLL
        for (int j = 0; j < kBatch; ++j) {
          CUTE_UNROLL
          for (int c = 0; c < kColumns; ++c) {
            const int column = columns + kLanes * c;
            x[j][c] = column < dim ? out(min(first + i + j, parts - 1), column) : 0.f;
          }
        }
        CUTE_UNROLL
        for (int j = 0; j < kBatch; ++j) {
          const float w = __shfl_sync(0xffffffff, own, i + j);
          CUTE_UNROLL
          for (int c = 0; c < kColumns; ++c) sum[c] += w == 0.f ? 0.f : w * x[j][c];
        }
      }
    }
    CUTE_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      const int column = columns + kLanes * c;
      if (column < dim) store(column, sum[c] * inverse);
    }
  }
  return total == 0.f ? -INFINITY : finite_top + log2f(total) * kLn2;
}

}  // namespace flash_cute
