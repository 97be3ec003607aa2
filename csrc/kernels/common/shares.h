// How the keys of all sequences are shared out among CTAs, worked out on the device: lengths are known there alone.
//
// A unit is a tile of query rows of one kv head of one sequence: the rows of its query heads, all heads of a query side
// by side. A unit's keys come in blocks, and blocks in grains. Every kv head has as many CTAs, which do the same for
// all heads: rows of all heads, which lie side by side in memory, are then read at about the same time. Grains are
// numbered through all units of a head, and each of its CTAs takes as many grains that follow each other. Where the
// caller asks for parts of his own, a grain is one of them; else a grain is one block, or as few as keep numbers of
// grains below 2^31, and those that a CTA takes of a unit make one part.
#pragma once

#include "kernels/common/cached_seq.h"
#include "kernels/common/tiles.h"

namespace flash_cute {

// The work of one sequence.
struct Grains {
  int tiles;  // of query rows, for each kv head
  int first_block;  // of those that some query sees
  int blocks;
  int size;  // blocks
  int of_unit;  // at least one, so that rows without keys are written too
  int of_head;

  FC_HOST_DEVICE Grains(const DecodeProblem& p, const SeqInfo& seq, int block_m, int block_n) {
    const RowSpan keys = visible_keys(seq, p.fwd.band, 0, seq.q.length);
    tiles = (seq.q.length * p.group.value + block_m - 1) / block_m;
    first_block = keys.first / block_n;
    blocks = keys.first < keys.last ? (keys.last + block_n - 1) / block_n - first_block : 0;
    size = p.grain_blocks;
    if (p.num_splits > 0) size = (blocks + p.num_splits - 1) / p.num_splits;
    if (p.split_size > 0) size = (p.split_size + block_n - 1) / block_n;
    size = detail::at_least(size, 1);
    of_unit = detail::at_least(size == 1 ? blocks : (blocks + size - 1) / size, 1);
    of_head = tiles * of_unit;
  }
};

// Consecutive grains of a head that each of its CTAs takes. Some SMs get more of the memory's bandwidth than others:
// where lengths are known and there is much to read, CTAs beyond those that run at once have small shares, for SMs that
// are done early.
struct Shares {
  static constexpr int kOnePart = 2;  // so few grains of a unit are not worth parts
  static constexpr int kPart = 3;  // about as many take as long as what a part costs beside its grains
  static constexpr int kIdle = 16;  // of so many SMs the memory can do without one

  bool even;  // grains of one unit make one part
  int of_head;  // grains
  int size;  // grains of a CTA
  int first_ctas;  // so many have `size` grains each
  int small = 0;  // grains of the others

  FC_HOST_DEVICE int first_grain(int cta) const {
    return detail::at_most(cta, first_ctas) * size + detail::at_least(cta - first_ctas, 0) * small;
  }

  // Those that the host has foreseen.
  FC_HOST_DEVICE static Shares foreseen(const DecodeProblem& p) {
    const AlikeSequences& alike = p.alike;
    return {p.even_shares(), p.fwd.batch * alike.of_sequence.value, alike.share.value, alike.first_ctas,
            alike.small_share.value};
  }

  // Of `of_head` grains, of which units of the first sequence have `of_unit`: where all sequences are as long, a little
  // larger shares may end where units do, and spare parts; if it is known that they are, `alike`, yet larger ones. If
  // it is not, a unit of two grains may follow one of a single grain.
  FC_HOST_DEVICE static Shares of(const DecodeProblem& p, int of_head, int of_unit, bool alike = false) {
    const bool even = p.even_shares();
    const int least = !even || of_unit > kOnePart ? 1 : alike ? of_unit : kOnePart;
    const int ctas = p.by_ctas_of_head.value;
    const int size = detail::at_least(p.by_ctas_of_head.quotient(of_head + ctas - 1), least);
    if (!even) return {even, of_head, size, ctas};
    int aligned = size;
    if (size < of_unit) {
      const int shares_a_unit = of_unit / size, share = of_unit / shares_a_unit;
      if (share * shares_a_unit == of_unit) aligned = share;
    } else {
      aligned = (size + of_unit - 1) / of_unit * of_unit;
    }
    return {even, of_head, aligned - size <= kPart + (alike ? size / kIdle : 0) ? aligned : size, ctas};
  }
};

// The parts of one unit, and where in the workspace they are. With even shares a CTA has two slots, the first for a
// unit that it goes on with, the second for one that it begins.
struct UnitParts {
  bool even;
  int count;
  int first;  // grain of the unit, numbered through all heads, or with even shares the CTA that takes it

