#include "core/heuristics.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/built.h"
#include "core/family.h"
#include "core/plan.h"
#include "core/rows.h"
#include "draw.h"

using namespace flash_cute;

namespace {

std::vector<KernelConfig> configs(Op op) {
  std::vector<KernelConfig> found;
  for (const Row& row : rows_of_configs()) {
    if (row.config.op == op) found.push_back(row.config);
  }
  return found;
}

KernelConfig any_of(Draw& draw, Op op) {
  const std::vector<KernelConfig> found = configs(op);
  return found[draw.from(0, static_cast<int>(found.size()) - 1)];
}

FwdProblem draw_problem(Draw& draw, const KernelConfig& config) {
  FwdProblem p{};
  p.dtype = config.dtype;
  p.head_dim = config.head_dim;
  p.head_dim_v = config.head_dim_v;
  p.batch = draw.from(1, 32);
  p.heads_k = draw.of({1, 2, 8});
  p.heads = p.heads_k * draw.of({1, 3, 4, 8});
  p.seqlen_q = draw.of({1, 17, 128, 4096}) + draw.from(0, 64);
  p.seqlen_k = draw.of({1, 500, 8192}) + draw.from(0, 64);
  p.softmax_scale = 1;
  return p;
}

Device h100() {
  return {.capability = 90,
          .smem_optin = 232448,
          .sms = 132,
          .memory_gb_s = 3350,
          .l2_bytes = 50 << 20,
          .clusters = {0, 132, 66, 42, 33, 24, 20, 16, 16}};  // by number of CTAs
}

}  // namespace

TEST_CASE("being alternatives is an equivalence of forward's and decode's rows") {
  const auto& rows = rows_of_configs();
  for (const Row& a : rows) {
    CHECK(alternatives(a.config, a.config) == (a.config.op != Op::Bwd));
    for (const Row& b : rows) {
      const bool both = alternatives(a.config, b.config);
      if (both != alternatives(b.config, a.config)) FAIL(a.config.id() << ' ' << b.config.id());
      if (!both) continue;
      for (const Row& c : rows) {
        if (alternatives(b.config, c.config) && !alternatives(a.config, c.config)) FAIL(c.config.id());
      }
    }
  }
}

TEST_CASE("longer keys and more sequences do not cost less") {
  constexpr double kWorthwhile = 0.95;  // of the time: splits that save less are not taken
  Draw draw;
  const Device gpu = h100();
  for (int n = 0; n < 3000; ++n) {
    const KernelConfig config = any_of(draw, Op::Fwd);
    const FwdProblem p = draw_problem(draw, config);
    FwdProblem longer = p, more = p;
    longer.seqlen_k += draw.of({1, 64, 5000});
    more.batch += draw.from(1, 50);
    CAPTURE(config.id());
    CAPTURE(p);
    CAPTURE(longer.seqlen_k);
    CAPTURE(more.batch);
    const double least = kWorthwhile * cost(config, p, gpu);
    CHECK(least > 0);
    CHECK(std::isfinite(least));
    CHECK(cost(config, longer, gpu) >= least);
    CHECK(cost(config, more, gpu) >= least);
  }
}

TEST_CASE("a mask does not cost more") {
  Draw draw;
  for (int n = 0; n < 3000; ++n) {
    const KernelConfig config = any_of(draw, Op::Fwd);
    if (config.cluster > 1) continue;  // CTAs of a cluster wait for each other under a mask
    FwdProblem p = draw_problem(draw, config);
    CAPTURE(config.id());
    CAPTURE(p);
    const double whole = cheapest_splits(config, p, pack_gqa(config, p), kH100).us;
    p.band.right = 0;
    CHECK(0.95 * cheapest_splits(config, p, pack_gqa(config, p), kH100).us <= whole);
  }
}

TEST_CASE("forward's splits have keys, and are Hopper's alone") {
  Draw draw;
  int split = 0;
  for (int n = 0; n < 3000; ++n) {
    const KernelConfig config = any_of(draw, Op::Fwd);
    const FwdProblem p = draw_problem(draw, config);
    const int splits = cheapest_splits(config, p, pack_gqa(config, p), kH100).num_splits;
    CAPTURE(config.id());
    CAPTURE(p);
    CHECK(splits >= 1);
    CHECK((splits == 1 || config.arch == Arch::Sm90));
    CHECK((splits == 1 || (splits - 1) * config.block_n < p.seqlen_k));
    split += splits > 1;
  }
  CHECK(split > 100);
}

TEST_CASE("packed sequences are not for clusters") {
  const int somewhere = 0;
  Draw draw;
  for (const KernelConfig& config : configs(Op::Fwd)) {
    FwdProblem p = draw_problem(draw, config);
    p.varlen.cu_q = p.varlen.cu_k = &somewhere;
    p.total_q = int64_t(p.batch) * p.seqlen_q;
    p.total_k = int64_t(p.batch) * p.seqlen_k;
    CHECK(std::isinf(cheapest_splits(config, p, pack_gqa(config, p), kH100).us) == (config.cluster > 1));
  }
}

