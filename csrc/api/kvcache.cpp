// torch.ops.flash_cute.fwd_kvcache and attend_kvcache: check, allocate, describe the problem, select a kernel, launch.
#include <torch/csrc/stable/accelerator.h>

#include "api/api.h"
#include "api/kvcache_problem.h"
#include "api/problem.h"
#include "api/tensors.h"
#include "core/decode_plan.h"
#include "core/heuristics.h"
#include "core/registry.h"
#include "kernels/passes/append.h"

namespace flash_cute {
namespace {

// Results of parts, where there can be any that are not the whole.
Tensor allocate_decoded_parts(DecodeProblem& p, const KernelConfig& config, const View& q) {
  if (p.slots == 0) return Tensor();
  const bool even = p.even_shares();
  const int64_t rows = int64_t(p.slots) * config.block_m, out = rows * config.head_dim_v;
  const Tensor workspace = allocate(q, {out + rows + (even ? 0 : p.slots)}, ScalarType::Float);
  p.part_out = static_cast<float*>(workspace.data_ptr());
  p.part_lse = p.part_out + out;
  if (!even) p.arrived = reinterpret_cast<unsigned*>(p.part_lse + rows);
  return workspace;
}

// A kernel of forward for prompts in chunks; null if none can, or decoding takes no longer. Where the caller says how
// keys are parted, it is always decoding: results must not depend on the batch.
const Kernel<Op::Fwd>* cheaper_forward(const DecodeProblem& p, const KernelConfig& decode, const Device& gpu) {
  if (p.cache.leftpad != nullptr || !p.even_shares()) return nullptr;
  const Kernel<Op::Fwd>* kernel = find(fwd_kernels(), p.fwd, gpu);
  const bool cheaper =
      kernel != nullptr && kernel->config.arch == Arch::Sm90 && forward_is_cheaper(kernel->config, decode, p, gpu);
  return cheaper ? kernel : nullptr;
}

void check_launch(const KernelConfig& config, cudaError_t error) {
  FC_CHECK(error == cudaSuccess, config.id(), ": ", cudaGetErrorString(error));
}

void run_forward(DecodeProblem& p, const Kernel<Op::Fwd>& kernel, const View& q, int sms) {
  const cudaStream_t stream = current_stream(q);
  const Tensor parts = allocate_parts(p.fwd, kernel.config, q, sms);
  p.fwd.sequences.used_k = p.cache.lengths;
  Tensor lengths;
  if (p.added.total > 0) {
    lengths = allocate(q, {p.fwd.batch}, ScalarType::Int);
    p.fwd.sequences.used_k = p.added.lengths = static_cast<int*>(lengths.data_ptr());
  }
  if (p.appends()) check_launch(kernel.config, append_keys(p, stream));
  check_launch(kernel.config, kernel.launch(p.fwd, stream));
}

void run(StableIValue* stack, bool joins) {
  Stack in(stack);
  const KvcacheArguments a = take_kvcache(in, joins);
  DecodeProblem p = make_problem(a);
  const torch::stable::accelerator::DeviceGuard guard(a.q.device);
  const Tensor out = allocate_out(a.q, a.v_cache), softmax_lse = allocate_statistics(a.q);
  p.fwd.out = matrices(View(out), "out");
  p.fwd.lse = statistics(View(softmax_lse), "softmax_lse", a.q);
  const Device& gpu = device(a.q.device);
  const auto& kernel = select(decode_kernels(), p, gpu);
  Tensor rotated;
  if (p.rotary.cos != nullptr) {
    rotated = allocate_out(a.q, a.q);
    p.fwd.q = matrices(View(rotated), "q");
  }
  if (const auto* forward = cheaper_forward(p, kernel.config, gpu)) {
    run_forward(p, *forward, a.q, gpu.sms);
  } else {
    plan_decode(p, kernel.config, gpu);
    const Tensor workspace = allocate_decoded_parts(p, kernel.config, a.q);
    check_launch(kernel.config, kernel.launch(p, current_stream(a.q)));
  }
  in.put(out, softmax_lse);
}

}  // namespace

void fwd_kvcache(StableIValue* stack, uint64_t, uint64_t) {
  run(stack, true);
}
void attend_kvcache(StableIValue* stack, uint64_t, uint64_t) {
  run(stack, false);
}

}  // namespace flash_cute
