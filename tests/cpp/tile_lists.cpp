// Kinds of tiles over the lists of sparse calls: each visible pair is met once, and full tiles need no mask.
#include <doctest/doctest.h>

#include <set>
#include <utility>
#include <vector>

#include "core/layout/kv_list.h"
#include "core/layout/query_list.h"
#include "draw.h"

namespace flash_cute {
namespace {

using Pairs = std::set<std::pair<int, int>>;

int tiles_of(int rows) {
  return (rows + kTileSide - 1) / kTileSide;
}

// A sequence of a packed batch whose announced lengths are larger, and lists of all announced tiles.
struct ListCase {
  FwdProblem p{};
  SeqInfo seq;
  int columns;
  std::vector<int> codes;  // [rows, columns]
  std::vector<TileEntry> entries;
  std::vector<int> ranks;
  std::vector<uint32_t> bits;

  ListCase(Draw& draw, bool of_keys) : seq({0, draw.from(1, 500)}, {0, draw.from(1, 500)}) {
    p.heads = p.heads_k = 1;
    p.seqlen_q = seq.q.length + draw.of({0, 0, 1, 300});
    p.seqlen_k = seq.k.length + draw.of({0, 0, 1, 300});
    p.band = draw.band(300);
    const int rows = tiles_of(of_keys ? p.seqlen_k : p.seqlen_q);
    columns = tiles_of(of_keys ? p.seqlen_q : p.seqlen_k);
    const int masks = draw.from(0, 3);
    for (int i = 0; i < masks * kTileSide * kTileSide / 32; ++i)
      bits.push_back(static_cast<uint32_t>(draw.from(0, 1 << 30)) * 5u);
    for (int row = 0; row < rows; ++row) {
      const size_t head = entries.size();
      entries.push_back({0, 0});
      for (int column = 0; column < columns; ++column) {
        int code = draw.flag() ? draw.flag() ? 15 : draw.from(1, 15) : 0;
        if (code > 0 && masks > 0 && draw.from(0, 3) == 0) code += 16 * draw.from(1, masks);
        codes.push_back(code);
        if (code == 0) continue;
        entries.push_back({column, code});
        ++entries[head].tile;
      }
      entries.resize(head + 1 + columns, {1 << 30, -1});
    }
    for (size_t i = 0; i < entries.size(); ++i) ranks.push_back(static_cast<int>(i));
    p.lists = {.ptr = entries.data(),
               .tiles = rows,
               .capacity = columns,
               .bits = bits.data(),
               .masks = masks,
               .ranks = ranks.data()};
  }

  bool shows(TileCode code, int query, int key) const {
    const uint32_t* const words = code.words(p.lists, query);
    return code.quadrant(query, key) && (words == nullptr || (words[key / 32] >> key % 32 & 1));
  }
  TileCode code(int row, int column) const { return {codes[row * columns + column]}; }
  bool sees_by_band(int query, int key) const { return sees(seq, p.band, query, key); }
};

template <int kBlockN>
void check_keys(Draw& draw) {
  const ListCase c(draw, false);
  const int tile = draw.from(0, tiles_of(c.seq.q.length) - 1), rows = draw.of({64, 128});
  const int row = tile * kTileSide + (rows == 64 && tile * kTileSide + 64 < c.seq.q.length ? 64 * draw.from(0, 1) : 0);
  const auto tiles = KvList<kBlockN>::of(c.p, c.seq, {row, 0, 0}, rows);
  const int past = visible_keys(c.seq, c.p.band, row, rows).last;
  Pairs met, expected;
  bool once = true, full = true, ascending = true, seen_in_part = true, moves = true;
  int copied = tiles.past_keys();
  for (int n = tiles.end - 1; n >= tiles.begin; --n) {
    copied += tiles.step(n);
    moves &= copied == tiles.first_key(n);
    seen_in_part &= tiles.first_key(n) < past;
  }
  for (int n = tiles.begin; n < tiles.end; ++n) {
    const int key = tiles.first_key(n);
    ascending &= n == tiles.begin || tiles.first_key(n - 1) + kBlockN <= key;
    for (int i = row; i < row + rows && i < c.seq.q.length; ++i) {
      for (int j = key; j < key + kBlockN; ++j) {
        const bool seen = c.sees_by_band(i, j) && c.shows(tiles.code(n), i % kTileSide, j % kTileSide);
        full &= seen || !tiles.full(n);
        if (seen) once &= met.emplace(i, j).second;
      }
    }
  }
  for (int i = row; i < row + rows && i < c.seq.q.length; ++i) {
    for (int j = 0; j < c.seq.k.length; ++j) {
      const TileCode code = c.code(tile, j / kTileSide);
      if (c.sees_by_band(i, j) && c.shows(code, i % kTileSide, j % kTileSide)) expected.emplace(i, j);
    }
  }
  CAPTURE(c.p);
  CHECK(once);
  CHECK(full);
  CHECK(ascending);
  CHECK(seen_in_part);
  CHECK(moves);
  CHECK(met == expected);
}

template <int kBlockM>
void check_queries(Draw& draw) {
  const ListCase c(draw, true);
  const int tile = draw.from(0, tiles_of(c.seq.k.length) - 1), col = tile * kTileSide;
  const auto tiles = QueryList<kBlockM, kTileSide>::of(c.p, c.seq, {tile, col, 0, 0});
  Pairs met, expected;
  bool once = true, full = true, exist = true, ranked = true;
  for (int n = tiles.begin; n < tiles.end; ++n) {
    const int query = tiles.first_query(n);
    exist &= query < c.seq.q.length;
    ranked &= c.entries[tiles.turn(n).tiles_before].tile == query / kTileSide;  // ranks are places here
    for (int j = col; j < col + kTileSide; ++j) {
      for (int i = query; i < query + kBlockM; ++i) {
        const bool seen = c.sees_by_band(i, j) && c.shows(tiles.code(n), i % kTileSide, j % kTileSide);
        full &= seen || !tiles.full(n) || i >= c.seq.q.length;  // rows past the end have no weight
        if (seen) once &= met.emplace(i, j).second;
      }
    }
  }
  for (int j = col; j < col + kTileSide && j < c.seq.k.length; ++j) {
    for (int i = 0; i < c.seq.q.length; ++i) {
      const TileCode code = c.code(tile, i / kTileSide);
      if (c.sees_by_band(i, j) && c.shows(code, i % kTileSide, j % kTileSide)) expected.emplace(i, j);
    }
  }
  CAPTURE(c.p);
  CAPTURE(c.seq.q.length);
  CAPTURE(c.seq.k.length);
  CHECK(once);
  CHECK(full);
  CHECK(exist);
  CHECK(ranked);
  CHECK(met == expected);
}

TEST_CASE("lists of key tiles hold each visible pair once") {
  Draw draw;
  for (int i = 0; i < 150; ++i) {
    check_keys<16>(draw);
    check_keys<32>(draw);
    check_keys<64>(draw);
    check_keys<128>(draw);
  }
}

TEST_CASE("lists of query tiles hold each visible pair once") {
  Draw draw;
  for (int i = 0; i < 200; ++i) {
    check_queries<64>(draw);
    check_queries<128>(draw);
  }
}

}  // namespace
}  // namespace flash_cute
