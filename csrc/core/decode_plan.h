// How decoding is laid out on a GPU: arithmetic on sizes alone.
#pragma once

#include <cstdint>
#include <string>

#include "core/config.h"
#include "core/device.h"
#include "core/problem.h"

namespace flash_cute {

// Of how many CTAs the clusters are, each with a tile of query rows of one kv head of one sequence, where the GPU has
// room for all of them at once: as few as have the least keys each. 1 where it has not.
int ctas_of_tile(const DecodeProblem& p, const KernelConfig& config, const Device& gpu);

// Fills in how keys are shared out: how many CTAs a head has, and which run side by side, divisors, and p.slots, room
// for the results of parts, 0 if every part must be a whole. Throws std::runtime_error for sizes that numbers of quanta
// cannot count.
void plan_decode(DecodeProblem& p, const KernelConfig& config, const Device& gpu);

// For tests: the parts that the CTAs of a GPU, of which an SM has `ctas` at a time, take of sequences whose lengths
// stand in a row, "33,0,130". A part is a line: its CTA, sequence, kv head, first packed row, blocks of keys [first,
// last), how many parts its unit has and which one it is, and its slot; the first line says how many slots there are.
std::string decode_parts(std::string lengths, int64_t seqlen_q, int64_t heads, int64_t heads_k, int64_t num_splits,
                         int64_t split_size, int64_t capacity, int64_t sms, int64_t ctas);

}  // namespace flash_cute
