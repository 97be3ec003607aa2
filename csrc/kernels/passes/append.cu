#include "kernels/passes/append.h"

#include <cutlass/numeric_types.h>

#include <algorithm>

#include "kernels/common/cached_seq.h"
#include "kernels/common/overlap.h"
#include "kernels/common/tiles.h"
#include "kernels/launch.h"

namespace flash_cute {
namespace {

using detail::ceil_div;
constexpr int kThreads = 256;

// Two numbers of a vector that rotary embedding turns together.
struct Pair {
  int first, second;
};

__device__ Pair pair_of(const Rotary& rotary, int index) {
  const bool halves = rotary.cos != nullptr && !rotary.interleaved && index < rotary.half;
  return halves ? Pair{index, index + rotary.half} : Pair{2 * index, 2 * index + 1};
}

// Copies a pair, turned by the angle of a position.
template <class Element>
__device__ void copy_pair(const Rotary& rotary, int64_t position, int index, const Element* from, Element* to) {
  const Pair pair = pair_of(rotary, index);
  const float a = float(from[pair.first]), b = float(from[pair.second]);
  if (rotary.cos == nullptr || index >= rotary.half) {
    to[pair.first] = from[pair.first];
    to[pair.second] = from[pair.second];
    return;
  }
  const int64_t at = int64_t(clamped(position, rotary.positions - 1)) * rotary.half + index;
  const float cos = float(static_cast<const Element*>(rotary.cos)[at]);
  const float sin = float(static_cast<const Element*>(rotary.sin)[at]);
  to[pair.first] = Element(a * cos - b * sin);
  to[pair.second] = Element(a * sin + b * cos);
}

template <class Element>
__device__ Element* row_of(const Matrices& m, int64_t batch, int64_t row, int head) {
  return static_cast<Element*>(m.ptr) + batch * m.batch + row * m.row + int64_t(head) * m.head;
}

// What a thread does of a row whose heads have `pairs` pairs each: CTAs are in a row, a whole number of them for one row.
struct Item {
  int row, head, pair;

  static __device__ Item of_thread(int cta, int heads, int pairs) {
    const int ctas_a_row = ceil_div(heads * pairs, kThreads);
    const int index = cta % ctas_a_row * kThreads + static_cast<int>(threadIdx.x);
    return {cta / ctas_a_row, index / pairs, index % pairs};
  }

  static int64_t ctas(int64_t rows, int heads, int pairs) { return rows * ceil_div(heads * pairs, kThreads); }
};

// A pair of one head of a new row; heads of keys come first, then those of values.
template <class Element>
__device__ void append(const DecodeProblem& p, int cta, int pairs) {
  const FwdProblem& f = p.fwd;
  const auto [row, slot, pair] = Item::of_thread(cta, 2 * f.heads_k, pairs);
  const bool key = slot < f.heads_k;
  const int head = slot % f.heads_k, b = sequence_of(row, p.added.cu, f.batch, p.added.seqlen);
  const SeqSpan added = new_rows(p.added, b);
  const int64_t place = place_of(row, added, p.added.cu, p.added.seqlen);
  const int used = rows_in_use(p, b);
  if (slot >= 2 * f.heads_k || 2 * pair >= (key ? f.head_dim : f.head_dim_v)) return;
  if (place < 0 || place >= added.length || used + place >= f.seqlen_k) return;
  const int to_row = used + static_cast<int>(place);
  const int page = page_id(f.pages, b, to_row / f.pages.size);
  if (page < 0 || page >= f.pages.count) return;
  const int64_t position = (p.rotary.from == nullptr ? used : p.rotary.from[b]) + place;
  copy_pair(key ? p.rotary : Rotary{}, position, pair,
            row_of<Element>(key ? p.added.k : p.added.v, b, added.offset + place, head),
            row_of<Element>(key ? f.k : f.v, page, to_row % f.pages.size, head));
}

// A pair of one head of a query.
template <class Element>
__device__ void rotate_query(const DecodeProblem& p, int cta) {
  const FwdProblem& f = p.fwd;
  const auto [row, head, pair] = Item::of_thread(cta, f.heads, f.head_dim / 2);
  const int b = sequence_of(row, f.sequences.cu_q, f.batch, f.seqlen_q);
  const SeqSpan queries = cached_seq(p, b).q;
  const int64_t place = place_of(row, queries, f.sequences.cu_q, f.seqlen_q);
  if (head >= f.heads || place < 0 || place >= queries.length) return;
  const bool banded = f.band.left < Band::kUnbounded || f.band.right < Band::kUnbounded;
  const int64_t start = p.rotary.from == nullptr ? rows_in_use(p, b) : p.rotary.from[b];
  copy_pair(p.rotary, start + (banded ? place : 0), pair,
            row_of<Element>(p.unrotated_q, b, queries.offset + place, head),
            row_of<Element>(f.q, b, queries.offset + place, head));
}

// Keys of each sequence after the append; for one CTA.
__device__ void count_keys(const DecodeProblem& p) {
  for (int b = threadIdx.x; b < p.fwd.batch; b += kThreads) p.added.lengths[b] = cached_seq(p, b).k.length;
}

// The first CTAs append, the others rotate queries.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    append_and_rotate(const __grid_constant__ DecodeProblem p, int pairs, int appending) {
  // After this what comes before has ended, and so it has for the next kernel when that starts.
  wait_for_kernel_before();
  let_next_kernel_start();
  const int cta = static_cast<int>(blockIdx.x);
  if (cta == 0 && p.added.lengths != nullptr) count_keys(p);
  if (cta < appending) {
    append<Element>(p, cta, pairs);
  } else {
    rotate_query<Element>(p, cta - appending);
  }
}

template <class Element>
cudaError_t launch(const DecodeProblem& p, cudaStream_t stream) {
  const FwdProblem& f = p.fwd;
  const int pairs = std::max(f.head_dim, f.head_dim_v) / 2;
  const int64_t appending = Item::ctas(p.added.total, 2 * f.heads_k, pairs);
  const int64_t rotating = p.rotary.cos == nullptr ? 0 : Item::ctas(f.total_q, f.heads, f.head_dim / 2);
  if (appending > kMaxCtas) return cudaErrorInvalidConfiguration;
  return launch_overlapping<append_and_rotate<Element>>(appending + rotating, kThreads, 0, stream, p, pairs,
                                                        static_cast<int>(appending));
}

}  // namespace

cudaError_t append_keys(const DecodeProblem& p, cudaStream_t stream) {
  return p.fwd.dtype == DType::FP16 ? launch<cutlass::half_t>(p, stream) : launch<cutlass::bfloat16_t>(p, stream);
}

}  // namespace flash_cute
