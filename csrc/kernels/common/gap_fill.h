// Rows that belong to no packed sequence: their outputs become 0, their statistics those of a row that sees no key, for
// any values in the index tensors. Backward's first pass fills them, and Hopper's forward, while
// others write; kernels/passes/zero_fill.h does before all others.
#pragma once

#include "core/layout/gaps.h"
#include "core/workspace.h"
#include "kernels/common/fragment.h"

namespace flash_cute {

// One output of packed sequences.
struct GapFill {
  const int *cu, *used;  // [batch + 1]; [batch], may be null
  int batch, longest;
  int64_t total;
  int heads, head_dim;
  int element_bytes;  // 2 or 4
  TensorView out;  // set to 0
  RowStats first, second;  // set to `statistic`; may be null
  float statistic;

  static GapFill of_queries(const FwdProblem& p, const TensorView& out, int head_dim, int bytes, const RowStats& first,
                            const RowStats& second, float statistic) {
    return {p.varlen.cu_q, p.varlen.used_q, p.batch, p.seqlen_q, p.total_q, p.heads,
            head_dim,      bytes,           out,     first,      second,    statistic};
  }
  static GapFill of_keys(const FwdProblem& p, const TensorView& out, int head_dim, int bytes) {
    return {p.varlen.cu_k, p.varlen.used_k, p.batch, p.seqlen_k, p.total_k, p.heads_k,
            head_dim,      bytes,           out,     {},         {},        0.f};
  }

  CUTE_DEVICE void clear(int64_t row, int head, int col) const {
    const int64_t at = row * out.row + head * out.head + col;
    if (element_bytes == 2) {
      static_cast<uint16_t*>(out.ptr)[at] = 0;
    } else {
      static_cast<uint32_t*>(out.ptr)[at] = 0;
    }
  }

  // A warp's share: some gaps are each warp's of a CTA, and every `ctas`-th of their rows each CTA's.
  CUTE_DEVICE void fill(int warp, int warps, int cta, int ctas) const {
    const int lane = threadIdx.x % 32;
    bool ascending = true;
    CUTE_NO_UNROLL
    for (int b = lane; b < batch; b += 32) ascending = ascending && cu[b] <= cu[b + 1];
    ascending = __all_sync(~0u, ascending);
    CUTE_NO_UNROLL
    for (int first_gap = 32 * warp; first_gap <= batch; first_gap += 32 * warps) {
      RowRange own{0, 0};
      if (first_gap + lane <= batch) {
        own = gap_of(first_gap + lane, batch, total, ascending,
                     [&](int i) { return seq_span(cu, used, i, longest, total); });
      }
      CUTE_NO_UNROLL
      for (uint32_t left = __ballot_sync(~0u, own.begin < own.end); left != 0; left &= left - 1) {
        const int source = __ffs(static_cast<int>(left)) - 1;
        const int64_t begin = __shfl_sync(~0u, own.begin, source), end = __shfl_sync(~0u, own.end, source);
        CUTE_NO_UNROLL
        for (int64_t row = begin + cta; row < end; row += ctas) fill_row(row, lane);
      }
    }
  }

 private:
  CUTE_DEVICE void fill_row(int64_t row, int lane) const {
    CUTE_NO_UNROLL
    for (int head = 0; head < heads; ++head) {
      CUTE_NO_UNROLL
      for (int col = lane; col < head_dim; col += 32) clear(row, head, col);
    }
    CUTE_NO_UNROLL
    for (int head = lane; head < heads; head += 32) {
      if (first.ptr != nullptr) first.ptr[head * first.head + row] = statistic;
      if (second.ptr != nullptr) second.ptr[head * second.head + row] = statistic;
    }
  }
};

// The outputs of an op.
template <Op op>
struct GapFills {
  static constexpr int kCount = op == Op::Bwd ? 3 : 1, kCtas = 32;
  GapFill of[kCount];

  static GapFills of_outputs(const Problem<op>& p) {
    if constexpr (op == Op::Bwd) {
      const FwdProblem& f = p.fwd;
      const int bytes = p.fp32_gradients ? static_cast<int>(sizeof(float)) : element_bytes(f.dtype);
      return {{GapFill::of_queries(f, p.dq, f.head_dim, bytes, p.softmax_d, {}, 0.f),
               GapFill::of_keys(f, p.dk, f.head_dim, bytes), GapFill::of_keys(f, p.dv, f.head_dim_v, bytes)}};
    } else {
      return {{GapFill::of_queries(p, p.out, p.head_dim_v, p.out_bytes(), p.lse, p.row_max, -INFINITY)}};
    }
  }

  // By `warps` warps of each of `ctas` CTAs, of which these are number `warp` and number `cta`.
  CUTE_DEVICE void fill(int warp, int warps, int cta, int ctas) const {
    CUTE_NO_UNROLL
    for (int i = 0; i < kCount; ++i) of[i].fill(warp, warps, cta, ctas);
  }
};

}  // namespace flash_cute
