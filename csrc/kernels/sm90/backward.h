// Attention backward for Hopper: one CTA owns a tile of keys of one kv head and walks over the query tiles of every query
// head that reads it. One thread loads tiles by TMA; warpgroups compute 64 keys each by wgmma. dK and dV stay in registers
// from start to end, without atomics also for grouped queries; dQ is summed over CTAs in fp32 global memory, by bulk
// reductions out of shared memory. Scores are computed transposed, keys by queries: P and dS are then in the registers
// that the products for dV and dK take them from, and dS alone passes through shared memory, for dQ.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "core/registry.h"
#include "kernels/common/backward_passes.h"
#include "kernels/common/backward_scores.h"
#include "kernels/common/backward_tiles.h"
#include "kernels/launch.h"
#include "kernels/passes/gaps.h"
#include "kernels/passes/sink.h"
#include "kernels/sm90/ring.h"
#include "kernels/sm90/tensor_map.h"
#include "kernels/sm90/wgmma.h"

namespace flash_cute::sm90 {

struct BackwardParams {
  BwdProblem p;
  RaggedMap q, k, v, dout, dk, dv;
};

// Where this thread's elements are in a tile of scores, of which each warpgroup has 64 keys.
struct GroupPlace {
  int key, query;  // of the first element

  CUTE_DEVICE explicit GroupPlace(int thread) : key(thread / 32 * 16 + thread % 32 / 4), query(thread % 4 * 2) {}

  // Row r and column c of rows_of(), counted from the first.
  CUTE_HOST_DEVICE static constexpr int down(int r) { return 8 * r; }
  CUTE_HOST_DEVICE static constexpr int across(int c) { return column_offset(c); }
};

template <KernelConfig C>
struct BackwardTraits {
  using Element = ElementOf<C.dtype>;
  static constexpr int kGroups = C.warps / 4;  // warpgroups that compute
  using LayoutK = RowsLayout<Element, C.block_n, C.head_dim>;  // (key,dim)
  using LayoutV = RowsLayout<Element, C.block_n, C.head_dim_v>;  // (key,dim)
  using LayoutKt = ColumnsLayout<Element, C.block_n, C.head_dim>;  // (dim,key)
  using LayoutQ = RowsLayout<Element, C.block_m, C.head_dim>;  // (query,dim)
  using LayoutQt = ColumnsLayout<Element, C.block_m, C.head_dim>;  // (dim,query)
  using LayoutDout = RowsLayout<Element, C.block_m, C.head_dim_v>;  // (query,dim)
  using LayoutDoutT = ColumnsLayout<Element, C.block_m, C.head_dim_v>;  // (dim,query)
  using LayoutDs = RowsLayout<Element, C.block_n, C.block_m>;  // (key,query)
  using LayoutDsT = ColumnsLayout<Element, C.block_n, C.block_m>;  // (query,key)

