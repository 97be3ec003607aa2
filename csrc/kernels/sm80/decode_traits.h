// What the parts of decoding share: types of products and shared memory.
#pragma once

#include "kernels/common/decode_scheduler.h"
#include "kernels/common/softmax.h"
#include "kernels/sm80/cache_copy.h"
#include "kernels/sm80/mma.h"

namespace flash_cute::sm80 {

// A part, its blocks less those without any key that its queries see, and these keys.
struct VisibleSplit {
  KvSplit split;
  RowSpan keys;
};

template <KernelConfig C>
using SplitsOf = SplitIterator<C.block_m, C.block_n>;

// Queries of the unit that a part belongs to.
CUTE_DEVICE RowSpan queries_of(const DecodeProblem& p, const KvSplit& split, int block_m) {
  return {p.group.div(split.row), min(p.group.div(split.row + block_m - 1) + 1, split.seq.q.length)};
}

// How many of the tile's rows the unit of a part has.
CUTE_DEVICE int rows_of(const DecodeProblem& p, const KvSplit& split, int block_m) {
  return min(split.seq.q.length * p.group.value - split.row, block_m);
}

template <KernelConfig C>
struct DecodeTraits {
  using Element = typename Mma16816<C.dtype>::Element;
  static constexpr int kRowWarps = C.block_m / 16, kTeams = C.teams(), kTeamThreads = 32 * kRowWarps;
  static constexpr int kKeys = C.block_n / kTeams;  // of a team's tile
  // Whether Q stays in registers, or is read again for each tile of keys, into two slots by turns.
  static constexpr bool kKeepsQ = kRowWarps == 1 && C.head_dim <= 64;
  static constexpr int kSteps = C.head_dim / 16, kSlots = kKeepsQ ? kSteps : 2;
  using Mma = RowsMma<C.dtype, C.block_m, kRowWarps>;
  using OperandQ = SharedOperand<Side::A, false, Element, C.block_m, C.head_dim, kRowWarps>;
  using OperandK = SharedOperand<Side::B, false, Element, kKeys, C.head_dim, 1>;
  using OperandV = SharedOperand<Side::B, true, Element, kKeys, C.head_dim_v, 1>;
  using Copy = CacheCopy<Element, kTeamThreads, kKeys, C.head_dim, C.head_dim_v>;

  // SplitIterator that are described at a time: the one that is computed, those that can have tiles in the ring meanwhile, and
  // the one that is being described.
  static constexpr int kDescribed = C.stages + 1;

  // Keys and values of a team. Once a part's last ones are read, their place takes the team's outputs: block_m rows of
  // head_dim_v numbers in fp32, at result_column().
  struct Tile {
    alignas(128) Element k[kKeys * C.head_dim];
    alignas(128) Element v[kKeys * C.head_dim_v];

    CUTE_DEVICE float* results() { return reinterpret_cast<float*>(this); }
  };
  struct Storage {
    alignas(128) Element q[2][C.block_m * C.head_dim];  // of the part that is computed, and of the next
    Tile kv[C.stages][kTeams];
    VisibleSplit splits[kDescribed];  // by turns
    SplitsOf<C> more_splits;  // not described yet
    alignas(16) RowSum sums[C.block_m][kTeams];
    bool last;  // whether the part is the last of its unit to be done
  };
  static constexpr int kStageBytes = kTeams * sizeof(Tile);
  static_assert(C.warps % kRowWarps == 0 && C.block_n % (16 * kTeams) == 0);
  static_assert(C.stages >= 2);
  static_assert(kTeams == 1 || C.block_m * C.head_dim_v * sizeof(float) <= sizeof(Tile), "results fit into a tile");
  static_assert(sizeof(Storage) <= C.smem_bytes(), "KernelConfig::smem_bytes() must agree");
};

// Where column `column` of a row of results is: teams write eight rows at once into shared memory, without a bank
// conflict.
CUTE_DEVICE int result_column(int row, int column) {
  return column ^ row % 4 * 8;
}

}  // namespace flash_cute::sm80
