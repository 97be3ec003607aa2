// The problem of a call, as plain data: csrc/api fills it, and it is const from then on. No torch, no CuTe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "core/config.h"

namespace flash_cute {

// A tensor (batch, row, head, dim), dim contiguous, strides in elements. Packed sequences have batch stride 0 and rows
// that count through all of them.
struct TensorView {
  void* ptr;
  int64_t batch, row, head;
  bool vectors;  // every vector starts on a 16-byte boundary
};

// One fp32 number per row and head, rows contiguous, strides in elements.
struct RowStats {
  float* ptr;  // [b, h, rows], or [h, packed rows] with batch 0; may be null
  int64_t batch, head;
};

// Key j is visible from query i iff i + shift - left <= j <= i + shift + right, shift = seqlen_k - seqlen_q.
// Lengths and bounds stay below kUnbounded, so that sums of three of them fit an int. No bound is negative.
struct Band {
  static constexpr int kUnbounded = 1 << 29;
  int left = kUnbounded;
  int right = kUnbounded;

  constexpr bool is_open() const { return left == kUnbounded && right == kUnbounded; }
};

// Offsets and lengths of packed sequences, unchecked device data: SeqInfo clamps them.
struct Varlen {
  const int* cu_q = nullptr;    // [batch + 1]; null: dense
  const int* cu_k = nullptr;    // [batch + 1]; null: dense
  const int* used_q = nullptr;  // [batch], may be null
  const int* used_k = nullptr;  // [batch], may be null
};

// The element-wise rule of scores. ScoreMod, in kernels/common/score_mod.h, computes it.
struct ElementRule {
  float softcap = 0.f;  // scores become softcap * tanh(score / softcap); 0: off

  constexpr bool on() const { return softcap > 0.f; }

  // For a plan request: `has` says whether the call has the parameter of this name.
  template <class Has>
  static ElementRule named(const Has& has) {
    return {.softcap = has("softcap") ? 1.f : 0.f};
  }
};

// Score rules of the Rich tier, in addition to the scale and the band.
struct ScoreRules {
  ElementRule element;
  const float* alibi = nullptr;     // slope of head h of sequence b, at b * alibi_batch + h; null: off
  int64_t alibi_batch = 0;
  const int64_t* rng = nullptr;     // {seed, offset} of dropout; null: off
  int drop_below = 0;  // of 65536: elements with a smaller random number are dropped
  float keep_scale = 1.f;           // 65536 / (65536 - drop_below); 0 if everything is dropped

  // Factor that backward leaves out of dS, and puts into dK and dQ at the end.
  constexpr float gradient_scale() const { return keep_scale > 0.f ? keep_scale : 1.f; }
};

// Attention sink: one more logit a head in the softmax's denominator.
struct Sink {
  enum class Element { None, FP32, FP16, BF16 };
  const void* ptr = nullptr;
  Element element = Element::None;
};

// Paged K and V, or one page a sequence: k and v then have pages instead of sequences. Ids are unchecked device data:
// rows of a page that does not exist read as zeros.
struct Pages {
  const int* ids = nullptr;  // [batch, per_sequence]; null: sequence b has page b
  int64_t batch = 0;  // stride of ids
  int per_sequence = 1;
  int count = 0;
  int size = 0;  // rows

  constexpr int64_t capacity() const { return int64_t(per_sequence) * size; }
  // Contiguous rows in a tile of `rows` rows, for tiles counted from row 0.
  constexpr int together(int rows) const { return per_sequence == 1 ? rows : std::gcd(rows, size); }
};

// An entry of a list: a tile of the other side, and its visible pairs (core/layout/tile_lists.h).
struct TileEntry {
  int tile, code;
};

// Sparse attention: for each tile of queries the tiles of keys that it sees, in backward for each tile of keys the
// tiles of queries that see it, ascending. The band hides more. Unchecked device data: TileList clamps it.
struct TileLists {
  // [batch, heads, tiles, 1 + capacity]; the first entry's tile is their number, its code whether all are whole tiles.
  const TileEntry* ptr = nullptr;
  int64_t batch = 0, head = 0;  // strides in entries; 0 if all share the lists
  int tiles = 0;  // lists of a head
  int capacity = 0;  // entries that a list may have
  int heads_per_list = 1;  // query heads that share a list
  const uint32_t* bits = nullptr;  // [masks, kTileSide, kTileSide / 32], token masks of tiles; may be null
  int masks = 0;
  // Backward: of each entry the number of key tiles before it in the list of its tile of queries; null: not known.
  const int* ranks = nullptr;

  constexpr bool on() const { return ptr != nullptr; }
};

// What numbers of 8 bits are multiplied by, fp32, strides in elements; null: 1. With `each` every row and head of q, k or
// a cache, or every channel and kv head of v, has its own; else every kv head of a sequence. Rows of pages are [pages,
// page_size, h_k].
struct Descale {
  const float* ptr = nullptr;
  int64_t batch = 0, row = 0, head = 0;  // batch: of sequences, or of pages; row: of rows, or channels
  bool each = false;
};

// Attention of e4m3 inputs.
struct Fp8Options {
  Descale q, k, v;
  bool negative = false;  // scores are times -softmax_scale
  bool two_level = true;  // sums of P V are flushed to fp32 after every tile of keys
  DType out = DType::BF16;
};

struct FwdProblem {
  DType dtype;
  int batch, heads, heads_k, head_dim, head_dim_v;
  int seqlen_q, seqlen_k;  // the longest, of packed sequences
  int64_t total_q, total_k;  // rows of all sequences
  Varlen varlen;
  Band band;
  float softmax_scale;
  ScoreRules rules;
  Sink sink;
  TensorView q, k, v;
  Pages pages;  // of k and v, for kernels that read pages; ids may be null
  TileLists lists;
  Fp8Options fp8;  // of e4m3 inputs
  TensorView out;
  RowStats lse;  // natural log
  RowStats row_max;  // may be null
  void* softmax;  // signed probabilities [b, h, seqlen_q, seqlen_k] in the dtype; may be null

