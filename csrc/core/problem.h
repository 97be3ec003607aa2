// What a call asks for, as plain data: filled by csrc/api, read by kernels. No torch, no CuTe.
#pragma once

#include <cstdint>
#include <numeric>

#include "core/config.h"
#include "core/fast_divmod.h"

namespace flash_cute {

// A tensor of vectors, (batch, row, head, dim) with dim contiguous. Strides count elements. For sequences laid end to
// end, batch is 0 and rows count through all of them.
struct TensorView {
  void* ptr;
  int64_t batch, row, head;
  bool vectors;  // every vector starts on a 16-byte boundary
};

// One fp32 number a row and head, rows contiguous. Strides count elements.
struct RowStats {
  float* ptr;  // [b, h, rows], or [h, rows of all sequences] with batch 0; may be null
  int64_t batch, head;
};

// Key j is visible from query i iff i + shift - left <= j <= i + shift + right, shift = seqlen_k - seqlen_q.
// Lengths and bounds stay below kUnbounded, so that sums of three of them fit an int. No bound is negative.
struct Band {
  static constexpr int kUnbounded = 1 << 29;
  int left = kUnbounded;
  int right = kUnbounded;
};

// Where sequences of different lengths lie. Values come from the device unchecked: SeqInfo clamps them.
struct Varlen {
  const int* cu_q = nullptr;    // [batch + 1]; null: dense
  const int* cu_k = nullptr;    // [batch + 1]; null: dense
  const int* used_q = nullptr;  // [batch], may be null
  const int* used_k = nullptr;  // [batch], may be null
};

// What the Rich tier does to scores and probabilities, on top of the scale and the band.
struct ScoreRules {
  float softcap = 0.f;              // scores become softcap * tanh(score / softcap); 0: off
  const float* alibi = nullptr;     // slope of head h of sequence b, at b * alibi_batch + h; null: off
  int64_t alibi_batch = 0;
  const int64_t* rng = nullptr;     // {seed, offset} of dropout; null: off
  int drop_below = 0;               // of 65536: probabilities whose random number is below are dropped
  float keep_scale = 1.f;           // 65536 / (65536 - drop_below); 0 where everything is dropped

  // Factor that backward's kernels leave out of the gradients of scores, and put into dK and dQ in the end.
  constexpr float gradient_scale() const { return keep_scale > 0.f ? keep_scale : 1.f; }
};

// One more logit a head in the denominator of the softmax.
struct Sink {
  enum class Element { None, FP32, FP16, BF16 };
  const void* ptr = nullptr;
  Element element = Element::None;
};

// Where tiles of queries are too few for a GPU, their keys are cut into parts (by Hopper's kernels; heuristics.h says
// into how many), whose results kernels/passes/combine_splits.h merges.
struct KvSplits {
  int count = 1;
  int columns = 0;  // of the kernel's tile of V
  float* out = nullptr;  // [count * h, rows of all sequences, columns]
  RowStats lse{};  // [count * h, rows of all sequences], rows as in `out`

  // Where it is asked for: behind lse.
  constexpr RowStats row_max(int heads) const {
    return {lse.ptr + int64_t(count) * heads * lse.head, lse.batch, lse.head};
  }
};

// Keys and values in pages of rows, or in one page a sequence: then k and v have pages for sequences. Ids come from the
// device unchecked: what lies in a page that does not exist reads as zeros.
struct Pages {
  const int* ids = nullptr;  // [batch, per_sequence]; null: sequence b has page b
  int64_t batch = 0;  // stride of ids
  int per_sequence = 1;
  int count = 0;
  int size = 0;  // rows

  constexpr int64_t capacity() const { return int64_t(per_sequence) * size; }
  // Of a tile of `rows` rows, how many lie together, if tiles are counted from row 0 on.
  constexpr int together(int rows) const { return per_sequence == 1 ? rows : std::gcd(rows, size); }
};

struct FwdProblem {
  DType dtype;
  int batch, heads, heads_k, head_dim, head_dim_v;
  int seqlen_q, seqlen_k;  // the longest, for sequences of different lengths
  int64_t total_q, total_k;  // rows of all sequences
  Varlen varlen;
  Band band;
  float softmax_scale;
  ScoreRules rules;
  Sink sink;
  TensorView q, k, v;
  Pages pages;  // of k and v, for kernels that can; ids may be null
  TensorView out;
  RowStats lse;  // natural log
  RowStats row_max;  // may be null
  void* softmax;  // signed probabilities [b, h, seqlen_q, seqlen_k] in the dtype; may be null
  KvSplits splits;

  constexpr bool dense() const { return varlen.cu_q == nullptr; }
  constexpr bool dense_keys() const { return varlen.cu_k == nullptr; }
  constexpr int64_t all_rows() const { return dense() ? int64_t(batch) * seqlen_q : total_q; }

