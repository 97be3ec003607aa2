// torch.ops.flash_cute.fwd and varlen_fwd: check, allocate, describe the problem, select a kernel, launch.
#include <torch/csrc/stable/accelerator.h>

#include "api/api.h"
#include "api/fwd.h"
#include "api/describe.h"
#include "api/run.h"
#include "api/tensors.h"
#include "core/registry.h"

namespace flash_cute {
namespace {

// Where results go; what is missing was not asked for.
struct FwdResults {
  View out, softmax_lse;
  std::optional<View> row_max, softmax;
};

void select_and_run(const FwdProblem& p, const View& q, bool over_cache) {
  const Device& gpu = device(q.device);
  if (over_cache) {
    const auto& kernel = select_over_cache(p, gpu);
    run(kernel, p, plan_over_cache(kernel.config, p, gpu), q);
  } else {
    run(select(fwd_kernels(), p, gpu), p, q);
  }
}

// Row maxima under a softcap cost a launch of their own: a kernel that has to know them rounds differently, and out and
// lse must not depend on what else is returned.
void run_for_row_max(FwdProblem p, const View& q, const View& v, bool over_cache) {
  const Tensor out = allocate_out(q, v), softmax_lse = allocate_row_stats(q);
  p.out = tensor_view(View(out), "out");
  p.lse = row_stats(View(softmax_lse), "softmax_lse", q);
  p.softmax = nullptr;
  select_and_run(p, q, over_cache);
}

// With its results the problem is whole.
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
  if (p.pages.ids != nullptr) {
    attend_pages(p, a.q, a.k, a.v);
  } else {
    run_forward(p, a.q, a.v);
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

void run_forward(FwdProblem p, const View& q, const View& v, bool over_cache) {
  if (p.row_max.ptr != nullptr && p.rules.element.softcap > 0.f) {
    run_for_row_max(p, q, v, over_cache);
    p.row_max = {};
  }
  select_and_run(p, q, over_cache);
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
