// Products of a warpgroup by wgmma, and views of its accumulators.
#pragma once

#include <cute/arch/mma_sm90.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "kernels/common/element.h"
#include "kernels/hopper/tensor_map.h"

namespace flash_cute::hopper {

using namespace cute;

// Whether a tile's swizzle atoms have 128 bytes of columns, else 64.
template <class Element, int kCols>
constexpr bool kWholeAtom = atom_columns(kCols, sizeof(Element)) * sizeof(Element) == 128;

// The shared layout that RaggedMap loads: an atom of columns of all rows, then the next atom.
template <class Element, int kRows, int kCols>
using RowsLayout =
    decltype(tile_to_shape(std::conditional_t<kWholeAtom<Element, kCols>, GMMA::Layout_K_SW128_Atom<Element>,
                                              GMMA::Layout_K_SW64_Atom<Element>>{},
                           Shape<Int<kRows>, Int<kCols>>{}));  // (row,col)

// All buffers of a tile: (row,col,buffer).
template <class Layout, class Element, size_t kBuffers, size_t kSize>
CUTE_DEVICE auto shared_tiles(Element (&buffers)[kBuffers][kSize], const Layout& layout) {
  return make_tensor(make_smem_ptr(buffers[0]), append<3>(layout, make_layout(Int<kBuffers>{}, Int<kSize>{})));
}

// The same tile as the operand whose K dimension runs along its rows.
template <class Element, int kRows, int kCols>
using ColumnsLayout =
    decltype(tile_to_shape(std::conditional_t<kWholeAtom<Element, kCols>, GMMA::Layout_MN_SW128_Atom<Element>,
                                              GMMA::Layout_MN_SW64_Atom<Element>>{},
                           Shape<Int<kCols>, Int<kRows>>{}, Step<_2, _1>{}));  // (col,row)

// An accumulator as a matrix: (MMA=(2,2,N/8),1,1) -> (2,(2,N/8)), rows by columns, placed as those of m16n8.
template <class Accumulator>
CUTE_DEVICE auto rows_of(Accumulator&& acc) {
  auto l = acc.layout();
  return make_tensor(acc.data(), make_layout(get<0, 1>(l), make_layout(get<0, 0>(l), get<0, 2>(l))));
}

// An accumulator's registers as the A operand of the next product: (MMA=(2,2,N/8),1,1) -> ((2,2,2),1,N/16).
template <class Accumulator>
CUTE_DEVICE auto as_register_operand(Accumulator&& acc) {
  auto l = logical_divide(get<0, 2>(acc.layout()), Layout<_2>{});  // (2,N/16)
  auto m = acc.layout();
  return make_tensor(acc.data(), make_layout(make_layout(get<0, 0>(m), get<0, 1>(m), get<0>(l)), get<1>(m), get<1>(l)));
}

// Hides where a value comes from: what depends on it is recomputed at every use instead of living in registers through
// a loop.
CUTE_DEVICE int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Smem descriptors whose value the compiler does not know. It then advances one with a single 64-bit add; CuTe's have a
// known upper half, which the compiler materialises again for every product.
struct Descriptors : GMMA::DescriptorIterator {
  template <class Offset>
  CUTE_DEVICE Descriptors operator+(const Offset& offset) const {
    Descriptors moved = *this;
    moved.desc_.desc_ += static_cast<uint32_t>(offset);  // the lower half has the address
    return moved;
  }
};

// The same operand with such descriptors, taken from the warp's first lane.
template <class Operand>
CUTE_DEVICE auto with_unknown_descriptors(const Operand& operand) {
  Descriptors first{operand.data()};
  uint32_t& upper = first.desc_.reg32_[1];
  upper = __shfl_sync(~0u, threadIdx.x % 32 == 0 ? upper : 0, 0);
  return make_tensor(first, operand.layout());
}

// acc = A B or acc += A B, as mma.accumulate_ says.
template <class Mma, class A, class B, class Accumulator>
CUTE_DEVICE void add_product(Mma& mma, const A& a, const B& b, Accumulator& acc) {
  CUTE_UNROLL
  for (int k = 0; k < size<2>(a); ++k) {
    cute::gemm(mma, a(_, _, k), b(_, _, k), acc);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
}

// Issues the products of add_products() asynchronously, onto zero or onto acc. Until warpgroup_wait() neither acc nor
// their register operands may be touched.
template <GMMA::ScaleOut kFirst, class Accumulator, class AddProducts>
CUTE_DEVICE void start_sum(Accumulator& acc, const AddProducts& add_products) {
  if constexpr (kFirst == GMMA::ScaleOut::One) {
    warpgroup_fence_operand(acc);
  } else {
    clear(acc);  // tells the compiler that its registers are free before
  }
  warpgroup_arrive();
  add_products();
  warpgroup_commit_batch();
}

// Issues acc = A B, or acc += A B.
template <GMMA::ScaleOut kFirst, class Mma, class A, class B, class Accumulator>
CUTE_DEVICE void start_product(Mma& mma, A&& a, const B& b, Accumulator& acc) {
  constexpr bool kShared = is_base_of<GMMA::DescriptorIterator, typename remove_cvref_t<A>::iterator>::value;
  if constexpr (!kShared) warpgroup_fence_operand(a);
  mma.accumulate_ = kFirst;
  start_sum<kFirst>(acc, [&] { add_product(mma, a, b, acc); });
}

// Waits until at most kPending products are in flight.
template <int kPending, class Accumulator>
CUTE_DEVICE void wait_products(Accumulator& acc) {
  warpgroup_wait<kPending>();
  warpgroup_fence_operand(acc);
}

}  // namespace flash_cute::hopper
