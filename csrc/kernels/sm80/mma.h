// Matrix products of tiles with mma.sync: operands come from shared memory by ldmatrix, or are in registers already.
#pragma once

#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>

#include "core/config.h"
#include "kernels/common/fragment.h"
#include "kernels/sm80/tile_io.h"

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

enum class Side { A, B };

// One operand of a product, (kOuter,K) in pieces of 16 x 16, in a shared tile of SharedLayout<kRows, kCols>: its rows
// are the outer dimension, or K where it is kTransposed. Of every kWarps pieces along the outer dimension a warp has
// one.
//
// A lane reads every piece from one address, moved by constants: swizzling turns a step along the columns of an atom
// into an XOR of the address bits that count 16-byte vectors.
template <Side kSide, bool kTransposed, class Element_, int kRows, int kCols, int kWarps>
struct SharedOperand {
  using Element = Element_;
  static constexpr int kOuter = kTransposed ? kCols : kRows;
  static constexpr int kSteps = (kTransposed ? kRows : kCols) / 16;
  static constexpr int kPieces = kOuter / (16 * kWarps);
  static constexpr int kAtom = atom_columns(kCols);

  uint32_t first;  // shared address of this lane's vector of the first piece

  CUTE_DEVICE SharedOperand(const Element* tile, int warp) {
    // ldmatrix fills four 8x8 matrices. A takes them down the outer dimension first, B along K first.
    constexpr bool kDownFirst = (kSide == Side::A) != kTransposed;
    const int lane = threadIdx.x % 32;
    const int row = kDownFirst ? lane % 16 : lane % 8 + lane / 16 * 8;
    const int col = (kDownFirst ? lane / 16 : lane / 8 % 2) * 8;
    const int row_of_warp = kTransposed ? 0 : 16 * warp, col_of_warp = kTransposed ? 16 * warp : 0;
    first = kept(cast_smem_ptr_to_uint(tile + SharedLayout<kRows, kCols>{}(row + row_of_warp, col + col_of_warp)));
  }

  // The same operand in a tile that lies `bytes` further.
  CUTE_DEVICE SharedOperand at(int bytes) const {
    SharedOperand moved = *this;
    moved.first += bytes;
    return moved;
  }

  // Piece i along the outer dimension at step k, 16 along K.
  CUTE_DEVICE void load(uint32_t* r, int k, int i) const {
    const int row = 16 * (kTransposed ? k : i * kWarps), col = 16 * (kTransposed ? i * kWarps : k);
    const uint32_t address =
        (first ^ (col % kAtom * sizeof(Element))) + (col / kAtom * kRows + row) * kAtom * sizeof(Element);
    if constexpr (kTransposed) {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "r"(address));
    } else {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "r"(address));
    }
  }
};

// acc += A B^T, with step k of A, (MMA,MMA_M), from a(k), which may do work that this step alone waits for. Pieces of B
// are on their way to registers while the tensor cores work on the pieces before.
template <class Mma, class Accumulator, class A, class B>
CUTE_DEVICE void gemm_registers(const Mma& mma, Accumulator& acc, A a, const B& b) {
  constexpr int kAhead = 2, kSlots = kAhead + 1, kTotal = B::kSteps * B::kPieces;
  Tensor rB =
      make_tensor<typename B::Element>(Shape<Shape<_2, _2>, _2, Int<kSlots>>{});  // (MMA,n-tile of a piece,slot)
  Tensor words = recast<uint32_t>(rB);
  auto load = [&](int t) { b.load(&words(0, 0, t % kSlots), t / B::kPieces, t % B::kPieces); };
  CUTE_UNROLL
  for (int t = 0; t < kAhead; ++t) load(t);
  CUTE_UNROLL
  for (int k = 0; k < B::kSteps; ++k) {
    Tensor rA = a(k);  // (MMA,MMA_M)
    CUTE_UNROLL
    for (int j = 0; j < B::kPieces; ++j) {
      const int t = k * B::kPieces + j;
      if (t + kAhead < kTotal) load(t + kAhead);
      CUTE_UNROLL
      for (int i = 0; i < 2 * size<1>(rA); ++i) {
        const int m = i / 2, n = (m + i) % 2;  // neighbours share an operand
        cute::gemm(mma, rA(_, m), rB(_, n, t % kSlots), acc(_, m, 2 * j + n));
      }
    }
  }
}

// acc += A B^T with both operands in shared memory.
template <class Mma, class Accumulator, class A, class B>
CUTE_DEVICE void gemm(const Mma& mma, Accumulator& acc, const A& a, const B& b) {
  static_assert(A::kSteps == B::kSteps);
  Tensor rA = make_tensor<typename A::Element>(Shape<Shape<_2, _2, _2>, Int<A::kPieces>, _2>{});  // (MMA,MMA_M,slot)
  Tensor words = recast<uint32_t>(rA);
  auto load = [&](int k) {
    CUTE_UNROLL
    for (int i = 0; i < A::kPieces; ++i) a.load(&words(0, i, k % 2), k, i);
  };
  load(0);
  auto step = [&](int k) {
    if (k + 1 < A::kSteps) load(k + 1);
    return rA(_, _, k % 2);
  };
  gemm_registers(mma, acc, step, b);
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
