// The pass after decode that combines the splits of each work tile.
#pragma once

#include "kernels/common/pdl.h"
#include "kernels/decode/combine.h"

namespace flash_cute::decode {

CUTE_HOST_DEVICE int tiles_of_sequence(const DecodeParams& p, int block_m) {
  return static_cast<int>((int64_t(p.fwd.seqlen_q) * p.group.value + block_m - 1) / block_m);
}

// The place of a split's work tile in DecodeWorkspace::slots_of_tiles.
CUTE_DEVICE int number_of_tile(const DecodeParams& p, const KvSplit& split, int block_m) {
  return (split.b * tiles_of_sequence(p, block_m) + split.row / block_m) * p.fwd.heads_k + split.head_k;
}

// A CTA has kRows rows, and kWarps warps each of them.
template <KernelConfig C, int kRows, int kWarps>
__global__ void __launch_bounds__(32 * kRows * kWarps) merge_rows(const __grid_constant__ DecodeParams p) {
  static_assert(kRows == 1 || kWarps == 1);
  constexpr int kCtas = cute::ceil_div(C.block_m, kRows);  // of a work tile
  constexpr int kAtOnce = 16;
  const int number = blockIdx.x / kCtas, i = blockIdx.x % kCtas * kRows + threadIdx.x / (32 * kWarps);
  const int tile = p.heads_k.div(number), tiles = tiles_of_sequence(p, C.block_m);  // tile: over all sequences
  launch_dependent_grids();
  // After this wait the results of all splits are there, and lengths are final.
  wait_on_dependent_grids();
  KvSplit split;
  split.head_k = number - tile * p.fwd.heads_k;
  split.b = tile / tiles;
  split.row = tile % tiles * C.block_m;
  split.seq = cached_seq(p, split.b);
  if (i >= rows_of(p, split, C.block_m)) return;
  const auto [count, first] = p.slots_of_tiles[number];
  if (count == 1) return;
  split.all = {p.even_splits() && !p.by_clusters(), count, first};
  const RowDestination<C> row(p, split, i, true);
  auto row_of = [&](int n) { return int64_t(split.all.slot(n)) * C.block_m + i; };
  const float lse = merge_row<4, kAtOnce, kWarps>(
      count, [&](int n) { return p.split_lse[row_of(n)]; },
      [&](int n, int column) {
        return *reinterpret_cast<const cutlass::AlignedArray<float, 4>*>(p.split_out + row_of(n) * C.head_dim_v +
                                                                         column);
      },
      p.fwd.head_dim_v, row.sink,
      [&](int column, const auto& x) { row.visit([&](auto* to) { store(to + column, x); }); });
  if (threadIdx.x % (32 * kWarps) == 0) *row.lse = lse;
}

}  // namespace flash_cute::decode
