// The two passes around backward: row statistics before, dQ from its fp32 sums after.
#pragma once

#include "kernels/common/seq.h"
#include "kernels/common/softmax.h"
#include "kernels/sm80/mma.h"
#include "kernels/sm80/tile_io.h"

namespace flash_cute::sm80 {

// Warps along the rows of a result: those whose shares are the closest to squares, so that they read the least.
constexpr int warps_down(int rows, int cols, int warps) {
  int best = 0;
  for (int down = 1; down <= warps; down *= 2) {
    const int across = warps / down;
    if (rows % (16 * down) != 0 || cols % (16 * across) != 0) continue;
    if (best == 0 || rows / down + cols / across < rows / best + cols * best / warps) best = down;
  }
  return best;
}

template <KernelConfig C>
struct DqTraits {
  static constexpr int kDown = warps_down(C.block_m, C.head_dim, C.warps);
  static constexpr int kAcross = C.warps / kDown;
  using Element = typename Mma16816<C.dtype>::Element;
  using Result = SharedResult<Element, C.block_m, C.head_dim, kDown, kAcross>;
  static constexpr int kSmemBytes = C.block_m * C.head_dim * sizeof(Element);

  CUTE_DEVICE static auto accumulator() {
    return make_accumulator<C.block_m, C.head_dim, kDown, kAcross>();  // (MMA,MMA_M,MMA_D)
  }
};

// The fp32 sums of one tile of dQ, in an order in which the additions and loads of a warp fall on consecutive
// addresses: as many numbers of a thread lie together as one reduction adds, then come those of the next thread.
template <KernelConfig C>
class DqSums {
 public:
  // Of the tile whose first row is `row` of all padded rows of all heads.
  CUTE_DEVICE DqSums(const BwdProblem& p, int64_t row)
      : mine_(p.dq_accum + row * C.head_dim + threadIdx.x * kTogether) {}

  CUTE_DEVICE void clear() const {
    CUTE_UNROLL
    for (int i = 0; i < C.block_m * C.head_dim / C.threads(); i += kTogether) {
      if constexpr (kTogether == 4) {
        *reinterpret_cast<float4*>(mine_ + i * C.threads()) = make_float4(0.f, 0.f, 0.f, 0.f);
      } else {
        mine_[i * C.threads()] = 0.f;
      }
    }
  }

  template <class Accumulator>
  CUTE_DEVICE void add(const Accumulator& acc) const {
    CUTE_UNROLL
    for (int i = 0; i < size(acc); i += kTogether) {
#if __CUDA_ARCH__ >= 900
      asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(mine_ + i * C.threads()), "f"(acc(i)),
                   "f"(acc(i + 1)), "f"(acc(i + 2)), "f"(acc(i + 3))
                   : "memory");
#else
      atomicAdd(mine_ + i * C.threads(), acc(i));
#endif
    }
  }

  template <class Accumulator>
  CUTE_DEVICE void load(Accumulator& acc) const {
    CUTE_UNROLL
    for (int i = 0; i < size(acc); i += kTogether) {
      if constexpr (kTogether == 4) {
        *reinterpret_cast<float4*>(&acc(i)) = *reinterpret_cast<const float4*>(mine_ + i * C.threads());
      } else {
        acc(i) = mine_[i * C.threads()];
      }
    }
  }

 private:
#if __CUDA_ARCH__ >= 900
  static constexpr int kTogether = 4;  // numbers that one reduction adds
#else
  static constexpr int kTogether = 1;
#endif

  float* mine_;  // this thread's first
};

// Of a head's first row among the padded rows of all heads.
CUTE_DEVICE int64_t first_padded_row(const BwdProblem& p, int block_m, int batch, int head, int64_t offset) {
  return batch * p.lse_log2.batch + head * p.lse_log2.head +
         PaddedRows{block_m}.first_row(offset, p.fwd.sequences.cu_q ? batch : 0);
}

// One tile of query rows of one head, in the sequence and among the padded rows of all heads in the workspaces.
template <KernelConfig C>
struct PassTile {
  int row, head, batch;
  SeqSpan span;
  int64_t padded_row;

  CUTE_DEVICE explicit PassTile(const BwdProblem& p) {
    const FwdProblem& f = p.fwd;
    const int tiles = ceil_div(f.seqlen_q, C.block_m);
    row = blockIdx.x % tiles * C.block_m;
    head = blockIdx.x / tiles % f.heads;
    batch = blockIdx.x / tiles / f.heads;
    span = seq_span(f.sequences.cu_q, f.sequences.used_q, batch, f.seqlen_q, f.total_q);
    padded_row = first_padded_row(p, C.block_m, batch, head, span.offset) + row;
  }
};

