// Attention of few queries over a key/value cache, for sm_80 and later: persistent CTAs share the keys of all sequences
// out among each other (flash decoding), and query heads of a group fill the rows of a tile, so that the cache is read
// once. Teams of warps work on different keys at their own pace, each with its own ring of tiles.
#pragma once

#include "core/counter.h"
#include "core/registry.h"
#include "kernels/common/forward_rules.h"
#include "kernels/common/mask.h"
#include "kernels/common/merge.h"
#include "kernels/common/overlap.h"
#include "kernels/common/shares.h"
#include "kernels/common/softmax.h"
#include "kernels/launch.h"
#include "kernels/passes/append.h"
#include "kernels/passes/gaps.h"
#include "kernels/sm80/cache_copy.h"
#include "kernels/sm80/mma.h"

namespace flash_cute::sm80 {

constexpr int kPadding = 8;  // numbers: rows of results start 8 banks apart, so that a warp writes without conflicts

template <KernelConfig C>
struct DecodeTraits {
  using Element = typename Mma16816<C.dtype>::Element;
  static constexpr int kRowWarps = C.block_m / 16, kTeams = C.teams(), kTeamThreads = 32 * kRowWarps;
  static constexpr int kKeys = C.block_n / kTeams;  // of a team's tile
  // Whether Q stays in registers, or is read again for each tile of keys, into two slots by turns.
  static constexpr bool kKeepsQ = kRowWarps == 1 && C.head_dim <= 128;
  static constexpr int kSteps = C.head_dim / 16, kSlots = kKeepsQ ? kSteps : 2;
  using Mma = RowsMma<C.dtype, C.block_m, kRowWarps>;
  using OperandQ = SharedOperand<Side::A, false, Element, C.block_m, C.head_dim, kRowWarps>;
  using OperandK = SharedOperand<Side::B, false, Element, kKeys, C.head_dim, 1>;
  using OperandV = SharedOperand<Side::B, true, Element, kKeys, C.head_dim_v, 1>;
  using Copy = CacheCopy<Element, kTeamThreads, kKeys, C.head_dim, C.head_dim_v>;
  struct Ring {
    alignas(128) Element k[C.stages][kTeams][kKeys * C.head_dim];
    alignas(128) Element v[C.stages][kTeams][kKeys * C.head_dim_v];
  };
  struct Results {  // of the teams
    float out[kTeams][C.block_m][C.head_dim_v + kPadding];
    float lse[kTeams][C.block_m];
    bool last;  // whether the part is the last of its unit to be done
  };
  struct Storage {
    alignas(128) Element q[C.block_m * C.head_dim];
    union {
      Ring ring;
      Results results;
    };
  };
  static_assert(C.warps % kRowWarps == 0 && C.block_n % (16 * kTeams) == 0);
  static_assert(C.stages >= 2);
  static_assert(sizeof(Storage) == C.smem_bytes(), "KernelConfig::smem_bytes() must agree");
};

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

 private:
  static constexpr int kLanes = 32;

  // Grains of the sequences from `first` on, a lane each.
  CUTE_DEVICE void count(int first) {
    if (first == counted_) return;
    counted_ = first;
    const int lane = threadIdx.x % kLanes, b = first + lane;
    own_ = b < p_.fwd.batch ? Grains(p_, cached_seq(p_, b), block_m_, block_n_).all : 0;
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
};

// The parts that this CTA takes, one after the other.
template <KernelConfig C, class F>
CUTE_DEVICE void each_part(const DecodeProblem& p, F f) {
  const int cta = static_cast<int>(blockIdx.x);
  GrainSearch search(p, C.block_m, C.block_n);
  GrainSearch::Place place{};
  Shares shares{};
  int grain = INT32_MAX;
  CUTE_NO_UNROLL
  for (int pass = 0; pass < 2; ++pass) {  // how many there are, then which are this CTA's
    place = search.find(grain);
    if (pass == 0) {
      shares = Shares::of(p, place.first, Grains(p, cached_seq(p, 0), C.block_m, C.block_n).of_unit);
      grain = cta * shares.size;
    }
  }
  // After this new keys have joined the cache, and queries are rotated.
  wait_for_kernel_before();
  const int end = grain + shares.size;
  while (grain < end && place.b < p.fwd.batch) {
    const SeqInfo seq = cached_seq(p, place.b);
    const Grains grains(p, seq, C.block_m, C.block_n);
    if (grain >= place.first + grains.all) {
      place = {place.b + 1, place.first + grains.all};
      continue;
    }
    const Part part = part_from(seq, place.b, grains, shares, place.first, grain, end, C.block_m, cta);
    f(part);
    grain += part.grains;
  }
}

// A row of a unit: one query and one of its heads.
struct Row {
  int query, head;

