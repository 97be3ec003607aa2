// The C++ types of tensors' elements.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/bfloat16.h>
#include <cutlass/float8.h>
#include <cutlass/half.h>

#include "core/config.h"

namespace flash_cute {

// A DType without one does not compile.
template <DType dtype>
struct ElementTraits;
template <>
struct ElementTraits<DType::FP16> {
  using Element = cutlass::half_t;
};
template <>
struct ElementTraits<DType::BF16> {
  using Element = cutlass::bfloat16_t;
};

template <>
struct ElementTraits<DType::E4M3> {
  using Element = cutlass::float_e4m3_t;
};

template <DType dtype>
using ElementOf = typename ElementTraits<dtype>::Element;

// f(Element{}) for the 16-bit dtype of a problem, which is known at run time.
template <class F>
cudaError_t with_element(DType dtype, F f) {
  switch (dtype) {
    case DType::FP16:
      return f(ElementOf<DType::FP16>{});
    case DType::BF16:
      return f(ElementOf<DType::BF16>{});
    case DType::TF32:
    case DType::TF32x3:
    case DType::E4M3:
    case DType::INT8:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace flash_cute
