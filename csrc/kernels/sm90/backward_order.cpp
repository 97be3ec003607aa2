// The order of backward: of key tiles, and of their adds to dQ.
#include <algorithm>

#include "core/card.h"
#include "core/waves.h"
#include "kernels/sm90/backward_plan.h"
#include "kernels/sm90/family.h"
#include "kernels/sm90/resources.h"

namespace flash_cute::sm90 {
namespace {

// Whether the band hides keys before, or after, what a query sees.
bool hides_early_keys(const FwdProblem& f) {
  return f.band.left < f.seqlen_k - 1;
}

bool hides_late_keys(const FwdProblem& f) {
  return f.band.right < f.seqlen_q - 1;
}

// Q, dO and sums of dQ of one query, over the query heads of a kv head.
int64_t bytes_of_query(const FwdProblem& f) {
  const int64_t of_head = (f.head_dim + f.head_dim_v) * element_bytes(f.dtype) + 4 * f.head_dim;
  return of_head * (f.heads / std::max(1, f.heads_k));
}

}  // namespace

bool shares_l2(const KernelConfig& config, const BwdProblem& p, const Device& gpu) {
  const FwdProblem& f = p.fwd;
  if (two_cta(config) || p.deterministic || !f.dense()) return false;
  if (hides_early_keys(f) || hides_late_keys(f)) return false;
  return double(bytes_of_query(f)) * f.seqlen_q > kCard.backward.shared_l2 * gpu.l2_bytes;
}

DqAccumulate dq_accumulate(const KernelConfig& config, const BwdProblem& p, const QuerySplits& splits, bool shares_l2) {
  const FwdProblem f = one_sequence(p.fwd);
  if (p.deterministic) return DqAccumulate::Serialized;
  if (shares_l2 || f.lists.on()) return DqAccumulate::Atomic;
  const bool is_grouped = f.heads != f.heads_k, is_windowed = hides_early_keys(f), is_masked = hides_late_keys(f);
  // Under a mask the splits of a tile would wait for first tiles in the middle of their walks.
  if (splits.queries > 1 && (is_masked || is_windowed)) return DqAccumulate::Atomic;
  int64_t seen = f.seqlen_k;  // keys that a query sees, on average
  if (is_masked) {
    const int64_t before = is_windowed ? f.band.left + 1 : f.seqlen_k - std::min(f.seqlen_q, f.seqlen_k) / 2;
    seen = std::min(seen, before + f.band.right);
  }
  int most = two_cta(config) ? kCard.backward.stored_keys_pair : kCard.backward.stored_keys;
  if (is_grouped && (is_masked || is_windowed)) most /= is_windowed ? 4 : 2;
  return seen <= most ? DqAccumulate::FirstStores : DqAccumulate::Atomic;
}

KeyOrder key_order(const KernelConfig& config, const BwdProblem& p, const QuerySplits& of_plan, DqAccumulate order,
                   const Device& gpu) {
  const auto cached = static_cast<int64_t>(kCard.l2_kept * gpu.l2_bytes);
  const int start_together = std::max(1, gpu.sms / 16 * 16);  // tiles: one per SM, rounded to a multiple of 16
  const FwdProblem& f = p.fwd;
  if (f.seqlen_k == 0 || f.heads == 0) return {};  // no tiles
  const bool serialized = order == DqAccumulate::Serialized;
  const QuerySplits splits = of_plan.whole_tiles == 0 ? of_plan : QuerySplits{};  // of most tiles
  const bool one_head = f.heads == f.heads_k * splits.heads;
  const bool packed = !f.dense_keys() && !f.lists.on();
  const int keys = config.block_n * config.cluster;
  const int tiles = packed ? std::max(1, packed_tiles(f.total_k, f.batch, keys)) : (f.seqlen_k + keys - 1) / keys;
  const int together = std::max(1, start_together / config.cluster);

  // Queries and dQ of the alternating heads should stay in L2, so only the heads of the tiles that start together
  // alternate. Serialized: twice as many if L2 allows, so that half of a head's tiles run at once and wait for fewer.
  const int of_one_set = std::max(1, together / splits.count() / tiles);
  const bool two_sets = serialized && tiles * splits.count() <= together &&
                        2 * of_one_set * config.head_dim < kCard.backward.alternating_columns * config.cluster;
  const int sets = two_sets ? 2 : 1;
  int heads = sets * of_one_set;
  const bool masked = hides_early_keys(f) || hides_late_keys(f);
  if (serialized && !masked) {
    const int64_t of_head = bytes_of_query(f) * std::max(1, f.seqlen_q);
    heads = static_cast<int>(std::clamp<int64_t>(cached / of_head, 1, heads));
  }
  // Packed sequences: all heads that L2 holds, as the order is then the best.
  if (packed) {
    const int64_t of_head = bytes_of_query(f) * std::max<int64_t>(1, f.total_q);
    heads = static_cast<int>(std::clamp<int64_t>(cached / of_head, heads, std::max(heads, f.heads_k)));
  }
  // Walks over lists meet at random: the fewer tiles of a head run at once, the fewer wait.
  if (serialized && f.lists.on()) heads = std::max(heads, kCard.backward.listed_heads);

  const int hidden = f.seqlen_k - 1 - f.band.left;  // keys that the last query does not see
  const bool inside = serialized ? hidden <= f.seqlen_k / 4 : !hides_early_keys(f);
  // Bytes of queries in use at once, if the tiles that start together are all at different queries.
  const int64_t in_use = bytes_of_query(f) * together * keys / sets;
  const double longest = packed ? longest_to_mean(f.seqlen_q, f.total_q, f.batch) : 1;
  const int64_t least_of_last = masked || packed ? least_heads_of_last_set(3, family_of(config).resident(config, gpu),
                                                                           tiles * splits.count(), longest)
                                                 : 1;
  return {
      .tiles_of_set = std::min(together, of_one_set * tiles * splits.count()),
      .sets = HeadSets::of(heads, int64_t(f.heads_k) * (packed ? 1 : f.batch), least_of_last),
      .by_level = packed && is_causal_packed(f) && bytes_of_query(f) * f.total_q <= cached,
      .late_first = uses_semaphore(order) && !f.lists.on() && f.dense_keys() && one_head &&
                    tiles * splits.queries <= start_together,
      .heads_inside = inside,
      .down_and_up = inside && !f.lists.on() &&
                     (packed ? !uses_semaphore(order) : !serialized || (hides_late_keys(f) && in_use >= 2 * cached))};
}

BwdPlan Sm90Family::backward_plan(const KernelConfig& config, const BwdProblem& p, const Device& gpu) const {
  QuerySplits splits = cheapest_query_splits(config, p.fwd, gpu);
  if (p.fwd.lists.on()) splits = {};  // the lengths of lists are not known
  if (p.fp32_gradients && splits.whole_tiles > 0) splits = {};  // all tiles are split, or none
  const bool shares = shares_l2(config, p, gpu);
  const DqAccumulate order = dq_accumulate(config, p, splits, shares);
  return {.splits = splits,
          .sums_of_splits = splits.count() > 1 || p.fp32_gradients,
          .dq_accumulate = order,
          .order = key_order(config, p, splits, order, gpu),
          .shares_l2 = shares,
          .resident = resident(config, gpu)};
}

}  // namespace flash_cute::sm90
