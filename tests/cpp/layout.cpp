#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "core/layout/gaps.h"
#include "core/layout/packed_tiles.h"
#include "core/layout/query_tiles.h"
#include "core/layout/cached_seq.h"
#include "core/layout/fast_divmod.h"
#include "core/layout/tiles.h"
#include "draw.h"
#include "packed_order.h"

using namespace flash_cute;

TEST_CASE("FastDivmod divides as / and % do") {
  constexpr int kMost = std::numeric_limits<int>::max();
  Draw draw;
  std::vector<int> divisors{1, kMost - 1, kMost};
  for (int bit = 1; bit < 31; ++bit) {
    for (const int near : {-1, 0, 1}) divisors.push_back((1 << bit) + near);
  }
  for (int i = 0; i < 500; ++i) divisors.push_back(draw.from(1, draw.of({10, 1000, kMost})));
  for (const int divisor : divisors) {
    const FastDivmod fast(divisor);
    std::vector<int> dividends{0, 1, divisor - 1, divisor, kMost - 1, kMost, kMost / divisor * divisor};
    dividends.push_back(kMost / divisor * divisor - 1);
    for (int i = 0; i < 50; ++i) dividends.push_back(draw.from(0, kMost));
    for (const int n : dividends) {
      CAPTURE(divisor);
      CAPTURE(n);
      CHECK(fast.div(n) == n / divisor);
      CHECK(fast.mod(n) == n % divisor);
    }
  }
}

TEST_CASE("a sequence is where offsets and lengths say") {
  const int cu[] = {0, 3, 3, 10};
  const int used[] = {2, 5, 4};
  const SeqSpan second = seq_span(cu, nullptr, 2, 100, 10);
  CHECK(second.offset == 3);
  CHECK(second.length == 7);
  CHECK(seq_span(cu, nullptr, 1, 100, 10).length == 0);
  CHECK(seq_span(cu, used, 0, 100, 10).length == 2);
  CHECK(seq_span(cu, used, 1, 100, 10).length == 0);
  CHECK(seq_span(nullptr, used, 1, 100, 300).length == 5);
  CHECK(seq_span(nullptr, nullptr, 1, 100, 300).length == 100);
}

TEST_CASE("gaps have the rows of no sequence, and no others") {
  Draw draw;
  for (int n = 0; n < 3000; ++n) {
    const int batch = draw.from(0, 6), total = draw.from(0, 30);
    const int longest = draw.flag() ? total : draw.from(0, 10);
    const bool ascends = draw.flag();
    std::vector<int> cu{draw.flag() ? 0 : draw.from(-2, total + 2)}, used;
    for (int b = 0; b < batch; ++b) {
      cu.push_back(ascends ? cu.back() + draw.from(0, 9)
                           : draw.of({draw.from(-2, total + 2), cu.back() + draw.from(0, 9), cu.back(), 0}));
      used.push_back(draw.from(-1, 9));
    }
    const int* const lengths = draw.flag() ? used.data() : nullptr;
    auto span_of = [&](int b) { return seq_span(cu.data(), lengths, b, longest, total); };
    std::vector<bool> in_sequence(total), in_gap(total);
    auto mark = [](std::vector<bool>& rows, int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) rows[row] = true;
    };
    for (int b = 0; b < batch; ++b) mark(in_sequence, span_of(b).offset, span_of(b).offset + span_of(b).length);
    for (int b = 0; b <= batch; ++b) {
      const RowRange gap = gap_of(b, batch, total, ascends && draw.flag(), span_of);
      mark(in_gap, gap.begin, gap.end);
    }
    in_sequence.flip();
    CAPTURE(listed(cu));
    CAPTURE(listed(used));
    CHECK(in_gap == in_sequence);
  }
}

TEST_CASE("no offsets and lengths name a row outside of the tensor") {
  Draw draw;
  auto anything = [&] {
    return draw.flag() ? draw.from(-3, 40)
                       : draw.of({std::numeric_limits<int>::min(), std::numeric_limits<int>::max(), -1, 0});
  };
  for (int i = 0; i < 20000; ++i) {
    const int total = draw.from(0, 30), longest = draw.from(0, 30);
    const std::vector<int> cu{anything(), anything()}, used{anything()};
    CAPTURE(listed(cu));
    CAPTURE(listed(used));
    const SeqSpan span = seq_span(cu.data(), draw.flag() ? used.data() : nullptr, 0, longest, total);
    CHECK(span.offset >= 0);
    CHECK(span.length >= 0);
    CHECK(span.length <= longest);
    CHECK(span.offset + span.length <= total);
  }
}

namespace {

struct Pair {
  SeqInfo seq;
  Band band;
};

// Two sequences, and who sees whom.
Pair draw_pair(Draw& draw) {
  const int queries = draw.from(1, 60), keys = draw.from(0, 60);
  return {SeqInfo({0, queries}, {0, keys}), draw.band(70)};
}

// Whether any, or every, query of [row, row + rows) sees any, or every, key of [col, col + cols). Pairs past an end do
// not count.
struct Seen {
  bool any = false, every = true;

