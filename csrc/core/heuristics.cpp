#include "core/heuristics.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/card.h"
#include "core/decode_plan.h"
#include "core/layout/tiles.h"

namespace flash_cute {
namespace {

ForwardSpeed speed(const KernelConfig& config) {
  const Card::Forward& card = kCard.forward;
  if (config.head_dim == 64) return config.block_m == 192 ? card.narrow_192 : card.narrow_128;
  if (config.head_dim > 128) return config.cluster == 2 ? card.wide_pairs : card.wide;
  if (config.block_m == 192) return config.cluster == 2 ? card.middle_192_pairs : card.middle_192;
  return config.cluster == 2 ? card.middle_128_pairs : card.middle_128;
}

double ceil_to(double value, double step) {
  const auto steps = static_cast<int64_t>(value / step);
  return step * static_cast<double>(steps * step < value ? steps + 1 : steps);
}

// One sequence of the problem; for packed ones of the mean length.
FwdProblem one_sequence(const FwdProblem& problem) {
  FwdProblem one = problem;
  if (!problem.dense()) {
    const int sequences = std::max(1, problem.batch);
    one.seqlen_q = static_cast<int>(std::min<int64_t>(problem.seqlen_q, problem.total_q / sequences));
    one.seqlen_k = static_cast<int>(std::min<int64_t>(problem.seqlen_k, problem.total_k / sequences));
  }
  one.varlen = {};
  return one;
}

// Extremes and mean of a quantity over a problem's tiles.
struct Spread {
  double longest, shortest, mean;
};

template <class ValueOf>
Spread spread(int tiles, const ValueOf& value_of) {
  // Neighbouring tiles of a long sequence are similar: a sample is enough.
  constexpr int kSample = 16;
  const int samples = std::min(tiles, kSample);
  if (samples == 0) return {0, 0, 0};
  double longest = 0, shortest = std::numeric_limits<double>::infinity(), sum = 0;
  for (int i = 0; i < samples; ++i) {
    const double value = value_of(static_cast<int>((2 * i + 1) * int64_t(tiles) / (2 * samples)));
    longest = std::max(longest, value);
    shortest = std::min(shortest, value);
    sum += value;
  }
  return {longest, shortest, sum / samples};
}

// Cost of `tiles` tiles in waves of per_wave.
double cost_of(const Spread& tile, double tiles, double per_wave) {
  // The shortest tiles come last: the more alike tiles are, the emptier the last wave.
  const double waves = tiles / per_wave;
  return std::max(tile.longest, tile.mean * waves + tile.shortest * (ceil_to(waves, 1) - waves));
}

// In units of cost, which depend on a kernel's head dims.
double a_microsecond(const KernelConfig& config, int sms) {
  return 1e6 / (2.0 * (config.head_dim + config.head_dim_v) * sms);
}

}  // namespace

bool alternatives(const KernelConfig& a, const KernelConfig& b) {
  return a.op != Op::Bwd && a.op == b.op && (a.arch == b.arch || a.op == Op::Decode) && a.dtype == b.dtype &&
         a.tier == b.tier && a.head_dim == b.head_dim && a.head_dim_v == b.head_dim_v;
}

int pack_gqa(const KernelConfig& config, const FwdProblem& problem) {
  if (config.op != Op::Fwd || problem.heads_k == 0 || problem.rules.rng != nullptr) return 1;
  const int group = problem.heads / problem.heads_k;
  int heads = 1;
  while (2 * heads <= config.max_pack_gqa() && group % (2 * heads) == 0 &&
         int64_t(2 * heads) * problem.seqlen_q <= config.block_m) {
    heads *= 2;
  }
  return heads;
}

bool may_pack(const KernelConfig& config, const FwdProblem& problem, int heads) {
  return heads >= 1 && pack_gqa(config, problem) % heads == 0;
}

// Tiles of queries, of a CTA or of a cluster, of one sequence and head.
static int row_tiles(const KernelConfig& config, const FwdProblem& one) {
  return detail::ceil_div(one.seqlen_q, config.block_m * config.cluster);
}

// How many CTAs, or clusters, run at once.
static double resident_ctas_of(const KernelConfig& config, int sms) {
  return std::max(1, sms / config.cluster);
}

int most_splits(const KernelConfig& config, const FwdProblem& problem, int heads, int sms) {
  constexpr int kMaxSplits = 64, kWaves = 2;
  if (config.arch != Arch::Sm90 || (!problem.dense() && config.cluster > 1)) return 1;
  const FwdProblem one = one_sequence(problem);
  const double all = double(row_tiles(config, one)) * (problem.heads / heads) * problem.batch;
  const double of_waves = all > 0 ? ceil_to(kWaves * resident_ctas_of(config, sms) / all, 1) : kMaxSplits;
  const int most = std::min(kMaxSplits, detail::ceil_div(one.seqlen_k, config.block_n));
  return std::max(1, static_cast<int>(std::min<double>(most, of_waves)));
}

SplitCost cheapest_splits(const KernelConfig& config, const FwdProblem& problem, int heads, int sms) {
  if (!problem.dense() && config.cluster > 1) return {std::numeric_limits<double>::infinity(), 1};
  const Card::Forward& card = kCard.forward;
  const FwdProblem one = one_sequence(problem);
  const SeqInfo seq(one, 0);
  const auto [rate, tile_keys] = speed(config);
  // Under a band the CTAs of a cluster see different keys, and wait for each other.
  const bool banded = one.band.left < Band::kUnbounded || one.band.right < Band::kUnbounded;
  const double waiting_keys = banded ? (config.cluster - 1) * config.block_m / 2 : 0;
  const int rows = config.block_m * config.cluster, tiles = row_tiles(config, one);
  const double all = double(tiles) * (problem.heads / heads) * problem.batch;
  const double resident_ctas = resident_ctas_of(config, sms);
  const double filled_rows = std::min(1.0, double(one.seqlen_q) * heads / config.block_m);  // of the fullest CTA
  const double filled = tiles == 1 ? card.empty_row + (1 - card.empty_row) * filled_rows : 1;
  auto cost_with = [&](int splits) {
    const Spread costs = spread(tiles, [&](int tile) {
      const RowSpan keys = visible_keys(seq, one.band, tile * rows, rows);
      const double of_split = ceil_to(double(std::max(0, keys.last - keys.first)) / splits, config.block_n);
      return (of_split + tile_keys + waiting_keys) * config.block_m / rate * filled;
    });
    return cost_of(costs, all * splits, resident_ctas);
  };
  const double whole = cost_with(1);
  SplitCost best{whole, 1};
  const double merging = card.number_us * problem.all_rows() * problem.heads * config.head_dim_v;
  const int most = most_splits(config, problem, heads, sms);
  for (int splits = 2; splits <= most; ++splits) {
    const double cost = cost_with(splits) + (card.kernel_us + merging * splits) * a_microsecond(config, sms);
    if (cost < best.cost && cost < card.worthwhile * whole) best = {cost, splits};
  }
  return best;
}

// Whether an SM has shared memory for config.ctas CTAs, with what it reserves for each.
static bool fit_at_once(const KernelConfig& config, const Device& gpu) {
  constexpr int kKept = 1024;
  return config.ctas * (config.smem_bytes() + kKept) <= gpu.smem_optin + kKept;
}

// Work tiles per SM from which on two resident CTAs beat one. Overlap pays for short sequences and unknown lengths.
// With much bandwidth one CTA suffices for long sequences, as tail CTAs balance the load.
static double tiles_to_overlap(const DecodeProblem& p, const KernelConfig& config, const Device& gpu) {
  const Card::Decode& card = kCard.decode;
  if (int64_t(p.fwd.seqlen_k) * config.head_dim <= card.short_numbers) return card.overlap_short;
  if (!p.is_uniform()) return card.overlap_unknown;
  const bool few_ctas = config.head_dim <= 64 && p.fwd.heads_k >= card.many_heads;
  return few_ctas || gpu.memory_gb_s < card.much_gb_s * gpu.sms ? card.overlap_long : card.overlap_long_much;
}

// Whether clusters per work tile beat even splits: all clusters must run at once, and a CTA has few blocks, or nearly
// all SMs have a CTA. With lengths on the device some CTAs may get all the work, but even splits take longer to
// schedule; a single sequence is never behind others.
static bool clusters_suit(const KernelConfig& config, const DecodeProblem& p, const Device& gpu) {
  const Card::Decode& card = kCard.decode;
  const FwdProblem& f = p.fwd;
  const int64_t rows = int64_t(f.seqlen_q) * (f.heads / std::max(1, f.heads_k)),
                work_tiles = int64_t(f.heads_k) * f.batch;
  if (rows > config.block_m || work_tiles > gpu.clusters[1]) return false;
  const int ctas = ctas_of_tile(p, config, gpu);
  const int blocks_of_cta = detail::ceil_div(detail::ceil_div(f.seqlen_k, config.block_n), ctas);
  const double busy = double(work_tiles) * ctas / gpu.sms;
  const bool wide = config.head_dim > 128;  // the even splits have half the warps
  if (!p.is_uniform()) {
    const bool alone = f.batch == 1 && busy > card.many_sms && !wide;
    return blocks_of_cta <= (alone ? card.cluster_blocks_alone : card.cluster_blocks_unknown);
  }
  if (busy > card.all_sms) return blocks_of_cta <= card.cluster_blocks_all_sms;
  return blocks_of_cta <= (wide ? card.cluster_blocks_wide : card.cluster_blocks);
}

double cost(const KernelConfig& config, const DecodeProblem& p, const Device& gpu) {
  // A tile with all rows of a kv head, up to 64, is the cheapest.
  const Card::Decode& card = kCard.decode;
  const FwdProblem& problem = p.fwd;
  if (config.arch == Arch::Sm90) return clusters_suit(config, p, gpu) ? 0 : std::numeric_limits<double>::infinity();
  const int64_t rows = int64_t(problem.seqlen_q) * (problem.heads / std::max(1, problem.heads_k));
  const int64_t tiles = (rows + config.block_m - 1) / config.block_m * problem.heads_k * problem.batch;
  const bool overlaps =
      config.ctas > 1 && fit_at_once(config, gpu) && tiles >= tiles_to_overlap(p, config, gpu) * gpu.sms;
  const double overlap = overlaps ? card.overlapped : 1;
  return overlap * double(tiles) * problem.seqlen_k * (config.block_m + card.rows_of_reading) / card.rate / gpu.sms;
}

double cost(const KernelConfig& config, const FwdProblem& problem, const Device& gpu) {
  return cheapest_splits(config, problem, pack_gqa(config, problem), gpu.sms).cost;
}

bool forward_is_cheaper(const KernelConfig& forward, const KernelConfig& decode, const DecodeProblem& p,
                        const Device& gpu) {
  const Card::Cached& card = kCard.cached;
  const int64_t rows = int64_t(p.fwd.seqlen_q) * (p.fwd.heads / std::max(1, p.fwd.heads_k));
  if (rows <= card.few_rows) return false;
  const double of_decode = cost(decode, p, gpu) / a_microsecond(decode, gpu.sms);
  if (rows <= decode.block_m &&
      decode.block_m == card.more_rows) {  // from pages forward always makes up for its overhead
    const bool reads_once = pack_gqa(forward, p.fwd) * p.fwd.heads_k == p.fwd.heads;
    return reads_once && decode.head_dim > 64 && (p.fwd.pages.ids != nullptr || of_decode > card.long_us);
  }
  return cost(forward, p.fwd, gpu) / a_microsecond(forward, gpu.sms) < of_decode + card.around_us;
}

QuerySplits cheapest_query_splits(const KernelConfig& config, const FwdProblem& problem, int sms) {
  const Card::Backward& card = kCard.backward;
  constexpr int kMaxSplits = 16;
  if (config.arch != Arch::Sm90 || problem.heads_k == 0) return {};
  const FwdProblem one = one_sequence(problem);
  const SeqInfo seq(one, 0);
  const int rows = config.block_n * config.cluster, tiles = detail::ceil_div(one.seqlen_k, rows);
  const int group = problem.heads / problem.heads_k;
  const double columns = 3 * config.head_dim + 2 * config.head_dim_v;
  const double all_heads_k = double(problem.heads_k) * problem.batch;
  const double step = card.product_us * config.block_m * config.block_n * columns;
  const double merging = card.number_us * one.seqlen_k * all_heads_k * (config.head_dim + config.head_dim_v);
  const Spread queries = spread(tiles, [&](int tile) {  // query tiles that see a tile of keys
    const TileRange seeing = query_tiles(seq, one.band, tile * rows, rows, config.block_m);
    return seeing.end - seeing.begin;
  });
  auto time_of = [&](const QuerySplits& splits) {
    auto time_with = [&](double steps) { return card.around_us + step * (group / splits.heads) * steps; };
    auto most = [&](double steps) { return ceil_to(steps / splits.queries, 1); };
    const Spread times{time_with(most(queries.longest)), time_with(most(queries.shortest)),
                       time_with(queries.mean / splits.queries)};
    const double time = cost_of(times, tiles * all_heads_k * splits.count(), std::max(1, sms / config.cluster));
    return splits.count() == 1 ? time : time + card.kernel_us + merging * splits.count();
  };
  QuerySplits best;
  double least = card.worthwhile * time_of(best);
  auto cut = [&](int whole_tiles, const auto& time_of_splits) {
    for (int count = 2; count <= kMaxSplits; ++count) {
      const int of_heads = std::gcd(count, group);
      const QuerySplits splits{of_heads, count / of_heads, whole_tiles};
      const double time = time_of_splits(splits);
      if (time >= least) continue;
      best = splits;
      least = time;
    }
  };
  cut(0, time_of);
  // Equally long tiles leave SMs idle in the last wave: its tiles alone may be split.
  const int64_t all = tiles * int64_t(problem.heads_k) * problem.batch,
                resident_ctas = std::max(1, sms / config.cluster);
  const int64_t last = all % resident_ctas;
  if (all < resident_ctas || last == 0 || !problem.dense() || queries.longest > queries.shortest) return best;
  if (best.count() == 1) least = card.worthwhile_last * time_of(best);
  cut(static_cast<int>(all - last), [&](const QuerySplits& splits) {
    const double whole = card.around_us + step * group * queries.longest;
    const double split = card.around_us + step * (group / splits.heads) * ceil_to(queries.longest / splits.queries, 1);
    const double numbers = double(last) * splits.count() * rows * (config.head_dim + config.head_dim_v);
    return double(all / resident_ctas) * whole + ceil_to(double(last) * splits.count() / resident_ctas, 1) * split +
           card.kernel_us + card.number_us * numbers;
  });
  return best;
}

}  // namespace flash_cute
