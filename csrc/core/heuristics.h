// Cost models: which of several kernels for the same problem is likely the fastest. Arithmetic on sizes alone.
#pragma once

#include <vector>

#include "core/config.h"
#include "core/device.h"
#include "core/plan.h"
#include "core/problem.h"

namespace flash_cute {

// Whether two kernels differ only in tiles, so that the cheaper one may run. Backward's rows of one head dim are for
// GPUs with more or less shared memory: there the first that fits is best.
bool alternatives(const KernelConfig& a, const KernelConfig& b);

// The most query heads of a group that can share a tile of queries (pack_gqa), so that short sequences fill it. A tile
// then has all queries of its heads, and the kernel supports any power of two up to that number.
int pack_gqa(const KernelConfig& config, const FwdProblem& problem);
bool may_pack(const KernelConfig& config, const FwdProblem& problem, int heads);
// Queries of a tile of a CTA or a cluster, whose rows may be those of several heads.
int queries_of_tile(const KernelConfig& config, const FwdProblem& problem);

// The override's pack_gqa if the kernel supports it, else pack_gqa().
int packed_heads(const KernelConfig& config, const FwdProblem& problem, const FwdOverrides& overrides);

// The most splits of the keys of a forward with so many heads per tile: at most the number of key tiles, and two waves.
// 1 for kernels without splits.
int most_splits(const KernelConfig& config, const FwdProblem& problem, int heads, int sms);

// Microseconds of the tiles and passes of a forward with so many heads a tile, with the override's number of splits if
// the kernel supports it, else with the best one. Of packed lengths the host knows the mean and the longest. Clusters
// then cost infinity: short sequences would idle some of their CTAs.
struct SplitCost {
  double us;
  int num_splits;
};
SplitCost cheapest_splits(const KernelConfig& config, const FwdProblem& problem, int heads, const Device& gpu,
                          int num_splits = 0);

double cost(const KernelConfig& config, const FwdProblem& problem, const Device& gpu,
            const FwdOverrides& overrides = {});

// Microseconds of decode, with lengths as the host expects them.
double cost(const KernelConfig& config, const DecodeProblem& p, const Device& gpu, const FwdOverrides& = {});

// Whether a forward kernel is likely faster than decode over a cache. Never if one tile of 16 rows has all rows of a kv
// head: decode is memory-bound there.
bool forward_is_cheaper(const KernelConfig& forward, const KernelConfig& decode, const DecodeProblem& p,
                        const Device& gpu, const FwdOverrides& overrides = {});

// The first kernel that `fits` accepts, or the cheapest of its alternatives; null if none.
template <class Fits, class P>
const KernelConfig* preferred(const std::vector<const KernelConfig*>& kernels, const Fits& fits, const P& problem,
                              const Device& gpu, const FwdOverrides& overrides = {}) {
  const KernelConfig* best = nullptr;
  double least = -1;  // cost of the best, once there is an alternative
  for (const KernelConfig* kernel : kernels) {
    if ((best != nullptr && !alternatives(*best, *kernel)) || !fits(*kernel)) continue;
    if (best == nullptr) {
      best = kernel;
      continue;
    }
    if (least < 0) least = cost(*best, problem, gpu, overrides);
    const double other = cost(*kernel, problem, gpu, overrides);
    if (other >= least) continue;
    best = kernel;
    least = other;
  }
  return best;
}

}  // namespace flash_cute
