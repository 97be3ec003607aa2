// MMA types and shared memory of the roles of the 2-CTA backward.
#pragma once

#include "kernels/sm90/backward_traits.h"

namespace flash_cute::sm90 {

// State of the thread that fetches key tiles, in each CTA of the cluster.
struct FetchState {
  int number;  // of the next tile
  int packed_tiles;  // of a head, if keys are packed
  PackedTiles packed;
  uint32_t steps;  // of earlier tiles
  PipelineState<2> at;  // of the work descriptions
  PipelineState<1> at_next;
};

template <KernelConfig C>
struct TwoCtaTraits {
  using Element = ElementOf<C.dtype>;
  static constexpr int kAtom = 64;  // keys, queries, and dims of a swizzle atom
  static constexpr int kTile = kAtom * kAtom;
  static constexpr int kAtoms = C.head_dim / kAtom;
  using LayoutK = RowsLayout<Element, kAtom, C.head_dim>;  // (key,dim), and Q: (query,dim)
  using LayoutV = RowsLayout<Element, kAtom, C.head_dim_v>;  // (key,dim), and dO: (query,dim)
  using LayoutQ = LayoutK;
  using LayoutV1 = RowsLayout<Element, kAtom, C.head_dim_v - kAtom>;  // V and dO without their first atom of columns
  using LayoutQt = ColumnsLayout<Element, kAtom, C.head_dim>;  // (dim,query)
  using LayoutDoutT = ColumnsLayout<Element, kAtom, C.head_dim_v>;  // (dim,query)
  using LayoutTile = RowsLayout<Element, kAtom, kAtom>;  // P and dS: (key,query); the first columns of V and dO
  using LayoutTileT = ColumnsLayout<Element, kAtom, kAtom>;  // (query,key), (dim,key)

  using Tile = Shape<Int<kAtom>, Int<kAtom>, Int<kAtom>>;
  using MmaScores = decltype(make_tiled_mma(GMMA::ss_op_selector<Element, Element, float, Tile>()));
  using MmaV0 = decltype(make_tiled_mma(GMMA::rs_op_selector<Element, Element, float, Tile>()));
  // dK = dS^T Q and dV = P^T dO: no more columns per product than registers allow at kernel start.
  template <int kDims>
  using MmaKeys = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<Int<kAtom>, Int<kDims == 256 ? 128 : kDims>, Int<kAtom>>,
                           GMMA::Major::K, GMMA::Major::MN>()));
  using OpQ = decltype(GMMA::ss_op_selector<Element, Element, float, Tile, GMMA::Major::MN, GMMA::Major::MN>());
  using MmaDq = decltype(make_tiled_mma(OpQ{}));  // dQ = dS K: one atom of columns

  // Each CTA sums two atoms of dQ's columns, an outer and an inner one. With three atoms the middle one is inner to
  // both: they take turns, by tiles of queries and heads, so that the semaphore of a tile orders its adds.
  CUTE_HOST_DEVICE static constexpr int dq_atom(int rank, bool inner) {
    return inner ? 1 + rank * (kAtoms - 3) : rank * (kAtoms - 1);
  }
  CUTE_DEVICE static bool has_inner(int rank, const BackwardStep& step) {
    return kAtoms == 4 || (step.first_query / C.block_m + step.head) % C.cluster == rank;
  }

  // All columns of dQ, one atom per warpgroup of the postprocess.
  static constexpr int kDqGroups = kAtoms;
  using MmaQ = decltype(make_tiled_mma(OpQ{}, Layout<Shape<_1, Int<kDqGroups>, _1>>{}));
  CUTE_DEVICE static float* dq_sums(const BwdParams& p, int64_t padded_row, int atom) {
    return p.dq_accum + padded_row * C.head_dim + atom * kTile;
  }

  // Per thread after setmaxnreg; their sum over threads is what the CTA starts with.
  static constexpr int kProducerRegisters = 32, kScoreRegisters = 128, kValueRegisters = 192, kKeyRegisters = 160;
  // Named barriers: one of all consumer warpgroups, one of each.
  static constexpr int kAllGroupsBarrier = 1, kGroupBarrier = 2;

  // dQ semaphores that may be held before one is released.
  static constexpr int kSemaphores = 4;

  // Atoms of the other CTA's K that meet its dS here, and the first of them.
  static constexpr int kAtomsOfOther = 2;
  CUTE_HOST_DEVICE static constexpr int first_of_other(int rank) { return rank * (kAtoms - kAtomsOfOther); }

  struct Storage {
    alignas(1024) Element k[kAtom * C.head_dim];  // dK in the epilogue
    alignas(1024) Element k_of_other[kAtomsOfOther * kTile];
    alignas(1024) Element v[kAtom * C.head_dim_v];  // P in the buffer of the first columns, dV in the epilogue
    alignas(1024) Element q[C.stages][kAtom * C.head_dim];
    alignas(1024) Element dout[C.stages][kAtom * C.head_dim_v];
    alignas(1024) Element ds[2][kTile];  // of this CTA's keys, and of the other's
    alignas(128) float lse_log2[C.stages][kAtom];
    alignas(128) float row_dot[C.stages][kAtom];
    WorkOf<C> work[2];
    StepOf<C> steps[2][C.stages];  // in the stages of Q, and of dO
    Pipeline<2> pipeline_work;
    Pipeline<1, C.cluster> pipeline_next;
    int next;  // the number that the cluster fetched last
    FetchState fetched;
    PackedOrderOf<C> order;
    uint32_t times_landed[2][C.stages], times_landed_k;  // tiles whose first rows the producer cleared
    Pipeline<C.stages, C.cluster> pipeline_q, pipeline_dout;
    Pipeline<1> pipeline_k, pipeline_v, pipeline_p;
    Pipeline<1, C.cluster> pipeline_ds;
    Pipeline<1> pipeline_peer_ds;
    Pipeline<kSemaphores> pipeline_semaphore,
        pipeline_added;  // semaphores that are held, and that have been used
    bool first_stores[kSemaphores];  // the tile starts the sums
    // Tiles whose first rows a producer clears: of Q and dO; of K.
    cutlass::arch::ClusterTransactionBarrier landed[2][C.stages], landed_k;
  };
  static_assert(C.block_m == kAtom && C.block_n == kAtom && C.warps == 12 && C.cluster == 2,
                "a pair of CTAs with 64 keys each, and three warpgroups");
  static_assert(kAtoms == 3 || kAtoms == 4, "columns of dQ for four warpgroups");
  static_assert(sizeof(Storage) <= smem_bytes(C), "resources.h must agree");
};

}  // namespace flash_cute::sm90
