#include "core/decode_plan.h"

#include <algorithm>
#include <stdexcept>

#include "core/card.h"
#include "core/layout/decode_scheduler.h"
#include "core/workspace.h"

namespace flash_cute {

// Takes a share off large chunks for tail CTAs with small chunks: SMs that finish early take these.
static void add_tail_ctas(DecodeParams& p, int per_head) {
  const Card::Decode& card = kCard.decode;
  const int chunk = detail::ceil_div(per_head, p.ctas_per_head);
  if (chunk < card.large_chunk) return;
  const int rest = chunk - chunk / card.taken_off, left = per_head - p.ctas_per_head * rest;
  const int tail_ctas = detail::ceil_div(left, chunk / card.tail_parts);
  p.uniform.chunk = FastDivmod(rest);
  p.uniform.tail_chunk = FastDivmod(detail::ceil_div(left, tail_ctas));
  p.ctas_per_head += tail_ctas;
}

// Gives each work tile a CTA, and those of the last wave two each, so that SMs finish at about the same time.
static void one_cta_per_tile(DecodeParams& p, int work_tiles, int per_tile) {
  constexpr int kSplits = 2;
  const int last = per_tile % kSplits == 0 ? detail::ceil_div(p.resident_ctas, p.fwd.heads_k) : 0;
  p.uniform.chunk = FastDivmod(per_tile);
  p.uniform.tail_chunk = FastDivmod(per_tile / kSplits);
  p.uniform.full_ctas = work_tiles - last;
  p.ctas_per_head = work_tiles - last + kSplits * last;
  if (p.fwd.heads_k % 4 == 0) p.cluster_ctas = 4;
}

// Plans the chunks of a uniform batch.
static void plan_uniform(DecodeParams& p, const KernelConfig& config) {
  const Quanta quanta(p, cached_seq(p, 0), config.block_m, config.block_n);
  const int per_head = p.fwd.batch * quanta.per_head, work_tiles = p.fwd.batch * quanta.tiles;
  // With several CTAs an SM one loads while another starts: work tiles may have a CTA each.
  const bool own_ctas = p.even_splits() && config.ctas > 1 && quanta.per_tile >= kCard.decode.own_cta_quanta &&
                        int64_t(work_tiles) * p.fwd.heads_k >= int64_t(kCard.decode.own_cta_waves) * p.resident_ctas;
  p.uniform.known = true;
  p.uniform.per_tile = FastDivmod(quanta.per_tile);
  p.uniform.per_sequence = FastDivmod(std::max(1, quanta.per_head));
  if (own_ctas) return one_cta_per_tile(p, work_tiles, quanta.per_tile);
  p.uniform.chunk = FastDivmod(CtaChunks::of(p, per_head, quanta.per_tile, true).size);
  p.uniform.full_ctas = p.ctas_per_head;
  if (p.even_splits()) add_tail_ctas(p, per_head);
}

int ctas_of_tile(const DecodeProblem& p, const KernelConfig& config, const Device& gpu) {
  const FwdProblem& f = p.fwd;
  const int64_t rows = int64_t(f.seqlen_q) * (f.heads / std::max(1, f.heads_k));
  const int64_t work_tiles = (rows + config.block_m - 1) / config.block_m * f.heads_k * f.batch;
  const int blocks = detail::ceil_div(f.seqlen_k, config.block_n);
  int best = 1;
  for (int ctas = 2; ctas <= config.cluster; ++ctas) {
    if (work_tiles <= gpu.clusters[ctas] && detail::ceil_div(blocks, ctas) < detail::ceil_div(blocks, best))
      best = ctas;
  }
  return best;
}

// Gives each work tile a cluster.
static void one_cluster_per_tile(DecodeParams& p, const KernelConfig& config, int64_t tiles, const Device& gpu) {
  const int ctas = ctas_of_tile(p, config, gpu);
  p.uniform.known = p.is_uniform();
  p.cluster_ctas = ctas;
  p.clusters.ctas = FastDivmod(ctas);
  p.clusters.tiles = FastDivmod(static_cast<int>(std::max<int64_t>(1, tiles)));
  for (p.clusters.column_bits = 0; (config.head_dim_v >> p.clusters.column_bits) > ctas;) ++p.clusters.column_bits;
  p.ctas_per_head = p.fwd.batch * p.clusters.tiles.value * ctas;
}

// Whether L2 has room for all keys and values of full caches.
static bool fits_l2(const DecodeProblem& p, const Device& gpu) {
  const FwdProblem& f = p.fwd;
  const double numbers = double(f.batch) * f.heads_k * f.seqlen_k * (f.head_dim + f.head_dim_v);
  return numbers * element_bytes(f.dtype) <= kCard.decode.l2_room * gpu.l2_bytes;
}

// Fraction of K/V loads with evict_normal; the rest use evict_first. A cache that fits into L2 may be hit by the next
// call, so most stay.
static float l2_fraction_of(const DecodeParams& p, const KernelConfig& config, const Device& gpu) {
  if (int64_t(p.fwd.seqlen_q) * p.group.value > config.block_m) return 1.f;  // several query tiles read it
  return fits_l2(p, gpu) ? kCard.decode.l2_share : 0.f;
}

DecodePlan make_plan(const KernelConfig& config, const DecodeProblem& problem, const Device& gpu) {
  constexpr int64_t kMost = int64_t{1} << 30;  // quanta, and slots
  DecodeParams p{problem, {}, {}};  // whose plan is being made
  const FwdProblem& f = p.fwd;
  p.heads_k = FastDivmod(std::max(1, f.heads_k));
  p.group = FastDivmod(std::max(1, f.heads / std::max(1, f.heads_k)));
  p.page_size = FastDivmod(std::max(1, f.pages.size));
  p.l2_fraction = l2_fraction_of(p, config, gpu);
  const bool even = p.even_splits();
  const int64_t tiles = (int64_t(f.seqlen_q) * p.group.value + config.block_m - 1) / config.block_m;
  const int64_t work_tiles = int64_t(f.batch) * f.heads_k * tiles;
  const int64_t blocks = (int64_t(f.seqlen_k) + config.block_n - 1) / config.block_n;
  int64_t splits = blocks;
  if (p.num_splits > 0) splits = std::min<int64_t>(blocks, p.num_splits);
  if (p.split_size > 0) {
    const int64_t size = (p.split_size + config.block_n - 1) / config.block_n;
    splits = (blocks + size - 1) / size;
  }
  p.resident_ctas = gpu.sms * config.ctas;
  p.ctas_per_head = std::max(1, p.resident_ctas / std::max(1, f.heads_k));
  p.by_ctas_per_head = FastDivmod(p.ctas_per_head);
  p.cluster_ctas = f.heads_k % 2 == 0 ? 2 : 1;
  p.quantum_blocks = 1;
  p.slots = 0;
  if (work_tiles >= kMost) throw std::runtime_error("flash_cute: 2^30 tiles of queries or more");
  if (config.arch == Arch::Sm90) {
    one_cluster_per_tile(p, config, tiles, gpu);
    return p;
  }
  if (!even && work_tiles * splits >= kMost)
    throw std::runtime_error("flash_cute: keys are cut into 2^30 splits or more");
  if (even) p.quantum_blocks += static_cast<int>(work_tiles * blocks / kMost);
  if (p.is_uniform()) plan_uniform(p, config);
  auto whole_units = [&](const FastDivmod& chunk) { return chunk.value % p.uniform.per_tile.value == 0; };
  const bool late = p.uniform.full_ctas < p.ctas_per_head;
  const bool whole =
      even && p.uniform.known && whole_units(p.uniform.chunk) && (!late || whole_units(p.uniform.tail_chunk));
  if (splits > 1 && !whole) p.slots = static_cast<int>(even ? 2 * int64_t(p.ctas()) : work_tiles * splits);
  return p;
}

}  // namespace flash_cute
