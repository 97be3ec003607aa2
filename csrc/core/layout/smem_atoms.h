// How tiles of elements lie in shared memory, the same in every family.
#pragma once

namespace flash_cute {

// Columns of a tile that lie together: 128 bytes of them, or half as many if the tile is no multiple of that wide.
constexpr int atom_columns(int cols, int element_bytes) {
  const int most = 128 / element_bytes;
  return cols % most == 0 ? most : most / 2;
}

}  // namespace flash_cute
