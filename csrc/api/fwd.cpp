// torch.ops.flash_cute.fwd and varlen_fwd: check, allocate, describe the problem, select a kernel, launch.
#include <torch/csrc/stable/accelerator.h>

#include "api/api.h"
#include "api/problem.h"
#include "api/tensors.h"
#include "core/registry.h"

namespace flash_cute {
namespace {

// Undefined tensors, None in Python, stand for what was not asked for.
struct FwdResults {
  Tensor out, softmax_lse, row_max, softmax;
};

Tensor allocate_statistics(const Tensor& q) {
  return q.dim() == 4 ? allocate(q, {q.size(0), q.size(2), q.size(1)}, ScalarType::Float)
                      : allocate(q, {q.size(1), q.size(0)}, ScalarType::Float);
}

FwdResults allocate_results(const FwdArguments& a) {
  const Tensor& q = a.q;
  return {
      .out = q.dim() == 4 ? allocate(q, {q.size(0), q.size(1), q.size(2), q.size(3)}, q.scalar_type())
                          : allocate(q, {q.size(0), q.size(1), q.size(2)}, q.scalar_type()),
      .softmax_lse = allocate_statistics(q),
      .row_max = a.return_row_max ? allocate_statistics(q) : Tensor(),
      .softmax = Tensor(),
  };
}

void run(FwdProblem& p, const Tensor& q, const Tensor& out, const Tensor& softmax_lse) {
  check_same_kind(out, q, "out");
  check_same_shape(out, q, "out");
  p.out = matrices(out, "out");
  p.lse = statistics(softmax_lse, "softmax_lse", q);
  const auto& kernel = select(fwd_kernels(), p.dtype, p.head_dim, device(q.get_device_index()));
  const cudaError_t error = kernel.launch(p, current_stream(q));
  FC_CHECK(error == cudaSuccess, kernel.config.id(), ": ", cudaGetErrorString(error));
}

void functional(StableIValue* stack, bool varlen) {
  Stack in(stack);
  const FwdArguments a = take_fwd(in, varlen);
  FwdProblem p = make_problem(a);
  const torch::stable::accelerator::DeviceGuard guard(a.q.get_device_index());
  const FwdResults r = allocate_results(a);
  if (a.return_row_max) p.row_max = statistics(r.row_max, "row_max", a.q);
  run(p, a.q, r.out, r.softmax_lse);
  in.put(r.out, r.softmax_lse, r.row_max, r.softmax);
}

void into(StableIValue* stack, bool varlen) {
  Stack in(stack);
  const FwdArguments a = take_fwd(in, varlen);
  const Tensor out = in.take<Tensor>(), softmax_lse = in.take<Tensor>();
  FC_CHECK(!a.return_row_max, "return_row_max: the out overload has nowhere to put it");
  FwdProblem p = make_problem(a);
  const torch::stable::accelerator::DeviceGuard guard(a.q.get_device_index());
  run(p, a.q, out, softmax_lse);
}

}  // namespace

void fwd(StableIValue* stack, uint64_t, uint64_t) {
  functional(stack, false);
}
void fwd_out(StableIValue* stack, uint64_t, uint64_t) {
  into(stack, false);
}
void varlen_fwd(StableIValue* stack, uint64_t, uint64_t) {
  functional(stack, true);
}
void varlen_fwd_out(StableIValue* stack, uint64_t, uint64_t) {
  into(stack, true);
}

std::string kernels() {
  std::string ids;
  for (const auto& kernel : fwd_kernels()) ids += kernel.config.id() + "\n";
  for (const auto& kernel : bwd_kernels()) ids += kernel.config.id() + "\n";
  return ids;
}

}  // namespace flash_cute
