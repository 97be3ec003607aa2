// dS from registers to shared memory, where the product for dQ reads it.
#pragma once

#include "kernels/sm90/backward_traits.h"

namespace flash_cute::sm90 {

// Addresses of a thread's stores of dS, computed once. A tiled copy would recompute them with about 50 instructions
// in each step of 550.
template <KernelConfig C>
class DsStore {
  using T = BackwardTraits<C>;
  static constexpr int kRowBytes = 128, kVectorBytes = 16;  // of a swizzle atom, whose rows are 128 bytes

  // stmatrix stores four 8 x 8 matrices: the second and fourth have the later keys, the last two the later queries. A
  // lane addresses one row of one matrix.
  struct Row {
    unsigned group, warp, later_keys, later_queries, row;

    CUTE_HOST_DEVICE constexpr explicit Row(unsigned thread)
        : group(thread / 128),
          warp(thread / 32 % 4),
          later_keys(thread / 8 % 2),
          later_queries(thread % 32 / 16),
          row(thread % 8) {}
  };

 public:
  CUTE_HOST_DEVICE constexpr explicit DsStore(unsigned thread) : offset_(0) {
    const Row at(thread);
    if constexpr (T::kManyQueries) {  // rows of queries; a warpgroup's 64 keys are an atom's width
      offset_ = at.group * C.block_m * kRowBytes + (at.later_queries * 8 + at.row) * kRowBytes +
                (((at.warp * 2 + at.later_keys) ^ at.row) * kVectorBytes);
    } else {  // rows of keys, with all queries
      offset_ = (at.group * 64 + at.warp * 16 + at.later_keys * 8 + at.row) * kRowBytes +
                (at.later_queries ^ at.row) * kVectorBytes;
    }
  }

  // Stores the warpgroup's rounded dS (MMA=(2,2,N/8),1,1).
  template <class Gradient>
  CUTE_DEVICE void store(typename T::Element* tile, const Gradient& gradient) const {
    static_assert(agrees_with_layout());
    const uint32_t first = cast_smem_ptr_to_uint(tile) + offset_;
    Tensor pairs = recast<uint32_t>(gradient);  // ((1,2,N/8),1,1)
    CUTE_UNROLL
    for (int step = 0; step < C.block_m / 16; ++step) {
      const uint32_t to = in_step(step, first);
      if constexpr (T::kManyQueries) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                     "r"(pairs(4 * step)), "r"(pairs(4 * step + 1)), "r"(pairs(4 * step + 2)), "r"(pairs(4 * step + 3))
                     : "memory");
      } else {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pairs(4 * step)),
                     "r"(pairs(4 * step + 1)), "r"(pairs(4 * step + 2)), "r"(pairs(4 * step + 3))
                     : "memory");
      }
    }
  }

 private:
  // The address in a later step of 16 queries that corresponds to `first` in the first step.
  CUTE_HOST_DEVICE static constexpr uint32_t in_step(int step, uint32_t first) {
    static_assert(T::kManyQueries || C.block_m == 64, "queries are an atom's width");
    return T::kManyQueries ? first + step * 16 * kRowBytes : first ^ (step * 2 * kVectorBytes);
  }

  static constexpr bool agrees_with_layout() {
    constexpr typename T::LayoutDs layout{};  // (query,key)
    for (int thread = 0; thread < 128 * T::kGroups; ++thread) {
      const Row at(thread);
      const int key = at.group * 64 + at.warp * 16 + at.later_keys * 8 + (T::kManyQueries ? 0 : at.row);
      for (int step = 0; step < C.block_m / 16; ++step) {
        const int query = step * 16 + at.later_queries * 8 + (T::kManyQueries ? at.row : 0);
        const int plain = layout.layout_b()(query, key) * sizeof(typename T::Element);
        if (layout.layout_a()(plain) != in_step(step, DsStore(thread).offset_)) return false;
      }
    }
    return true;
  }

  uint32_t offset_;  // bytes from the tile's begin, in its first step
};

}  // namespace flash_cute::sm90
