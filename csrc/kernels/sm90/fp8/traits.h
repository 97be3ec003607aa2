// Parameters, MMA types and shared memory of the forward of e4m3 inputs. Q, K and work tiles are those of the forward
// of 16 bits.
#pragma once

#include "core/layout/transposed_values.h"
#include "kernels/sm90/forward_traits.h"
#include "kernels/sm90/fp8/resources.h"

namespace flash_cute::sm90 {
namespace fp8 {

// Transposed V as the TMA sees it: (key, dim, head, sequence), where packed sequences are one.
struct ValuesMap {
  CUtensorMap map;

  // Loads all dims of a tile of keys; `barrier` counts the bytes.
  template <class Element>
  CUTE_DEVICE void load(Element* to, uint64_t* barrier, int key, int head, int sequence) const {
    SM90_TMA_LOAD_5D::copy(&map, barrier, uint64_t(TMA::CacheHintSm90::EVICT_LAST), to, key, 0, head, sequence, 0);
  }
};

struct Fp8Params : ForwardParams {
  ValuesMap values;
  int64_t keys_of_values;  // TransposedValues::keys
};

// The wgmma of P V for so many columns of V's tile.
template <int kColumns>
struct ValueMma;
template <>
struct ValueMma<72> {
  using Atom = SM90::GMMA::MMA_64x72x32_F32E4M3E4M3_RS_TN<>;
};
template <>
struct ValueMma<128> {
  using Atom = SM90::GMMA::MMA_64x128x32_F32E4M3E4M3_RS_TN<>;
};
template <>
struct ValueMma<136> {
  using Atom = SM90::GMMA::MMA_64x136x32_F32E4M3E4M3_RS_TN<>;
};

}  // namespace fp8

template <KernelConfig C>
  requires(C.dtype == DType::E4M3)
struct ForwardTraits<C> {
  using Element = ElementOf<C.dtype>;
  static constexpr int kGroups = C.warps / 4;  // warpgroups that compute
  using Work = WorkTile<SharedKvInterval<C.block_n, kGroups, TransposedValues::kTile>>;
  using LayoutQ = RowsLayout<Element, C.block_m, C.head_dim>;  // (row,dim)
  using LayoutK = RowsLayout<Element, C.block_n, C.head_dim>;  // (key,dim)
  using Groups = Layout<Shape<Int<kGroups>, _1, _1>>;
  using MmaQK = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<Int<C.block_m>, Int<C.block_n>, Int<C.head_dim>>>(),
      Groups{}));
  // V in parts of kPartDims; the last one has columns of ones, whose products are the sums of the rounded weights.
  static constexpr int kPartDims = fp8::part_dims(C), kParts = C.head_dim_v / kPartDims;
  template <int kPart>
  static constexpr int kColumns = kPartDims + (kPart == kParts - 1 ? fp8::kOnes : 0);
  template <int kPart>
  using LayoutV = RowsLayout<Element, kColumns<kPart>, C.block_n>;  // (dim,key)
  template <int kPart>
  using MmaPV = decltype(make_tiled_mma(typename fp8::ValueMma<kColumns<kPart>>::Atom{}, Groups{}));
  using LayoutP = Layout<Shape<Shape<_4, _2, _2>, _1, Int<C.block_n / 32>>>;  // a thread's operand (MMA,1,MMA_K)
  static constexpr uint32_t kBytesQ = C.block_m * C.head_dim, kBytesV = C.block_n * C.head_dim_v;
  static constexpr int kStagesQ = fp8::kQueryTiles;
  static constexpr int kWorkTiles = kStagesQ + 2;
  static constexpr bool kOwnOutput = true;  // no thread waits for O before it loads
  // Per thread after setmaxnreg; their sum over threads is what the CTA starts with.
  static constexpr int kServingRegisters = kGroups == 3 ? 32 : 24, kConsumerRegisters = kGroups == 3 ? 160 : 240;

  struct Storage {
    alignas(1024) Element q[kStagesQ][C.block_m * C.head_dim];
    alignas(1024) Element k[C.stages][C.block_n * C.head_dim];
    alignas(1024) Element v[C.stages][C.block_n * (C.head_dim_v + fp8::kOnes)];  // transposed
    Pipeline<C.stages> pipeline_k, pipeline_v;
    Pipeline<kStagesQ> pipeline_q;
    Pipeline<2> pipeline_next;
    int next[2];
    FetchedLengths lengths;
    cutlass::arch::ClusterBarrier keys_sent_for;  // all paged keys of a tile are under way
    Work work[kWorkTiles];  // one is in use, kStagesQ wait, one is being written
  };

  static_assert(C.block_n == TransposedValues::kTile && C.block_m == 64 * kGroups && C.cluster == 1);
  static_assert(tile_size<1>(MmaQK{}) == C.block_n);
  static_assert(sizeof(Storage) <= fp8::smem_bytes(C), "resources.h must agree");
};

}  // namespace flash_cute::sm90
