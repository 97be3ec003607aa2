// Strips of queries, of which a step of Hopper's sparse backward takes some from any tiles of a list: queries that see none
// of the keys then take no part.
#pragma once

#include "core/layout/query_list.h"
#include "core/workspace.h"

namespace flash_cute {

constexpr int kStripRows = 16;  // queries of a strip

struct Strip {
  int row;  // the first query, or negative if there is no strip
  TileCode code;  // of its tile; if it sees all keys, of a whole tile
};

// The strips of an entry of a list, under a band that hides nothing: a bit for each that sees some of the keys, and all.
struct ListedStrips {
  int row = 0;
  TileCode code{0};
  uint32_t some = 0, all = 0;

  FC_HOST_DEVICE ListedStrips(const TileList& list, int entry, uint32_t some, uint32_t all)
      : row(list.tile(entry) * kTileSide), code(list.code(entry)), some(some), all(all) {}
  // `bits`: of each token mask.
  template <int kBlockN>
  FC_HOST_DEVICE ListedStrips(const TileLists& lists, const StripBits* bits, const QueryList<64, kBlockN>& queries,
                              int entry, int seqlen_q) {
    constexpr uint32_t kHalf = 0xf;
    const int first = 2 * entry;  // half a tile
    if (first >= queries.end) return;
    row = queries.list.tile(entry) * kTileSide;
    code = queries.list.code(entry);
    for (int half = 0; half < 2; ++half) {
      const int quadrants = code.value >> 2 * half & 3;
      const bool is_in = queries.begin <= first + half && first + half < queries.end;
      if (is_in && quadrants != 0) some |= kHalf << 4 * half;
      if (quadrants == 3) all |= kHalf << 4 * half;
    }
    const int exist = (seqlen_q - row + kStripRows - 1) / kStripRows;
    if (exist < 8) some &= (1u << detail::at_least(0, exist)) - 1;
    if (!code.has_mask() || lists.masks == 0) return;
    const StripBits of_mask = bits[code.mask(lists)];
    some &= of_mask.some;
    all &= of_mask.all;
  }

  // The strip that is `index`th of those that see some of the keys.
  FC_HOST_DEVICE Strip strip(int index) const {
    uint32_t left = some;
    for (int i = 0; i < 7; ++i) {
      if (i < index) left &= left - 1;
    }
    const uint32_t lowest = left & -left;
    int place = 0;
    for (int i = 1; i < 8; ++i) place += lowest >> i != 0;
    return {row + place * kStripRows, lowest & all ? TileCode{TileCode::kWhole} : code};
  }
};

}  // namespace flash_cute
