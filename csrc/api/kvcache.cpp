// torch.ops.flash_cute.fwd_kvcache and attend_kvcache, and varlen_fwd over pages: check, allocate, describe the problem,
// select a kernel, launch.
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>

#include "api/api.h"
#include "api/fwd.h"
#include "api/describe_kvcache.h"
#include "api/describe.h"
#include "api/run.h"
#include "api/tensors.h"
#include "core/heuristics.h"
#include "core/calibration.h"
#include "core/registry.h"
#include "kernels/passes/append.h"
#include "kernels/passes/pages.h"

namespace flash_cute {
namespace {

// A kernel of forward for prompts in chunks; null if none can, or decoding takes no longer. Where the caller says how
// keys are parted, it is always decoding: results must not depend on the batch.
const Kernel<Op::Fwd>* cheaper_forward(const DecodeProblem& p, const KernelConfig& decode, const Device& gpu) {
  if (p.cache.leftpad != nullptr || !p.even_splits()) return nullptr;
  const Kernel<Op::Fwd>* kernel = find_over_cache(p.fwd, gpu);
  const KernelConfig* const measured = calibrated<Op::Decode>(p, gpu);
  if (measured != nullptr && same_kernel(*measured, decode)) return nullptr;
  const bool cheaper = kernel != nullptr && forward_is_cheaper(kernel->config, decode, p, gpu);
  return cheaper ? kernel : nullptr;
}

// Runs a kernel that reads no pages on keys that are laid out anew, `rows` for each sequence.
void run_gathered(const DecodeProblem& p, int rows, const View& q, const View& k, const View& v) {
  FwdProblem f = p.fwd;
  const Tensor gathered_k = allocate(k, {f.batch, rows, f.heads_k, f.head_dim}, k.dtype);
  const Tensor gathered_v = allocate(v, {f.batch, rows, f.heads_k, f.head_dim_v}, v.dtype);
  const Tensor lengths = allocate(q, {f.batch}, ScalarType::Int);
  const GatheredKeys to{tensor_view(View(gathered_k), "k"), tensor_view(View(gathered_v), "v"), rows,
                        static_cast<int*>(lengths.data_ptr())};
  check_launch("gather_pages", gather_pages(p, to, current_stream(q)));
  f.k = to.k;
  f.v = to.v;
  f.pages = {};
  f.seqlen_k = rows;
  f.total_k = int64_t(f.batch) * rows;
  f.varlen.used_k = to.lengths;
  run_forward(f, q, v, true);
}

// Runs a kernel of forward on a cache.
void run_in_pages(DecodeProblem p, const Kernel<Op::Fwd>& kernel, const View& q) {
  p.fwd.varlen.used_k = p.cache.lengths;
  Tensor lengths;
  if (p.added.total > 0) {
    lengths = allocate(q, {p.fwd.batch}, ScalarType::Int);
    p.fwd.varlen.used_k = p.added.lengths = static_cast<int*>(lengths.data_ptr());
  }
  if (p.appends()) check_launch("append_keys", append_keys(p, current_stream(q)));
  run(kernel, p.fwd, plan_over_cache(kernel.config, p.fwd, device(q.device)), q);
}

// Runs the kernel over a cache that takes least time.
void run_cached(const DecodeProblem& p, const View& q) {
  const Device& gpu = device(q.device);
  const auto& kernel = select(decode_kernels(), p, gpu);
  if (const auto* forward = cheaper_forward(p, kernel.config, gpu)) {
    run_in_pages(p, *forward, q);
  } else {
    run(kernel, p, q);
  }
}

void attend_cache(StableIValue* stack, bool joins) {
  Stack in(stack);
  const KvcacheArguments a = take_kvcache(in, joins);
  DecodeProblem p = make_problem(a);
  const torch::stable::accelerator::DeviceGuard guard(a.q.device);
  const Tensor out = allocate_out(a.q, a.v_cache), softmax_lse = allocate_row_stats(a.q);
  p.fwd.out = tensor_view(View(out), "out");
  p.fwd.lse = row_stats(View(softmax_lse), "softmax_lse", a.q);
  Tensor rotated;
  if (p.rotary.cos != nullptr) {
    rotated = allocate_out(a.q, a.q);
    p.fwd.q = tensor_view(View(rotated), "q");
  }
  if (!p.whole_vectors()) {
    if (p.appends()) check_launch("append_keys", append_keys(p, current_stream(a.q)));
    run_gathered(p, p.fwd.seqlen_k, a.q, a.k_cache, a.v_cache);
  } else {
    FC_CHECK(p.has_vectors(), "q and the caches must have vectors on 16-byte boundaries");
    run_cached(p, a.q);
  }
  in.put(out, softmax_lse);
}

}  // namespace

void attend_pages(const FwdProblem& a, const View& q, const View& k, const View& v) {
  check_cached_queries(a);
  const Tensor lengths = allocate(q, {a.batch}, ScalarType::Int);
  int* const counts = static_cast<int*>(lengths.data_ptr());
  check_launch("count_paged_keys",
               count_paged_keys(a.varlen.cu_k, a.varlen.used_k, a.batch, a.seqlen_k, counts, current_stream(q)));
  DecodeProblem p{};
  p.fwd = a;
  p.fwd.varlen.cu_k = p.fwd.varlen.used_k = nullptr;
  p.fwd.seqlen_k = static_cast<int>(a.pages.capacity());
  p.fwd.total_k = int64_t(a.batch) * p.fwd.seqlen_k;
  p.cache.lengths = counts;
  p.unrotated_q = a.q;
  const bool is_16_bit = element_bytes(a.dtype) == 2;
  Tensor out, softmax_lse;  // of what only gives row maxima or probabilities
  if (is_16_bit && a.rules.rng == nullptr && a.varlen.used_q == nullptr && p.has_vectors()) {
    p.fwd.row_max = {};
    p.fwd.softmax = nullptr;
    run_cached(p, q);
    if (a.row_max.ptr == nullptr && a.softmax == nullptr) return;
    out = allocate_out(q, v);
    softmax_lse = allocate_row_stats(q);
    p.fwd.out = tensor_view(View(out), "out");
    p.fwd.lse = row_stats(View(softmax_lse), "softmax_lse", q);
    p.fwd.varlen.used_k = nullptr;
    p.fwd.row_max = a.row_max;
    p.fwd.softmax = a.softmax;
  }
  // Probabilities have a column for each key that there might be.
  run_gathered(p, a.softmax == nullptr ? std::min(a.seqlen_k, p.fwd.seqlen_k) : a.seqlen_k, q, k, v);
}

void fwd_kvcache(StableIValue* stack, uint64_t, uint64_t) {
  attend_cache(stack, true);
}
void attend_kvcache(StableIValue* stack, uint64_t, uint64_t) {
  attend_cache(stack, false);
}

}  // namespace flash_cute
