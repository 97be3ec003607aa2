// Backward's order of key tiles and query steps.
#include "kernels/sm90/backward_plan.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "core/layout/query_tiles.h"
#include "core/rows.h"
#include "draw.h"

using namespace flash_cute;
using namespace flash_cute::sm90;

namespace {

constexpr Device kGpu{90, 232448, 132, 3350, 50 << 20, {}};

KernelConfig draw_config(Draw& draw) {
  std::vector<KernelConfig> found;
  for (const Row& row : rows_of_configs()) {
    if (row.config.op == Op::Bwd && row.config.arch == Arch::Sm90) found.push_back(row.config);
  }
  return found[draw.from(0, static_cast<int>(found.size()) - 1)];
}

BwdProblem draw_problem(Draw& draw, const KernelConfig& config) {
  BwdProblem p{};
  FwdProblem& f = p.fwd;
  f.dtype = config.dtype;
  f.head_dim = config.head_dim;
  f.head_dim_v = config.head_dim_v;
  f.batch = draw.from(1, 3);
  f.heads_k = draw.from(1, 3);
  f.heads = f.heads_k * draw.of({1, 2, 5});
  f.seqlen_q = draw.from(1, draw.of({100, 1500, 40000}));
  f.seqlen_k = draw.from(1, draw.of({100, 1500, 6000}));
  f.band = draw.band(2000);
  p.deterministic = draw.flag();
  return p;
}

DqAccumulate dq_accumulate_of(const KernelConfig& config, const BwdProblem& p) {
  return dq_accumulate(config, p, cheapest_query_splits(config, p.fwd, kGpu), shares_l2(config, p, kGpu));
}

KeyOrder order_of(const KernelConfig& config, const BwdProblem& p) {
  return key_order(config, p, cheapest_query_splits(config, p.fwd, kGpu), dq_accumulate_of(config, p), kGpu);
}

}  // namespace

TEST_CASE("numbers of key tiles name each tile once, and one that others wait for first") {
  Draw draw;
  int late_first = 0;
  for (int n = 0; n < 1000; ++n) {
    const KernelConfig config = draw_config(draw);
    const BwdProblem p = draw_problem(draw, config);
    const KeyOrder order = order_of(config, p);
    const int keys = config.block_n * config.cluster, tiles = (p.fwd.seqlen_k + keys - 1) / keys;
    CAPTURE(config.id());
    CAPTURE(p);
    CHECK(order.tiles_of_set >= 1);
    CHECK(order.sets.heads >= 1);
    std::map<std::pair<int, int>, std::vector<int>> of_head;  // indices in the order of their numbers
    std::map<std::pair<int, int>, bool> late;
    bool valid = true;
    for (int number = 0; number < tiles * p.fwd.heads_k * p.fwd.batch; ++number) {
      const KeyTile tile(p.fwd, keys, order.sets, order.late_first, number);
      valid &= 0 <= tile.head && tile.head < p.fwd.heads_k && 0 <= tile.batch && tile.batch < p.fwd.batch;
      valid &= tile.row == tile.index * keys;
      of_head[{tile.batch, tile.head}].push_back(tile.index);
      const auto [known, is_new] = late.emplace(std::pair{tile.batch, tile.head}, tile.late_first);
      valid &= known->second == tile.late_first;
      late_first += is_new && tile.late_first;
    }
    CHECK(valid);
    CHECK(of_head.size() == size_t(p.fwd.heads_k) * p.fwd.batch);
    for (auto& [head, indices] : of_head) {
      if (late.at(head)) std::reverse(indices.begin(), indices.end());
      bool ascending = static_cast<int>(indices.size()) == tiles;
      for (int i = 0; ascending && i < tiles; ++i) ascending = indices[i] == i;
      CHECK(ascending);
    }
  }
  CHECK(late_first > 10);
}

TEST_CASE("sets of heads have all heads once, and the last one has enough") {
  Draw draw;
  for (int n = 0; n < 2000; ++n) {
    const int heads = draw.from(1, 20), all = draw.from(1, 60), least = draw.from(1, 40), tiles = draw.from(1, 5);
    const HeadSets sets = HeadSets::of(heads, all, least);
    CHECK(sets.last % heads == 0);
    CHECK(all - sets.last >= std::min(all, least));
    CHECK(all - sets.last < least + heads);
    int expected = 0;  // first head of the next set
    for (int number = 0; number < all * tiles; ++number) {
      const HeadSets::Set set = sets.of_tile(number, tiles, all);
      const bool is_first = number == expected * tiles;
      if (is_first) expected += set.heads;
      CHECK(set.first + set.heads == expected);
      CHECK(set.heads == (set.first < sets.last ? heads : all - sets.last));
    }
    CHECK(expected == all);
  }
}

// A semaphore of dQ counts the key tiles that have added to a query tile: a tile that is counted must come.
TEST_CASE("the key tiles of a query tile are those whose walks visit it, once in each head") {
  Draw draw;
  for (int n = 0; n < 300; ++n) {
    const KernelConfig config = draw_config(draw);
    const FwdProblem f = draw_problem(draw, config).fwd;
    const SeqInfo seq({0, std::min(f.seqlen_q, 3000)}, {0, f.seqlen_k});
    const int keys = config.block_n * config.cluster, heads = f.heads / f.heads_k;
    std::map<std::pair<int, int>, std::set<int>> visits;  // by head and query tile: key tiles
    bool once = true;
    for (int tile = 0; tile * keys < f.seqlen_k; ++tile) {
      const TileRange range = query_tiles(seq, f.band, tile * keys, keys, config.block_m);
      if (range.empty()) continue;
      for (QueryStep step{0, range.end - 1}; step.head < heads; step = step.next(range))
        once &= visits[{step.head, step.m}].insert(tile).second;
    }
    CAPTURE(config.id());
    CAPTURE(seq.q.length);
    CAPTURE(seq.k.length);
    CAPTURE(f.band);
    CHECK(once);
    for (int head = 0; head < heads; ++head) {
      for (int m = 0; m * config.block_m < seq.q.length; ++m) {
        const TileRange range = key_tiles(seq, f.band, m * config.block_m, config.block_m, keys);
        std::set<int> expected;
        for (int tile = range.begin; tile < range.end; ++tile) expected.insert(tile);
        if (visits[{head, m}] != expected) FAIL_CHECK("query tile " << m << " of head " << head);
      }
    }
  }
}

TEST_CASE("sums are serialized if they must be deterministic, and only then") {
  Draw draw;
  std::set<DqAccumulate> seen;
  for (int n = 0; n < 2000; ++n) {
    const KernelConfig config = draw_config(draw);
    const BwdProblem p = draw_problem(draw, config);
    const DqAccumulate order = dq_accumulate_of(config, p);
    CAPTURE(config.id());
    CAPTURE(p);
    CHECK((order == DqAccumulate::Serialized) == p.deterministic);
    CHECK(!(shares_l2(config, p, kGpu) && uses_semaphore(order)));  // they share their memory
    CHECK((!order_of(config, p).late_first || uses_semaphore(order)));
    seen.insert(order);
  }
  CHECK(seen.size() == 3);
}
