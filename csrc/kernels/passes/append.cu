#include "kernels/passes/append.h"

#include <cutlass/numeric_types.h>

#include <bit>

#include "kernels/common/cached_seq.h"
#include "kernels/common/overlap.h"
#include "kernels/common/tiles.h"
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
  int end = 0;  // CTA behind the last one

  static Movers of(int64_t rows, int heads, int head_dim, int width) {
    auto bits = [](int n) { return static_cast<unsigned>(std::bit_width(static_cast<unsigned>(n) - 1)); };
    const unsigned of_head = bits(head_dim / 2 / width);
    return {rows, heads, head_dim / 2, of_head, of_head + bits(heads)};
  }

  int64_t ctas() const { return ((rows << bits_of_row) + kThreads - 1) / kThreads; }
};

// What a thread moves: pairs from `pair` on.
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

// Where it comes from and goes to, and the position by which it is turned.
struct Move {
  bool exists = false;
  int64_t from_batch, from_row, to_batch, to_row, position;
};

// A new row of keys or values.
__device__ Move append(const DecodeProblem& p, int row) {
  const FwdProblem& f = p.fwd;
  const int b = sequence_of(row, p.added.cu, f.batch, p.added.seqlen);
  const SeqSpan added = new_rows(p.added, b);
  const int64_t place = place_of(row, added, p.added.cu, p.added.seqlen);
  const int used = rows_in_use(p, b);
  if (place < 0 || place >= added.length || used + place >= f.seqlen_k) return {};
  const int to_row = used + static_cast<int>(place);
  const int page = page_id(f.pages, b, to_row / f.pages.size);
  if (page < 0 || page >= f.pages.count) return {};
  const int64_t start = p.rotary.from == nullptr ? used : p.rotary.from[b];
  return {true, b, added.offset + place, page, to_row % f.pages.size, start + place};
}

__device__ Move rotate(const DecodeProblem& p, int row) {
  const FwdProblem& f = p.fwd;
  const int b = sequence_of(row, f.sequences.cu_q, f.batch, f.seqlen_q);
  const SeqSpan queries = cached_seq(p, b).q;
  const int64_t place = place_of(row, queries, f.sequences.cu_q, f.seqlen_q);
  if (place < 0 || place >= queries.length) return {};
  const bool banded = f.band.left < Band::kUnbounded || f.band.right < Band::kUnbounded;
  const int64_t start = p.rotary.from == nullptr ? rows_in_use(p, b) : p.rotary.from[b];
  const int64_t at = queries.offset + place;
  return {true, b, at, b, at, start + (banded ? place : 0)};
}

template <class Element, int kWidth>
struct alignas(sizeof(Element) * kWidth) Vector {
  Element at[kWidth];
};

// Moves kWidth pairs, and turns them on the way, or not.
template <class Element, int kWidth>
__device__ void move_pairs(const Item& item, const Move& move, const Matrices& from, const Matrices& to,
                           const Rotary& rotary, bool turns) {
  using Numbers = Vector<Element, kWidth>;
  const bool apart = turns && !rotary.interleaved;
  const int first = apart ? item.pair : 2 * item.pair, second = first + (apart ? rotary.half : kWidth);
  const auto* source = static_cast<const Element*>(from.ptr) + move.from_batch * from.batch + move.from_row * from.row +
                       item.head * from.head;
  auto* target = static_cast<Element*>(to.ptr) + move.to_batch * to.batch + move.to_row * to.row + item.head * to.head;
  auto read = [](const Element* from) { return *reinterpret_cast<const Numbers*>(from); };
  Numbers x[2] = {read(source + first), read(source + second)};
  if (turns) {
    const int64_t at = int64_t(clamped(move.position, rotary.positions - 1)) * rotary.half + item.pair;
    const Numbers cos = read(static_cast<const Element*>(rotary.cos) + at);
    const Numbers sin = read(static_cast<const Element*>(rotary.sin) + at);
    auto turn = [&](Element& a, Element& b, int i) {
      const float before = float(a), other = float(b);
      a = Element(before * float(cos.at[i]) - other * float(sin.at[i]));
      b = Element(before * float(sin.at[i]) + other * float(cos.at[i]));
    };
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (apart) {
        turn(x[0].at[i], x[1].at[i], i);
      } else {
        turn(x[2 * i / kWidth].at[2 * i % kWidth], x[(2 * i + 1) / kWidth].at[(2 * i + 1) % kWidth], i);
      }
    }
  }
  *reinterpret_cast<Numbers*>(target + first) = x[0];
  *reinterpret_cast<Numbers*>(target + second) = x[1];
}

