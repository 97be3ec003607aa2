// Sums dK and dV over the splits of key tiles whose work was split.
#pragma once

#include "kernels/sm90/backward_consumers.h"
#include "kernels/sm90/unrounded.h"

namespace flash_cute::sm90 {

// Swizzle atoms of columns.
template <KernelConfig C>
constexpr int kAtomsOfDk = C.head_dim / atom_columns(C.head_dim, element_bytes(C.dtype));
template <KernelConfig C>
constexpr int kAtomsOfDv = C.head_dim_v / atom_columns(C.head_dim_v, element_bytes(C.dtype));

// One atom of columns of dK or dV of 64 keys; splits are added in a fixed order.
template <KernelConfig C, bool kValues>
CUTE_DEVICE void add_splits(const BackwardParams& params, int split_tile, const KeyTile& tile, const SeqSpan& span,
                            int atom) {
  using Element = ElementOf<C.dtype>;
  constexpr int kCols = atom_columns(kValues ? C.head_dim_v : C.head_dim, sizeof(Element));
  // The accumulator layout of any warpgroup whose products have keys as rows.
  using Mma = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<Int<kSlabRows>, Int<kCols>, Int<kSlabRows>>>()));
  __shared__ alignas(1024) Element shared[kSlabRows * kCols];
  const BwdParams& p = params.p;
  Tensor sum = partition_fragment_C(Mma{}, Shape<Int<kSlabRows>, Int<kCols>>{});  // (MMA,1,1)
  clear(sum);
  constexpr int kAtOnce = 4;  // splits whose loads are in flight together
  CUTE_NO_UNROLL
  for (int first = 0; first < p.splits.count(); first += kAtOnce) {
    float more[kAtOnce][decltype(size(sum))::value];
    CUTE_UNROLL
    for (int split = 0; split < kAtOnce; ++split) {
      const bool exists = first + split < p.splits.count();
      const float* const sums =
          split_sums<C, kValues>(p, split_tile, tile, span, tile.row, first + split) + atom * kSlabRows * kCols;
      CUTE_UNROLL
      for (int i = 0; i < size(sum); ++i) more[split][i] = exists ? sums[i * 128 + threadIdx.x] : 0.f;
    }
    CUTE_UNROLL
    for (int split = 0; split < kAtOnce; ++split) {
      CUTE_UNROLL
      for (int i = 0; i < size(sum); ++i) sum(i) += more[split][i];
    }
  }
  if (p.fp32_gradients) {
    Tensor at = Mma{}.get_slice(threadIdx.x).partition_C(make_identity_tensor(Shape<Int<kSlabRows>, Int<kCols>>{}));
    store_unrounded(sum, at, kValues ? p.dv : p.dk, span, tile.row, tile.head, tile.batch, atom * kCols,
                    kValues ? p.fwd.head_dim_v : p.fwd.head_dim);
    return;
  }
  write_gradient<kCols>(shared, converted<Element>(sum), threadIdx.x);
  // After this barrier all rows are in shared memory.
  __syncthreads();
  if (threadIdx.x != 0) return;
  (kValues ? params.dv : params.dk)
      .template store<kSlabRows, kCols>(shared, span, tile.row, tile.head, tile.batch, atom * kCols);
  tma_store_arrive();
  tma_store_wait<0>();
}

template <KernelConfig C>
__global__ void __launch_bounds__(128) backward_combine(const __grid_constant__ BackwardParams params) {
  constexpr int kAtoms = kAtomsOfDk<C> + kAtomsOfDv<C>, kRows = C.block_n * C.cluster, kSlabs = kRows / kSlabRows;
  const FwdProblem& f = params.p.fwd;
  const int split_tile = blockIdx.x / (kSlabs * kAtoms);
  KeyTile tile(f, kRows, params.p.order.sets, params.p.order.late_first, params.p.splits.whole_tiles + split_tile);
  tile.row += blockIdx.x / kAtoms % kSlabs * kSlabRows;
  const SeqSpan span = SeqInfo(f, tile.batch).k;
  // After this wait all splits have stored their sums.
  wait_on_dependent_grids();
  // Not earlier: the next kernel waits for this one only, and reads what the previous one wrote.
  launch_dependent_grids();
  if (tile.row >= span.length) return;
  const int atom = blockIdx.x % kAtoms;
  if (atom < kAtomsOfDk<C>) {
    add_splits<C, false>(params, split_tile, tile, span, atom);
  } else {
    add_splits<C, true>(params, split_tile, tile, span, atom - kAtomsOfDk<C>);
  }
}

}  // namespace flash_cute::sm90
