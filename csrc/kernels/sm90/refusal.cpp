// Why Hopper's kernels do not support a problem.
#include <cstdint>
#include <initializer_list>

#include "core/layout/smem_atoms.h"
#include "kernels/sm90/family.h"
#include "kernels/sm90/resources.h"

namespace flash_cute::sm90 {
namespace {

// Whether TMA can address all of a tensor.
bool addressable(const TensorView& m, DType dtype, int64_t rows, int heads, int batch) {
  constexpr int64_t kStrideLimit = int64_t{1} << 40;  // bytes
  auto fits = [&](int64_t stride, int64_t steps) {
    return steps <= 1 || (0 < stride && stride < kStrideLimit / element_bytes(dtype));
  };
  return m.vectors && batch > 0 && heads > 0 && 0 < rows && rows < INT32_MAX && fits(m.row, rows) &&
         fits(m.head, heads) && fits(m.batch, batch);
}

// Whether TMA can address all tensors with rows of queries and of keys that a kernel accesses.
bool addressable(const FwdProblem& p, std::initializer_list<TensorView> queries,
                 std::initializer_list<TensorView> keys) {
  auto all = [&](std::initializer_list<TensorView> tensors, bool dense, int64_t longest, int64_t total, int heads) {
    return std::all_of(tensors.begin(), tensors.end(), [&](const TensorView& m) {
      return addressable(m, p.dtype, dense ? longest : total, heads, dense ? p.batch : 1);
    });
  };
  const bool paged = p.pages.ids != nullptr;
  auto addressable_pages = [&](const TensorView& m) {
    return addressable(m, p.dtype, p.pages.size, p.heads_k, p.pages.count);
  };
  return all(queries, p.dense(), p.seqlen_q, p.total_q, p.heads) &&
         (paged ? std::all_of(keys.begin(), keys.end(), addressable_pages)
                : all(keys, p.dense_keys(), p.seqlen_k, p.total_k, p.heads_k));
}

bool addressable(const BwdProblem& p) {
  if (p.fp32_gradients) return addressable(p.fwd, {p.fwd.q, p.dout}, {p.fwd.k, p.fwd.v});
  return addressable(p.fwd, {p.fwd.q, p.dout, p.dq}, {p.fwd.k, p.fwd.v, p.dk, p.dv});
}

// Whether an atom of columns, the unit of TMA, would lie wholly past a head dim: TMA faults on boxes that are entirely
// out of bounds.
bool has_empty_columns(const KernelConfig& config, const FwdProblem& p) {
  auto empty = [&](int head_dim, int tile_columns) {
    return head_dim <= tile_columns - atom_columns(tile_columns, element_bytes(config.dtype));
  };
  return empty(p.head_dim, config.head_dim) || empty(p.head_dim_v, config.head_dim_v);
}

}  // namespace

void Sm90Family::refuse(Refusal& refusal, const KernelConfig& config, const FwdProblem& problem) const {
  // Dropout bits are generated for tiles counted from the first visible key. A bounded left window may start anywhere
  // inside the 32 keys that share a Philox call.
  const bool keys_shifted = problem.band.left < problem.seqlen_k - 1;
  // TMA loads contiguous rows in whole swizzle atoms; pages must hold whole ones.
  const bool reads_pages = config.cluster == 1 && !keys_shifted && problem.pages.together(config.block_n) % 8 == 0;
  refusal.tensor_map = !addressable(problem, {problem.q, problem.out}, {problem.k, problem.v});
  refusal.empty_columns = has_empty_columns(config, problem);
  refusal.pages = problem.pages.ids != nullptr && !reads_pages;
  refusal.dropout = problem.rules.rng != nullptr && (!has_dropout(config) || keys_shifted);
}

void Sm90Family::refuse(Refusal& refusal, const KernelConfig& config, const BwdProblem& problem) const {
  refusal.tensor_map = !addressable(problem);
  refusal.empty_columns = has_empty_columns(config, problem.fwd);
  refusal.dropout = problem.fwd.rules.rng != nullptr && !has_dropout(config);
  // Ranks also count tiles of keys that a window on the left hides. No CTA processes these, so later tiles would wait
  // forever.
  const bool turns_known = problem.fwd.lists.ranks != nullptr && problem.fwd.band.left >= problem.fwd.seqlen_k - 1;
  refusal.lists = problem.fwd.lists.on() && problem.deterministic && !turns_known;
}

void Sm90Family::refuse(Refusal& refusal, const KernelConfig&, const DecodeProblem& problem) const {
  refusal.dropout = problem.fwd.rules.rng != nullptr;
  refusal.splits = !problem.even_splits();
}

}  // namespace flash_cute::sm90