// This thread's share of the dot product of two rows: vectors at distances of kStride from `col` on.
template <class Element, int kCols, int kStride>
CUTE_DEVICE float partial_dot(const Element* a, bool vectors_a, const Element* b, bool vectors_b, int col, int cols) {
  using Vector = cutlass::AlignedArray<Element, kVector>;
  auto read = [&](const Element* from, bool vectors, int c) {
    Vector values;
    if (vectors && c + kVector <= cols) return *reinterpret_cast<const Vector*>(from + c);
    for (int i = 0; i < kVector; ++i) values[i] = c + i < cols ? from[c + i] : Element(0.f);
    return values;
  };
  float dot = 0.f;
  CUTE_UNROLL
  for (int c = 0; c < kCols; c += kStride) {
    const Vector x = read(a, vectors_a, col + c), y = read(b, vectors_b, col + c);
    CUTE_UNROLL
    for (int i = 0; i < kVector; ++i) dot += float(x[i]) * float(y[i]);
  }
  return dot;
}

// softmax_d = rowsum(dout * out) - dlse, lse / ln 2 with +inf where a row does not exist or sees no key (exp2 of
// anything minus it is 0), zero sums of dQ, and its turns.
template <KernelConfig C>
__global__ void __launch_bounds__(C.threads()) backward_prepare(const __grid_constant__ BwdProblem p) {
  using Element = typename Mma16816<C.dtype>::Element;
  constexpr int kThreadsPerRow = C.head_dim_v % 64 == 0 ? 8 : 4;
  constexpr int kRowsAtOnce = C.threads() / kThreadsPerRow;
  const PassTile<C> tile(p);
  if (tile.row >= tile.span.length) return;
  DqSums<C>(p, tile.padded_row).clear();
  if (threadIdx.x < C.warps) p.turns[tile.padded_row / C.block_m * C.warps + threadIdx.x] = 0;

  const int first_col = threadIdx.x % kThreadsPerRow * kVector;
  auto row_of = [&](const Matrices& m, int row) {
    return static_cast<const Element*>(m.ptr) + tile.batch * m.batch + tile.head * m.head +
           (tile.span.offset + tile.row + row) * m.row;
  };
  CUTE_UNROLL
  for (int row = threadIdx.x / kThreadsPerRow; row < C.block_m; row += kRowsAtOnce) {
    const bool exists = tile.row + row < tile.span.length;
    float dot = 0.f;
    if (exists) {
      dot = partial_dot<Element, C.head_dim_v, kThreadsPerRow * kVector>(
          row_of(p.dout, row), p.dout.vectors, row_of(p.fwd.out, row), p.fwd.out.vectors, first_col, p.fwd.head_dim_v);
    }
    CUTE_UNROLL
    for (int lane = kThreadsPerRow / 2; lane > 0; lane /= 2) dot += __shfl_xor_sync(0xffffffff, dot, lane);
    if (first_col != 0) continue;
    auto at = [&](const Statistics& s) {
      return s.ptr + tile.batch * s.batch + tile.head * s.head + tile.span.offset + tile.row + row;
    };
    const float lse = exists ? *at(p.fwd.lse) : -INFINITY;
    if (exists && p.dlse.ptr != nullptr) dot -= *at(p.dlse);
    if (exists) *at(p.softmax_d) = dot;
    p.lse_log2.ptr[tile.padded_row + row] = lse == -INFINITY ? INFINITY : lse * kLog2e;
    p.row_dot.ptr[tile.padded_row + row] = dot / p.fwd.rules.gradient_scale();
  }
}

// dQ = softmax_scale * sums, rounded.
template <KernelConfig C>
__global__ void __launch_bounds__(C.threads()) backward_finish(const __grid_constant__ BwdProblem p) {
  using T = DqTraits<C>;
  using Element = typename T::Element;
  extern __shared__ __align__(128) char smem[];
  auto* shared = reinterpret_cast<Element*>(smem);
  const PassTile<C> tile(p);
  if (tile.row >= tile.span.length) return;
  auto tQrdQ = T::accumulator();  // (MMA,MMA_M,MMA_D)
  DqSums<C>(p, tile.padded_row).load(tQrdQ);
  CUTE_UNROLL
  for (int i = 0; i < size(tQrdQ); ++i) tQrdQ(i) *= p.fwd.softmax_scale * p.fwd.rules.gradient_scale();
  typename T::Result(shared, threadIdx.x / 32).store(tQrdQ);
  // After this barrier all of dQ's tile is in shared memory.
  __syncthreads();
  TileCopy<Element, C.threads(), C.block_m, C.head_dim>(p.dq, tile.batch, tile.head, tile.span.offset, tile.row,
                                                        {0, tile.span.length}, p.fwd.head_dim, shared, threadIdx.x)
      .store();
}

}  // namespace flash_cute::sm80
