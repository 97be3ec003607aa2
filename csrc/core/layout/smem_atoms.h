// The shared memory layout of tiles, which all families share.
#pragma once

namespace flash_cute {

// Columns of a swizzle atom: 128 bytes, or 64 if the tile's width is not a multiple of 128 bytes.
constexpr int atom_columns(int cols, int element_bytes) {
  const int most = 128 / element_bytes;
  return cols % most == 0 ? most : most / 2;
}

}  // namespace flash_cute
