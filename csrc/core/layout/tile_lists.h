// A kernel's view of one list of TileLists: safe for any values, without the tiles that the band hides.
#pragma once

#include "core/layout/tiles.h"

namespace flash_cute {

constexpr int kTileSide = 128;  // queries, and keys, of a tile of TileLists

// The visible pairs of a listed tile: a bit for each quadrant of 64 queries x 64 keys, queries before keys, and the
// token mask, if the tile has one.
struct TileCode {
  static constexpr int kQuadrants = 4, kWhole = 15;
  int value;

  // The quadrants of `count` queries, or keys, of a tile from `first` on, which are one half of its queries or all.
  FC_HOST_DEVICE static int quadrants_of_queries(int first, int count) {
    return count > 64 ? kWhole : first < 64 ? 0b0011 : 0b1100;
  }
  FC_HOST_DEVICE static int quadrants_of_keys(int first, int count) {
    return count > 64 ? kWhole : first < 64 ? 0b0101 : 0b1010;
  }

  FC_HOST_DEVICE bool has_mask() const { return value >> kQuadrants > 0; }
  FC_HOST_DEVICE bool shows(int quadrants) const { return (value & quadrants) == quadrants && !has_mask(); }
  FC_HOST_DEVICE bool quadrant(int query, int key) const { return value >> (query / 64 * 2 + key / 64) & 1; }
  // The number of the token mask, if there is one.
  FC_HOST_DEVICE unsigned mask(const TileLists& lists) const {
    return detail::at_most((value >> kQuadrants) - 1, lists.masks - 1);
  }
  // The token mask's words of a query of the tile, each of 32 keys; null if there is none.
  FC_HOST_DEVICE const uint32_t* words(const TileLists& lists, int query) const {
    if (!has_mask() || lists.masks == 0) return nullptr;
    return lists.bits + (mask(lists) * kTileSide + query) * (kTileSide / 32);  // 32 bits: registers
  }
};

// A list's first entry, which tells their number.
FC_HOST_DEVICE const TileEntry* first_entry(const TileLists& lists, int batch, int head, int tile) {
  return lists.ptr + batch * lists.batch + head / lists.heads_per_list * lists.head +
         int64_t(detail::at_most(tile, lists.tiles - 1)) * (1 + lists.capacity);
}

// The entries of a list for tiles [first, past) of a sequence of `sequence_tiles` tiles.
struct TileList {
  const TileEntry* entries;
  int count;
  int last_tile;  // no entry names a later tile

  TileList() = default;
  FC_HOST_DEVICE TileList(const TileLists& lists, int batch, int head, int tile, int first, int past,
                          int sequence_tiles)
      : last_tile(detail::at_least(0, past - 1)) {
    const TileEntry* const list = first_entry(lists, batch, head, tile);
    entries = list + 1;
    count = detail::at_least(0, detail::at_most(list->tile, lists.capacity));
    if (past < sequence_tiles && count > 0 && entries[count - 1].tile >= past) count = before(past);
    if (first > 0 && count > 0 && entries[0].tile < first) {
      const int hidden = before(first);
      entries += hidden;
      count -= hidden;
    }
  }

  FC_HOST_DEVICE int tile(int i) const { return detail::at_least(0, detail::at_most(entries[i].tile, last_tile)); }
  FC_HOST_DEVICE TileCode code(int i) const { return {entries[i].code}; }

 private:
  // How many entries have tiles before `tile`.
  FC_HOST_DEVICE int before(int tile) const {
    int low = 0, high = count;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (entries[middle].tile < tile) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

}  // namespace flash_cute
