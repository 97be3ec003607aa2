// How decode shares blocks of keys out among CTAs. tests/cpp/decode.cpp has what holds of every plan.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "core/layout/decode_scheduler.h"
#include "core/workspace.h"
#include "draw.h"

using namespace flash_cute;

namespace {

constexpr int kRows = 16, kKeys = 128, kSms = 132;
constexpr int kOneSplit = CtaChunks::kOneSplit, kSplitCost = CtaChunks::kSplitCost, kIdle = CtaChunks::kIdle;

struct Shape {
  std::vector<int> lengths;
  int heads_k = 8, group = 4, seqlen_q = 1;
  int num_splits = 0, split_size = 0;
  bool full = true;  // caches have no unused rows, so that the host knows the lengths
  int ctas = 1;      // of an SM
};

struct Taken {
  int cta;
  KvSplit split;

  int blocks() const { return split.last - split.first; }
};

struct Shares {
  int slots;
  std::vector<Taken> taken;

  std::map<int, int> blocks_of_ctas() const {
    std::map<int, int> blocks;
    for (const Taken& one : taken) blocks[one.cta] += one.blocks();
    return blocks;
  }
  std::map<int, int> splits_of_ctas() const {
    std::map<int, int> splits;
    for (const Taken& one : taken) ++splits[one.cta];
    return splits;
  }
  std::set<int> splits_of_tiles() const {
    std::set<int> counts;
    for (const Taken& one : taken) counts.insert(one.split.all.count);
    return counts;
  }
};

Shares share_out(const Shape& shape) {
  KernelConfig config{Op::Decode, Arch::Sm80, DType::BF16, Tier::Rich, 128, 128, kRows, kKeys, 3, 8, 1, 1};
  config.ctas = shape.ctas;
  DecodeProblem p{};
  p.fwd.batch = static_cast<int>(shape.lengths.size());
  p.fwd.heads_k = shape.heads_k;
  p.fwd.heads = shape.heads_k * shape.group;
  p.fwd.seqlen_q = shape.seqlen_q;
  const int longest = *std::max_element(shape.lengths.begin(), shape.lengths.end());
  p.fwd.seqlen_k = p.fwd.pages.size = longest + (shape.full ? 0 : 77);
  p.cache.lengths = shape.full ? nullptr : shape.lengths.data();
  p.num_splits = shape.num_splits;
  p.split_size = shape.split_size;
  Device gpu{};
  gpu.sms = kSms;
  const DecodeParams params{p, make_plan(config, p, gpu), {}};
  int per_head = 0, per_first_tile = 1;
  for (int b = p.fwd.batch - 1; b >= 0; --b) {
    const Quanta quanta(params, cached_seq(params, b), kRows, kKeys);
    per_head += quanta.per_head;
    per_first_tile = quanta.per_tile;
  }
  const CtaChunks chunks =
      params.uniform.known ? CtaChunks::planned(params) : CtaChunks::of(params, per_head, per_first_tile);
  Shares shares{params.slots, {}};
  for (int cta = 0; cta < params.ctas(); ++cta) {
    SplitIterator<kRows, kKeys> splits(params, chunks, cta, {0, 0});
    for (KvSplit split = splits.next(params); split.quanta > 0; split = splits.next(params)) {
      shares.taken.push_back({cta, split});
    }
  }
  return shares;
}

std::vector<int> draw_lengths(Draw& draw) {
  std::vector<int> lengths;
  for (int n = draw.from(1, 40); n > 0; --n) lengths.push_back(draw.from(0, draw.of({10, 1000, 20000})));
  return lengths;
}

}  // namespace

TEST_CASE("CTAs of a head have even shares, and those of each head the same") {
  Draw draw;
  for (int n = 0; n < 100; ++n) {
    Shape shape{draw_lengths(draw)};
    shape.heads_k = draw.of({1, 2, 8});
    shape.group = draw.of({1, 4, 20});
    shape.seqlen_q = draw.of({1, 1, 3, 50});
    shape.full = false;
    std::map<int, int> work;
    int all = 0;
    for (const Taken& one : share_out(shape).taken) {
      const int blocks = std::max(1, one.blocks());
      work[one.cta] += blocks;
      all += blocks;
    }
    const int ctas = kSms / shape.heads_k * shape.heads_k, share = std::max(kOneSplit, (all + ctas - 1) / ctas);
    CAPTURE(listed(shape.lengths));
    int largest = 0, smaller = 0;
    bool same = true;
    for (const auto& [cta, blocks] : work) largest = std::max(largest, blocks);
    for (const auto& [cta, blocks] : work) {
      smaller += cta % shape.heads_k == 0 && blocks < largest;
      same &= blocks == work[cta / shape.heads_k * shape.heads_k];
    }
    CHECK(largest <= share + kSplitCost);
    CHECK(smaller <= 1);
    CHECK(same);
  }
}

TEST_CASE("shares end with the work tiles of equal sequences") {
  struct Row {
    int batch, length, splits;
  };
  for (const Row& row : {Row{16, 8192, 1}, Row{1, 131072, 16}, Row{128, 2048, 1}, Row{4, 8192, 4}}) {
    CAPTURE(row.batch);
    Shape shape{std::vector<int>(row.batch, row.length)};
    shape.full = false;
    CHECK(share_out(shape).splits_of_tiles() == std::set<int>{row.splits});
  }
}

