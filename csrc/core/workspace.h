// The workspaces of a kernel and its passes, and their parameters.
#pragma once

#include <cstdint>

#include "core/plan.h"
#include "core/problem.h"

namespace flash_cute {

// Results of the splits of Hopper's forward; null without splits.
struct FwdWorkspace {
  float* split_out = nullptr;  // [num_splits * h, rows of all sequences, split_columns]
  RowStats split_lse{};        // [num_splits * h, rows of all sequences]
  RowStats split_row_max{};    // as split_lse; null without row_max
  int split_columns = 0;       // of the kernel's tile of V
  // Of e4m3 (core/layout/transposed_values.h): V, and what scores are to be multiplied by for each key; null if nothing.
  void* values = nullptr;
  float* key_factors = nullptr;
};

// The padded rows of backward's workspaces: each sequence starts on a multiple of `block`, and no two share a block.
struct PaddedRows {
  int block;

  constexpr int64_t dense(int seqlen) const { return int64_t(seqlen + block - 1) / block * block; }
  constexpr int64_t packed(int64_t total, int batch) const { return (total + int64_t(batch) * block) / block * block; }
  constexpr int64_t first_row(int64_t offset, int b) const { return (offset + int64_t(b) * block) / block * block; }
};

// Of a token mask a bit for each strip of 16 queries: it sees some of the keys, and all of them.
struct StripBits {
  uint8_t some, all;
};

constexpr int kSlabRows = 64;  // keys of a slab of BwdWorkspace::split_sums: a warpgroup's

struct BwdWorkspace {
  RowStats lse_log2{};  // lse / ln 2; +inf where a row does not exist or sees no key. Rows are PaddedRows.
  RowStats row_dot{};  // softmax_d / rules.gradient_scale(), 0 where a row does not exist
  float* dq_accum = nullptr;  // [b, h, rows, head_dim of the kernel], each block of rows in an order of its own
  // [b, h, rows / block_m, warps]: key tiles that have added to a query tile (Serialized), or 1 once the first has
  // stored (FirstStores). Atomic: element 0 counts the steps, or parts of walks, of all CTAs that share L2.
  int* dq_semaphores = nullptr;
  // Partial sums of dK, then dV, in accumulator order: [slabs, splits, kSlabRows], head_dim + head_dim_v numbers each.
  // Slabs are those of the split tiles, or of packed sequences [h_k, rows / kSlabRows].
  float* split_sums = nullptr;
  int64_t slabs_of_head = 0;  // of packed sequences
  StripBits* strips = nullptr;  // [token masks]; null: steps of sparse calls are whole tiles of queries
};

// The slots of a work tile's splits.
struct SlotsOfTile {
  int count;  // of splits; 1: the result is in its place
  int first;  // TileSplits::first
};

struct DecodeWorkspace {
  float* split_out = nullptr;  // [slots, block_m, head_dim_v of the tile]
  float* split_lse = nullptr;  // [slots, block_m]
  SlotsOfTile* slots_of_tiles = nullptr;  // [b, tiles of queries, h_k], of tiles that have queries
};

template <Op>
struct WorkspaceOf;
template <>
struct WorkspaceOf<Op::Fwd> {
  using type = FwdWorkspace;
};
template <>
struct WorkspaceOf<Op::Bwd> {
  using type = BwdWorkspace;
};
template <>
struct WorkspaceOf<Op::Decode> {
  using type = DecodeWorkspace;
};
template <Op op>
using Workspace = typename WorkspaceOf<op>::type;

// The parameters of a kernel.
template <Op op>
struct Params : Problem<op>, Plan<op>, Workspace<op> {};
using FwdParams = Params<Op::Fwd>;
using BwdParams = Params<Op::Bwd>;
using DecodeParams = Params<Op::Decode>;

// Allocates parts of one piece of memory, in fp32 numbers; without memory it only counts.
class Arena {
 public:
  explicit Arena(float* memory = nullptr) : memory_(memory) {}

  float* take(int64_t numbers) {
    float* const part = memory_ == nullptr ? nullptr : memory_ + numbers_;
    numbers_ += numbers;
    return part;
  }
  int64_t numbers() const { return numbers_; }

 private:
  float* memory_;
  int64_t numbers_ = 0;
};

FwdWorkspace lay_out(Arena& arena, const KernelConfig& config, const FwdProblem& problem, const FwdPlan& plan);
BwdWorkspace lay_out(Arena& arena, const KernelConfig& config, const BwdProblem& problem, const BwdPlan& plan);
DecodeWorkspace lay_out(Arena& arena, const KernelConfig& config, const DecodeProblem& problem, const DecodePlan& plan);

}  // namespace flash_cute