  using Down = Layout<Shape<Int<kGroups>, _1, _1>>;  // warpgroups along the rows of a result
  using Across = Layout<Shape<_1, Int<kGroups>, _1>>;  // along its columns
  template <int kDims>  // S^T = K Q^T and dP^T = V dO^T
  using MmaScores = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<Int<C.block_n>, Int<C.block_m>, Int<kDims>>>(), Down{}));
  template <int kDims>  // dK = dS^T Q and dV = P^T dO
  using MmaKeys = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<Int<C.block_n>, Int<kDims>, Int<C.block_m>>, GMMA::Major::K,
                           GMMA::Major::MN>(),
      Down{}));
  using MmaQ = decltype(make_tiled_mma(  // dQ = dS K
      GMMA::ss_op_selector<Element, Element, float, Shape<Int<C.block_m>, Int<C.head_dim / kGroups>, Int<C.block_n>>,
                           GMMA::Major::MN, GMMA::Major::MN>(),
      Across{}));
  static constexpr int kDqSums = C.block_m * C.head_dim / kGroups;  // of a tile's dQ, those of a warpgroup
  static constexpr uint32_t kBytesQ = C.block_m * (C.head_dim * sizeof(Element) + sizeof(float));
  static constexpr uint32_t kBytesDout = C.block_m * (C.head_dim_v * sizeof(Element) + sizeof(float));
  static constexpr uint32_t kBytesKV = C.block_n * (C.head_dim + C.head_dim_v) * sizeof(Element);
  // Named barriers: of all warpgroups, and of the threads of each.
  static constexpr int kAllGroupsBarrier = 1, kGroupBarrier = 2;

  struct Storage {
    alignas(1024) Element k[C.block_n * C.head_dim];  // dK on the way out
    alignas(1024) Element v[C.block_n * C.head_dim_v];  // dV on the way out
    alignas(1024) Element q[C.stages][C.block_m * C.head_dim];
    alignas(1024) Element dout[C.stages][C.block_m * C.head_dim_v];
    alignas(1024) Element ds[2][C.block_n * C.block_m];
    alignas(1024) float dq[kGroups][kDqSums];
    alignas(128) float lse_log2[C.stages][C.block_m];
    alignas(128) float row_dot[C.stages][C.block_m];
    Ring<C.stages> ring_q, ring_dout;
    cutlass::arch::ClusterTransactionBarrier kv_full;
  };
  static_assert(C.block_n == 64 * kGroups && (kGroups == 2 || kGroups == 3), "a warpgroup has 64 keys");
  static_assert(sizeof(Storage) <= C.smem_bytes(), "KernelConfig::smem_bytes() must agree");
};

// The sums of dQ that a warpgroup adds, in the order of its accumulators: four numbers of a thread lie together, then come
// those of the next thread.
template <KernelConfig C>
CUTE_DEVICE float* dq_sums(const BwdProblem& p, int64_t padded_row, int group) {
  return p.dq_accum + padded_row * C.head_dim + group * BackwardTraits<C>::kDqSums;
}

// One thread that loads K and V of the tile, and Q, dO and the row statistics of each step.
template <KernelConfig C>
CUTE_DEVICE void produce(const BackwardParams& params, typename BackwardTraits<C>::Storage& storage,
                         const KeyTile& tile, const SeqInfo& seq, const TileRange& range) {
  using T = BackwardTraits<C>;
  const BwdProblem& p = params.p;
  const int group = p.fwd.heads / p.fwd.heads_k;
  if (range.empty()) return;
  auto* const kv_full = reinterpret_cast<uint64_t*>(&storage.kv_full);
  storage.kv_full.arrive_and_expect_tx(T::kBytesKV);
  params.k.template load<C.block_n, C.head_dim>(storage.k, kv_full, TMA::CacheHintSm90::EVICT_FIRST, seq.k, tile.row,
                                                tile.head, tile.batch);
  params.v.template load<C.block_n, C.head_dim_v>(storage.v, kv_full, TMA::CacheHintSm90::EVICT_FIRST, seq.k, tile.row,
                                                  tile.head, tile.batch);
  Cursor<C.stages> at;
  for (QueryStep step{0, range.end - 1}; step.head < group; step = step.next(range), at.advance()) {
    const int head = tile.head * group + step.head, row = step.m * C.block_m;
    const int64_t padded_row = first_padded_row(p, C.block_m, tile.batch, head, seq.q.offset) + row;
    auto load_statistic = [&](float* to, const Statistics& from, uint64_t* barrier) {
      SM90_BULK_COPY_G2S::copy(from.ptr + padded_row, barrier, to, C.block_m * sizeof(float));
    };
    storage.ring_q.wait_empty(at);
    uint64_t* const q_full = storage.ring_q.expect(at, T::kBytesQ);
    params.q.template load<C.block_m, C.head_dim>(storage.q[at.stage()], q_full, TMA::CacheHintSm90::EVICT_LAST, seq.q,
                                                  row, head, tile.batch);
    load_statistic(storage.lse_log2[at.stage()], p.lse_log2, q_full);
    storage.ring_dout.wait_empty(at);
    uint64_t* const dout_full = storage.ring_dout.expect(at, T::kBytesDout);
    params.dout.template load<C.block_m, C.head_dim_v>(storage.dout[at.stage()], dout_full,
                                                       TMA::CacheHintSm90::EVICT_LAST, seq.q, row, head, tile.batch);
    load_statistic(storage.row_dot[at.stage()], p.row_dot, dout_full);
  }
}

