// What decode over a cache of 8 bits has besides: queries in f16, and descales of keys and values. Products are of f16,
// in which 8-bit numbers are exact.
#pragma once

#include "kernels/common/element.h"
#include "kernels/common/fragment.h"
#include "kernels/decode/cache_copy.h"

namespace flash_cute::decode {

using namespace ampere;

// 4 bytes from global to shared memory; zero unless `valid` is 4.
CUTE_DEVICE void cp_async_4(uint32_t shared, const void* global, int valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(valid) : "memory");
}

// K and V of a team, and the descales of their rows if these have some.
template <int kKeys, int kCols, int kColsV>
struct EightBitTile {
  alignas(128) uint8_t k[kKeys * kCols];
  alignas(128) uint8_t v[kKeys * kColsV];
  alignas(16) float k_descale[kKeys];
  alignas(16) float v_descale[kKeys];

  CUTE_DEVICE float* results() { return reinterpret_cast<float*>(this); }
};

// Copies descales of rows with their keys and values. Those of rows that are not copied become zeros.
template <int kThreads, int kKeys, int kCols, int kColsV>
class EightBitCopy : public CacheCopy<uint8_t, kThreads, kKeys, kCols, kColsV> {
  using Base = CacheCopy<uint8_t, kThreads, kKeys, kCols, kColsV>;

 public:
  template <class Tile>
  CUTE_DEVICE EightBitCopy(const DecodeParams& p, int step, Tile& tile, int thread)
      : Base(p, step, tile, thread),
        k_descale_(cast_smem_ptr_to_uint(tile.k_descale)),
        v_descale_(cast_smem_ptr_to_uint(tile.v_descale)) {}

  CUTE_DEVICE void begin(int b, int head, RowSpan visible, int row) {
    Base::begin(b, head, visible, row);
    head_ = head;
  }

  CUTE_DEVICE void load(int bytes) {
    if (this->p_.cache.k.each || this->p_.cache.v.each) load_descales(bytes);
    Base::load(bytes);
  }

 private:
  CUTE_DEVICE void load_descales(int bytes) const {
    const bool in_chunks = this->in_chunks();
    CUTE_UNROLL
    for (int first = 0; first < kKeys; first += kThreads) {
      const int i = first + this->thread_, row = this->next_ + i;
      const bool wanted = i < kKeys && this->visible_.first <= row && row < this->visible_.last;
      // All lanes take part in the look-up.
      const int page =
          in_chunks ? this->page_of_chunk(this->next_chunk_ + i / Base::kChunk) : this->place_of(row, wanted).page;
      if (i >= kKeys) continue;
      load_descale(this->p_.cache.k, k_descale_ + bytes + i * int(sizeof(float)), wanted ? page : -1, row);
      load_descale(this->p_.cache.v, v_descale_ + bytes + i * int(sizeof(float)), wanted ? page : -1, row);
    }
  }

  CUTE_DEVICE void load_descale(const Descale& descale, uint32_t to, int page, int row) const {
    if (!descale.each) return;
    const float* from = descale.ptr + head_ * descale.head;
    if (page >= 0) from += page * descale.batch + this->row_of_page(row) * descale.row;
    cp_async_4(to, from, page >= 0 ? 4 : 0);
  }

  const uint32_t k_descale_, v_descale_;  // of the first stage
  int head_ = 0;
};

// The power of two that a row of bf16 queries is multiplied by, for f16 to hold it: its largest magnitude `top` is then
// in [2^14, 2^15), and numbers down to 2^-31 of that stay exact. Also the inverse.
struct QueryScale {
  float factor, inverse;

  CUTE_DEVICE explicit QueryScale(float top) {
    constexpr uint32_t kMantissa = 23, kLeast = 20, kSum = 2 * 127 + 14;  // kLeast: both are normal numbers
    const uint32_t exponent = max(__float_as_uint(top) >> kMantissa, kLeast);
    factor = __uint_as_float((kSum - exponent) << kMantissa);
    inverse = __uint_as_float((2 * 127 + exponent - kSum) << kMantissa);
  }
};

