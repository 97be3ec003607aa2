// Which kernels a thread's calls may take, and what is asked of forward's plans.
#pragma once

#include <string>

#include "core/config.h"
#include "core/device.h"
#include "core/overrides.h"
#include "core/problem.h"

namespace flash_cute {

// Whether a kernel's id is one of the lines.
bool is_listed(const std::string& lines, const std::string& id);

// From now on calls of this thread take only kernels with these ids, one a line; any kernel if there is none. Lines of
// overrides.h ask for num_splits and pack_gqa of forward: kernels that cannot do them are not taken either. Returns the
// lines that held until now. Throws std::invalid_argument for a bad line of these; then the lines of before still hold.
// Other threads have limits of their own: flash_cute/limits.py carries a limit into autograd's.
std::string limit_kernels(std::string lines);

// What this thread asks of forward's plans, over a cache too.
const FwdOverrides& overrides_of_limit();

// Whether this thread's calls may take the kernel by its id; true of all where no id is given.
bool is_allowed(const KernelConfig& config);

// Why this thread's calls may not take the kernel; empty if they may.
template <Op op>
std::string beyond_limit(const KernelConfig& config, const Problem<op>& problem, const Device& gpu);

// The error of a call that no kernel takes: the reasons of each kernel. Where only the numbers that the thread asks for
// keep allowed kernels from it, the reasons of these alone.
class NoKernel {
 public:
  // A kernel, why it cannot do the call, and beyond_limit().
  void add(const KernelConfig& config, const std::string& cannot, const std::string& beyond_limit);
  // Throws std::runtime_error.
  [[noreturn]] void raise() const;

 private:
  std::string all_, able_;  // a line each
};

}  // namespace flash_cute
