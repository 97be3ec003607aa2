#include "kernels/passes/quantize.h"

#include <cutlass/bfloat16.h>
#include <cutlass/half.h>

#include <cmath>

#include "kernels/common/hadamard.h"
#include "kernels/common/pdl.h"
#include "kernels/launch.h"
#include "kernels/passes/quantize_tiles.h"
#include "kernels/passes/quantize_wide.h"

namespace flash_cute {
namespace {

using Scaling = QuantizeE4M3::Scaling;

enum class Sharing { Row, Heads, Channel };  // of a descale; Heads: what Scaling calls Head or Tensor

constexpr int kWaves = 4;  // loads of a thread one after the other, of kTogether rows each
constexpr int kSummedRows = 32;  // of a thread of add_rows
constexpr int kSlices = 8;  // of the sums of a sequence

// A thread's dims of the first row of a block.
template <class Element>
__device__ auto first_row(const QuantizePass& p, const RowBlock& rows, const QuantizePlace& place) {
  const int64_t row = offset_of_row(p, rows.sequence, rows.first);
  return static_cast<const Element*>(p.x) + row + place.head * p.head_step;
}

// Rows of a thread whose loads overlap.
template <class Element, int kChunks>
struct SomeRows {
  static constexpr int kTogether = 4 / kChunks;
  static constexpr int kDims = 8 * kChunks;
  EightOf<Element> eights[kTogether][kChunks];
  bool exist[kTogether];

  // Rows `first`, `first + rows_at_once`, .. of a block; others are zeros.
  __device__ __forceinline__ SomeRows(const QuantizePass& p, const Element* x, const RowBlock& rows,
                                      const QuantizePlace& place, int first) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int row = first + i * p.grid.rows_at_once;
      exist[i] = place.exists && row < rows.count;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        if (exist[i])
          eights[i][chunk] = load_eight(x + row * p.row_step, place.dim(p.grid, chunk), p.dim, p.dim_step, p.vectors);
      }
    }
  }

  __device__ __forceinline__ float at(int row, int dim) const { return eights[row][dim / 8].at(dim % 8); }
};

// What is done to rows before they are divided. The mean stays in L1, as registers are few.
template <int kChunks>
struct Preparation {
  static constexpr int kDims = 8 * kChunks;
  const float* mean;  // of the head; null: none
  HadamardRow<kChunks> hadamard;

  __device__ Preparation(const QuantizePass& p, const RowBlock& rows, const QuantizePlace& place)
      : mean(p.mean == nullptr ? nullptr : p.mean + (int64_t(rows.sequence) * p.heads + place.head) * p.dim),
        hadamard(p.grid.lanes, place.lane, p.dim) {}

  // Row i of some, by all lanes of a warp.
  template <class Rows>
  __device__ __forceinline__ void prepare(const QuantizePass& p, const QuantizePlace& place, const Rows& some, int i,
                                          float (&x)[kDims]) const {
#pragma unroll
    for (int j = 0; j < kDims; ++j) x[j] = some.at(i, j);
    if (mean != nullptr) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const auto means = load_eight(mean, place.dim(p.grid, chunk), p.dim, 1, p.dim % 8 == 0);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[8 * chunk + j] = __fsub_rn(x[8 * chunk + j], means.at(j));
      }
    }
    if (p.hadamard) hadamard.multiply(x, p.hadamard_scale);
  }
};

