// torch.ops.flash_cute.bwd and varlen_bwd: check, allocate, describe the problem, choose its route, launch.
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <array>

#include "api/api.h"
#include "api/describe.h"
#include "api/run.h"
#include "api/tensors.h"
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
  describe_lists(p.fwd, a.fwd, p.fwd.seqlen_k);
  FC_CHECK(
      !p.fwd.lists.on() || p.fwd.lists.head == 0 || p.fwd.lists.heads_per_list % (p.fwd.heads / p.fwd.heads_k) == 0,
      "tile_lists has ", p.fwd.heads, " heads; backward on CUDA needs one list for all query heads of a kv head: 1 or ",
      p.fwd.heads_k, " heads");
  check_like_out(a.out, q, a.fwd.v, "out");
  check_like_out(a.dout, q, a.fwd.v, "dout");
  p.fwd.out = tensor_view(a.out, "out");
  p.fwd.lse = row_stats(a.softmax_lse, "softmax_lse", q);
  p.dout = tensor_view(a.dout, "dout");
  if (a.dlse) p.dlse = row_stats(*a.dlse, "dlse", q);
  p.deterministic = a.deterministic;
  // Lists are trimmed to the announced lengths, which therefore stay.
  if (!p.fwd.dense() && !p.fwd.lists.on()) clamp_lengths(p.fwd);
  return p;
}

TensorView gradient(const View& t, const View& of, bool is_fp32, const char* name) {
  check_device(t, of, name);
  FC_CHECK(t.dtype == (is_fp32 ? ScalarType::Float : of.dtype), name, " must have ",
           is_fp32 ? "dtype float32" : "the dtype of its input");
  check_shape(t, of.sizes, of.dims, name);
  return tensor_view(t, name);
}

float* sink_gradient(const View& t, const View& q, int heads) {
  check_device(t, q, "dsink");
  FC_CHECK(t.dtype == ScalarType::Float && t.dims == 1 && t.size(0) == heads && is_contiguous(t),
           "dsink must be a contiguous fp32 (", heads, ",)");
  return static_cast<float*>(t.ptr);
}

// Adds the results to the problem.
void differentiate(BwdProblem p, const FwdArguments& a, const View& dq, const View& dk, const View& dv,
                   const View& softmax_d) {
  p.fp32_gradients = dq.dtype == ScalarType::Float && a.q.dtype != ScalarType::Float;
  p.dq = gradient(dq, a.q, p.fp32_gradients, "dq");
  p.dk = gradient(dk, a.k, p.fp32_gradients, "dk");
  p.dv = gradient(dv, a.v, p.fp32_gradients, "dv");
  p.softmax_d = row_stats(softmax_d, "softmax_d", a.q);
  run(choose_route(built_kernels(), p, device(a.q.device)), p, a.q);
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
  differentiate(p, a.fwd, View(dq), View(dk), View(dv), View(softmax_d));
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
  FC_CHECK(dsink.has_value() == (p.fwd.sink.ptr != nullptr), "dsink ",
           dsink ? "is given, but sink is None" : "is None, but sink is given", "; give both, or neither");
  if (dsink) p.dsink = sink_gradient(*dsink, a.fwd.q, p.fwd.heads);
  const torch::stable::accelerator::DeviceGuard guard(a.fwd.q.device);
  auto is_fp32 = [](const std::optional<View>* given) { return *given && (*given)->dtype == ScalarType::Float; };
  const std::array gradients{&dq, &dk, &dv};
  FC_CHECK(a.fwd.q.dtype == ScalarType::Float || std::ranges::none_of(gradients, is_fp32) ||
               std::ranges::all_of(gradients, is_fp32),
           "dtypes of dq, dk and dv differ; expected all three float32, or those that are given the dtype of q");
  auto or_scratch = [](const std::optional<View>& given, const View& like) {
    return given ? *given : View(allocate_like(like));
  };
  differentiate(p, a.fwd, or_scratch(dq, a.fwd.q), or_scratch(dk, a.fwd.k), or_scratch(dv, a.fwd.v),
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
