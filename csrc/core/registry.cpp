#include "core/registry.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>

#include "core/heuristics.h"
#include "kernels/common/atoms.h"

namespace flash_cute {

// kernels_built.def holds the rows of configs.def whose arch this build compiles.
#define KERNEL_CONFIG(op, arch, dtype, tier, ...)             \
  KernelConfig {                                              \
    Op::op, Arch::arch, DType::dtype, Tier::tier, __VA_ARGS__ \
  }
#define KERNEL_ENTRY(...) {KERNEL_CONFIG(__VA_ARGS__), &launch<KERNEL_CONFIG(__VA_ARGS__)>},
#define FWD_KERNEL_Fwd(...) KERNEL_ENTRY(__VA_ARGS__)
#define FWD_KERNEL_Bwd(...)
#define FWD_KERNEL_Decode(...)
#define BWD_KERNEL_Fwd(...)
#define BWD_KERNEL_Bwd(...) KERNEL_ENTRY(__VA_ARGS__)
#define BWD_KERNEL_Decode(...)
#define DECODE_KERNEL_Fwd(...)
#define DECODE_KERNEL_Bwd(...)
#define DECODE_KERNEL_Decode(...) KERNEL_ENTRY(__VA_ARGS__)

static std::vector<Kernel<Op::Fwd>>& all_fwd_kernels() {
  static std::vector<Kernel<Op::Fwd>> kernels = {
#define KERNEL(op, ...) FWD_KERNEL_##op(op, __VA_ARGS__)
#include "kernels_built.def"
#undef KERNEL
  };
  return kernels;
}

static std::vector<Kernel<Op::Bwd>>& all_bwd_kernels() {
  static std::vector<Kernel<Op::Bwd>> kernels = {
#define KERNEL(op, ...) BWD_KERNEL_##op(op, __VA_ARGS__)
#include "kernels_built.def"
#undef KERNEL
  };
  return kernels;
}

static std::vector<Kernel<Op::Decode>>& all_decode_kernels() {
  static std::vector<Kernel<Op::Decode>> kernels = {
#define KERNEL(op, ...) DECODE_KERNEL_##op(op, __VA_ARGS__)
#include "kernels_built.def"
#undef KERNEL
  };
  return kernels;
}

const std::vector<Kernel<Op::Fwd>>& fwd_kernels() {
  return all_fwd_kernels();
}

const std::vector<Kernel<Op::Bwd>>& bwd_kernels() {
  return all_bwd_kernels();
}

const std::vector<Kernel<Op::Decode>>& decode_kernels() {
  return all_decode_kernels();
}

// Whether Hopper's TMA can address all of a tensor.
static bool addressable(const Matrices& m, int64_t rows, int heads, int batch) {
  constexpr int64_t kStrideLimit = int64_t{1} << 39;  // elements of 2 bytes
  auto fits = [](int64_t stride, int64_t steps) { return steps <= 1 || (0 < stride && stride < kStrideLimit); };
  return m.vectors && batch > 0 && heads > 0 && 0 < rows && rows < INT32_MAX && fits(m.row, rows) &&
         fits(m.head, heads) && fits(m.batch, batch);
}

// Whether it can address all of the tensors with rows of queries and of keys that a kernel gives it.
static bool addressable(const FwdProblem& p, std::initializer_list<Matrices> queries,
                        std::initializer_list<Matrices> keys) {
  auto all = [&](std::initializer_list<Matrices> tensors, bool dense, int64_t longest, int64_t total, int heads) {
    return std::all_of(tensors.begin(), tensors.end(), [&](const Matrices& m) {
      return addressable(m, dense ? longest : total, heads, dense ? p.batch : 1);
    });
  };
  const bool paged = p.pages.ids != nullptr;
  auto addressable_pages = [&](const Matrices& m) { return addressable(m, p.pages.size, p.heads_k, p.pages.count); };
  return all(queries, p.dense(), p.seqlen_q, p.total_q, p.heads) &&
         (paged ? std::all_of(keys.begin(), keys.end(), addressable_pages)
                : all(keys, p.dense_keys(), p.seqlen_k, p.total_k, p.heads_k));
}

static bool addressable(const FwdProblem& p) {
  return addressable(p, {p.q, p.out}, {p.k, p.v});
}

static bool addressable(const BwdProblem& p) {
  return addressable(p.fwd, {p.fwd.q, p.dout, p.dq}, {p.fwd.k, p.fwd.v, p.dk, p.dv});
}

static bool addressable(const DecodeProblem& p) {
  return addressable(p.fwd);
}

// What alternatives are weighed for. Where the caller says how keys are parted, a sequence's result must not depend on
// the batch around it: nor may the kernel.
template <class P>
static const FwdProblem& weighed(const P& p) {
  return forward_of(p);
}

static DecodeProblem weighed(const DecodeProblem& p) {
  DecodeProblem one = p;
  if (!p.even_shares()) one.fwd.batch = 1;
  return one;
}

// Whether TMA, which moves atom_columns() of a tile at once, would find some of these all behind the head dim. It may
// fault on what lies outside of a tensor altogether.
static bool has_empty_columns(int head_dim, int tile_columns) {
  return head_dim <= tile_columns - atom_columns(tile_columns);
}

template <class P>
static bool asks_for_parts(const P&) {
  return false;
}

static bool asks_for_parts(const DecodeProblem& p) {
  return !p.even_shares();
}

template <Op op>
Refusal refusal(const Kernel<op>& kernel, const Problem<op>& asked, const Device& device) {
  const KernelConfig& config = kernel.config;
  const FwdProblem& problem = forward_of(asked);
  const bool hopper = config.arch == Arch::Sm90, loads_tiles = hopper && op != Op::Decode;  // by TMA
  // Hopper's forward draws random numbers for tiles of keys from the first visible one on, which under such a window is
  // anywhere among the keys that share a call of Philox.
  const bool keys_shifted = hopper && op == Op::Fwd && problem.band.left < problem.seqlen_k - 1;
  // TMA moves rows that lie together, whole atoms of the swizzle; tiles are cut so if they are counted from row 0 on.
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
      .dropout = problem.rules.rng != nullptr && (!config.drops() || keys_shifted),
      .parts = hopper && asks_for_parts(asked),
      .set_aside = !kernel.in_use,
  };
}

