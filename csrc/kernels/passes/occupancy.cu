#include "core/occupancy.h"

#include "kernels/launch.h"

namespace flash_cute {
namespace {

__global__ void take_an_sm() {}

}  // namespace

cudaError_t max_active_clusters(int ctas, int& count) {
  constexpr int kMostOfAnSm = 128 * 1024;  // bytes of shared memory
  if (cudaError_t e = allow_shared_memory<take_an_sm>(kMostOfAnSm)) return e;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(ctas), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(32);
  config.dynamicSmemBytes = kMostOfAnSm;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(&count, take_an_sm, &config);
}

}  // namespace flash_cute
