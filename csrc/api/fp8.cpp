// torch.ops.flash_cute.fp8_fwd and fp8_varlen_fwd: check, allocate, describe the problem, choose its route, launch.
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <cmath>

#include "api/api.h"
#include "api/describe.h"
#include "api/fwd.h"
#include "api/run.h"
#include "api/tensors.h"
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
  p.fp8.negative = p.softmax_scale < 0;
  p.softmax_scale = std::fabs(p.softmax_scale);
}

// Columns that TMA can load of each row: whole vectors, and none of the kernel's blocks of columns is empty.
int padded_dim(const FwdProblem& p) {
  const int wide = p.head_dim_v > 128 && p.head_dim <= 128 ? 256 : p.head_dim;
  return (wide + 15) / 16 * 16;
}

// The same q or k where TMA can read it; `memory` holds a copy.
TensorView readable(const TensorView& x, const FwdProblem& p, int batches, int64_t rows, int heads, int dim,
                    const View& q, Tensor& memory) {
  if (x.vectors && dim == p.head_dim) return x;
  memory = allocate(q, {batches, rows, heads, dim}, q.dtype);
  auto* const to = static_cast<uint8_t*>(memory.data_ptr());
  check_cuda("pad_rows", pad_rows(x, batches, rows, heads, p.head_dim, to, dim, current_stream(q)));
  const int64_t row = int64_t(heads) * dim;
  return {to, x.batch == 0 ? 0 : rows * row, row, dim, true};
}

// Gives a problem without keys a row of them that no sequence has: TMA cannot describe none. Returns its memory.
Tensor replace_keys(FwdProblem& p, const View& q) {
  const int64_t row = int64_t(p.heads_k) * 512;  // at least of the padded head dim
  const Tensor memory = allocate(q, {p.batch * (row + int64_t{4})}, ScalarType::Byte);
  auto* const lengths = static_cast<uint8_t*>(memory.data_ptr()) + p.batch * row;
  check_cuda("cudaMemsetAsync", cudaMemsetAsync(lengths, 0, p.batch * sizeof(int), current_stream(q)));
  p.k = p.v = {memory.data_ptr(), row, row, 512, true};
  p.pages = {};
  p.seqlen_k = 1;
  p.total_k = p.batch;
  p.varlen.cu_k = nullptr;
  p.varlen.used_k = reinterpret_cast<const int*>(lengths);
  return memory;
}

void attend_fp8(StableIValue* stack, bool varlen) {
  Stack in(stack);
  const Fp8Arguments a = take_fp8(in, varlen);
  const View &q = a.fwd.q, &k = a.fwd.k;
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
  Tensor lengths, padded_q, padded_k;
  const bool paged = p.pages.ids != nullptr;
  if (paged) {
    lengths = allocate(q, {p.batch}, ScalarType::Int);
    int* const counts = static_cast<int*>(lengths.data_ptr());
    check_cuda("count_paged_keys",
               count_paged_keys(p.varlen.cu_k, p.varlen.used_k, p.batch, p.seqlen_k, counts, current_stream(q)));
    p = over_pages(p, counts).fwd;
    p.varlen.used_k = counts;
  }
  if (p.all_rows() == 0 || p.heads == 0) return in.put(out, softmax_lse);
  Tensor no_keys;
  if (p.all_keys() == 0 || (paged && p.pages.count == 0)) no_keys = replace_keys(p, q);
  const int dim = padded_dim(p);
  auto batches = [](const View& x) { return x.dims == 4 ? static_cast<int>(x.size(0)) : 1; };
  p.q = readable(p.q, p, batches(q), q.size(q.dims - 3), p.heads, dim, q, padded_q);
  if (!no_keys.defined()) p.k = readable(p.k, p, batches(k), k.size(k.dims - 3), p.heads_k, dim, q, padded_k);
  p.head_dim = dim;
  run_forward(choose_route(built_kernels(), p, device(q.device)), p, q);
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
