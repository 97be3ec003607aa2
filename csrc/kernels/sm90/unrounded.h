// Stores gradients in fp32.
#pragma once

#include <cute/tensor.hpp>

#include "core/layout/seq.h"

namespace flash_cute::sm90 {

using namespace cute;

// Writes the existing elements of an accumulator, at the coordinates `at` of a tile. The tile begins at row `row` of
// its sequence, and at column `col`.
template <class Accumulator, class Coordinates>
CUTE_DEVICE void store_unrounded(const Accumulator& acc, const Coordinates& at, const TensorView& m,
                                 const SeqSpan& span, int row, int head, int batch, int col, int cols) {
  float* const to = static_cast<float*>(m.ptr) + batch * m.batch + head * m.head + (span.offset + row) * m.row + col;
  CUTE_UNROLL
  for (int i = 0; i < size(acc); ++i) {
    const int down = get<0>(at(i)), across = get<1>(at(i));
    if (row + down < span.length && col + across < cols) to[down * m.row + across] = acc(i);
  }
}

}  // namespace flash_cute::sm90
