#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <tuple>
#include <vector>

#include "core/layout/backward_work.h"
#include "core/layout/kv_tiles.h"
#include "draw.h"

using namespace flash_cute;

namespace {

template <int kBlockN>
struct KvList : TileRange {
  const int* list;

  int first_key(int n) const { return list[n] * kBlockN; }
  int past_keys() const { return empty() ? 0 : first_key(end - 1) + kBlockN; }
  int step(int n) const { return first_key(n) - (n + 1 < end ? first_key(n + 1) : past_keys()); }
};
static_assert(KvTiles<KvList<16>>);

template <int kBlockN, int kGroups>
struct SharedKvList {
  static inline std::vector<int> of_tile;

  RowSpan keys;
  int count;
  const int* list;
  TileRange ranges[kGroups];

  SharedKvList(const FwdParams& p, const SeqInfo& seq, const QueryGroups& queries, KeySplit split)
      : keys(visible_keys(seq, p.band, queries.of_cluster.row, queries.rows)) {
    const int all = static_cast<int>(of_tile.size());
    const auto [begin, end] = split.of(all, p.num_splits);
    count = end - begin;
    list = of_tile.data() + begin;
    for (int i = 0; i < kGroups; ++i) {
      const int row = queries.tile.row + 64 * i % queries.rows_of_head;
      if (row >= seq.q.length) {
        ranges[i] = {};
        continue;
      }
      const TileRange seen = key_tiles(seq, p.band, row, 64, kBlockN);
      auto place = [&](int tile) { return static_cast<int>(std::lower_bound(list, list + count, tile) - list); };
      ranges[i] = {place(seen.begin), place(seen.end), place(seen.full_begin), place(seen.full_end)};
    }
  }

  int first_key(int n) const { return list[n] * kBlockN; }
  KvList<kBlockN> of_group(int group) const { return {ranges[group], list}; }
  bool ends_in_half(int) const { return false; }
};
static_assert(SharedKvTiles<SharedKvList<16, 2>>);

constexpr int kQueries = 8, kKeys = 16;

struct QueryList : TileRange {
  struct OfKeys {
    std::vector<int> index, rank;
  };
  static inline std::vector<OfKeys> lists;
  static inline std::vector<int> adding;

  const OfKeys* list;

  static QueryList of(const FwdProblem&, const SeqInfo&, const KeyTile& keys) {
    const OfKeys& list = lists[keys.index];
    return {{0, static_cast<int>(list.index.size()), 0, 0}, &list};
  }

  int index(int n) const { return list->index[n]; }
  int first_query(int n) const { return index(n) * kQueries; }

  struct Turn {
    int semaphore, ascending, adding;

    int rank(const FwdProblem&, const SeqInfo&, const KeyTile& keys) const {
      return keys.late_first ? adding - 1 - ascending : ascending;
    }
  };
  Turn turn(int n) const { return {index(n), list->rank[n], adding[index(n)]}; }

  static bool any_adds(const FwdProblem&, const SeqInfo&, const QueryTile& queries) {
    return adding[queries.row / kQueries] > 0;
  }
};
static_assert(QueryTiles<QueryList>);

template <KvTiles Tiles>
void check_moves(const Tiles& tiles) {
  int key = tiles.past_keys();
  bool same = true;
  for (int n = tiles.end - 1; n >= tiles.begin; --n) {
    key += tiles.step(n);
    same &= key == tiles.first_key(n);
  }
  CHECK(same);
}

template <int kBlockN, int kGroups>
struct SharedCase {
  FwdParams p{};
  bool of_tokens;  // all groups that have rows have the queries of the tile
  SeqInfo seq{SeqSpan{}, SeqSpan{}};
  QueryGroups queries;
  int splits, tiles_of_split;

  explicit SharedCase(Draw& draw, bool of_tokens = false)
      : of_tokens(of_tokens), seq({0, draw.from(1, 500)}, {0, draw.from(0, 400)}), splits(draw.of({1, 1, 2, 3})) {
    constexpr int kRows = 64 * kGroups, kMostTiles = (400 + kBlockN - 1) / kBlockN;
    p.band = draw.band(200);
    p.num_splits = splits;
    tiles_of_split = draw.flag() ? 0 : (kMostTiles + splits - 1) / splits + draw.from(0, 3);
    const int cluster = draw.from(1, 2), rank = draw.from(0, cluster - 1);
    if (of_tokens) {
      const int tokens = draw.from(1, kRows), row = draw.from(0, (seq.q.length - 1) / tokens) * tokens;
      queries = {{row, 0, 0}, tokens, {row, 0, 0}, kRows};
      p.pack_gqa = kRows / tokens;
      return;
    }
    const int first = draw.from(0, (seq.q.length - 1) / (cluster * kRows)) * cluster * kRows;
    queries = {
        {first, 0, 0}, cluster * kRows, {first + rank * kRows, 0, 0}, cluster > 1 ? kRows : draw.of({kRows, 64})};
  }

