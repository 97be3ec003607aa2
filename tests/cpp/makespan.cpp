// The makespan of the kernels' orders of tiles, relative to that of longest processing time first. CTAs take tiles in order.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <vector>

#include "core/card.h"
#include "core/family.h"
#include "core/layout/backward_work.h"
#include "core/layout/key_splits.h"
#include "core/layout/kv_tiles.h"
#include "core/rows.h"
#include "core/waves.h"
#include "draw.h"
#include "packed_order.h"

using namespace flash_cute;

namespace {

const Device& kGpu = kH100;
constexpr int kTileCost = 2;  // of a tile beside its steps, in steps
constexpr int kLeast = 50;  // steps; of a shorter schedule one step is over 2 %

// When the last of `workers` ends.
double makespan(const std::vector<int>& costs, int workers) {
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> ends;
  int64_t last = 0;
  for (const int cost : costs) {
    int64_t start = 0;
    if (static_cast<int>(ends.size()) == workers) {
      start = ends.top();
      ends.pop();
    }
    ends.push(start + cost);
    last = std::max(last, start + cost);
  }
  return static_cast<double>(last);
}

struct Ratios {
  std::vector<double> all;

  void add(std::vector<int> costs, int workers) {
    const double planned = makespan(costs, workers);
    std::sort(costs.begin(), costs.end(), std::greater<>());
    const double longest_first = makespan(costs, workers);
    if (longest_first >= kLeast) all.push_back(planned / longest_first);
  }
  double geomean() const {
    double sum = 0;
    for (const double ratio : all) sum += std::log(ratio);
    return std::exp(sum / static_cast<double>(all.size()));
  }
  double share_over(double bound) const {
    const auto over = std::count_if(all.begin(), all.end(), [&](double ratio) { return ratio > bound; });
    return static_cast<double>(over) / static_cast<double>(all.size());
  }
};

// A random plain row of Hopper's families with this tile, of dense or packed calls.
template <Op op>
const KernelConfig& draw_config(Draw& draw, int block_m, int block_n, int cluster) {
  std::vector<const KernelConfig*> found;
  for (const Row& row : rows_of_configs()) {
    const KernelConfig& c = row.config;
    if (c.op == op && c.arch == Arch::Sm90 && c.block_m == block_m && c.block_n == block_n && c.cluster == cluster &&
        c.tiles == TileKind::Interval && !c.rich())
      found.push_back(&c);
  }
  REQUIRE(!found.empty());
  return *found[draw.from(0, static_cast<int>(found.size()) - 1)];
}

FwdProblem draw_problem(Draw& draw, const KernelConfig& config, bool causal) {
  FwdProblem f{};
  f.dtype = config.dtype;
  f.head_dim = config.head_dim;
  f.head_dim_v = config.head_dim_v;
  f.batch = draw.of({1, 1, 2, 4, 8});
  f.heads_k = draw.of({1, 2, 4, 5, 8, 16});
  f.heads = f.heads_k * draw.of({1, 2, 4, 5, 8});
  f.seqlen_q = f.seqlen_k = draw.from(300, draw.of({2000, 9000, 20000}));
  f.band = {Band::kUnbounded, causal ? 0 : Band::kUnbounded};
  return f;
}

template <int kBlockM, int kBlockN, int kCluster>
void add_backward(Draw& draw, bool causal, Ratios& ratios) {
  const KernelConfig& config = draw_config<Op::Bwd>(draw, kBlockM, kBlockN, kCluster);
  BwdProblem p{};
  p.fwd = draw_problem(draw, config, causal);
  const BwdPlan plan = make_plan(config, p, kGpu);
  const BwdParams params{p, plan, {}};
  const FastDivmod splits(plan.splits.count());
  const int keys = kBlockN * kCluster, tiles = (p.fwd.seqlen_k + keys - 1) / keys * p.fwd.heads_k * p.fwd.batch;
  const int split_tiles = plan.sums_of_splits ? tiles - plan.splits.whole_tiles : 0;
  std::vector<int> costs;
  for (int number = 0; number < tiles + split_tiles * (plan.splits.count() - 1); ++number) {
    const BackwardWork<QueryInterval<kBlockM, kBlockN * kCluster>> work(params, splits, keys, number);
    costs.push_back(kTileCost + static_cast<int>(work.steps()));
  }
  ratios.add(costs, plan.resident);
}

void add_forward(Draw& draw, bool causal, Ratios& ratios) {
  const KernelConfig& config = draw_config<Op::Fwd>(draw, 128, 128, 1);
  const FwdProblem p = draw_problem(draw, config, causal);
  const FwdPlan plan = make_plan(config, p, kGpu, {});
  const int rows = config.block_m, tiles = (p.seqlen_q + rows - 1) / rows, heads = p.heads / plan.pack_gqa * p.batch;
  std::vector<int> costs;
  for (int number = 0; number < tiles * heads; ++number) {
    const HeadSets::Set set = plan.sets.of_tile(number, tiles, heads);
    const int tile = tiles - 1 - (number - set.first * tiles) / set.heads;
    const SeqInfo seq(p, 0);
    const TileRange range = key_tiles(seq, p.band, tile * rows, rows, config.block_n);
    for (int split = 0; split < plan.num_splits; ++split)
      costs.push_back(kTileCost + even_share(range, split, plan.num_splits).end -
                      even_share(range, split, plan.num_splits).begin);
  }
  ratios.add(costs, plan.resident);
}

// Packed sequences that attend to themselves.
struct Packed {
  FwdProblem p;
  std::vector<int> cu{0};

