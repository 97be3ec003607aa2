// Launches kernels with one-dimensional grids, after allowing their shared memory once per device. Errors are returned
// by the calls: cudaGetLastError() is not used, since it may hold an older error.
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

// Allows a kernel its shared memory.
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

// Whether the loaded code of a kernel was compiled for a GPU with programmatic dependent launch, Hopper or newer.
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
  // Launches a kernel without a fixed cluster size in clusters of so many consecutive CTAs.
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

// Launches a kernel that calls wait_on_dependent_grids(): if the GPU supports it, it overlaps with the kernel right
// before, once that calls launch_dependent_grids(), or its last CTAs end (kernels/common/pdl.h).
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
