// The epilogue of decode: results go to the output, or those of a split to the workspace.
#pragma once

#include "kernels/common/forward_rules.h"
#include "kernels/common/merge.h"
#include "kernels/decode/traits.h"

namespace flash_cute::decode {

using namespace ampere;

// A row of a work tile: one query and one of its heads.
struct Row {
  int query, head;

  CUTE_DEVICE Row(const DecodeParams& p, const KvSplit& split, int row)
      : query(p.group.div(split.row + row)),
        head(split.head_k * p.group.value + split.row + row - query * p.group.value) {}
};

// The destination of a row's results: the output tensors, or the split's slot in the workspace.
template <KernelConfig C>
class RowDestination {
 public:
  using Element = typename DecodeTraits<C>::Element;

  CUTE_DEVICE RowDestination(const DecodeParams& p, const KvSplit& split, int i, bool to_result) {
    const FwdProblem& f = p.fwd;
    const Row row(p, split, i);
    exists = row.query < split.seq.q.length;
    sink = to_result && exists ? sink_of(f.sink, row.head) : -INFINITY;
    if (to_result) {
      const int64_t query = split.seq.q.offset + row.query;
      result_ = static_cast<Element*>(f.out.ptr) + split.b * f.out.batch + query * f.out.row + row.head * f.out.head;
      lse = &f.lse.ptr[split.b * f.lse.batch + row.head * f.lse.head + query];
    } else {
      const int64_t slot_row = int64_t(split.all.slot(split.index)) * C.block_m + i;
      split_ = p.split_out + slot_row * C.head_dim_v;
      lse = p.split_lse + slot_row;
    }
  }

  // Calls store(to) with the destination, an Element* or a float*.
  template <class Store>
  CUTE_DEVICE void visit(Store store) const {
    if (result_ != nullptr) {
      store(result_);
    } else {
      store(split_);
    }
  }

  bool exists;
  float sink;  // -inf: none
  float* lse;

 private:
  Element* result_ = nullptr;
  float* split_ = nullptr;
};

// Rounds numbers to the stored type.
template <class To, int kCount>
CUTE_DEVICE void store(To* to, const cutlass::Array<float, kCount>& x) {
  using Together = cutlass::AlignedArray<To, kCount>;
  const auto rounded = cutlass::NumericArrayConverter<To, float, kCount>{}(x);
  *reinterpret_cast<Together*>(to) = reinterpret_cast<const Together&>(rounded);
}

// Combines the results of a CTA's teams for a split. Columns of all rows are spread over all threads. Each thread's
// first address is computed in the constructor, before the barrier at which most wait for the last team.
template <KernelConfig C>
class TeamMerge {
  static constexpr int kTogether = 2, kAcross = C.head_dim_v / kTogether;

 public:
  CUTE_DEVICE TeamMerge(const DecodeParams& p, const KvSplit& split)
      : p_(p), split_(split), count_(max(0, rows_of(p, split, C.block_m)) * kAcross), first_(place_of(threadIdx.x)) {}

  // The teams' results lie in their tiles of `stage`.
  template <class Storage>
  CUTE_DEVICE void operator()(Storage& storage, int stage) const {
    if (static_cast<int>(threadIdx.x) < count_) merge(storage, stage, threadIdx.x, first_);
    CUTE_NO_UNROLL
    for (int i = threadIdx.x + C.threads(); i < count_; i += C.threads()) merge(storage, stage, i, place_of(i));
  }

 private:
  CUTE_DEVICE RowDestination<C> place_of(int i) const { return {p_, split_, i / kAcross, split_.all.count == 1}; }

  template <class Storage>
  CUTE_DEVICE void merge(Storage& storage, int stage, int i, const RowDestination<C>& place) const {
    const int row = i / kAcross, column = i % kAcross * kTogether;
    const MergedRow<DecodeTraits<C>::kTeams> merged(storage.sums[row], place.sink);
    const auto outputs = merged.template outputs<kTogether>(
        [&](int team) { return storage.kv[stage][team].results() + row * C.head_dim_v + result_column(row, column); });
    if (column == 0) *place.lse = merged.lse();
    if (column < p_.fwd.head_dim_v) place.visit([&](auto* to) { store(to + column, outputs); });
  }

