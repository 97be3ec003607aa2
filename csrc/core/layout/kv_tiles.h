// Tiles of keys that a tile of queries walks over, by numbers that go down: last keys first, so that the tile that ends
// with the sequence comes before the others.
#pragma once

#include <concepts>

#include "core/layout/tiles.h"

namespace flash_cute {

// What a main loop needs to know of them: numbers [begin, end), the first key of each, and whether every query of the
// tile sees all of it.
template <class Tiles>
concept KvTiles = requires(const Tiles& tiles, int n) {
  { tiles.begin } -> std::convertible_to<int>;
  { tiles.end } -> std::convertible_to<int>;
  { tiles.first_key(n) } -> std::same_as<int>;
  { tiles.full(n) } -> std::same_as<bool>;
};

// Tiles side by side, number 0 from key `origin` on.
template <int kBlockN>
struct KvInterval : TileRange {
  int origin;

  FC_HOST_DEVICE int first_key(int n) const { return origin + n * kBlockN; }
};
static_assert(KvTiles<KvInterval<64>>);

}  // namespace flash_cute
