// The plan of backward: splits, the order of key tiles, and of their adds to dQ. Arithmetic on sizes alone.
#pragma once

#include "core/config.h"
#include "core/device.h"
#include "core/plan.h"
#include "core/problem.h"

namespace flash_cute::sm90 {

// The cheapest splits of key tiles: none if the tiles keep the GPU busy, else of all tiles or of the last wave's.
// Splits cost a combine pass and workspace. Heads are split before queries. Packed lengths count as their mean.
QuerySplits cheapest_query_splits(const KernelConfig& config, const FwdProblem& problem, const Device& gpu);

// Zeros cost a pass at memory speed. FirstStores saves it if queries see few keys; with many keys all tiles would go
// at the first one's pace (sooner so with GQA under a mask, and in windows). CTAs that share L2 have no semaphores: both
// use BwdWorkspace::dq_semaphores.
DqAccumulate dq_accumulate(const KernelConfig& config, const BwdProblem& p, const QuerySplits& splits, bool shares_l2);

// Whether CTAs stay near each other (L2Throttle; over lists MeanPosition): tiles of equal length that walk through more
// queries, dO and dQ than L2 holds. The 2-CTA backward and serialized sums do not gain by it.
bool shares_l2(const KernelConfig& config, const BwdProblem& p, const Device& gpu);

// docs/kernels/backward_order.md has the reasons.
KeyOrder key_order(const KernelConfig& config, const BwdProblem& p, const QuerySplits& splits, DqAccumulate order,
                   const Device& gpu);

}  // namespace flash_cute::sm90
