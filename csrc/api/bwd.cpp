// torch.ops.flash_cute.bwd and varlen_bwd: check, allocate, describe the problem, select a kernel, launch.
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>

#include "api/api.h"
#include "api/describe.h"
#include "api/tensors.h"
#include "core/heuristics.h"
#include "core/registry.h"

namespace flash_cute {
namespace {

Tensor allocate_like(const View& t) {
  return t.dims == 4 ? allocate(t, {t.size(0), t.size(1), t.size(2), t.size(3)}, t.dtype)
                     : allocate(t, {t.size(0), t.size(1), t.size(2)}, t.dtype);
}

BwdProblem make_problem(const BwdArguments& a) {
  const View& q = a.fwd.q;
  BwdProblem p{};
  p.fwd = make_problem(a.fwd);
  check_like_out(a.out, q, a.fwd.v, "out");
  check_like_out(a.dout, q, a.fwd.v, "dout");
  p.fwd.out = tensor_view(a.out, "out");
  p.fwd.lse = row_stats(a.softmax_lse, "softmax_lse", q);
  p.dout = tensor_view(a.dout, "dout");
  if (a.dlse) p.dlse = row_stats(*a.dlse, "dlse", q);
  p.deterministic = a.deterministic;
  if (!p.fwd.dense()) {  // the longest lengths may be any bound; grids and orders go by them
    p.fwd.seqlen_q = static_cast<int>(std::min<int64_t>(p.fwd.seqlen_q, p.fwd.total_q));
    p.fwd.seqlen_k = static_cast<int>(std::min<int64_t>(p.fwd.seqlen_k, p.fwd.total_k));
  }
  return p;
}

TensorView gradient(const View& t, const View& of, const char* name) {
  check_same_kind(t, of, name);
  check_shape(t, of.sizes, of.dims, name);
  return tensor_view(t, name);
}

float* sink_gradient(const View& t, const View& q, int heads) {
  check_device(t, q, "dsink");
  FC_CHECK(t.dtype == ScalarType::Float && t.dims == 1 && t.size(0) == heads && is_contiguous(t),
           "dsink must be a contiguous fp32 (", heads, ",)");
  return static_cast<float*>(t.ptr);
}

// What the 16-bit kernels keep between their passes.
Tensor allocate_workspace(BwdProblem& p, const KernelConfig& config, const View& q) {
  const bool dense = p.fwd.dense();
  auto padded_rows = [&](int block, int seqlen, int64_t total) {  // of a head
    const PaddedRows padded{block};
    return dense ? padded.dense(seqlen) : padded.packed(total, p.fwd.batch);
  };
  const int64_t rows = padded_rows(config.block_m, p.fwd.seqlen_q, p.fwd.total_q);
  const int64_t all_rows = rows * p.fwd.heads * (dense ? p.fwd.batch : 1);
  const int64_t semaphores = all_rows / config.block_m * config.warps;
  const int rows_of_tile = config.block_n * config.cluster;
  const int64_t tiles_k = int64_t((p.fwd.seqlen_k + rows_of_tile - 1) / rows_of_tile) * p.fwd.heads_k * p.fwd.batch;
  p.slabs_of_head = dense ? 0 : padded_rows(kSlabRows, p.fwd.seqlen_k, p.fwd.total_k) / kSlabRows;
  const int64_t rows_k =
      dense ? (tiles_k - p.splits.whole_tiles) * rows_of_tile : p.slabs_of_head * kSlabRows * p.fwd.heads_k;
  const int64_t split_sums =
      p.splits.count() > 1 ? rows_k * p.splits.count() * (config.head_dim + config.head_dim_v) : 0;
  const Tensor workspace =
      allocate(q, {all_rows * (config.dq_columns() + 2) + split_sums + semaphores}, ScalarType::Float);
  float* base = static_cast<float*>(workspace.data_ptr());
  const int64_t batch_stride = dense ? rows * p.fwd.heads : 0;
  p.lse_log2 = {base, batch_stride, rows};
  p.row_dot = {base + all_rows, batch_stride, rows};
  p.dq_accum = base + 2 * all_rows;
  p.split_sums = p.dq_accum + all_rows * config.dq_columns();
  p.dq_semaphores = reinterpret_cast<int*>(p.split_sums + split_sums);
  return workspace;
}

void run(BwdProblem& p, const FwdArguments& a, const View& dq, const View& dk, const View& dv, const View& softmax_d) {
  p.dq = gradient(dq, a.q, "dq");
  p.dk = gradient(dk, a.k, "dk");
  p.dv = gradient(dv, a.v, "dv");
  p.softmax_d = row_stats(softmax_d, "softmax_d", a.q);
  const auto& kernel = select(bwd_kernels(), p, device(a.q.device));
  p.splits = plan_query_splits(kernel.config, p.fwd, device(a.q.device).sms);

  Tensor workspace;
  if (!kernel.config.fp32()) workspace = allocate_workspace(p, kernel.config, a.q);
  const cudaError_t error = kernel.launch(p, current_stream(a.q));
  FC_CHECK(error == cudaSuccess, kernel.config.id(), ": ", cudaGetErrorString(error));
}

void functional(StableIValue* stack, bool varlen) {
  Stack in(stack);
  const BwdArguments a = take_bwd(in, varlen);
  BwdProblem p = make_problem(a);
  const torch::stable::accelerator::DeviceGuard guard(a.fwd.q.device);
  const Tensor dq = allocate_like(a.fwd.q), dk = allocate_like(a.fwd.k), dv = allocate_like(a.fwd.v);
  const Tensor softmax_d = allocate_row_stats(a.fwd.q);
  std::optional<Tensor> dsink;
  if (p.fwd.sink.ptr != nullptr) {
    dsink = allocate(a.fwd.q, {p.fwd.heads}, ScalarType::Float);
    p.dsink = static_cast<float*>(dsink->data_ptr());
  }
  run(p, a.fwd, View(dq), View(dk), View(dv), View(softmax_d));
  in.put(dq, dk, dv, dsink, softmax_d);
}

void into(StableIValue* stack, bool varlen) {
  Stack in(stack);
  const BwdArguments a = take_bwd(in, varlen);
  const std::optional<View> dq = in.optional_view(), dk = in.optional_view(), dv = in.optional_view(),
                            dsink = in.optional_view(), softmax_d = in.optional_view();
  check_outputs(
      {named(dq, "dq"), named(dk, "dk"), named(dv, "dv"), named(dsink, "dsink"), named(softmax_d, "softmax_d")},
      {named(a.fwd.q, "q"), named(a.fwd.k, "k"), named(a.fwd.v, "v"), named(a.dout, "dout"), named(a.out, "out"),
       named(a.softmax_lse, "softmax_lse"), named(a.dlse, "dlse")});
  BwdProblem p = make_problem(a);
  FC_CHECK(dsink.has_value() == (p.fwd.sink.ptr != nullptr), "dsink must be given if and only if sink is");
  if (dsink) p.dsink = sink_gradient(*dsink, a.fwd.q, p.fwd.heads);
  const torch::stable::accelerator::DeviceGuard guard(a.fwd.q.device);
  auto or_scratch = [](const std::optional<View>& given, const View& like) {
    return given ? *given : View(allocate_like(like));
  };
  run(p, a.fwd, or_scratch(dq, a.fwd.q), or_scratch(dk, a.fwd.k), or_scratch(dv, a.fwd.v),
      softmax_d ? *softmax_d : View(allocate_row_stats(a.fwd.q)));
}

}  // namespace

void bwd(StableIValue* stack, uint64_t, uint64_t) {
  functional(stack, false);
}
void bwd_out(StableIValue* stack, uint64_t, uint64_t) {
  into(stack, false);
}
void varlen_bwd(StableIValue* stack, uint64_t, uint64_t) {
  functional(stack, true);
}
void varlen_bwd_out(StableIValue* stack, uint64_t, uint64_t) {
  into(stack, true);
}

}  // namespace flash_cute
