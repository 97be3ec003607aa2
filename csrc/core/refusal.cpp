#include "core/refusal.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "core/layout/smem_atoms.h"

namespace flash_cute {

// Whether Hopper's TMA can address all of a tensor.
static bool addressable(const TensorView& m, int64_t rows, int heads, int batch) {
  constexpr int64_t kStrideLimit = int64_t{1} << 39;  // elements of 2 bytes
  auto fits = [](int64_t stride, int64_t steps) { return steps <= 1 || (0 < stride && stride < kStrideLimit); };
  return m.vectors && batch > 0 && heads > 0 && 0 < rows && rows < INT32_MAX && fits(m.row, rows) &&
         fits(m.head, heads) && fits(m.batch, batch);
}

// Whether it can address all of the tensors with rows of queries and of keys that a kernel gives it.
static bool addressable(const FwdProblem& p, std::initializer_list<TensorView> queries,
                        std::initializer_list<TensorView> keys) {
  auto all = [&](std::initializer_list<TensorView> tensors, bool dense, int64_t longest, int64_t total, int heads) {
    return std::all_of(tensors.begin(), tensors.end(), [&](const TensorView& m) {
      return addressable(m, dense ? longest : total, heads, dense ? p.batch : 1);
    });
  };
  const bool paged = p.pages.ids != nullptr;
  auto addressable_pages = [&](const TensorView& m) { return addressable(m, p.pages.size, p.heads_k, p.pages.count); };
  return all(queries, p.dense(), p.seqlen_q, p.total_q, p.heads) &&
         (paged ? std::all_of(keys.begin(), keys.end(), addressable_pages)
                : all(keys, p.dense_keys(), p.seqlen_k, p.total_k, p.heads_k));
}

static bool addressable(const FwdProblem& p) {
  return addressable(p, {p.q, p.out}, {p.k, p.v});
}

static bool addressable(const BwdProblem& p) {
  if (p.fp32_gradients) return addressable(p.fwd, {p.fwd.q, p.dout}, {p.fwd.k, p.fwd.v});
  return addressable(p.fwd, {p.fwd.q, p.dout, p.dq}, {p.fwd.k, p.fwd.v, p.dk, p.dv});
}

static bool addressable(const DecodeProblem& p) {
  return addressable(p.fwd);
}

// Whether an atom of columns, the unit of TMA, would lie wholly past the head dim: TMA faults on boxes that are
// entirely out of bounds.
static bool has_empty_columns(int head_dim, int tile_columns) {
  return head_dim <= tile_columns - atom_columns(tile_columns);
}

template <class P>
static bool asks_for_splits(const P&) {
  return false;
}

static bool asks_for_splits(const DecodeProblem& p) {
  return !p.even_splits();
}

template <class P>
static bool asks_for_fp32_gradients(const P&) {
  return false;
}

static bool asks_for_fp32_gradients(const BwdProblem& p) {
  return p.fp32_gradients;
}

template <class P>
static bool lacks_vectors(const P&) {
  return false;
}

static bool lacks_vectors(const DecodeProblem& p) {
  return !p.has_vectors();
}

template <Op op>
Refusal refusal(const KernelConfig& config, const Problem<op>& asked, const Device& device) {
  const FwdProblem& problem = forward_of(asked);
  const bool hopper = config.arch == Arch::Sm90, loads_tiles = hopper && op != Op::Decode;  // by TMA
  // Hopper's forward generates dropout bits for tiles counted from the first visible key. A bounded left window may
  // start anywhere inside the 32 keys that share a Philox call.
  const bool keys_shifted = hopper && op == Op::Fwd && problem.band.left < problem.seqlen_k - 1;
  // TMA loads contiguous rows in whole swizzle atoms; pages must cut tiles so.
  const bool reads_pages =
      hopper && config.cluster == 1 && !keys_shifted && problem.pages.together(config.block_n) % 8 == 0;
  return {
      .dtype = config.dtype != problem.dtype,
      .tier = !config.rich() && problem.tier() == Tier::Rich,
      .head_dim = problem.head_dim > config.head_dim,
      .head_dim_v = problem.head_dim_v > config.head_dim_v,
      .gpu = hopper ? device.capability != 90 : static_cast<int>(config.arch) > device.capability,
      .shared_memory = config.smem_bytes() > device.smem_optin,
      .tensor_map = loads_tiles && !addressable(asked),
      .empty_columns = loads_tiles && (has_empty_columns(problem.head_dim, config.head_dim) ||
                                       has_empty_columns(problem.head_dim_v, config.head_dim_v)),
      .pages = op == Op::Fwd && problem.pages.ids != nullptr && !reads_pages,
      .dropout = problem.rules.rng != nullptr && (!config.has_dropout() || keys_shifted),
      .splits = hopper && asks_for_splits(asked),
      .fp32_gradients = !hopper && asks_for_fp32_gradients(asked),
      .vectors = lacks_vectors(asked),
  };
}

template Refusal refusal<Op::Fwd>(const KernelConfig&, const FwdProblem&, const Device&);
template Refusal refusal<Op::Bwd>(const KernelConfig&, const BwdProblem&, const Device&);
template Refusal refusal<Op::Decode>(const KernelConfig&, const DecodeProblem&, const Device&);

void add_reason(std::string& reasons, const std::string& reason) {
  reasons += (reasons.empty() || reason.empty() ? "" : "; ") + reason;
}

std::string explain(const Refusal& refusal, const KernelConfig& config, const FwdProblem& problem,
                    const Device& device) {
  auto number = [](int64_t value) { return std::to_string(value); };
  auto arch = [&](int capability) { return "sm_" + number(capability); };
  const std::string dims = number(problem.head_dim) + " and " + number(problem.head_dim_v) + " of v";
  std::string reasons;
  auto add = [&](bool holds, const std::string& reason) {
    if (holds) add_reason(reasons, reason);
  };
  add(refusal.dtype, std::string("computes in ") + name(config.dtype) + ", the call in " + name(problem.dtype));
  add(refusal.tier, "has no softcap, ALiBi, dropout or scale below 0 (plain), the call has");
  add(refusal.head_dim, "head dim up to " + number(config.head_dim) + ", the call has " + number(problem.head_dim));
  add(refusal.head_dim_v,
      "head dim of v up to " + number(config.head_dim_v) + ", the call has " + number(problem.head_dim_v));
  add(refusal.gpu, "for " + arch(static_cast<int>(config.arch)) +
                       (config.arch == Arch::Sm90 ? " alone" : " and newer") + ", the GPU is " +
                       arch(device.capability));
  add(refusal.shared_memory,
      "needs " + number(config.smem_bytes()) + " bytes of shared memory, the GPU has " + number(device.smem_optin));
  add(refusal.tensor_map,
      "needs tensors that are not empty, with vectors on 16-byte boundaries and strides that are not 0");
  add(refusal.empty_columns, "its tiles are wider by 64 columns or more (by 32, if 96 wide) than head dims " + dims);
  add(refusal.pages, "does not read pages, or none of " + number(problem.pages.size) +
                         " rows, or not in a window that is bounded to the left");
  add(refusal.dropout, "has no dropout, or none in a window that is bounded to the left");
  add(refusal.splits, "splits keys by itself: takes no num_splits and no split_size");
  add(refusal.fp32_gradients, "rounds gradients to the dtype of q, k and v; Hopper's kernels leave them in fp32");
  add(refusal.vectors, "reads vectors of 8 numbers on 16-byte boundaries");
  return reasons;
}

}  // namespace flash_cute