// The sums of dQ that one thread of a warpgroup sends off, and the order of key tiles in which they are added where it has
// to be the same every time: ascending. A CTA waits for CTAs of smaller index alone, which were launched before it.
class DqSender {
 public:
  // Adds `count` floats to global memory, in the background. Where there is a `turn`, the key tiles before must all have
  // had it.
  CUTE_DEVICE void send(float* to, const float* from, int count, int* turn, int tiles_before) {
    if (turn != nullptr) {
      pass_on();
      turn_ = turn;
      int done = 0;
      while (done < tiles_before) {
        asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(done) : "l"(turn) : "memory");
      }
    }
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(cast_smem_ptr_to_uint(from)), "r"(count * int(sizeof(float)))
                 : "memory");
    tma_store_arrive();
  }

  // Lets the next key tile have the turn, once all that was sent is in global memory.
  CUTE_DEVICE void pass_on() {
    if (turn_ == nullptr) return;
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turn_) : "memory");
    turn_ = nullptr;
  }

 private:
  int* turn_ = nullptr;
};

// Rounds a gradient of a warpgroup (MMA,1,1), keys by dims, and sends it off through shared memory.
template <int kRows, int kCols, class Layout, class Element, class Mma, class Gradient>
CUTE_DEVICE void store_gradient(const RaggedMap& map, Element* shared, const Mma& mma, const Gradient& gradient,
                                const KeyTile& tile, const SeqSpan& span, int thread, int barrier) {
  const int group = thread / 128, row = tile.row + group * 64;
  auto copy_out = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, mma);
  auto thread_out = copy_out.get_thread_slice(thread);
  Tensor out = make_tensor(make_smem_ptr(shared), Layout{});  // (key,dim)
  cute::copy(copy_out, thread_out.retile_S(converted<Element>(gradient)), thread_out.partition_D(out));
  tma_store_fence();
  // After this barrier the warpgroup's rows are in shared memory, for the TMA to see.
  cutlass::arch::NamedBarrier::sync(128, barrier + group);
  if (thread % 128 != 0 || row >= span.length) return;
  map.store<kRows, kCols>(shared + group * 64 * atom_columns(kCols), span, row, tile.head, tile.batch);
  tma_store_arrive();
}