  Packed(Draw& draw, const KernelConfig& config, bool causal) : p(draw_problem(draw, config, causal)) {
    p.batch = draw.from(1, 24);
    const int most = draw.of({500, 2000, 8000});
    p.seqlen_q = 0;
    for (int b = 0; b < p.batch; ++b) {
      const int length = draw.from(0, draw.flag() ? most : most / 8);
      cu.push_back(cu.back() + length);
      p.seqlen_q = std::max(p.seqlen_q, length);
    }
    p.seqlen_k = p.seqlen_q;
    p.total_q = p.total_k = cu.back();
    p.varlen.cu_q = p.varlen.cu_k = cu.data();
  }
};

void add_packed_forward(Draw& draw, bool causal, Ratios& ratios) {
  const KernelConfig& config = draw_config<Op::Fwd>(draw, 128, 128, 1);
  const Packed packed(draw, config, causal);
  const FwdProblem& p = packed.p;
  const FwdPlan plan = make_plan(config, p, kGpu, {});
  const PackedRows rows = PackedRows::of_queries(p, config.block_m);
  const PackedOrder order = sorted_sequences(rows, plan.by_level, [&](int sequence) {
    return plan.by_level ? rows.length(sequence) : SeqInfo(p, sequence).k.length;
  });
  const int heads = p.heads / plan.pack_gqa;
  int tiles = 0;
  for (int b = 0; b < p.batch; ++b) tiles += rows.tiles(b);
  PackedTiles found;
  std::vector<int> costs;
  KeyCount count;
  for (int b = 0; b < p.batch; ++b) count.add(SeqInfo(p, b), p.band, config.block_m, config.block_n);
  const int of_split = plan.num_splits == 1 ? 0 : count.of_split(heads, plan.resident, plan.num_splits, [&](int tiles) {
    int64_t splits = 0;
    for (int b = 0; b < p.batch; ++b) splits += KeyCount::splits(SeqInfo(p, b), config.block_m, config.block_n, tiles);
    return splits;
  });
  for (int split = 0; split < plan.num_splits; ++split) {  // TileScheduler::by_split
    for (int number = 0; number < tiles * heads; ++number) {
      const HeadSets::Set set = plan.sets.of_tile(number, tiles, heads);
      const PackedTile tile = found.find(rows, order, (number - set.first * tiles) / set.heads);
      const int row = (tile.tiles - 1 - tile.before) * config.block_m;
      const TileRange range = key_tiles(SeqInfo(p, tile.sequence), p.band, row, config.block_m, config.block_n);
      const RowSpan part = KeySplit{split, of_split}.of(range.end - range.begin, plan.num_splits);
      if (part.last > part.first || split == 0) costs.push_back(kTileCost + part.last - part.first);
    }
  }
  if (!costs.empty()) ratios.add(costs, plan.resident);
}

template <int kBlockM, int kBlockN, int kCluster>
void add_packed_backward(Draw& draw, bool causal, Ratios& ratios) {
  const KernelConfig& config = draw_config<Op::Bwd>(draw, kBlockM, kBlockN, kCluster);
  const Packed packed(draw, config, causal);
  BwdProblem p{};
  p.fwd = packed.p;
  const BwdPlan plan = make_plan(config, p, kGpu);
  const BwdParams params{p, plan, {}};
  const FastDivmod splits(plan.splits.count());
  const int keys = kBlockN * kCluster;
  const PackedRows rows = PackedRows::of_keys(p.fwd, keys);
  const PackedOrder order = sorted_sequences(rows, plan.order.by_level, [&](int sequence) {
    return plan.order.by_level ? rows.length(sequence) : SeqInfo(p.fwd, sequence).q.length;
  });
  int tiles = 0;
  for (int b = 0; b < p.fwd.batch; ++b) tiles += rows.tiles(b);
  PackedTiles found;
  std::vector<int> costs;
  const int numbers = tiles * p.fwd.heads_k * (plan.sums_of_splits ? plan.splits.count() : 1);
  for (int number = 0; number < numbers; ++number) {
    const BackwardWork<QueryInterval<kBlockM, kBlockN * kCluster>> work(params, splits, keys, number, tiles, order,
                                                                        found);
    costs.push_back(kTileCost + static_cast<int>(work.steps()));
  }
  if (!costs.empty()) ratios.add(costs, plan.resident);
}

}  // namespace

