// The decisions about a call with a chosen kernel, as plain data: make_plan() makes them, introspect.h prints them.
// Launches and kernels read them, and decide nothing themselves.
#pragma once

#include "core/config.h"
#include "core/device.h"
#include "core/layout/fast_divmod.h"
#include "core/layout/head_sets.h"
#include "core/overrides.h"
#include "core/problem.h"

namespace flash_cute {

struct FwdPlan {
  int num_splits = 1;  // split-KV: parts of the keys of a tile of queries, at most; combine_splits() combines them
  int pack_gqa = 1;  // query heads of a group that share a tile of queries
  HeadSets sets;  // of pack_gqa heads, whose tiles of queries alternate: kernels/hopper/tile_scheduler.h
  bool by_level = false;  // packed: PackedOrder::by_level
  int resident = 0;  // CTAs, or clusters, of a persistent kernel; 0: a CTA for each tile
};

// The number of splits of a key tile's work in backward, each with partial sums of dK and dV: for all tiles, or only
// for the last ones.
struct QuerySplits {
  int heads = 1;  // of the query heads of a kv head
  int queries = 1;  // of the query tiles that see the keys
  int whole_tiles = 0;  // come first and are not split

  constexpr int count() const { return heads * queries; }
};

// The order in which key tiles add to dQ.
enum class DqAccumulate {
  Atomic,  // in any order, to zeros that the preprocess pass writes
  FirstStores,  // in any order, after the first tile has stored
  Serialized,  // in a fixed order: deterministic; on Hopper after the first tile has stored
};

constexpr bool uses_semaphore(DqAccumulate order) {
  return order != DqAccumulate::Atomic;
}

// The order of key tiles, and the direction of their walk: docs/kernels/backward_order.md.
struct KeyOrder {
  int tiles_of_set = 1;  // tiles that start together
  HeadSets sets;  // of kv heads, whose tiles of keys alternate
  bool by_level = false;  // packed: PackedOrder::by_level
  bool late_first = false;  // late keys first
  bool heads_inside = false;  // all query heads of a query tile, then the next query tile
  bool down_and_up = false;  // sets alternate between starting at the last and at the first queries
};

struct BwdPlan {
  QuerySplits splits;
  bool sums_of_splits = false;  // dK and dV go through the workspace: to be combined, or not to be rounded
  DqAccumulate dq_accumulate = DqAccumulate::Atomic;
  KeyOrder order;
  bool shares_l2 = false;  // CTAs that run ahead wait for the others; over lists, they start where the others are
  int resident = 0;  // CTAs, or clusters, of a persistent kernel; 0: a CTA for each tile
};

// A batch whose sequences are known to be equally long, so that the host can plan it.
struct UniformBatch {
  bool known = false;
  FastDivmod per_tile, per_sequence;
  FastDivmod chunk, tail_chunk;  // of a full CTA, and of a tail CTA
  int full_ctas = 0;  // of a head
};

// Clusters, each with a split of a work tile.
struct TileClusters {
  FastDivmod ctas;  // of a cluster
  FastDivmod parts;  // CTAs of a work tile, over all its splits
  FastDivmod tiles;  // of query rows, per kv head of a sequence
  FastDivmod work_tiles;  // of all sequences and kv heads
  int splits = 0;  // of a work tile, at most; 0: not Hopper's decode
  int column_bits = 0;  // each of the first CTAs combines 2^column_bits columns
};

struct DecodePlan {
  int quantum_blocks;  // of even splits: blocks of a quantum
  int ctas_per_head;  // CTAs per kv head, tail CTAs included
  FastDivmod by_ctas_per_head;  // without tail CTAs
  int resident_ctas;  // CTAs that run at once
  int cluster_ctas;  // CTAs of a cluster
  FastDivmod heads_k, group;  // kv heads, and query heads of each
  FastDivmod page_size;
  float l2_fraction;  // share of K and V that L2 keeps like other data; the rest leaves it first
  UniformBatch uniform;
  TileClusters clusters;
  int slots;  // workspace for splits (core/layout/decode_scheduler.h); 0 if no work tile is split

  constexpr int ctas() const { return ctas_per_head * heads_k.value; }
  constexpr bool by_clusters() const { return clusters.splits > 0; }
};

template <Op>
struct PlanOf;
template <>
struct PlanOf<Op::Fwd> {
  using type = FwdPlan;
};
template <>
struct PlanOf<Op::Bwd> {
  using type = BwdPlan;
};
template <>
struct PlanOf<Op::Decode> {
  using type = DecodePlan;
};
template <Op op>
using Plan = typename PlanOf<op>::type;

constexpr int64_t kMostParts = int64_t{1} << 30;  // limit of decode's quanta, and of its slots

// The plan of a problem that the kernel supports; unsupported overrides are replaced by estimates. Throws
// std::runtime_error if the work has more parts than kMostParts.
FwdPlan make_plan(const KernelConfig& config, const FwdProblem& problem, const Device& gpu,
                  const FwdOverrides& overrides = {});
BwdPlan make_plan(const KernelConfig& config, const BwdProblem& problem, const Device& gpu);
DecodePlan make_plan(const KernelConfig& config, const DecodeProblem& problem, const Device& gpu);

}  // namespace flash_cute
