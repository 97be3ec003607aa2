// Operands of products in registers: how many steps of an operand are loaded at once, and when the next ones are.
#pragma once

#include <cute/atom/mma_atom.hpp>

#include "kernels/lab/blocks.h"

namespace flash_cute::lab {

// Operand A, Q: groups of kTiles steps, read again for every product; with kTiles 0 all steps, read once. With kAhead
// the next group is loaded during a group's products, into registers of its own: each product needs all of a step.
template <class Operand, int kTiles, bool kAhead>
class FragmentsA {
  static constexpr bool kStays = kTiles == 0;
  static constexpr int kGroup = kStays ? Operand::kSteps : kTiles;
  static constexpr int kSlots = kStays || !kAhead ? kGroup : 2 * kGroup;

 public:
  CUTE_DEVICE explicit FragmentsA(const Operand& operand) : operand_(operand) {}

  // Before the first product, when the operand is in shared memory.
  CUTE_DEVICE void begin() {
    if constexpr (kStays) load(0);
  }

  // At the beginning of each product, and of each step of it.
  CUTE_DEVICE void begin_product() {
    if constexpr (!kStays && kAhead) load(0);
  }
  CUTE_DEVICE void begin_step(int k) {
    if (kStays || k % kGroup != 0) return;
    const int next = kAhead ? k + kGroup : k;
    if (next < Operand::kSteps) load(next);
  }

  // Step k, (MMA,MMA_M).
  CUTE_DEVICE auto operator()(int k) { return registers_(_, _, k % kSlots); }

 private:
  CUTE_DEVICE void load(int first) {
    Tensor words = recast<uint32_t>(registers_);
    CUTE_UNROLL
    for (int k = first; k < first + kGroup; ++k) {
      CUTE_UNROLL
      for (int i = 0; i < Operand::kPieces; ++i) operand_.load(&words(0, i, k % kSlots), k, i);
    }
  }

  Operand operand_;
  decltype(make_tensor<typename Operand::Element>(
      Shape<Shape<_2, _2, _2>, Int<Operand::kPieces>, Int<kSlots>>{})) registers_;  // (MMA,MMA_M,slot)
};

// Operand B, K or V: groups of kTiles steps, with kTiles 0 all at once. With kAhead a piece of the next group replaces
// a piece as soon as the products of that piece are issued.
template <class Operand, int kTiles, bool kAhead>
class FragmentsB {
  static constexpr int kGroup = kTiles == 0 ? Operand::kSteps : kTiles;

 public:
  static constexpr int kSteps = Operand::kSteps, kPieces = Operand::kPieces;

  CUTE_DEVICE explicit FragmentsB(const Operand& operand) : operand_(operand) {}

  CUTE_DEVICE void begin_product() {
    if constexpr (kAhead) load_group(0);
  }
  CUTE_DEVICE void begin_step(int k) {
    if (!kAhead && k % kGroup == 0) load_group(k);
  }
  CUTE_DEVICE void end_piece(int k, int j) {
    if (kAhead && k + kGroup < kSteps) load(k + kGroup, j);
  }

  // The n-tile n of piece j at step k, (MMA).
  CUTE_DEVICE auto operator()(int k, int j, int n) { return registers_(_, n, j, k % kGroup); }

 private:
  CUTE_DEVICE void load(int k, int j) {
    Tensor words = recast<uint32_t>(registers_);
    operand_.load(&words(0, 0, j, k % kGroup), k, j);
  }
  CUTE_DEVICE void load_group(int first) {
    CUTE_UNROLL
    for (int k = first; k < first + kGroup; ++k) {
      CUTE_UNROLL
      for (int j = 0; j < kPieces; ++j) load(k, j);
    }
  }

  Operand operand_;
  decltype(make_tensor<typename Operand::Element>(
      Shape<Shape<_2, _2>, _2, Int<kPieces>, Int<kGroup>>{})) registers_;  // (MMA,n-tile of a piece,piece,slot)
};

// Operand A, P: `step(k)` computes step k, (MMA,MMA_M), from registers.
template <class Step>
struct ComputedA {
  Step step;
  CUTE_DEVICE void begin_product() {}
  CUTE_DEVICE void begin_step(int) {}
  CUTE_DEVICE auto operator()(int k) { return step(k); }
};
template <class Step>
ComputedA(Step) -> ComputedA<Step>;

// acc += A B^T.
template <class Atom, class Accumulator, class A, class B>
CUTE_DEVICE void product(Accumulator& acc, A&& a, B&& b) {
  constexpr int kSteps = std::remove_cvref_t<B>::kSteps, kPieces = std::remove_cvref_t<B>::kPieces;
  Atom atom;
  a.begin_product();
  b.begin_product();
  CUTE_UNROLL
  for (int k = 0; k < kSteps; ++k) {
    a.begin_step(k);
    b.begin_step(k);
    Tensor rA = a(k);  // (MMA,MMA_M)
    CUTE_UNROLL
    for (int j = 0; j < kPieces; ++j) {
      CUTE_UNROLL
      for (int i = 0; i < 2 * size<1>(rA); ++i) {
        const int m = i / 2, n = (m + i) % 2;  // neighbours share an operand
        cute::gemm(atom, rA(_, m), b(k, j, n), acc(_, m, 2 * j + n));
      }
      b.end_piece(k, j);
    }
  }
}

}  // namespace flash_cute::lab