// Makes queries in shared memory operand A of WidenedKeys, and writes what their products are to be multiplied by. All
// threads of a CTA take part.
template <KernelConfig C, class Element>
CUTE_DEVICE void prepare_queries(Element* shared, float (&factors)[C.block_m]) {
  constexpr int kAcross = C.head_dim / kVector;  // vectors of a row, each of a lane
  static_assert(kAcross <= 32 && C.block_m * kAcross % 32 == 0, "warps have whole rows");
  using Floats = cutlass::Array<float, kVector>;
  using Halves = cutlass::AlignedArray<cutlass::half_t, kVector>;
  CUTE_NO_UNROLL
  for (int i = threadIdx.x; i < C.block_m * kAcross; i += C.threads()) {
    const int row = i / kAcross, col = i % kAcross * kVector;
    auto* const at = reinterpret_cast<Halves*>(shared + SharedLayout<C.block_m, C.head_dim>{}(row, col));
    Halves halves = *at;
    float inverse = 1.f;
    if constexpr (C.dtype == DType::BF16) {
      Floats x = cutlass::NumericArrayConverter<float, Element, kVector>{}(
          *reinterpret_cast<const cutlass::Array<Element, kVector>*>(&halves));
      float top = 0.f;
      CUTE_UNROLL
      for (int e = 0; e < kVector; ++e) top = fmaxf(top, fabsf(x[e]));
      CUTE_UNROLL
      for (int apart = 1; apart < kAcross; apart *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, apart));
      const QueryScale scale(top);
      CUTE_UNROLL
      for (int e = 0; e < kVector; ++e) x[e] *= scale.factor;
      const auto rounded = cutlass::NumericArrayConverter<cutlass::half_t, float, kVector>{}(x);
      halves = reinterpret_cast<const Halves&>(rounded);
      inverse = scale.inverse;
    }
    // Of 16 columns, words 0, 2, 4 and 6 come first, then 1, 3, 5 and 7: a neighbour has half of each.
    auto* const words = reinterpret_cast<uint32_t*>(&halves);
    const bool is_second = i % 2 != 0;
    const uint32_t even[2] = {words[0], words[2]}, odd[2] = {words[1], words[3]};
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) {
      const uint32_t given = __shfl_xor_sync(0xffffffff, is_second ? even[j] : odd[j], 1);
      words[j] = is_second ? given : even[j];
      words[j + 2] = is_second ? odd[j] : given;
    }
    *at = halves;
    if (col == 0) factors[row] = inverse;
  }
}

// The descales of a split for one thread: factors of its scores, weights and outputs. Weights times descales of rows
// are relative to a power of two, so that f16 holds them.
template <int kRows>
class Descaling {
 public:
  CUTE_DEVICE Descaling(const DecodeParams& p, int b, int head)
      : k_of_rows_(p.cache.k.each), v_of_rows_(p.cache.v.each) {
    k_ = of_head(p.cache.k, b, head);
    v_ = of_head(p.cache.v, b, head);
  }

  // Row r's products are to be multiplied by this, too.
  CUTE_DEVICE void begin_row(int r, float factor) { row_factor_[r] = factor * k_; }

  // Products (rows,columns) become those of the numbers that the cache stands for. `descales`: of the tile's keys from
  // this thread's first column on.
  template <class Scores>
  CUTE_DEVICE void scale_scores(Scores&& scores, const float* descales) const {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) scores(r, c) *= row_factor_[r];
    }
    if (k_of_rows_) scale(scores, 0, size<1>(scores), descales, 1.f);
  }

  // Call before weights of a tile with these descales of values. Outputs so far get the tile's unit if that is larger.
  template <class Output>
  CUTE_DEVICE void begin_tile(Output&& output, const float* descales, int keys) {
    if (!v_of_rows_) return;
    float top = 0.f;
    CUTE_UNROLL
    for (int j = 0; j < keys; j += 8) {
      const float2 pair = *reinterpret_cast<const float2*>(descales + j);
      top = fmaxf(top, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
    const float unit = __uint_as_float(__float_as_uint(quad_max(top)) & kExponent);
    if (unit <= unit_) return;  // the same in all threads of a team
    const float factor = unit_ / unit;
    CUTE_UNROLL
    for (int i = 0; i < size(output); ++i) output(i) *= factor;
    unit_ = unit;
    inverse_ = 1.f / unit;
  }

  // Columns [first, last) of weights (rows,columns) times their values' descales.
  template <class Weights>
  CUTE_DEVICE void scale_weights(Weights&& weights, int first, int last, const float* descales) const {
    if (v_of_rows_) scale(weights, first, last, descales, inverse_);
  }

  // The factor of outputs.
  CUTE_DEVICE float of_outputs() const { return v_of_rows_ ? unit_ : v_; }

 private:
  static constexpr uint32_t kExponent = 0x7f800000;

  CUTE_DEVICE static float of_head(const Descale& descale, int b, int head) {
    return descale.ptr == nullptr || descale.each ? 1.f : descale.ptr[b * descale.batch + head * descale.head];
  }

  template <class Scores>
  CUTE_DEVICE static void scale(Scores&& scores, int first, int last, const float* descales, float factor) {
    CUTE_UNROLL
    for (int c = first; c < last; c += 2) {
      const float2 pair = *reinterpret_cast<const float2*>(descales + column_offset(c));
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) scores(r, c) *= pair.x * factor, scores(r, c + 1) *= pair.y * factor;
    }
  }

  bool k_of_rows_, v_of_rows_;
  float k_, v_;  // of the head
  float row_factor_[kRows];
  float unit_ = 0x1p-100f, inverse_ = 0x1p100f;
};

}  // namespace flash_cute::decode
