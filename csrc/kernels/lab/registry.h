// The laboratory's kernels in this build.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "core/problem.h"
#include "kernels/lab/config.h"

namespace flash_cute::lab {

// Attention without a mask: q, k, v and o are of one shape, and seq_len is a multiple of B_r and of B_c.
struct ForwardKernelArgs {
  TensorView q, k, v, o;
  int batch, seq_len, heads;
  float softmax_scale;
};

// The resources of a kernel on the current GPU.
struct Usage {
  int registers;    // a thread
  int local_bytes;  // a thread: spilled registers
  int ctas_per_sm;  // that run at once
};

// Enqueues the kernel C.
template <FlashForwardKernelConfig C>
cudaError_t launch(const ForwardKernelArgs& args, cudaStream_t stream);

// Loads the kernel C, and returns its resources.
template <FlashForwardKernelConfig C>
cudaError_t usage(Usage& result);

struct Kernel {
  FlashForwardKernelConfig config;
  cudaError_t (*launch)(const ForwardKernelArgs&, cudaStream_t);
  cudaError_t (*usage)(Usage&);
};

// All kernels, in the order of kernel_configs.py.
const std::vector<Kernel>& kernels();

// The kernel of this name; throws std::runtime_error if this build has none.
const Kernel& find(const std::string& name);

}  // namespace flash_cute::lab