  int row_of_group(int group) const { return queries.tile.row + (of_tokens ? 0 : 64 * group % queries.rows_of_head); }
  int past_row(int group) const {
    const int first = row_of_group(group), past = std::min(first + (of_tokens ? queries.rows : 64), seq.q.length);
    const bool is_empty = of_tokens && (past - first) * p.pack_gqa <= 64 * group;
    return is_empty ? first : past;
  }

  template <SharedKvTiles Tiles>
  std::set<std::pair<int, int>> pairs(int group) const {
    std::set<std::pair<int, int>> met;
    const int row = row_of_group(group);
    bool loaded = true, once = true, full = true, half = true;
    for (int split = 0; split < splits; ++split) {
      const Tiles shared(p, seq, queries, {split, tiles_of_split});
      const KvTiles auto tiles = shared.of_group(group);
      check_moves(tiles);
      for (int n = 0; n < shared.count; ++n)
        loaded &= 0 <= shared.first_key(n) && shared.first_key(n) < shared.keys.last;
      loaded &= tiles.empty() || (0 <= tiles.begin && tiles.end <= shared.count);
      for (int n = tiles.end - 1; n >= tiles.begin; --n) {
        const int key = tiles.first_key(n),
                  seen = n == tiles.end - 1 && shared.ends_in_half(group) ? kBlockN / 2 : kBlockN;
        loaded &= key == shared.first_key(n);
        for (int i = row; i < past_row(group); ++i) {
          for (int j = key; j < key + kBlockN; ++j) {
            const bool sees_it = sees(seq, p.band, i, j);
            full &= !tiles.full(n) || sees_it;
            half &= !sees_it || j < key + seen;
            loaded &= !sees_it || (shared.keys.first <= j && j < shared.keys.last);
            if (sees_it) once &= met.emplace(i, j).second;
          }
        }
      }
    }
    CHECK(loaded);
    CHECK(once);
    CHECK(full);
    CHECK(half);
    return met;
  }

