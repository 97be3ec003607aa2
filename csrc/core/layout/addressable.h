// What TMA can address, on the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "core/layout/smem_atoms.h"
#include "core/problem.h"

namespace flash_cute {

// Whether TMA can address all of a tensor.
inline bool addressable(const TensorView& m, DType dtype, int64_t rows, int heads, int batch) {
  constexpr int64_t kStrideLimit = int64_t{1} << 40;  // bytes
  auto fits = [&](int64_t stride, int64_t steps) {
    return steps <= 1 || (0 < stride && stride < kStrideLimit / element_bytes(dtype));
  };
  return m.vectors && batch > 0 && heads > 0 && 0 < rows && rows < INT32_MAX && fits(m.row, rows) &&
         fits(m.head, heads) && fits(m.batch, batch);
}

// Whether TMA can address all tensors with rows of queries and of keys that a kernel accesses.
inline bool addressable(const FwdProblem& p, std::initializer_list<TensorView> queries,
                        std::initializer_list<TensorView> keys) {
  auto all = [&](std::initializer_list<TensorView> tensors, bool dense, int64_t longest, int64_t total, int heads) {
    return std::all_of(tensors.begin(), tensors.end(), [&](const TensorView& m) {
      return addressable(m, p.dtype, dense ? longest : total, heads, dense ? p.batch : 1);
    });
  };
  const bool paged = p.pages.ids != nullptr;
  auto addressable_pages = [&](const TensorView& m) {
    return addressable(m, p.dtype, p.pages.size, p.heads_k, p.pages.count);
  };
  return all(queries, p.dense(), p.seqlen_q, p.total_q, p.heads) &&
         (paged ? std::all_of(keys.begin(), keys.end(), addressable_pages)
                : all(keys, p.dense_keys(), p.seqlen_k, p.total_k, p.heads_k));
}

// Whether an atom of columns of a tile, the unit of TMA, would lie wholly past a head dim: TMA faults on boxes that are
// entirely out of bounds.
inline bool has_empty_columns(DType dtype, int tile_columns, int head_dim) {
  return head_dim <= tile_columns - atom_columns(tile_columns, element_bytes(dtype));
}

}  // namespace flash_cute
