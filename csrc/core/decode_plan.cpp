#include "core/decode_plan.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "kernels/common/shares.h"

namespace flash_cute {

// Takes a part off large shares, which each SM works through at its own pace, for CTAs that come later, with small
// shares.
static void relieve_shares(DecodeProblem& p, int of_head) {
  constexpr int kLarge = 128, kTakenOff = 16, kSmall = 8;  // grains; parts of a share
  const int share = detail::ceil_div(of_head, p.ctas_of_head);
  if (share < kLarge) return;
  const int rest = share - share / kTakenOff, left = of_head - p.ctas_of_head * rest;
  const int late_ctas = detail::ceil_div(left, share / kSmall);
  p.alike.share = Divisor(rest);
  p.alike.small_share = Divisor(detail::ceil_div(left, late_ctas));
  p.ctas_of_head += late_ctas;
}

// Gives each unit a CTA, and those of the GPU's last turn two each, so that SMs end at about the same time.
static void give_units_ctas(DecodeProblem& p, int units, int of_unit) {
  constexpr int kCuts = 2;
  const int last = of_unit % kCuts == 0 ? detail::ceil_div(p.at_once, p.fwd.heads_k) : 0;
  p.alike.share = Divisor(of_unit);
  p.alike.small_share = Divisor(of_unit / kCuts);
  p.alike.first_ctas = units - last;
  p.ctas_of_head = units - last + kCuts * last;
  if (p.fwd.heads_k % 4 == 0) p.neighbours = 4;
}

// Shares out the grains of sequences that are alike.
static void share_out_alike(DecodeProblem& p, const KernelConfig& config) {
  constexpr int kLong = 8, kTurns = 8;  // grains of a unit; times as many units as CTAs at once
  const Grains grains(p, cached_seq(p, 0), config.block_m, config.block_n);
  const int of_head = p.fwd.batch * grains.of_head, units = p.fwd.batch * grains.tiles;
  // Of several CTAs of an SM one reads while another starts: units may have a CTA each.
  const bool own_ctas = p.even_shares() && config.ctas > 1 && grains.of_unit >= kLong &&
                        int64_t(units) * p.fwd.heads_k >= int64_t(kTurns) * p.at_once;
  p.alike.known = true;
  p.alike.of_unit = Divisor(grains.of_unit);
  p.alike.of_sequence = Divisor(std::max(1, grains.of_head));
  if (own_ctas) return give_units_ctas(p, units, grains.of_unit);
  p.alike.share = Divisor(Shares::of(p, of_head, grains.of_unit, true).size);
  p.alike.first_ctas = p.ctas_of_head;
  if (p.even_shares()) relieve_shares(p, of_head);
}

int ctas_of_unit(const DecodeProblem& p, const KernelConfig& config, const Device& gpu) {
  const FwdProblem& f = p.fwd;
  const int64_t rows = int64_t(f.seqlen_q) * (f.heads / std::max(1, f.heads_k));
  const int64_t units = (rows + config.block_m - 1) / config.block_m * f.heads_k * f.batch;
  const int blocks = detail::ceil_div(f.seqlen_k, config.block_n);
  int best = 1;
  for (int ctas = 2; ctas <= config.cluster; ++ctas) {
    if (units <= gpu.clusters[ctas] && detail::ceil_div(blocks, ctas) < detail::ceil_div(blocks, best)) best = ctas;
  }
  return best;
}

// Gives each unit a cluster.
static void give_units_clusters(DecodeProblem& p, const KernelConfig& config, int64_t tiles, const Device& gpu) {
  const int ctas = ctas_of_unit(p, config, gpu);
  p.alike.known = p.known_to_be_alike();
  p.neighbours = ctas;
  p.clusters.ctas = Divisor(ctas);
  p.clusters.tiles = Divisor(static_cast<int>(std::max<int64_t>(1, tiles)));
  for (p.clusters.column_bits = 0; (config.head_dim_v >> p.clusters.column_bits) > ctas;) ++p.clusters.column_bits;
  p.ctas_of_head = p.fwd.batch * p.clusters.tiles.value * ctas;
}

// Whether the L2 cache has room for all keys and values that there can be.
static bool fits_l2(const DecodeProblem& p) {
  constexpr int64_t kRoom = 40 * 1024 * 1024;  // bytes, of an H100's 50 MB
  const FwdProblem& f = p.fwd;
  const int64_t numbers = int64_t(f.batch) * f.heads_k * f.seqlen_k * (f.head_dim + f.head_dim_v);
  return numbers * element_bytes(f.dtype) <= kRoom;
}

// What is read once makes way for other data. But where all of it has room in the L2 cache, it may be there still when
// it is read again: then a share stays, as lines that leave first have no place but each other's, if others fill the
// cache; and not all of it, as keys that are read in order push each other out where there is a little too much of them.
static float kept_in_l2(const DecodeProblem& p, const KernelConfig& config) {
  constexpr float kShare = 0.75f;
  if (int64_t(p.fwd.seqlen_q) * p.group.value > config.block_m) return 1.f;  // several tiles of queries read it
  return fits_l2(p) ? kShare : 0.f;
}

void plan_decode(DecodeProblem& p, const KernelConfig& config, const Device& gpu) {
  constexpr int64_t kMost = int64_t{1} << 30;  // grains, and slots
  const FwdProblem& f = p.fwd;
  p.heads_k = Divisor(std::max(1, f.heads_k));
  p.group = Divisor(std::max(1, f.heads / std::max(1, f.heads_k)));
  p.page_size = Divisor(std::max(1, f.pages.size));
  p.kept = kept_in_l2(p, config);
  const bool even = p.even_shares();
  const int64_t tiles = (int64_t(f.seqlen_q) * p.group.value + config.block_m - 1) / config.block_m;
  const int64_t units = int64_t(f.batch) * f.heads_k * tiles;
  const int64_t blocks = (int64_t(f.seqlen_k) + config.block_n - 1) / config.block_n;
  int64_t parts = blocks;
  if (p.num_splits > 0) parts = std::min<int64_t>(blocks, p.num_splits);
  if (p.split_size > 0) {
    const int64_t size = (p.split_size + config.block_n - 1) / config.block_n;
    parts = (blocks + size - 1) / size;
  }
  p.at_once = gpu.sms * config.ctas;
  p.ctas_of_head = std::max(1, p.at_once / std::max(1, f.heads_k));
  p.by_ctas_of_head = Divisor(p.ctas_of_head);
  p.neighbours = f.heads_k % 2 == 0 ? 2 : 1;
  p.grain_blocks = 1;
  p.slots = 0;
  if (units >= kMost) throw std::runtime_error("flash_cute: 2^30 tiles of queries or more");
  if (config.arch == Arch::Sm90) return give_units_clusters(p, config, tiles, gpu);
  if (!even && units * parts >= kMost) throw std::runtime_error("flash_cute: keys are cut into 2^30 parts or more");
  if (even) p.grain_blocks += static_cast<int>(units * blocks / kMost);
  if (p.known_to_be_alike()) share_out_alike(p, config);
  auto whole_units = [&](const Divisor& share) { return share.value % p.alike.of_unit.value == 0; };
  const bool late = p.alike.first_ctas < p.ctas_of_head;
  const bool whole = even && p.alike.known && whole_units(p.alike.share) && (!late || whole_units(p.alike.small_share));
  if (parts <= 1 || whole) return;
  p.slots = static_cast<int>(even ? 2 * int64_t(p.ctas()) : units * parts);
}

std::string decode_parts(std::string lengths, int64_t seqlen_q, int64_t heads, int64_t heads_k, int64_t num_splits,
                         int64_t split_size, int64_t capacity, int64_t sms, int64_t ctas) {
  if (std::min({seqlen_q, num_splits, split_size, capacity}) < 0 || std::min({heads, heads_k, sms, ctas}) < 1) {
    throw std::invalid_argument("flash_cute: sizes must not be negative, heads, heads_k, sms and ctas at least 1");
  }
  std::vector<int> rows;
  std::stringstream in(lengths);
  for (std::string length; std::getline(in, length, ',');) rows.push_back(std::stoi(length));
  constexpr int kRows = 16, kKeys = 128;
  KernelConfig config{Op::Decode, Arch::Sm80, DType::BF16, Tier::Rich, 128, 128, kRows, kKeys, 3, 8, 1, 1};
  config.ctas = static_cast<int>(ctas);
  DecodeProblem p{};
  p.fwd.batch = static_cast<int>(rows.size());
  p.fwd.heads = static_cast<int>(heads);
  p.fwd.heads_k = static_cast<int>(heads_k);
  p.fwd.seqlen_q = static_cast<int>(seqlen_q);
  p.fwd.seqlen_k = p.fwd.pages.size = static_cast<int>(capacity);
  const bool full = std::count(rows.begin(), rows.end(), capacity) == p.fwd.batch;
  p.cache.lengths = full ? nullptr : rows.data();
  p.num_splits = static_cast<int>(num_splits);
  p.split_size = static_cast<int>(split_size);
  plan_decode(p, config, Device{.sms = static_cast<int>(sms)});

  int of_head = 0, of_first_unit = 1;
  for (int b = p.fwd.batch - 1; b >= 0; --b) {
    const Grains grains(p, cached_seq(p, b), config.block_m, config.block_n);
    of_head += grains.of_head;
    of_first_unit = grains.of_unit;
  }
  const Shares shares = p.alike.known ? Shares::foreseen(p) : Shares::of(p, of_head, of_first_unit);
  std::ostringstream out;
  out << p.slots;
  for (int cta = 0; cta < p.ctas(); ++cta) {
    Parts<kRows, kKeys> parts(p, shares, cta, {0, 0});
    for (Part part = parts.next(p); part.grains > 0; part = parts.next(p)) {
      out << '\n'
          << cta << ' ' << part.b << ' ' << part.head_k << ' ' << part.row << ' ' << part.first << ' ' << part.last
          << ' ' << part.all.count << ' ' << part.index << ' ' << part.all.slot(part.index);
    }
  }
  return out.str();
}

}  // namespace flash_cute
