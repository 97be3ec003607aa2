// Tiles of fp32 rows: from global to shared memory by cp.async, and from accumulators to global memory.
#pragma once

#include <cute/tensor.hpp>

#include "core/problem.h"
#include "kernels/common/fragment.h"
#include "core/layout/tiles.h"
#include "kernels/ampere/tile_io.h"

namespace flash_cute::sm80::fp32 {

using namespace ampere;

constexpr int kVector = 4;  // elements in 16 bytes
constexpr int kAtom = 32;   // columns of a tile that lie together: 128 bytes

// Where an element lies in a shared tile of kRows rows: the vectors of a row are rotated, so that neither ldmatrix's
// blocks of 8 rows by 16 bytes nor 4 pairs of rows by 8 elements hit a bank twice.
template <int kRows>
CUTE_HOST_DEVICE constexpr int place(int row, int col) {
  return (col / kAtom * kRows + row) * kAtom + ((col % kAtom / kVector) ^ (row % 8)) * kVector + col % kVector;
}

// The rows of one head of one sequence.
struct HeadRows {
  float* ptr;
  int64_t stride;
  int cols;
  bool vectors;  // every row starts on a 16-byte boundary

  CUTE_DEVICE HeadRows(const TensorView& m, int batch, int head, int64_t offset, int cols)
      : ptr(static_cast<float*>(m.ptr) + batch * m.batch + head * m.head + offset * m.row),
        stride(m.row),
        cols(cols),
        vectors(m.vectors) {}
};

// 4 bytes from global to shared memory; zero if not `valid`.
CUTE_DEVICE void cp_async_4(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(valid ? 4 : 0)
               : "memory");
}

// Starts the copy of the rows from `first` on into a shared tile, with zeros for what does not exist: rows outside of
// `span`, and columns past the last. It has landed after cp_async_wait and a barrier.
template <int kThreads, int kRows, int kCols>
CUTE_DEVICE void load_tile(float* tile, const HeadRows& from, int first, RowSpan span) {
  constexpr int kAcross = kAtom / kVector, kDown = kThreads / kAcross;
  static_assert(kRows % kDown == 0 && kDown % 8 == 0, "every thread has as many vectors, all with the same swizzle");
  const int row = threadIdx.x / kAcross, col = threadIdx.x % kAcross * kVector;
  const uint32_t to = cast_smem_ptr_to_uint(tile + place<kRows>(row, col));
  const float* source = from.ptr + (first + row) * from.stride + col;
  auto present = [&](int i, int j) {
    const int at = first + row + i * kDown;
    return span.first <= at && at < span.last ? min(max(from.cols - col - j * kAtom, 0), kVector) : 0;
  };
  auto distance = [](int i, int j) { return (i * kDown + j * kRows) * kAtom * int(sizeof(float)); };
  if (from.vectors) {
    CUTE_UNROLL
    for (int i = 0; i < kRows / kDown; ++i, source += kDown * from.stride) {
      CUTE_UNROLL
      for (int j = 0; j < kCols / kAtom; ++j) {
        cp_async_16(to + distance(i, j), source + j * kAtom, present(i, j) * int(sizeof(float)));
      }
    }
  } else {
    CUTE_NO_UNROLL
    for (int i = 0; i < kRows / kDown; ++i, source += kDown * from.stride) {
      CUTE_NO_UNROLL
      for (int j = 0; j < kCols / kAtom; ++j) {
        CUTE_UNROLL
        for (int e = 0; e < kVector; ++e) {
          cp_async_4(to + distance(i, j) + e * sizeof(float), source + j * kAtom + e, e < present(i, j));
        }
      }
    }
  }
}

// Writes an accumulator's values (rows,columns) times `factor`, as far as they exist. Its first is at (row, col), and
// pieces of 16 rows lie kPieceRows apart.
template <int kPieceRows, class Values>
CUTE_DEVICE void store_values(const Values& values, const HeadRows& to, int row, int end, int col, float factor) {
  CUTE_UNROLL
  for (int r = 0; r < size<0>(values); ++r) {
    const int at = row + r / 2 * kPieceRows + r % 2 * 8;
    if (at >= end) continue;
    float* target = to.ptr + at * to.stride + col;
    CUTE_UNROLL
    for (int c = 0; c < size<1>(values); c += 2) {
      const float2 pair = make_float2(values(r, c) * factor, values(r, c + 1) * factor);
      const int there = to.cols - col - column_offset(c);
      if (to.vectors && there >= 2) {
        *reinterpret_cast<float2*>(target + column_offset(c)) = pair;
      } else {
        if (there >= 1) target[column_offset(c)] = pair.x;
        if (there >= 2) target[column_offset(c) + 1] = pair.y;
      }
    }
  }
}

}  // namespace flash_cute::sm80::fp32
