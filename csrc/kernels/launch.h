// Launching a kernel: its shared memory allowed once a device, its grid one-dimensional, errors returned. They are
// those of the calls themselves: nobody asks for the last error, which may be an older one.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <span>

namespace flash_cute {

// CTAs that a one-dimensional grid can have.
constexpr int64_t kMaxCtas = (int64_t{1} << 31) - 1;

// The current device among the bits of a mask.
inline cudaError_t device_bit(uint64_t& bit) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  bit = uint64_t{1} << (device % 64);
  return error;
}

// Lets a kernel have its shared memory.
template <auto kKernel>
cudaError_t allow_shared_memory(int smem_bytes) {
  static std::atomic<uint64_t> allowed{0};  // devices on which it may
  uint64_t bit = 0;
  if (cudaError_t e = device_bit(bit)) return e;
  if (smem_bytes > 48 * 1024 && !(allowed.load(std::memory_order_relaxed) & bit)) {
    if (cudaError_t e = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes)) {
      return e;
    }
    allowed.fetch_or(bit, std::memory_order_relaxed);
  }
  return cudaSuccess;
}

// Whether the code of a kernel that runs was compiled for a GPU where kernels overlap, Hopper or a newer one.
template <auto kKernel>
cudaError_t can_use_pdl(bool& can) {
  static std::atomic<uint64_t> known{0}, able{0};  // devices of which it is, and on which it does
  uint64_t bit = 0;
  if (cudaError_t e = device_bit(bit)) return e;
  if (!(known.load(std::memory_order_acquire) & bit)) {
    cudaFuncAttributes compiled;
    if (cudaError_t e = cudaFuncGetAttributes(&compiled, kKernel)) return e;
    if (compiled.ptxVersion >= 90) able.fetch_or(bit, std::memory_order_relaxed);
    known.fetch_or(bit, std::memory_order_release);
  }
  can = able.load(std::memory_order_relaxed) & bit;
  return cudaSuccess;
}

struct Grid {
  int64_t ctas;
  int threads, smem_bytes;
  // CTAs that follow each other and run on SMs side by side, as a cluster, of a kernel that fixes no size of its own.
  int cluster_ctas = 1;
};

template <auto kKernel, class... Params>
cudaError_t launch_grid(const Grid& grid, std::span<cudaLaunchAttribute> attributes, cudaStream_t stream,
                        const Params&... params) {
  if (grid.ctas == 0) return cudaSuccess;
  if (grid.ctas > kMaxCtas) return cudaErrorInvalidConfiguration;
  if (cudaError_t e = allow_shared_memory<kKernel>(grid.smem_bytes)) return e;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid.ctas));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = static_cast<size_t>(grid.smem_bytes);
  config.stream = stream;
  config.attrs = attributes.data();
  config.numAttrs = static_cast<unsigned>(attributes.size());
  return cudaLaunchKernelEx(&config, kKernel, params...);
}

template <auto kKernel, class... Params>
cudaError_t launch_kernel(int64_t ctas, int threads, int smem_bytes, cudaStream_t stream, const Params&... params) {
  return launch_grid<kKernel>({ctas, threads, smem_bytes}, {}, stream, params...);
}

// The same for a kernel that calls wait_on_dependent_grids(): it overlaps with the one right before, where they can,
// from the time on when that calls launch_dependent_grids(), or when its last CTAs end (kernels/common/pdl.h).
template <auto kKernel, class... Params>
cudaError_t launch_with_pdl(const Grid& grid, cudaStream_t stream, const Params&... params) {
  bool can = false;
  if (cudaError_t e = can_use_pdl<kKernel>(can)) return e;
  cudaLaunchAttribute overlap{}, cluster{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(grid.cluster_ctas), 1, 1};
  cudaLaunchAttribute attributes[] = {overlap, cluster};
  const size_t count = !can ? 0 : grid.cluster_ctas == 1 ? 1 : 2;
  return launch_grid<kKernel>(grid, std::span(attributes).first(count), stream, params...);
}

}  // namespace flash_cute
