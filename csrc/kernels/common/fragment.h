// Views and conversions of the registers that one thread holds of an m16n8 matrix product.
#pragma once

#include <cute/tensor.hpp>

#include <cutlass/numeric_conversion.h>

namespace flash_cute {

using namespace cute;

// An accumulator as a matrix: (MMA=(2,2),MMA_M,MMA_N) -> ((2,MMA_M),(2,MMA_N)), rows by columns.
template <class Accumulator>
CUTE_DEVICE auto rows_and_columns(Accumulator&& acc) {
  auto l = acc.layout();  // ((2,2),MMA_M,MMA_N)
  return make_tensor(acc.data(),
                     make_layout(make_layout(get<0, 1>(l), get<1>(l)), make_layout(get<0, 0>(l), get<2>(l))));
}

// Column c of rows_and_columns, counted from the thread's first.
CUTE_HOST_DEVICE constexpr int column_offset(int c) {
  return c / 2 * 8 + c % 2;
}

// An accumulator's registers as the A operand of the next product: two neighbouring n-tiles of the accumulator are one
// k-step of the operand. ((2,2),MMA_M,MMA_N) -> ((2,2,2),MMA_M,MMA_N/2).
template <class Accumulator>
CUTE_DEVICE auto as_operand_a(Accumulator&& acc) {
  auto l = logical_divide(acc.layout(), Shape<X, X, _2>{});  // ((2,2),MMA_M,(2,MMA_N/2))
  return make_tensor(acc.data(),
                     make_layout(make_layout(get<0, 0>(l), get<0, 1>(l), get<2, 0>(l)), get<1>(l), get<2, 1>(l)));
}

// Rounds every element to the nearest one of the result's type. Both have the same layout.
template <class Source, class Result>
CUTE_DEVICE void convert(const Source& source, Result& result) {
  using From = typename Source::value_type;
  using To = typename Result::value_type;
  constexpr int kSize = decltype(size(source))::value;
  static_assert(is_same_v<decltype(source.layout()), decltype(result.layout())>);
  *reinterpret_cast<cutlass::Array<To, kSize>*>(result.data()) = cutlass::NumericArrayConverter<To, From, kSize>{}(
      *reinterpret_cast<const cutlass::Array<From, kSize>*>(source.data()));
}

template <class Element, class Source>
CUTE_DEVICE auto converted(const Source& source) {
  Tensor result = make_tensor<Element>(source.layout());
  convert(source, result);
  return result;
}

// The four threads of a quad hold one row of an accumulator.
CUTE_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

CUTE_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

}  // namespace flash_cute