  CUTE_DEVICE Row(const DecodeProblem& p, const Part& part, int row)
      : query((part.row + row) / p.group()), head(part.head_k * p.group() + (part.row + row) % p.group()) {}
};

// Copies the unit's rows of Q.
template <KernelConfig C>
CUTE_DEVICE void load_queries(const DecodeProblem& p, const Part& part, typename DecodeTraits<C>::Element* shared) {
  using Element = typename DecodeTraits<C>::Element;
  const Matrices& q = p.fwd.q;
  constexpr int kAcross = C.head_dim / kVector;
  CUTE_NO_UNROLL
  for (int i = threadIdx.x; i < C.block_m * kAcross; i += C.threads()) {
    const int col = i % kAcross * kVector;
    const Row row(p, part, i / kAcross);
    const bool there = row.query < part.seq.q.length && col < p.fwd.head_dim;
    const Element* from = static_cast<const Element*>(q.ptr);
    if (there) from += part.b * q.batch + (part.seq.q.offset + row.query) * q.row + row.head * q.head + col;
    const auto to = shared + SharedLayout<C.block_m, C.head_dim>{}(i / kAcross, col);
    cp_async_16(cast_smem_ptr_to_uint(to), from, there ? 16 : 0);
  }
}

// Numbers that another CTA may have written, or that are in shared memory.
CUTE_DEVICE float load_written(const float* from) {
  float x;
  asm volatile("ld.relaxed.gpu.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
  return x;
}

CUTE_DEVICE cutlass::Array<float, 4> load_four_written(const float* from) {
  cutlass::Array<float, 4> x;
  asm volatile("ld.relaxed.gpu.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "l"(from)
               : "memory");
  return x;
}

// Merges parts of a unit, of block_m rows each: row i of part n is row slot(n) * block_m + i of `out`, `width` numbers a
// row, and of `lse`. The result of the unit is written to the tensors, that of a part to its slot.
template <KernelConfig C>
CUTE_DEVICE void merge_rows(const DecodeProblem& p, const Part& part, const UnitParts& parts, const float* out,
                            const float* lse, int width, bool to_result) {
  using Element = typename DecodeTraits<C>::Element;
  const FwdProblem& f = p.fwd;
  for (int i = threadIdx.x / 32; i < C.block_m; i += C.warps) {
    const Row row(p, part, i);
    if (row.query >= part.seq.q.length) return;
    const int64_t query = part.seq.q.offset + row.query;
    const int64_t slot_row = int64_t(part.all.slot(part.index)) * C.block_m + i;
    Element* result =
        static_cast<Element*>(f.out.ptr) + part.b * f.out.batch + query * f.out.row + row.head * f.out.head;
    float* result_lse = &f.lse.ptr[part.b * f.lse.batch + row.head * f.lse.head + query];
    auto place = [&](int n) { return int64_t(parts.slot(n)) * C.block_m + i; };
    const float total = merge_row<4>(
        parts.count, [&](int n) { return load_written(lse + place(n)); },
        [&](int n, int column) { return load_four_written(out + place(n) * width + column); }, f.head_dim_v,
        to_result ? sink_of(f.sink, row.head) : -INFINITY,
        [&](int column, const cutlass::Array<float, 4>& x) {
          if (to_result) {
            const auto rounded = cutlass::NumericArrayConverter<Element, float, 4>{}(x);
            *reinterpret_cast<uint2*>(result + column) = reinterpret_cast<const uint2&>(rounded);
          } else {
            *reinterpret_cast<float4*>(p.part_out + slot_row * C.head_dim_v + column) =
                reinterpret_cast<const float4&>(x);
          }
        });
    if (threadIdx.x % 32 == 0) *(to_result ? result_lse : p.part_lse + slot_row) = total;
  }
}

// Whether the part, which the whole CTA has written, is the last of its unit to be done.
CUTE_DEVICE bool arrives_last(const DecodeProblem& p, const UnitParts& parts, bool& shared) {
  __threadfence();
  // After this barrier all of the part is written, for every CTA to see.
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned* const arrived = p.arrived + parts.first;
    shared = atomicAdd(arrived, 1u) + 1 == unsigned(parts.count);
    if (shared) *arrived = 0;
    __threadfence();
  }
  // After this barrier all know, and the last one sees what the others wrote.
  __syncthreads();
  return shared;
}

// Writes the result of a part from those of the teams; for the whole CTA. The part of a unit that is done last merges
// all of them.
template <KernelConfig C>
CUTE_DEVICE void store_part(const DecodeProblem& p, const Part& part, typename DecodeTraits<C>::Results& results) {
  UnitParts parts{.even = false, .count = C.teams(), .first = 0};
  const float *out = results.out[0][0], *lse = results.lse[0];
  int width = C.head_dim_v + kPadding;
  bool to_result = part.all.count == 1;
  CUTE_NO_UNROLL
  while (true) {
    merge_rows<C>(p, part, parts, out, lse, width, to_result);
    if (to_result || !arrives_last(p, part.all, results.last)) return;
    parts = part.all;
    out = p.part_out;
    lse = p.part_lse;
    width = C.head_dim_v;
    to_result = true;
  }
}

// A team's attention over its tiles of a part's keys.
template <KernelConfig C>
CUTE_DEVICE void attend(const DecodeProblem& p, const Part& part, typename DecodeTraits<C>::Storage& storage) {
  using T = DecodeTraits<C>;
  using Element = typename T::Element;
  const FwdProblem& f = p.fwd;
  const SeqInfo& seq = part.seq;
  const int team = threadIdx.x / T::kTeamThreads, thread = threadIdx.x % T::kTeamThreads;
  auto team_sync = [&] {
    if constexpr (T::kRowWarps == 1) {
      __syncwarp();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(T::kTeamThreads) : "memory");
    }
  };

