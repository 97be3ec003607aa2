// The properties of a GPU that plans depend on.
#pragma once

#include <array>

namespace flash_cute {

constexpr int kMostClustered = 8;  // CTAs of a cluster that every GPU with clusters can run

struct Device {
  int capability;  // 10 * major + minor: 80, 86, 89, 90
  int smem_optin;  // bytes of shared memory that one CTA can have
  int sms;  // streaming multiprocessors
  int memory_gb_s;  // peak bandwidth of its memory, in GB/s
  int l2_bytes;  // of its L2 cache
  // Clusters of n CTAs, one CTA an SM, that run at once; 0 without clusters. SMs come in GPCs of different sizes, which
  // clusters cannot span.
  std::array<int, kMostClustered + 1> clusters;
};

// The GPU with this index; queried once. Throws std::runtime_error.
const Device& device(int index);

}  // namespace flash_cute
