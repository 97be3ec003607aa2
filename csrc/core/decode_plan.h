// The plan of decode: arithmetic on sizes alone.
#pragma once

#include <cstdint>
#include <string>

#include "core/config.h"
#include "core/device.h"
#include "core/problem.h"

namespace flash_cute {

// CTAs of the cluster of a work tile, if the GPU can run all clusters at once: the fewest that minimise a CTA's blocks.
// 1 if it cannot.
int ctas_of_tile(const DecodeProblem& p, const KernelConfig& config, const Device& gpu);

// Fills in how keys are split: CTAs per head, clusters, divisors, and p.slots, workspace for splits (0 if no work tile
// is split). Throws std::runtime_error if quanta would overflow.
void plan_decode(DecodeProblem& p, const KernelConfig& config, const Device& gpu);

// For tests: the splits of all CTAs of a GPU, `ctas` an SM, for comma-separated lengths. The first line is p.slots;
// each further line a split: CTA, sequence, kv head, first packed row, first and last block, splits of its work tile,
// its index, its slot.
std::string decode_parts(std::string lengths, int64_t seqlen_q, int64_t heads, int64_t heads_k, int64_t num_splits,
                         int64_t split_size, int64_t capacity, int64_t sms, int64_t ctas);

}  // namespace flash_cute