TEST_CASE("heads share a tile of queries if they fit and the group is theirs") {
  Draw draw;
  int shared = 0;
  for (int n = 0; n < 3000; ++n) {
    const KernelConfig config = any_of(draw, Op::Fwd);
    FwdProblem p = draw_problem(draw, config);
    const int heads = pack_gqa(config, p);
    CAPTURE(config.id());
    CAPTURE(p);
    CHECK(heads >= 1);
    CHECK(p.heads / p.heads_k % heads == 0);
    if (config.packs_tokens()) {
      CHECK(heads == p.heads / p.heads_k);
    } else {
      CHECK(heads <= family_of(config).max_pack_gqa(config));
      CHECK((heads == 1 || heads * p.seqlen_q <= config.block_m));
    }
    shared += heads > 1;
    const int64_t state[2] = {};
    p.rules.rng = state;
    CHECK(pack_gqa(config, p) == 1);
  }
  CHECK(shared > 100);
}

TEST_CASE("a plan has what is given if the kernel can do it, else the estimate") {
  Draw draw;
  const Device gpu = h100();
  int split = 0, packed = 0, passed_over = 0;
  for (int n = 0; n < 3000; ++n) {
    const KernelConfig config = any_of(draw, Op::Fwd);
    const FwdProblem p = draw_problem(draw, config);
    const FwdPlan free = make_plan(config, p, gpu);
    const FwdOverrides overrides{draw.from(0, 70), draw.of({0, 1, 2, 3, 4, 8})};
    const FwdPlan plan = make_plan(config, p, gpu, overrides);
    CAPTURE(config.id());
    CAPTURE(p);
    CAPTURE(overrides.num_splits);
    CAPTURE(overrides.pack_gqa);
    CHECK(plan.pack_gqa == (may_pack(config, p, overrides.pack_gqa) ? overrides.pack_gqa : free.pack_gqa));
    CHECK(free.pack_gqa % plan.pack_gqa == 0);
    const int most = most_splits(config, p, plan.pack_gqa, gpu.sms);
    CHECK(cheapest_splits(config, p, plan.pack_gqa, gpu).num_splits <= most);
    const bool can = overrides.num_splits >= 1 && overrides.num_splits <= most;
    CHECK(plan.num_splits == (can ? overrides.num_splits : cheapest_splits(config, p, plan.pack_gqa, gpu).num_splits));
    CHECK((most == 1 || config.arch == Arch::Sm90));
    CHECK((most - 1) * config.block_n < std::max(1, p.seqlen_k));
    split += can && overrides.num_splits > 1;
    packed += plan.pack_gqa < free.pack_gqa;
    passed_over += !can && overrides.num_splits > 0;
  }
  CHECK(split > 10);
  CHECK(packed > 10);
  CHECK(passed_over > 10);
}

TEST_CASE("the first row that fits, or the cheapest of its alternatives, is preferred") {
  Draw draw;
  const Device gpu = h100();
  const auto& kernels = all_kernels().fwd;
  for (int n = 0; n < 300; ++n) {
    const KernelConfig near = any_of(draw, Op::Fwd);
    const FwdProblem p = draw_problem(draw, near);
    auto fits = [&](const KernelConfig& kernel) {
      return kernel.dtype == near.dtype && kernel.head_dim >= near.head_dim && kernel.head_dim_v >= near.head_dim_v;
    };
    const KernelConfig* const best = preferred(kernels, fits, p, gpu);
    REQUIRE(best != nullptr);
    const KernelConfig* first = nullptr;
    for (const KernelConfig* kernel : kernels) {
      if (!fits(*kernel)) continue;
      if (first == nullptr) first = kernel;
      if (alternatives(*first, *kernel)) CHECK(cost(*best, p, gpu) <= cost(*kernel, p, gpu));
    }
    CHECK(alternatives(*first, *best));
  }
  CHECK(preferred(kernels, [](const KernelConfig&) { return false; }, FwdProblem{}, gpu) == nullptr);
}

TEST_CASE("backward's splits divide heads, and leave whole waves") {
  Draw draw;
  int split = 0, last_wave = 0;
  for (int n = 0; n < 3000; ++n) {
    const KernelConfig config = any_of(draw, Op::Bwd);
    BwdProblem backward{};
    FwdProblem& p = backward.fwd = draw_problem(draw, config);
    if (draw.flag()) p.band.right = 0;
    const QuerySplits splits = make_plan(config, backward, h100()).splits;
    const int rows = config.block_n * config.cluster, resident = 132 / config.cluster;
    const int tiles = (p.seqlen_k + rows - 1) / rows * p.heads_k * p.batch;
    CAPTURE(config.id());
    CAPTURE(p);
    CHECK((splits.count() == 1 || config.arch == Arch::Sm90));
    CHECK(splits.count() <= 16);
    CHECK(p.heads / p.heads_k % splits.heads == 0);
    CHECK(splits.whole_tiles % resident == 0);
    CHECK((splits.whole_tiles == 0 || splits.whole_tiles < tiles));
    split += splits.count() > 1;
    last_wave += splits.whole_tiles > 0;
  }
  CHECK(split > 100);
  CHECK(last_wave > 10);
}

TEST_CASE("forward is not taken for the queries of one small tile of decode") {
  Draw draw;
  for (int n = 0; n < 1000; ++n) {
    const KernelConfig forward = any_of(draw, Op::Fwd), decode = any_of(draw, Op::Decode);
    DecodeProblem p{};
    p.fwd = draw_problem(draw, decode);
    p.fwd.heads = p.fwd.heads_k * draw.from(1, 16);
    p.fwd.seqlen_q = 1;
    CHECK_FALSE(forward_is_cheaper(forward, decode, p, h100()));
  }
}
