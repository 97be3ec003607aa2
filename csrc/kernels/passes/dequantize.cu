#include "kernels/passes/dequantize.h"

#include <cutlass/numeric_conversion.h>

#include "kernels/common/element.h"
#include "kernels/launch.h"

namespace flash_cute {
namespace {

constexpr int kThreads = 256;
constexpr int kNumbers = 16;  // of a thread

// Vector: 16 numbers of one head are loaded together; else they are loaded one by one.
template <class Element, bool kVector>
__global__ void __launch_bounds__(kThreads) dequantize(const __grid_constant__ DequantizeE4M3 p) {
  const int64_t first = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kNumbers;
  if (first >= p.numbers) return;
  auto descale_of = [&](int64_t number) {
    const int head = static_cast<int>(number / p.dim % p.heads);
    return p.descale[head / p.heads_of_descale];
  };
  auto* const out = static_cast<Element*>(p.out) + first;
  if constexpr (kVector) {
    using Values = cutlass::AlignedArray<cutlass::float_e4m3_t, kNumbers, kNumbers>;
    const auto values = *reinterpret_cast<const Values*>(p.values + first);
    auto numbers = cutlass::NumericArrayConverter<float, cutlass::float_e4m3_t, kNumbers>{}(values);
    const float descale = descale_of(first);
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) numbers[i] *= descale;
    const auto rounded = cutlass::NumericArrayConverter<Element, float, kNumbers>{}(numbers);
    const auto* const halves = reinterpret_cast<const uint4*>(&rounded);
    reinterpret_cast<uint4*>(out)[0] = halves[0];
    reinterpret_cast<uint4*>(out)[1] = halves[1];
  } else {
    const int count = static_cast<int>(min(int64_t{kNumbers}, p.numbers - first));
    for (int i = 0; i < count; ++i) {
      const auto value = cutlass::float_e4m3_t::bitcast(p.values[first + i]);
      out[i] = Element(float(value) * descale_of(first + i));
    }
  }
}

template <class Element>
cudaError_t launch(const DequantizeE4M3& p, cudaStream_t stream) {
  const int64_t ctas = (p.numbers + kThreads * kNumbers - 1) / (kThreads * kNumbers);
  if (ctas > kMaxCtas) return cudaErrorInvalidConfiguration;
  const bool aligned = (reinterpret_cast<uintptr_t>(p.values) | reinterpret_cast<uintptr_t>(p.out)) % 16 == 0;
  if (aligned && p.dim % kNumbers == 0) {
    return launch_kernel<dequantize<Element, true>>(ctas, kThreads, 0, stream, p);
  }
  return launch_kernel<dequantize<Element, false>>(ctas, kThreads, 0, stream, p);
}

}  // namespace

cudaError_t dequantize_e4m3(const DequantizeE4M3& p, cudaStream_t stream) {
  if (p.numbers == 0) return cudaSuccess;
  return p.dtype == DType::FP16 ? launch<cutlass::half_t>(p, stream) : launch<cutlass::bfloat16_t>(p, stream);
}

}  // namespace flash_cute
