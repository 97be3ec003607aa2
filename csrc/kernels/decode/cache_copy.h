// Tiles of K and V of one head from paged or dense caches to shared memory.
#pragma once

#include "core/layout/cached_seq.h"
#include "kernels/ampere/tile_io.h"

namespace flash_cute::decode {

using namespace ampere;

// kThreads threads copy kKeys keys and values at a time. Rows that no query sees, and those of pages that do not exist,
// become zeros. Elements have 16 or 8 bits.
template <class Element, int kThreads, int kKeys, int kCols, int kColsV>
class CacheCopy {
 public:
  // Tiles go to `tile` and to later stages; consecutive tiles of a sequence start `step` rows apart.
  template <class Tile>
  CUTE_DEVICE CacheCopy(const DecodeParams& p, int step, Tile& tile, int thread)
      : p_(p),
        step_(step),
        thread_(thread),
        policy_(l2_policy(p.l2_fraction)),
        k_(p.fwd.head_dim, tile.k, thread),
        v_(p.fwd.head_dim_v, tile.v, thread) {}

  // Moves to a head of sequence b, at row `row` of its pages. Only rows of `visible` are copied.
  CUTE_DEVICE void begin(int b, int head, RowSpan visible, int row) {
    b_ = b;
    visible_ = visible;
    next_ = row;
    next_chunk_ = 0;
    k_.begin(p_.fwd.k, head, thread_);
    v_.begin(p_.fwd.v, head, thread_);
    find_pages();
  }

  // Starts the copy of a tile, `bytes` past the first stage, and moves on to the next.
  CUTE_DEVICE void load(int bytes) {
    if (in_chunks()) {
      CUTE_UNROLL
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const int page = page_of_chunk(next_chunk_ + chunk);
        load_rows<kRows>(chunk * kRows, bytes, {page, row_of_page(next_ + chunk * kChunk)});
      }
    } else {
      CUTE_NO_UNROLL
      for (int same = 0; same < kChunks * kRows; ++same) {
        // Without pin() ptxas of CUDA 13.0 emits an illegal instruction: a copy with a policy and a uniform register in
        // its address.
        const int i = pin(same);
        const int row = next_ + T::row(thread_) + i * T::kDown;
        const auto [page, row_of_page] = place_of(row, visible_.first <= row && row < visible_.last);
        load_rows<1>(i, bytes, {page, row_of_page - T::row(thread_)});
      }
    }
    next_ += step_;
    next_chunk_ = (next_chunk_ + kChunks) % kLanes;
    find_pages();
  }

 protected:
  static constexpr int kBytes = sizeof(Element), kVector = 16 / kBytes;  // of an element; elements of 16 bytes

  // The threads' layout on a tile: a row of them spans an atom's vectors.
  template <int kWidth>
  struct Threads {
    static constexpr int kAtom = atom_columns(kWidth, kBytes);
    static constexpr int kAcross = kAtom / kVector;
    static constexpr int kDown = kThreads / kAcross;
    static CUTE_DEVICE int row(int thread) { return thread / kAcross; }
    static CUTE_DEVICE int col(int thread) { return thread % kAcross * kVector; }
  };
  using T = Threads<kCols>;
  using TV = Threads<kColsV>;
  static constexpr int kLanes = 32;
  static constexpr int kChunk = 16;  // keys that usually lie in one page
  static constexpr int kChunks = kKeys / kChunk, kRows = kChunk / T::kDown;  // rows of a thread in a chunk
  static_assert(T::kDown == TV::kDown, "a thread has the same rows of K and V");
  static_assert(kKeys % kChunk == 0 && kLanes % kChunks == 0 &&
                (T::kDown % 8 == 0 || (T::kDown == 4 && T::kAtom * kBytes == 128)));

  struct PageRow {
    int page;  // -1: none
    int row;
  };

  // K or V.
  template <int kWidth>
  struct Side {
    using Of = Threads<kWidth>;
    static constexpr int kRowBytes = Of::kAtom * kBytes;
    static constexpr int kOf16 = kElementBytes / kBytes;  // elements of a 16-bit one, whose layout tiles have

