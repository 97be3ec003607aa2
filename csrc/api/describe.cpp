#include "api/describe.h"

#include <algorithm>
#include <cmath>

#include "core/heuristics.h"
#include "core/layout/tile_lists.h"

namespace flash_cute {
namespace {

void check_shapes(const FwdArguments& a) {
  const int dims = a.sequences ? 3 : 4, dims_k = a.block_table ? 4 : dims;
  FC_CHECK(a.q.dims == dims && a.k.dims == dims_k && a.v.dims == dims_k, "q, k and v have ", a.q.dims, ", ", a.k.dims,
           " and ", a.v.dims, " dimensions; expected ", dims, ", ", dims_k, " and ", dims_k);
  FC_CHECK(a.sequences || a.q.size(0) == a.k.size(0), "batch sizes differ: q has ", a.q.size(0), ", k ", a.k.size(0));
  check_same_kind(a.k, a.q, "k");
  check_same_kind(a.v, a.q, "v");
  FC_CHECK(a.k.size(dims_k - 1) == a.q.size(dims - 1), "q and k differ in head dim: q has ", a.q.size(dims - 1), ", k ",
           a.k.size(dims_k - 1));
  for (int i = 0; i < dims_k - 1; ++i) {
    FC_CHECK(a.v.size(i) == a.k.size(i), "k and v differ in dimension ", i, ": k has ", a.k.size(i), ", v ",
             a.v.size(i));
  }
  FC_CHECK(a.q.size(dims - 1) > 0 && a.v.size(dims_k - 1) > 0, "head dim is 0: q has ", a.q.size(dims - 1), ", v ",
           a.v.size(dims_k - 1));
  const int64_t heads = a.q.size(dims - 2), heads_k = a.k.size(dims_k - 2);
  FC_CHECK(heads_k > 0 && heads % heads_k == 0, "q has ", heads, " heads and k ", heads_k,
           "; heads must be a multiple of heads_k (GQA)");
}

DType dtype_of(const View& q, bool allow_tf32) {
  if (q.dtype == ScalarType::Half) return DType::FP16;
  if (q.dtype == ScalarType::BFloat16) return DType::BF16;
  FC_CHECK(
      q.dtype == ScalarType::Float, "dtype ", q.dtype == ScalarType::Double ? "torch.float64" : "of q",
      " is not supported on CUDA yet; supported: torch.float16, torch.bfloat16, torch.float32; cast q, k and v, or "
      "run on the CPU");
  return allow_tf32 ? DType::TF32 : DType::TF32x3;
}

Band band_of(const Score& score) {
  auto bound = [](int64_t size, const char* name) {
    FC_CHECK(size >= -1, name, " is ", size, "; -1 means unbounded, others are counts >= 0");
    return size < 0 || size > Band::kUnbounded ? Band::kUnbounded : static_cast<int>(size);
  };
  return {bound(score.window_size_left, "window_size_left"),
          score.is_causal ? 0 : bound(score.window_size_right, "window_size_right")};
}

// Dropout probabilities are rounded to multiples of 1 / kDropSteps. Only p = 1 drops everything; kept weights are
// scaled by the rounded rate, which preserves their mean.
constexpr int kDropSteps = 65536;
int drop_below_of(double dropout_p) {
  if (dropout_p == 1) return kDropSteps;
  return std::min(static_cast<int>(std::nearbyint(dropout_p * kDropSteps)), kDropSteps - 1);
}

ScoreRules rules_of(const Score& score, const View& q, int batch, int heads) {
  ScoreRules rules;
  rules.element = score.element.rule();
  if (score.alibi_slopes) {
    const View& slopes = *score.alibi_slopes;
    check_device(slopes, q, "alibi_slopes");
    const bool each_batch = slopes.dims == 2;
    FC_CHECK(slopes.dtype == ScalarType::Float && (each_batch || slopes.dims == 1) &&
                 slopes.size(slopes.dims - 1) == heads && (!each_batch || slopes.size(0) == batch),
             "alibi_slopes must be float32 of shape (", heads, ",) or (", batch, ", ", heads, ")");
    FC_CHECK(is_last_contiguous(slopes), "alibi_slopes' last dimension must be contiguous");
    rules.alibi = static_cast<const float*>(slopes.ptr);
    rules.alibi_batch = each_batch ? slopes.stride(0) : 0;
  }
  FC_CHECK(0 <= score.dropout_p && score.dropout_p <= 1, "dropout_p is ", score.dropout_p,
           "; expected a probability in [0, 1]");
  if (score.dropout_p > 0) {
    FC_CHECK(score.rng, "rng is None; dropout needs an int64 tensor (seed, offset), e.g. flash_cute.rng_state()");
    const View& rng = *score.rng;
    check_device(rng, q, "rng");
    FC_CHECK(rng.dtype == ScalarType::Long && rng.dims == 1 && rng.size(0) == 2 && is_contiguous(rng),
             "rng must be contiguous int64 (2,): seed and offset, e.g. flash_cute.rng_state()");
    rules.drop_below = drop_below_of(score.dropout_p);
    if (rules.drop_below > 0) rules.rng = static_cast<const int64_t*>(rng.ptr);
    rules.keep_scale = rules.drop_below < kDropSteps ? float(kDropSteps) / float(kDropSteps - rules.drop_below) : 0.f;
  }
  return rules;
}

Sink sink_of(const std::optional<View>& sink, const View& q, int heads) {
  if (!sink) return {};
  check_device(*sink, q, "sink");
  FC_CHECK(sink->dims == 1 && sink->size(0) == heads && is_contiguous(*sink), "sink must be a contiguous (", heads,
           ",)");
  switch (sink->dtype) {
    case ScalarType::Float:
      return {sink->ptr, Sink::Element::FP32};
    case ScalarType::Half:
      return {sink->ptr, Sink::Element::FP16};
    case ScalarType::BFloat16:
      return {sink->ptr, Sink::Element::BF16};
    default:
      FC_CHECK(false, "sink must be float32, float16 or bfloat16");
  }
  return {};
}

}  // namespace

Pages make_pages(const View& block_table, const View& k, int batch, const View& q) {
  check_device(block_table, q, "block_table");
  FC_CHECK(block_table.dtype == ScalarType::Int && block_table.dims == 2 && block_table.size(0) == batch &&
               is_last_contiguous(block_table),
           "block_table must be int32 (", batch, ", max_blocks), rows contiguous");
  Pages pages{.ids = static_cast<const int*>(block_table.ptr),
              .batch = block_table.stride(0),
              .per_sequence = checked_int(block_table.size(1), "max_blocks"),
              .count = checked_int(k.size(0), "num_blocks"),
              .size = checked_int(k.size(1), "page_size")};
  checked_int(pages.capacity(), "max_blocks * page_size");
  return pages;
}

void describe_scores(FwdProblem& p, const Score& score, const View& q) {
  p.band = band_of(score);
  const double scale = score.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(p.head_dim)));
  FC_CHECK(std::fabs(scale) <= kMostScale, "softmax_scale is ", scale,
           "; expected None or a number between -2**127 and 2**127");
  p.softmax_scale = static_cast<float>(scale);
  p.rules = rules_of(score, q, p.batch, p.heads);
  const float softcap = p.rules.element.softcap;
  FC_CHECK(softcap == 0 || std::isfinite(p.softmax_scale / softcap), "softcap is ", softcap, " and softmax_scale ",
           scale, "; expected a ratio softmax_scale / softcap that fp32 holds");
  p.sink = sink_of(score.sink, q, p.heads);
}