  Seen(const Pair& p, int row, int rows, int col, int cols) {
    for (int i = row; i < row + rows && i < p.seq.q.length; ++i) {
      for (int j = col; j < col + cols && j < p.seq.k.length; ++j) {
        const bool seen = sees(p.seq, p.band, i, j);
        any |= seen;
        every &= seen;
      }
    }
  }
};

}  // namespace

TEST_CASE("key tiles are those that some query sees, and full ones hide nothing") {
  Draw draw;
  int full = 0;
  for (int n = 0; n < 3000; ++n) {
    const Pair p = draw_pair(draw);
    const int rows = draw.of({1, 8, 16}), cols = draw.of({1, 8, 24});
    const int row = draw.from(0, (p.seq.q.length - 1) / rows) * rows, origin = draw.from(0, p.seq.k.length);
    const TileRange range = key_tiles(p.seq, p.band, row, rows, cols, origin);
    CAPTURE(p.seq.q.length);
    CAPTURE(p.seq.k.length);
    CAPTURE(p.band);
    CAPTURE(row);
    CAPTURE(rows);
    CAPTURE(cols);
    CAPTURE(origin);
    CHECK(range.begin <= range.full_begin);
    CHECK(range.full_begin <= range.full_end);
    CHECK(range.full_end <= range.end);
    for (int tile = 0; origin + tile * cols < p.seq.k.length + 2 * cols; ++tile) {
      CAPTURE(tile);
      const int col = origin + tile * cols;
      const Seen seen(p, row, rows, col, cols);
      CHECK(seen.any == (range.begin <= tile && tile < range.end));
      CHECK((!range.full(tile) || (seen.every && col + cols <= p.seq.k.length)));
      full += range.full(tile);
    }
  }
  CHECK(full > 1000);
}

TEST_CASE("query tiles are those that see some key, and full ones hide nothing") {
  Draw draw;
  int full = 0;
  for (int n = 0; n < 3000; ++n) {
    const Pair p = draw_pair(draw);
    if (p.seq.k.length == 0) continue;
    const int rows = draw.of({1, 8, 16}), cols = draw.of({1, 8, 24});
    const int col = draw.from(0, (p.seq.k.length - 1) / cols) * cols;
    const TileRange range = query_tiles(p.seq, p.band, col, cols, rows);
    CAPTURE(p.seq.q.length);
    CAPTURE(p.seq.k.length);
    CAPTURE(p.band);
    CAPTURE(col);
    CAPTURE(rows);
    CAPTURE(cols);
    for (int tile = 0; tile * rows < p.seq.q.length + 2 * rows; ++tile) {
      CAPTURE(tile);
      const Seen seen(p, tile * rows, rows, col, cols);
      CHECK(seen.any == (range.begin <= tile && tile < range.end));
      CHECK((!range.full(tile) || (seen.every && col + cols <= p.seq.k.length)));
      full += range.full(tile);
    }
  }
  CHECK(full > 1000);
}

TEST_CASE("the rows that are loaded are those that are seen or see") {
  Draw draw;
  for (int n = 0; n < 3000; ++n) {
    const Pair p = draw_pair(draw);
    const int many = draw.from(1, 20);
    CAPTURE(p.seq.q.length);
    CAPTURE(p.seq.k.length);
    CAPTURE(p.band);
    CAPTURE(many);
    const int row = draw.from(0, p.seq.q.length - 1);
    const RowSpan keys = visible_keys(p.seq, p.band, row, many);
    CAPTURE(row);
    for (int j = 0; j < p.seq.k.length; ++j) {
      CHECK(Seen(p, row, many, j, 1).any == (keys.first <= j && j < keys.last));
    }
    if (p.seq.k.length == 0) continue;
    const int col = draw.from(0, p.seq.k.length - 1);
    const RowSpan queries = seeing_queries(p.seq, p.band, col, many);
    CAPTURE(col);
    for (int i = 0; i < p.seq.q.length; ++i) {
      CHECK(Seen(p, i, 1, col, many).any == (queries.first <= i && i < queries.last));
    }
  }
}

