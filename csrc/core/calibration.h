// Kernels that were measured to be the fastest for calls of some sizes (flash_cute/tuning/): preferred to what
// heuristics.h estimates, where they can do the call. There are none until set_calibration() names some.
#pragma once

#include <string>

#include "core/config.h"
#include "core/device.h"
#include "core/overrides.h"
#include "core/problem.h"

namespace flash_cute {

// From now on calls of this process, of all threads, prefer these kernels: a line each, a bucket, " = ", a kernel's id,
// and overrides of forward's plan, if any: " num_splits=2 pack_gqa=1". An empty string ends that. Returns the lines
// that held until now. Throws std::invalid_argument for a line without " = ", an id that is no row's, a number
// below 1 or for another kernel than Hopper's forward; then the lines of before still hold.
std::string set_calibration(std::string lines);

// The bucket of a problem, given as introspect.h takes it. A bucket is a line of text: GPU, op, dtype, head dims, mask,
// layout and rules, then lengths and heads as powers of two. A table may leave out what follows " | ".
std::string calibration_bucket(std::string problem);

// The kernel that was measured for such a call on such a GPU; null if none was, or if the call gives num_splits or
// split_size: its results must not depend on the batch.
template <Op op>
const KernelConfig* calibrated(const Problem<op>& problem, const Device& gpu);

// What was measured with this kernel to suit such a call; nothing where another kernel, or none, was the fastest.
FwdOverrides calibrated_overrides(const KernelConfig& config, const FwdProblem& problem, const Device& gpu);

bool same_kernel(const KernelConfig& a, const KernelConfig& b);

}  // namespace flash_cute
