#include "core/heuristics.h"

#include <algorithm>
#include <limits>

#include "core/card.h"
#include "core/family.h"
#include "core/layout/tiles.h"
#include "core/waves.h"

namespace flash_cute {

bool alternatives(const KernelConfig& a, const KernelConfig& b) {
  return a.op != Op::Bwd && a.op == b.op && (a.arch == b.arch || a.op == Op::Decode) && a.dtype == b.dtype &&
         a.tier == b.tier && a.head_dim == b.head_dim && a.head_dim_v == b.head_dim_v &&
         a.walks_lists() == b.walks_lists() && a.cache == b.cache;
}

int pack_gqa(const KernelConfig& config, const FwdProblem& problem) {
  if (problem.heads_k == 0 || problem.rules.rng != nullptr || problem.lists.on()) return 1;
  const int group = problem.heads / problem.heads_k, most = family_of(config).max_pack_gqa(config);
  if (config.packs_tokens()) return group;
  int heads = 1;
  while (2 * heads <= most && group % (2 * heads) == 0 && int64_t(2 * heads) * problem.seqlen_q <= config.block_m) {
    heads *= 2;
  }
  return heads;
}

bool may_pack(const KernelConfig& config, const FwdProblem& problem, int heads) {
  const int most = pack_gqa(config, problem);
  return config.packs_tokens() ? heads == most : heads >= 1 && most % heads == 0;
}

int packed_heads(const KernelConfig& config, const FwdProblem& problem, const FwdOverrides& overrides) {
  return may_pack(config, problem, overrides.pack_gqa) ? overrides.pack_gqa : pack_gqa(config, problem);
}

int queries_of_tile(const KernelConfig& config, const FwdProblem& problem) {
  if (!config.packs_tokens()) return config.block_m * config.cluster;
  return config.block_m / std::max(1, problem.heads / std::max(1, problem.heads_k));
}

// Tiles of queries per sequence and head, each of a CTA or of a cluster.
static int row_tiles(const KernelConfig& config, const FwdProblem& one) {
  return detail::ceil_div(one.seqlen_q, queries_of_tile(config, one));
}

// Tiles of queries of all sequences. Of packed ones that differ in length the last tiles are half full, on average.
static double all_row_tiles(const KernelConfig& config, const FwdProblem& problem) {
  const FwdProblem mean = one_sequence(problem);
  const int longest = row_tiles(config, longest_sequence(problem));
  if (mean.seqlen_q == problem.seqlen_q || longest <= 1) return double(row_tiles(config, mean)) * problem.batch;
  const double tiles = double(mean.seqlen_q) / queries_of_tile(config, problem) + 0.5;
  return std::clamp<double>(tiles, 1, longest) * problem.batch;
}

// The number of CTAs, or clusters, that run at once.
static double resident_ctas_of(const KernelConfig& config, int sms) {
  return std::max(1, sms / config.cluster);
}

int most_splits(const KernelConfig& config, const FwdProblem& problem, int heads, int sms) {
  constexpr int kMaxSplits = 128, kWaves = 2;
  if (!family_of(config).facts.takes_overrides || config.walks_lists()) return 1;
  if (!problem.dense() && config.cluster > 1) return 1;
  const double work_tiles = all_row_tiles(config, problem) * (problem.heads / heads);
  const double of_waves = work_tiles > 0 ? ceil_to(kWaves * resident_ctas_of(config, sms) / work_tiles, 1) : kMaxSplits;
  const int most = std::min(kMaxSplits, detail::ceil_div(problem.seqlen_k, config.block_n));
  return std::max(1, static_cast<int>(std::min<double>(most, of_waves)));
}

SplitCost cheapest_splits(const KernelConfig& config, const FwdProblem& problem, int heads, const Device& gpu,
                          int num_splits) {
  if (!problem.dense() && config.cluster > 1) return {std::numeric_limits<double>::infinity(), 1};
  const Card::Forward& card = kCard.forward;
  const FwdProblem one = one_sequence(problem);
  const FwdProblem longest = longest_sequence(problem);
  const auto [rate_of_all, tile_keys] = family_of(config).forward_speed(config);
  // With so few queries all CTAs of a cluster but the first one are idle.
  const double rate = longest.seqlen_q <= config.block_m ? rate_of_all / config.cluster : rate_of_all;
  // Under a band the CTAs of a cluster see different keys, and wait for each other.
  const bool banded = !one.band.is_open();
  const double waiting_keys = banded ? (config.cluster - 1) * config.block_m / 2 : 0;
  const int rows = queries_of_tile(config, one), tiles = row_tiles(config, one);
  const double work_tiles = all_row_tiles(config, problem) * (problem.heads / heads);
  const double resident_ctas = resident_ctas_of(config, gpu.sms);
  // Warpgroups without tokens pass over. Other rows that do not exist take as long as those that do.
  constexpr double kGroupRows = 64;
  const bool passes_over = tiles == 1 && config.packs_tokens();
  const double of_groups = passes_over ? ceil_to(double(one.seqlen_q) * heads, kGroupRows) : config.block_m;
  const double rows_used = of_groups + card.idle_group * (config.block_m - of_groups);
  const double merging = card.number_us * problem.all_rows() * problem.heads * config.head_dim_v;
  const bool is_only_reader = tiles == 1 && heads * problem.heads_k == problem.heads;  // of its keys
  auto time_with = [&](int splits) {
    const bool stores_late = config.packs_tokens() && splits == 1 && !(is_only_reader && problem.dense_keys());
    const double overhead = tile_keys + (stores_late ? card.token_keys : 0);
    auto time_of_tile = [&](const FwdProblem& p, int tile) {
      const RowSpan keys = visible_keys(SeqInfo(p, 0), p.band, tile * rows, rows);
      const double of_split = ceil_to(double(std::max(0, keys.last - keys.first)) / splits, config.block_n);
      const double products = products_us(config, rows_used, of_split + waiting_keys, rate);
      const double readers = std::min(work_tiles * splits, resident_ctas);
      const double reading = is_only_reader ? reading_us(one, one.dtype, of_split, readers, gpu) : 0;
      const double together = std::max(products, reading) + kCard.not_overlapped * std::min(products, reading);
      return together + products_us(config, rows_used, overhead, rate);
    };
    Spread times = spread(tiles, [&](int tile) { return time_of_tile(one, tile); });
    if (!problem.dense()) times.longest = time_of_tile(longest, std::max(0, row_tiles(config, longest) - 1));
    const double passes = splits == 1 ? 0 : card.kernel_us + merging * splits;
    return cost_of(times, work_tiles * splits, resident_ctas) + passes;
  };
  const int most = most_splits(config, problem, heads, gpu.sms);
  if (1 <= num_splits && num_splits <= most) return {time_with(num_splits), num_splits};
  const double whole = time_with(1), worthwhile = problem.dense_keys() ? card.worthwhile : card.worthwhile_packed;
  SplitCost best{whole, 1};
  for (int splits = 2; splits <= most; ++splits) {
    const double us = time_with(splits);
    if (us < best.us && us < worthwhile * whole) best = {us, splits};
  }
  return best;
}

double cost(const KernelConfig& config, const DecodeProblem& problem, const Device& gpu, const FwdOverrides&) {
  return family_of(config).decode_cost(config, problem, gpu);
}

double cost(const KernelConfig& config, const FwdProblem& problem, const Device& gpu, const FwdOverrides& overrides) {
  return cheapest_splits(config, problem, packed_heads(config, problem, overrides), gpu, overrides.num_splits).us;
}

bool forward_is_cheaper(const KernelConfig& forward, const KernelConfig& decode, const DecodeProblem& p,
                        const Device& gpu, const FwdOverrides& overrides) {
  const Card::Cached& card = kCard.cached;
  const int64_t rows = int64_t(p.fwd.seqlen_q) * (p.fwd.heads / std::max(1, p.fwd.heads_k));
  if (rows <= card.decode_rows) return false;
  const bool reads_keys_once = packed_heads(forward, p.fwd, overrides) * p.fwd.heads_k == p.fwd.heads;
  if (p.fwd.pages.ids != nullptr && rows <= card.paged_rows && decode.head_dim > 64 && reads_keys_once) return true;
  FwdProblem expected = p.fwd;
  expected.seqlen_k = static_cast<int>(expected_keys(p, false));
  return card.forward_us + cost(forward, expected, gpu, overrides) < cost(decode, p, gpu);
}

}  // namespace flash_cute
