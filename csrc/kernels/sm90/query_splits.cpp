// The number of splits in backward.
#include <algorithm>
#include <numeric>

#include "core/card.h"
#include "core/layout/tiles.h"
#include "core/waves.h"
#include "kernels/sm90/backward_plan.h"

namespace flash_cute::sm90 {

QuerySplits cheapest_query_splits(const KernelConfig& config, const FwdProblem& problem, const Device& gpu) {
  const Card::Backward& card = kCard.backward;
  constexpr int kMaxSplits = 16;
  if (problem.heads_k == 0) return {};
  const FwdProblem one = one_sequence(problem);
  const SeqInfo seq(one, 0);
  const int rows = config.block_n * config.cluster, tiles = detail::ceil_div(one.seqlen_k, rows);
  const int group = problem.heads / problem.heads_k;
  const double columns = 3 * config.head_dim + 2 * config.head_dim_v;
  const double all_heads_k = double(problem.heads_k) * problem.batch;
  const double step = card.product_us * config.block_m * config.block_n * columns;
  const double numbers = one.seqlen_k * all_heads_k * (config.head_dim + config.head_dim_v);  // of a split of all tiles
  auto merging = [&](double numbers) {
    const bool fits_l2 = numbers * sizeof(float) <= kCard.l2_kept * gpu.l2_bytes;
    return card.kernel_us + numbers * (fits_l2 ? card.number_us_l2 : card.number_us);
  };
  auto seeing = [&](const SeqInfo& seq, int tile) -> double {  // query tiles that see a tile of keys
    const TileRange range = query_tiles(seq, one.band, tile * rows, rows, config.block_m);
    return range.end - range.begin;
  };
  Spread queries = spread(tiles, [&](int tile) { return seeing(seq, tile); });
  for (const int end : {0, std::max(0, tiles - 1)}) {  // of a causal mask the extremes, which no sample has
    queries.longest = std::max(queries.longest, seeing(seq, end));
    queries.shortest = std::min(queries.shortest, seeing(seq, end));
  }
  if (!problem.dense()) queries.longest = std::max(queries.longest, seeing(SeqInfo(longest_sequence(problem), 0), 0));
  auto time_of = [&](const QuerySplits& splits) {
    auto time_with = [&](double steps) { return card.prologue_epilogue_us + step * (group / splits.heads) * steps; };
    auto most = [&](double steps) { return ceil_to(steps / splits.queries, 1); };
    const Spread times{time_with(most(queries.longest)), time_with(most(queries.shortest)),
                       time_with(queries.mean / splits.queries)};
    const double all = tiles * all_heads_k * splits.count(), at_once = std::max(1, gpu.sms / config.cluster);
    double time = cost_of(times, all, at_once);
    if (problem.dense()) time = std::max(time, end_of_longest_first(times, all, at_once));
    return splits.count() == 1 ? time : time + merging(numbers * splits.count());
  };
  QuerySplits best;
  double least = card.worthwhile * time_of(best);
  auto try_splits = [&](int whole_tiles, const auto& time_of_splits) {
    for (int count = 2; count <= kMaxSplits; ++count) {
      const int of_heads = std::gcd(count, group);
      const QuerySplits splits{of_heads, count / of_heads, whole_tiles};
      const double time = time_of_splits(splits);
      if (time >= least) continue;
      best = splits;
      least = time;
    }
  };
  try_splits(0, time_of);
  // Equally long tiles leave SMs idle in the last wave: its tiles alone may be split.
  const int64_t all = tiles * int64_t(problem.heads_k) * problem.batch,
                resident_ctas = std::max(1, gpu.sms / config.cluster);
  const int64_t last = all % resident_ctas;
  if (all < resident_ctas || last == 0 || !problem.dense() || queries.longest > queries.shortest) return best;
  if (best.count() == 1) least = card.worthwhile_last * time_of(best);
  try_splits(static_cast<int>(all - last), [&](const QuerySplits& splits) {
    const double whole = card.prologue_epilogue_us + step * group * queries.longest;
    const double split =
        card.prologue_epilogue_us + step * (group / splits.heads) * ceil_to(queries.longest / splits.queries, 1);
    const double of_last = double(last) * splits.count() * rows * (config.head_dim + config.head_dim_v);
    return double(all / resident_ctas) * whole + ceil_to(double(last) * splits.count() / resident_ctas, 1) * split +
           merging(of_last);
  });
  return best;
}

}  // namespace flash_cute::sm90
