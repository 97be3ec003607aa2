// How decode cuts its work: arithmetic on sizes alone.
#pragma once

#include "core/config.h"
#include "core/device.h"
#include "core/problem.h"

namespace flash_cute {

// CTAs of the cluster of a work tile, if the GPU can run all clusters at once: the fewest that minimise a CTA's blocks.
// 1 if it cannot.
int ctas_of_tile(const DecodeProblem& p, const KernelConfig& config, const Device& gpu);

}  // namespace flash_cute