TEST_CASE("shares of a uniform batch are even but for tail CTAs") {
  Draw draw;
  for (int n = 0; n < 20; ++n) {
    Shape shape{std::vector<int>(draw.from(1, 200), draw.of({1, 300, 5000, 70000}))};
    shape.heads_k = draw.of({1, 2, 8});
    shape.group = draw.of({1, 4, 20});
    shape.seqlen_q = draw.of({1, 1, 3, 50});
    int all = 0, most = 0;
    for (const auto& [cta, blocks] : share_out(shape).blocks_of_ctas()) {
      all += blocks;
      most = std::max(most, blocks);
    }
    const int ctas = kSms / shape.heads_k * shape.heads_k, share = std::max(kOneSplit, (all + ctas - 1) / ctas);
    CAPTURE(shape.lengths.size());
    CAPTURE(shape.lengths[0]);
    CHECK(most <= share + kSplitCost + share / kIdle);
  }
}

TEST_CASE("tail CTAs have small shares, of caches with much to read") {
  struct Row {
    int batch, length, heads_k;
  };
  for (const Row& row : {Row{128, 8192, 8}, Row{16, 8192, 32}, Row{1, 1 << 20, 4}, Row{77, 5000, 8}}) {
    CAPTURE(row.batch);
    Shape shape{std::vector<int>(row.batch, row.length), row.heads_k};
    const std::map<int, int> work = share_out(shape).blocks_of_ctas();
    const int first = kSms / row.heads_k * row.heads_k, tails = static_cast<int>(work.size()) - first;
    int all = 0;
    for (const auto& [cta, blocks] : work) all += blocks;
    const int share = (all + first - 1) / first;
    bool even = true, small = true;
    for (const auto& [cta, blocks] : work) {
      if (cta < first) {
        even &= blocks == share - share / 16;
      } else {
        small &= 0 < blocks && blocks <= share / 8;
      }
    }
    CHECK(even);
    CHECK(small);
    CHECK(first * 8 / 16 <= tails + row.heads_k);
  }
  for (const int ctas : {1, 2}) {  // tail CTAs begin with shares of 128 blocks
    const int of_head = kSms * ctas / 8;
    for (const int share : {127, 128}) {
      Shape shape{std::vector<int>(of_head, share * kKeys)};
      shape.ctas = ctas;
      const int tails = share < 128 ? 0 : (of_head * 8 + 15) / 16;
      CHECK(share_out(shape).blocks_of_ctas().size() == size_t(of_head + tails) * 8);
    }
  }
}

TEST_CASE("many long work tiles of a uniform batch have a CTA each, two in the last wave") {
  constexpr int kLong = 8, kWaves = 8;
  for (const int heads_k : {16, 32}) {
    Shape shape{std::vector<int>(kSms, kLong * kKeys), heads_k, 32 / heads_k};
    shape.ctas = 2;
    const int last = (2 * kSms + heads_k - 1) / heads_k;  // work tiles of each head
    const Shares shares = share_out(shape);
    CHECK(shares.taken.size() == size_t(kSms + last) * heads_k);
    CHECK(shares.splits_of_ctas().size() == shares.taken.size());
    bool halved = true;
    for (const Taken& one : shares.taken) {
      const int count = one.split.b >= kSms - last ? 2 : 1;
      halved &= one.split.all.count == count && one.blocks() == kLong / count;
    }
    CHECK(halved);
    auto most_of_cta = [&](int length, int batch, int ctas) {
      Shape other{std::vector<int>(batch, length), heads_k, 32 / heads_k};
      other.ctas = ctas;
      int most = 0;
      for (const auto& [cta, splits] : share_out(other).splits_of_ctas()) most = std::max(most, splits);
      return most;
    };
    CHECK(most_of_cta((kLong + 1) * kKeys, kSms, 2) == 1);
    CHECK(most_of_cta(kLong * kKeys, kSms, 1) > 1);
    CHECK(most_of_cta((kLong - 1) * kKeys, kSms, 2) > 1);
    CHECK(most_of_cta(kLong * kKeys, kWaves * 2 * kSms / heads_k - 1, 2) > 1);
  }
}

TEST_CASE("num_splits is the most that a work tile has") {
  Draw draw;
  for (const int splits : {1, 2, 7, 133}) {
    for (int n = 0; n < 50; ++n) {
      Shape shape{draw_lengths(draw), 2, 4, draw.of({1, 3, 50})};
      shape.num_splits = splits;
      shape.full = false;
      CHECK(*share_out(shape).splits_of_tiles().rbegin() <= splits);
    }
  }
}

TEST_CASE("with split_size a sequence is cut as it is alone") {
  Draw draw;
  for (const int size : {1, 64, 200, 1000000}) {
    Shape shape{draw_lengths(draw), 2, 4, 2};
    shape.split_size = size;
    shape.full = false;
    auto cuts = [](const Shares& shares, int b) {
      std::multiset<std::vector<int>> of_sequence;
      for (const auto& [cta, s] : shares.taken) {
        if (s.b == b) of_sequence.insert({s.head_k, s.row, s.first, s.last, s.all.count, s.index});
      }
      return of_sequence;
    };
    const Shares together = share_out(shape);
    for (int b = 0; b < static_cast<int>(shape.lengths.size()); ++b) {
      Shape alone = shape;
      alone.lengths = {shape.lengths[b]};
      CHECK(cuts(together, b) == cuts(share_out(alone), 0));
    }
  }
}

TEST_CASE("short keys are one split, and caches of one block need no slots") {
  Shape shape{{kOneSplit * kKeys}};
  shape.full = false;
  CHECK(share_out(shape).splits_of_tiles() == std::set<int>{1});
  shape.lengths = {(kOneSplit + 1) * kKeys};
  CHECK(share_out(shape).splits_of_tiles() == std::set<int>{3});
  CHECK(share_out({{kKeys, kKeys, kKeys}}).slots == 0);
}
