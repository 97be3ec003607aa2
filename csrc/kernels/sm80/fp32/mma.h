// Matrix products of fp32 tiles on tensor cores, whose operands are TF32: fp32 with 10 bits of mantissa. With
// DType::TF32 operands are rounded to it. With DType::TF32x3 each operand is a sum of two TF32 numbers, high + low, and
// a product takes three: the fourth, low * low, is below fp32's precision.
#pragma once

#include <cute/atom/mma_atom.hpp>

#include <cfloat>

#include "core/config.h"
#include "kernels/sm80/fp32/tiles.h"

namespace flash_cute::sm80::fp32 {

template <int kWarps>
using WarpMma = TiledMMA<MMA_Atom<SM80_16x8x8_F32TF32TF32F32_TN>, Layout<Shape<Int<kWarps>, _1, _1>>>;

// An accumulator of 16 kPieces x kCols of one warp.
template <int kPieces, int kCols>
CUTE_DEVICE auto make_accumulator() {
  return make_tensor<float>(Shape<Shape<_2, _2>, Int<kPieces>, Int<kCols / 8>>{});  // (MMA,MMA_M,MMA_N)
}

// The nearest TF32 number. The largest numbers, which would become infinite, are rounded down. Infinities and NaN stay
// what they are.
CUTE_DEVICE uint32_t nearest_tf32(float x) {
  const uint32_t bits = __float_as_uint(x);
  return (bits + ((bits & 0x7fffffff) < 0x7f7ff000 ? 0x1000 : 0)) & 0xffffe000;
}

// kCount registers of an operand. `low` is empty if one product is enough.
template <DType kMode, int kCount>
struct Rounded {
  static constexpr bool kTwo = kMode == DType::TF32x3;
  uint32_t high[kCount];
  uint32_t low[kTwo ? kCount : 1];

  CUTE_DEVICE void set(const float* values) {
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      high[i] = nearest_tf32(values[i]);
      // At most 13 bits: the last of them are cut off by the tensor core.
      if constexpr (kTwo) low[i] = __float_as_uint(values[i] - __uint_as_float(high[i]));
    }
  }
};

// d += a b, 16 x 8 x 8.
CUTE_DEVICE void mma_16x8x8(float* d, const uint32_t* a, const uint32_t* b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

enum class Side { A, B };

// One operand of a product in pieces of 16 (outer) x 8 (K), from a shared tile of kRows x kCols whose rows are the
// outer dimension. Of every kWarps pieces a warp has one. A lane reads every piece from one address, moved by
// constants.
template <Side kSide, int kRows, int kCols, int kWarps>
struct RowOperand {
  static constexpr int kSteps = kCols / 8;
  static constexpr int kPieces = kRows / (16 * kWarps);

  uint32_t first;  // shared address of this lane's vector of the first piece

  CUTE_DEVICE RowOperand(const float* tile, int warp) {
    // ldmatrix fills four matrices of 8 rows x 4 elements. A takes them down first, B along K first.
    constexpr bool kDownFirst = kSide == Side::A;
    const int lane = threadIdx.x % 32;
    const int row = kDownFirst ? lane % 16 : lane % 8 + lane / 16 * 8;
    const int col = (kDownFirst ? lane / 16 : lane / 8 % 2) * kVector;
    first = pin(cast_smem_ptr_to_uint(tile + place<kRows>(row + 16 * warp, col)));
  }

  // The same operand in a tile that lies `bytes` further.
  CUTE_DEVICE RowOperand at(int bytes) const {
    RowOperand moved = *this;
    moved.first += bytes;
    return moved;
  }

  CUTE_DEVICE void operator()(float* r, int k, int i) const {
    const int row = 16 * i * kWarps, col = 8 * k;
    const uint32_t address =
        (first ^ (col % kAtom * sizeof(float))) + (col / kAtom * kRows + row) * kAtom * sizeof(float);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=f"(r[0]), "=f"(r[1]), "=f"(r[2]), "=f"(r[3])
                 : "r"(address));
  }
};

// A B operand whose rows are K, in pieces of 8 (K) x 16 columns; kCols columns from `col` on are the warp's. K is in
// the order in which accumulators hold columns: numbers 0 to 7 of a step are rows 0, 2, 4, 6, 1, 3, 5, 7.
template <int kRows, int kCols>
struct ColumnOperand {
  static constexpr int kSteps = kRows / 8;
  static constexpr int kPieces = kCols / 16;
  static_assert(kCols % kAtom == 0);

