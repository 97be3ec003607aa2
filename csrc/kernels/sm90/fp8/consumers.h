// The consumer warpgroups of the forward of e4m3 inputs. Accumulators of fp8's wgmma hold 14 bits: with two levels
// every tile's sums of P V start at 0, and join sums in fp32.
#pragma once

#include "kernels/sm90/fp8/softmax.h"

namespace flash_cute::sm90::fp8 {

// A warp's rows of a work tile: scores to weights, and sums to results.
template <KernelConfig C>
struct WarpRows {
  using T = ForwardTraits<C>;

  const Fp8Params& params;
  const typename T::Work& work;
  RoundedSoftmax softmax;
  const float* key_factors;  // of scores of the sequence's keys; null: 1

  template <class Coordinates>
  CUTE_DEVICE WarpRows(const Fp8Params& params, const typename T::Work& work, const Coordinates& at)
      : params(params), work(work) {
    const Fp8Options& fp8 = params.p.fp8;
    key_factors = params.p.key_factors;
    if (key_factors != nullptr) {
      const int64_t sequence = params.p.dense_keys() ? work.tile.batch : 0;
      key_factors += (sequence * params.p.heads_k + work.head_k) * params.keys_of_values +
                     TransposedValues::first_key(params.p, work.seq.k, work.tile.batch);
    }
    const float head_scale = params.p.softmax_scale * (fp8.k.each ? 1.f : of_kv_head(fp8.k));
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = min(work.tile.row + get<0>(at(r, 0)), work.seq.q.length - 1);
      const Descale& q = fp8.q;
      const float row_descale =
          !q.each ? of_kv_head(q)
                  : q.ptr[work.tile.batch * q.batch + (work.seq.q.offset + row) * q.row + work.tile.head * q.head];
      softmax.scale_log2[r] = positive_scale_log2(head_scale * row_descale);
      softmax.row_max[r] = -INFINITY;
      softmax.row_sum[r] = 0.f;
    }
  }

