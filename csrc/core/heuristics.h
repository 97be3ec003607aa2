// Which of several kernels for the same problem is likely the fastest: arithmetic on sizes alone.
#pragma once

#include "core/config.h"
#include "core/device.h"
#include "core/problem.h"

namespace flash_cute {

// Whether two kernels differ in nothing but how they cut a problem into tiles, and which rules they have, so that
// either may do what both can. (Backward's rows of one head dim are for GPUs with more or with less shared memory:
// there the first that fits is best.)
bool alternatives(const KernelConfig& a, const KernelConfig& b);

// How many query heads of a group share a tile of queries in Hopper's forward, so that short sequences fill it.
int pack_gqa(const KernelConfig& config, const FwdProblem& problem);

// What a forward problem costs on a GPU with `sms` multiprocessors, a number to compare alternatives by, with keys in
// the number of parts that is best. Lengths of sequences that lie end to end are not known to the host: their mean
// stands for them, and CTAs in clusters, where short sequences would leave some without work, are left out by an
// infinite cost.
struct ForwardPlan {
  double cost;
  int num_splits;
};
ForwardPlan plan_forward(const KernelConfig& config, const FwdProblem& problem, int sms);

double cost(const KernelConfig& config, const FwdProblem& problem, const Device& gpu);

// Over a key/value cache, whose keys CTAs share out evenly, a tile of query rows costs its products with all keys, and
// reading them.
double cost(const KernelConfig& config, const DecodeProblem& p, const Device& gpu);

// Whether a kernel of forward likely takes less time than one of decoding, for keys in a cache. Never where one small
// tile of decoding's has all rows of a kv head, of 16 or, with some exceptions, 32 rows: reading the keys, which the
// cost of forward leaves out, is what bounds both.
bool forward_is_cheaper(const KernelConfig& forward, const KernelConfig& decode, const DecodeProblem& p,
                        const Device& gpu);

// Of the kernels that `fits` accepts the first, or the cheapest of its alternatives; null if it accepts none.
template <class Kernels, class Fits, class P>
auto preferred(const Kernels& kernels, const Fits& fits, const P& problem, const Device& gpu) {
  decltype(kernels.data()) best = nullptr;
  double least = -1;  // the cost of the best, once there is another one
  for (const auto& kernel : kernels) {
    if ((best != nullptr && !alternatives(best->config, kernel.config)) || !fits(kernel)) continue;
    if (best == nullptr) {
      best = &kernel;
      continue;
    }
    if (least < 0) least = cost(best->config, problem, gpu);
    const double other = cost(kernel.config, problem, gpu);
    if (other >= least) continue;
    best = &kernel;
    least = other;
  }
  return best;
}

// Into how many parts Hopper's backward cuts the work on each tile of keys: one, where that keeps the GPU busy; or the
// work on those tiles alone that the GPU's last turn is left with. More cost a pass that adds them up, and room for
// their sums. CtaChunks of heads come before chunks of queries. Lengths of sequences that lie end to end count as their
// mean. Other kernels have one part always.
QuerySplits plan_query_splits(const KernelConfig& config, const FwdProblem& problem, int sms);

}  // namespace flash_cute
