// Matrix products of backward. Unlike gemm_registers(), A is in registers or in shared memory, a product may have only
// the first steps, and operands are loaded up to two steps ahead of the tensor cores.
#pragma once

#include <algorithm>

#include "kernels/ampere/mma.h"

namespace flash_cute::sm80 {

using namespace ampere;

// A SharedOperand whose address is in two registers: the lane's offset, and the tile's address, which all lanes share
// and which moves with the stage. Backward has ten operands and no register to spare; uniform registers are free.
template <Side kSide, bool kTransposed, class Element_, int kRows, int kCols, int kWarps>
struct StagedOperand {
  using Element = Element_;
  static constexpr int kOuter = kTransposed ? kCols : kRows;
  static constexpr int kSteps = (kTransposed ? kRows : kCols) / 16;
  static constexpr int kPieces = kOuter / (16 * kWarps);
  static constexpr int kAtom = atom_columns(kCols, sizeof(Element));
  using OfWarp = Share<kPieces, kWarps>;
  using Piece = std::conditional_t<kSide == Side::A, Shape<Shape<_2, _2, _2>, Int<kPieces>>,
                                   Shape<Shape<_2, _2>, Int<2 * kPieces>>>;  // (MMA,MMA_M) or (MMA,MMA_N)

  uint32_t lane_bytes;  // offset of this lane's vector of the first piece in the tile
  uint32_t tile_bytes;  // shared address of the tile: uniform, so it needs no register of the lanes

  CUTE_DEVICE StagedOperand(const Element* tile, uint32_t warp) : tile_bytes(cast_smem_ptr_to_uint(tile)) {
    const auto [row, col] = lane_place<kSide, kTransposed>();
    if constexpr (kTransposed) {
      lane_bytes = SharedLayout<kRows, kCols>{}(row, col + OfWarp::first(warp)) * sizeof(Element);
    } else {
      lane_bytes = SharedLayout<kRows, kCols>{}(row, col) * sizeof(Element);
      tile_bytes += OfWarp::first(warp) * kAtom * sizeof(Element);
    }
  }

  // The same operand in the tile `bytes` after this one.
  CUTE_DEVICE StagedOperand at(int bytes) const {
    StagedOperand moved = *this;
    moved.tile_bytes += bytes;
    return moved;
  }

  // The same operand from step `first` on, for as many steps as the largest power of two that divides `first`. If K
  // runs along columns, these steps must be inside of the first atom.
  CUTE_DEVICE StagedOperand from(uint32_t first) const {
    StagedOperand moved = *this;
    if constexpr (kTransposed) {
      moved.tile_bytes += first * 16 * kAtom * sizeof(Element);
    } else {
      moved.lane_bytes ^= first * 16 * sizeof(Element);
    }
    return moved;
  }

  CUTE_DEVICE static auto fragment() { return make_tensor<Element>(Piece{}); }

  // Step k, 16 along K, of all pieces.
  template <class Fragment>
  CUTE_DEVICE void load(Fragment& to, int k) const {
    Tensor registers = recast<uint32_t>(to);
    CUTE_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      const int row = kTransposed ? 16 * k : OfWarp::offset(i), col = kTransposed ? OfWarp::offset(i) : 16 * k;
      const uint32_t address = (lane_bytes ^ (col % kAtom * sizeof(Element))) + tile_bytes +
                               (col / kAtom * kRows + row) * kAtom * sizeof(Element);
      ldmatrix<kTransposed>(&registers(4 * i), address);
    }
  }
};

// An A operand in registers: (MMA,MMA_M,steps).
template <class Fragment>
struct RegisterOperand {
  using Element = typename Fragment::value_type;
  using Piece = Shape<Shape<_1>, _1>;  // nothing to load
  const Fragment& fragment;
};
template <class Fragment>
RegisterOperand(const Fragment&) -> RegisterOperand<Fragment>;

template <class Operand>
constexpr bool kInRegisters = false;
template <class Fragment>
constexpr bool kInRegisters<RegisterOperand<Fragment>> = true;

// acc += A B^T over the first 1 / kShare of the steps. While the tensor cores work on one step, the next one or two are
// loaded: as many as kRoom registers hold.
template <int kRoom, int kShare = 1, class Mma, class Accumulator, class A, class B>
CUTE_DEVICE void product(const Mma& mma, Accumulator& acc, const A& a, const B& b) {
  constexpr int kSteps = B::kSteps / kShare;
  constexpr int kOfStep =
      decltype(size(typename A::Piece{}))::value / 2 + decltype(size(typename B::Piece{}))::value / 2;
  constexpr int kAhead = std::clamp(kRoom / kOfStep - 1, 1, 2);
  constexpr int kBuffers = kAhead + 1;
  auto rA = make_tensor<typename A::Element>(append<3>(typename A::Piece{}, Int<kBuffers>{}));  // (MMA,MMA_M,buffers)
  auto rB = make_tensor<typename B::Element>(append<3>(typename B::Piece{}, Int<kBuffers>{}));  // (MMA,MMA_N,buffers)
  auto load = [&](int k) {
    if constexpr (!kInRegisters<A>) {
      Tensor to_a = rA(_, _, k % kBuffers);
      a.load(to_a, k);
    }
    Tensor to_b = rB(_, _, k % kBuffers);
    b.load(to_b, k);
  };
  CUTE_UNROLL
  for (int k = 0; k < std::min(kAhead, kSteps); ++k) load(k);
  CUTE_UNROLL
  for (int k = 0; k < kSteps; ++k) {
    if (k + kAhead < kSteps) load(k + kAhead);
    if constexpr (kInRegisters<A>) {
      cute::gemm(mma, a.fragment(_, _, k), rB(_, _, k % kBuffers), acc);
    } else {
      cute::gemm(mma, rA(_, _, k % kBuffers), rB(_, _, k % kBuffers), acc);
    }
  }
}

}  // namespace flash_cute::sm80