  // Multiplies scores by what belongs to their keys; this thread's columns start at key `first`.
  template <class Scores>
  CUTE_DEVICE void scale_keys(Scores scores, int first) const {
    if (key_factors == nullptr) return;
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); c += 2) {
      const float2 factor = *reinterpret_cast<const float2*>(key_factors + first + column_offset(c));
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        scores(r, c) *= factor.x;
        scores(r, c + 1) *= factor.y;
      }
    }
  }

  // Scores (rows,columns) of tile n become weights. Full tiles and others share the code of the softmax.
  template <class Scores, class Coordinates>
  CUTE_DEVICE void step(Scores scores, const Coordinates& at, const KvTiles auto& tiles, int n, float (&factors)[2]) {
    scale_keys(scores, tiles.first_key(n) + get<1>(at(0, 0)));
    if (!tiles.full(n)) BandMask(work.seq, params.p.band).hide(scores, at, work.tile.row, tiles.first_key(n));
    softmax.step(scores, factors);
  }

  // Multiplies sums by v's descale, divides them by those of the weights, and stores them and the LSE. outputs(part):
  // (rows,columns), of which the last are the sums of weights.
  template <class Outputs, class Coordinates>
  CUTE_DEVICE void store(const Outputs& outputs, const Coordinates& at) {
    const FwdParams& p = params.p;
    const Descale& v = p.fp8.v;
    float damping[2], factor[2];  // of a row's sums
    uint16_t* to[2];  // null: the row does not exist
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      Tensor last = outputs(Int<T::kParts - 1>{});
      const auto total = softmax.finish(r, last(r, size<1>(last) - 1), sink_of(p.sink, work.tile.head));
      const int row = work.tile.row + get<0>(at(r, 0));
      const bool exists = row < work.seq.q.length;
      if (exists && get<1>(at(0, 0)) == 0) p.lse.ptr[first_of(p.lse, work.tile, work.seq) + row] = total.lse;
      damping[r] = total.damping;
      factor[r] = total.inverse * (v.each ? 1.f : of_kv_head(v));
      const int64_t first =
          work.tile.batch * p.out.batch + (work.seq.q.offset + row) * p.out.row + work.tile.head * p.out.head;
      to[r] = exists ? static_cast<uint16_t*>(p.out.ptr) + first : nullptr;
    }
    if (v.each) scale_channels(outputs, at);
    // Stores eight numbers of an n-tile at a time.
    auto store_eights = [&](const auto& store_eight) {
      for_each(make_int_sequence<T::kParts>{}, [&](auto part) {
        Tensor output = outputs(part);
        CUTE_UNROLL
        for (int first = 0; first < T::kPartDims / 4; first += 8) {  // columns of this thread, of four n-tiles
          CUTE_UNROLL
          for (int r = 0; r < 2; ++r) {
            uint32_t words[4];
            CUTE_UNROLL
            for (int i = 0; i < 4; ++i) {
              const int c = first + 2 * i;
              auto value = [&](int j) { return output(r, c + j) * damping[r] * factor[r]; };
              words[i] = out_pair(value(0), value(1));
            }
            transpose_quad(words);
            const int col = part * T::kPartDims + column_offset(first) + 4 * get<1>(at(0, 0));
            if (to[r] != nullptr) store_eight(to[r], col, words);
          }
        }
      });
    };
    // Two codes: a work tile runs its own once, and would wait for the instructions of both.
    if (p.out.vectors && p.head_dim_v % 8 == 0) {
      store_eights([&](uint16_t* row, int col, const uint32_t (&words)[4]) {
        if (col < p.head_dim_v) *reinterpret_cast<uint4*>(row + col) = {words[0], words[1], words[2], words[3]};
      });
    } else {
      store_eights([&](uint16_t* row, int col, const uint32_t (&words)[4]) {
        CUTE_UNROLL
        for (int i = 0; i < 8; ++i) {
          if (col + i < p.head_dim_v) row[col + i] = static_cast<uint16_t>(words[i / 2] >> 16 * (i % 2));
        }
      });
    }
  }

 private:
  // Multiplies sums by the descales of v's channels.
  template <class Outputs, class Coordinates>
  CUTE_DEVICE void scale_channels(const Outputs& outputs, const Coordinates& at) const {
    const Descale& v = params.p.fp8.v;
    const float* const descales = v.ptr + work.tile.batch * v.batch + work.head_k * v.head;
    for_each(make_int_sequence<T::kParts>{}, [&](auto part) {
      Tensor output = outputs(part);
      CUTE_UNROLL
      for (int c = 0; c < T::kPartDims / 4; ++c) {
        const int col = part * T::kPartDims + get<1>(at(0, 0)) + column_offset(c);
        const float descale = descales[min(col, params.p.head_dim_v - 1) * v.row];
        output(0, c) *= descale;
        output(1, c) *= descale;
      }
    });
  }

  CUTE_DEVICE float of_kv_head(const Descale& descale) const {
    return descale.ptr == nullptr ? 1.f : descale.ptr[work.tile.batch * descale.batch + work.head_k * descale.head];
  }

  // Two numbers of out.
  CUTE_DEVICE uint32_t out_pair(float first, float second) const {
    auto pair = [&](auto element) {
      using Pair = cutlass::Array<decltype(element), 2>;
      const Pair both = cutlass::NumericArrayConverter<decltype(element), float, 2>{}({first, second});
      return *reinterpret_cast<const uint32_t*>(&both);
    };
    return params.p.fp8.out == DType::FP16 ? pair(cutlass::half_t{}) : pair(cutlass::bfloat16_t{});
  }

  // Word i of lane j of a quad becomes word j of lane i: eight numbers of an n-tile instead of two of four.
  CUTE_DEVICE static void transpose_quad(uint32_t (&words)[4]) {
    CUTE_UNROLL
    for (int lanes = 1; lanes <= 2; lanes *= 2) {
      const bool odd = threadIdx.x & lanes;
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (i & lanes) continue;
        const uint32_t other = __shfl_xor_sync(~0u, odd ? words[i] : words[i + lanes], lanes);
        words[i] = odd ? other : words[i];
        words[i + lanes] = odd ? words[i + lanes] : other;
      }
    }
  }
};

// Rounds a tile's weights (MMA,1,1) to the operand of P V, in the order of keys of TransposedValues.
template <class Weights, class Operand>
CUTE_DEVICE void round_weights(const Weights& weights, Operand& operand) {
  Tensor words = recast<uint32_t>(operand);
  CUTE_UNROLL
  for (int i = 0; i < size(words); ++i) {
    const int row = i % 2, at = i / 2 * 8 + 2 * row;  // two n-tiles of the accumulator
    words(i) = rounded(weights(at), weights(at + 1), weights(at + 4), weights(at + 5));
  }
}