std::string explain(const Refusal& refusal) {
  std::string reasons;
  auto add = [&](bool holds, const char* reason) {
    if (holds) reasons += (reasons.empty() ? "" : ", ") + std::string(reason);
  };
  add(refusal.dtype, "another dtype");
  add(refusal.tier, "another tier");
  add(refusal.head_dim, "a smaller head dim");
  add(refusal.head_dim_v, "a smaller head dim of v");
  add(refusal.gpu, "for other GPUs");
  add(refusal.shared_memory, "needs more shared memory than the GPU has");
  add(refusal.tensor_map,
      "needs tensors that are not empty, with vectors on 16-byte boundaries and strides that are not 0");
  add(refusal.empty_columns, "its tiles are wider by 64 columns or more (by 32, if 96 wide)");
  add(refusal.pages, "does not read pages, or none of this size, or not in a window that is bounded to the left");
  add(refusal.dropout, "has no dropout, or none in a window that is bounded to the left");
  add(refusal.parts, "shares keys out in its own way, without num_splits and split_size");
  add(refusal.set_aside, "set aside by use_kernels()");
  return reasons;
}

template <Op op>
const Kernel<op>* find(const std::vector<Kernel<op>>& kernels, const Problem<op>& problem, const Device& device) {
  auto fits = [&](const Kernel<op>& kernel) { return !refusal(kernel, problem, device).any(); };
  return preferred(kernels, fits, weighed(problem), device);
}

template <Op op>
const Kernel<op>& select(const std::vector<Kernel<op>>& kernels, const Problem<op>& problem, const Device& device) {
  if (const Kernel<op>* kernel = find(kernels, problem, device)) return *kernel;
  std::string message = "flash_cute: no kernel for this call";
  for (const Kernel<op>& kernel : kernels) {
    message += "\n  " + kernel.config.id() + ": " + explain(refusal(kernel, problem, device));
  }
  throw std::runtime_error(message);
}

template const Kernel<Op::Fwd>* find(const std::vector<Kernel<Op::Fwd>>&, const FwdProblem&, const Device&);
template const Kernel<Op::Fwd>& select(const std::vector<Kernel<Op::Fwd>>&, const FwdProblem&, const Device&);
template const Kernel<Op::Bwd>& select(const std::vector<Kernel<Op::Bwd>>&, const BwdProblem&, const Device&);
template const Kernel<Op::Decode>& select(const std::vector<Kernel<Op::Decode>>&, const DecodeProblem&, const Device&);

std::string kernels() {
  std::string ids;
  for (const auto& kernel : fwd_kernels()) ids += kernel.config.id() + "\n";
  for (const auto& kernel : bwd_kernels()) ids += kernel.config.id() + "\n";
  for (const auto& kernel : decode_kernels()) ids += kernel.config.id() + "\n";
  return ids;
}

void use_kernels(std::string ids) {
  ids = "\n" + ids + "\n";
  auto update = [&](auto& kernels) {
    for (auto& kernel : kernels) {
      kernel.in_use = ids == "\n\n" || ids.find("\n" + kernel.config.id() + "\n") != std::string::npos;
    }
  };
  update(all_fwd_kernels());
  update(all_bwd_kernels());
  update(all_decode_kernels());
}

}  // namespace flash_cute
