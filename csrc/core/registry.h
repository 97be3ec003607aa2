// The kernels in this library and the choice among them.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "core/config.h"
#include "core/device.h"
#include "core/problem.h"

namespace flash_cute {

// Enqueues the kernel C and its passes on a stream. Defined beside the kernel, instantiated for the rows of configs.def.
template <KernelConfig C>
cudaError_t launch(const Problem<C.op>& problem, cudaStream_t stream);

template <Op op>
struct Kernel {
  KernelConfig config;
  cudaError_t (*launch)(const Problem<op>&, cudaStream_t);
};

// Kernels of this build, in the order of configs.def.
const std::vector<Kernel<Op::Fwd>>& fwd_kernels();
const std::vector<Kernel<Op::Bwd>>& bwd_kernels();

// Why this kernel cannot do the problem on the device, all reasons, or "" if it can.
std::string refusal(const KernelConfig& config, DType dtype, int head_dim, const Device& device);

// The first kernel that can do the problem. Throws std::runtime_error that lists why each one cannot.
template <Op op>
const Kernel<op>& select(const std::vector<Kernel<op>>& kernels, DType dtype, int head_dim, const Device& device);

}  // namespace flash_cute
