#include <doctest/doctest.h>

#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "core/card.h"
#include "core/layout/decode_scheduler.h"
#include "core/rows.h"
#include "draw.h"
#include "kernels/sm90/family.h"

using namespace flash_cute;

namespace {

constexpr int kRows = 16, kKeys = 64;

// A call over a cache, with the tensors that its problem points to.
struct Call {
  std::vector<int> lengths, leftpad, cu_q;
  DecodeParams p{};
  KernelConfig config{Op::Decode, Arch::Sm80, DType::BF16, Tier::Rich, 128, 128, kRows, kKeys, 3, 8, 1, 1};
  Device gpu{};

  explicit Call(Draw& draw) {
    FwdProblem& f = p.fwd;
    f.batch = draw.from(0, 20);
    f.heads_k = draw.of({1, 2, 3, 8});
    f.heads = f.heads_k * draw.of({1, 4, 7});
    f.seqlen_q = draw.of({1, 1, 2, 9, 40});
    f.seqlen_k = f.pages.size = draw.of({0, 1, 63, 64, 65, 700, 9000});
    f.band = draw.band(draw.of({0, 100, 10000}));
    if (draw.flag()) fill(draw, lengths, p.cache.lengths, f.seqlen_k);
    if (draw.of({0, 0, 1})) fill(draw, leftpad, p.cache.leftpad, f.seqlen_k);
    if (draw.of({0, 0, 1})) {
      cu_q.push_back(0);
      for (int b = 0; b < f.batch; ++b) cu_q.push_back(cu_q.back() + draw.from(0, f.seqlen_q));
      f.varlen.cu_q = cu_q.data();
    }
    f.total_q = f.varlen.cu_q != nullptr ? cu_q.back() : int64_t(f.batch) * f.seqlen_q;
    const int kind = draw.from(0, 3);
    if (kind == 1) p.num_splits = draw.from(1, 9);
    if (kind == 2) p.split_size = draw.from(1, 1000);
    config.ctas = draw.from(1, 2);
    gpu.sms = draw.of({1, 7, 132});
    plan();
  }
  Call(const Call&) = delete;

  void plan() { static_cast<DecodePlan&>(p) = make_plan(config, p, gpu); }

  // As the kernel does it: by what the host has planned, or by the lengths.
  CtaChunks chunks() const {
    if (p.uniform.known) return CtaChunks::planned(p);
    int per_head = 0;
    for (int b = 0; b < p.fwd.batch; ++b) per_head += quanta(b).per_head;
    return CtaChunks::of(p, per_head, p.fwd.batch == 0 ? 1 : quanta(0).per_tile);
  }
  Quanta quanta(int b) const { return Quanta(p, cached_seq(p, b), kRows, kKeys); }

 private:
  void fill(Draw& draw, std::vector<int>& values, const int*& pointer, int most) const {
    for (int b = 0; b < p.fwd.batch; ++b) values.push_back(draw.from(-1, most + 1));
    pointer = values.data();
  }
};

std::ostream& operator<<(std::ostream& out, const Call& call) {
  return out << call.p.fwd << " lengths " << listed(call.lengths) << "leftpad " << listed(call.leftpad) << "cu_q "
             << listed(call.cu_q) << "num_splits " << call.p.num_splits << " split_size " << call.p.split_size
             << " sms " << call.gpu.sms << " ctas " << call.config.ctas;
}

}  // namespace

TEST_CASE("splits cover the visible blocks of each work tile once, in order, in slots of their own") {
  Draw draw;
  int cut = 0;
  for (int n = 0; n < 2000; ++n) {
    const Call call(draw);
    const DecodeParams& p = call.p;
    CAPTURE(call);
    const CtaChunks chunks = call.chunks();
    std::map<std::tuple<int, int, int>, std::map<int, KvSplit>> tiles;  // by sequence, kv head and row; by index
    std::set<int> slots;
    bool alone = true;  // in its slot
    for (int cta = 0; cta < p.ctas(); ++cta) {
      SplitIterator<kRows, kKeys> splits(p, chunks, cta, {0, 0});
      for (KvSplit s = splits.next(p); s.quanta > 0; s = splits.next(p)) {
        alone &= tiles[{s.b, s.head_k, s.row}].emplace(s.index, s).second;
        if (s.all.count == 1) continue;
        const int slot = s.all.slot(s.index);
        alone &= slots.insert(slot).second && 0 <= slot && slot < p.slots;
        ++cut;
      }
    }
    CHECK(alone);
    size_t work_tiles = 0;
    for (int b = 0; b < p.fwd.batch; ++b) work_tiles += size_t(p.fwd.heads_k) * call.quanta(b).tiles;
    CHECK(tiles.size() == work_tiles);
    for (const auto& [place, splits] : tiles) {
      const Quanta quanta = call.quanta(std::get<0>(place));
      int index = 0, block = quanta.first_block;
      bool in_order = true;
      for (const auto& [number, split] : splits) {
        in_order &= number == index++ && split.first == block && split.all.count == static_cast<int>(splits.size());
        in_order &= split.first < split.last || splits.size() == 1;
        block = split.last;
      }
      CHECK(in_order);
      CHECK(block == quanta.first_block + quanta.blocks);
    }
  }
  CHECK(cut > 1000);
}

