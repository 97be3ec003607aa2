// Matrix products of tiles with mma.sync, operands read from shared memory by ldmatrix.
#pragma once

#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>

#include "core/config.h"
#include "kernels/common/fragment.h"

namespace flash_cute::sm80 {

using namespace cute;

template <DType dtype>
struct Mma16816;
template <>
struct Mma16816<DType::FP16> {
  using Element = cutlass::half_t;
  using Atom = MMA_Atom<SM80_16x8x16_F32F16F16F32_TN>;
};
template <>
struct Mma16816<DType::BF16> {
  using Element = cutlass::bfloat16_t;
  using Atom = MMA_Atom<SM80_16x8x16_F32BF16BF16F32_TN>;
};

// kWarpsM x kWarpsN warps, each on 16 x 16 pieces, so that one ldmatrix fills a whole B fragment.
template <DType dtype, int kWarpsM, int kWarpsN>
using WarpMma = TiledMMA<typename Mma16816<dtype>::Atom, Layout<Shape<Int<kWarpsM>, Int<kWarpsN>, _1>>,
                         Tile<Int<16 * kWarpsM>, Int<16 * kWarpsN>, _16>>;

template <class Element>
using LoadMatrix = Copy_Atom<SM75_U32x4_LDSM_N, Element>;
template <class Element>
using LoadMatrixTransposed = Copy_Atom<SM75_U16x8_LDSM_T, Element>;

// One operand of a product: where a thread reads it in shared memory, and its registers.
template <class TiledCopy, class Shared, class Fragment>
struct SharedOperand {
  TiledCopy copy;
  Shared shared;      // (CPY,CPY_M,CPY_K)
  Fragment fragment;  // (MMA,MMA_M,MMA_K)

  CUTE_DEVICE void load(int k, int thread) {
    Tensor registers = copy.get_slice(thread).retile_D(fragment);  // (CPY,CPY_M,CPY_K)
    cute::copy(copy, shared(_, _, k), registers(_, _, k));
  }
};

// A fragment's shape depends on the tile's shape alone, not on how shared memory is swizzled.
template <class Element, class Layout>
CUTE_DEVICE auto shape_only(const Tensor<ViewEngine<smem_ptr<Element*>>, Layout>& t) {
  return make_tensor(make_smem_ptr<Element>(nullptr), make_layout(shape(t)));
}

template <class Atom, class Mma, class Shared>
CUTE_DEVICE auto operand_a(const Mma& mma, const Shared& shared /* (M,K) */, int thread) {
  auto copy = make_tiled_copy_A(Atom{}, mma);
  Tensor fragment = mma.get_slice(thread).partition_fragment_A(shape_only(shared));
  Tensor view = copy.get_slice(thread).partition_S(shared);
  return SharedOperand<decltype(copy), decltype(view), decltype(fragment)>{copy, view, fragment};
}

template <class Atom, class Mma, class Shared>
CUTE_DEVICE auto operand_b(const Mma& mma, const Shared& shared /* (N,K) */, int thread) {
  auto copy = make_tiled_copy_B(Atom{}, mma);
  Tensor fragment = mma.get_slice(thread).partition_fragment_B(shape_only(shared));
  Tensor view = copy.get_slice(thread).partition_S(shared);
  return SharedOperand<decltype(copy), decltype(view), decltype(fragment)>{copy, view, fragment};
}

// acc += A B^T. Registers for step k + 1 are on their way while the tensor cores work on step k.
template <class Mma, class Accumulator, class A, class B>
CUTE_DEVICE void gemm(const Mma& mma, Accumulator& acc, A a, B b, int thread) {
  a.load(0, thread);
  b.load(0, thread);
  constexpr int kSteps = decltype(size<2>(a.fragment))::value;
  CUTE_UNROLL
  for (int k = 0; k < kSteps; ++k) {
    if (k + 1 < kSteps) {
      a.load(k + 1, thread);
      b.load(k + 1, thread);
    }
    cute::gemm(mma, a.fragment(_, _, k), b.fragment(_, _, k), acc);
  }
}

// acc += A B^T with A in registers, (MMA,MMA_M,MMA_K).
template <class Mma, class Accumulator, class Registers, class B>
CUTE_DEVICE void gemm_registers(const Mma& mma, Accumulator& acc, const Registers& a, B b, int thread) {
  b.load(0, thread);
  constexpr int kSteps = decltype(size<2>(a))::value;
  CUTE_UNROLL
  for (int k = 0; k < kSteps; ++k) {
    if (k + 1 < kSteps) b.load(k + 1, thread);
    cute::gemm(mma, a(_, _, k), b.fragment(_, _, k), acc);
  }
}

// Rounds an accumulator and writes it to a shared tile (M,N).
template <class Element, class Mma, class Accumulator, class Shared>
CUTE_DEVICE void store_accumulator(const Mma& mma, const Accumulator& acc, const Shared& shared, int thread) {
  auto copy = make_tiled_copy_C(Copy_Atom<UniversalCopy<uint32_t>, Element>{}, mma);
  auto slice = copy.get_slice(thread);
  Tensor rounded = converted<Element>(acc);
  cute::copy(copy, slice.retile_S(rounded), slice.partition_D(shared));
}

}  // namespace flash_cute::sm80
