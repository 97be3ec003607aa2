// Matrix products of tiles with mma.sync: operands come from shared memory by ldmatrix, or are in registers already.
#pragma once

#include <cute/atom/mma_atom.hpp>

#include <utility>

#include "core/config.h"
#include "kernels/common/fragment.h"
#include "kernels/ampere/tile_io.h"

namespace flash_cute::ampere {

using namespace cute;

template <DType dtype>
struct Mma16816;
template <>
struct Mma16816<DType::FP16> {
  using Atom = MMA_Atom<SM80_16x8x16_F32F16F16F32_TN>;
};
template <>
struct Mma16816<DType::BF16> {
  using Atom = MMA_Atom<SM80_16x8x16_F32BF16BF16F32_TN>;
};

// How warps share a dimension of a product's result: kPieces pieces of 16 each, so that one ldmatrix fills a whole
// fragment. Pieces come in pairs if their number is even: dropout draws random numbers for 32 x 32 scores at once.
template <int kPieces, int kWarps>
struct Share {
  static constexpr int kTogether = kPieces % 2 == 0 ? 2 : 1;
  using Tile = Layout<Shape<_16, Int<kWarps>, Int<kTogether>>, Stride<_1, Int<16 * kTogether>, _16>>;

  // The start of a warp's first piece, and the distance of its piece i from there.
  static constexpr CUTE_HOST_DEVICE int first(int warp) { return 16 * kTogether * warp; }
  static constexpr CUTE_HOST_DEVICE int offset(int i) {
    return 16 * (i / kTogether * kTogether * kWarps + i % kTogether);
  }
};

// kWarps warps, each with whole rows of a result of M rows.
template <DType dtype, int M, int kWarps>
using RowsMma = TiledMMA<typename Mma16816<dtype>::Atom, Layout<Shape<Int<kWarps>, _1, _1>>,
                         Tile<typename Share<M / (16 * kWarps), kWarps>::Tile, _16, _16>>;

// A thread's share of a result of M x N that kDown x kAcross warps share.
template <int M, int N, int kDown, int kAcross>
CUTE_DEVICE auto make_accumulator() {
  return make_tensor<float>(
      Shape<Shape<_2, _2>, Int<M / (16 * kDown)>, Int<N / (8 * kAcross)>>{});  // (MMA,MMA_M,MMA_N)
}

enum class Side { A, B };

// Four 8x8 matrices of 16-bit elements from shared memory, a row of one of them at each lane's address.
template <bool kTransposed>
CUTE_DEVICE void ldmatrix(uint32_t* r, uint32_t address) {
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

// The row and the first column of a 16 x 16 piece that a lane addresses for ldmatrix: A orders the four matrices along
// the outer dimension first, B along K first.
template <Side kSide, bool kTransposed>
CUTE_DEVICE std::pair<uint32_t, uint32_t> lane_place() {
  constexpr bool kDownFirst = (kSide == Side::A) != kTransposed;
  const uint32_t lane = threadIdx.x % 32;
  return {kDownFirst ? lane % 16 : lane % 8 + lane / 16 * 8, (kDownFirst ? lane / 16 : lane / 8 % 2) * 8};
}

// One operand of a product, (kOuter,K) in pieces of 16 x 16, in a shared tile of SharedLayout<kRows, kCols>: its rows
// are the outer dimension, which kWarps warps share, or K if kTransposed.
//
// A lane reads every piece from one address, moved by constants: swizzling turns a step along the columns of an atom
// into an XOR of the address bits that count 16-byte vectors.
template <Side kSide, bool kTransposed, class Element_, int kRows, int kCols, int kWarps>
struct SharedOperand {
  using Element = Element_;
  static constexpr int kOuter = kTransposed ? kCols : kRows;
  static constexpr int kSteps = (kTransposed ? kRows : kCols) / 16;
  static constexpr int kPieces = kOuter / (16 * kWarps);
  static constexpr int kAtom = atom_columns(kCols, sizeof(Element));
  using OfWarp = Share<kPieces, kWarps>;

  uint32_t first;  // shared address of this lane's vector of the first piece

  CUTE_DEVICE SharedOperand(const Element* tile, int warp) {
    const auto [row, col] = lane_place<kSide, kTransposed>();
    const int row_of_warp = kTransposed ? 0 : OfWarp::first(warp), col_of_warp = kTransposed ? OfWarp::first(warp) : 0;
    first = pin(cast_smem_ptr_to_uint(tile + SharedLayout<kRows, kCols>{}(row + row_of_warp, col + col_of_warp)));
  }

  // The same operand in a tile that lies `bytes` further.
  CUTE_DEVICE SharedOperand at(int bytes) const {
    SharedOperand moved = *this;
    moved.first += bytes;
    return moved;
  }

  // Piece i along the outer dimension at step k, 16 along K.
  CUTE_DEVICE void load(uint32_t* r, int k, int i) const {
    const int row = kTransposed ? 16 * k : OfWarp::offset(i), col = kTransposed ? OfWarp::offset(i) : 16 * k;
    const uint32_t address =
        (first ^ (col % kAtom * sizeof(Element))) + (col / kAtom * kRows + row) * kAtom * sizeof(Element);
    ldmatrix<kTransposed>(r, address);
  }
};

// acc += A B^T. a(k) returns step k of A, (MMA,MMA_M), and may compute it: only this step waits. Pieces of B are loaded
// to registers while the tensor cores work on earlier ones.
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

// This thread's share of an accumulator (kRows,kCols) of kDown x kAcross warps, on its way to a shared tile of
// SharedLayout<kRows, kCols>.
template <class Element, int kRows, int kCols, int kDown, int kAcross>
class SharedResult {
 public:
  CUTE_DEVICE SharedResult(Element* tile, uint32_t warp) : tile_bytes_(cast_smem_ptr_to_uint(tile)) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t row = kMatrices ? lane % 16 : lane / 4, col = kMatrices ? lane / 16 * 8 : lane % 4 * 2;
    lane_bytes_ = SharedLayout<kRows, kCols>{}(row, col + Cols::first(warp / kDown)) * kElement;
    tile_bytes_ += Rows::first(warp % kDown) * kRow;
  }

  // Rounds and writes the accumulator (MMA,MMA_M,MMA_N).
  template <class Accumulator>
  CUTE_DEVICE void store(const Accumulator& acc) const {
    write(converted<Element>(acc), 0);
  }

  // The same place in a tile that lies `bytes` further.
  CUTE_DEVICE SharedResult at(int bytes) const {
    SharedResult moved = *this;
    moved.tile_bytes_ += bytes;
    return moved;
  }

  // Writes columns from `first_col` on that are rounded already.
  template <class Rounded>
  CUTE_DEVICE void write(const Rounded& rounded, int first_col) const {
    Tensor registers = recast<const uint32_t>(rounded);  // ((1,2),MMA_M,MMA_N)
    CUTE_UNROLL
    for (int j = 0; j < decltype(size<2>(registers))::value / 2; ++j) {
      const int col = first_col + Cols::offset(j);
      CUTE_UNROLL
      for (int i = 0; i < kRows / (16 * kDown); ++i) {
        const uint32_t address =
            (lane_bytes_ ^ (col % kAtom * kElement)) + tile_bytes_ + (col / kAtom * kRows + Rows::offset(i)) * kRow;
        const uint32_t r[4] = {registers(0, i, 2 * j), registers(1, i, 2 * j), registers(0, i, 2 * j + 1),
                               registers(1, i, 2 * j + 1)};
#if __CUDA_ARCH__ >= 900
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                     "r"(r[1]), "r"(r[2]), "r"(r[3])
                     : "memory");
#else
        CUTE_UNROLL
        for (int q = 0; q < 4; ++q) {
          asm volatile("st.shared.b32 [%0], %1;" ::"r"((address ^ (q / 2 * kVector * kElement)) + q % 2 * 8 * kRow),
                       "r"(r[q])
                       : "memory");
        }
#endif
      }
    }
  }

 private:
#if __CUDA_ARCH__ >= 900
  static constexpr bool kMatrices = true;  // stmatrix: a lane names a row of one of four 8x8 matrices
#else
  static constexpr bool kMatrices = false;
#endif
  using Rows = Share<kRows / (16 * kDown), kDown>;
  using Cols = Share<kCols / (16 * kAcross), kAcross>;
  static constexpr int kElement = sizeof(Element);
  static constexpr int kAtom = atom_columns(kCols, sizeof(Element));
  static constexpr int kRow = kAtom * kElement;  // bytes

  uint32_t lane_bytes_;  // offset of this lane's share of the first piece in the tile
  uint32_t tile_bytes_;  // shared address of the tile, the same in all lanes
};

}  // namespace flash_cute::ampere