void describe_lists(FwdProblem& p, const FwdArguments& a, int rows) {
  FC_CHECK(a.tile_lists || (!a.tile_bits && !a.tile_ranks), a.tile_bits ? "tile_bits" : "tile_ranks",
           " is given, and tile_lists is None; it needs tile_lists");
  if (!a.tile_lists) return;
  FC_CHECK(!a.block_table && !a.return_softmax,
           "tile_lists (sparse) with block_table, or with return_softmax, is not supported");
  const View& t = *a.tile_lists;
  const int tiles = detail::ceil_div(rows, kTileSide);
  check_device(t, a.q, "tile_lists");
  FC_CHECK(t.dtype == ScalarType::Int && t.dims == 5 && t.size(2) == tiles && t.size(3) >= 1 && t.size(4) == 2 &&
               is_contiguous(t),
           "tile_lists must be a contiguous int32 (batch, heads, ", tiles, ", 1 + entries, 2)");
  FC_CHECK(t.size(0) == 1 || t.size(0) == p.batch, "tile_lists has batch ", t.size(0), "; expected 1 or ", p.batch);
  FC_CHECK(t.size(1) == 1 || t.size(1) == p.heads_k || t.size(1) == p.heads, "tile_lists has ", t.size(1),
           " heads; expected 1, ", p.heads_k, " (of keys) or ", p.heads, " (of queries)");
  if (p.all_rows() == 0 || p.all_keys() == 0 || p.heads == 0) return;  // the lists name nothing
  const int64_t of_head = t.size(2) * t.size(3);
  p.lists = {.ptr = static_cast<const TileEntry*>(t.ptr),
             .batch = t.size(0) == 1 ? 0 : t.size(1) * of_head,
             .head = t.size(1) == 1 ? 0 : of_head,
             .tiles = tiles,
             .capacity = checked_int(t.size(3) - 1, "entries of tile_lists"),
             .heads_per_list = static_cast<int>(p.heads / std::max<int64_t>(1, t.size(1)))};
  if (a.tile_ranks) {
    const View& ranks = *a.tile_ranks;
    check_device(ranks, a.q, "tile_ranks");
    FC_CHECK(ranks.dtype == ScalarType::Int && ranks.dims == 4 && is_contiguous(ranks) &&
                 std::equal(ranks.sizes, ranks.sizes + 4, t.sizes),
             "tile_ranks must be contiguous int32, of the shape of tile_lists without its last dimension");
    p.lists.ranks = static_cast<const int*>(ranks.ptr);
  }
  if (!a.tile_bits) return;
  const View& bits = *a.tile_bits;
  check_device(bits, a.q, "tile_bits");
  FC_CHECK(bits.dtype == ScalarType::Int && bits.dims == 3 && bits.size(1) == kTileSide &&
               bits.size(2) == kTileSide / 32 && is_contiguous(bits),
           "tile_bits must be a contiguous int32 (masks, ", kTileSide, ", ", kTileSide / 32, ")");
  p.lists.bits = static_cast<const uint32_t*>(bits.ptr);
  constexpr int64_t kMostMasks = 1 << 22;  // so that 32 bits can index their words, and codes of entries hold them
  FC_CHECK(bits.size(0) <= kMostMasks, "tile_bits has ", bits.size(0), " masks; at most ", kMostMasks,
           " are supported");
  p.lists.masks = static_cast<int>(bits.size(0));
}