TEST_CASE("a packed row has the sequence that owns it") {
  Draw draw;
  for (int n = 0; n < 2000; ++n) {
    const int batch = draw.from(1, 9), total = draw.from(1, 40);
    const bool sorted = draw.flag();
    std::vector<int> cu{sorted ? 0 : draw.from(-5, 45)};
    for (int b = 0; b < batch; ++b) cu.push_back(sorted ? cu.back() + draw.from(0, 6) : draw.from(-5, 45));
    auto rows_of = [&](int b) { return seq_span(cu.data(), nullptr, b, 1 << 20, total); };
    CAPTURE(listed(cu));
    for (int row = 0; row < total; ++row) {
      CAPTURE(row);
      const int found = sequence_of(row, cu.data(), batch, 1, rows_of);
      int owners = 0;
      for (int b = 0; b < batch; ++b) {
        const SeqSpan rows = rows_of(b);
        const bool owns = rows.offset <= row && row < rows.offset + rows.length;
        owners += owns;
        CHECK((b != found || owns));
      }
      CHECK((found >= 0) == (owners > 0));
      if (found >= 0) CHECK(place_of(row, rows_of(found), cu.data(), 1) == row - rows_of(found).offset);
    }
  }
  CHECK(sequence_of(17, nullptr, 4, 5, [](int) { return SeqSpan{}; }) == 3);
  CHECK(place_of(17, {0, 5}, nullptr, 5) == 2);
}

TEST_CASE("tiles of packed sequences are found by number, in any order, the longest first") {
  Draw draw;
  for (int n = 0; n < 600; ++n) {
    const int batch = draw.of({1, 2, 5, draw.from(1, 40)});
    std::vector<int> cu{0}, used, costs;
    for (int b = 0; b < batch; ++b) {
      cu.push_back(cu.back() + (draw.flag() ? 0 : draw.from(0, 400)));
      used.push_back(draw.from(0, 400));
      costs.push_back(draw.from(0, 9));
    }
    if (draw.from(0, 9) == 0) cu[batch / 2] = draw.from(-100, 3000);  // offsets that go back
    const PackedRows rows{cu.data(), draw.flag() ? used.data() : nullptr, 300,
                          batch,     cu.back() + draw.from(0, 9),         draw.of({1, 16, 128})};
    const bool by_level = draw.flag();
    const PackedOrder order = sorted_sequences(
        rows, by_level, [&](int sequence) { return by_level ? rows.tiles(sequence) : costs[sequence]; });
    // {cost, sequence, tiles before} of all tiles, in order.
    std::vector<std::array<int, 3>> expected;
    for (int b = 0; b < batch; ++b) {
      const int tiles = rows.tiles(b), cost = order.count == 0 ? 0 : costs[b];
      for (int i = 0; i < tiles; ++i) expected.push_back({order.by_level ? i - tiles : -cost, b, i});
    }
    auto before = [&](const std::array<int, 3>& a, const std::array<int, 3>& b) {
      if (a[0] != b[0]) return a[0] < b[0];
      if (order.by_level && rows.tiles(a[1]) != rows.tiles(b[1])) return rows.tiles(a[1]) > rows.tiles(b[1]);
      return a[1] < b[1];
    };
    std::stable_sort(expected.begin(), expected.end(), before);
    const int tiles = static_cast<int>(expected.size());
    PackedTiles packed;
    bool found = true;
    auto find = [&](int number) {
      const PackedTile tile = packed.find(rows, order, number);
      found &= tile.sequence == expected[number][1] && tile.before == expected[number][2] &&
               tile.tiles == rows.tiles(tile.sequence);
    };
    for (int number = tiles - 1; number >= 0; number -= draw.from(1, 3)) find(number);
    for (int number = 0; number < tiles; number += draw.from(1, 3)) find(number);
    for (int i = 0; i < 20 && tiles > 0; ++i) find(draw.from(0, tiles - 1));
    CHECK(found);
  }
}

TEST_CASE("tiles of packed keys: each once for each head, early ones of a sequence first") {
  Draw draw;
  for (int n = 0; n < 300; ++n) {
    FwdProblem p{};
    p.batch = draw.from(1, 8);
    p.heads = p.heads_k = draw.from(1, 6);
    p.seqlen_k = 500;
    std::vector<int> cu{0};
    for (int b = 0; b < p.batch; ++b) cu.push_back(cu.back() + draw.of({0, 1, 128, draw.from(0, 500)}));
    p.varlen.cu_k = cu.data();
    p.total_k = cu.back();
    const PackedRows rows = PackedRows::of_keys(p, 128);
    const PackedOrder order = sorted_sequences(rows, draw.flag(), [&](int sequence) { return rows.tiles(sequence); });
    int tiles = 0;
    for (int b = 0; b < p.batch; ++b) tiles += rows.tiles(b);
    const HeadSets sets = HeadSets::of(draw.from(1, p.heads_k), p.heads_k, draw.from(1, 4));
    std::map<std::pair<int, int>, int> next;  // of a head and sequence
    PackedTiles packed;
    bool ordered = true;
    for (int number = 0; number < tiles * p.heads_k; ++number) {
      const KeyTile tile(p, 128, sets, tiles, order, packed, number);
      ordered &= tile.index == next[{tile.head, tile.batch}]++ && tile.row == 128 * tile.index && !tile.late_first;
    }
    CHECK(ordered);
    for (int head = 0; head < p.heads_k; ++head) {
      for (int b = 0; b < p.batch; ++b) CHECK(next[{head, b}] == rows.tiles(b));
    }
  }
}
