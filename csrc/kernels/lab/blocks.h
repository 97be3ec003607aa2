// Blocks of Q, K, V and O between global and shared memory, and how ldmatrix reads them.
#pragma once

#include "core/problem.h"
#include "kernels/ampere/mma.h"

namespace flash_cute::lab {

using namespace cute;
using ampere::kVector;
using ampere::Side;

// A block in shared memory: rows of kCols elements of 16 bits, one after the other.
template <int kCols, bool kSwizzled>
struct BlockLayout {
  static constexpr int kVectors = kCols / kVector;  // of a row
  static constexpr int kRowBytes = kCols * 2;

  // Bytes from the block's beginning. Swizzled, eight rows of one column lie in different banks.
  static constexpr CUTE_HOST_DEVICE uint32_t at(int row, int col) {
    const int vector = col / kVector;
    return row * kRowBytes + (kSwizzled ? vector ^ row % 8 : vector) * 16 + col % kVector * 2;
  }
};

// Copies the blocks of kRows rows of one head into the same shared memory, one after the other, with all threads.
template <class Element, int kThreads, int kRows, int kCols, bool kSwizzled, bool kAsync>
class BlockCopy {
  using Shared = BlockLayout<kCols, kSwizzled>;
  static constexpr int kDown = kThreads / Shared::kVectors;  // rows at once
  static_assert(kRows % kDown == 0 && kDown % 8 == 0, "every thread has as many vectors, all with the same swizzle");

 public:
  CUTE_DEVICE BlockCopy(const TensorView& m, int batch, int head, int first_row, Element* shared)
      : stride_(m.row),
        shared_(ampere::pin(cast_smem_ptr_to_uint(shared) + Shared::at(row(), col()))),
        global_(static_cast<const Element*>(m.ptr) + batch * m.batch + head * m.head + (first_row + row()) * m.row +
                col()) {}

  // Starts the copy of a block and goes on to the next one. It has landed after arrive().
  CUTE_DEVICE void load() {
    if constexpr (kAsync) {
      CUTE_UNROLL
      for (int i = 0; i < kRows / kDown; ++i) {
        ampere::cp_async_16(shared_ + i * kDown * Shared::kRowBytes, global_, sizeof(uint128_t));
        global_ += kDown * stride_;
      }
    } else {
      constexpr int kAtOnce = std::min(8, kRows / kDown);  // vectors on their way in registers
      CUTE_UNROLL
      for (int first = 0; first < kRows / kDown; first += kAtOnce) {
        uint4 vectors[kAtOnce];
        CUTE_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          vectors[i] = *reinterpret_cast<const uint4*>(global_);
          global_ += kDown * stride_;
        }
        CUTE_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          store(shared_ + (first + i) * kDown * Shared::kRowBytes, vectors[i]);
        }
      }
    }
  }

 private:
  static CUTE_DEVICE void store(uint32_t to, const uint4& vector) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(vector.x), "r"(vector.y), "r"(vector.z),
                 "r"(vector.w)
                 : "memory");
  }
  static CUTE_DEVICE int row() { return threadIdx.x / Shared::kVectors; }
  static CUTE_DEVICE int col() { return threadIdx.x % Shared::kVectors * kVector; }

  int64_t stride_;
  uint32_t shared_;  // this thread's first vector of the block
  const Element* global_;
};

// After this barrier the loads of all threads of the CTA are visible to all, and none still reads earlier data.
template <bool kAsync>
CUTE_DEVICE void arrive() {
  if constexpr (kAsync) cp_async_wait<0>();
  __syncthreads();
}

// One operand of a product in a shared block, (kOuter,K) in pieces of 16 x 16: the block's rows are the outer
// dimension, of which this warp has kRows, or K if kTransposed.
//
// A lane reads every piece from one address: rows add a constant, columns XOR one, swizzled or not.
template <Side kSide, bool kTransposed, class Element_, int kRows, int kCols, bool kSwizzled>
struct BlockOperand {
  using Element = Element_;
  using Shared = BlockLayout<kCols, kSwizzled>;
  static constexpr int kPieces = (kTransposed ? kCols : kRows) / 16;
  static constexpr int kSteps = (kTransposed ? kRows : kCols) / 16;

  uint32_t first;  // shared address of this lane's vector of the first piece

  CUTE_DEVICE BlockOperand(const Element* block, int first_row) {
    const auto [row, col] = ampere::lane_place<kSide, kTransposed>();
    first = ampere::pin(cast_smem_ptr_to_uint(block) + Shared::at(first_row + row, col));
  }

  // Piece i along the outer dimension at step k, 16 along K.
  CUTE_DEVICE void load(uint32_t* r, int k, int i) const {
    const int row = 16 * (kTransposed ? k : i), col = 16 * (kTransposed ? i : k);
    ampere::ldmatrix<kTransposed>(r, (first ^ (col * 2)) + row * Shared::kRowBytes);
  }
};

// Rounds a warp's rows of outputs (MMA,MMA_M,MMA_N) and writes them, through the shared memory of its rows of Q, which
// no other warp reads.
template <class Element, int kCols, bool kSwizzled, class Accumulator>
CUTE_DEVICE void store_rows(const Accumulator& acc, Element* block, const TensorView& m, int batch, int head,
                            int first_row) {
  using Shared = BlockLayout<kCols, kSwizzled>;
  constexpr int kPieces = decltype(size<1>(acc))::value, kRows = 16 * kPieces, kRowsOfLanes = 32 / Shared::kVectors;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * kRows;
  const uint32_t shared = cast_smem_ptr_to_uint(block);
  Tensor rounded = converted<Element>(acc);
  Tensor words = recast<const uint32_t>(rounded);  // ((1,2),MMA_M,MMA_N)
  CUTE_UNROLL
  for (int i = 0; i < kPieces; ++i) {
    CUTE_UNROLL
    for (int j = 0; j < kCols / 8; ++j) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const uint32_t to = shared + Shared::at(warp_row + 16 * i + 8 * half + lane / 4, 8 * j + lane % 4 * 2);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(words(half, i, j)) : "memory");
      }
    }
  }
  __syncwarp();
  const int row = warp_row + lane / Shared::kVectors, col = lane % Shared::kVectors * kVector;
  auto* to = static_cast<Element*>(m.ptr) + batch * m.batch + head * m.head + (first_row + row) * m.row + col;
  CUTE_UNROLL
  for (int i = 0; i < kRows; i += kRowsOfLanes) {
    uint4 vector;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(vector.x), "=r"(vector.y), "=r"(vector.z), "=r"(vector.w)
                 : "r"(shared + Shared::at(row + i, col)));
    *reinterpret_cast<uint4*>(to + i * m.row) = vector;
  }
}

}  // namespace flash_cute::lab
