// Online softmax step by step, as in the paper; OnlineSoftmax (kernels/common/softmax.h) is the optimized one.
#pragma once

#include "kernels/common/softmax.h"

namespace flash_cute::lab {

template <int kRows>
struct PlainSoftmax {
  float scale;
  float row_max[kRows];  // of scaled scores
  float row_sum[kRows];  // of weights, of this thread's columns only, until finish()

  CUTE_DEVICE explicit PlainSoftmax(float scale) : scale(scale) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_max[r] = -INFINITY;
      row_sum[r] = 0.f;
    }
  }

  // Turns a new block of scores (rows,columns) into weights. Sums and outputs (rows,dims) become relative to the new
  // maxima.
  template <class Scores, class Output>
  CUTE_DEVICE void exponentiate(Scores&& scores, Output&& output) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float top = -INFINITY;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) {
        scores(r, c) *= scale;
        top = fmaxf(top, scores(r, c));
      }
      const float before = row_max[r];
      row_max[r] = fmaxf(before, quad_max(top));
      const float factor = expf(before - row_max[r]);
      row_sum[r] *= factor;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(output); ++c) output(r, c) *= factor;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) {
        scores(r, c) = expf(scores(r, c) - row_max[r]);
        row_sum[r] += scores(r, c);
      }
    }
  }

  template <class Output>
  CUTE_DEVICE void finish(Output&& output) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float sum = quad_sum(row_sum[r]);
      CUTE_UNROLL
      for (int c = 0; c < size<1>(output); ++c) output(r, c) /= sum;
    }
  }
};

}  // namespace flash_cute::lab
