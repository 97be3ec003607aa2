#include "kernels/passes/append.h"

#include <bit>

#include "core/layout/cached_seq.h"
#include "kernels/common/element.h"
#include "kernels/common/pdl.h"
#include "core/layout/tiles.h"
#include "kernels/launch.h"

namespace flash_cute {
namespace {

constexpr int kThreads = 256;

enum Rows { kKeys, kValues, kQueries, kKinds };  // that a kernel moves

// The CTAs for rows of a kind. A thread moves `width` pairs of numbers of a head; heads and rows have powers of two of
// threads, some of which have nothing to do.
struct Movers {
  int64_t rows;
  int heads, pairs;
  unsigned bits_of_head, bits_of_row;  // of a thread's number
  int end = 0;  // CTA past the last one

  static Movers of(int64_t rows, int heads, int head_dim, int width) {
    auto bits = [](int n) { return static_cast<unsigned>(std::bit_width(static_cast<unsigned>(n) - 1)); };
    const int pairs = (head_dim + 1) / 2;  // the last one may have one number alone
    const unsigned per_head = bits((pairs + width - 1) / width);
    return {rows, heads, pairs, per_head, per_head + bits(heads)};
  }

  int64_t ctas() const { return ((rows << bits_of_row) + kThreads - 1) / kThreads; }
};

// A thread's item: pairs from `pair` on.
struct Item {
  int64_t row;
  int head, pair;
  bool exists;

  __device__ Item(const Movers& movers, int cta, int width) {
    const int64_t number = int64_t(cta) * kThreads + threadIdx.x;
    row = number >> movers.bits_of_row;
    head = static_cast<int>(number >> movers.bits_of_head) & ((1 << (movers.bits_of_row - movers.bits_of_head)) - 1);
    pair = (static_cast<int>(number) & ((1 << movers.bits_of_head) - 1)) * width;
    exists = row < movers.rows && head < movers.heads && pair < movers.pairs;
  }
};

// The source of a row: `row` in batch entry b of the tensor, the row at `place` of sequence b.
struct Source {
  bool exists = false;
  int b;
  int64_t row, place;
};

__device__ Source source_of(const DecodeProblem& p, bool is_query, int row) {
  const FwdProblem& f = p.fwd;
  const int* const cu = is_query ? f.varlen.cu_q : p.added.cu;
  const int each = is_query ? f.seqlen_q : p.added.seqlen;
  auto rows_of = [&](int b) {
    return is_query ? seq_span(cu, nullptr, b, f.seqlen_q, f.total_q) : new_rows(p.added, b);
  };
  const int b = sequence_of(row, cu, f.batch, each, rows_of);
  if (b < 0) return {};
  const SeqSpan rows = rows_of(b);
  const int64_t place = place_of(row, rows, cu, each);
  return {true, b, rows.offset + place, place};
}

// The destination of a row, and its rotary position.
struct Target {
  bool exists = false;
  int64_t batch, row, position;
};

// The destination of a new row of keys or values.
__device__ Target joins_at(const DecodeProblem& p, const Source& from) {
  const FwdProblem& f = p.fwd;
  const int used = rows_in_use(p, from.b);
  if (used + from.place >= f.seqlen_k) return {};
  const int row = used + static_cast<int>(from.place);
  const int page = page_id(f.pages, from.b, row / f.pages.size);
  if (page < 0 || page >= f.pages.count) return {};
  const int64_t start = p.rotary.from == nullptr ? used : p.rotary.from[from.b];
  return {true, page, row % f.pages.size, start + from.place};
}

// The destination of a row of queries.
__device__ Target rotates_at(const DecodeProblem& p, const Source& from) {
  const int64_t start = p.rotary.from == nullptr ? rows_in_use(p, from.b) : p.rotary.from[from.b];
  return {true, from.b, from.row, start + (p.rotary.steps ? from.place : 0)};
}

template <class Element, int kWidth>
struct alignas(sizeof(Element) * kWidth) Vector {
  Element at[kWidth];
};

template <class Element, int kWidth>
__device__ Vector<Element, kWidth> vector_at(const void* tensor, int64_t at) {
  return *reinterpret_cast<const Vector<Element, kWidth>*>(static_cast<const Element*>(tensor) + at);
}

// Rotates kWidth pairs: numbers of x[0] with those of x[1], or neighbours, if they are interleaved.
template <class Element, int kWidth>
__device__ void rotate_pairs(Vector<Element, kWidth> (&x)[2], const Rotary& rotary, int64_t position, int pair) {
  const int64_t at = int64_t(clamped(position, rotary.positions - 1)) * rotary.half + pair;
  const auto cos = vector_at<Element, kWidth>(rotary.cos, at), sin = vector_at<Element, kWidth>(rotary.sin, at);
  auto rotate = [&](Element& a, Element& b, int i) {
    const float before = float(a), other = float(b);
    a = Element(before * float(cos.at[i]) - other * float(sin.at[i]));
    b = Element(before * float(sin.at[i]) + other * float(cos.at[i]));
  };
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if (!rotary.interleaved) {
      rotate(x[0].at[i], x[1].at[i], i);
    } else {
      rotate(x[2 * i / kWidth].at[2 * i % kWidth], x[(2 * i + 1) / kWidth].at[(2 * i + 1) % kWidth], i);
    }
  }
}

// Keys of each sequence after the append; for one CTA.
__device__ void count_keys(const DecodeProblem& p) {
  for (int b = threadIdx.x; b < p.fwd.batch; b += kThreads) p.added.lengths[b] = cached_seq(p, b).k.length;
}

struct AllMovers {
  Movers of[kKinds];
  bool are_early;  // CTAs start before the previous kernel has ended, and let the next one start early
};

// Moves an item to its destination; without one it does everything but the store.
template <class Element, int kWidth>
__device__ void move(const DecodeProblem& p, int kind, const Item& item, bool arrives) {
  const bool is_query = kind == kQueries;
  const Source source = source_of(p, is_query, static_cast<int>(item.row));
  if (!source.exists) return;
  const FwdProblem& f = p.fwd;
  const TensorView &from = is_query        ? p.unrotated_q
                           : kind == kKeys ? p.added.k
                                           : p.added.v,
                   &to = is_query        ? f.q
                         : kind == kKeys ? f.k
                                         : f.v;
  const bool rotates = kind != kValues && p.rotary.cos != nullptr && item.pair < p.rotary.half;
  const bool apart = rotates && !p.rotary.interleaved;
  const int first = apart ? item.pair : 2 * item.pair, second = first + (apart ? p.rotary.half : kWidth);
  const int64_t in = source.b * from.batch + source.row * from.row + item.head * from.head;
  // The row is loaded while its destination is looked up, and that while the row is rotated.
  const bool is_pair = kWidth > 1 || second < (kind == kValues ? f.head_dim_v : f.head_dim);
  Vector<Element, kWidth> x[2] = {vector_at<Element, kWidth>(from.ptr, in + first), {}};
  if (is_pair) x[1] = vector_at<Element, kWidth>(from.ptr, in + second);
  const Target target = is_query ? rotates_at(p, source) : joins_at(p, source);
  if (!target.exists) return;
  Element* const out =
      static_cast<Element*>(to.ptr) + target.batch * to.batch + target.row * to.row + item.head * to.head;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(out + first));
  if (rotates) rotate_pairs(x, p.rotary, target.position, item.pair);
  if (!arrives) return;
  *reinterpret_cast<Vector<Element, kWidth>*>(out + first) = x[0];
  if (is_pair) *reinterpret_cast<Vector<Element, kWidth>*>(out + second) = x[1];
}

