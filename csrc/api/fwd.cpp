// torch.ops.flash_cute.fwd and varlen_fwd: check, allocate, describe the problem, choose its route, launch.
#include <torch/csrc/stable/accelerator.h>

#include "api/api.h"
#include "api/fwd.h"
#include "api/describe.h"
#include "api/describe_kvcache.h"
#include "api/run.h"
#include "api/tensors.h"

namespace flash_cute {
namespace {

// The tensors for results; optional ones may be missing.
struct FwdResults {
  View out, softmax_lse;
  std::optional<View> row_max, softmax;
};

// Adds the results to the problem.
void attend(FwdProblem p, const FwdArguments& a, const FwdResults& results) {
  check_like_out(results.out, a.q, a.v, "out");
  p.out = tensor_view(results.out, "out");
  p.lse = row_stats(results.softmax_lse, "softmax_lse", a.q);
  if (results.row_max) p.row_max = row_stats(*results.row_max, "row_max", a.q);
  if (results.softmax) {
    const int64_t expected[] = {p.batch, p.heads, p.seqlen_q, p.seqlen_k};
    check_same_kind(*results.softmax, a.q, "softmax");
    check_shape(*results.softmax, expected, 4, "softmax");
    FC_CHECK(is_contiguous(*results.softmax), "softmax must be contiguous");
    p.softmax = results.softmax->ptr;
  }
  describe_lists(p, a, p.seqlen_q);
  if (p.pages.ids != nullptr) check_cached_queries(p);
  const Route route = choose_route(built_kernels(), p, device(a.q.device));
  if (p.pages.ids != nullptr) {
    attend_pages(route, p, a.q, a.k, a.v);
  } else {
    run_forward(route, p, a.q);
  }
}

void functional(StableIValue* stack, bool varlen) {
  Stack in(stack);
  const FwdArguments a = take_fwd(in, varlen);
  const FwdProblem p = make_problem(a);
  const torch::stable::accelerator::DeviceGuard guard(a.q.device);
  const Tensor out = allocate_out(a.q, a.v), softmax_lse = allocate_row_stats(a.q);
  std::optional<Tensor> row_max, softmax;
  if (a.return_row_max) row_max = allocate_row_stats(a.q);
  if (a.return_softmax) softmax = allocate(a.q, {p.batch, p.heads, p.seqlen_q, p.seqlen_k}, a.q.dtype);
  attend(p, a, {View(out), View(softmax_lse), view_of(row_max), view_of(softmax)});
  in.put(out, softmax_lse, row_max, softmax);
}

void into(StableIValue* stack, bool varlen) {
  Stack in(stack);
  const FwdArguments a = take_fwd(in, varlen);
  const View out = in.view();
  const std::optional<View> softmax_lse = in.optional_view(), row_max = in.optional_view(),
                            softmax = in.optional_view();
  check_outputs(
      {named(out, "out"), named(softmax_lse, "softmax_lse"), named(row_max, "row_max"), named(softmax, "softmax")},
      {named(a.q, "q"), named(a.k, "k"), named(a.v, "v")});
  FC_CHECK(!a.return_row_max || row_max, "return_row_max: the out overload needs row_max, a buffer for it");
  FC_CHECK(!a.return_softmax || softmax, "return_softmax: the out overload needs softmax, a buffer for it");
  const FwdProblem p = make_problem(a);
  const torch::stable::accelerator::DeviceGuard guard(a.q.device);
  attend(p, a, {out, softmax_lse ? *softmax_lse : View(allocate_row_stats(a.q)), row_max, softmax});
}

}  // namespace

void run_forward(const Route& route, FwdProblem p, const View& q) {
  if (route.row_max) {
    FwdProblem first = p;  // whose out and lse the next step overwrites
    first.softmax = nullptr;
    run(route.row_max, first, q);
    p.row_max = {};
  }
  run(route.forward, p, q);
}

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