// Keys of each sequence after the append; for one CTA.
__device__ void count_keys(const DecodeProblem& p) {
  for (int b = threadIdx.x; b < p.fwd.batch; b += kThreads) p.added.lengths[b] = cached_seq(p, b).k.length;
}

struct AllMovers {
  Movers of[kKinds];
};

// The first CTAs append keys, those that follow values, and the others rotate queries.
template <class Element, int kWidth>
__global__ void __launch_bounds__(kThreads)
    append_and_rotate(const __grid_constant__ DecodeProblem p, const __grid_constant__ AllMovers movers) {
  const int cta = static_cast<int>(blockIdx.x);
  const int kind = (cta >= movers.of[kKeys].end) + (cta >= movers.of[kValues].end);
  const Item item(movers.of[kind], cta - (kind == kKeys ? 0 : movers.of[kind - 1].end), kWidth);
  // After this what comes before has ended, and so it has for the next kernel when that starts.
  wait_for_kernel_before();
  let_next_kernel_start();
  if (cta == 0 && p.added.lengths != nullptr) count_keys(p);
  if (!item.exists) return;
  const int row = static_cast<int>(item.row);
  const Move move = kind == kQueries ? rotate(p, row) : append(p, row);
  if (!move.exists) return;
  const FwdProblem& f = p.fwd;
  const Matrices &from = kind == kKeys     ? p.added.k
                         : kind == kValues ? p.added.v
                                           : p.unrotated_q,
                 &to = kind == kKeys     ? f.k
                       : kind == kValues ? f.v
                                         : f.q;
  const bool turns = kind != kValues && p.rotary.cos != nullptr && item.pair < p.rotary.half;
  move_pairs<Element, kWidth>(item, move, from, to, p.rotary, turns);
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
cudaError_t launch(const DecodeProblem& p, cudaStream_t stream) {
  const FwdProblem& f = p.fwd;
  AllMovers movers{{Movers::of(p.added.total, f.heads_k, f.head_dim, kWidth),
                    Movers::of(p.added.total, f.heads_k, f.head_dim_v, kWidth),
                    Movers::of(p.rotary.cos == nullptr ? 0 : f.total_q, f.heads, f.head_dim, kWidth)}};
  int64_t ctas = 0;
  for (Movers& some : movers.of) {
    ctas += some.ctas();
    if (ctas > kMaxCtas) return cudaErrorInvalidConfiguration;
    some.end = static_cast<int>(ctas);
  }
  return launch_overlapping<append_and_rotate<Element, kWidth>>({ctas, kThreads, 0}, stream, p, movers);
}

template <class Element>
cudaError_t launch(const DecodeProblem& p, cudaStream_t stream) {
  constexpr int kWide = 8;
  return can_move(p, kWide) ? launch<Element, kWide>(p, stream) : launch<Element, 1>(p, stream);
}

}  // namespace

cudaError_t append_keys(const DecodeProblem& p, cudaStream_t stream) {
  return p.fwd.dtype == DType::FP16 ? launch<cutlass::half_t>(p, stream) : launch<cutlass::bfloat16_t>(p, stream);
}

}  // namespace flash_cute