// Adds the rows of each block that a thread has, divided by the sequence's length, in their order.
template <class Element, int kChunks>
__global__ void __launch_bounds__(kQuantizeThreads, 2) add_rows(const __grid_constant__ QuantizePass p) {
  using Some = SomeRows<Element, kChunks>;
  const int cta = static_cast<int>(blockIdx.x), block = cta / p.grid.groups_of_slots;
  const QuantizePlace place(p.grid, kChunks, cta % p.grid.groups_of_slots);
  const RowBlock rows = row_block(p, block, p.grid.rows);
  if (!rows.is_of_sequence || rows.count == 0 || !place.exists) return;
  const float weight = __fdiv_rn(1.f, static_cast<float>(rows.length));
  const Element* const x_rows = first_row<Element>(p, rows, place);
  float sums[Some::kDims] = {};
  for (int first = place.row; first < rows.count; first += Some::kTogether * p.grid.rows_at_once) {
    const Some some(p, x_rows, rows, place, first);
#pragma unroll
    for (int i = 0; i < Some::kTogether; ++i) {
#pragma unroll
      for (int j = 0; j < Some::kDims; ++j) {
        const float x = some.at(i, j);
        sums[j] = __fmaf_rn(is_finite(x) ? x : 0.f, weight, sums[j]);
      }
    }
  }
  float* const to =
      p.sums + (int64_t(block) * p.grid.rows_at_once + place.row) * p.columns() + int64_t(place.head) * p.dim;
#pragma unroll
  for (int j = 0; j < Some::kDims; ++j) {
    const int dim = place.dim(p.grid, j / 8) + j % 8;
    if (dim < p.dim) to[dim] = sums[j];
  }
}

// Adds the sums of each sequence, of 32 columns a CTA: warps add slices of them in their order, one adds the slices.
// Zeroes what largest_of_rows() raises.
__global__ void __launch_bounds__(32 * kSlices) add_sums(const __grid_constant__ QuantizePass p) {
  __shared__ float of_slices[kSlices][32];
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < p.descales; i += int64_t(gridDim.x) * blockDim.x)
    p.largest[i] = 0.f;
  const int64_t groups = (p.columns() + 31) / 32, column = blockIdx.x % groups * 32 + threadIdx.x % 32;
  const int sequence = static_cast<int>(blockIdx.x / groups), slice = threadIdx.x / 32;
  int length = p.rows;
  int64_t first_block = int64_t(sequence) * ((p.rows + p.grid.rows - 1) / p.grid.rows);
  if (p.cu_seqlens != nullptr) {
    const Segments segments{p.cu_seqlens, p.batch, p.rows};
    length = max(segments.end(sequence + 1) - segments.begin(sequence + 1), 0);
    first_block = segments.first_block(sequence + 1, p.grid.rows);
  }
  const int64_t count = int64_t((length + p.grid.rows - 1) / p.grid.rows) * p.grid.rows_at_once;
  const float* const from = p.sums + first_block * p.grid.rows_at_once * p.columns() + column;
  // After this wait the sums are there.
  wait_on_dependent_grids();
  float sum = 0.f;
  if (column < p.columns()) {
#pragma unroll 8
    for (int64_t i = count * slice / kSlices; i < count * (slice + 1) / kSlices; ++i)
      sum = __fadd_rn(sum, from[i * p.columns()]);
  }
  of_slices[slice][threadIdx.x % 32] = sum;
  // After this barrier the sums of the slices are there.
  __syncthreads();
  if (slice != 0 || column >= p.columns()) return;
  for (int i = 1; i < kSlices; ++i) sum = __fadd_rn(sum, of_slices[i][threadIdx.x]);
  p.mean[sequence * p.columns() + column] = sum;
}