  const DecodeParams& p_;
  const KvSplit& split_;
  const int count_;  // of merge()'s items
  const RowDestination<C> first_;
};

// A thread's columns of an output (rows,dims): kNeighbours consecutive ones in each kDistance.
template <KernelConfig C>
struct OutputColumns {
  static constexpr int kNeighbours = DecodeTraits<C>::OfCache::kNeighbours, kDistance = 4 * kNeighbours;

  // The first one, of a thread whose first column of scores, of which it has two neighbours, is this one.
  CUTE_DEVICE static int first(int of_scores) { return of_scores / 2 * kNeighbours; }

  // From the first one to the c-th, the first of some neighbours.
  CUTE_HOST_DEVICE static constexpr int offset(int c) { return c / kNeighbours * kDistance; }

  // The neighbours from the c-th on.
  template <class Output>
  CUTE_DEVICE static auto at(const Output& output, int r, int c) {
    cutlass::AlignedArray<float, kNeighbours> x;
    CUTE_UNROLL
    for (int i = 0; i < kNeighbours; ++i) x[i] = output(r, c + i);
    return x;
  }
};

// With one team: normalizes its output (rows,dims) at coordinates `at` of scores and stores it directly.
template <KernelConfig C, class Output, class Softmax, class Coordinates>
CUTE_DEVICE void store_rows(const DecodeParams& p, const KvSplit& split, Output& output, Softmax& softmax,
                            const Coordinates& at) {
  using Columns = OutputColumns<C>;
  const int first_column = Columns::first(get<1>(at(0, 0)));
  CUTE_UNROLL
  for (int r = 0; r < size<0>(output); ++r) {
    const RowDestination<C> row(p, split, get<0>(at(r, 0)), split.all.count == 1);
    const auto total = softmax.finalize(r, row.sink, 1.f);
    softmax.normalize(output, r, total);
    if (!row.exists) continue;
    if (first_column == 0) *row.lse = total.lse;
    row.visit([&](auto* to) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(output); c += Columns::kNeighbours) {
        const int column = first_column + Columns::offset(c);
        if (column < p.fwd.head_dim_v) store(to + column, Columns::at(output, r, c));
      }
    });
  }
}

// Writes a team's unnormalized output (rows,dims) and row sums to shared memory, for the other teams.
template <KernelConfig C, class Storage, class Output, class Softmax, class Coordinates>
CUTE_DEVICE void share_rows(Storage& storage, int stage, int team, int rows, const Output& output, Softmax& softmax,
                            const Coordinates& at) {
  using Columns = OutputColumns<C>;
  float* const results = storage.kv[stage][team].results();
  const int first_column = Columns::first(get<1>(at(0, 0)));
  CUTE_UNROLL
  for (int r = 0; r < size<0>(output); ++r) {
    const RowSum sum = softmax.sum(r);
    const int row = get<0>(at(r, 0));
    if (row >= rows) continue;
    if (first_column == 0) storage.sums[row][team] = sum;
    // Columns a multiple of 32 apart keep that distance in shared memory.
    constexpr int kNeighbours = Columns::kNeighbours, kBases = 32 / Columns::kDistance;
    CUTE_UNROLL
    for (int base = 0; base < kBases; ++base) {
      float* const to = results + row * C.head_dim_v + result_column(row, first_column + Columns::kDistance * base);
      CUTE_UNROLL
      for (int c = kNeighbours * base; c < size<1>(output); c += kNeighbours * kBases) {
        const auto x = Columns::at(output, r, c);
        *reinterpret_cast<cutlass::AlignedArray<float, kNeighbours>*>(to + Columns::offset(c - kNeighbours * base)) = x;
      }
    }
  }
}

}  // namespace flash_cute::decode
