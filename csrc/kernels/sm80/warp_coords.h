// The layout of backward's scores in the registers of mma.sync: transposed, keys by queries.
#pragma once

#include "kernels/ampere/mma.h"

namespace flash_cute::sm80 {

using namespace ampere;

// The coordinates of this thread's elements in a tile of scores, kKeys x kQueries, shared by kDown x kAcross warps.
template <int kKeys, int kQueries, int kDown, int kAcross>
struct WarpCoords {
  using Keys = Share<kKeys / (16 * kDown), kDown>;
  using Queries = Share<kQueries / (16 * kAcross), kAcross>;

  static constexpr bool kColumnsInOrder = false;

  int key, query;  // of the first element

  CUTE_DEVICE explicit WarpCoords(uint32_t warp)
      : key(Keys::first(warp % kDown) + threadIdx.x % 32 / 4),
        query(Queries::first(warp / kDown) + threadIdx.x % 4 * 2) {}

  // Row r and column c of rows_and_columns(), counted from the first.
  CUTE_HOST_DEVICE static constexpr int down(int r) { return Keys::offset(r / 2) + 8 * (r % 2); }
  CUTE_HOST_DEVICE static constexpr int across(int c) { return Queries::offset(c / 4) + 8 * (c / 2 % 2) + c % 2; }
};

}  // namespace flash_cute::sm80