  std::set<std::pair<int, int>> expected(int group, const std::vector<int>& blocks) const {
    std::set<std::pair<int, int>> seen;
    const int row = row_of_group(group);
    for (int i = row; i < past_row(group); ++i) {
      for (const int block : blocks) {
        for (int j = block * kBlockN; j < (block + 1) * kBlockN; ++j) {
          if (sees(seq, p.band, i, j)) seen.emplace(i, j);
        }
      }
    }
    return seen;
  }
};

template <int kBlockN>
void check_tokens(Draw& draw) {
  const SharedCase<kBlockN, 2> c(draw, true);
  CAPTURE(c.seq.q.length);
  CAPTURE(c.seq.k.length);
  CAPTURE(c.p.band);
  CAPTURE(c.queries.tile.row);
  CAPTURE(c.queries.rows);
  std::vector<int> all((c.seq.k.length + kBlockN - 1) / kBlockN);
  std::iota(all.begin(), all.end(), 0);
  for (int group = 0; group < 2; ++group) {
    CHECK(c.template pairs<SharedKvOfTokens<kBlockN>>(group) == c.expected(group, all));
  }
}

template <int kBlockN, int kGroups>
void check_shared(Draw& draw) {
  const SharedCase<kBlockN, kGroups> c(draw);
  CAPTURE(c.seq.q.length);
  CAPTURE(c.seq.k.length);
  CAPTURE(c.p.band);
  CAPTURE(c.queries.of_cluster.row);
  CAPTURE(c.queries.rows);
  CAPTURE(c.queries.tile.row);
  CAPTURE(c.queries.rows_of_head);
  CAPTURE(c.splits);
  std::vector<int> all((c.seq.k.length + kBlockN - 1) / kBlockN), some;
  std::iota(all.begin(), all.end(), 0);
  const RowSpan keys = visible_keys(c.seq, c.p.band, c.queries.of_cluster.row, c.queries.rows);
  for (const int block : all) {
    if (draw.flag() && block * kBlockN < keys.last) some.push_back(block);
  }
  SharedKvList<kBlockN, kGroups>::of_tile = some;
  for (int group = 0; group < kGroups; ++group) {
    const bool exists = c.row_of_group(group) < c.seq.q.length;
    CAPTURE(group);
    const auto of_interval = c.template pairs<SharedKvInterval<kBlockN, kGroups>>(group);
    CHECK(of_interval == (exists ? c.expected(group, all) : std::set<std::pair<int, int>>{}));
    const auto of_list = c.template pairs<SharedKvList<kBlockN, kGroups>>(group);
    CHECK(of_list == (exists ? c.expected(group, some) : std::set<std::pair<int, int>>{}));
  }
}

BwdParams draw_backward(Draw& draw) {
  BwdParams p{};
  FwdProblem& f = p.fwd;
  f.batch = draw.from(1, 2);
  f.heads_k = draw.from(1, 3);
  f.heads = f.heads_k * draw.of({1, 2, 4});
  f.seqlen_q = draw.from(1, 150);
  f.seqlen_k = draw.from(1, 150);
  f.band = draw.band(100);
  p.dq_accumulate = draw.flag() ? DqAccumulate::Serialized : DqAccumulate::FirstStores;
  const int all_heads = f.heads_k * f.batch;
  const HeadSets sets = HeadSets::of(draw.from(1, all_heads), all_heads, draw.from(1, all_heads));
  p.order = {draw.from(1, 6), sets, draw.flag(), draw.flag(), draw.flag()};
  const int tiles = (f.seqlen_k + kKeys - 1) / kKeys * f.heads_k * f.batch;
  p.splits = {f.heads / f.heads_k % 2 == 0 ? draw.from(1, 2) : 1, draw.from(1, 3), draw.from(0, tiles)};
  p.sums_of_splits = p.splits.count() > 1;
  return p;
}

struct Visit {
  int batch, head, query_tile;
  auto operator<=>(const Visit&) const = default;
};

template <QueryTiles Tiles>
void check_backward(const BwdParams& p, const std::set<std::pair<int, int>>& expected) {
  const FwdProblem& f = p.fwd;
  const FastDivmod splits(p.splits.count());
  const int tiles = (f.seqlen_k + kKeys - 1) / kKeys * f.heads_k * f.batch;
  const int numbers = tiles + (p.sums_of_splits ? (tiles - p.splits.whole_tiles) * (p.splits.count() - 1) : 0);
  std::map<Visit, std::vector<int>> ranks, keys;
  bool same = true;
  for (int number = 0; number < numbers; ++number) {
    const BackwardWork<Tiles> work(p, splits, kKeys, number);
    uint32_t steps = 0;
    for (QueryStep step = work.first_step(); step.head < work.heads; step = work.after(step), ++steps) {
      const Visit visit{work.tile.batch, work.first_head + step.head, work.queries.index(step.m)};
      same &= work.queries.first_query(step.m) == visit.query_tile * kQueries;
      same &= work.queries.turn(step.m).semaphore == visit.query_tile;
      ranks[visit].push_back(work.queries.turn(step.m).rank(f, work.seq, work.tile));
      keys[visit].push_back(work.tile.index);
    }
    same &= steps == work.steps();
  }
  CHECK(same);
  for (int b = 0; b < f.batch; ++b) {
    for (int head = 0; head < f.heads; ++head) {
      for (int m = 0; m * kQueries < f.seqlen_q; ++m) {
        const Visit visit{b, head, m};
        std::vector<int> ascending(ranks[visit].size());
        std::iota(ascending.begin(), ascending.end(), 0);
        std::set<std::pair<int, int>> met;
        for (const int tile : keys[visit]) met.emplace(m, tile);
        const std::set<std::pair<int, int>> of_tile(expected.lower_bound({m, 0}), expected.lower_bound({m + 1, 0}));
        if (ranks[visit] != ascending) FAIL_CHECK("ranks of query tile " << m << ": " << listed(ranks[visit]));
        if (met != of_tile) FAIL_CHECK("key tiles of query tile " << m << ": " << listed(keys[visit]));
        const SeqInfo seq(f, b);
        if (Tiles::any_adds(f, seq, {m * kQueries, head, b}) == of_tile.empty()) FAIL_CHECK("any_adds of " << m);
      }
    }
  }
}

std::set<std::pair<int, int>> seen_tiles(const FwdProblem& f) {
  const SeqInfo seq(f, 0);
  std::set<std::pair<int, int>> seen;
  for (int i = 0; i < f.seqlen_q; ++i) {
    for (int j = 0; j < f.seqlen_k; ++j) {
      if (sees(seq, f.band, i, j)) seen.emplace(i / kQueries, j / kKeys);
    }
  }
  return seen;
}

}  // namespace

