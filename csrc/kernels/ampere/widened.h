// Products with mma.sync of f16 and an operand of 8-bit numbers in shared memory, which are widened in registers: e4m3
// and int8 are exact in f16. A shared tile has the layout of 16-bit pairs of neighbouring columns.
#pragma once

#include "kernels/ampere/mma.h"

namespace flash_cute::ampere {

// The bytes of a word as f16: bytes 0 and 1 and bytes 2 and 3, or, if kAlternating, 0 and 2 and 1 and 3.
struct WidenedPairs {
  uint32_t first, second;
};

template <DType dtype, bool kAlternating>
CUTE_DEVICE WidenedPairs widened(uint32_t word) {
  static_assert(dtype == DType::E4M3 || dtype == DType::INT8);
  WidenedPairs pairs;
  if constexpr (dtype == DType::INT8) {
    // As 1152 + x: byte 0x64 above a byte b is the f16 number 1024 + b.
    constexpr uint32_t kAbove = 0x64646464, kBias = 0x64806480;
    const uint32_t biased = word ^ 0x80808080;
    const uint32_t first = __byte_perm(biased, kAbove, kAlternating ? 0x4240 : 0x4140);
    const uint32_t second = __byte_perm(biased, kAbove, kAlternating ? 0x4341 : 0x4342);
    asm("sub.f16x2 %0, %1, %2;" : "=r"(pairs.first) : "r"(first), "r"(kBias));
    asm("sub.f16x2 %0, %1, %2;" : "=r"(pairs.second) : "r"(second), "r"(kBias));
  } else {
#if __CUDA_ARCH__ >= 890
    const uint32_t ordered = kAlternating ? __byte_perm(word, 0, 0x3120) : word;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}"
        : "=r"(pairs.first), "=r"(pairs.second)
        : "r"(ordered));
#else
    // The bits of e4m3 below the sign of f16 are the number times 2^-8. A NaN's carry reaches the exponent's first bit.
    auto widen = [](uint32_t at_top) {
      const uint32_t magnitude = (at_top >> 1) & 0x3f803f80, nan = (magnitude + 0x00800080) & 0x40004000;
      const uint32_t scaled = (at_top & 0x80008000) | magnitude | nan;
      uint32_t result;
      asm("mul.f16x2 %0, %1, %2;" : "=r"(result) : "r"(scaled), "r"(0x5c005c00));
      return result;
    };
    pairs.first = widen(__byte_perm(word, 0, kAlternating ? 0x2404 : 0x1404));
    pairs.second = widen(__byte_perm(word, 0, kAlternating ? 0x3414 : 0x3424));
#endif
  }
  return pairs;
}

// Keys (kKeys,kCols) of 8 bits as operand B of scores. A lane's word has columns 4c to 4c + 3 of 16, the first two of
// which are columns 2c and 2c + 1 of the product, the others 2c + 8 and 2c + 9: operand A's columns have that order.
template <DType dtype, int kKeys, int kCols>
struct WidenedKeys : SharedOperand<Side::B, false, uint16_t, kKeys, kCols / 2, 1> {
  using Pairs = SharedOperand<Side::B, false, uint16_t, kKeys, kCols / 2, 1>;

  CUTE_DEVICE WidenedKeys(const uint8_t* tile, int warp) : Pairs(reinterpret_cast<const uint16_t*>(tile), warp) {}
  CUTE_DEVICE explicit WidenedKeys(const Pairs& pairs) : Pairs(pairs) {}

  CUTE_DEVICE WidenedKeys at(int bytes) const { return WidenedKeys(Pairs::at(bytes)); }
};

// Values (kKeys,kCols) of 8 bits as operand B of outputs. Of 16 columns the even ones are columns of one n-tile, the
// odd ones of the next: columns_in_order() undoes that.
template <DType dtype, int kKeys, int kCols>
struct WidenedValues : SharedOperand<Side::B, true, uint16_t, kKeys, kCols / 2, 1> {
  using Pairs = SharedOperand<Side::B, true, uint16_t, kKeys, kCols / 2, 1>;

  CUTE_DEVICE WidenedValues(const uint8_t* tile, int warp) : Pairs(reinterpret_cast<const uint16_t*>(tile), warp) {}
  CUTE_DEVICE explicit WidenedValues(const Pairs& pairs) : Pairs(pairs) {}