  FC_HOST_DEVICE int slot(int i) const { return !even ? first + i : i == 0 ? 2 * first + 1 : 2 * (first + i); }
};

// A part of a unit's keys.
struct Part {
  SeqInfo seq{SeqSpan{}, SeqSpan{}};
  int b = 0, head_k = 0;
  int row = 0;  // of the sequence's packed rows, the unit's first
  int first = 0, last = 0;  // blocks of keys
  int grains = 0;
  UnitParts all{};  // of the unit
  int index = 0;  // among them
};

// A sequence, and its first grain of a head.
struct Place {
  int b, first;
};

// The parts that a CTA takes, one after the other.
template <int kBlockM, int kBlockN>
class Parts {
 public:
  // `from` is the sequence of the CTA's first grain, or one before it. CTAs of one number are followed by those of the
  // next; each has a head of its own.
  FC_HOST_DEVICE Parts(const DecodeProblem& p, const Shares& shares, int cta, Place from)
      : shares_(shares),
        number_(p.heads_k.quotient(cta)),
        head_(cta - number_ * p.fwd.heads_k),
        place_(from),
        grain_(shares.first_grain(number_)),
        end_(shares.first_grain(number_ + 1)) {}

  // The next part, or one without grains.
  FC_HOST_DEVICE Part next(const DecodeProblem& p) {
    while (grain_ < end_ && place_.b < p.fwd.batch) {
      const SeqInfo seq = cached_seq(p, place_.b);
      const Grains grains(p, seq, kBlockM, kBlockN);
      if (grain_ < place_.first + grains.of_head) return next_of(p, seq, grains);
      place_ = {place_.b + 1, place_.first + grains.of_head};
    }
    return {};
  }

 private:
  // The part that begins with the next grain, one of the sequence's.
  FC_HOST_DEVICE Part next_of(const DecodeProblem& p, const SeqInfo& seq, const Grains& grains) {
    const int unit = quotient(grain_ - place_.first, grains.of_unit, p.alike.of_unit);
    const int first_grain = place_.first + unit * grains.of_unit, at = grain_ - first_grain;
    const int count = shares_.even ? detail::at_most(grains.of_unit - at, end_ - grain_) : 1;
    const int first = grains.first_block + at * grains.size, behind = grains.first_block + grains.blocks;
    grain_ += count;
    Part part{.seq = seq,
              .b = place_.b,
              .head_k = head_,
              .row = unit * kBlockM,
              .first = first,
              .last = detail::at_most(first + count * grains.size, behind),
              .grains = count,
              .all = {false, grains.of_unit, head_ * shares_.of_head + first_grain},
              .index = at};
    if (shares_.even) {
      const int first_cta = cta_of(p, first_grain), last_cta = cta_of(p, first_grain + grains.of_unit - 1);
      part.all = {true, last_cta - first_cta + 1, head_ * p.ctas_of_head + first_cta};
      part.index = number_ - first_cta;
    }
    return part;
  }

  // The CTA of the head that takes a grain.
  FC_HOST_DEVICE int cta_of(const DecodeProblem& p, int grain) const {
    const int of_small = grain - shares_.first_ctas * shares_.size;
    if (of_small < 0) return quotient(grain, shares_.size, p.alike.share);
    return shares_.first_ctas + quotient(of_small, shares_.small, p.alike.small_share);
  }

  // n / value, a multiplication where the host has foreseen the value.
  FC_HOST_DEVICE static int quotient(int n, int value, const Divisor& foreseen) {
    return foreseen.value == value ? foreseen.quotient(n) : n / value;
  }

  Shares shares_;
  int number_;  // of the CTA among those of its head
  int head_;
  Place place_;
  int grain_, end_;
};

}  // namespace flash_cute
