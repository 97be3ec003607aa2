#include "core/family.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <set>
#include <string>

#include "core/rows.h"
#include "draw.h"

using namespace flash_cute;

TEST_CASE("each row is of one family, whose code runs on its arch, and lists have it once") {
  std::set<std::string> ids;
  for (const Row& row : rows_of_configs()) {
    CAPTURE(row.config.id());
    const Family& family = family_of(row.config);
    CHECK(std::ranges::count_if(families(), [&](const Family* other) { return other->owns(row.config); }) == 1);
    CHECK(std::ranges::count(family.rows, row.config) == 1);
    CHECK(family.runs_on(static_cast<int>(row.config.arch)));
    CHECK_FALSE(family.runs_on(static_cast<int>(row.config.arch) - 1));
    CHECK(ids.insert(row.config.id()).second);
  }
  CHECK(ids.size() > 100);
}

TEST_CASE("a row has a warp's threads and more, and fits the GPU that it is for") {
  for (const Row& row : rows_of_configs()) {
    CAPTURE(row.config.id());
    const Family& family = family_of(row.config);
    CHECK(family.threads(row.config) >= row.config.threads());
    CHECK(family.threads(row.config) <= 1024);
    CHECK(family.smem_bytes(row.config) > 0);
    CHECK(family.smem_bytes(row.config) <= kH100.smem_optin);
    CHECK(family.max_pack_gqa(row.config) >= 1);
  }
}

TEST_CASE("clusters are Hopper's") {
  CHECK(takes_clusters(90));
  for (const int capability : {80, 86, 89, 100, 120}) CHECK_FALSE(takes_clusters(capability));
}

TEST_CASE("a config of no family is an error") {
  KernelConfig config = rows_of_configs().front().config;
  config.arch = static_cast<Arch>(75);
  CHECK_THROWS(family_of(config));
}

TEST_CASE("a kernel fits if nothing keeps it from the problem") {
  Draw draw;
  int fitting = 0;
  for (int n = 0; n < 300; ++n) {
    DecodeProblem decode{};
    FwdProblem& p = decode.fwd;
    p.dtype = draw.flag() ? DType::BF16 : DType::TF32;
    p.batch = p.heads = p.heads_k = 1;
    p.head_dim = p.head_dim_v = draw.of({40, 64, 128, 256});
    p.seqlen_q = p.seqlen_k = 100;
    p.softmax_scale = draw.flag() ? 1 : -1;
    const int64_t row = p.head_dim;
    p.q = p.k = p.v = p.out = {nullptr, 100 * row, row, row, draw.flag()};
    BwdProblem backward{};
    backward.fwd = p;
    backward.dout = backward.dq = backward.dk = backward.dv = p.q;
    backward.fp32_gradients = draw.flag();
    Device gpu = kH100;
    gpu.capability = draw.of({80, 90, 100});
    for (const Row& row : rows_of_configs()) {
      CAPTURE(row.config.id());
      const KernelConfig& config = row.config;
      const bool fwd = fits<Op::Fwd>(config, p, gpu), bwd = fits<Op::Bwd>(config, backward, gpu);
      CHECK(fwd == !refusal<Op::Fwd>(config, p, gpu).any());
      CHECK(bwd == !refusal<Op::Bwd>(config, backward, gpu).any());
      CHECK(fits<Op::Decode>(config, decode, gpu) == !refusal<Op::Decode>(config, decode, gpu).any());
      fitting += fwd + bwd;
    }
  }
  CHECK(fitting > 1000);
}
