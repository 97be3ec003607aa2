// The way of dS into shared memory, where dQ's product reads it.
#pragma once

#include "kernels/sm90/backward_traits.h"

namespace flash_cute::sm90 {

// Where a thread's rows of a warpgroup's dS begin in shared memory, and how its steps of 16 queries lie from there on. In
// place of a tiled copy, which takes some 50 instructions to find it anew, in a step of 550.
template <KernelConfig C>
class DsPlace {
  using T = BackwardTraits<C>;
  static constexpr int kRowBytes = 128, kVectorBytes = 16;  // of an atom of the swizzle, whose rows are 128 bytes wide

 public:
  CUTE_DEVICE explicit DsPlace(unsigned thread) {
    const unsigned lane = thread % 32, warp = thread / 32 % 4, group = thread / 128;
    // Of the four matrices of 8 x 8 that are stored at once, the second and the fourth have the later keys, and the last
    // two the later queries. Lanes have a row of a matrix each.
    const unsigned later_keys = lane / 8 % 2, later_queries = lane / 16, row = lane % 8;
    if constexpr (T::kManyQueries) {  // rows of queries; a warpgroup's 64 keys are an atom's width
      offset_ = group * C.block_m * kRowBytes + (later_queries * 8 + row) * kRowBytes +
                (((warp * 2 + later_keys) ^ row) * kVectorBytes);
    } else {  // rows of keys, with all queries
      offset_ = (group * 64 + warp * 16 + later_keys * 8 + row) * kRowBytes + (later_queries ^ row) * kVectorBytes;
    }
  }

  // Stores the rounded dS of the warpgroup (MMA=(2,2,N/8),1,1) in a tile.
  template <class Gradient>
  CUTE_DEVICE void store(typename T::Element* tile, const Gradient& gradient) const {
    const uint32_t first = cast_smem_ptr_to_uint(tile) + offset_;
    Tensor pairs = recast<uint32_t>(gradient);  // ((1,2,N/8),1,1)
    CUTE_UNROLL
    for (int step = 0; step < C.block_m / 16; ++step) {
      if constexpr (T::kManyQueries) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         first + step * 16 * kRowBytes),
                     "r"(pairs(4 * step)), "r"(pairs(4 * step + 1)), "r"(pairs(4 * step + 2)), "r"(pairs(4 * step + 3))
                     : "memory");
      } else {
        static_assert(C.block_m == 64, "queries are an atom's width");
        asm volatile(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(first ^ (step * 2 * kVectorBytes)),
            "r"(pairs(4 * step)), "r"(pairs(4 * step + 1)), "r"(pairs(4 * step + 2)), "r"(pairs(4 * step + 3))
            : "memory");
      }
    }
  }

 private:
  uint32_t offset_;
};

}  // namespace flash_cute::sm90
