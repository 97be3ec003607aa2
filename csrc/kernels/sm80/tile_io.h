// Tiles between global and shared memory: cp.async in, 16-byte stores out, with everything past a matrix's edge read as
// zero and never written.
#pragma once

#include <cute/tensor.hpp>

#include "core/problem.h"
#include "kernels/common/tiles.h"

namespace flash_cute::sm80 {

using namespace cute;

// 16 bytes from global to shared memory without passing through registers; bytes past `valid` arrive as zero.
CUTE_DEVICE void cp_async_16(void* shared, const void* global, int valid) {
  const uint32_t address = cast_smem_ptr_to_uint(shared);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(valid) : "memory");
}

// Rows of 64 elements (128 bytes), rotated so that neither 16-byte rows nor ldmatrix's 8x8 blocks hit a bank twice.
template <class Element>
using SwizzleAtom = decltype(composition(Swizzle<3, 3, 3>{}, Layout<Shape<_8, _64>, Stride<_64, _1>>{}));

template <class Element, int kRows, int kCols>
using SharedLayout = decltype(tile_to_shape(SwizzleAtom<Element>{}, Shape<Int<kRows>, Int<kCols>>{}));

// The same memory read as its transpose: (kRows,kCols) stored, (kCols,kRows) seen.
template <class Element, int kRows, int kCols>
using TransposedLayout = decltype(composition(SharedLayout<Element, kRows, kCols>{},
                                              Layout<Shape<Int<kCols>, Int<kRows>>, Stride<Int<kRows>, _1>>{}));

// A piece of a global matrix: rows [first_row, last_row) and columns [0, cols) of it exist, counted from `ptr`.
template <class Element>
struct GlobalTile {
  Element* ptr;
  int64_t row_stride;
  int first_row, last_row, cols;
  bool vectors;  // rows start on 16-byte boundaries
};

// From `row` on, of one head of a sequence that starts at row `offset`; `span` are the rows of the sequence that count.
template <class Element>
CUTE_DEVICE GlobalTile<Element> global_tile(const Matrices& m, int batch, int head, int64_t offset, int row,
                                            RowSpan span, int cols) {
  Element* ptr = static_cast<Element*>(m.ptr) + batch * m.batch + head * m.head + (offset + row) * m.row;
  return {ptr, m.row, span.first - row, span.last - row, cols, m.vectors};
}

constexpr int kVector = 8;  // elements in 16 bytes

// How kThreads threads cover a tile, 64 columns at a time.
template <class Element, int kThreads>
struct VectorCopy {
  static constexpr int kAcross = 64 / kVector;
  using Tiled =
      decltype(make_tiled_copy(Copy_Atom<UniversalCopy<uint128_t>, Element>{},
                               Layout<Shape<Int<kThreads / kAcross>, Int<kAcross>>, Stride<Int<kAcross>, _1>>{},
                               Layout<Shape<_1, Int<kVector>>>{}));
};

// Calls body(shared vector, its row, its column) for each 16-byte vector of a shared tile that this thread copies.
template <class Element, int kThreads, class Shared, class Body>
CUTE_DEVICE void for_each_vector(const Shared& shared, int thread, Body body) {
  // Hides that the addresses do not change between iterations: kept in registers they would push accumulators out.
  asm volatile("" : "+r"(thread));
  auto copy = typename VectorCopy<Element, kThreads>::Tiled{}.get_slice(thread);
  Tensor cS = make_identity_tensor(product_each(shape(shared)));  // (rows,cols) -> (row, col)
  Tensor tSs = copy.partition_D(shared);  // (CPY,CPY_M,CPY_K)
  Tensor tCs = copy.partition_D(cS);  // (CPY,CPY_M,CPY_K)
  CUTE_UNROLL
  for (int m = 0; m < size<1>(tSs); ++m) {
    CUTE_UNROLL
    for (int k = 0; k < size<2>(tSs); ++k) body(&tSs(0, m, k), get<0>(tCs(0, m, 0)), get<1>(tCs(0, m, k)));
  }
}

// Starts the copy of a tile into shared memory. It has landed after cp_async_wait and a barrier.
template <int kThreads, class Element, class Shared>
CUTE_DEVICE void load_tile(const GlobalTile<Element>& tile, const Shared& shared, int thread) {
  using Value = remove_const_t<Element>;
  constexpr int kRows = decltype(size<0>(shared))::value, kCols = decltype(size<1>(shared))::value;
  auto source = [&](int row, int col) { return tile.ptr + row * tile.row_stride + col; };
  auto exist = [&](int row, int col) {  // elements of a vector
    return tile.first_row <= row && row < tile.last_row ? min(max(tile.cols - col, 0), kVector) : 0;
  };
  if (tile.vectors && tile.first_row <= 0 && kRows <= tile.last_row && kCols == tile.cols) {
    for_each_vector<Value, kThreads>(
        shared, thread, [&](Value* to, int row, int col) { cp_async_16(to, source(row, col), sizeof(uint128_t)); });
  } else if (tile.vectors) {
    for_each_vector<Value, kThreads>(shared, thread, [&](Value* to, int row, int col) {
      const int count = exist(row, col);
      cp_async_16(to, count > 0 ? source(row, col) : tile.ptr, count * int(sizeof(Value)));
    });
  } else {
    for_each_vector<Value, kThreads>(shared, thread, [&](Value* to, int row, int col) {
      const int count = exist(row, col);
      CUTE_NO_UNROLL
      for (int i = 0; i < kVector; ++i) to[i] = i < count ? source(row, col)[i] : Value(0.f);
    });
  }
}

// Writes a tile from shared memory.
template <int kThreads, class Element, class Shared>
CUTE_DEVICE void store_tile(const GlobalTile<Element>& tile, const Shared& shared, int thread) {
  for_each_vector<Element, kThreads>(shared, thread, [&](Element* from, int row, int col) {
    if (row >= tile.last_row) return;
    Element* to = tile.ptr + row * tile.row_stride + col;
    if (tile.vectors && col + kVector <= tile.cols) {
      *reinterpret_cast<uint128_t*>(to) = *reinterpret_cast<const uint128_t*>(from);
    } else {
      for (int i = 0; i < min(kVector, tile.cols - col); ++i) to[i] = from[i];
    }
  });
}

}  // namespace flash_cute::sm80
