// torch.ops.flash_cute.fwd_kvcache, attend_kvcache and attend_quantized_kvcache, and varlen_fwd over pages: check,
// allocate, describe the problem, choose its route, launch.
#include <torch/csrc/stable/accelerator.h>

#include "api/api.h"
#include "api/fwd.h"
#include "api/describe_kvcache.h"
#include "api/describe.h"
#include "api/run.h"
#include "api/tensors.h"
#include "kernels/passes/append.h"
#include "kernels/passes/pages.h"

namespace flash_cute {
namespace {

// Runs a route's kernels of forward on keys that were gathered from the cache.
void run_gathered(const Route& route, const DecodeProblem& p, const View& q, const View& k, const View& v) {
  const FwdProblem& f = p.fwd;
  const int rows = route.gathered_rows;
  const Tensor gathered_k = allocate(k, {f.batch, rows, f.heads_k, f.head_dim}, k.dtype);
  const Tensor gathered_v = allocate(v, {f.batch, rows, f.heads_k, f.head_dim_v}, v.dtype);
  const Tensor lengths = allocate(q, {f.batch}, ScalarType::Int);
  const GatheredKeys to{tensor_view(View(gathered_k), "k"), tensor_view(View(gathered_v), "v"), rows,
                        static_cast<int*>(lengths.data_ptr())};
  check_cuda("gather_pages", gather_pages(p, to, current_stream(q)));
  run_forward(route, over_gathered(f, rows, to.k, to.v, to.lengths), q);
}

// Runs a route's kernel that reads the cache in place. Decode kernels append keys themselves.
void run_cached(const Route& route, DecodeProblem p, const View& q) {
  if (route.decode) return run(route.decode, p, q);
  Tensor lengths;
  if (p.added.total > 0) {
    lengths = allocate(q, {p.fwd.batch}, ScalarType::Int);
    p.added.lengths = static_cast<int*>(lengths.data_ptr());
  }
  if (route.append) check_cuda("append_keys", append_keys(p, current_stream(q)));
  run(route.in_pages, in_pages(p), q);
}

void attend_cache(StableIValue* stack, CacheOp op) {
  Stack in(stack);
  const KvcacheArguments a = take_kvcache(in, op);
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
  FC_CHECK(!p.whole_vectors() || p.has_vectors(),
           "heads of q, k_cache and v_cache must start on 16-byte boundaries; call contiguous() or clone()");
  const Route route = choose_route(built_kernels(), p, device(a.q.device));
  if (route.gather) {
    if (route.append) check_cuda("append_keys", append_keys(p, current_stream(a.q)));
    run_gathered(route, p, a.q, a.k_cache, a.v_cache);
  } else {
    run_cached(route, p, a.q);
  }
  in.put(out, softmax_lse);
}

}  // namespace

void attend_pages(const Route& route, const FwdProblem& a, const View& q, const View& k, const View& v) {
  const Tensor lengths = allocate(q, {a.batch}, ScalarType::Int);
  int* const counts = static_cast<int*>(lengths.data_ptr());
  check_cuda("count_paged_keys",
             count_paged_keys(a.varlen.cu_k, a.varlen.used_k, a.batch, a.seqlen_k, counts, current_stream(q)));
  DecodeProblem p = over_pages(a, counts);
  if (route.over_cache()) run_cached(route, p, q);
  if (!route.gather) return;
  Tensor out, softmax_lse;  // discarded results of steps for row maxima or probabilities
  if (route.repeats()) {
    out = allocate_out(q, v);
    softmax_lse = allocate_row_stats(q);
    p.fwd.out = tensor_view(View(out), "out");
    p.fwd.lse = row_stats(View(softmax_lse), "softmax_lse", q);
  }
  p.fwd.row_max = a.row_max;
  p.fwd.softmax = a.softmax;
  run_gathered(route, p, q, k, v);
}

void fwd_kvcache(StableIValue* stack, uint64_t, uint64_t) {
  attend_cache(stack, CacheOp::Append);
}
void attend_kvcache(StableIValue* stack, uint64_t, uint64_t) {
  attend_cache(stack, CacheOp::Attend);
}
void attend_quantized_kvcache(StableIValue* stack, uint64_t, uint64_t) {
  attend_cache(stack, CacheOp::AttendQuantized);
}

}  // namespace flash_cute
