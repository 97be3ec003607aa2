// From the arguments of fwd_kvcache to the problem that kernels are given.
#pragma once

#include "api/arguments.h"
#include "core/problem.h"

namespace flash_cute {

struct KvcacheArguments {
  View q, k_cache, v_cache;
  std::optional<View> k, v;
  std::optional<View> rotary_cos, rotary_sin;  // [positions, rotary_dim / 2]
  std::optional<View> cache_seqlens, cache_batch_idx, cache_leftpad;  // [b]
  std::optional<View> block_table;             // [b, blocks]
  std::optional<View> cu_seqlens_q;            // [b + 1]
  int64_t max_seqlen_q;
  std::optional<View> cu_seqlens_k_new;  // [b + 1]
  std::optional<View> rotary_seqlens;    // [b]
  Score score;
  bool rotary_interleaved;
  int64_t num_splits, split_size;
};

// With `joins` those of new keys, values and rotary embedding, too.
KvcacheArguments take_kvcache(Stack& in, bool joins);

// Whether rows of queries are few enough for the kernels over a cache.
void check_cached_queries(const FwdProblem& f);

// Checks the arguments and fills everything but the results.
DecodeProblem make_problem(const KvcacheArguments& a);

}  // namespace flash_cute
