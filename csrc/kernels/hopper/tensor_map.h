// Tiles between global and shared memory by TMA.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "core/problem.h"
#include "core/layout/smem_atoms.h"
#include "core/layout/seq.h"

namespace flash_cute::hopper {

using namespace cute;

// Rows of sequences as the TMA sees them: (dim, row, start, head, batch). `row` and `start` both step along rows, from
// a base that lies `longest` rows early: row i of a sequence of `length` rows from `offset` on is
//
//     row = longest - length + i,   start = offset + length.
//
// So the bound of `row` is the sequence's own end: past it loads read zeros, and stores write nothing.
struct RaggedMap {
  CUtensorMap map;
  int longest;
  int batch_step;  // 0 for packed sequences

  // Brings the map to the SM, long before the first tile moves.
  CUTE_DEVICE void prefetch() const { prefetch_tma_descriptor(&map); }

  // Loads a tile of kRows x kCols from `row` of the sequence `span`; `barrier` counts the bytes. In a cluster each CTA
  // loads a share of the rows and multicasts it to all.
  template <int kRows, int kCols, int kCluster = 1, class Element>
  CUTE_DEVICE void load(Element* to, uint64_t* barrier, TMA::CacheHintSm90 hint, const SeqSpan& span, int row, int head,
                        int batch) const {
    constexpr int kAtom = atom_columns(kCols, sizeof(Element)), kShare = kRows / kCluster;
    static_assert(kShare % 8 == 0, "whole atoms of the swizzle");
    const int first = kCluster == 1 ? 0 : block_rank_in_cluster() * kShare;
    CUTE_UNROLL
    for (int col = 0; col < kCols; col += kAtom) {
      load_atom<kCluster>(to + col * kRows + first * kAtom, barrier, hint, span, row + first, col, head, batch);
    }
  }

  // Loads one atom of columns from `col` on, as many rows as the map's box has; to all CTAs of a cluster.
  template <int kCluster = 1, class Element>
  CUTE_DEVICE void load_atom(Element* to, uint64_t* barrier, TMA::CacheHintSm90 hint, const SeqSpan& span, int row,
                             int col, int head, int batch) const {
    // A box that lies wholly past the sequence's end may fault: it is moved to the last row, as its rows are masked.
    const int i = longest - span.length + min(row, span.length - 1), start = int(span.offset) + span.length;
    if constexpr (kCluster == 1) {
      SM90_TMA_LOAD_5D::copy(&map, barrier, uint64_t(hint), to, col, i, start, head, batch * batch_step);
    } else {
      SM90_TMA_LOAD_MULTICAST_5D::copy(&map, barrier, (1 << kCluster) - 1, uint64_t(hint), to, col, i, start, head,
                                       batch * batch_step);
    }
  }

  // Loads rows of tokens from query `row` on into a tile of kRows x kCols: `head_k` is the kv head of their group.
  template <int kRows, int kCols, class Element>
  CUTE_DEVICE void load_tokens(Element* to, uint64_t* barrier, TMA::CacheHintSm90 hint, const SeqSpan& span, int row,
                               int head_k, int batch) const {
    constexpr int kAtom = atom_columns(kCols, sizeof(Element));
    const bool dense = batch_step != 0;
    const int at[3] = {dense ? row : longest - span.length + row, dense ? head_k : int(span.offset) + span.length,
                       dense ? batch : head_k};
    CUTE_UNROLL
    for (int col = 0; col < kCols; col += kAtom) {
      SM90_TMA_LOAD_5D::copy(&map, barrier, uint64_t(hint), to + col * kRows, col, 0, at[0], at[1], at[2]);
    }
  }

  // Stores rows from `row` on, which exists, as many as the map's box has, of a shared tile of kRows x kCols: columns
  // from `first_col` on.
  template <int kRows, int kCols, class Element>
  CUTE_DEVICE void store(const Element* from, const SeqSpan& span, int row, int head, int batch,
                         int first_col = 0) const {
    constexpr int kAtom = atom_columns(kCols, sizeof(Element));
    CUTE_UNROLL
    for (int col = 0; col < kCols; col += kAtom) {
      SM90_TMA_STORE_5D::copy(&map, from + col * kRows, first_col + col, longest - span.length + row,
                              int(span.offset) + span.length, head, batch * batch_step);
    }
  }
};

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's function, or null. Looked up at run time: the library does not link libcuda.
inline EncodeTiled find_encode_tiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(function)
                                                                      : nullptr;
}