TEST_CASE("orders of packed tiles end nearly as early as longest first") {
  Draw draw;
  for (const bool causal : {false, true}) {
    Ratios forward, backward;
    for (int n = 0; n < 1000; ++n) {
      add_packed_forward(draw, causal, forward);
      if (draw.flag()) {
        add_packed_backward<64, 128, 1>(draw, causal, backward);
      } else {
        add_packed_backward<64, 64, 2>(draw, causal, backward);
      }
    }
    CAPTURE(causal);
    CHECK(forward.geomean() < 1.005);
    CHECK(backward.geomean() < 1.025);
    CHECK(forward.share_over(1.03) < .02);
    // Under a causal mask tiles of a level differ by up to a tile, and what L2 does not hold goes sequence by sequence.
    CHECK(backward.share_over(1.1) < .05);
  }
}

TEST_CASE("orders of tiles end nearly as early as longest first") {
  Draw draw;
  for (const bool causal : {false, true}) {
    Ratios forward, backward;
    for (int n = 0; n < 1000; ++n) {
      add_forward(draw, causal, forward);
      switch (draw.from(0, 2)) {
        case 0:
          add_backward<64, 128, 1>(draw, causal, backward);
          break;
        case 1:
          add_backward<128, 128, 1>(draw, causal, backward);
          break;
        default:
          add_backward<64, 64, 2>(draw, causal, backward);
      }
    }
    CAPTURE(causal);
    CHECK(forward.geomean() < 1.005);
    CHECK(backward.geomean() < 1.01);
    CHECK(forward.share_over(1.03) < .02);
    CHECK(backward.share_over(1.03) < .04);  // parts of split tiles, whose numbers of steps are small and uneven
  }
}

TEST_CASE("the end of longest first is that of a schedule, for lengths that are spread evenly") {
  Draw draw;
  for (int n = 0; n < 300; ++n) {
    const int workers = draw.from(8, 132), tiles = draw.from(1, 12 * workers);
    const int shortest = draw.from(1, 4000), longest = shortest + draw.from(0, 4000);
    std::vector<int> costs(tiles);
    for (int i = 0; i < tiles; ++i) costs[i] = tiles == 1 ? longest : longest - (longest - shortest) * i / (tiles - 1);
    const double mean = (longest + shortest) / 2.;
    CAPTURE(workers);
    CAPTURE(tiles);
    CAPTURE(shortest);
    CAPTURE(longest);
    const double estimate = end_of_longest_first({double(longest), double(shortest), mean}, tiles, workers);
    CHECK(estimate == doctest::Approx(makespan(costs, workers)).epsilon(.06));
  }
}
