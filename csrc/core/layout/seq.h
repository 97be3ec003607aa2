// The offset and length of one sequence of a batch, safe for any values in the index tensors.
#pragma once

#include <cstdint>

#include "core/problem.h"

namespace flash_cute {

#ifdef __CUDACC__
#define FC_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FC_HOST_DEVICE inline
#endif

// One side, query or key, of one sequence.
struct SeqSpan {
  int64_t offset;  // its first row among the rows of all sequences; 0 when dense
  int length;
};

// Clamps offsets to [0, total] and lengths to what remains and to `longest`: no row outside the tensor is named.
FC_HOST_DEVICE SeqSpan seq_span(const int* cu, const int* used, int b, int longest, int64_t total) {
  SeqSpan span{0, longest};
  if (cu != nullptr) {
    const int64_t begin = cu[b], end = cu[b + 1];
    span.offset = begin < 0 ? 0 : begin > total ? total : begin;
    const int64_t rows = (end > total ? total : end) - span.offset;
    span.length = rows < 0 ? 0 : rows > longest ? longest : static_cast<int>(rows);
  }
  if (used != nullptr) {
    span.length = used[b] < 0 ? 0 : used[b] < span.length ? used[b] : span.length;
  }
  return span;
}

struct SeqInfo {
  SeqSpan q, k;

  FC_HOST_DEVICE SeqInfo(const FwdProblem& p, int b)
      : q(seq_span(p.varlen.cu_q, p.varlen.used_q, b, p.seqlen_q, p.total_q)),
        k(seq_span(p.varlen.cu_k, p.varlen.used_k, b, p.seqlen_k, p.total_k)) {}

  FC_HOST_DEVICE SeqInfo(SeqSpan q, SeqSpan k) : q(q), k(k) {}

  // Bottom-right alignment: query i is at key position i + shift.
  FC_HOST_DEVICE int shift() const { return k.length - q.length; }
};

}  // namespace flash_cute
