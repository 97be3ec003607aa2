// From a row of configs.def to its family: the only place where an op, an architecture and a dtype become a kernel.
// Included by generated units (cmake/unit.cu.in), each behind the header of its family.
#pragma once

#include "core/registry.h"

namespace flash_cute {

namespace sm80 {
template <KernelConfig C>
cudaError_t launch_forward(const FwdParams& p, cudaStream_t stream);
template <KernelConfig C>
cudaError_t launch_backward(const BwdParams& p, cudaStream_t stream);
template <KernelConfig C>
cudaError_t launch_decode(const DecodeParams& p, cudaStream_t stream);

namespace fp32 {
template <KernelConfig C>
cudaError_t launch_forward(const FwdParams& p, cudaStream_t stream);
template <KernelConfig C>
cudaError_t launch_backward(const BwdParams& p, cudaStream_t stream);
}  // namespace fp32
}  // namespace sm80

namespace sm90 {
template <KernelConfig C>
cudaError_t launch_forward(const FwdParams& p, cudaStream_t stream);
template <KernelConfig C>
cudaError_t launch_backward(const BwdParams& p, cudaStream_t stream);
template <KernelConfig C>
cudaError_t launch_decode(const DecodeParams& p, cudaStream_t stream);
}  // namespace sm90

template <KernelConfig C>
cudaError_t launch(const Params<C.op>& p, cudaStream_t stream) {
  constexpr bool kHopper = C.arch == Arch::Sm90;
  if constexpr (C.op == Op::Decode) {
    if constexpr (kHopper)
      return sm90::launch_decode<C>(p, stream);
    else
      return sm80::launch_decode<C>(p, stream);
  } else if constexpr (C.op == Op::Fwd) {
    if constexpr (kHopper)
      return sm90::launch_forward<C>(p, stream);
    else if constexpr (C.fp32())
      return sm80::fp32::launch_forward<C>(p, stream);
    else
      return sm80::launch_forward<C>(p, stream);
  } else {
    if constexpr (kHopper)
      return sm90::launch_backward<C>(p, stream);
    else if constexpr (C.fp32())
      return sm80::fp32::launch_backward<C>(p, stream);
    else
      return sm80::launch_backward<C>(p, stream);
  }
}

}  // namespace flash_cute