    const Element* global;  // this thread's first vector in a tile that starts at row 0 of page 0
    int cols;  // columns from there on
    uint32_t shared;  // this thread's first vector

    CUTE_DEVICE Side(int head_dim, Element* tile, int thread)
        : cols(head_dim - Of::col(thread)),
          shared(pin(cast_smem_ptr_to_uint(
              tile + kOf16 * SharedLayout<kKeys, kWidth / kOf16>{}(Of::row(thread), Of::col(thread) / kOf16)))) {}

    CUTE_DEVICE void begin(const TensorView& m, int head, int thread) {
      global = static_cast<const Element*>(m.ptr) + head * m.head + Of::row(thread) * m.row + Of::col(thread);
    }

    // Loads kCount of the thread's rows from row `first` on; `from` is thread 0's row. Zeros if its page is negative.
    template <int kCount>
    CUTE_DEVICE void load(const TensorView& m, int first, int bytes, PageRow from, uint64_t policy) const {
      const Element* row = global + (from.page < 0 ? 0 : from.page * m.batch + from.row * m.row);
      CUTE_UNROLL
      for (int i = first; i < first + kCount; ++i) {
        // Four rows further, the swizzle flips another bit.
        const uint32_t to = (shared ^ (i * Of::kDown % 8 * uint32_t(kVector * kBytes))) + bytes;
        CUTE_UNROLL
        for (int j = 0; j < kWidth / Of::kAtom; ++j) {
          const bool there = from.page >= 0 && j * Of::kAtom < cols;
          cp_async_16(to + i * Of::kDown * kRowBytes + j * kKeys * kRowBytes, row + (there ? j * Of::kAtom : 0),
                      there ? 16 : 0, policy);
        }
        row += Of::kDown * m.row;
      }
    }
  };

  template <int kCount>
  CUTE_DEVICE void load_rows(int first, int bytes, PageRow from) const {
    k_.template load<kCount>(p_.fwd.k, first, bytes, from, policy_);
    v_.template load<kCount>(p_.fwd.v, first, bytes, from, policy_);
  }

  // The page and the row in it of a row of the sequence; no page unless `wanted`.
  CUTE_DEVICE PageRow place_of(int row, bool wanted) const {
    return {wanted ? existing(page_of(row)) : -1, row_of_page(row)};
  }

  CUTE_DEVICE int page_of(int row) const {
    return p_.fwd.pages.ids == nullptr ? b_ : page_id(p_.fwd.pages, b_, p_.page_size.div(row));
  }
  CUTE_DEVICE int existing(int page) const { return page < p_.fwd.pages.count ? page : -1; }
  CUTE_DEVICE int row_of_page(int row) const {
    return p_.fwd.pages.ids == nullptr ? row : row - p_.page_size.div(row) * p_.page_size.value;
  }

  // Whether the next tile is wholly visible and each of its chunks lies in one page.
  CUTE_DEVICE bool in_chunks() const {
    bool all = visible_.first <= next_ && next_ + kKeys <= visible_.last;
    CUTE_UNROLL
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      all &= row_of_page(next_ + chunk * kChunk) + kChunk <= p_.page_size.value;
    }
    return all;
  }

  // Looks up the pages of the next tiles, one chunk a lane, a tile before they are needed: the table is in global
  // memory.
  CUTE_DEVICE void find_pages() {
    if (p_.fwd.pages.ids == nullptr || next_chunk_ != 0) return;
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int row = next_ + lane / kChunks * step_ + lane % kChunks * kChunk;
    page_of_lane_ = row < visible_.last ? page_of(row) : -1;
  }

  CUTE_DEVICE int page_of_chunk(int chunk) const {
    return p_.fwd.pages.ids == nullptr ? b_ : existing(__shfl_sync(0xffffffff, page_of_lane_, chunk));
  }

  const DecodeParams& p_;
  const int step_, thread_;
  const uint64_t policy_;
  int b_;
  RowSpan visible_;
  int next_;  // row of the next tile
  Side<kCols> k_;
  Side<kColsV> v_;
  int next_chunk_;  // the lane that has the page of the next tile's first chunk
  int page_of_lane_;
};

}  // namespace flash_cute::decode
