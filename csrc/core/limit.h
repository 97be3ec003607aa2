// A thread's limit: the kernels that its calls may run, and overrides of forward's plans.
#pragma once

#include <string>

#include "core/config.h"
#include "core/device.h"
#include "core/overrides.h"
#include "core/problem.h"

namespace flash_cute {

// Whether a kernel's id is one of the lines.
bool is_listed(const std::string& lines, const std::string& id);

// From now on calls of this thread run only kernels with these ids, one a line; any kernel if there is none. Lines of
// overrides.h set num_splits and pack_gqa of forward: kernels that do not support them do not run either. Returns the
// previous lines. Throws std::invalid_argument for a bad line, and keeps the previous lines. Other threads have their
// own limits: flash_cute/native/limits.py passes a limit to autograd's thread.
std::string limit_kernels(std::string lines);

// This thread's overrides of forward's plans, also over a cache.
const FwdOverrides& overrides_of_limit();

// Whether the limit allows the kernel's id; without ids it allows all.
bool is_allowed(const KernelConfig& config);

// Why this thread's calls may not run the kernel; empty if they may.
template <Op op>
std::string beyond_limit(const KernelConfig& config, const Problem<op>& problem, const Device& gpu);

// The error of a call that no kernel supports: the reasons of each kernel. If only the thread's overrides exclude
// allowed kernels, it has only their reasons.
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