// A consumer warpgroup: 64 rows of every work tile of the CTA.
template <KernelConfig C, bool kTwoLevel>
CUTE_DEVICE void consume(const Fp8Params& params, typename ForwardTraits<C>::Storage& storage) {
  using T = ForwardTraits<C>;
  const int thread = threadIdx.x - 128, group = cutlass::canonical_warp_group_idx() - 1;
  typename T::MmaQK mma_qk;
  auto group_qk = mma_qk.get_slice(group * 128);  // one slice for all threads: descriptors are warpgroup-uniform
  Tensor at =
      rows_of(mma_qk.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<C.block_m>, Int<C.block_n>>{})));
  Tensor tSrP = make_tensor<typename T::Element>(typename T::LayoutP{});
  auto accumulator = [&](auto part) {
    typename T::template MmaPV<part> mma;
    return partition_fragment_C(mma, Shape<Int<C.block_m>, Int<T::template kColumns<part>>>{});  // (MMA,1,1)
  };
  constexpr auto parts = make_int_sequence<T::kParts>{};
  auto sums = transform(parts, accumulator);  // of each part of V's dims
  PipelineState<T::kStagesQ> at_q;
  PipelineState<C.stages> at_k, at_v;
  auto release_k = [&] {
    storage.pipeline_k.consumer_release(at_k);
    at_k.advance();
  };
  auto release_v = [&] {
    storage.pipeline_v.consumer_release(at_v);
    at_v.advance();
  };
  for (;; at_q.advance()) {
    storage.pipeline_q.consumer_wait(at_q);
    const typename T::Work& work = storage.work[at_q.count % T::kWorkTiles];
    if (work.tile.row < 0) break;
    const KvTiles auto tiles = work.tiles.of_group(group);
    WarpRows<C> rows(params, work, at);
    float factors[2];  // of sums before the tile

    // Skips key tiles from n down to `until`: other warpgroups see them, this one does not.
    auto skip = [&](int& n, int until) {
      CUTE_NO_UNROLL
      for (; n >= until; --n) {
        storage.pipeline_k.consumer_wait(at_k);
        release_k();
        storage.pipeline_v.consumer_wait(at_v);
        release_v();
      }
    };
    // Issues S = Q K^T of a tile.
    auto start_scores = [&](auto& tSrS) __attribute__((always_inline)) {
      Tensor sQ = make_tensor(make_smem_ptr(storage.q[at_q.stage()]), typename T::LayoutQ{});
      Tensor sK = make_tensor(make_smem_ptr(storage.k[at_k.stage()]), typename T::LayoutK{});
      // After this wait K of the tile is in shared memory.
      storage.pipeline_k.consumer_wait(at_k);
      start_product<GMMA::ScaleOut::Zero>(mma_qk, group_qk.partition_fragment_A(sQ), group_qk.partition_fragment_B(sK),
                                          tSrS);
    };
    // Issues P V of a part of V's dims, onto zero or onto acc.
    auto start_values = [&]<GMMA::ScaleOut kFirst>(auto part, auto& acc) __attribute__((always_inline)) {
      typename T::template MmaPV<part> mma;
      Tensor sV = make_tensor(make_smem_ptr(storage.v[at_v.stage()] + part * T::kPartDims * C.block_n),
                              typename T::template LayoutV<part>{});  // (dim,key)
      start_product<kFirst>(mma, tSrP, mma.get_slice(group * 128).partition_fragment_B(sV), acc);
    };

    int n = work.tiles.count - 1;
    for_each(parts, [&](auto part) { clear(get<part>(sums)); });
    if (!tiles.empty()) {
      skip(n, tiles.end);
      CUTE_NO_UNROLL
      for (; n >= tiles.begin; --n) {
        {
          Tensor tSrS = partition_fragment_C(mma_qk, Shape<Int<C.block_m>, Int<C.block_n>>{});  // (MMA,1,1)
          start_scores(tSrS);
          wait_products<0>(tSrS);
          release_k();
          rows.step(rows_of(tSrS), at, tiles, n, factors);
          round_weights(tSrS, tSrP);
        }
        // After this wait V of the tile is in shared memory.
        storage.pipeline_v.consumer_wait(at_v);
        for_each(parts, [&](auto part) __attribute__((always_inline)) {
          Tensor output = rows_of(get<part>(sums));
          if constexpr (kTwoLevel) {
            Tensor fresh = accumulator(part);
            start_values.template operator()<GMMA::ScaleOut::Zero>(part, fresh);
            wait_products<0>(fresh);
            Tensor added = rows_of(fresh);
            CUTE_UNROLL
            for (int i = 0; i < size(output); ++i) output(i) = output(i) * factors[i % 2] + added(i);
          } else {
            CUTE_UNROLL
            for (int i = 0; i < size(output); ++i) output(i) *= factors[i % 2];
            start_values.template operator()<GMMA::ScaleOut::One>(part, get<part>(sums));
          }
        });
        if constexpr (!kTwoLevel) {
          for_each(parts, [&](auto part) __attribute__((always_inline)) { wait_products<0>(get<part>(sums)); });
        }
        release_v();
      }
      storage.pipeline_q.consumer_release(at_q);
    } else {
      storage.pipeline_q.consumer_release(at_q);
    }
    skip(n, 0);
    rows.store([&](auto part) { return rows_of(get<part>(sums)); }, at);
  }
}

}  // namespace flash_cute::sm90::fp8