  uint32_t first;  // shared address of this lane's even row of the first piece

  CUTE_DEVICE ColumnOperand(const float* tile, int col) {
    const int lane = threadIdx.x % 32;
    first = pin(cast_smem_ptr_to_uint(tile + place<kRows>(lane % 4 * 2, col + lane / 4)));
  }

  CUTE_DEVICE ColumnOperand at(int bytes) const {
    ColumnOperand moved = *this;
    moved.first += bytes;
    return moved;
  }

  CUTE_DEVICE void operator()(float* r, int k, int j) const {
    CUTE_UNROLL
    for (int n = 0; n < 2; ++n) {
      const int col = 16 * j + 8 * n;
      const uint32_t even = first ^ (col % kAtom * sizeof(float));
      const int further = (col / kAtom * kRows + 8 * k) * kAtom * sizeof(float);
      load(r[2 * n], even + further);
      load(r[2 * n + 1], (even ^ sizeof(uint128_t)) + further + kAtom * sizeof(float));
    }
  }

 private:
  CUTE_DEVICE static void load(float& to, uint32_t address) {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(to) : "r"(address));
  }
};

// An accumulator as the A operand of a product with a ColumnOperand.
template <class Accumulator>
CUTE_DEVICE auto as_operand_a(const Accumulator& acc) {
  return [&](float* r, int k, int i) {
    r[0] = acc(0, i, k);
    r[1] = acc(2, i, k);
    r[2] = acc(1, i, k);
    r[3] = acc(3, i, k);
  };
}

// acc += A B^T. Tensor cores round sums towards zero, and these errors add up. With TF32x3 they therefore sum only a
// few steps, the small products with a low factor separately; acc is summed outside of them.
template <DType kMode, class Accumulator, class A, class B>
CUTE_DEVICE void gemm(Accumulator& acc, const A& a, const B& b) {
  constexpr bool kThree = kMode == DType::TF32x3;
  constexpr int kTogether = B::kSteps < 4 ? B::kSteps : 4, kM = decltype(size<1>(acc))::value;
  static_assert(B::kSteps % kTogether == 0 && 2 * B::kPieces == decltype(size<2>(acc))::value);
  CUTE_UNROLL
  for (int step = 0; step < B::kSteps; step += kTogether) {
    Rounded<kMode, 4> rA[kTogether][kM];
    CUTE_UNROLL
    for (int i = 0; i < kTogether * kM; ++i) {
      float values[4];
      a(values, step + i / kM, i % kM);
      rA[i / kM][i % kM].set(values);
    }
    CUTE_UNROLL
    for (int j = 0; j < B::kPieces; ++j) {
      float high[kM][2][4], low[kM][2][4] = {};
      CUTE_UNROLL
      for (int i = 0; i < 8 * kM; ++i)
        high[i / 8][i / 4 % 2][i % 4] = kThree ? 0.f : acc(i % 4, i / 8, 2 * j + i / 4 % 2);
      CUTE_UNROLL
      for (int k = 0; k < kTogether; ++k) {
        float values[4];
        b(values, step + k, j);
        Rounded<kMode, 2> rB[2];
        rB[0].set(values);
        rB[1].set(values + 2);
        CUTE_UNROLL
        for (int i = 0; i < 2 * kM; ++i) {
          const int m = i / 2, n = i % 2;
          if constexpr (kThree) {
            mma_16x8x8(low[m][n], rA[k][m].low, rB[n].high);
            mma_16x8x8(low[m][n], rA[k][m].high, rB[n].low);
          }
          mma_16x8x8(high[m][n], rA[k][m].high, rB[n].high);
        }
      }
      CUTE_UNROLL
      for (int i = 0; i < 8 * kM; ++i) {
        const int m = i / 8, n = i / 4 % 2, e = i % 4;
        float& sum = acc(e, m, 2 * j + n);
        if constexpr (kThree) {
          // The low part of an infinite number would be NaN.
          sum += fabsf(high[m][n][e]) <= FLT_MAX ? high[m][n][e] + low[m][n][e] : high[m][n][e];
        } else {
          sum = high[m][n][e];
        }
      }
    }
  }
}

}  // namespace flash_cute::sm80::fp32
