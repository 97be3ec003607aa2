#include "api/problem.h"

#include <cmath>

#include "api/tensors.h"

namespace flash_cute {
namespace {

void check_shapes(const FwdArguments& a) {
  const int dims = a.sequences ? 3 : 4;
  FC_CHECK(a.q.dim() == dims && a.k.dim() == dims, "q and k must have ", dims, " dimensions");
  FC_CHECK(a.sequences || a.q.size(0) == a.k.size(0), "q and k differ in batch size");
  check_same_kind(a.k, a.q, "k");
  FC_CHECK(a.k.size(dims - 1) == a.q.size(dims - 1), "q and k differ in head dim");
  check_same_kind(a.v, a.q, "v");
  FC_CHECK(a.v.dim() == dims && a.v.size(dims - 1) == a.k.size(dims - 1),
           "a head dim of v that differs from q's is not supported on CUDA yet");
  check_same_shape(a.v, a.k, "v");
  FC_CHECK(a.q.size(dims - 1) > 0, "the head dim is 0");
  const int64_t heads = a.q.size(dims - 2), heads_k = a.k.size(dims - 2);
  FC_CHECK(heads_k > 0 && heads % heads_k == 0, "q has ", heads, " heads, k ", heads_k,
           "; heads must be a multiple of heads_k");
}

DType dtype_of(const Tensor& q) {
  const ScalarType dtype = q.scalar_type();
  const char* name = dtype == ScalarType::Float ? "float32" : dtype == ScalarType::Double ? "float64" : "of q";
  FC_CHECK(dtype == ScalarType::Half || dtype == ScalarType::BFloat16, "dtype ", name,
           " is not supported on CUDA yet; float16 and bfloat16 are");
  return dtype == ScalarType::Half ? DType::FP16 : DType::BF16;
}

Band band_of(const Score& score) {
  auto bound = [](int64_t size) {
    FC_CHECK(size >= -1, "a window size is ", size, "; -1 is unbounded, others are counts");
    return size < 0 || size > Band::kUnbounded ? Band::kUnbounded : static_cast<int>(size);
  };
  return {bound(score.window_size_left), score.is_causal ? 0 : bound(score.window_size_right)};
}

}  // namespace

void check_supported(const FwdArguments& a) {
  FC_CHECK(a.score.softcap == 0, "softcap is not supported on CUDA yet");
  FC_CHECK(!a.score.alibi_slopes, "alibi_slopes is not supported on CUDA yet");
  FC_CHECK(!a.score.sink, "sink is not supported on CUDA yet");
  FC_CHECK(a.score.dropout_p == 0, "dropout_p is not supported on CUDA yet");
  FC_CHECK(!a.return_softmax, "return_softmax is not supported on CUDA yet");
  FC_CHECK(!a.block_table, "block_table is not supported on CUDA yet");
}

FwdProblem make_problem(const FwdArguments& a) {
  const DType dtype = dtype_of(a.q);
  check_shapes(a);
  check_supported(a);
  const bool dense = !a.sequences;
  const int head_axis = dense ? 2 : 1;
  FwdProblem p{};
  p.dtype = dtype;
  p.heads = checked_int(a.q.size(head_axis), "heads");
  p.heads_k = checked_int(a.k.size(head_axis), "heads_k");
  p.head_dim = checked_int(a.q.size(head_axis + 1), "head dim");
  p.band = band_of(a.score);
  p.softmax_scale =
      static_cast<float>(a.score.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(p.head_dim))));
  FC_CHECK(std::isfinite(p.softmax_scale), "softmax_scale is not finite");
  p.q = matrices(a.q, "q");
  p.k = matrices(a.k, "k");
  p.v = matrices(a.v, "v");
  if (dense) {
    p.batch = checked_int(a.q.size(0), "batch");
    p.seqlen_q = checked_int(a.q.size(1), "seqlen_q");
    p.seqlen_k = checked_int(a.k.size(1), "seqlen_k");
    return p;
  }
  const PackedSequences& s = *a.sequences;
  FC_CHECK(s.cu_seqlens_q.dim() == 1 && s.cu_seqlens_q.size(0) > 0, "cu_seqlens_q must hold batch + 1 offsets");
  p.batch = checked_int(s.cu_seqlens_q.size(0) - 1, "batch");
  p.total_q = a.q.size(0);
  p.total_k = a.k.size(0);
  p.seqlen_q = checked_int(s.max_seqlen_q, "max_seqlen_q");
  p.seqlen_k = checked_int(s.max_seqlen_k, "max_seqlen_k");
  p.sequences.cu_q = indices(s.cu_seqlens_q, p.batch + 1, "cu_seqlens_q", a.q);
  p.sequences.cu_k = indices(s.cu_seqlens_k, p.batch + 1, "cu_seqlens_k", a.q);
  if (s.seqused_q) p.sequences.used_q = indices(*s.seqused_q, p.batch, "seqused_q", a.q);
  if (s.seqused_k) p.sequences.used_k = indices(*s.seqused_k, p.batch, "seqused_k", a.q);
  return p;
}

}  // namespace flash_cute
