// Facts about a GPU that choose and shape launches.
#pragma once

namespace flash_cute {

struct Device {
  int capability;  // 10 * major + minor: 80, 86, 89, 90
  int smem_optin;  // bytes of shared memory that one CTA can have
  int sms;  // streaming multiprocessors
  int memory_gb_s;  // what its memory can give at most, in GB/s
};

// Of the GPU with this index; asked of the driver once. Throws std::runtime_error.
const Device& device(int index);

}  // namespace flash_cute