FwdProblem make_problem(const FwdArguments& a) {
  return make_problem(a, dtype_of(a.q, a.allow_tf32));
}

FwdProblem make_problem(const FwdArguments& a, DType dtype) {
  check_shapes(a);
  const bool dense = !a.sequences;
  const int head_axis = dense ? 2 : 1;
  FwdProblem p{};
  p.dtype = dtype;
  p.heads = checked_int(a.q.size(head_axis), "heads");
  p.heads_k = checked_int(a.k.size(a.k.dims - 2), "heads_k");
  p.head_dim = checked_int(a.q.size(head_axis + 1), "head dim");
  p.head_dim_v = checked_int(a.v.size(a.v.dims - 1), "head dim of v");
  p.q = tensor_view(a.q, "q");
  p.k = tensor_view(a.k, "k");
  p.v = tensor_view(a.v, "v");
  if (dense) {
    p.batch = checked_int(a.q.size(0), "batch");
    p.seqlen_q = checked_int(a.q.size(1), "seqlen_q");
    p.seqlen_k = checked_int(a.k.size(1), "seqlen_k");
  } else {
    const PackedSequences& s = *a.sequences;
    FC_CHECK(s.cu_seqlens_q.dims == 1 && s.cu_seqlens_q.size(0) > 0,
             "cu_seqlens_q must be a vector of batch + 1 offsets");
    p.batch = checked_int(s.cu_seqlens_q.size(0) - 1, "batch");
    p.total_q = a.q.size(0);
    p.total_k = a.k.size(0);
    p.seqlen_q = checked_int(s.max_seqlen_q, "max_seqlen_q");
    p.seqlen_k = checked_int(s.max_seqlen_k, "max_seqlen_k");
    p.varlen.cu_q = indices(s.cu_seqlens_q, p.batch + 1, "cu_seqlens_q", a.q);
    p.varlen.cu_k = indices(s.cu_seqlens_k, p.batch + 1, "cu_seqlens_k", a.q);
    if (a.block_table) p.pages = make_pages(*a.block_table, a.k, p.batch, a.q);
    if (s.seqused_q) p.varlen.used_q = indices(*s.seqused_q, p.batch, "seqused_q", a.q);
    if (s.seqused_k) p.varlen.used_k = indices(*s.seqused_k, p.batch, "seqused_k", a.q);
  }
  describe_scores(p, a.score, a.q);
  return p;
}

Tensor allocate_out(const View& q, const View& v) {
  const int64_t head_dim_v = v.size(v.dims - 1);
  return q.dims == 4 ? allocate(q, {q.size(0), q.size(1), q.size(2), head_dim_v}, q.dtype)
                     : allocate(q, {q.size(0), q.size(1), head_dim_v}, q.dtype);
}

Tensor allocate_row_stats(const View& q) {
  return q.dims == 4 ? allocate(q, {q.size(0), q.size(2), q.size(1)}, ScalarType::Float)
                     : allocate(q, {q.size(1), q.size(0)}, ScalarType::Float);
}

}  // namespace flash_cute
