// Tiles of keys and values of one head from the pages of a cache to shared memory.
#pragma once

#include <cutlass/fast_math.h>

#include "kernels/common/cached_seq.h"
#include "kernels/sm80/tile_io.h"

namespace flash_cute::sm80 {

// kThreads threads copy kKeys keys and values at a time. Rows that no query sees arrive as zeros, and so do those of
// pages that do not exist.
template <class Element, int kThreads, int kKeys, int kCols, int kColsV>
class CacheCopy {
 public:
  // Of the sequence's keys those of `visible` are copied. The first tile starts at `key`, later ones each `step` further.
  CUTE_DEVICE CacheCopy(const DecodeProblem& p, int b, int head, int first_row, RowSpan visible, int key, int step,
                        Element* k, Element* v, int thread)
      : num_pages_(p.cache.num_pages),
        pages_(p.cache.pages == nullptr ? nullptr : p.cache.pages + b * p.cache.pages_batch),
        only_page_(b),
        page_size_(p.cache.page_size),
        first_row_(first_row),
        visible_(visible),
        step_(step),
        key_(key + T::row(thread)),
        k_(p.fwd.k, head, T::col(thread), p.fwd.head_dim, k, thread),
        v_(p.fwd.v, head, TV::col(thread), p.fwd.head_dim_v, v, thread) {
    find_rows();
  }

  // Starts the copy of a tile, `k_bytes` and `v_bytes` past the first place, and goes on to the next.
  CUTE_DEVICE void load(int k_bytes, int v_bytes) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      k_.load(i, k_bytes, page_[i], row_[i]);
      v_.load(i, v_bytes, page_[i], row_[i]);
    }
    key_ += step_;
    find_rows();
  }

 private:
  // How threads cover a tile: as many side by side as an atom has vectors.
  template <int kWidth>
  struct Threads {
    static constexpr int kAtom = atom_columns(kWidth);
    static constexpr int kAcross = kAtom / kVector;
    static constexpr int kDown = kThreads / kAcross;
    static CUTE_DEVICE int row(int thread) { return thread / kAcross; }
    static CUTE_DEVICE int col(int thread) { return thread % kAcross * kVector; }
  };
  using T = Threads<kCols>;
  using TV = Threads<kColsV>;
  static constexpr int kRows = kKeys / T::kDown;  // of a thread
  static_assert(T::kDown == TV::kDown, "a thread has the same rows of K and V");
  static_assert(kKeys % T::kDown == 0 && (T::kDown % 8 == 0 || (T::kDown == 4 && T::kAtom == 64)));

  // One of K and V.
  template <int kWidth>
  struct Side {
    using Of = Threads<kWidth>;
    static constexpr int kRowBytes = Of::kAtom * int(sizeof(Element));

    const Element* global;  // this thread's first column of the head in row 0 of page 0
    const Matrices& strides;
    int cols;  // how many columns there are from there on
    uint32_t shared;  // this thread's first vector

    CUTE_DEVICE Side(const Matrices& m, int head, int col, int head_dim, Element* tile, int thread)
        : global(static_cast<const Element*>(m.ptr) + head * m.head + col),
          strides(m),
          cols(head_dim - col),
          shared(kept(cast_smem_ptr_to_uint(tile + SharedLayout<kKeys, kWidth>{}(Of::row(thread), col)))) {}

    // Vectors of the thread's row i; of no row if the page is negative.
    CUTE_DEVICE void load(int i, int bytes, int of_page, int of_row) const {
      const Element* from = global + (of_page < 0 ? 0 : of_page * strides.batch + of_row * strides.row);
      // Four rows further, the swizzle has another bit.
      const uint32_t to = (shared ^ (i * Of::kDown % 8 * kVector * uint32_t(sizeof(Element)))) + bytes;
      CUTE_UNROLL
      for (int j = 0; j < kWidth / Of::kAtom; ++j) {
        const bool there = of_page >= 0 && j * Of::kAtom < cols;
        cp_async_16(to + i * Of::kDown * kRowBytes + j * kKeys * kRowBytes, there ? from + j * Of::kAtom : global,
                    there ? 16 : 0);
      }
    }
  };

  // Where the rows of the next tile are: asked for a tile ahead, as the table is in global memory.
  CUTE_DEVICE void find_rows() {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int key = key_ + i * T::kDown;
      const bool seen = visible_.first <= key && key < visible_.last;
      int block = 0;
      page_size_(block, row_[i], seen ? first_row_ + key : 0);
      page_[i] = !seen ? -1 : pages_ == nullptr ? only_page_ : pages_[block];
      if (page_[i] >= num_pages_) page_[i] = -1;
    }
  }

  int num_pages_;
  const int* pages_;  // the sequence's row of the table, may be null
  int only_page_;
  cutlass::FastDivmod page_size_;
  int first_row_;
  RowSpan visible_;
  int step_, key_;
  Side<kCols> k_;
  Side<kColsV> v_;
  int page_[kRows], row_[kRows];
};

}  // namespace flash_cute::sm80
