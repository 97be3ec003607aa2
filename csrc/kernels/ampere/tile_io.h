// Tiles between global and shared memory: cp.async in, 16-byte stores out, with everything past a matrix's edge read as
// zero and never written.
#pragma once

#include <cute/tensor.hpp>

#include <climits>

#include "core/problem.h"
#include "core/layout/smem_atoms.h"
#include "core/layout/tiles.h"
#include "kernels/common/element.h"

namespace flash_cute::ampere {

using namespace cute;

// 16 bytes from global to shared memory without passing through registers; bytes past `valid` arrive as zero.
CUTE_DEVICE void cp_async_16(uint32_t shared, const void* global, int valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid) : "memory");
}

// L2 policy of loads: `fraction` of them with evict_normal, the rest with evict_first.
CUTE_DEVICE uint64_t l2_policy(float fraction) {
  constexpr float kLeast = 0x1p-5f;  // the policy's fraction must not be 0
  uint64_t none, some;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(none));
  asm("createpolicy.fractional.L2::evict_normal.L2::evict_first.b64 %0, %1;"
      : "=l"(some)
      : "f"(fmaxf(fraction, kLeast)));
  return fraction == 0.f ? none : some;
}

CUTE_DEVICE void cp_async_16(uint32_t shared, const void* global, int valid, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global),
               "r"(valid), "l"(policy)
               : "memory");
}

constexpr int kElementBytes = 2;
constexpr int kVector = 16 / kElementBytes;  // elements in 16 bytes

// Rows rotated so that neither 16-byte rows nor ldmatrix's 8x8 blocks hit a bank twice.
template <int kCols>
using SwizzleAtom = decltype(composition(Swizzle<kCols == 64 ? 3 : 2, 3, 3>{},
                                         Layout<Shape<_8, Int<kCols>>, Stride<Int<kCols>, _1>>{}));

template <int kRows, int kCols>
using SharedLayout =
    decltype(tile_to_shape(SwizzleAtom<atom_columns(kCols, kElementBytes)>{}, Shape<Int<kRows>, Int<kCols>>{}));

// Hides how a value was computed from the compiler, so that it stays in a register instead of being recomputed in every
// iteration. All lanes of a warp call this together.
CUTE_DEVICE uint32_t pin(uint32_t value) {
  return __shfl_sync(0xffffffff, value, threadIdx.x % 32);
}

// How kThreads threads cover a tile of kRows x kCols: a thread has the vectors at (row + i * kDown, col + j * kAtom),
// at constant distances in shared memory.
template <int kThreads, int kRows, int kCols>
struct TileThreads {
  static constexpr int kAtom = atom_columns(kCols, kElementBytes);
  static constexpr int kAcross = kAtom / kVector;  // threads side by side
  static constexpr int kDown = kThreads / kAcross;
  static_assert(kRows % kDown == 0 && kDown % 8 == 0, "every thread has as many vectors, all with the same swizzle");

  static constexpr CUTE_HOST_DEVICE int row(int thread) { return thread / kAcross; }
  static constexpr CUTE_HOST_DEVICE int col(int thread) { return thread % kAcross * kVector; }

  // Elements in shared memory from a thread's first vector to the one i steps down and j atoms across.
  static constexpr CUTE_HOST_DEVICE int distance(int i, int j) { return (i * kDown + j * kRows) * kAtom; }
};

// How many elements of the vector at (row, col) exist. Rows of `span` exist, and their first `cols` columns.
CUTE_DEVICE int existing_elements(int row, int col, RowSpan span, int cols) {
  return span.first <= row && row < span.last ? min(max(cols - col, 0), kVector) : 0;
}

// Starts the copy of a tile that may be partial or unaligned, with zeros for missing elements. The tile starts at
// `row`; this thread's first vector goes from `from` to `to`.
template <class Element, int kThreads, int kRows, int kCols>
CUTE_DEVICE void load_ragged(uint32_t to, const Element* from, int64_t stride, bool vectors, int row, RowSpan span,
                             int cols, int thread) {
  using T = TileThreads<kThreads, kRows, kCols>;
  CUTE_NO_UNROLL
  for (int i = 0; i < kRows / T::kDown; ++i) {
    CUTE_NO_UNROLL
    for (int j = 0; j < kCols / T::kAtom; ++j) {
      const uint32_t vector = to + T::distance(i, j) * int(sizeof(Element));
      const int count =
          existing_elements(row + T::row(thread) + i * T::kDown, T::col(thread) + j * T::kAtom, span, cols);
      if (vectors) {
        cp_async_16(vector, from + j * T::kAtom, count * int(sizeof(Element)));
      } else {
        CUTE_NO_UNROLL
        for (int e = 0; e < kVector; ++e) {
          const uint16_t bits = e < count ? reinterpret_cast<const uint16_t*>(from + j * T::kAtom)[e] : 0;
          asm volatile("st.shared.u16 [%0], %1;" ::"r"(vector + e * int(sizeof(Element))), "h"(bits) : "memory");
        }
      }
    }
    from += T::kDown * stride;
  }
}