  constexpr bool dense() const { return varlen.cu_q == nullptr; }
  constexpr bool dense_keys() const { return varlen.cu_k == nullptr; }
  constexpr bool knows_keys() const { return dense_keys() && varlen.used_k == nullptr; }  // their lengths, on the host
  constexpr int64_t all_rows() const { return dense() ? int64_t(batch) * seqlen_q : total_q; }
  constexpr int64_t all_keys() const { return dense_keys() ? int64_t(batch) * seqlen_k : total_k; }

  constexpr int out_bytes() const { return element_bytes(dtype == DType::E4M3 ? fp8.out : dtype); }  // of a number

  // The cheapest tier that supports it. A negative scale turns maxima into minima, which only Rich handles.
  Tier tier() const {
    const bool plain = !rules.element.on() && rules.alibi == nullptr && rules.keep_scale == 1.f && softmax_scale >= 0.f;
    return plain ? Tier::Plain : Tier::Rich;
  }
};

// The maximum lengths of packed sequences may be any upper bound; backward's grids and orders depend on them.
constexpr void clamp_lengths(FwdProblem& p) {
  p.seqlen_q = static_cast<int>(std::min<int64_t>(p.seqlen_q, p.total_q));
  p.seqlen_k = static_cast<int>(std::min<int64_t>(p.seqlen_k, p.total_k));
}

// A key/value cache, whose tensors are pages. Index tensors are unchecked device data: cached_seq.h clamps them.
struct Cache {
  const int* lengths = nullptr;  // [batch], rows in use before the append; null: all
  const int* leftpad = nullptr;  // [batch], rows of padding at the start; may be null
  bool eight_bits = false;  // of `dtype`; else of the problem's
  DType dtype = DType::E4M3;
  Descale k, v;
};

// New keys and values, which are appended to the cache.
struct NewKeys {
  TensorView k, v;
  const int* cu = nullptr;  // [batch + 1]; null: dense
  int seqlen = 0;  // of each sequence, or the longest
  int64_t total = 0;  // rows of all sequences, also dense
  int* lengths = nullptr;  // result, [batch]: keys of each sequence after the append, without padding; may be null
};

// Rotary embedding of queries and new keys. The tables are in the dtype of q.
struct Rotary {
  const void* cos = nullptr;  // [positions, half]; null: off
  const void* sin = nullptr;
  int positions, half;
  bool interleaved;
  bool steps;  // a position for each query of a sequence, not one for all
  const int* from = nullptr;  // [batch], position of the first new key; null: rows in use
};

struct DecodeProblem {
  // k and v are the caches with their page stride in batch; seqlen_k is the capacity, total_q counts dense rows, too.
  FwdProblem fwd;
  Cache cache;
  NewKeys added;
  Rotary rotary;
  TensorView unrotated_q;  // the source of fwd.q with rotary embedding
  // Splits per sequence, or keys per split; if both are 0, CTAs split keys evenly.
  int num_splits, split_size;

  // Whether the host knows that all sequences are equally long.
  constexpr bool is_uniform() const {
    return cache.lengths == nullptr && cache.leftpad == nullptr && fwd.dense() && added.cu == nullptr && fwd.batch > 0;
  }

  constexpr DType cache_dtype() const { return cache.eight_bits ? cache.dtype : fwd.dtype; }

  // Whether head dims are multiples of 16 bytes; else keys are gathered for a kernel of forward.
  constexpr bool whole_vectors() const {
    const int vector = cache.eight_bits ? 16 : 8;
    return fwd.head_dim % vector == 0 && fwd.head_dim_v % vector == 0;
  }
  // Whether decode kernels, which move 16-byte vectors, can read all tensors.
  constexpr bool has_vectors() const {
    return whole_vectors() && (fwd.q.vectors || rotary.cos != nullptr) && fwd.k.vectors && fwd.v.vectors;
  }

  constexpr bool even_splits() const { return num_splits == 0 && split_size == 0; }

  // Whether a pass first appends keys or rotates queries.
  constexpr bool appends() const { return added.total > 0 || rotary.cos != nullptr; }
};

struct BwdProblem {
  FwdProblem fwd;  // with its results: out and lse
  TensorView dout, dq, dk, dv;
  RowStats dlse;  // may be null
  RowStats softmax_d;  // result: rowsum(dout * out) - dlse
  float* dsink;  // result, [h]; null without a sink
  bool deterministic;  // dQ is summed in a fixed order
  bool fp32_gradients;  // dQ, dK and dV are fp32, of inputs that are not
};

constexpr const FwdProblem& forward_of(const FwdProblem& p) {
  return p;
}

constexpr const FwdProblem& forward_of(const DecodeProblem& p) {
  return p.fwd;
}

constexpr const FwdProblem& forward_of(const BwdProblem& p) {
  return p.fwd;
}

template <Op>
struct ProblemOf;
template <>
struct ProblemOf<Op::Fwd> {
  using type = FwdProblem;
};
template <>
struct ProblemOf<Op::Bwd> {
  using type = BwdProblem;
};
template <>
struct ProblemOf<Op::Decode> {
  using type = DecodeProblem;
};
template <Op op>
using Problem = typename ProblemOf<op>::type;

}  // namespace flash_cute