// A warpgroup that computes the gradients of 64 keys.
template <KernelConfig C>
CUTE_DEVICE void consume(const BackwardParams& params, typename BackwardTraits<C>::Storage& storage,
                         const KeyTile& tile, const SeqInfo& seq, const TileRange& range) {
  using T = BackwardTraits<C>;
  using Element = typename T::Element;
  const BwdProblem& p = params.p;
  const int thread = threadIdx.x - 128, group = cutlass::canonical_warp_group_idx() - 1;
  const int heads = p.fwd.heads / p.fwd.heads_k;

  typename T::template MmaScores<C.head_dim> mma_s;
  typename T::template MmaScores<C.head_dim_v> mma_dp;
  typename T::template MmaKeys<C.head_dim> mma_dk;
  typename T::template MmaKeys<C.head_dim_v> mma_dv;
  typename T::MmaQ mma_dq;
  auto shared = [](Element* at, auto layout) { return make_tensor(make_smem_ptr(at), layout); };
  auto operand_a = [&](const auto& mma, const auto& tensor) {  // (MMA,1,MMA_K), of the warpgroup
    return mma.get_slice(group * 128).partition_fragment_A(tensor);
  };
  auto operand_b = [&](const auto& mma, const auto& tensor) {  // (MMA,1,MMA_K), of the warpgroup
    return mma.get_slice(group * 128).partition_fragment_B(tensor);
  };
  Tensor tSrK = operand_a(mma_s, shared(storage.k, typename T::LayoutK{}));
  Tensor tPrV = operand_a(mma_dp, shared(storage.v, typename T::LayoutV{}));
  Tensor tQrKt = operand_b(mma_dq, shared(storage.k, typename T::LayoutKt{}));
  Tensor tSrS = partition_fragment_C(mma_s, Shape<Int<C.block_n>, Int<C.block_m>>{});  // (MMA,1,1)
  Tensor tSrdP = partition_fragment_C(mma_dp, Shape<Int<C.block_n>, Int<C.block_m>>{});  // (MMA,1,1)
  Tensor tKrdK = partition_fragment_C(mma_dk, Shape<Int<C.block_n>, Int<C.head_dim>>{});  // (MMA,1,1)
  Tensor tVrdV = partition_fragment_C(mma_dv, Shape<Int<C.block_n>, Int<C.head_dim_v>>{});  // (MMA,1,1)
  Tensor tQrdQ = partition_fragment_C(mma_dq, Shape<Int<C.block_m>, Int<C.head_dim>>{});  // (MMA,MMA_M,1)
  clear(tKrdK);
  clear(tVrdV);
  auto copy_ds = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, mma_s);
  auto thread_ds = copy_ds.get_thread_slice(thread);
  const ScoreGradients<C, GroupPlace> gradients(p.fwd, seq, tile.batch, tile.row, GroupPlace(thread));
  const bool sends = thread % 128 == 0;
  DqSender sender;

  if (!range.empty()) storage.kv_full.wait(0);
  Cursor<C.stages> at;
  for (QueryStep step{range.empty() ? heads : 0, range.end - 1}; step.head < heads;
       step = step.next(range), at.advance()) {
    const int head = tile.head * heads + step.head, stage = at.stage();
    storage.ring_q.wait(at);
    start_product<GMMA::ScaleOut::Zero>(mma_s, tSrK, operand_b(mma_s, shared(storage.q[stage], typename T::LayoutQ{})),
                                        tSrS);
    storage.ring_dout.wait(at);
    start_product<GMMA::ScaleOut::Zero>(
        mma_dp, tPrV, operand_b(mma_dp, shared(storage.dout[stage], typename T::LayoutDout{})), tSrdP);
    wait_products<0>(tSrS);
    warpgroup_fence_operand(tSrdP);
    gradients(rows_of(tSrS), rows_of(tSrdP), storage.lse_log2[stage], storage.row_dot[stage], head, step.m * C.block_m,
              range.full(step.m));
    Tensor tSrP = converted<Element>(tSrS);  // (MMA,1,1)
    Tensor tSrdS = converted<Element>(tSrdP);  // (MMA,1,1)
    start_product<GMMA::ScaleOut::One>(mma_dv, as_register_operand(tSrP),
                                       operand_b(mma_dv, shared(storage.dout[stage], typename T::LayoutDoutT{})),
                                       tVrdV);
    Element* const ds = storage.ds[at.count % 2];
    cute::copy(copy_ds, thread_ds.retile_S(tSrdS), thread_ds.partition_D(shared(ds, typename T::LayoutDs{})));
    cutlass::arch::fence_view_async_shared();
    // After this barrier dS of all warpgroups is in shared memory, and nobody still reads that of two steps before.
    cutlass::arch::NamedBarrier::sync(128 * T::kGroups, T::kAllGroupsBarrier);
    start_product<GMMA::ScaleOut::Zero>(mma_dq, operand_a(mma_dq, shared(ds, typename T::LayoutDsT{})), tQrKt, tQrdQ);
    start_product<GMMA::ScaleOut::One>(mma_dk, as_register_operand(tSrdS),
                                       operand_b(mma_dk, shared(storage.q[stage], typename T::LayoutQt{})), tKrdK);
    wait_products<2>(tVrdV);
    storage.ring_dout.release(at);
    wait_products<1>(tQrdQ);
    // After this barrier the warpgroup's dQ of the step before has left shared memory.
    if (sends) tma_store_wait<0>();
    cutlass::arch::NamedBarrier::sync(128, T::kGroupBarrier + group);
    float* const dq = storage.dq[group];
    CUTE_UNROLL
    for (int i = 0; i < size(tQrdQ); i += 4) {
      *reinterpret_cast<float4*>(dq + i * 128 + thread % 128 * 4) = *reinterpret_cast<const float4*>(&tQrdQ(i));
    }
    cutlass::arch::fence_view_async_shared();
    // After this barrier the warpgroup's dQ is in shared memory, for the bulk copy to see.
    cutlass::arch::NamedBarrier::sync(128, T::kGroupBarrier + group);
    if (sends) {
      const int64_t padded_row = first_padded_row(p, C.block_m, tile.batch, head, seq.q.offset) + step.m * C.block_m;
      int* const turn = p.deterministic ? p.turns + padded_row / C.block_m * C.warps + group : nullptr;
      const int first = key_tiles(seq, p.fwd.band, step.m * C.block_m, C.block_m, C.block_n).begin;
      sender.send(dq_sums<C>(p, padded_row, group), dq, T::kDqSums, turn, tile.index - first);
    }
    wait_products<0>(tKrdK);
    storage.ring_q.release(at);
  }
  if (sends) {
    sender.pass_on();
    tma_store_wait<0>();
  }

  CUTE_UNROLL
  for (int i = 0; i < size(tKrdK); ++i) tKrdK(i) *= p.fwd.softmax_scale;
  // After this barrier nobody still reads K and V.
  cutlass::arch::NamedBarrier::sync(128 * T::kGroups, T::kAllGroupsBarrier);
  store_gradient<C.block_n, C.head_dim, typename T::LayoutK>(params.dk, storage.k, mma_dk, tKrdK, tile, seq.k, thread,
                                                             T::kGroupBarrier);
  store_gradient<C.block_n, C.head_dim_v, typename T::LayoutV>(params.dv, storage.v, mma_dv, tVrdV, tile, seq.k, thread,
                                                               T::kGroupBarrier);
  if (sends) tma_store_wait<0>();
}

