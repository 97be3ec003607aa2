#include "kernels/passes/append.h"

#include <cutlass/numeric_types.h>

#include "kernels/common/cached_seq.h"
#include "kernels/common/overlap.h"
#include "kernels/common/tiles.h"
#include "kernels/launch.h"

namespace flash_cute {
namespace {

using detail::ceil_div;
constexpr int kThreads = 256;
constexpr int kHeads = 8;  // of a thread: what it reads of them is on its way together

// What rotary embedding makes of two numbers of a vector: where they are, and by which angle they are turned, if they are.
struct Rotation {
  int first, second;
  bool turns = false;
  float cos = 1.f, sin = 0.f;
};

template <class Element>
__device__ Rotation rotation_of(const Rotary& rotary, int64_t position, int pair) {
  if (rotary.cos == nullptr || pair >= rotary.half) return {2 * pair, 2 * pair + 1};
  const int64_t at = int64_t(clamped(position, rotary.positions - 1)) * rotary.half + pair;
  const float cos = float(static_cast<const Element*>(rotary.cos)[at]);
  const float sin = float(static_cast<const Element*>(rotary.sin)[at]);
  if (rotary.interleaved) return {2 * pair, 2 * pair + 1, true, cos, sin};
  return {pair, pair + rotary.half, true, cos, sin};
}

// What a thread does of a row: a pair of numbers of several heads, `step` heads apart. CTAs are in a row, a whole number
// of them for one row.
struct Item {
  int row, head, step, pair;

  static __device__ Item of_thread(int cta, int heads, int pairs) {
    const int step = ceil_div(heads, kHeads), ctas_a_row = ceil_div(step * pairs, kThreads);
    const int index = cta % ctas_a_row * kThreads + static_cast<int>(threadIdx.x);
    return {cta / ctas_a_row, index / pairs, step, index % pairs};
  }

  static int64_t ctas(int64_t rows, int heads, int pairs) {
    return rows * ceil_div(ceil_div(heads, kHeads) * pairs, kThreads);
  }
};

// Copies them, turned, from one row to another.
template <class Element>
__device__ void copy_pairs(const Item& item, const Rotation& rotation, const Matrices& from, int64_t from_batch,
                           int64_t from_row, const Matrices& to, int64_t to_batch, int64_t to_row, int heads) {
  const auto* source = static_cast<const Element*>(from.ptr) + from_batch * from.batch + from_row * from.row;
  auto* target = static_cast<Element*>(to.ptr) + to_batch * to.batch + to_row * to.row;
  Element first[kHeads], second[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int head = item.head + i * item.step;
    if (head >= heads) continue;
    first[i] = source[int64_t(head) * from.head + rotation.first];
    second[i] = source[int64_t(head) * from.head + rotation.second];
  }
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int head = item.head + i * item.step;
    if (head >= heads) continue;
    const float a = float(first[i]), b = float(second[i]);
    Element* const at = target + int64_t(head) * to.head;
    at[rotation.first] = rotation.turns ? Element(a * rotation.cos - b * rotation.sin) : first[i];
    at[rotation.second] = rotation.turns ? Element(a * rotation.sin + b * rotation.cos) : second[i];
  }
}

// Pairs of a new row of keys, or of values.
template <class Element, bool kValues>
__device__ void append(const DecodeProblem& p, int cta, int pairs) {
  const FwdProblem& f = p.fwd;
  const Item item = Item::of_thread(cta, f.heads_k, pairs);
  const int b = sequence_of(item.row, p.added.cu, f.batch, p.added.seqlen);
  const SeqSpan added = new_rows(p.added, b);
  const int64_t place = place_of(item.row, added, p.added.cu, p.added.seqlen);
  const int used = rows_in_use(p, b);
  if (item.head >= item.step || place < 0 || place >= added.length || used + place >= f.seqlen_k) return;
  const int to_row = used + static_cast<int>(place);
  const int page = page_id(f.pages, b, to_row / f.pages.size);
  if (page < 0 || page >= f.pages.count) return;
  const int64_t position = (p.rotary.from == nullptr ? used : p.rotary.from[b]) + place;
  copy_pairs<Element>(item, rotation_of<Element>(kValues ? Rotary{} : p.rotary, position, item.pair),
                      kValues ? p.added.v : p.added.k, b, added.offset + place, kValues ? f.v : f.k, page,
                      to_row % f.pages.size, f.heads_k);
}

// Pairs of a query.
template <class Element>
__device__ void rotate_query(const DecodeProblem& p, int cta) {
  const FwdProblem& f = p.fwd;
  const Item item = Item::of_thread(cta, f.heads, f.head_dim / 2);
  const int b = sequence_of(item.row, f.sequences.cu_q, f.batch, f.seqlen_q);
  const SeqSpan queries = cached_seq(p, b).q;
  const int64_t place = place_of(item.row, queries, f.sequences.cu_q, f.seqlen_q);
  if (item.head >= item.step || place < 0 || place >= queries.length) return;
  const bool banded = f.band.left < Band::kUnbounded || f.band.right < Band::kUnbounded;
  const int64_t start = p.rotary.from == nullptr ? rows_in_use(p, b) : p.rotary.from[b];
  copy_pairs<Element>(item, rotation_of<Element>(p.rotary, start + (banded ? place : 0), item.pair), p.unrotated_q, b,
                      queries.offset + place, f.q, b, queries.offset + place, f.heads);
}

// Keys of each sequence after the append; for one CTA.
__device__ void count_keys(const DecodeProblem& p) {
  for (int b = threadIdx.x; b < p.fwd.batch; b += kThreads) p.added.lengths[b] = cached_seq(p, b).k.length;
}

// The first CTAs append keys, those that follow values, and the others rotate queries.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    append_and_rotate(const __grid_constant__ DecodeProblem p, int of_keys, int of_values) {
  // After this what comes before has ended, and so it has for the next kernel when that starts.
  wait_for_kernel_before();
  let_next_kernel_start();
  const int cta = static_cast<int>(blockIdx.x);
  if (cta == 0 && p.added.lengths != nullptr) count_keys(p);
  if (cta < of_keys) {
    append<Element, false>(p, cta, p.fwd.head_dim / 2);
  } else if (cta < of_keys + of_values) {
    append<Element, true>(p, cta - of_keys, p.fwd.head_dim_v / 2);
  } else {
    rotate_query<Element>(p, cta - of_keys - of_values);
  }
}

template <class Element>
cudaError_t launch(const DecodeProblem& p, cudaStream_t stream) {
  const FwdProblem& f = p.fwd;
  const int64_t of_keys = Item::ctas(p.added.total, f.heads_k, f.head_dim / 2);
  const int64_t of_values = Item::ctas(p.added.total, f.heads_k, f.head_dim_v / 2);
  const int64_t rotating = p.rotary.cos == nullptr ? 0 : Item::ctas(f.total_q, f.heads, f.head_dim / 2);
  if (of_keys + of_values > kMaxCtas) return cudaErrorInvalidConfiguration;
  return launch_overlapping<append_and_rotate<Element>>({of_keys + of_values + rotating, kThreads, 0}, stream, p,
                                                        static_cast<int>(of_keys), static_cast<int>(of_values));
}

}  // namespace

cudaError_t append_keys(const DecodeProblem& p, cudaStream_t stream) {
  return p.fwd.dtype == DType::FP16 ? launch<cutlass::half_t>(p, stream) : launch<cutlass::bfloat16_t>(p, stream);
}

}  // namespace flash_cute