// Raises `largest` by the rows of sequences. Threads without a head have zeros, which raise nothing.
template <class Element, int kChunks, bool kOfChannels>
__global__ void __launch_bounds__(kQuantizeThreads) largest_of_rows(const __grid_constant__ QuantizePass p) {
  using Some = SomeRows<Element, kChunks>;
  const int cta = static_cast<int>(blockIdx.x);
  const QuantizePlace place(p.grid, kChunks, cta % p.grid.groups_of_slots);
  const RowBlock rows = row_block(p, cta / p.grid.groups_of_slots, p.grid.rows);
  // After this wait, which no CTA may leave out, the means are there, and `largest` is zero.
  wait_on_dependent_grids();
  if (!rows.is_of_sequence || rows.count == 0) return;
  const Preparation<kChunks> preparation(p, rows, place);
  const Element* const x_rows = first_row<Element>(p, rows, place);
  float largest[kOfChannels ? Some::kDims : 1] = {};
  for (int first = 0; first < rows.count; first += Some::kTogether * p.grid.rows_at_once) {
    const Some some(p, x_rows, rows, place, first + place.row);
#pragma unroll
    for (int i = 0; i < Some::kTogether; ++i) {
      float x[Some::kDims];
      preparation.prepare(p, place, some, i, x);
      if (!some.exist[i]) continue;
#pragma unroll
      for (int j = 0; j < Some::kDims; ++j) {
        float& so_far = largest[kOfChannels ? j : 0];
        so_far = fmaxf(so_far, finite_size(x[j]));
      }
    }
  }
  if constexpr (kOfChannels) {
#pragma unroll
    for (int j = 0; j < Some::kDims; ++j) {
      const int dim = place.dim(p.grid, j / 8) + j % 8;
      if (dim < p.dim) raise(&p.largest[p.descale_at(rows.sequence, place.head, dim)], largest[j]);
    }
  } else {
    const int lanes = p.scaling == Scaling::Tensor ? 32 : p.grid.lanes;
    const float size = largest_of_lanes(largest[0], lanes);
    if (threadIdx.x % lanes == 0) raise(&p.largest[p.descale_at(rows.sequence, place.head, 0)], size);
  }
}

// Four numbers, the first in the low byte.
__device__ __forceinline__ uint32_t round_four(float a, float b, float c, float d) {
  return round_to_e4m3(a, b) | round_to_e4m3(c, d) << 16;
}

// Writes values, and descales.
template <class Element, int kChunks, Sharing kSharing>
__global__ void __launch_bounds__(kQuantizeThreads) round_rows(const __grid_constant__ QuantizePass p) {
  using Some = SomeRows<Element, kChunks>;
  // After this wait the largest magnitudes, or of rows the means, are there.
  wait_on_dependent_grids();
  write_descales(p);
  // What largest_of_rows() read last comes first: L2 may still have it.
  const int cta = static_cast<int>(kSharing == Sharing::Row ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  const QuantizePlace place(p.grid, kChunks, cta % p.grid.groups_of_slots);
  const RowBlock rows = row_block(p, cta / p.grid.groups_of_slots, p.grid.rows);
  if (rows.count == 0) return;
  const Preparation<kChunks> preparation(p, rows, place);
  E4M3Divisor divisors[kSharing == Sharing::Channel ? Some::kDims : 1];
  if constexpr (kSharing != Sharing::Row) {
#pragma unroll
    for (int j = 0; j < (kSharing == Sharing::Channel ? Some::kDims : 1); ++j) {
      const int dim = kSharing == Sharing::Channel ? place.dim(p.grid, j / 8) + j % 8 : 0;
      const bool has_descale = place.exists && dim < p.dim && rows.sequence >= 0;
      const float largest = has_descale ? p.largest[p.descale_at(rows.sequence, place.head, dim)] : 0.f;
      divisors[j] = E4M3Divisor::of(descale_of(largest, p.power_of_two));
    }
  }
  const Element* const x_rows = first_row<Element>(p, rows, place);
  const int64_t first_value = rows.first * p.heads + place.head;  // in rows of heads
  for (int first = 0; first < rows.count; first += Some::kTogether * p.grid.rows_at_once) {
    const Some some(p, x_rows, rows, place, first + place.row);
#pragma unroll
    for (int i = 0; i < Some::kTogether; ++i) {
      float x[Some::kDims];
      preparation.prepare(p, place, some, i, x);
      const int64_t row = first_value + int64_t(first + place.row + i * p.grid.rows_at_once) * p.heads;
      if constexpr (kSharing == Sharing::Row) {
        float size = 0.f;
#pragma unroll
        for (float number : x) size = fmaxf(size, finite_size(number));
        const float descale = descale_of(largest_of_lanes(size, p.grid.lanes), p.power_of_two);
        divisors[0] = E4M3Divisor::of(descale);
        if (some.exist[i] && place.lane == 0) p.descale[row] = descale;
      }
      if (!some.exist[i]) continue;
#pragma unroll
      for (int j = 0; j < Some::kDims; ++j) x[j] = divisors[kSharing == Sharing::Channel ? j : 0].quotient(x[j]);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const float* const eight = x + 8 * chunk;
        const uint2 bytes{round_four(eight[0], eight[1], eight[2], eight[3]),
                          round_four(eight[4], eight[5], eight[6], eight[7])};
        const int dim = place.dim(p.grid, chunk);
        uint8_t* const to = p.values + row * p.dim + dim;
        if (p.dim % 8 == 0) {
          if (dim < p.dim) *reinterpret_cast<uint2*>(to) = bytes;
          continue;
        }
        for (int j = 0; j < 8 && dim + j < p.dim; ++j)
          to[j] = static_cast<uint8_t>((j < 4 ? bytes.x : bytes.y) >> 8 * (j % 4));
      }
    }
  }
}

