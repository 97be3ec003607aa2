#include "core/decode_plan.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "kernels/common/shares.h"

namespace flash_cute {

static bool known_to_be_alike(const DecodeProblem& p) {
  return p.cache.lengths == nullptr && p.cache.leftpad == nullptr && p.fwd.dense() && p.added.cu == nullptr &&
         p.fwd.batch > 0;
}

static AlikeSequences alike_sequences(const DecodeProblem& p, const KernelConfig& config) {
  const Grains grains(p, cached_seq(p, 0), config.block_m, config.block_n);
  const Shares shares = Shares::of(p, p.fwd.batch * grains.of_head, grains.of_unit, true);
  return {true, Divisor(grains.of_unit), Divisor(std::max(1, grains.of_head)), Divisor(shares.size)};
}

void plan_decode(DecodeProblem& p, const KernelConfig& config, int sms) {
  constexpr int64_t kMost = int64_t{1} << 30;  // grains, and slots
  constexpr int kTurns = 8;  // of all CTAs at a time, from which on units have a CTA each
  const FwdProblem& f = p.fwd;
  p.group = Divisor(f.heads / f.heads_k);
  p.page_size = Divisor(std::max(1, f.pages.size));
  const bool even = p.even_shares();
  const int64_t tiles = (int64_t(f.seqlen_q) * p.group.value + config.block_m - 1) / config.block_m;
  const int64_t units = f.batch * f.heads_k * tiles;
  const int64_t blocks = (int64_t(f.seqlen_k) + config.block_n - 1) / config.block_n;
  int64_t parts = blocks;
  if (p.num_splits > 0) parts = std::min<int64_t>(blocks, p.num_splits);
  if (p.split_size > 0) {
    const int64_t size = (p.split_size + config.block_n - 1) / config.block_n;
    parts = (blocks + size - 1) / size;
  }
  p.ctas_of_head = std::max(1, sms * config.ctas / std::max(1, f.heads_k));
  p.grain_blocks = 1;
  p.slots = 0;
  if (units >= kMost) throw std::runtime_error("flash_cute: 2^30 tiles of queries or more");
  if (even) p.grain_blocks += static_cast<int>(units * blocks / kMost);
  if (known_to_be_alike(p)) {
    if (even && units >= kTurns * sms * config.ctas) p.ctas_of_head = static_cast<int>(f.batch * tiles);
    p.alike = alike_sequences(p, config);
  }
  const bool whole = even && p.alike.known && p.alike.share.value % p.alike.of_unit.value == 0;
  if (parts <= 1 || whole) return;
  const int64_t slots = even ? 2 * int64_t(p.ctas()) : units * parts;
  if (slots >= kMost) throw std::runtime_error("flash_cute: keys are cut into 2^30 parts or more");
  p.slots = static_cast<int>(slots);
}

std::string decode_parts(std::string lengths, int64_t seqlen_q, int64_t heads, int64_t heads_k, int64_t num_splits,
                         int64_t split_size, int64_t capacity, int64_t sms) {
  std::vector<int> rows;
  std::stringstream in(lengths);
  for (std::string length; std::getline(in, length, ',');) rows.push_back(std::stoi(length));
  constexpr KernelConfig config{Op::Decode, Arch::Sm80, DType::BF16, Tier::Rich, 128, 128, 16, 128, 3, 8, 1, 1};
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
  plan_decode(p, config, static_cast<int>(sms));

  int of_head = 0, of_first_unit = 1;
  for (int b = p.fwd.batch - 1; b >= 0; --b) {
    const Grains grains(p, cached_seq(p, b), config.block_m, config.block_n);
    of_head += grains.of_head;
    of_first_unit = grains.of_unit;
  }
  const Shares shares = Shares::of(p, of_head, of_first_unit, p.alike.known);
  std::ostringstream out;
  out << p.slots;
  for (int cta = 0; cta < p.ctas(); ++cta) {
    Parts<config.block_m, config.block_n> parts(p, shares, cta, {0, 0});
    for (Part part = parts.next(p); part.grains > 0; part = parts.next(p)) {
      out << '\n'
          << cta << ' ' << part.b << ' ' << part.head_k << ' ' << part.row << ' ' << part.first << ' ' << part.last
          << ' ' << part.all.count << ' ' << part.index << ' ' << part.all.slot(part.index);
    }
  }
  return out.str();
}

}  // namespace flash_cute
