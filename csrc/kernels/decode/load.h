// K and V of a CTA's splits into shared memory, without a gap between one split and the next.
#pragma once

#include <algorithm>

#include "kernels/decode/traits.h"

namespace flash_cute::decode {

using namespace ampere;

// The splits of this CTA, computed by one warp.
template <KernelConfig C>
CUTE_DEVICE SplitsOf<C> splits_of_cta(const DecodeParams& p) {
  constexpr int kLanes = 32;
  const int batch = p.fwd.batch, cta = static_cast<int>(blockIdx.x), lane = threadIdx.x % kLanes;
  const int number = p.heads_k.div(cta);  // among its head's CTAs
  if (p.uniform.known) [[likely]] {
    const CtaChunks chunks = CtaChunks::planned(p);
    const int b = p.uniform.per_sequence.div(chunks.first_quantum(number));
    return SplitsOf<C>(p, chunks, cta, {b, b * p.uniform.per_sequence.value});
  }
  // Each lane counts the quanta of equally many sequences.
  const int each = ceil_div(batch, kLanes), first = lane * each;
  int own = 0, per_tile = 0;
  CUTE_NO_UNROLL
  for (int b = first; b < min(first + each, batch); ++b) {
    const Quanta quanta(p, cached_seq(p, b), C.block_m, C.block_n);
    own += quanta.per_head;
    if (b == 0) per_tile = quanta.per_tile;
  }
  int up_to = own;
  CUTE_UNROLL
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const int other = __shfl_up_sync(0xffffffff, up_to, distance);
    if (lane >= distance) up_to += other;
  }
  const int per_head = __shfl_sync(0xffffffff, up_to, kLanes - 1);
  const CtaChunks chunks = CtaChunks::of(p, per_head, __shfl_sync(0xffffffff, per_tile, 0));
  const unsigned lanes_past_start = __ballot_sync(0xffffffff, up_to > chunks.first_quantum(number));
  if (lanes_past_start == 0) return SplitsOf<C>(p, chunks, cta, {batch, per_head});
  const int found = __ffs(lanes_past_start) - 1;
  return SplitsOf<C>(p, chunks, cta, {found * each, __shfl_sync(0xffffffff, up_to - own, found)});
}

// A split without the blocks that none of its queries sees, but with at least one block.
template <KernelConfig C>
CUTE_DEVICE VisibleSplit visible_of(const DecodeParams& p, KvSplit split) {
  const RowSpan queries = queries_of(p, split, C.block_m);
  const RowSpan keys = visible_keys(split.seq, p.fwd.band, queries.first, queries.last - queries.first);
  const int first = max(split.first, keys.first / C.block_n), last = min(split.last, ceil_div(keys.last, C.block_n));
  split.last = first < last ? last : split.first + 1;
  split.first = first < last ? first : split.first;
  return {split, keys};
}

// The number of a CTA's first blocks to prefetch into L2, by measurement. For few blocks the copies are as early. CTAs
// start in order while the previous kernel ends; early ones would disturb its last reads.
template <KernelConfig C>
struct PrefetchDepth {
  static constexpr int kOfSome = 3, kEarly = C.ctas == 1 ? 2 : 1, kLate = 3 * kEarly;
  static constexpr int kMost = std::max(kOfSome, kLate);

  // The number of blocks to prefetch, of so many.
  CUTE_DEVICE static int of(const DecodeParams& p, int blocks) {
    constexpr int kFew = 6, kMany = 12;
    if (blocks < kFew) return 0;
    if (blocks < kMany) return kOfSome;
    return 2 * static_cast<int>(blockIdx.x) < p.resident_ctas ? kEarly : kLate;
  }
};

// Prefetches K and V of a CTA's first blocks, at most kMost, into L2. Neither they nor the page table need be final:
// late writes of the previous kernel go through L2, too, and prefetching a wrong page does no harm.
template <int kMost, KernelConfig C>
CUTE_DEVICE void prefetch_kv_l2(const DecodeParams& p, const VisibleSplit& fed, int blocks = kMost) {
  constexpr int kBytes = element_bytes(C.cache);
  constexpr int kLine = std::min(128 / kBytes, C.head_dim);  // elements of a cache line, or of a row
  constexpr int kAcross = C.head_dim / kLine;  // lines of a row
  constexpr int kLoads = cute::ceil_div(kMost * C.block_n * kAcross, C.threads());
  static_assert(C.head_dim == C.head_dim_v);
  const KvSplit& split = fed.split;
  if (blocks == 0) return;
  const int first = max(fed.keys.first, split.first * C.block_n);
  const int last = min(fed.keys.last, (split.first + blocks) * C.block_n);
  const Pages& pages = p.fwd.pages;
  auto key_of = [&](int i) { return first + static_cast<int>(threadIdx.x + i * C.threads()) / kAcross; };
  auto row_of = [&](int i) { return static_cast<int>(split.seq.k.offset) + key_of(i); };
  auto page_of = [&](int i) {
    if (key_of(i) >= last) return -1;
    if (pages.ids == nullptr) return split.b;
    // Reads from L2, bypassing L1, which might hold an old value.
    return __ldcg(pages.ids + split.b * pages.batch + p.page_size.div(row_of(i)));
  };
  int page[kLoads];
  CUTE_UNROLL
  for (int i = 0; i < kLoads; ++i) page[i] = page_of(i);
  const int col = static_cast<int>(threadIdx.x) % kAcross * kLine;
  CUTE_UNROLL
  for (int i = 0; i < kLoads; ++i) {
    if (page[i] < 0 || page[i] >= pages.count) continue;
    const int row = row_of(i), row_of_page = row - p.page_size.div(row) * p.page_size.value;
    auto expect = [&](const TensorView& m) {
      const auto* head = static_cast<const char*>(m.ptr) + split.head_k * m.head * kBytes;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(head + (page[i] * m.batch + row_of_page * m.row + col) * kBytes));
    };
    if (col < p.fwd.head_dim) expect(p.fwd.k);
    if (col < p.fwd.head_dim_v) expect(p.fwd.v);
  }
}

// Loads a team's tiles of all splits, in the order of the descriptions in `splits`.
template <KernelConfig C>
class KvLoader {
  using T = DecodeTraits<C>;

 public:
  CUTE_DEVICE KvLoader(const DecodeParams& p, typename T::Storage& storage, int team, int thread)
      : copy_(p, C.block_n, storage.kv[0][team], thread), splits_(storage.splits), first_key_(team * T::kKeys) {}

  // Starts the copy of the next tile, if any, to a stage.
  CUTE_DEVICE void load(int stage) {
    if (left_ == 0) begin_split();
    if (left_ == 0) return;
    copy_.load(stage * T::kStageBytes);
    --left_;
  }

 private:
  CUTE_DEVICE void begin_split() {
    const auto& [split, keys] = splits_[next_];
    if (split.quanta == 0) return;
    left_ = split.last - split.first;
    const int row = static_cast<int>(split.seq.k.offset);  // of key 0
    copy_.begin(split.b, split.head_k, {row + keys.first, row + keys.last}, row + split.first * C.block_n + first_key_);
    next_ = next_ == T::kDescribed - 1 ? 0 : next_ + 1;
  }

  typename T::Copy copy_;
  const VisibleSplit* const splits_;
  const int first_key_;  // of the team in a block
  int left_ = 0;  // tiles of the current split
  int next_ = 0;
};

}  // namespace flash_cute::decode
