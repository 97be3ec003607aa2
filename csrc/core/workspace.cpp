#include "core/workspace.h"

#include <algorithm>
#include <initializer_list>

#include "core/family.h"
#include "core/layout/transposed_values.h"

namespace flash_cute {

// At most 2^57: a plan request may have any sizes, and the bytes of several such parts must still fit an int64_t.
static int64_t product(std::initializer_list<int64_t> factors) {
  double all = 1;
  for (const int64_t factor : factors) all *= static_cast<double>(factor);
  return static_cast<int64_t>(std::min(all, 0x1p57));
}

FwdWorkspace lay_out(Arena& arena, const KernelConfig& config, const FwdProblem& p, const FwdPlan& plan) {
  FwdWorkspace work;
  if (config.dtype == DType::E4M3) {
    const auto values = TransposedValues::of(p);
    work.values = arena.take(product({values.sequences, p.heads_k, p.head_dim_v, values.keys / 4}));
    if (values.scales_keys) work.key_factors = arena.take(product({values.sequences, p.heads_k, values.keys}));
  }
  if (plan.num_splits == 1) return work;
  const int64_t rows = p.all_rows(), results = product({plan.num_splits, p.heads, rows});
  auto stats = [&] { return RowStats{arena.take(results), p.dense() ? p.seqlen_q : 0, rows}; };
  work.split_columns = config.head_dim_v;
  work.split_out = arena.take(product({results, config.head_dim_v}));
  work.split_lse = stats();
  if (p.row_max.ptr != nullptr) work.split_row_max = stats();
  return work;
}

// Whether a step of a sparse call takes strips from any tiles of queries: if nothing but token masks hides parts of tiles,
// and adds to dQ have no order.
static bool takes_strips(const KernelConfig& config, const BwdProblem& p, const BwdPlan& plan) {
  return config.walks_lists() && config.cluster == 1 && !config.rich() && p.fwd.band.is_open() &&
         !uses_semaphore(plan.dq_accumulate);
}

BwdWorkspace lay_out(Arena& arena, const KernelConfig& config, const BwdProblem& p, const BwdPlan& plan) {
  if (!family_of(config).facts.sums_dq) return {};
  const FwdProblem& f = p.fwd;
  const bool dense = f.dense();
  auto padded_rows = [&](int block, int seqlen, int64_t total) {  // of a head
    const PaddedRows padded{block};
    return dense ? padded.dense(seqlen) : padded.packed(total, f.batch);
  };
  const int64_t rows = padded_rows(config.block_m, f.seqlen_q, f.total_q);
  const int64_t all_rows = product({rows, f.heads, dense ? f.batch : 1});
  auto stats = [&] { return RowStats{arena.take(all_rows), dense ? rows * f.heads : 0, rows}; };
  BwdWorkspace work;
  work.lse_log2 = stats();
  work.row_dot = stats();
  work.dq_accum = arena.take(product({all_rows, config.head_dim}));
  work.slabs_of_head = dense ? 0 : padded_rows(kSlabRows, f.seqlen_k, f.total_k) / kSlabRows;
  if (plan.sums_of_splits) {
    const int keys = config.block_n * config.cluster;
    const int64_t tiles = product({(f.seqlen_k + keys - 1) / keys, f.heads_k, f.batch});
    const int64_t rows_k =
        dense ? product({tiles - plan.splits.whole_tiles, keys}) : product({work.slabs_of_head, kSlabRows, f.heads_k});
    work.split_sums = arena.take(product({rows_k, plan.splits.count(), config.head_dim + config.head_dim_v}));
  }
  if (takes_strips(config, p, plan)) work.strips = reinterpret_cast<StripBits*>(arena.take(f.lists.masks / 2 + 1));
  work.dq_semaphores = reinterpret_cast<int*>(arena.take(product({all_rows / config.block_m, config.warps})));
  return work;
}

DecodeWorkspace lay_out(Arena& arena, const KernelConfig& config, const DecodeProblem& p, const DecodePlan& plan) {
  if (plan.slots == 0) return {};
  const int64_t rows = int64_t(plan.slots) * config.block_m;
  DecodeWorkspace work;
  work.split_out = arena.take(product({rows, config.head_dim_v}));
  work.split_lse = arena.take(rows);
  const FwdProblem& f = p.fwd;
  const int64_t tiles = (int64_t(f.seqlen_q) * (f.heads / f.heads_k) + config.block_m - 1) / config.block_m;
  work.slots_of_tiles = reinterpret_cast<SlotsOfTile*>(arena.take(product({2, f.batch, tiles, f.heads_k})));
  return work;
}

}  // namespace flash_cute
