#include "core/refusal.h"

#include <cstdint>

#include "core/family.h"
#include "core/layout/smem_atoms.h"

namespace flash_cute {

template <class P>
static bool lacks_vectors(const P&) {
  return false;
}

static bool lacks_vectors(const DecodeProblem& p) {
  return !p.has_vectors();
}

template <class P>
static DType cache_dtype(const P& p) {
  return forward_of(p).dtype;
}

static DType cache_dtype(const DecodeProblem& p) {
  return p.cache_dtype();
}

// Whether the kernel reads, or the problem has, a cache of 8 bits that the other one does not have.
template <class P>
static bool differs_in_cache(const KernelConfig& config, const P& problem) {
  const DType given = cache_dtype(problem);
  return (config.widens_cache() || given != forward_of(problem).dtype) && config.cache != given;
}

// Whether tiles of tokens hold the query heads of a group, of which there are several.
static bool packs_group(const KernelConfig& config, const FwdProblem& p) {
  return p.heads_k > 0 && p.heads > p.heads_k && p.heads / p.heads_k <= config.block_m;
}

// The refusals that depend only on sizes.
template <Op op>
static Refusal refusal_of_sizes(const KernelConfig& config, const Problem<op>& problem) {
  const FwdProblem& forward = forward_of(problem);
  return {
      .dtype = config.dtype != forward.dtype,
      .tier = !config.rich() && forward.tier() == Tier::Rich,
      .head_dim = forward.head_dim > config.head_dim,
      .head_dim_v = forward.head_dim_v > config.head_dim_v,
      .vectors = lacks_vectors(problem),
      .tiles = config.walks_lists() != forward.lists.on(),
      .group = config.packs_tokens() && !packs_group(config, forward),
      .cache = differs_in_cache(config, problem),
  };
}

template <Op op>
Refusal refusal(const KernelConfig& config, const Problem<op>& problem, const Device& device) {
  const Family& family = family_of(config);
  Refusal found = refusal_of_sizes<op>(config, problem);
  found.gpu = !family.runs_on(device.capability);
  found.shared_memory = family.smem_bytes(config) > device.smem_optin;
  family.refuse(found, config, problem);
  return found;
}

template <Op op>
bool fits(const KernelConfig& config, const Problem<op>& problem, const Device& device) {
  return !refusal_of_sizes<op>(config, problem).any() && family_of(config).runs_on(device.capability) &&
         !refusal<op>(config, problem, device).any();
}

template Refusal refusal<Op::Fwd>(const KernelConfig&, const FwdProblem&, const Device&);
template Refusal refusal<Op::Bwd>(const KernelConfig&, const BwdProblem&, const Device&);
template Refusal refusal<Op::Decode>(const KernelConfig&, const DecodeProblem&, const Device&);
template bool fits<Op::Fwd>(const KernelConfig&, const FwdProblem&, const Device&);
template bool fits<Op::Bwd>(const KernelConfig&, const BwdProblem&, const Device&);
template bool fits<Op::Decode>(const KernelConfig&, const DecodeProblem&, const Device&);

void add_reason(std::string& reasons, const std::string& reason) {
  reasons += (reasons.empty() || reason.empty() ? "" : "; ") + reason;
}

template <Op op>
std::string explain(const Refusal& refusal, const KernelConfig& config, const Problem<op>& given,
                    const Device& device) {
  const FwdProblem& problem = forward_of(given);
  const Family& family = family_of(config);
  auto number = [](int64_t value) { return std::to_string(value); };
  auto arch = [&](int capability) { return "sm_" + number(capability); };
  const std::string dims = number(problem.head_dim) + " and " + number(problem.head_dim_v) + " of v";
  auto empty_up_to = [&](int columns) { return number(columns - atom_columns(columns, element_bytes(config.dtype))); };
  std::string reasons;
  auto add = [&](bool holds, const std::string& reason) {
    if (holds) add_reason(reasons, reason);
  };
  add(refusal.dtype, std::string("computes in ") + name(config.dtype) + ", the call in " + name(problem.dtype));
  add(refusal.tier, "has no softcap, ALiBi, dropout or scale below 0 (plain), the call has one of them");
  add(refusal.head_dim, "head dim up to " + number(config.head_dim) + ", the call has " + number(problem.head_dim));
  add(refusal.head_dim_v,
      "head dim of v up to " + number(config.head_dim_v) + ", the call has " + number(problem.head_dim_v));
  add(refusal.gpu, "for " + arch(static_cast<int>(config.arch)) +
                       (family.facts.runs_on_later ? " and newer" : " alone") + ", the GPU is " +
                       arch(device.capability));
  add(refusal.shared_memory, "needs " + number(family.smem_bytes(config)) + " bytes of shared memory, the GPU has " +
                                 number(device.smem_optin));
  add(refusal.tensor_map,
      "needs tensors that are not empty, with vectors on 16-byte boundaries and strides that are not 0");
  add(refusal.empty_columns, "needs head dims above " + empty_up_to(config.head_dim) + " and " +
                                 empty_up_to(config.head_dim_v) + " of v, the call has " + dims +
                                 ": a whole block of its tile's columns would be empty");
  add(refusal.pages, "does not read pages, or none of " + number(problem.pages.size) +
                         " rows, or none with a window that is bounded to the left");
  add(refusal.dropout, "has no dropout, or none with a window that is bounded to the left");
  add(refusal.splits, "splits keys by itself: does not support num_splits and split_size");
  add(refusal.fp32_gradients, "rounds gradients to the dtype of q, k and v; only Hopper's kernels write them in fp32");
  const std::string vector = number(config.widens_cache() ? 16 : 8);
  add(refusal.vectors, "needs head dims that are multiples of " + vector + ", and vectors of " + vector +
                           " numbers on 16-byte boundaries");
  add(refusal.tiles, config.walks_lists() ? "for sparse calls (tile_lists), the call is not sparse"
                                          : "not for sparse calls (tile_lists), the call is sparse");
  add(refusal.group, "for 2 to " + number(config.block_m) + " query heads a kv head, the call has " +
                         number(problem.heads_k > 0 ? problem.heads / problem.heads_k : 0));
  add(refusal.lists,
      "deterministic over tile_lists only with tile_ranks and without a window that is bounded to the left");
  add(refusal.cache,
      std::string("reads keys and values of ") + name(config.cache) + ", the call has " + name(cache_dtype(given)));
  return reasons;
}

template std::string explain<Op::Fwd>(const Refusal&, const KernelConfig&, const FwdProblem&, const Device&);
template std::string explain<Op::Bwd>(const Refusal&, const KernelConfig&, const BwdProblem&, const Device&);
template std::string explain<Op::Decode>(const Refusal&, const KernelConfig&, const DecodeProblem&, const Device&);

}  // namespace flash_cute