// The first CTAs append keys, those that follow values, and the others rotate queries.
template <class Element, int kWidth>
__global__ void __launch_bounds__(kThreads)
    append_and_rotate(const __grid_constant__ DecodeProblem p, const __grid_constant__ AllMovers movers) {
  if (movers.are_early) launch_dependent_grids();
  const int cta = static_cast<int>(blockIdx.x);
  const int kind = (cta >= movers.of[kKeys].end) + (cta >= movers.of[kValues].end);
  const Item item(movers.of[kind], cta - (kind == kKeys ? 0 : movers.of[kind - 1].end), kWidth);
  // The first pass only warms caches: what it reads may still be written.
#pragma unroll 1
  for (int pass = movers.are_early ? 0 : 1; pass < 2; ++pass) {
    const bool arrives = pass == 1;
    if (arrives) {
      // After this wait all previous kernels have ended, also for the next kernel when that starts.
      wait_on_dependent_grids();
      launch_dependent_grids();
    }
    if (item.exists) move<Element, kWidth>(p, kind, item, arrives);
  }
  if (cta == 0 && p.added.lengths != nullptr) count_keys(p);
}

bool on_boundary(const void* ptr) {
  return reinterpret_cast<uintptr_t>(ptr) % 16 == 0;
}

// Whether a thread can move vectors of so many pairs.
bool can_move(const DecodeProblem& p, int width) {
  const FwdProblem& f = p.fwd;
  if (f.head_dim % (2 * width) != 0 || f.head_dim_v % (2 * width) != 0) return false;
  if (p.added.total > 0 && !(p.added.k.vectors && p.added.v.vectors)) return false;
  return p.rotary.cos == nullptr || (p.rotary.half % width == 0 && on_boundary(p.rotary.cos) &&
                                     on_boundary(p.rotary.sin) && p.unrotated_q.vectors);
}

template <class Element, int kWidth>
cudaError_t launch(const DecodeProblem& p, cudaStream_t stream, int next_ctas) {
  constexpr int kShare = 16;  // at most 1 / 16 of the next kernel's CTAs may start late because of this pass
  const FwdProblem& f = p.fwd;
  AllMovers movers{{Movers::of(p.added.total, f.heads_k, f.head_dim, kWidth),
                    Movers::of(p.added.total, f.heads_k, f.head_dim_v, kWidth),
                    Movers::of(p.rotary.cos == nullptr || f.heads == 0 ? 0 : f.total_q, f.heads, f.head_dim, kWidth)},
                   false};
  int64_t ctas = 0;
  for (Movers& some : movers.of) {
    ctas += some.ctas();
    if (ctas > kMaxCtas) return cudaErrorInvalidConfiguration;
    some.end = static_cast<int>(ctas);
  }
  movers.are_early = kShare * ctas <= next_ctas;
  return launch_with_pdl<append_and_rotate<Element, kWidth>>({ctas, kThreads, 0}, stream, p, movers);
}

template <class Element>
cudaError_t launch(const DecodeProblem& p, cudaStream_t stream, int next_ctas) {
  constexpr int kWide = 8;
  return can_move(p, kWide) ? launch<Element, kWide>(p, stream, next_ctas) : launch<Element, 1>(p, stream, next_ctas);
}

}  // namespace

cudaError_t append_keys(const DecodeProblem& p, cudaStream_t stream, int next_ctas) {
  return with_element(p.fwd.dtype, [&](auto element) { return launch<decltype(element)>(p, stream, next_ctas); });
}

}  // namespace flash_cute