// Chunks of eight dims of a thread. A Hadamard matrix is cheapest with few lanes, whose exchange costs more than sums.
int chunks_of(const QuantizeE4M3& p, bool adds) {
  return p.dim > 256 || (!adds && p.hadamard && p.dim >= 32) ? 4 : 1;
}

QuantizeGrid grid_of_sums(const QuantizeE4M3& p) {
  return QuantizeGrid(p, chunks_of(p, true), kSummedRows);
}

int64_t count_descales(const QuantizeE4M3& p) {
  switch (p.scaling) {
    case Scaling::Head:
      return int64_t(p.batch) * p.heads_k;
    case Scaling::Tensor:
      return 1;
    case Scaling::Channel:
      return p.batch * p.columns();
    default:
      return 0;
  }
}

// Whether a head is too wide for a warp, whose lanes would have to know all of it.
bool is_wide(const QuantizeE4M3& p) {
  return p.dim > 32 * 8 * 4 && (p.hadamard || p.scaling == Scaling::Row);
}

struct Workspace {
  int64_t sums, largest, wide_rows;  // numbers, in this order

  explicit Workspace(const QuantizeE4M3& p) : sums(0), largest((count_descales(p) + 3) / 4 * 4), wide_rows(0) {
    const QuantizeGrid grid = grid_of_sums(p);
    if (p.mean != nullptr) sums = (grid.blocks * grid.rows_at_once * p.columns() + 3) / 4 * 4;
    if (is_wide(p) && p.dim > kWideInShared) wide_rows = int64_t(kWideCtas) * p.dim;
  }
};

// Launches a kernel that waits for the one before, if there is one, with which it may overlap.
template <auto kKernel>
cudaError_t launch_pass(const QuantizePass& p, int64_t ctas, int threads, int smem_bytes, bool follows,
                        cudaStream_t stream) {
  return follows ? launch_with_pdl<kKernel>({ctas, threads, smem_bytes}, stream, p)
                 : launch_kernel<kKernel>(ctas, threads, smem_bytes, stream, p);
}

template <class Element, int kChunks>
cudaError_t add(const QuantizePass& p, cudaStream_t stream) {
  return launch_kernel<add_rows<Element, kChunks>>(p.grid.ctas(), kQuantizeThreads, 0, stream, p);
}

