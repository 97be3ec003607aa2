// The keys and values of a CTA's parts, on their way to shared memory without a pause between one part and the next.
#pragma once

#include "kernels/sm80/decode_traits.h"

namespace flash_cute::sm80 {

// Finds grains among those of all sequences. A warp searches for itself, 32 sequences at a time.
class GrainSearch {
 public:
  struct Place {
    int b, first;  // the sequence, and its first grain
  };

  CUTE_DEVICE GrainSearch(const DecodeProblem& p, int block_m, int block_n)
      : p_(p), block_m_(block_m), block_n_(block_n) {}

  // The sequence that has a grain; if none has, what is behind all of them: the batch, and how many grains there are.
  CUTE_DEVICE Place find(int grain) {
    const int batch = p_.fwd.batch;
    int before = 0;
    for (int first = 0; first < batch; first += kLanes) {
      count(first);
      const unsigned behind = __ballot_sync(0xffffffff, before + up_to_ > grain);
      if (behind != 0) {
        const int found = __ffs(behind) - 1;
        return {first + found, before + __shfl_sync(0xffffffff, up_to_ - own_, found)};
      }
      before += __shfl_sync(0xffffffff, up_to_, kLanes - 1);
    }
    return {batch, before};
  }

  // Grains of a unit of the first sequence, once grains were counted.
  CUTE_DEVICE int of_first_unit() const { return of_first_unit_; }

 private:
  static constexpr int kLanes = 32;

  // Grains of the sequences from `first` on, a lane each.
  CUTE_DEVICE void count(int first) {
    if (first == counted_) return;
    counted_ = first;
    const int lane = threadIdx.x % kLanes, b = first + lane;
    int of_unit = 0;
    own_ = 0;
    if (b < p_.fwd.batch) {
      const Grains grains(p_, cached_seq(p_, b), block_m_, block_n_);
      of_unit = grains.of_unit;
      own_ = grains.all;
    }
    if (first == 0) of_first_unit_ = __shfl_sync(0xffffffff, of_unit, 0);
    up_to_ = own_;
    CUTE_UNROLL
    for (int apart = 1; apart < kLanes; apart *= 2) {
      const int other = __shfl_up_sync(0xffffffff, up_to_, apart);
      if (lane >= apart) up_to_ += other;
    }
  }

  const DecodeProblem& p_;
  int block_m_, block_n_;
  int counted_ = -1;
  int own_ = 0, up_to_ = 0;
  int of_first_unit_ = 1;
};

// The parts that this CTA takes, one after the other.
template <KernelConfig C>
class Parts {
 public:
  CUTE_DEVICE explicit Parts(const DecodeProblem& p) : p_(p), grain_(INT32_MAX) {
    GrainSearch search(p, C.block_m, C.block_n);
    CUTE_NO_UNROLL
    for (int pass = 0; pass < 2; ++pass) {  // how many grains there are, then which are this CTA's
      place_ = search.find(grain_);
      if (pass == 1) break;
      shares_ = Shares::of(p, place_.first, search.of_first_unit());
      grain_ = static_cast<int>(blockIdx.x) * shares_.size;
    }
    end_ = grain_ + shares_.size;
  }

  // The next part, or one without grains.
  CUTE_DEVICE FedPart next() {
    while (grain_ < end_ && place_.b < p_.fwd.batch) {
      const SeqInfo seq = cached_seq(p_, place_.b);
      const Grains grains(p_, seq, C.block_m, C.block_n);
      if (grain_ < place_.first + grains.all) {
        const Part part = part_from(seq, place_.b, grains, shares_, place_.first, grain_, end_, C.block_m, blockIdx.x);
        grain_ += part.grains;
        return seen_of(part);
      }
      place_ = {place_.b + 1, place_.first + grains.all};
    }
    return {.part = {.seq = {SeqSpan{}, SeqSpan{}}, .grains = 0}};
  }

 private:
  // A part's blocks less those without any key that its queries see; if that leaves none, one that they do not see.
  CUTE_DEVICE FedPart seen_of(Part part) const {
    const RowSpan queries = queries_of(p_, part, C.block_m);
    const RowSpan keys = visible_keys(part.seq, p_.fwd.band, queries.first, queries.last - queries.first);
    const int first = max(part.first, keys.first / C.block_n), last = min(part.last, ceil_div(keys.last, C.block_n));
    part.last = first < last ? last : part.first + 1;
    part.first = first < last ? first : part.first;
    return {part, keys};
  }

  const DecodeProblem& p_;
  Shares shares_;
  GrainSearch::Place place_;
  int grain_, end_;
};

// Loads a team's tiles of all parts, one after the other, as they are described in `parts`, a ring.
template <KernelConfig C>
class KeyFeed {
  using T = DecodeTraits<C>;

 public:
  CUTE_DEVICE KeyFeed(const DecodeProblem& p, typename T::Storage& storage, int team, int thread)
      : copy_(p, C.block_n, storage.ring[0][team].k, storage.ring[0][team].v, thread),
        parts_(storage.parts),
        first_key_(team * T::kKeys) {}

  // Starts the copy of the next tile, if there is one, to a stage.
  CUTE_DEVICE void load(int stage) {
    if (left_ == 0) begin_part();
    if (left_ > 0) {
      copy_.load(stage * T::kStageBytes);
      --left_;
    }
    cp_async_fence();
  }

 private:
  CUTE_DEVICE void begin_part() {
    const auto& [part, keys] = parts_[next_];
    if (part.grains == 0) return;
    left_ = part.last - part.first;
    const int row = static_cast<int>(part.seq.k.offset);  // of key 0
    copy_.begin(part.b, part.head_k, {row + keys.first, row + keys.last}, row + part.first * C.block_n + first_key_);
    next_ = next_ == T::kDescribed - 1 ? 0 : next_ + 1;
  }

  typename T::Copy copy_;
  const FedPart* const parts_;
  const int first_key_;  // of the team in a block
  int left_ = 0;  // tiles of the part that they come from
  int next_ = 0;
};

}  // namespace flash_cute::sm80