template <KernelConfig C>
__global__ void __launch_bounds__(C.threads(), 1) backward(const __grid_constant__ BackwardParams params) {
  using T = BackwardTraits<C>;
  extern __shared__ __align__(1024) char smem[];
  auto& storage = *reinterpret_cast<typename T::Storage*>(smem);
  const BwdProblem& p = params.p;
  const KeyTile tile(p.fwd, C.block_n, p.deterministic);
  const SeqInfo seq(p.fwd, tile.batch);
  if (tile.row >= seq.k.length) return;
  const TileRange range = query_tiles(seq, p.fwd.band, tile.row, C.block_n, C.block_m);
  if (threadIdx.x == 0) {
    storage.ring_q.init(C.warps);
    storage.ring_dout.init(C.warps);
    storage.kv_full.init(1);
    cutlass::arch::fence_barrier_init();
  }
  // After this barrier the rings are ready.
  __syncthreads();
  if (cutlass::canonical_warp_group_idx() == 0) {
    cutlass::arch::warpgroup_reg_dealloc<T::kGroups == 3 ? 32 : 24>();
    if (cutlass::canonical_warp_idx_sync() == 0 && elect_one_sync()) produce<C>(params, storage, tile, seq, range);
  } else {
    cutlass::arch::warpgroup_reg_alloc<T::kGroups == 3 ? 160 : 240>();
    consume<C>(params, storage, tile, seq, range);
  }
}