// Encodes a map of numbers of 1 or 2 bytes with the swizzle of an atom of columns; `base` may lie before the memory.
template <int kElement>
cudaError_t encode_map(CUtensorMap& map, void* base, const cuuint64_t (&sizes)[5], const cuuint64_t (&strides)[4],
                       const cuuint32_t (&box)[5]) {
  static const EncodeTiled encode = find_encode_tiled();
  static_assert(kElement == 1 || kElement == 2);
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  auto encode_once = [&] {
    return encode(&map, kElement == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16, 5, base, sizes,
                  strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  box[0] * kElement == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult status = encode_once();
  if (status == CUDA_ERROR_INVALID_CONTEXT) {  // a thread that has not used CUDA yet: cudaFree() creates its context
    if (cudaError_t e = cudaFree(nullptr)) return e;
    status = encode_once();
  }
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// For boxes of `box_rows` rows of an atom of tile_cols columns and `box_heads` heads: all rows of a head, then those
// of the next. Sequences have at most `longest` rows each; packed ones have `total` together, and `total` is -1 for a
// dense tensor.
template <class Element>
cudaError_t make_ragged_map(RaggedMap& result, const TensorView& m, int head_dim, int longest, int64_t total, int heads,
                            int batch, int box_rows, int tile_cols, int box_heads = 1) {
  constexpr int64_t kElement = sizeof(Element);
  const bool dense = total < 0;
  if (!dense) longest = static_cast<int>(std::clamp<int64_t>(longest, 1, total));
  const cuuint64_t sizes[5] = {cuuint64_t(head_dim), cuuint64_t(longest), cuuint64_t((dense ? longest : total) + 1),
                               cuuint64_t(heads), cuuint64_t(dense ? batch : 1)};
  // A dimension of size 1 needs a stride all the same.
  auto bytes = [&](int64_t stride) { return cuuint64_t(stride > 0 ? stride * kElement : 16); };
  const cuuint64_t strides[4] = {bytes(m.row), bytes(m.row), bytes(m.head), bytes(m.batch)};
  const int atom = atom_columns(tile_cols, kElement);
  const cuuint32_t box[5] = {cuuint32_t(atom), cuuint32_t(box_rows), 1, cuuint32_t(box_heads), 1};
  result.longest = longest;
  result.batch_step = dense ? 1 : 0;
  char* const base = static_cast<char*>(m.ptr) - int64_t(longest) * int64_t(strides[0]);
  return encode_map<kElement>(result.map, base, sizes, strides, box);
}

// For load_tokens(): boxes of `tokens` tokens, each with `group` heads. Dense: (dim, head of the group, row, kv head,
// batch); packed: (dim, head of the group, row, start, kv head), where rows start as in RaggedMap.
template <class Element>
cudaError_t make_token_map(RaggedMap& result, const TensorView& m, int head_dim, int longest, int64_t total, int heads,
                           int batch, int group, int tokens, int tile_cols) {
  constexpr int64_t kElement = sizeof(Element);
  const bool dense = total < 0;
  if (!dense) longest = static_cast<int>(std::clamp<int64_t>(longest, 1, total));
  auto bytes = [&](int64_t stride) { return cuuint64_t(stride > 0 ? stride * kElement : 16); };
  const cuuint64_t heads_k = heads / group, of_group = bytes(m.head * group);
  const cuuint64_t sizes[5] = {cuuint64_t(head_dim), cuuint64_t(group), cuuint64_t(longest),
                               dense ? heads_k : cuuint64_t(total + 1), dense ? cuuint64_t(batch) : heads_k};
  const cuuint64_t strides[4] = {bytes(m.head), bytes(m.row), dense ? of_group : bytes(m.row),
                                 dense ? bytes(m.batch) : of_group};
  const cuuint32_t box[5] = {cuuint32_t(atom_columns(tile_cols, kElement)), cuuint32_t(group), cuuint32_t(tokens), 1,
                             1};
  result.longest = longest;
  result.batch_step = dense ? 1 : 0;
  char* const base = static_cast<char*>(m.ptr) - (dense ? 0 : int64_t(longest) * int64_t(strides[1]));
  return encode_map<kElement>(result.map, base, sizes, strides, box);
}

}  // namespace flash_cute::hopper
