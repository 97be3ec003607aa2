// torch.ops.flash_cute.fwd and varlen_fwd: check, allocate, describe the problem, select a kernel, launch.
#include <torch/csrc/stable/accelerator.h>

#include "api/api.h"
#include "api/problem.h"
#include "api/tensors.h"
#include "core/registry.h"

namespace flash_cute {
namespace {

void run(FwdProblem& p, const FwdArguments& a, const View& out, const View& softmax_lse) {
  check_like_out(out, a.q, a.v, "out");
  p.out = matrices(out, "out");
  p.lse = statistics(softmax_lse, "softmax_lse", a.q);
  const Device& gpu = device(a.q.device);
  const auto& kernel = select(fwd_kernels(), p, gpu);
  const Tensor parts = allocate_parts(p, kernel.config, a.q, gpu.sms);
  const cudaError_t error = kernel.launch(p, current_stream(a.q));
  FC_CHECK(error == cudaSuccess, kernel.config.id(), ": ", cudaGetErrorString(error));
}

// Undefined tensors, None in Python, stand for what was not asked for.
void functional(StableIValue* stack, bool varlen) {
  Stack in(stack);
  const FwdArguments a = take_fwd(in, varlen);
  FwdProblem p = make_problem(a);
  const torch::stable::accelerator::DeviceGuard guard(a.q.device);
  const Tensor out = allocate_out(a.q, a.v), softmax_lse = allocate_statistics(a.q);
  Tensor row_max, softmax;
  if (a.return_row_max) {
    row_max = allocate_statistics(a.q);
    p.row_max = statistics(View(row_max), "row_max", a.q);
  }
  if (a.return_softmax) {
    softmax = allocate(a.q, {p.batch, p.heads, p.seqlen_q, p.seqlen_k}, a.q.dtype);
    p.softmax = softmax.data_ptr();
  }
  run(p, a, View(out), View(softmax_lse));
  in.put(out, softmax_lse, row_max, softmax);
}

void into(StableIValue* stack, bool varlen) {
  Stack in(stack);
  const FwdArguments a = take_fwd(in, varlen);
  const View out = in.view(), softmax_lse = in.view();
  check_outputs({{&out, "out"}, {&softmax_lse, "softmax_lse"}}, {{&a.q, "q"}, {&a.k, "k"}, {&a.v, "v"}});
  FC_CHECK(!a.return_row_max, "return_row_max: the out overload has nowhere to put it");
  FC_CHECK(!a.return_softmax, "return_softmax: the out overload has nowhere to put it");
  FwdProblem p = make_problem(a);
  const torch::stable::accelerator::DeviceGuard guard(a.q.device);
  run(p, a, out, softmax_lse);
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

}  // namespace flash_cute
