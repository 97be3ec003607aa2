#include "api/describe_kvcache.h"

#include <algorithm>

#include "api/describe.h"

namespace flash_cute {
namespace {

const int* optional_indices(const std::optional<View>& t, int64_t length, const char* name, const View& q) {
  return t ? indices(*t, length, name, q) : nullptr;
}

Descale make_descale(const std::optional<View>& t, const KvcacheArguments& a, int batch, const char* name) {
  if (!t) return {};
  const bool of_rows = t->dims == 3;
  const int64_t of_heads[] = {batch, a.k_cache.size(2)};
  FC_CHECK(t->dtype == ScalarType::Float, name, "'s dtype must be float32");
  check_device(*t, a.q, name);
  check_shape(*t, of_rows ? a.k_cache.sizes : of_heads, of_rows ? 3 : 2, name);
  const int head = t->dims - 1;
  return {.ptr = static_cast<const float*>(t->ptr),
          .batch = t->stride(0),
          .row = of_rows ? t->stride(1) : 0,
          .head = t->stride(head),
          .each = of_rows};
}

Cache make_cache(const KvcacheArguments& a, int batch) {
  return {.lengths = optional_indices(a.cache_seqlens, batch, "cache_seqlens", a.q),
          .leftpad = optional_indices(a.cache_leftpad, batch, "cache_leftpad", a.q),
          .eight_bits = a.op == CacheOp::AttendQuantized,
          .dtype = a.k_cache.dtype == ScalarType::Char ? DType::INT8 : DType::E4M3,
          .k = make_descale(a.k_descale, a, batch, "k_descale"),
          .v = make_descale(a.v_descale, a, batch, "v_descale")};
}

Pages pages_of(const KvcacheArguments& a, int batch) {
  FC_CHECK(!a.cache_batch_idx || !a.block_table, "cache_batch_idx and block_table are given; give one of them");
  if (a.block_table) return make_pages(*a.block_table, a.k_cache, batch, a.q);
  Pages pages{};
  pages.count = checked_int(a.k_cache.size(0), "k_cache's first dimension");
  pages.size = checked_int(a.k_cache.size(1), "k_cache's second dimension");
  if (a.cache_batch_idx) {
    pages.ids = indices(*a.cache_batch_idx, batch, "cache_batch_idx", a.q);
    pages.batch = 1;
  } else {
    FC_CHECK(pages.count >= batch, "the caches hold ", pages.count, " sequences, q has ", batch,
             "; give cache_batch_idx, or larger caches");
  }
  return pages;
}

NewKeys make_new_keys(const KvcacheArguments& a, int batch) {
  NewKeys added{};
  FC_CHECK(a.k.has_value() == a.v.has_value(), "k or v is None; give both, or neither");
  if (!a.k) return added;
  FC_CHECK(a.cache_seqlens, "cache_seqlens is None; k and v need it: they are appended there");
  const bool dense = !a.cu_seqlens_k_new;
  const int dims = dense ? 4 : 3;
  auto check = [&](const View& t, const View& cache, const char* name) {
    check_same_kind(t, a.q, name);
    FC_CHECK(a.k->dims == dims, "k has ", a.k->dims, " dimensions; expected ", dims);
    const int64_t expected[] = {batch, a.k->size(dims - 3), cache.size(2), cache.size(3)};
    check_shape(t, dense ? expected : expected + 1, dims, name);
  };
  check(*a.k, a.k_cache, "k");
  check(*a.v, a.v_cache, "v");
  added.k = tensor_view(*a.k, "k");
  added.v = tensor_view(*a.v, "v");
  added.seqlen = checked_int(a.k->size(dims - 3), "rows of k");
  added.total = dense ? int64_t(batch) * added.seqlen : added.seqlen;
  FC_CHECK(added.total < int64_t{1} << 31, "k has ", added.total,
           " rows; at most 2^31 - 1 can be appended in one call");
  added.cu = optional_indices(a.cu_seqlens_k_new, batch + 1, "cu_seqlens_k_new", a.q);
  return added;
}

Rotary make_rotary(const KvcacheArguments& a, int batch, int head_dim) {
  Rotary rotary{};
  FC_CHECK(a.rotary_cos.has_value() == a.rotary_sin.has_value(),
           "rotary_cos or rotary_sin is None; give both, or neither");
  FC_CHECK(a.rotary_cos || !a.rotary_seqlens, "rotary_seqlens is given, but no rotary_cos and rotary_sin");
  if (!a.rotary_cos) return rotary;
  FC_CHECK(a.k, "rotary_cos is given, but no k and v: rotary embedding is for new keys");
  for (const View* t : {&*a.rotary_cos, &*a.rotary_sin}) {
    check_same_kind(*t, a.q, "rotary_cos or rotary_sin");
    check_shape(*t, a.rotary_cos->sizes, a.rotary_cos->dims, "rotary_sin");
    FC_CHECK(t->dims == 2 && is_contiguous(*t) && t->size(0) > 0 && t->size(1) > 0 && 2 * t->size(1) <= head_dim,
             "rotary_cos and rotary_sin must be contiguous (positions, rotary_dim / 2), and rotary_dim in [2, ",
             head_dim, "], the head dim");
  }
  rotary.cos = a.rotary_cos->ptr;
  rotary.sin = a.rotary_sin->ptr;
  rotary.positions = checked_int(a.rotary_cos->size(0), "positions");
  rotary.half = static_cast<int>(a.rotary_cos->size(1));
  rotary.interleaved = a.rotary_interleaved;
  rotary.steps = a.score.is_causal || a.score.window_size_left >= 0 || a.score.window_size_right >= 0;
  rotary.from = optional_indices(a.rotary_seqlens, batch, "rotary_seqlens", a.q);
  return rotary;
}

void check_dtypes_of_caches(const KvcacheArguments& a) {
  if (a.op != CacheOp::AttendQuantized) {
    check_same_kind(a.k_cache, a.q, "k_cache");
    check_same_kind(a.v_cache, a.q, "v_cache");
    return;
  }
  const ScalarType stored = a.k_cache.dtype;
  FC_CHECK(stored == a.v_cache.dtype && (stored == ScalarType::Char || stored == ScalarType::Float8_e4m3fn),
           "k_cache and v_cache must both be of torch.float8_e4m3fn, or both of torch.int8; caches of q's dtype go to "
           "attend_kvcache");
  check_device(a.k_cache, a.q, "k_cache");
  check_device(a.v_cache, a.q, "v_cache");
}

void check_supported(const KvcacheArguments& a) {
  FC_CHECK(a.q.dtype == ScalarType::Half || a.q.dtype == ScalarType::BFloat16,
           "q's dtype is not supported over a key/value cache on CUDA yet; supported: torch.float16, torch.bfloat16; "
           "cast q and the caches, or run on the CPU");
  const int dims = a.cu_seqlens_q ? 3 : 4;
  FC_CHECK(a.q.dims == dims && a.k_cache.dims == 4 && a.v_cache.dims == 4, "q, k_cache and v_cache have ", a.q.dims,
           ", ", a.k_cache.dims, " and ", a.v_cache.dims, " dimensions; expected ", dims, ", 4 and 4");
  check_dtypes_of_caches(a);
  for (int i = 0; i < 3; ++i) {
    FC_CHECK(a.k_cache.size(i) == a.v_cache.size(i), "k_cache and v_cache differ in dimension ", i, ": ",
             a.k_cache.size(i), " and ", a.v_cache.size(i));
  }
  const int64_t heads = a.q.size(dims - 2), heads_k = a.k_cache.size(2);
  const int64_t dim = a.q.size(dims - 1), dim_k = a.k_cache.size(3), dim_v = a.v_cache.size(3);
  FC_CHECK(heads_k > 0 && heads % heads_k == 0, "q has ", heads, " heads and the caches ", heads_k,
           "; heads must be a multiple of heads_k");
  FC_CHECK(dim == dim_k && dim_k > 0 && dim_v > 0, "head dims are ", dim, " of q, ", dim_k, " of k_cache, ", dim_v,
           " of v_cache; the first two must agree, and none may be 0");
  FC_CHECK(a.op != CacheOp::AttendQuantized || (dim % 16 == 0 && dim_v % 16 == 0), "head dims are ", dim, " and ",
           dim_v,
           " of v_cache; over caches of 8 bits CUDA's kernels support multiples of 16: pad them, or call "
           "flash_attn_with_kvcache, which copies such caches to q's dtype");
}

}  // namespace

void check_cached_queries(const FwdProblem& f) {
  FC_CHECK(f.total_q < int64_t{1} << 31, "q has ", f.total_q, " rows; at most 2^31 - 1 are supported over a cache");
  checked_int(int64_t(f.seqlen_q) * (f.heads / f.heads_k), "max_seqlen_q * heads / heads_k");
}

DecodeProblem make_problem(const KvcacheArguments& a) {
  check_supported(a);
  const bool dense = !a.cu_seqlens_q;
  const int axis = dense ? 2 : 1;
  DecodeProblem p{};
  FwdProblem& f = p.fwd;
  f.dtype = a.q.dtype == ScalarType::Half ? DType::FP16 : DType::BF16;
  FC_CHECK(dense || (a.cu_seqlens_q->dims == 1 && a.cu_seqlens_q->size(0) > 0),
           "cu_seqlens_q must be a vector of batch + 1 offsets");
  f.batch = checked_int(dense ? a.q.size(0) : a.cu_seqlens_q->size(0) - 1, "batch");
  f.seqlen_q = checked_int(dense ? a.q.size(1) : a.max_seqlen_q, "max_seqlen_q");
  f.total_q = dense ? a.q.size(0) * a.q.size(1) : a.q.size(0);
  f.varlen.cu_q = optional_indices(a.cu_seqlens_q, f.batch + 1, "cu_seqlens_q", a.q);
  f.heads = checked_int(a.q.size(axis), "heads");
  f.heads_k = checked_int(a.k_cache.size(2), "heads_k");
  check_cached_queries(f);
  f.head_dim = checked_int(a.q.size(axis + 1), "head dim");
  f.head_dim_v = checked_int(a.v_cache.size(3), "head dim of v");
  describe_scores(f, a.score, a.q);
  p.cache = make_cache(a, f.batch);
  f.pages = pages_of(a, f.batch);
  f.seqlen_k = static_cast<int>(f.pages.capacity());
  f.total_k = int64_t(f.batch) * f.seqlen_k;
  f.q = tensor_view(a.q, "q");
  f.k = tensor_view(a.k_cache, "k_cache");
  f.v = tensor_view(a.v_cache, "v_cache");
  p.added = make_new_keys(a, f.batch);
  p.rotary = make_rotary(a, f.batch, f.head_dim);
  p.unrotated_q = f.q;
  FC_CHECK(a.num_splits >= 0 && a.split_size >= 0, "num_splits is ", a.num_splits, " and split_size ", a.split_size,
           "; expected counts >= 0 (0: the library chooses)");
  FC_CHECK(a.num_splits == 0 || a.split_size == 0, "num_splits is ", a.num_splits, " and split_size ", a.split_size,
           "; give one of them");
  p.num_splits = checked_int(std::min<int64_t>(a.num_splits, Band::kUnbounded - 1), "num_splits");
  p.split_size = checked_int(std::min<int64_t>(a.split_size, Band::kUnbounded - 1), "split_size");
  return p;
}

}  // namespace flash_cute
