// Kernels that were measured to be the fastest for some sizes (flash_cute/tuning/). If they support a call they are
// preferred to the estimate of heuristics.h. There are none before set_calibration().
#pragma once

#include <string>

#include "core/config.h"
#include "core/device.h"
#include "core/overrides.h"
#include "core/problem.h"

namespace flash_cute {

// From now on calls of all threads prefer these kernels. A line is a bucket, " = ", a kernel's id, and overrides of
// forward's plan, if any: " num_splits=2 pack_gqa=1". An empty string removes all. Returns the previous lines. Throws
// std::invalid_argument, and keeps the previous lines, for a line without " = ", an unknown id, a number below 1, or
// overrides of another kernel than Hopper's forward.
std::string set_calibration(std::string lines);

// The bucket of a problem, given as introspect.h takes it. A bucket is a line of text: GPU, op, dtype, head dims, mask,
// layout and rules, then lengths and heads as powers of two. A table may leave out what follows " | ".
std::string calibration_bucket(std::string problem);

// The kernel that was measured for such a call on such a GPU; null if none was, or if the call gives num_splits or
// split_size: its results must not depend on the batch.
template <Op op>
const KernelConfig* calibrated(const Problem<op>& problem, const Device& gpu);

// The measured overrides for such a call; none if another kernel, or none, was measured to be the fastest.
FwdOverrides calibrated_overrides(const KernelConfig& config, const FwdProblem& problem, const Device& gpu);

bool same_kernel(const KernelConfig& a, const KernelConfig& b);

}  // namespace flash_cute