  // Queries of the unit, and the blocks of the part that they see.
  const int first_query = part.row / p.group();
  const int queries = min((part.row + C.block_m - 1) / p.group() + 1, seq.q.length) - first_query;
  const RowSpan keys = visible_keys(seq, f.band, first_query, queries);
  const int first = max(part.first, keys.first / C.block_n), last = min(part.last, ceil_div(keys.last, C.block_n));
  const TileRange tiles = key_tiles(seq, f.band, first_query, queries, T::kKeys);

  typename T::Copy copy(p, part.b, part.head_k, static_cast<int>(seq.k.offset), keys,
                        first * C.block_n + team * T::kKeys, C.block_n, storage.ring.k[0][team],
                        storage.ring.v[0][team], thread);
  auto load = [&](int n, int stage) {
    if (n < last) copy.load(stage * int(sizeof(storage.ring.k[0])), stage * int(sizeof(storage.ring.v[0])));
    cp_async_fence();
  };
  load_queries<C>(p, part, storage.q);
  cp_async_fence();
  CUTE_NO_UNROLL
  for (int stage = 0; stage < C.stages - 1; ++stage) load(first + stage, stage);

  typename T::Mma mma;
  const typename T::OperandQ q(storage.q, thread / 32);
  const typename T::OperandK k(storage.ring.k[0][team], 0);
  const typename T::OperandV v(storage.ring.v[0][team], 0);
  Tensor tOrO = partition_fragment_C(mma, Shape<Int<C.block_m>, Int<C.head_dim_v>>{});  // (MMA,MMA_M,MMA_DV)
  clear(tOrO);
  Tensor output = rows_and_columns(tOrO);  // (rows,dims)
  Tensor tScS = mma.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<C.block_m>, Int<T::kKeys>>{}));
  Tensor at = rows_and_columns(tScS);  // (rows,columns) -> (row, column) of the tile
  constexpr int kRows = decltype(size<0>(at))::value;
  const int first_column = get<1>(at(0, 0));
  OnlineSoftmax<kRows> softmax(rule_scale_log2(f.rules.softcap, f.softmax_scale, f.rules.alibi != nullptr));
  const BandMask mask(seq, f.band);
  int query[kRows];
  float slope[kRows];
  CUTE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const Row row(p, part, get<0>(at(r, 0)));
    query[r] = row.query;
    slope[r] = slope_of(f.rules, part.b, row.head);
  }

  // After this barrier Q is visible to all.
  cp_async_wait<C.stages - 1>();
  __syncthreads();
  Tensor rQ = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, Int<T::kSlots>>{});  // (MMA,MMA_M,slot)
  auto read_q = [&](int step) { q.load(&recast<uint32_t>(rQ)(0, 0, step % T::kSlots), step, 0); };
  CUTE_UNROLL
  for (int step = 0; T::kKeepsQ && step < T::kSteps; ++step) read_q(step);

  int stage = 0;
  CUTE_NO_UNROLL
  for (int n = first; n < last; ++n) {
    // After this the team's tile of block n is visible to all of it, and none of it still reads the one before.
    cp_async_wait<C.stages - 2>();
    team_sync();
    const int behind = stage == 0 ? C.stages - 1 : stage - 1;
    load(n + C.stages - 1, behind);

    Tensor tSrS = partition_fragment_C(mma, Shape<Int<C.block_m>, Int<T::kKeys>>{});  // (MMA,MMA_M,MMA_N)
    Tensor scores = rows_and_columns(tSrS);  // (rows,columns)
    clear(tSrS);
    const int tile = n * T::kTeams + team, column = tile * T::kKeys + first_column;
    if constexpr (!T::kKeepsQ) read_q(0);
    auto queries_of = [&](int step) {
      if (!T::kKeepsQ && step + 1 < T::kSteps) read_q(step + 1);
      return rQ(_, _, step % T::kSlots);
    };
    gemm_registers(mma, tSrS, queries_of, k.at(stage * int(sizeof(storage.ring.k[0]))));
    apply_rules<false>(
        scores, f.rules.softcap, f.softmax_scale, f.rules.alibi != nullptr, [&](int r) { return slope[r]; },
        [&](int r) { return float(query[r] + seq.shift() - column); });
    if (!tiles.full(tile)) mask.hide_from(scores, [&](int r) { return query[r]; }, column);
    softmax.raise(scores, output);
    Tensor rP = as_operand_a(tSrS);  // (MMA,MMA_M,MMA_N/2)
    auto weights = [&](int step) {
      softmax.weigh(scores, 4 * step, 4 * step + 4);
      return converted<Element>(rP(_, _, step));
    };
    gemm_registers(mma, tOrO, weights, v.at(stage * int(sizeof(storage.ring.v[0]))));
    stage = stage == C.stages - 1 ? 0 : stage + 1;
  }

  const auto lse = softmax.finish(output, -INFINITY, 1.f);
  // After this barrier nobody still reads or fills a ring, whose memory results take.
  cp_async_wait<0>();
  __syncthreads();
  CUTE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const int row = get<0>(at(r, 0));
    if (first_column == 0) storage.results.lse[team][row] = lse[r];
    CUTE_UNROLL
    for (int c = 0; c < size<1>(output); c += 2) {
      *reinterpret_cast<float2*>(&storage.results.out[team][row][first_column + column_offset(c)]) =
          make_float2(output(r, c), output(r, c + 1));
    }
  }
}

