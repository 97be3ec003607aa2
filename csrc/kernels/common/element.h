// The 16-bit types of tensors.
#pragma once

#include <cutlass/bfloat16.h>
#include <cutlass/half.h>

#include <type_traits>

#include "core/config.h"

namespace flash_cute {

template <DType dtype>
using ElementOf = std::conditional_t<dtype == DType::FP16, cutlass::half_t, cutlass::bfloat16_t>;

}  // namespace flash_cute
