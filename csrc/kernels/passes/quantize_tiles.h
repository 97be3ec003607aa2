// How CTAs share out the rows of a tensor (quantize.cu): a CTA takes some rows of one sequence, of some heads, and a
// thread the same dims of one head in all of its rows.
#pragma once

#include <algorithm>
#include <bit>
#include <type_traits>

#include "kernels/common/e4m3_rounding.h"
#include "kernels/passes/quantize.h"

namespace flash_cute {

constexpr int kQuantizeThreads = 128;

// Sequences of packed rows, and in front of and behind these the rows of none: segments 0 and batch + 1.
struct Segments {
  const int* cu_seqlens;
  int batch, rows;

  __device__ int begin(int segment) const { return segment == 0 ? 0 : min(max(cu_seqlens[segment - 1], 0), rows); }
  __device__ int end(int segment) const { return segment > batch ? rows : begin(segment + 1); }

  // Blocks of rows are numbered such that no two segments share one.
  __device__ int64_t first_block(int segment, int block) const { return int64_t(begin(segment) / block) + segment; }

  // The last segment that begins at this number or before.
  template <class Begin>
  __device__ int find(int64_t number, Begin begin_of) const {
    int segment = 0;
    for (int past = batch + 2; past - segment > 1;) {
      const int middle = (segment + past) / 2;
      (begin_of(middle) <= number ? segment : past) = middle;
    }
    return segment;
  }
  __device__ int of_block(int64_t number, int block) const {
    return find(number, [&](int segment) { return first_block(segment, block); });
  }
  __device__ int of_row(int64_t row) const {
    return find(row, [&](int segment) { return begin(segment); });
  }
};

// Consecutive rows of a sequence.
struct RowBlock {
  int sequence;  // of rows of none the last one; -1 if there is none
  bool is_of_sequence;
  int64_t first;  // among the rows of all sequences
  int count;  // of rows
  int length;  // of the sequence
};

__device__ inline RowBlock row_block(const QuantizeE4M3& p, int number, int block) {
  if (p.cu_seqlens == nullptr) {
    const int blocks = (p.rows + block - 1) / block, own = number % blocks, sequence = number / blocks;
    return {sequence, true, int64_t(sequence) * p.rows + int64_t(own) * block, min(block, p.rows - own * block),
            p.rows};
  }
  const Segments segments{p.cu_seqlens, p.batch, p.rows};
  const int segment = segments.of_block(number, block);
  const int begin = segments.begin(segment), end = segments.end(segment);
  const int64_t first = begin + (number - segments.first_block(segment, block)) * block, left = end - first;
  const int count = static_cast<int>(min(max(left, int64_t{0}), int64_t{block}));
  const bool is_of_sequence = segment >= 1 && segment <= p.batch;
  return {is_of_sequence ? segment - 1 : p.batch - 1, is_of_sequence, first, count, end - begin};
}

// A row of all sequences.
__device__ inline RowBlock one_row(const QuantizeE4M3& p, int row) {
  if (p.cu_seqlens == nullptr) return {row / p.rows, true, row, 1, p.rows};
  const Segments segments{p.cu_seqlens, p.batch, p.rows};
  const int segment = segments.of_row(row);
  const bool is_of_sequence = segment >= 1 && segment <= p.batch;
  return {is_of_sequence ? segment - 1 : p.batch - 1, is_of_sequence, row, 1,
          segments.end(segment) - segments.begin(segment)};
}

// Where a row of all sequences lies in x.
__device__ inline int64_t offset_of_row(const QuantizeE4M3& p, int sequence, int64_t row) {
  if (p.cu_seqlens != nullptr) return row * p.row_step;
  return sequence * p.batch_step + (row - int64_t(sequence) * p.rows) * p.row_step;
}

// A thread has so many chunks of eight dims, and `lanes` threads a part of a head: all of it, if its chunks suffice.
struct QuantizeGrid {
  int lanes, parts;
  int slots;  // parts of all heads,
  int slots_of_cta, groups_of_slots;  // those of a CTA side by side, and how many CTAs have all of them
  int rows_at_once, rows;  // of a CTA
  int64_t blocks;  // of rows

  QuantizeGrid(const QuantizeE4M3& p, int chunks, int rows_of_thread) {
    const int wanted = (p.dim + 8 * chunks - 1) / (8 * chunks);
    lanes = wanted >= 32 ? 32 : static_cast<int>(std::bit_ceil(static_cast<unsigned>(wanted)));
    parts = (wanted + lanes - 1) / lanes;
    slots = p.heads * parts;
    const int most = kQuantizeThreads / lanes;
    groups_of_slots = (slots + most - 1) / most;
    slots_of_cta = (slots + groups_of_slots - 1) / groups_of_slots;
    rows_at_once = most / slots_of_cta;
    rows = rows_at_once * rows_of_thread;
    blocks = p.cu_seqlens == nullptr ? int64_t(p.batch) * ((p.rows + rows - 1) / rows)
                                     : int64_t(p.rows / rows) + p.batch + 2;
  }