TEST_CASE("copies that only move come to each tile of keys") {
  Draw draw;
  for (int n = 0; n < 1000; ++n) {
    const SeqInfo seq({0, draw.from(1, 200)}, {0, draw.from(0, 200)});
    FwdProblem p{};
    p.band = draw.band(100);
    const int row = draw.from(0, (seq.q.length - 1) / 64) * 64;
    CAPTURE(seq.q.length);
    CAPTURE(seq.k.length);
    CAPTURE(p.band);
    CAPTURE(row);
    check_moves(KvInterval<16>::of(p, seq, {row, 0, 0}, 64));
    std::vector<int> list;
    for (int tile = 0; tile < 20; ++tile) {
      if (draw.flag()) list.push_back(tile);
    }
    CAPTURE(listed(list));
    check_moves(KvList<16>{{0, static_cast<int>(list.size()), 0, 0}, list.data()});
  }
}

TEST_CASE("groups of queries meet what they see in the tiles of keys that they share, of either kind") {
  Draw draw;
  for (int n = 0; n < 150; ++n) {
    check_shared<16, 2>(draw);
    check_shared<48, 3>(draw);
    check_shared<128, 2>(draw);
    check_tokens<64>(draw);
    check_tokens<128>(draw);
  }
}

TEST_CASE("backward visits each pair of tiles once, of either kind, and ranks follow the order of key tiles") {
  Draw draw;
  for (int n = 0; n < 400; ++n) {
    const BwdParams p = draw_backward(draw);
    const FwdProblem& f = p.fwd;
    CAPTURE(f);
    CAPTURE(p.order.sets.heads);
    CAPTURE(p.order.late_first);
    CAPTURE(p.splits.heads);
    CAPTURE(p.splits.queries);
    CAPTURE(p.splits.whole_tiles);
    const auto seen = seen_tiles(f);
    check_backward<QueryInterval<kQueries, kKeys>>(p, seen);
    const int query_tiles = (f.seqlen_q + kQueries - 1) / kQueries, key_tiles = (f.seqlen_k + kKeys - 1) / kKeys;
    std::set<std::pair<int, int>> kept;
    for (const auto& pair : seen) {
      if (draw.flag()) kept.insert(pair);
    }
    QueryList::lists.assign(key_tiles, {});
    QueryList::adding.assign(query_tiles, 0);
    for (const auto& [query_tile, key_tile] : kept) {
      QueryList::lists[key_tile].index.push_back(query_tile);
      QueryList::lists[key_tile].rank.push_back(QueryList::adding[query_tile]++);
    }
    check_backward<QueryList>(p, kept);
  }
}

TEST_CASE("a semaphore of several query tiles ranks the tiles of keys that add to any of them") {
  constexpr int kTogether = 4;
  using Tiles = QueryInterval<kQueries, kKeys, kTogether>;
  Draw draw;
  for (int n = 0; n < 300; ++n) {
    const FwdProblem f = draw_backward(draw).fwd;
    const SeqInfo seq(f, 0);
    CAPTURE(f);
    std::map<int, std::set<int>> before;
    for (int tile = 0; tile * kKeys < f.seqlen_k; ++tile) {
      const KeyTile keys(f, kKeys, HeadSets::of(1, f.heads_k * f.batch), false, tile);
      const Tiles queries = Tiles::of(f, seq, keys);
      std::set<int> semaphores;
      for (int m = queries.begin; m < queries.end; ++m) {
        const auto turn = queries.turn(m);
        CHECK(turn.semaphore == m - m % kTogether);
        CHECK(turn.rank(f, seq, keys) == static_cast<int>(before[turn.semaphore].size()));
        semaphores.insert(turn.semaphore);
      }
      for (const int semaphore : semaphores) before[semaphore].insert(tile);
    }
  }
}