TEST_CASE("blocks of a work tile hold all keys that its queries see") {
  Draw draw;
  for (int n = 0; n < 300; ++n) {
    const Call call(draw);
    CAPTURE(call);
    for (int b = 0; b < call.p.fwd.batch; ++b) {
      const SeqInfo seq = cached_seq(call.p, b);
      if (seq.q.length == 0) continue;
      const Quanta quanta = call.quanta(b);
      const int begin = quanta.first_block * kKeys, end = begin + quanta.blocks * kKeys;
      bool inside = true, used = quanta.blocks == 0;
      for (int i = 0; i < seq.q.length; ++i) {
        for (int j = 0; j < seq.k.length; j += 1 + j % 7) {  // not all: caches are long
          if (!sees(seq, call.p.fwd.band, i, j)) continue;
          inside &= begin <= j && j < end;
        }
      }
      for (int j = begin; j < begin + kKeys && !used; ++j) {
        for (int i = 0; i < seq.q.length && !used; ++i) used = sees(seq, call.p.fwd.band, i, j);
      }
      CHECK(inside);
      CHECK(used);
    }
  }
}

TEST_CASE("clusters run at once, and no others of fewer CTAs take as little time") {
  Draw draw;
  for (int n = 0; n < 2000; ++n) {
    Call call(draw);
    call.config.arch = Arch::Sm90;
    call.config.cluster = draw.of({1, 4, 8});
    for (int ctas = 1; ctas <= kMostClustered; ++ctas) call.gpu.clusters[ctas] = draw.from(0, 132 / ctas);
    CAPTURE(call);
    call.plan();
    const sm90::TileShares chosen = sm90::shares_of_tile(call.p, call.config, call.gpu);
    const int rows = call.p.fwd.seqlen_q * call.p.group.value, tiles = (rows + kRows - 1) / kRows;
    const int work_tiles = tiles * call.p.fwd.heads_k * call.p.fwd.batch;
    auto blocks = [&](int parts) { return ((call.p.fwd.seqlen_k + kKeys - 1) / kKeys + parts - 1) / parts; };
    if (work_tiles == 0) {
      CHECK(chosen.parts() == 1);
      continue;
    }
    CHECK(call.p.cluster_ctas == chosen.ctas);
    CHECK(call.p.ctas() == work_tiles * chosen.parts());
    CHECK(call.p.slots == (chosen.splits > 1 ? work_tiles * chosen.splits : 0));
    CHECK((call.config.head_dim_v >> call.p.clusters.column_bits) <= chosen.ctas);
    CHECK((chosen.parts() == 1 || work_tiles * chosen.splits <= call.gpu.clusters[chosen.ctas]));
    for (int other = 1; other <= call.config.cluster; ++other) {
      if (other > 1 && work_tiles > call.gpu.clusters[other]) continue;
      CAPTURE(other);
      CHECK(blocks(chosen.parts()) <= blocks(other));
      CHECK((chosen.splits > 1 || other >= chosen.ctas || blocks(other) > blocks(chosen.ctas)));
    }
  }
}

TEST_CASE("a long cache of few work tiles has several clusters each") {
  Draw draw;
  Call call(draw);
  call.p.fwd = {};
  call.p.cache = {};
  call.p.fwd.batch = call.p.fwd.heads_k = 1;
  call.p.fwd.heads = 8;
  call.p.fwd.seqlen_q = 1;
  call.p.fwd.head_dim = call.p.fwd.head_dim_v = 128;
  call.config.arch = Arch::Sm90;
  call.config.cluster = 8;
  call.gpu = kH100;
  for (const int keys : {64, 512, 4096, 32768}) {
    call.p.fwd.seqlen_k = call.p.fwd.pages.size = keys;
    call.plan();
    CHECK((call.p.clusters.splits > 1) == (keys > 512));
  }
}

TEST_CASE("what no plan can number is refused") {
  Draw draw;
  Call call(draw);
  FwdProblem& f = call.p.fwd;
  f.batch = 1 << 20;
  f.heads = f.heads_k = 1 << 10;
  f.seqlen_q = 1;
  CHECK_THROWS_WITH(call.plan(), doctest::Contains("2^30 tiles of queries"));
  // 2^32 tiles of queries of no sequence; 2^64 of all.
  for (const auto& [batch, heads, queries] : {std::tuple{0, 1 << 16, 1 << 20}, {1 << 12, 1 << 28, 1 << 28}}) {
    for (const Arch arch : {Arch::Sm80, Arch::Sm90}) {
      Call absurd(draw);
      absurd.config.arch = arch;
      absurd.p.fwd.batch = batch;
      absurd.p.fwd.heads = heads;
      absurd.p.fwd.heads_k = 1;
      absurd.p.fwd.seqlen_q = queries;
      CHECK_THROWS_WITH(absurd.plan(), doctest::Contains("2^30 tiles of queries"));
    }
  }
  f.batch = 1 << 10;
  f.seqlen_k = 1 << 20;
  call.p.num_splits = 0;
  call.p.split_size = 1;
  CHECK_THROWS_WITH(call.plan(), doctest::Contains("2^30 splits"));
}