  int64_t ctas() const { return blocks * groups_of_slots; }
};

// A thread's place in its CTA.
struct QuantizePlace {
  int lane, row;
  int head, first_dim;  // of the part
  bool exists;

  __device__ QuantizePlace(const QuantizeGrid& grid, int chunks, int group_of_slots) {
    const int group = threadIdx.x / grid.lanes;
    const int slot = group_of_slots * grid.slots_of_cta + group % grid.slots_of_cta;
    lane = threadIdx.x % grid.lanes;
    row = group / grid.slots_of_cta;
    exists = row < grid.rows_at_once && slot < grid.slots;
    head = exists ? slot / grid.parts : 0;
    first_dim = exists ? slot % grid.parts * grid.lanes * chunks * 8 : 0;
  }
  // The first dim of a chunk.
  __device__ int dim(const QuantizeGrid& grid, int chunk) const { return first_dim + (chunk * grid.lanes + lane) * 8; }
};

// Eight numbers of a row, as they are in memory: zeros behind its end. As words, which wait for a load only when they
// are taken apart.
template <class Element>
struct EightOf {
  static constexpr int kOfWord = 4 / sizeof(Element);
  uint32_t words[8 / kOfWord] = {};

  __device__ __forceinline__ float at(int i) const {
    if constexpr (kOfWord == 1) {
      return __uint_as_float(words[i]);
    } else {
      return float(Element::bitcast(static_cast<uint16_t>(words[i / 2] >> 16 * (i % 2))));
    }
  }
};

// From `dim` on; with `vectors` 16 bytes at once.
template <class Element>
__device__ __forceinline__ EightOf<Element> load_eight(const Element* row, int dim, int dims, int64_t step,
                                                       bool vectors) {
  using Bits = std::conditional_t<sizeof(Element) == 4, uint32_t, uint16_t>;
  EightOf<Element> eight;
  if (vectors && dim + 8 <= dims) {
#pragma unroll
    for (int i = 0; i < int(sizeof(eight) / sizeof(uint4)); ++i) {
      const uint4 four = reinterpret_cast<const uint4*>(row + dim)[i];
      eight.words[4 * i] = four.x;
      eight.words[4 * i + 1] = four.y;
      eight.words[4 * i + 2] = four.z;
      eight.words[4 * i + 3] = four.w;
    }
    return eight;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t bits = dim + i < dims ? reinterpret_cast<const Bits*>(row)[(dim + i) * step] : 0;
    eight.words[i / eight.kOfWord] |= bits << 16 * (i % eight.kOfWord);
  }
  return eight;
}

// What the kernels are given.
struct QuantizePass : QuantizeE4M3 {
  QuantizeGrid grid;
  float hadamard_scale;
  float* sums;  // [blocks * rows_at_once of add_rows, heads * dim]; null without a mean
  float* largest;  // [descales]: the largest magnitudes
  float* wide_rows;  // [CTAs, dim] of rows that exceed shared memory
  int64_t descales;  // 0 of rows

  // Where the magnitudes of a head's dim belong.
  __device__ __forceinline__ int64_t descale_at(int sequence, int head, int dim) const {
    if (scaling == Scaling::Tensor) return 0;
    if (scaling == Scaling::Channel) return (int64_t(sequence) * heads + head) * this->dim + dim;
    return int64_t(sequence) * heads_k + head / (heads / heads_k);
  }
};

// 0 of what is not finite.
__device__ __forceinline__ float finite_size(float x) {
  return is_finite(x) ? fabsf(x) : 0.f;
}

// By all lanes of a warp: the largest of each group of so many.
__device__ __forceinline__ float largest_of_lanes(float size, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) size = fmaxf(size, __shfl_xor_sync(~0u, size, step));
  return size;
}

// By all CTAs: descales that are not of rows.
__device__ inline void write_descales(const QuantizePass& p) {
#pragma unroll 1
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < p.descales; i += int64_t(gridDim.x) * blockDim.x)
    p.descale[i] = descale_of(p.largest[i], p.power_of_two);
}

// In any order: the largest is the same. Most have been exceeded before.
__device__ __forceinline__ void raise(float* largest, float size) {
  if (size > *static_cast<volatile float*>(largest)) {
    atomicMax(reinterpret_cast<int*>(largest), __float_as_int(size));  // floats from 0 on are ordered as their bits
  }
}

}  // namespace flash_cute
