// Copies tiles of keys in a forward loop from the last one down, with two stages or one.
#pragma once

#include "kernels/ampere/tile_io.h"

namespace flash_cute::ampere {

// With two stages, tile n - 1 lands while the warps work on tile n; with one, V(n) lands while they work on K(n), and
// K(n - 1) while they work on V(n). load_k(n, stage) and load_v(n, stage) copy nothing below the first tile.
template <int kStages, class LoadK, class LoadV>
struct KvLoads {
  const LoadK& load_k;
  const LoadV& load_v;

  // Commits it together with all earlier copies.
  CUTE_DEVICE void start(int last) const {
    load_k(last, 0);
    if constexpr (kStages == 2) load_v(last, 0);
    cp_async_fence();
  }

  CUTE_DEVICE void before_scores(int n, int stage) const {
    // After this barrier K(n), with two stages V(n) too, is visible to all, and nobody still reads tile n + 1.
    cp_async_wait<0>();
    __syncthreads();
    if constexpr (kStages == 2) {
      load_k(n - 1, stage ^ 1);
      load_v(n - 1, stage ^ 1);
    } else {
      load_v(n, 0);
    }
    cp_async_fence();
  }

  CUTE_DEVICE void before_values(int n) const {
    if constexpr (kStages == 1) {
      // After this barrier V(n) is visible to all, and nobody still reads K(n).
      cp_async_wait<0>();
      __syncthreads();
      load_k(n - 1, 0);
      cp_async_fence();
    }
  }
};

}  // namespace flash_cute::ampere