template <KernelConfig C>
__global__ void __launch_bounds__(C.threads(), C.ctas) decode(const __grid_constant__ DecodeProblem p) {
  extern __shared__ __align__(128) char smem[];
  auto& storage = *reinterpret_cast<typename DecodeTraits<C>::Storage*>(smem);
  each_part<C>(p, [&](const Part& part) {
    attend<C>(p, part, storage);
    // After this barrier the results of all teams are there.
    __syncthreads();
    store_part<C>(p, part, storage.results);
    // After this barrier nobody still reads them.
    __syncthreads();
  });
}

}  // namespace flash_cute::sm80

namespace flash_cute {

template <KernelConfig C>
cudaError_t launch(const Problem<C.op>& p, cudaStream_t stream) {
  if (cudaError_t e = fill_gaps(p.fwd, stream)) return e;
  DecodeProblem decode = p;
  if (p.arrived != nullptr) {
    if (cudaError_t e = cudaMemsetAsync(p.arrived, 0, p.slots * sizeof(*p.arrived), stream)) return e;
  } else if (p.slots > 0) {
    if (cudaError_t e = zeroed_counters(decode.arrived, p.ctas, stream)) return e;
  }
  if (p.added.total > 0) {
    if (cudaError_t e = append_keys(p, stream)) return e;
  }
  if (p.fwd.total_q == 0 || p.fwd.batch == 0) return cudaSuccess;
  return p.added.total > 0 ? launch_overlapping<sm80::decode<C>>(p.ctas, C.threads(), C.smem_bytes(), stream, decode)
                           : launch_kernel<sm80::decode<C>>(p.ctas, C.threads(), C.smem_bytes(), stream, decode);
}

}  // namespace flash_cute
