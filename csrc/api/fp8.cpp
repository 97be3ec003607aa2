// torch.ops.flash_cute.fp8_fwd and fp8_varlen_fwd: check, allocate, describe the problem, choose its route, launch.
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>

#include "api/api.h"
#include "api/describe.h"
#include "api/fwd.h"
#include "api/run.h"
#include "api/tensors.h"
#include "core/e4m3.h"
#include "kernels/passes/pad_rows.h"
#include "kernels/passes/pages.h"

namespace flash_cute {
namespace {

struct Fp8Arguments {
  FwdArguments fwd;
  std::optional<View> q_descale = {}, k_descale = {}, v_descale = {};
  bool two_level = true;
  std::optional<ScalarType> dtype = {};  // of out
};

Fp8Arguments take_fp8(Stack& in, bool varlen) {
  Fp8Arguments a{.fwd = {.q = in.view(), .k = in.view(), .v = in.view()}};
  if (varlen) {
    a.fwd.sequences = PackedSequences{in.view(),          in.view(),          in.take<int64_t>(),
                                      in.take<int64_t>(), in.optional_view(), in.optional_view()};
    a.fwd.block_table = in.optional_view();
  }
  a.q_descale = in.optional_view();
  a.k_descale = in.optional_view();
  a.v_descale = in.optional_view();
  Score& score = a.fwd.score;
  score.softmax_scale = in.take<std::optional<double>>();
  score.is_causal = in.take<bool>();
  score.window_size_left = in.take<int64_t>();
  score.window_size_right = in.take<int64_t>();
  score.sink = in.optional_view();
  a.two_level = in.take<bool>();
  a.dtype = in.take<std::optional<ScalarType>>();
  return a;
}

// A descale of (batch, heads_k), or `own`: of each row and head of x, or each channel of v.
Descale descale_of(const std::optional<View>& t, const FwdProblem& p, const View& q, const char* name,
                   std::initializer_list<int64_t> own) {
  if (!t) return {};
  check_device(*t, q, name);
  FC_CHECK(t->dtype == ScalarType::Float, name, " is not torch.float32: call float()");
  if (t->dims == 2 && t->size(0) == p.batch && t->size(1) == p.heads_k) {
    return {.ptr = static_cast<const float*>(t->ptr), .batch = t->stride(0), .head = t->stride(1)};
  }
  FC_CHECK(t->dims == 3 && std::equal(own.begin(), own.end(), t->sizes), name,
           " has another shape than (batch, heads_k), or one entry for each row and head, or channel");
  return {.ptr = static_cast<const float*>(t->ptr),
          .batch = t->stride(0),
          .row = t->stride(1),
          .head = t->stride(2),
          .each = true};
}

// Fills what only e4m3 inputs have.
void describe_fp8(FwdProblem& p, const Fp8Arguments& a) {
  const FwdArguments& f = a.fwd;
  auto lead = [](const View& x) { return x.dims == 4 ? x.size(0) : 1; };
  auto rows = [](const View& x) { return x.size(x.dims - 3); };
  p.fp8.q = descale_of(a.q_descale, p, f.q, "q_descale", {lead(f.q), rows(f.q), p.heads});
  p.fp8.k = descale_of(a.k_descale, p, f.q, "k_descale", {lead(f.k), rows(f.k), p.heads_k});
  p.fp8.v = descale_of(a.v_descale, p, f.q, "v_descale", {p.batch, p.heads_k, p.head_dim_v});
  if (p.fp8.v.each) std::swap(p.fp8.v.row, p.fp8.v.head);
  for (Descale* descale : {&p.fp8.q, &p.fp8.k}) {
    if (descale->each && !p.dense() && (descale == &p.fp8.q || p.pages.ids == nullptr)) descale->batch = 0;
  }
  p.fp8.two_level = a.two_level;
  FC_CHECK(!a.dtype || *a.dtype == ScalarType::BFloat16 || *a.dtype == ScalarType::Half,
           "dtype is not supported for out; supported: torch.bfloat16, torch.float16");
  if (a.dtype == ScalarType::Half) p.fp8.out = DType::FP16;
  move_sign(p);
}

// A copy of q's or k's rows, which `memory` holds, with zeros behind their columns.
TensorView pad(const TensorView& x, const StoredRows& rows, const FwdProblem& p, int dim, const View& q,
               Tensor& memory) {
  memory = allocate(q, {rows.batches, rows.rows, rows.heads, dim}, q.dtype);
  auto* const to = static_cast<uint8_t*>(memory.data_ptr());
  check_cuda("pad_rows", pad_rows(x, rows.batches, rows.rows, rows.heads, p.head_dim, to, dim, current_stream(q)));
  return rows.contiguous(dim, to);
}

// What the steps before the kernel write.
struct Fp8Memory {
  Tensor counts, no_keys, k, v, k_descale, lengths, padded_q, padded_k;
};

FwdProblem without_keys(const FwdProblem& p, const View& q, Tensor& memory) {
  const int64_t row = over_no_keys(p, nullptr, nullptr).k.row;
  memory = allocate(q, {p.batch * (row + int64_t{4})}, ScalarType::Byte);
  auto* const lengths = static_cast<uint8_t*>(memory.data_ptr()) + p.batch * row;
  check_cuda("cudaMemsetAsync", cudaMemsetAsync(lengths, 0, p.batch * sizeof(int), current_stream(q)));
  return over_no_keys(p, memory.data_ptr(), reinterpret_cast<const int*>(lengths));
}

// Copies k, v and the descales of k's rows out of pages.
FwdProblem gather(const FwdProblem& p, const Route& route, const View& q, Fp8Memory& memory) {
  const int rows = route.gathered_rows;
  memory.k = allocate(q, {p.batch, rows, p.heads_k, p.head_dim}, q.dtype);
  memory.v = allocate(q, {p.batch, rows, p.heads_k, p.head_dim_v}, q.dtype);
  memory.lengths = allocate(q, {p.batch}, ScalarType::Int);
  DecodeProblem from{};
  from.fwd = p;
  from.cache.lengths = p.varlen.used_k;
  GatheredKeys to{tensor_view(View(memory.k), "k"), tensor_view(View(memory.v), "v"), rows,
                  static_cast<int*>(memory.lengths.data_ptr())};
  check_cuda("gather_pages", gather_pages(from, to, current_stream(q)));
  FwdProblem gathered = over_gathered(p, rows, to.k, to.v, to.lengths);
  if (!p.fp8.k.each) return gathered;
  // Descales are keys of one dim of four bytes.
  const Descale& k = p.fp8.k;
  memory.k_descale = allocate(q, {p.batch, rows, p.heads_k, 1}, ScalarType::Float);
  from.fwd.dtype = DType::TF32;
  from.fwd.head_dim = 1;
  from.fwd.head_dim_v = 0;
  from.fwd.k = {const_cast<float*>(k.ptr), k.batch, k.row, k.head, false};
  to.k = tensor_view(View(memory.k_descale), "k_descale");
  check_cuda("gather_pages", gather_pages(from, to, current_stream(q)));
  gathered.fp8.k = {static_cast<const float*>(to.k.ptr), to.k.batch, to.k.row, to.k.head, true};
  return gathered;
}

void attend_fp8(StableIValue* stack, bool varlen) {
  Stack in(stack);
  const Fp8Arguments a = take_fp8(in, varlen);
  const View& q = a.fwd.q;
  FC_CHECK(q.dtype == ScalarType::Float8_e4m3fn,
           "q is not torch.float8_e4m3fn, which flash_cute.quantize_fp8 makes; k and v are to be of it, too");
  FwdProblem p = make_problem(a.fwd, DType::E4M3);
  describe_fp8(p, a);
  const torch::stable::accelerator::DeviceGuard guard(q.device);
  const ScalarType out_dtype = p.fp8.out == DType::FP16 ? ScalarType::Half : ScalarType::BFloat16;
  const Tensor out = q.dims == 4 ? allocate(q, {q.size(0), q.size(1), q.size(2), p.head_dim_v}, out_dtype)
                                 : allocate(q, {q.size(0), q.size(1), p.head_dim_v}, out_dtype);
  const Tensor softmax_lse = allocate_row_stats(q);
  p.out = tensor_view(View(out), "out");
  p.lse = row_stats(View(softmax_lse), "softmax_lse", q);
  if (p.all_rows() == 0 || p.heads == 0) return in.put(out, softmax_lse);
  const Route route = choose_route(built_kernels(), p, device(q.device));
  Fp8Memory memory;
  if (route.count_keys) {
    memory.counts = allocate(q, {p.batch}, ScalarType::Int);
    int* const counts = static_cast<int*>(memory.counts.data_ptr());
    check_cuda("count_paged_keys",
               count_paged_keys(p.varlen.cu_k, p.varlen.used_k, p.batch, p.seqlen_k, counts, current_stream(q)));
    p = over_counted_pages(p, counts);
  }
  const Fp8Copies& copies = route.copies;
  if (copies.no_keys) p = without_keys(p, q, memory.no_keys);
  if (route.gather) p = gather(p, route, q, memory);
  if (copies.q) p.q = pad(p.q, stored_queries(p), p, copies.head_dim, q, memory.padded_q);
  if (copies.k) p.k = pad(p.k, stored_keys(p), p, copies.head_dim, q, memory.padded_k);
  p.head_dim = copies.head_dim;
  run_forward(route, p, q);
  in.put(out, softmax_lse);
}

}  // namespace

void fp8_fwd(StableIValue* stack, uint64_t, uint64_t) {
  attend_fp8(stack, false);
}
void fp8_varlen_fwd(StableIValue* stack, uint64_t, uint64_t) {
  attend_fp8(stack, true);
}

}  // namespace flash_cute
