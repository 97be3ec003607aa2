// Combining partial results over splits of the keys (flash-decoding).
#pragma once

#include "kernels/common/fragment.h"
#include "kernels/common/softmax.h"

namespace flash_cute {

CUTE_DEVICE float warp_max(float x) {
  CUTE_UNROLL
  for (int apart = 16; apart > 0; apart /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, apart));
  return x;
}

// One thread combines a row of kCount partial results with their sums, and a sink, which has no output.
template <int kCount>
class MergedRow {
 public:
  CUTE_DEVICE explicit MergedRow(const RowSum (&sums)[kCount], float sink = -INFINITY) {
    float top = -FLT_MAX, keys = 0.f;
    CUTE_UNROLL
    for (int n = 0; n < kCount; ++n) top = fmaxf(top, sums[n].reference);
    CUTE_UNROLL
    for (int n = 0; n < kCount; ++n) {
      weight_[n] = exp2_approx(sums[n].reference - top);
      keys += weight_[n] * sums[n].value;
    }
    const SinkWeight beside(top, sink * kLog2e);
    damping_ = beside.damping;
    sum_ = {beside.top, keys * damping_ * damping_ + beside.weight};
  }

  CUTE_DEVICE const RowSum& sum() const { return sum_; }
  CUTE_DEVICE float lse() const {
    return sum_.value == 0.f ? -INFINITY : (sum_.reference + __log2f(sum_.value)) * kLn2;
  }

  // kWidth combined numbers, at from(n) in partial result n, divided by the sum.
  template <int kWidth, class From>
  CUTE_DEVICE auto outputs(From from) const {
    auto outputs = undivided<kWidth>(from);
    const float inverse = sum_.value == 0.f ? 0.f : __fdividef(damping_, sum_.value);
    CUTE_UNROLL
    for (int e = 0; e < kWidth; ++e) outputs[e] *= damping_, outputs[e] *= inverse;
    return outputs;
  }
  // The same without the division, relative to 2^reference, and without a sink.
  template <int kWidth, class From>
  CUTE_DEVICE auto undivided(From from) const {
    cutlass::Array<float, kWidth> outputs;
    outputs.fill(0.f);
    CUTE_UNROLL
    for (int n = 0; n < kCount; ++n) {
      const auto values = *reinterpret_cast<const cutlass::AlignedArray<float, kWidth>*>(from(n));
      CUTE_UNROLL
      for (int e = 0; e < kWidth; ++e) outputs[e] += weight_[n] * values[e];
    }
    return outputs;
  }

 private:
  RowSum sum_;
  float damping_;
  float weight_[kCount];
};

// One warp combines a row: splits with log-sum-exps lse(i) and outputs out(i, column), kWidth of `dim` columns at a
// time, and a sink. kBatch splits are read at once. Calls store(column, values); returns the log-sum-exp. Splits
// without keys may hold anything. With several warps, which are all of a CTA, the first one has the result.
template <int kWidth, int kBatch, int kWarps = 1, class Lse, class Out, class Store>
CUTE_DEVICE float merge_row(int splits, Lse lse, Out out, int dim, float sink, Store store) {
  using Values = cutlass::Array<float, kWidth>;
  constexpr int kLanes = 32;
  static_assert(kLanes % kBatch == 0);
  const int lane = threadIdx.x % kLanes, warp = kWarps == 1 ? 0 : threadIdx.x / kLanes;
  float merged = -INFINITY;
  for (int column = kWidth * lane; column - kWidth * lane < dim; column += kWidth * kLanes) {
    const bool there = column < dim;
    float top = -INFINITY, base = 0.f, total = 0.f;  // sums are relative to exp(base)
    Values sum;
    sum.fill(0.f);
    CUTE_NO_UNROLL
    for (int first = warp * kBatch; first < splits; first += kWarps * kBatch) {
      const int split = first + lane % kBatch;
      const float own = split < splits ? lse(split) : -INFINITY;
      Values values[kBatch];
      CUTE_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if (there) values[i] = out(min(first + i, splits - 1), column);
      }
      const float before = top;
      top = fmaxf(top, warp_max(own));
      base = top == -INFINITY ? 0.f : top;
      const float rescale = exp2_approx((before - base) * kLog2e), weight = exp2_approx((own - base) * kLog2e);
      total *= rescale;
      CUTE_UNROLL
      for (int e = 0; e < kWidth; ++e) sum[e] *= rescale;
      CUTE_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        const float w = __shfl_sync(0xffffffff, weight, i);
        total += w;
        CUTE_UNROLL
        for (int e = 0; e < kWidth; ++e) sum[e] += w == 0.f ? 0.f : w * values[i][e];
      }
    }
    if constexpr (kWarps > 1) {
      __shared__ float tops[kWarps], totals[kWarps];
      __shared__ Values sums[kWarps][kLanes];
      // After this barrier no one still reads the sums of the columns before.
      __syncthreads();
      tops[warp] = top;
      totals[warp] = total;
      sums[warp][lane] = sum;
      // After this barrier the sums of all warps are there.
      __syncthreads();
      if (warp > 0) continue;
      CUTE_UNROLL
      for (int i = 1; i < kWarps; ++i) top = fmaxf(top, tops[i]);
      base = top == -INFINITY ? 0.f : top;
      total = 0.f;
      sum.fill(0.f);
      CUTE_UNROLL
      for (int i = 0; i < kWarps; ++i) {
        const float weight = exp2_approx((tops[i] - base) * kLog2e);
        total += weight * totals[i];
        CUTE_UNROLL
        for (int e = 0; e < kWidth; ++e) sum[e] += weight * sums[i][lane][e];
      }
    }
    const SinkWeight beside(fmaxf(top, -FLT_MAX), sink, kLog2e);
    total = total * beside.damping * beside.damping + beside.weight;
    const float inverse = total == 0.f ? 0.f : __fdividef(beside.damping, total);
    CUTE_UNROLL
    for (int e = 0; e < kWidth; ++e) sum[e] *= beside.damping, sum[e] *= inverse;
    if (there) store(column, sum);
    merged = total == 0.f ? -INFINITY : beside.top + __log2f(total) * kLn2;
  }
  return merged;
}

}  // namespace flash_cute
