#include "core/device.h"

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>

#include "core/family.h"
#include "core/occupancy.h"

namespace flash_cute {
namespace {

constexpr int kMaxDevices = 64;

void check(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("CUDA error in flash_cute, ") + what + ": " + cudaGetErrorString(error));
}

int attribute(cudaDeviceAttr which, int index) {
  int value = 0;
  check("querying the GPU", cudaDeviceGetAttribute(&value, which, index));
  return value;
}

// The peak bandwidth: two transfers a clock, of the bus's whole width.
int memory_gb_s(int index) {
  constexpr int kTransfers = 2, kBitsOfByte = 8, kKiloOfGiga = 1'000'000;
  const int64_t kilohertz = attribute(cudaDevAttrMemoryClockRate, index);
  const int64_t bits = attribute(cudaDevAttrGlobalMemoryBusWidth, index);
  return static_cast<int>(kTransfers * kilohertz * bits / kBitsOfByte / kKiloOfGiga);
}

std::array<int, kMostClustered + 1> clusters(int index) {
  std::array<int, kMostClustered + 1> counts{};
  int current = 0;
  const char* const what = "querying clusters";
  check(what, cudaGetDevice(&current));
  check(what, cudaSetDevice(index));
  for (int ctas = 1; ctas <= kMostClustered; ++ctas) check(what, max_active_clusters(ctas, counts[ctas]));
  check(what, cudaSetDevice(current));
  return counts;
}

}  // namespace

const Device& device(int index) {
  static std::array<Device, kMaxDevices> devices;
  static std::array<std::once_flag, kMaxDevices> queried;
  if (index < 0 || index >= kMaxDevices) {
    throw std::runtime_error("flash_cute: device is " + std::to_string(index) + "; expected an index in [0, " +
                             std::to_string(kMaxDevices) + ")");
  }
  std::call_once(queried[index], [index] {
    devices[index] = {
        .capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor, index) +
                      attribute(cudaDevAttrComputeCapabilityMinor, index),
        .smem_optin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index),
        .sms = attribute(cudaDevAttrMultiProcessorCount, index),
        .memory_gb_s = memory_gb_s(index),
        .l2_bytes = attribute(cudaDevAttrL2CacheSize, index),
        .clusters = {},
    };
    if (takes_clusters(devices[index].capability)) devices[index].clusters = clusters(index);
  });
  return devices[index];
}

}  // namespace flash_cute