template <class Element, int kChunks>
cudaError_t scale_and_round(const QuantizePass& p, cudaStream_t stream) {
  const bool follows = p.mean != nullptr;
  const int64_t ctas = p.grid.ctas();
  constexpr int kThreads = kQuantizeThreads;
  if (p.scaling == Scaling::Row)
    return launch_pass<round_rows<Element, kChunks, Sharing::Row>>(p, ctas, kThreads, 0, follows, stream);
  const bool channel = p.scaling == Scaling::Channel;
  if (cudaError_t e =
          channel ? launch_pass<largest_of_rows<Element, kChunks, true>>(p, ctas, kThreads, 0, follows, stream)
                  : launch_pass<largest_of_rows<Element, kChunks, false>>(p, ctas, kThreads, 0, follows, stream))
    return e;
  return channel ? launch_pass<round_rows<Element, kChunks, Sharing::Channel>>(p, ctas, kThreads, 0, true, stream)
                 : launch_pass<round_rows<Element, kChunks, Sharing::Heads>>(p, ctas, kThreads, 0, true, stream);
}

template <class Element>
cudaError_t scale_and_round_wide(const QuantizePass& p, cudaStream_t stream) {
  const bool of_rows = p.scaling == Scaling::Row, in_shared = p.dim <= kWideInShared;
  const int64_t ctas = std::min<int64_t>(p.all_rows() * p.heads, kWideCtas);
  const int smem_bytes = in_shared ? p.dim * int(sizeof(float)) : 0;
  bool follows = p.mean != nullptr;
  if (!of_rows) {
    if (cudaError_t e = launch_pass<wide_rows<Element, false>>(p, ctas, kWideThreads, smem_bytes, follows, stream))
      return e;
    follows = true;
  }
  return launch_pass<wide_rows<Element, true>>(p, ctas, kWideThreads, smem_bytes, follows, stream);
}

// What takes part without rows: descales, and means of nothing.
template <class Element>
cudaError_t describe_nothing(const QuantizePass& p, cudaStream_t stream) {
  if (p.mean != nullptr) {
    if (cudaError_t e = cudaMemsetAsync(p.mean, 0, p.batch * p.columns() * sizeof(float), stream)) return e;
  }
  return p.descales == 0 ? cudaSuccess : launch_kernel<wide_rows<Element, true>>(1, kWideThreads, 0, stream, p);
}

template <class Element>
cudaError_t run(QuantizePass& p, cudaStream_t stream) {
  const bool has_rows = p.all_rows() > 0;
  if (p.mean != nullptr && has_rows) {
    if (cudaError_t e = chunks_of(p, true) == 4 ? add<Element, 4>(p, stream) : add<Element, 1>(p, stream)) return e;
    const int64_t ctas = p.batch * ((p.columns() + 31) / 32);
    if (cudaError_t e = launch_pass<add_sums>(p, ctas, 32 * kSlices, 0, true, stream)) return e;
  } else if (p.descales > 0) {
    if (cudaError_t e = cudaMemsetAsync(p.largest, 0, p.descales * sizeof(float), stream)) return e;
  }
  if (!has_rows) return describe_nothing<Element>(p, stream);
  if (is_wide(p)) return scale_and_round_wide<Element>(p, stream);
  const int chunks = chunks_of(p, false);
  p.grid = QuantizeGrid(p, chunks, kWaves * 4 / chunks);
  return chunks == 4 ? scale_and_round<Element, 4>(p, stream) : scale_and_round<Element, 1>(p, stream);
}

}  // namespace

int64_t quantize_workspace(const QuantizeE4M3& p) {
  const Workspace work(p);
  return work.sums + work.largest + work.wide_rows;
}

cudaError_t quantize_e4m3(const QuantizeE4M3& given, float* workspace, cudaStream_t stream) {
  const Workspace work(given);
  QuantizePass p{given,
                 grid_of_sums(given),
                 static_cast<float>(std::pow(double(given.dim), -0.5)),
                 workspace,
                 workspace + work.sums,
                 workspace + work.sums + work.largest,
                 count_descales(given)};
  switch (p.element) {
    case QuantizeE4M3::Element::FP16:
      return run<cutlass::half_t>(p, stream);
    case QuantizeE4M3::Element::BF16:
      return run<cutlass::bfloat16_t>(p, stream);
    default:
      return run<float>(p, stream);
  }
}

}  // namespace flash_cute
