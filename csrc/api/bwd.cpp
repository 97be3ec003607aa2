// torch.ops.flash_cute.bwd and varlen_bwd: check, allocate, describe the problem, select a kernel, launch.
#include <torch/csrc/stable/accelerator.h>

#include "api/api.h"
#include "api/problem.h"
#include "api/tensors.h"
#include "core/registry.h"

namespace flash_cute {
namespace {

Tensor allocate_like(const Tensor& t) {
  return t.dim() == 4 ? allocate(t, {t.size(0), t.size(1), t.size(2), t.size(3)}, t.scalar_type())
                      : allocate(t, {t.size(0), t.size(1), t.size(2)}, t.scalar_type());
}

Tensor allocate_statistics(const Tensor& q) {
  return q.dim() == 4 ? allocate(q, {q.size(0), q.size(2), q.size(1)}, ScalarType::Float)
                      : allocate(q, {q.size(1), q.size(0)}, ScalarType::Float);
}

BwdProblem make_problem(const BwdArguments& a) {
  FC_CHECK(!a.deterministic, "deterministic backward is not supported on CUDA yet");
  const Tensor& q = a.fwd.q;
  BwdProblem p{};
  p.fwd = make_problem(a.fwd);
  check_same_kind(a.out, q, "out");
  check_same_shape(a.out, q, "out");
  check_same_kind(a.dout, q, "dout");
  check_same_shape(a.dout, q, "dout");
  p.fwd.out = matrices(a.out, "out");
  p.fwd.lse = statistics(a.softmax_lse, "softmax_lse", q);
  p.dout = matrices(a.dout, "dout");
  if (a.dlse) p.dlse = statistics(*a.dlse, "dlse", q);
  return p;
}

Matrices gradient(const Tensor& t, const Tensor& of, const char* name) {
  check_same_kind(t, of, name);
  check_same_shape(t, of, name);
  return matrices(t, name);
}

void run(BwdProblem& p, const FwdArguments& a, const Tensor& dq, const Tensor& dk, const Tensor& dv,
         const Tensor& softmax_d) {
  p.dq = gradient(dq, a.q, "dq");
  p.dk = gradient(dk, a.k, "dk");
  p.dv = gradient(dv, a.v, "dv");
  p.softmax_d = statistics(softmax_d, "softmax_d", a.q);
  const auto& kernel = select(bwd_kernels(), p.fwd.dtype, p.fwd.head_dim, device(a.q.get_device_index()));

  const bool dense = p.fwd.sequences.cu_q == nullptr;
  const PaddedRows padded{kernel.config.block_m};
  const int64_t rows = dense ? padded.dense(p.fwd.seqlen_q) : padded.packed(p.fwd.total_q, p.fwd.batch);
  const int64_t all_rows = rows * p.fwd.heads * (dense ? p.fwd.batch : 1);
  const Tensor workspace = allocate(a.q, {all_rows * (kernel.config.head_dim + 2)}, ScalarType::Float);
  float* base = static_cast<float*>(workspace.data_ptr());
  const int64_t batch_stride = dense ? rows * p.fwd.heads : 0;
  p.lse_log2 = {base, batch_stride, rows};
  p.row_dot = {base + all_rows, batch_stride, rows};
  p.dq_accum = base + 2 * all_rows;

  const cudaError_t error = kernel.launch(p, current_stream(a.q));
  FC_CHECK(error == cudaSuccess, kernel.config.id(), ": ", cudaGetErrorString(error));
}

void functional(StableIValue* stack, bool varlen) {
  Stack in(stack);
  const BwdArguments a = take_bwd(in, varlen);
  BwdProblem p = make_problem(a);
  const torch::stable::accelerator::DeviceGuard guard(a.fwd.q.get_device_index());
  const Tensor dq = allocate_like(a.fwd.q), dk = allocate_like(a.fwd.k), dv = allocate_like(a.fwd.v);
  const Tensor softmax_d = allocate_statistics(a.fwd.q);
  run(p, a.fwd, dq, dk, dv, softmax_d);
  in.put(dq, dk, dv, /*dsink=*/Tensor(), softmax_d);
}

void into(StableIValue* stack, bool varlen) {
  Stack in(stack);
  const BwdArguments a = take_bwd(in, varlen);
  const Tensor dq = in.take<Tensor>(), dk = in.take<Tensor>(), dv = in.take<Tensor>();
  in.take<std::optional<Tensor>>();  // dsink: only with a sink, which is refused
  BwdProblem p = make_problem(a);
  const torch::stable::accelerator::DeviceGuard guard(a.fwd.q.get_device_index());
  run(p, a.fwd, dq, dk, dv, allocate_statistics(a.fwd.q));
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
