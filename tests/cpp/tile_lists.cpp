// Kinds of tiles over the lists of sparse calls: each visible pair is met once, and full tiles need no mask.
#include <doctest/doctest.h>

#include <bit>
#include <set>
#include <utility>
#include <vector>

#include "core/layout/kv_list.h"
#include "core/layout/query_list.h"
#include "core/layout/query_strips.h"
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
  bool whole;  // all tiles

  ListCase(Draw& draw, bool of_keys) : seq({0, draw.from(1, 500)}, {0, draw.from(1, 500)}) {
    whole = draw.flag();
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
      entries.push_back({0, whole ? TileCode::kWhole : 0});
      for (int column = 0; column < columns; ++column) {
        int code = draw.flag() ? whole || draw.flag() ? TileCode::kWhole : draw.from(1, 15) : 0;
        if (code > 0 && !whole && masks > 0 && draw.from(0, 3) == 0) code += 16 * draw.from(1, masks);
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

// Of the warpgroups of a tile each visits its own tiles, and passes over those that have nothing for it.
template <int kBlockN>
void check_groups(Draw& draw) {
  const ListCase c(draw, false);
  FwdParams p{};
  static_cast<FwdProblem&>(p) = c.p;
  const int tile = draw.from(0, tiles_of(c.seq.q.length) - 1), row = tile * kTileSide;
  const QueryTile queries{row, 0, 0};
  const SharedKvList<kBlockN, 2> shared(p, c.seq, {queries, kTileSide, queries, kTileSide}, {0});
  bool ends_are_listed = true, inside = true, full = true, knows_full = true;
  Pairs met, expected;
  for (int group = 0; group < 2; ++group) {
    const KvList<kBlockN> tiles = shared.of_group(group);
    inside &= tiles.empty() || (0 <= tiles.begin && tiles.end <= shared.count);
    ends_are_listed &= tiles.empty() || (tiles.listed(tiles.begin) && tiles.listed(tiles.end - 1));
    for (int n = tiles.end - 1; n >= tiles.begin; n = n == tiles.begin ? n - 1 : tiles.listed_before(n)) {
      full &= !tiles.in_full_range(n) || (tiles.in_band(n) && tiles.code(n).shows(TileCode::kWhole));
      knows_full &= !c.whole || tiles.full(n) == tiles.in_full_range(n);
      for (int i = row + 64 * group; i < row + 64 * group + 64 && i < c.seq.q.length; ++i) {
        for (int j = tiles.first_key(n); j < tiles.first_key(n) + kBlockN; ++j) {
          if (c.sees_by_band(i, j) && c.shows(tiles.code(n), i % kTileSide, j % kTileSide)) met.emplace(i, j);
        }
      }
    }
  }
  for (int i = row; i < row + kTileSide && i < c.seq.q.length; ++i) {
    for (int j = 0; j < c.seq.k.length; ++j) {
      const TileCode code = c.code(tile, j / kTileSide);
      if (c.sees_by_band(i, j) && c.shows(code, i % kTileSide, j % kTileSide)) expected.emplace(i, j);
    }
  }
  CAPTURE(c.p);
  CHECK(inside);
  CHECK(ends_are_listed);
  CHECK(full);
  CHECK(knows_full);
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

// Of each mask, as strips_of_masks() makes them.
std::vector<StripBits> strips_of_masks(const ListCase& c) {
  std::vector<StripBits> strips;
  for (int mask = 0; mask < c.p.lists.masks; ++mask) {
    StripBits bits{};
    for (int strip = 0; strip < kTileSide / kStripRows; ++strip) {
      bool some = false, all = true;
      for (int i = strip * kStripRows; i < (strip + 1) * kStripRows; ++i) {
        for (int j = 0; j < kTileSide; ++j) {
          const bool seen = c.shows({TileCode::kWhole + 16 * (mask + 1)}, i, j);
          some |= seen;
          all &= seen;
        }
      }
      bits.some = static_cast<uint8_t>(bits.some | some << strip);
      bits.all = static_cast<uint8_t>(bits.all | all << strip);
    }
    strips.push_back(bits);
  }
  return strips;
}

void check_walk(Draw& draw) {
  ListCase c(draw, false);
  const int tile = draw.from(0, tiles_of(c.seq.k.length) - 1);
  auto tiles = QueryList<64, kTileSide>::of(c.p, c.seq, {tile, tile * kTileSide, 0, 0});
  if (tiles.empty()) return;
  tiles.start = draw.from(0, tiles.entries() - 1);
  std::vector<int> walked;
  for (int n = 0; n < tiles.end; ++n) walked.push_back(tiles.walked(n));
  CHECK(walked.front() == 2 * tiles.start);
  const auto first = std::ranges::find(walked, 0);
  CHECK(std::ranges::is_sorted(walked.begin(), first));
  std::ranges::rotate(walked, first);
  for (int n = 0; n < tiles.end; ++n) CHECK(walked[n] == n);
}

void check_strips(Draw& draw) {
  ListCase c(draw, true);
  c.p.band = {};
  for (uint32_t& word : c.bits) {  // strips that see nothing, or all
    const auto strip = (&word - c.bits.data()) / (kStripRows * kTileSide / 32);
    if (strip % 3 != 0) word = strip % 3 == 1 ? 0 : ~0u;
  }
  const int tile = draw.from(0, tiles_of(c.seq.k.length) - 1), col = tile * kTileSide;
  const auto tiles = QueryList<64, kTileSide>::of(c.p, c.seq, {tile, col, 0, 0});
  const std::vector<StripBits> strips = strips_of_masks(c);
  Pairs met, expected;
  bool once = true, whole = true, exist = true, ascending = true, sees = true;
  int before = -1;
  auto visit = [&](const Strip& strip) {
    exist &= strip.row < c.seq.q.length;
    ascending &= before < strip.row;
    before = strip.row;
    bool any = false;
    for (int i = strip.row; i < strip.row + kStripRows; ++i) {
      for (int j = col; j < col + kTileSide; ++j) {
        const bool shown = c.shows(strip.code, i % kTileSide, j % kTileSide);
        any |= shown;
        whole &= shown || !strip.code.shows(TileCode::kWhole);
        if (shown && i < c.seq.q.length && j < c.seq.k.length) once &= met.emplace(i, j).second;
      }
    }
    sees &= any;
  };
  // Splits of a list share its halves of tiles.
  const int middle = draw.from(0, tiles.end);
  for (const auto& [begin, end] : {std::pair{0, middle}, std::pair{middle, tiles.end}}) {
    auto split = tiles;
    split.begin = begin;
    split.end = end;
    for (int entry = begin / 2; entry < (end + 1) / 2 + 1; ++entry) {
      const ListedStrips strips_of_entry(c.p.lists, strips.data(), split, entry, c.seq.q.length);
      for (int i = 0; i < std::popcount(strips_of_entry.some); ++i) visit(strips_of_entry.strip(i));
    }
  }
  for (int j = col; j < col + kTileSide && j < c.seq.k.length; ++j) {
    for (int i = 0; i < c.seq.q.length; ++i) {
      if (c.shows(c.code(tile, i / kTileSide), i % kTileSide, j % kTileSide)) expected.emplace(i, j);
    }
  }
  CHECK(once);
  CHECK(whole);
  CHECK(exist);
  CHECK(ascending);
  CHECK(sees);
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

TEST_CASE("of the lists of key tiles each warpgroup visits those with keys for it") {
  Draw draw;
  for (int i = 0; i < 300; ++i) {
    check_groups<64>(draw);
    check_groups<128>(draw);
  }
}

TEST_CASE("lists of query tiles hold each visible pair once") {
  Draw draw;
  for (int i = 0; i < 200; ++i) {
    check_queries<64>(draw);
    check_queries<128>(draw);
  }
}

TEST_CASE("a walk from any entry on meets each query tile once, in order, and wraps around") {
  Draw draw;
  for (int i = 0; i < 400; ++i) check_walk(draw);
}

TEST_CASE("strips of query tiles hold each visible pair once, and nothing that sees no key") {
  Draw draw;
  for (int i = 0; i < 400; ++i) check_strips(draw);
}

}  // namespace
}  // namespace flash_cute
