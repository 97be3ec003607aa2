// Decode by clusters: how many each work tile has, and of how many CTAs.
#include <algorithm>

#include "core/layout/tiles.h"
#include "core/waves.h"
#include "kernels/sm90/family.h"

namespace flash_cute::sm90 {
namespace {

// Tiles of query rows of a kv head of a sequence.
int64_t row_tiles(const DecodeProblem& p, const KernelConfig& config) {
  const int64_t rows = int64_t(p.fwd.seqlen_q) * (p.fwd.heads / std::max(1, p.fwd.heads_k));
  return (rows + config.block_m - 1) / config.block_m;
}

// At most 2^40: a plan request may have any sizes.
int64_t work_tiles(const DecodeProblem& p, const KernelConfig& config) {
  const double all = static_cast<double>(row_tiles(p, config)) * p.fwd.heads_k * p.fwd.batch;
  return static_cast<int64_t>(std::min(all, 0x1p40));
}

// Kernels for wide heads have half the warps.
bool is_wide(const KernelConfig& config) {
  return config.head_dim > 128;
}

// Time of the CTAs' blocks in their turn, and of the pass that combines splits.
double sharing_us(double blocks, TileShares shares, const KernelConfig& config) {
  const Card::Decode& card = kCard.decode;
  const double merging = is_wide(config) ? card.cluster_merge_us_wide : card.cluster_merge_us;
  return ceil_to(blocks / shares.parts(), 1) * card.cluster_block_us + (shares.splits > 1 ? merging : 0);
}

}  // namespace

TileShares shares_of_tile(const DecodeProblem& p, const KernelConfig& config, const Device& gpu) {
  constexpr int64_t kMostSplits = 16;
  const int64_t tiles = work_tiles(p, config);
  const int blocks = detail::ceil_div(p.fwd.seqlen_k, config.block_n);
  TileShares best{1, 1};
  if (tiles == 0) return best;
  double of_best = sharing_us(blocks, best, config);
  for (int ctas = 2; ctas <= config.cluster; ++ctas) {
    const int most = static_cast<int>(std::min(kMostSplits, gpu.clusters[ctas] / tiles));
    for (int splits = 1; splits <= most; ++splits) {
      const TileShares shares{splits, ctas};
      const double us = sharing_us(blocks, shares, config);
      if (us > of_best || (us == of_best && shares.parts() >= best.parts())) continue;
      best = shares;
      of_best = us;
    }
  }
  return best;
}

double Sm90Family::decode_cost(const KernelConfig& config, const DecodeProblem& p, const Device& gpu) const {
  const Card::Decode& card = kCard.decode;
  const auto tiles = static_cast<double>(work_tiles(p, config));
  const TileShares shares = shares_of_tile(p, config, gpu);
  const double all_waves = std::max(1.0, tiles * shares.parts() / gpu.sms), waves = ceil_to(all_waves, 1);
  const double blocks = ceil_to(expected_keys(p, waves == 1) / config.block_n, 1);
  const double sharing = sharing_us(blocks, shares, config);
  const bool wide = is_wide(config);
  const double later = (all_waves - 1) * (wide ? card.cluster_wave_us_wide : card.cluster_wave_us);
  // Tiles of the same head read its keys at about the same time, from memory once.
  const auto heads = double(p.fwd.heads_k) * p.fwd.batch;
  const double reading = reading_us(p.fwd, p.cache_dtype(), heads * expected_keys(p, false) / gpu.sms, gpu.sms, gpu);
  return (wide ? card.cluster_us_wide : card.cluster_us) + std::max(waves * sharing + later, reading);
}

void Sm90Family::plan_decode(DecodeParams& p, const KernelConfig& config, const Device& gpu) const {
  const auto [splits, ctas] = shares_of_tile(p, config, gpu);
  const auto tiles = static_cast<int>(std::max<int64_t>(1, row_tiles(p, config)));
  p.uniform.known = p.is_uniform();
  p.cluster_ctas = ctas;
  p.clusters.ctas = FastDivmod(ctas);
  p.clusters.parts = FastDivmod(splits * ctas);
  p.clusters.tiles = FastDivmod(tiles);
  p.clusters.work_tiles = FastDivmod(static_cast<int>(std::max<int64_t>(1, work_tiles(p, config))));
  p.clusters.splits = splits;
  for (p.clusters.column_bits = 0; (config.head_dim_v >> p.clusters.column_bits) > ctas;) ++p.clusters.column_bits;
  p.ctas_per_head = p.fwd.batch * tiles * ctas * splits;
  if (splits > 1) p.slots = static_cast<int>(work_tiles(p, config) * splits);
}

}  // namespace flash_cute::sm90
