// How tiles of 16-bit elements lie in shared memory, the same in every family.
#pragma once

namespace flash_cute {

// Columns of a tile that lie together: 64 elements (128 bytes), or 32 where the tile is no multiple of 64 wide.
constexpr int atom_columns(int cols) {
  return cols % 64 == 0 ? 64 : 32;
}

}  // namespace flash_cute