  CUTE_DEVICE WidenedValues at(int bytes) const { return WidenedValues(Pairs::at(bytes)); }
};

// acc += A B^T, as in mma.h. Pieces of 32 columns of B are loaded while the products of the 32 before run.
template <class Mma, class Accumulator, class A, DType dtype, int kKeys, int kCols>
CUTE_DEVICE void gemm_registers(const Mma& mma, Accumulator& acc, A a, const WidenedKeys<dtype, kKeys, kCols>& b) {
  using B = WidenedKeys<dtype, kKeys, kCols>;
  uint32_t words[2][B::kPieces][4];  // of an n-tile of 8 keys and 16 columns each, columns first
  auto load = [&](int k) {
    CUTE_UNROLL
    for (int j = 0; j < B::kPieces; ++j) b.load(words[k % 2][j], k, j);
  };
  Tensor rB = make_tensor<cutlass::half_t>(Shape<Shape<_2, _2>>{});  // (MMA)
  Tensor pairs = recast<uint32_t>(rB);
  load(0);
  CUTE_UNROLL
  for (int k = 0; k < B::kSteps; ++k) {
    if (k + 1 < B::kSteps) load(k + 1);
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      Tensor rA = a(2 * k + half);  // (MMA,MMA_M)
      CUTE_UNROLL
      for (int n = 0; n < 2 * B::kPieces; ++n) {
        const auto [first, second] = widened<dtype, false>(words[k % 2][n / 2][n % 2 * 2 + half]);
        pairs(0) = first, pairs(1) = second;
        CUTE_UNROLL
        for (int m = 0; m < size<1>(rA); ++m) cute::gemm(mma, rA(_, m), rB, acc(_, m, n));
      }
    }
  }
}

// The same for values: a(k) returns the weights of 16 keys.
template <class Mma, class Accumulator, class A, DType dtype, int kKeys, int kCols>
CUTE_DEVICE void gemm_registers(const Mma& mma, Accumulator& acc, A a, const WidenedValues<dtype, kKeys, kCols>& b) {
  using B = WidenedValues<dtype, kKeys, kCols>;
  constexpr int kAhead = 2, kSlots = kAhead + 1, kTotal = B::kSteps * B::kPieces;
  uint32_t words[kSlots][4];  // of 16 columns and 8 keys each, keys first
  auto load = [&](int t) { b.load(words[t % kSlots], t / B::kPieces, t % B::kPieces); };
  Tensor rB = make_tensor<cutlass::half_t>(Shape<Shape<_2, _2>, _2>{});  // (MMA,n-tile: even or odd columns)
  Tensor pairs = recast<uint32_t>(rB);
  CUTE_UNROLL
  for (int t = 0; t < kAhead; ++t) {
    if (t < kTotal) load(t);
  }
  CUTE_UNROLL
  for (int k = 0; k < B::kSteps; ++k) {
    Tensor rA = a(k);  // (MMA,MMA_M)
    CUTE_UNROLL
    for (int j = 0; j < B::kPieces; ++j) {
      const int t = k * B::kPieces + j;
      if (t + kAhead < kTotal) load(t + kAhead);
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        CUTE_UNROLL
        for (int keys = 0; keys < 2; ++keys) {
          const auto [even, odd] = widened<dtype, true>(words[t % kSlots][2 * i + keys]);
          pairs(keys, 0) = even, pairs(keys, 1) = odd;
        }
        CUTE_UNROLL
        for (int n = 0; n < 2 * size<1>(rA); ++n) {
          cute::gemm(mma, rA(_, n / 2), rB(_, n % 2), acc(_, n / 2, 4 * j + 2 * i + n % 2));
        }
      }
    }
  }
}

// An accumulator of widened values as a matrix whose columns ascend, of each 16 four neighbours:
// (MMA=(2,2),MMA_M,MMA_N) -> ((2,MMA_M),((2,2),MMA_N/2)), rows by columns.
template <class Accumulator>
CUTE_DEVICE auto columns_in_order(Accumulator&& acc) {
  auto l = logical_divide(acc.layout(), Shape<X, X, _2>{});  // ((2,2),MMA_M,(2,MMA_N/2))
  return make_tensor(acc.data(), make_layout(make_layout(get<0, 1>(l), get<1>(l)),
                                             make_layout(make_layout(get<2, 0>(l), get<0, 0>(l)), get<2, 1>(l))));
}

}  // namespace flash_cute::ampere
