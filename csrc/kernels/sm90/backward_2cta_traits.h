// What the threads of Hopper's backward for wide heads share: its types of products, and shared memory.
#pragma once

#include "kernels/sm90/backward_traits.h"

namespace flash_cute::sm90 {

// What the thread remembers that takes tiles of keys for the pair, in each CTA.
struct FetchState {
  int number;  // of the next tile
  uint32_t steps;  // of tiles before
  PipelineState<2> at;  // of its work
  PipelineState<1> at_next;
};

template <KernelConfig C>
struct TwoCtaTraits {
  using Element = ElementOf<C.dtype>;
  static constexpr int kAtom = 64;  // keys, queries, and dims that lie together
  static constexpr int kTile = kAtom * kAtom;
  static constexpr int kAtoms = C.head_dim / kAtom;
  using LayoutK = RowsLayout<Element, kAtom, C.head_dim>;  // (key,dim), and Q: (query,dim)
  using LayoutV = RowsLayout<Element, kAtom, C.head_dim_v>;  // (key,dim), and dO: (query,dim)
  using LayoutQ = LayoutK;
  using LayoutV1 = RowsLayout<Element, kAtom, C.head_dim_v - kAtom>;  // V and dO behind their first columns
  using LayoutQt = ColumnsLayout<Element, kAtom, C.head_dim>;  // (dim,query)
  using LayoutDoutT = ColumnsLayout<Element, kAtom, C.head_dim_v>;  // (dim,query)
  using LayoutTile = RowsLayout<Element, kAtom, kAtom>;  // P and dS: (key,query), the first columns of V and dO
  using LayoutTileT = ColumnsLayout<Element, kAtom, kAtom>;  // (query,key), (dim,key)

  using Tile = Shape<Int<kAtom>, Int<kAtom>, Int<kAtom>>;
  using MmaScores = decltype(make_tiled_mma(GMMA::ss_op_selector<Element, Element, float, Tile>()));
  using MmaV0 = decltype(make_tiled_mma(GMMA::rs_op_selector<Element, Element, float, Tile>()));
  // dK = dS^T Q and dV = P^T dO: no more columns at once than a thread has registers for at its start.
  template <int kDims>
  using MmaKeys = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<Int<kAtom>, Int<kDims == 256 ? 128 : kDims>, Int<kAtom>>,
                           GMMA::Major::K, GMMA::Major::MN>()));
  using OpQ = decltype(GMMA::ss_op_selector<Element, Element, float, Tile, GMMA::Major::MN, GMMA::Major::MN>());
  using MmaDq = decltype(make_tiled_mma(OpQ{}));  // dQ = dS K: an atom of its columns

  // Of dQ's columns each CTA of a pair sums up two atoms, an outer one and an inner one. Of three atoms, the one in the
  // middle is inner to both: each adds what its own keys give, to sums of its own.
  static constexpr bool kInnerShared = kAtoms == 3;
  CUTE_HOST_DEVICE static constexpr int dq_atom(int rank, bool inner) {
    return inner ? 1 + rank * (kAtoms - 3) : rank * (kAtoms - 1);
  }

  // Of all columns of dQ, an atom for each warpgroup.
  static constexpr int kDqGroups = kAtoms;
  using MmaQ = decltype(make_tiled_mma(OpQ{}, Layout<Shape<_1, Int<kDqGroups>, _1>>{}));
  // Which of the four atoms of sums they are.
  CUTE_HOST_DEVICE static constexpr int dq_place(int rank, bool inner) { return inner ? 1 + rank : 3 * rank; }
  CUTE_DEVICE static float* dq_sums(const BwdProblem& p, int64_t padded_row, int place) {
    return p.dq_accum + padded_row * C.dq_columns() + place * kTile;
  }

  // Of a thread, together as many as the CTA has at its start.
  static constexpr int kProducerRegisters = 32, kScoreRegisters = 128, kValueRegisters = 192, kKeyRegisters = 160;
  // Named barriers: of all warpgroups that compute, and of the threads of each.
  static constexpr int kAllGroupsBarrier = 1, kGroupBarrier = 2;

  // Turns to add to dQ that may be given before one of them has ended.
  static constexpr int kSemaphores = 4;

  // Of the other CTA's keys, those columns that meet its dS here.
  static constexpr int kAtomsOfOther = kAtoms - 2;

  struct Storage {
    alignas(1024) Element k[kAtom * C.head_dim];  // dK on the way out
    alignas(1024) Element k_of_other[kAtomsOfOther * kTile];
    alignas(1024) Element v[kAtom * C.head_dim_v];  // P in the place of the first columns, dV on the way out
    alignas(1024) Element q[C.stages][kAtom * C.head_dim];
    alignas(1024) Element dout[C.stages][kAtom * C.head_dim_v];
    alignas(1024) Element ds[2][kTile];  // of this CTA's keys, and of the other's
    alignas(128) float lse_log2[C.stages][kAtom];
    alignas(128) float row_dot[C.stages][kAtom];
    BackwardWork work[2];
    BackwardStep steps[2][C.stages];  // that use Q, and dO
    Pipeline<2> pipeline_work;
    Pipeline<1, C.cluster> pipeline_next;
    int next;  // the number that the pair took last
    FetchState fetched;
    uint32_t times_landed[2][C.stages], times_landed_k;  // of tiles of which a producer clears rows
    Pipeline<C.stages, C.cluster> pipeline_q, pipeline_dout;
    Pipeline<1> pipeline_k, pipeline_v, pipeline_p;
    Pipeline<1, C.cluster> pipeline_ds;
    Pipeline<1> pipeline_peer_ds;
    Pipeline<kSemaphores> pipeline_semaphore,
        pipeline_added;  // turns to add to the CTA's columns of dQ, given and used
    bool first_stores[kSemaphores];  // there are no sums to add to
    // Tiles of which a producer clears rows: of Q and of dO; and of K.
    cutlass::arch::ClusterTransactionBarrier landed[2][C.stages], landed_k;
  };
  static_assert(C.block_m == kAtom && C.block_n == kAtom && C.warps == 12 && C.cluster == 2,
                "a pair of CTAs with 64 keys each, and three warpgroups");
  static_assert(kAtoms == 3 || kAtoms == 4, "columns of dQ for four warpgroups");
  static_assert(sizeof(Storage) <= C.smem_bytes(), "KernelConfig::smem_bytes() must agree");
};

}  // namespace flash_cute::sm90
