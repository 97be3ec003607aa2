// The kernels in this library, and how they are launched.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <vector>

#include "core/built.h"
#include "core/config.h"
#include "core/device.h"
#include "core/problem.h"
#include "core/workspace.h"

namespace flash_cute {

// Enqueues the kernel C and its passes on a stream. The units that cmake/units.cmake makes of the rows define it, by
// the launch of the row's family.
template <KernelConfig C>
cudaError_t launch(const Params<C.op>& params, cudaStream_t stream);

template <Op op>
struct Kernel {
  KernelConfig config;
  cudaError_t (*launch)(const Params<op>&, cudaStream_t);
};

// Kernels of this build, family by family, in the order of rows.def.
const std::vector<Kernel<Op::Fwd>>& fwd_kernels();
const std::vector<Kernel<Op::Bwd>>& bwd_kernels();
const std::vector<Kernel<Op::Decode>>& decode_kernels();

template <Op op>
const std::vector<Kernel<op>>& kernels_of() {
  if constexpr (op == Op::Fwd) return fwd_kernels();
  if constexpr (op == Op::Bwd) return bwd_kernels();
  if constexpr (op == Op::Decode) return decode_kernels();
}

// The kernel whose config a route points to (built_kernels() of core/built.h).
template <Op op>
const Kernel<op>& kernel_of(const KernelConfig* config) {
  for (const Kernel<op>& kernel : kernels_of<op>()) {
    if (&kernel.config == config) return kernel;
  }
  throw std::logic_error("flash_cute: " + config->id() + " is no kernel of this build");
}

}  // namespace flash_cute