  // The least one that has all of the rules. A negative scale turns maxima into minima.
  Tier tier() const {
    const bool plain =
        rules.softcap == 0.f && rules.alibi == nullptr && rules.keep_scale == 1.f && softmax_scale >= 0.f;
    return plain ? Tier::Plain : Tier::Rich;
  }
};

// A cache of keys and values, which are pages. Values of the index tensors come from the device unchecked:
// kernels/common/cached_seq.h clamps them.
struct Cache {
  const int* lengths = nullptr;  // [batch], rows in use before new ones join; null: all
  const int* leftpad = nullptr;  // [batch], rows at the start that do not count; may be null
};

// Keys and values that join the cache.
struct NewKeys {
  TensorView k, v;
  const int* cu = nullptr;  // [batch + 1]; null: dense
  int seqlen = 0;  // of each sequence, or the longest
  int64_t total = 0;  // rows of all sequences, also dense
  int* lengths = nullptr;  // result, [batch]: keys of each sequence then, less those of its padding; may be null
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

// How keys of a head are shared out, in quanta (kernels/common/decode_scheduler.h), if no tensor says how long sequences are:
// they are uniform.
struct UniformBatch {
  bool known = false;
  FastDivmod per_tile, per_sequence;
  FastDivmod chunk, tail_chunk;  // of a CTA, and of those that come after the first ones
  int full_ctas = 0;  // of a head
};

// Clusters of CTAs with a unit each (kernels/sm90/decode.h).
struct TileClusters {
  FastDivmod ctas;  // of a cluster
  FastDivmod tiles;  // of query rows, of each kv head of a sequence
  int column_bits = 0;  // 2^column_bits columns of outputs are merged by each of the first CTAs
};

struct DecodeProblem {
  // k and v are the caches, batch the stride of their pages; seqlen_k is the capacity, total_q counts dense rows too.
  FwdProblem fwd;
  Cache cache;
  NewKeys added;
  Rotary rotary;
  TensorView unrotated_q;  // where fwd.q comes from, if there is rotary embedding
  // How keys are shared out: in so many parts a sequence, or parts of so many keys, or evenly over CTAs if both are 0.
  int num_splits, split_size;
  int quantum_blocks;  // of even chunks: blocks of keys that are not parted
  int ctas_per_head;  // CTAs for each kv head
  FastDivmod by_ctas_per_head;  // less those that come late
  int resident_ctas;  // CTAs that the GPU has room for
  int cluster_ctas;  // CTAs that follow each other and run on SMs side by side
  FastDivmod heads_k, group;  // kv heads, and query heads of each
  FastDivmod page_size;
  float
      l2_fraction;  // share of what is read of K and V that the L2 cache keeps like other data; the rest leaves it first
  UniformBatch uniform;
  TileClusters clusters;
  // Workspaces: results of parts, where there can be any that are not the whole (kernels/common/decode_scheduler.h).
  int slots;
  float* split_out;  // [slots, block_m, head_dim_v of the tile]
  float* split_lse;  // [slots, block_m]
  unsigned* arrived;  // [slots]: parts of a unit that are done; null with even chunks, which have lasting counters

  constexpr int ctas() const { return ctas_per_head * fwd.heads_k; }

  // Whether the host knows that every sequence has as many keys as the others.
  constexpr bool is_uniform() const {
    return cache.lengths == nullptr && cache.leftpad == nullptr && fwd.dense() && added.cu == nullptr && fwd.batch > 0;
  }

  constexpr bool even_splits() const { return num_splits == 0 && split_size == 0; }

  // Whether rows join the cache, or queries are rotated, before anything is computed.
  constexpr bool appends() const { return added.total > 0 || rotary.cos != nullptr; }
};

// Into how many parts the work on a tile of keys is cut, each with its own sums of dK and dV: on all tiles, or on those
// that are taken last.
struct QuerySplits {
  int heads = 1;  // of the query heads of a kv head
  int queries = 1;  // of the tiles of queries that see the keys
  int whole_tiles = 0;  // which are taken first and are not cut

  constexpr int count() const { return heads * queries; }
};

struct BwdProblem {
  FwdProblem fwd;  // with its results: out and lse
  TensorView dout, dq, dk, dv;
  RowStats dlse;  // may be null
  RowStats softmax_d;  // result: rowsum(dout * out) - dlse
  // Workspaces. Rows are padded so that every sequence starts on a multiple of block_m: see PaddedRows.
  RowStats lse_log2;  // lse / ln 2; +inf where a row does not exist or sees no key
  RowStats row_dot;  // softmax_d / rules.gradient_scale(), 0 where a row does not exist
  float* dq_accum;  // [b, h, rows, dq_columns() of the kernel], each block of rows in an order of the kernel's own
  int*
      dq_semaphores;  // [b, h, rows / block_m, warps]: key tiles, of opened sums the first, that are done with a part of a
  // turn (of a warp on sm80, of a CTA in sm90's pairs, else all), at its first tile of dQ. Without turns: Pace
  QuerySplits splits;
  // Of several parts: [slabs, parts, kSlabRows], head_dim + head_dim_v of the kernel numbers each: dK's sums, then
  // dV's, in the order of their accumulators. Slabs are those of the tiles that are cut; or of packed sequences [h_k,
  // rows / kSlabRows].
  float* split_sums;
  int64_t slabs_of_head;  // of packed sequences
  float* dsink;  // result, [h]; null without a sink
  bool deterministic;  // dQ is summed in an order that does not depend on timing
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

// The padded row space of backward's workspaces: sequence b starts at the multiple of `block` that first_row gives, and
// no two sequences share a block.
struct PaddedRows {
  int block;

  constexpr int64_t dense(int seqlen) const { return int64_t(seqlen + block - 1) / block * block; }
  constexpr int64_t packed(int64_t total, int batch) const { return (total + int64_t(batch) * block) / block * block; }
  constexpr int64_t first_row(int64_t offset, int b) const { return (offset + int64_t(b) * block) / block * block; }
};

constexpr int kSlabRows = 64;  // keys whose sums lie together in BwdProblem::split_sums: those of a warpgroup

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