// dQ = softmax_scale * sums, rounded.
template <KernelConfig C>
__global__ void __launch_bounds__(32 * C.warps) backward_finish(const __grid_constant__ BwdProblem p) {
  using T = BackwardTraits<C>;
  using Element = typename T::Element;
  const PassTile<C> tile(p);
  if (tile.row >= tile.span.length) return;
  const int thread = threadIdx.x, group = thread / 128;
  typename T::MmaQ mma;
  Tensor tQrdQ = partition_fragment_C(mma, Shape<Int<C.block_m>, Int<C.head_dim>>{});  // (MMA,MMA_M,1)
  const float* const sums = dq_sums<C>(p, tile.padded_row, group) + thread % 128 * 4;
  CUTE_UNROLL
  for (int i = 0; i < size(tQrdQ); i += 4) {
    *reinterpret_cast<float4*>(&tQrdQ(i)) = *reinterpret_cast<const float4*>(sums + i * 128);
  }
  Tensor at = mma.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<C.block_m>, Int<C.head_dim>>{}));
  auto* const out = static_cast<Element*>(p.dq.ptr) + tile.batch * p.dq.batch + tile.head * p.dq.head +
                    (tile.span.offset + tile.row) * p.dq.row;
  CUTE_UNROLL
  for (int i = 0; i < size(tQrdQ); i += 2) {
    const auto [row, col] = at(i);
    if (tile.row + row >= tile.span.length || col >= p.fwd.head_dim) continue;
    auto pair = make_tensor<float>(Shape<_2>{});
    pair(0) = tQrdQ(i) * p.fwd.softmax_scale;
    pair(1) = tQrdQ(i + 1) * p.fwd.softmax_scale;
    *reinterpret_cast<uint32_t*>(out + row * p.dq.row + col) =
        *reinterpret_cast<const uint32_t*>(converted<Element>(pair).data());
  }
}

}  // namespace flash_cute::sm90

namespace flash_cute {

template <KernelConfig C>
cudaError_t launch(const Problem<C.op>& p, cudaStream_t stream) {
  const FwdProblem& f = p.fwd;
  const int64_t query_tiles = int64_t(cute::ceil_div(f.seqlen_q, C.block_m)) * f.heads * f.batch;
  const int64_t key_tiles = int64_t(cute::ceil_div(f.seqlen_k, C.block_n)) * f.heads_k * f.batch;
  if (std::max(query_tiles, key_tiles) > kMaxCtas) return cudaErrorInvalidConfiguration;
  if (cudaError_t e = fill_gaps(p, stream)) return e;
  sm90::BackwardParams params;
  params.p = p;
  const int64_t total_q = f.dense() ? -1 : f.total_q, total_k = f.dense() ? -1 : f.total_k;
  auto map_queries = [&](sm90::RaggedMap& map, const Matrices& m, int dim, int cols) {
    return sm90::make_ragged_map(map, m, dim, f.seqlen_q, total_q, f.heads, f.batch, C.block_m, cols);
  };
  auto map_keys = [&](sm90::RaggedMap& map, const Matrices& m, int dim, int rows, int cols) {
    return sm90::make_ragged_map(map, m, dim, f.seqlen_k, total_k, f.heads_k, f.batch, rows, cols);
  };
  if (cudaError_t e = map_queries(params.q, f.q, f.head_dim, C.head_dim)) return e;
  if (cudaError_t e = map_queries(params.dout, p.dout, f.head_dim_v, C.head_dim_v)) return e;
  if (cudaError_t e = map_keys(params.k, f.k, f.head_dim, C.block_n, C.head_dim)) return e;
  if (cudaError_t e = map_keys(params.v, f.v, f.head_dim_v, C.block_n, C.head_dim_v)) return e;
  if (cudaError_t e = map_keys(params.dk, p.dk, f.head_dim, 64, C.head_dim)) return e;
  if (cudaError_t e = map_keys(params.dv, p.dv, f.head_dim_v, 64, C.head_dim_v)) return e;
  if (cudaError_t e = launch_kernel<backward_prepare<C>>(query_tiles, 32 * C.warps, 0, stream, p)) return e;
  if (cudaError_t e = launch_kernel<sm90::backward<C>>(key_tiles, C.threads(), C.smem_bytes(), stream, params))
    return e;
  if (p.dsink != nullptr) {
    if (cudaError_t e = sum_sink_gradient(p, stream)) return e;
  }
  return launch_kernel<sm90::backward_finish<C>>(query_tiles, 32 * C.warps, 0, stream, p);
}

}  // namespace flash_cute
