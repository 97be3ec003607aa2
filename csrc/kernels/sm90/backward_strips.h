// Steps of Hopper's sparse backward: strips of queries from any tiles of a list (core/layout/query_strips.h).
#pragma once

#include "kernels/sm90/backward_traits.h"

namespace flash_cute::sm90 {

// Fills BwdWorkspace::strips, one warp a token mask.
template <KernelConfig C>
__global__ void __launch_bounds__(32 * C.warps) strips_of_masks(const __grid_constant__ BwdParams p) {
  const int mask = blockIdx.x * C.warps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (mask >= p.fwd.lists.masks) return;
  StripBits bits{};
  CUTE_UNROLL
  for (int first = 0; first < kTileSide; first += 32) {
    constexpr int kWords = kTileSide / 32;  // of a query
    const uint32_t* const words = p.fwd.lists.bits + (int64_t(mask) * kTileSide + first + lane) * kWords;
    uint32_t some = 0, all = ~0u;
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) {
      some |= words[i];
      all &= words[i];
    }
    const uint32_t seeing_some = __ballot_sync(~0u, some != 0), seeing_all = __ballot_sync(~0u, all == ~0u);
    CUTE_UNROLL
    for (int half = 0; half < 32 / kStripRows; ++half) {
      constexpr uint32_t kQueries = (1u << kStripRows) - 1;
      const int strip = first / kStripRows + half;
      bits.some |= ((seeing_some >> half * kStripRows & kQueries) != 0) << strip;
      bits.all |= ((seeing_all >> half * kStripRows & kQueries) == kQueries) << strip;
    }
  }
  if (lane == 0) p.strips[mask] = bits;
}

// Whether this thread acts for its role, which for strips is a warp.
template <KernelConfig C>
CUTE_DEVICE bool leads() {
  return !kTakesStrips<C> || threadIdx.x % 32 == 0;
}

// Waits for a step of a sparse call.
template <KernelConfig C>
CUTE_DEVICE const StepOf<C>& written_step(typename BackwardTraits<C>::Storage& storage, uint32_t count) {
  constexpr uint32_t kSteps = BackwardTraits<C>::kSteps;
  // After this wait the step is described.
  storage.written[count % kSteps].wait(count / kSteps % 2);
  compiler_fence();
  return storage.steps[count % kSteps];
}

// The strips of a list in its order, for a warp: each lane has one of 32 entries. The last step of these may lack strips.
template <KernelConfig C>
class StripWalk {
  static constexpr int kStrips = StepOf<C>::kStrips;

 public:
  CUTE_DEVICE StripWalk(const BwdParams& p, const WorkOf<C>& work) : p_(p), work_(work) { load(); }

  CUTE_DEVICE bool ended() const { return taken_ >= count_; }

  // How many entries the taken strips have come from, or passed over.
  CUTE_DEVICE int passed() const {
    return min(next_ - 32 + __popc(__ballot_sync(~0u, before_ < taken_)), work_.queries.entries());
  }

  // The strips of a step, in the first lanes.
  CUTE_DEVICE Strip take() {
    const int number = taken_ + threadIdx.x % 32;
    int from = 0;  // the lane that has the strip: the last one with no more strips before it
    CUTE_UNROLL
    for (int i = 0; i < kStrips; ++i) {
      const uint32_t lanes = __ballot_sync(~0u, before_ <= taken_ + i);
      if (i == threadIdx.x % 32) from = 31 - __clz(lanes);
    }
    const uint32_t bits = __shfl_sync(~0u, bits_, from);
    const int entry = walked(next_ - 32 + from), place = number - __shfl_sync(~0u, before_, from);
    const bool exists = number < count_;
    Strip strip{-1, {0}};
    if (exists) strip = ListedStrips(work_.queries.list, entry, bits & 0xff, bits >> 8).strip(place);
    taken_ += kStrips;
    if (ended()) load();
    return strip;
  }

 private:
  // The next 32 entries of which one has strips, if there are any.
  CUTE_DEVICE void load() {
    taken_ = count_ = 0;
    for (; count_ == 0 && next_ < work_.queries.entries(); next_ += 32) {
      const int lane = threadIdx.x % 32;
      const ListedStrips listed(p_.fwd.lists, p_.strips, work_.queries, walked(next_ + lane), work_.seq.q.length);
      bits_ = listed.some | listed.all << 8;
      const int own = __popc(listed.some);
      int sum = own;
      CUTE_UNROLL
      for (int step = 1; step < 32; step *= 2) {
        const int of_lane = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += of_lane;
      }
      before_ = sum - own;
      count_ = __shfl_sync(~0u, sum, 31);
    }
  }

  // The entry that is `n`th of the walk, or one past the end.
  CUTE_DEVICE int walked(int n) const {
    const int entries = work_.queries.entries(), turned = n + work_.queries.start;
    return n < entries && turned >= entries ? turned - entries : turned;
  }

  const BwdParams& p_;
  const WorkOf<C>& work_;
  int next_ = 0;  // of the walk, the entry after the 32
  uint32_t bits_ = 0;  // of the lane's entry: which strips see some, and from bit 8 on, which see all
  int before_ = 0;  // strips of the entries of the lanes before
  int taken_ = 0, count_ = 0;  // strips of the 32 entries
};

// Whether a work's steps are strips of any tiles of its list. A list of whole tiles has no queries to leave out.
template <KernelConfig C>
CUTE_DEVICE bool has_strips(const BwdParams& p, const WorkOf<C>& work) {
  if (C.rich() || p.strips == nullptr) return false;
  const KeyTile& tile = work.tile;
  const int head = tile.head * (p.fwd.heads / p.fwd.heads_k);
  return first_entry(p.fwd.lists, tile.batch, head, tile.index)->code != TileCode::kWhole;
}

// Empties the list of a work whose entries have no strips.
template <KernelConfig C>
CUTE_DEVICE void drop_without_strips(const BwdParams& p, WorkOf<C>& work) {
  if (!has_strips<C>(p, work)) return;
  const bool none = StripWalk<C>(p, work).ended();
  if (none && leads<C>()) work.queries.end = work.queries.begin;
  // After this barrier the warp has read the list.
  __syncwarp();
}

}  // namespace flash_cute::sm90