// Copies between a shared tile and rows of one head in global memory, a tile's rows at a time.
template <class Element, int kThreads, int kRows, int kCols>
class TileCopy {
 public:
  // The head's rows start at row `offset` of the tensor; of them those of `span` exist, and their first `cols` columns.
  // The first tile starts at `row`.
  CUTE_DEVICE TileCopy(const TensorView& m, int batch, int head, int64_t offset, int row, RowSpan span, int cols,
                       Element* shared, int thread)
      : span_(span),
        cols_(cols),
        vectors_(m.vectors),
        stride_(m.row),
        last_whole_(m.vectors && cols == kCols ? span.last - kRows : INT_MIN),
        shared_(pin(cast_smem_ptr_to_uint(shared + SharedLayout<kRows, kCols>{}(T::row(thread), T::col(thread))))),
        global_(static_cast<Element*>(m.ptr) + batch * m.batch + head * m.head +
                (offset + row + T::row(thread)) * m.row + T::col(thread)),
        tile_row_(row) {}

  // Moves to the tile that starts `rows` further.
  CUTE_DEVICE void move(int rows) {
    global_ += rows * stride_;
    tile_row_ += rows;
  }

  // Starts the copy of the tile into shared memory, `bytes` past the first place, with zeros for what does not exist.
  // It has landed after cp_async_wait and a barrier.
  CUTE_DEVICE void load(int bytes = 0) const {
    const uint32_t to = shared_ + bytes;
    const Element* from = global_;
    if (span_.first <= tile_row_ && tile_row_ <= last_whole_) {
      CUTE_UNROLL
      for (int i = 0; i < kRows / T::kDown; ++i) {
        CUTE_UNROLL
        for (int j = 0; j < kCols / T::kAtom; ++j)
          cp_async_16(to + distance(i, j), from + j * T::kAtom, sizeof(uint128_t));
        from += T::kDown * stride_;
      }
    } else {
      int thread;
      asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));  // here, and not where every tile would wait for it
      load_ragged<Element, kThreads, kRows, kCols>(to, from, stride_, vectors_, tile_row_, span_, cols_, thread);
    }
  }

  // Writes the existing part of the tile from shared memory.
  CUTE_DEVICE void store() const {
    Element* to = global_;
    const int row = tile_row_ + T::row(threadIdx.x), col = T::col(threadIdx.x);
    CUTE_UNROLL
    for (int i = 0; i < kRows / T::kDown; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < kCols / T::kAtom; ++j) {
        const int count = existing_elements(row + i * T::kDown, col + j * T::kAtom, span_, cols_);
        cutlass::Array<Element, kVector> vector;
        auto* words = reinterpret_cast<uint32_t*>(&vector);
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "r"(shared_ + distance(i, j)));
        if (vectors_ && count == kVector) {
          *reinterpret_cast<uint128_t*>(to + j * T::kAtom) = *reinterpret_cast<const uint128_t*>(&vector);
        } else {
          for (int e = 0; e < count; ++e) to[j * T::kAtom + e] = vector[e];
        }
      }
      to += T::kDown * stride_;
    }
  }

 private:
  using T = TileThreads<kThreads, kRows, kCols>;

  // Bytes in shared memory from this thread's first vector to the one i steps down and j atoms across.
  static constexpr int distance(int i, int j) { return T::distance(i, j) * int(sizeof(Element)); }

  RowSpan span_;
  int cols_;
  bool vectors_;
  int64_t stride_;
  int last_whole_;  // tiles that start here or earlier, and not before the span, need no tests
  uint32_t shared_;  // this thread's first vector of the tile
  Element* global_;
  int tile_row_;
};

}  // namespace flash_cute::ampere
